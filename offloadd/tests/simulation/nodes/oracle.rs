//! What the processes were told, and the bytes that each generation must have.

use std::collections::{BTreeMap, BTreeSet};

use offload_client::nodes::NodeGenerations;

use super::Counts;

/// Seeds of the bytes of a node's tiles; `None` for a tile that was never written.
pub(super) type Tiles = Vec<Option<u64>>;

#[derive(Default)]
pub(super) struct Oracle {
    /// Tiles of each generation that a node began to commit, by node, generation and start.
    begun: BTreeMap<(usize, u64, u64), Tiles>,
    /// Newest generation that a process was told is confirmed.
    confirmed: u64,
    /// Newest generation that a process was told is prepared on its node.
    prepared: u64,
    /// The last start that chose a generation, and the generation.
    chosen: (u64, u64),
}

impl Oracle {
    pub(super) fn begin(&mut self, node: usize, generation: u64, start: u64, tiles: &Tiles) {
        let before = (self.begun).insert((node, generation, start), tiles.clone());
        assert_eq!(before, None, "a start commits a generation once");
    }

    pub(super) fn is_prepared(&mut self, generation: u64) {
        self.prepared = self.prepared.max(generation);
    }

    pub(super) fn is_confirmed(&mut self, generation: u64) {
        self.confirmed = self.confirmed.max(generation);
    }

    pub(super) fn newest_confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Whether a node of this start has chosen the generation to resume from.
    pub(super) fn has_chosen(&self, start: u64) -> bool {
        self.chosen.0 == start
    }

    /// Checks the generation that a node of `start` resumes from. All nodes of a start must choose the same one. If the drives
    /// of a node were `changed`, it may be one older than otherwise: perhaps that node alone knew of the confirmation.
    pub(super) fn choose(
        &mut self,
        start: u64,
        generation: u64,
        held: &[NodeGenerations],
        changed: bool,
        counts: &mut Counts,
    ) {
        assert!(start >= self.chosen.0, "an old start chooses");
        if start == self.chosen.0 {
            assert_eq!(generation, self.chosen.1, "nodes choose differently");
            return;
        }
        self.chosen = (start, generation);
        let allowed = generation + u64::from(changed);
        assert!(
            allowed >= self.confirmed,
            "generation {} was confirmed, nodes resume from {generation}: {held:?}",
            self.confirmed
        );
        assert!(
            allowed + 1 >= self.prepared,
            "generation {} was prepared, nodes resume from {generation}: {held:?}",
            self.prepared
        );
        let records = held.iter().flat_map(|node| &node.generations);
        let chosen = records.filter(|held| held.generation.0 == generation);
        let starts: BTreeSet<u64> = chosen.map(|held| held.start).collect();
        assert!(
            starts.len() <= 1,
            "generation {generation} is a mixture of the starts {starts:?}: {held:?}"
        );
        if generation < self.prepared {
            *counts.entry("steps repeated").or_default() += 1;
            if generation == 0 {
                *counts.entry("first commits begun again").or_default() += 1;
            }
        }
        (self.prepared, self.confirmed) = (generation, generation);
    }

    /// Returns the tiles that the start `by` committed on a node.
    pub(super) fn tiles(&self, node: usize, generation: u64, by: u64, count: usize) -> Tiles {
        match generation {
            0 => vec![None; count],
            _ => self.begun[&(node, generation, by)].clone(),
        }
    }
}
