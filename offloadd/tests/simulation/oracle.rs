//! The oracle: knows beside the daemon what must be readable of a job, namely the contents of every attempt at a generation, which of them was
//! acknowledged, and which may be offered after a crash.

use std::collections::BTreeMap;

use offload_api::fault::FaultKind;
use offload_api::ids::Rank;
use offloadd::core::JobRecord;
use offloadd::store::definition::{Durability, JobName};
use test_hooks::random::SimRandom;

use super::trouble::Trouble;
use super::world::{Process, World, content, job};

/// One attempt at a generation: the seed of each tile's bytes, and the blobs, which are different in every attempt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Snapshot {
    pub(super) tiles: Vec<Option<u64>>,
    pub(super) blobs: Vec<(Rank, Vec<u8>)>,
}

/// The oracle's knowledge of a job.
pub(super) struct KnownJob {
    pub(super) name: JobName,
    pub(super) tile_count: u32,
    pub(super) nodes: u32,
    pub(super) durability: Durability,
    pub(super) defined: bool,
    /// Whether the job's catalog entry may be gone, so that this daemon opens the job no more.
    pub(super) dropping: bool,
    /// Possible contents of each generation: one per attempt to commit it.
    pub(super) attempts: BTreeMap<u64, Vec<Snapshot>>,
    /// Newest acknowledged generation; the next field says whether its confirmation was acknowledged.
    pub(super) acknowledged: u64,
    pub(super) confirmed: u64,
}

impl KnownJob {
    /// Makes a job that is not defined yet.
    pub(super) fn random(name: &str, random: &mut SimRandom) -> Self {
        // A job written in place has no generation before, and so waits for no other node.
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

    /// Records that the job was perhaps deleted: its content may still be offered.
    pub(super) fn discard_unreadable(&mut self) {
        self.defined = false;
        self.acknowledged = 0;
        self.confirmed = 0;
    }

    /// Begins the next incarnation of the daemon. `named`: whether the loss of a generation was reported.
    pub(super) fn outlive(&mut self, named: bool) {
        self.dropping = false;
        if named {
            self.acknowledged = 0;
            self.confirmed = 0;
        }
    }

    /// Chooses one of the offered generations to resume, and finds the attempt that it is: the newest, or while it is not confirmed perhaps the one
    /// before, as if another node did not have it.
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
            // A lost mark has the same effect as one that was not written yet.
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

    /// Records a resume: later generations are discarded, and this one counts as confirmed.
    pub(super) fn resumed_from(&mut self, generation: u64, trouble: Trouble) {
        if !trouble.is_silent() {
            self.attempts.retain(|number, _| *number <= generation);
        }
        self.acknowledged = generation;
        self.confirmed = generation;
    }

    /// Reads all tiles of the resumed generation. Returns false if a device failed and reported it.
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
