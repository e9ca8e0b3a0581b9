//! What must be readable of a job, known beside the daemon: the contents of every attempt at a generation, which of them
//! was acknowledged, and what may be offered after a crash.

use std::collections::BTreeMap;

use offload_api::fault::FaultKind;
use offload_api::ids::Rank;
use offloadd::core::JobRecord;
use offloadd::store::definition::{Durability, JobName};
use test_hooks::random::SimRandom;

use super::trouble::Trouble;
use super::world::{Process, World, content, job};

/// One attempt at a generation: for each tile the seed of its bytes, and the blobs, which no two attempts share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Snapshot {
    pub(super) tiles: Vec<Option<u64>>,
    pub(super) blobs: Vec<(Rank, Vec<u8>)>,
}

/// What the oracle knows of a job.
pub(super) struct Known {
    pub(super) name: JobName,
    pub(super) tile_count: u32,
    pub(super) nodes: u32,
    pub(super) durability: Durability,
    pub(super) defined: bool,
    /// Its catalog entry may be gone, and this daemon opens it no more.
    pub(super) dropping: bool,
    /// What each generation may hold: one an attempt to commit it.
    pub(super) attempts: BTreeMap<u64, Vec<Snapshot>>,
    /// Newest acknowledged, and whether its confirmation was.
    pub(super) acknowledged: u64,
    pub(super) confirmed: u64,
}

impl Known {
    /// A job nobody has defined yet.
    pub(super) fn random(name: &str, random: &mut SimRandom) -> Self {
        // In place there is no generation before, so no other node to wait for.
        let (durability, nodes) = match random.one_in(5) {
            true => (Durability::None, 1),
            false => (Durability::Committed, 1 + random.below(2) as u32),
        };
        Self {
            name: job(name),
            tile_count: 3 + random.below(6) as u32,
            nodes,
            durability,
            defined: false,
            dropping: false,
            attempts: BTreeMap::new(),
            acknowledged: 0,
            confirmed: 0,
        }
    }

    /// It may be dropped or not: what it held may still be offered.
    pub(super) fn discard_unreadable(&mut self) {
        self.defined = false;
        self.acknowledged = 0;
        self.confirmed = 0;
    }

    /// Another life of the daemon begins. `named`: it was said that a generation was lost.
    pub(super) fn outlive(&mut self, named: bool) {
        self.dropping = false;
        if named {
            self.acknowledged = 0;
            self.confirmed = 0;
        }
    }

    /// The generation to go on from, one of those the store offers, and the attempt that it is: the newest, or while it is
    /// not confirmed perhaps the one before it, as if another node did not have it.
    pub(super) fn choose(
        &self,
        record: &JobRecord,
        trouble: Trouble,
        random: &mut SimRandom,
    ) -> (u64, Option<Snapshot>) {
        let offered: Vec<u64> = record.generations.iter().map(|g| g.generation.0).collect();
        let newest = offered.last().copied().unwrap_or(0);
        assert!(
            newest >= self.acknowledged,
            "generation {} was acknowledged, the store offers {offered:?}, after {trouble:?}",
            self.acknowledged
        );
        let mut chosen = (newest, None);
        for generation in &record.generations {
            let number = generation.generation.0;
            let attempts = self.attempts.get(&number);
            let attempts = attempts.expect("a generation nobody began");
            let attempt = attempts.iter().find(|a| a.blobs == *generation.blobs);
            let attempt = attempt.expect("blobs nobody brought, or of several attempts");
            // A mark that was lost is as if it had not been written yet.
            assert!(generation.confirmed || self.confirmed < number || trouble.is_silent());
            chosen = (number, Some(attempt.clone()));
        }
        let unconfirmed = record.generations.last().is_some_and(|g| !g.confirmed);
        if unconfirmed && random.one_in(2) {
            let before = newest - 1;
            if before == 0 {
                return (0, None);
            }
            let at = offered.iter().position(|number| *number == before);
            if trouble.is_silent() && at.is_none() {
                return chosen;
            }
            let blobs = &record.generations[at.expect("the one before is kept")].blobs;
            let attempt = (self.attempts[&before].iter()).find(|a| a.blobs == **blobs);
            return (before, attempt.cloned());
        }
        chosen
    }

    /// Later ones are given up for good, and this one counts as everywhere.
    pub(super) fn gone_on_from(&mut self, generation: u64, trouble: Trouble) {
        if !trouble.is_silent() {
            self.attempts.retain(|number, _| *number <= generation);
        }
        self.acknowledged = generation;
        self.confirmed = generation;
    }

    /// Reads all tiles of what was gone on from. False: a device failed, and said so.
    pub(super) fn is_whole(
        &self,
        world: &mut World,
        process: Process,
        tiles: &[Option<u64>],
    ) -> bool {
        for (tile, seed) in tiles.iter().enumerate() {
            match (seed, world.read(process, tile as u32)) {
                (Some(seed), Ok(bytes)) => assert!(
                    bytes == content(*seed, bytes.len()),
                    "tile {tile} is not what was committed"
                ),
                (None, Err(FaultKind::NeverWritten)) => {}
                (Some(_), Err(FaultKind::Damaged)) if world.trouble.is_silent() => {}
                (_, Err(kind)) if world.trouble.explains(kind) => return false,
                (seed, read) => panic!("tile {tile}, which holds {seed:?}: {:?}", read.err()),
            }
        }
        true
    }
}
