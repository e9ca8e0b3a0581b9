//! Rules by which the nodes of a job agree: the generation that all resume from, and the generation that may be confirmed.
//! These are functions of what nodes report; the caller exchanges the reports.
//!
//! ```text
//!   start:  NodeGenerations of every node ──▶ resume_from ──▶ Session::resume on every node
//!   step:   commit ends: prepared here ──▶ prepared on every node ──▶ confirmable ──▶ Session::confirm, if it is this node's
//! ```
//!
//! A node confirms generation g only after g is durable on every node, and writes g + 1 only after it has confirmed g. Nodes
//! that keep these rules therefore differ by one generation at most, and every node still holds the newest generation that
//! anyone has confirmed. A node that lacks this generation has lost its drives' content since: it is refused by name.
//!
//! One case cannot be told apart: a single node has confirmed a generation, and its drives were emptied or restored from an older
//! copy before another node could. All then resume from the generation before it, which is whole.

use offload_api::ids::Generation;
use test_hooks::safeguard::{Safeguard, is_disabled};

/// A generation in a node's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldGeneration {
    /// Number of the generation.
    pub generation: Generation,
    /// Random number that the first rank drew at the start of the processes that committed the generation; all ranks keep it in
    /// the blobs of their commits. Two starts can commit the same generation: one whose last commit not every node completed,
    /// and the one after it. Their tiles may differ.
    pub start: u64,
    /// Whether the store knows that every node has prepared it.
    pub confirmed: bool,
}

/// What one node holds of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeGenerations {
    /// Identity of the run to which the store belongs.
    pub run: Vec<u8>,
    /// Number of the node to which the store belongs.
    pub node: u32,
    /// Number of nodes that commit together.
    pub nodes: u32,
    /// Generations that the store can resume from. Empty for a node without the job.
    pub generations: Vec<HeldGeneration>,
}

/// Why nodes cannot resume together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// A store was made for another number of nodes.
    #[error(
        "the store of node {node} belongs to a run on {stored} node(s), and {nodes} take part: start with {stored}, or {TO_CHECKPOINT}"
    )]
    Nodes {
        /// The node.
        node: u32,
        /// Number of nodes in its store.
        stored: u32,
        /// Number of nodes that take part.
        nodes: u32,
    },
    /// A store belongs to another run.
    #[error(
        "the store of node {node} belongs to another run than the store of node 0: set the devices and the run directory of this run on both, or {TO_CHECKPOINT}"
    )]
    Run {
        /// The node.
        node: u32,
    },
    /// Several nodes have the store of one node, or copies of it.
    #[error(
        "{} all have the store of node {stored}: give each node its own devices and run directory", name(.nodes)
    )]
    Twice {
        /// The nodes.
        nodes: Vec<u32>,
        /// Node to which their stores belong.
        stored: u32,
    },
    /// A node has the store of another node.
    #[error(
        "node {node} has the store of node {stored}: number the nodes as at the run's first start, or set the devices of node {node} to its own"
    )]
    Node {
        /// The node.
        node: u32,
        /// Node to which its store belongs.
        stored: u32,
    },
    /// Nodes lack a generation that was confirmed, so that it was durable on them.
    #[error(
        "{} lost generation {generation}, which {} confirmed; {}: the drives were emptied or restored from an older copy; bring back the newest content, or {TO_CHECKPOINT}", name(.lacking), name(.confirmed_by), missing_on(.lacking, .held)
    )]
    Lost {
        /// The newest confirmed generation.
        generation: Generation,
        /// Nodes whose stores know that it was confirmed.
        confirmed_by: Vec<u32>,
        /// Nodes without it.
        lacking: Vec<u32>,
        /// Generations of the lacking nodes.
        held: Vec<Vec<Generation>>,
    },
}

/// End of the advice in [`Disagreement`]; front ends with other commands replace it.
pub const TO_CHECKPOINT: &str = "resume all nodes from the newest checkpoint with --resume-from STEP (`trainer runs` lists them), or start again with --fresh";

/// Returns the newest generation that every node holds, 0 for a fresh start. `held` has the report of each node, in order.
///
/// # Errors
/// A node has the store of another run or node, or lacks the newest generation that was confirmed.
///
/// # Panics
/// `held` is empty.
pub fn resume_from(held: &[NodeGenerations]) -> Result<Generation, Disagreement> {
    check_identities(held)?;
    let confirmed = held
        .iter()
        .map(NodeGenerations::confirmed)
        .max()
        .expect("a node");
    let common = held[0].generations.iter().filter(|generation| {
        held.iter()
            .all(|node| node.holds(generation.generation, generation.start))
    });
    let common = common.map(|found| found.generation).max();
    let newest = common.unwrap_or(Generation(0));
    if newest < confirmed {
        return Err(lost(held, confirmed));
    }
    Ok(newest)
}

/// Returns the generation that every node may confirm, given the newest generation that each has prepared, or resumed from. A
/// node whose newest generation is a later one waits.
///
/// # Panics
/// `prepared` is empty.
pub fn confirmable(prepared: &[Generation]) -> Generation {
    let chosen = match is_disabled(Safeguard::LeastPrepared) {
        false => prepared.iter().min(),
        true => prepared.iter().max(),
    };
    *chosen.expect("a node")
}

fn check_identities(held: &[NodeGenerations]) -> Result<(), Disagreement> {
    let nodes = held.len() as u32;
    for (node, one) in (0..).zip(held) {
        if one.run != held[0].run {
            return Err(Disagreement::Run { node });
        }
        if one.nodes != nodes {
            return Err(Disagreement::Nodes {
                node,
                stored: one.nodes,
                nodes,
            });
        }
    }
    for (node, one) in (0..).zip(held) {
        let same = (0..).zip(held).filter(|(_, other)| other.node == one.node);
        let same: Vec<u32> = same.map(|(other, _)| other).collect();
        if same.len() > 1 {
            return Err(Disagreement::Twice {
                nodes: same,
                stored: one.node,
            });
        }
        if one.node != node {
            return Err(Disagreement::Node {
                node,
                stored: one.node,
            });
        }
    }
    Ok(())
}

/// Names the nodes that lack the confirmed generation.
fn lost(held: &[NodeGenerations], generation: Generation) -> Disagreement {
    let of = |condition: &dyn Fn(&NodeGenerations) -> bool| -> Vec<u32> {
        let found = held.iter().filter(|node| condition(node));
        found.map(|node| node.node).collect()
    };
    let records = held.iter().flat_map(|node| &node.generations);
    // Two starts may have committed this number: the confirmed record is the right one.
    let record = (records.filter(|held| held.generation == generation))
        .max_by_key(|held| held.confirmed)
        .copied();
    let lacks =
        |node: &NodeGenerations| !record.is_some_and(|record| node.holds(generation, record.start));
    let lacking = held.iter().filter(|node| lacks(node));
    let numbers = |node: &NodeGenerations| {
        node.generations
            .iter()
            .map(|held| held.generation)
            .collect()
    };
    Disagreement::Lost {
        generation,
        confirmed_by: of(&|node| node.confirmed() == generation && !lacks(node)),
        lacking: of(&lacks),
        held: lacking.map(numbers).collect(),
    }
}

impl NodeGenerations {
    /// Returns the newest generation that every node had prepared once, 0 if none is known. A generation that is only prepared
    /// proves that the one before it was confirmed.
    fn confirmed(&self) -> Generation {
        let known = self.generations.iter().map(|held| match held.confirmed {
            true => held.generation,
            false => Generation(held.generation.0.saturating_sub(1)),
        });
        known.max().unwrap_or(Generation(0))
    }

    fn holds(&self, generation: Generation, start: u64) -> bool {
        self.generations.iter().any(|held| {
            let same_start = held.start == start || is_disabled(Safeguard::SameStart);
            held.generation == generation && same_start
        })
    }

    /// Encodes the report for the other nodes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.node.to_le_bytes());
        bytes.extend(self.nodes.to_le_bytes());
        bytes.extend((self.generations.len() as u32).to_le_bytes());
        for held in &self.generations {
            bytes.extend(held.generation.0.to_le_bytes());
            bytes.extend(held.start.to_le_bytes());
            bytes.push(u8::from(held.confirmed));
        }
        bytes.extend(&self.run);
        bytes
    }

    /// Decodes the report of another node; `None` if it is not one.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let node = u32::from_le_bytes(split_bytes(&mut bytes)?);
        let nodes = u32::from_le_bytes(split_bytes(&mut bytes)?);
        let count = u32::from_le_bytes(split_bytes(&mut bytes)?);
        let mut generations = Vec::new();
        for _ in 0..count {
            generations.push(HeldGeneration {
                generation: Generation(u64::from_le_bytes(split_bytes(&mut bytes)?)),
                start: u64::from_le_bytes(split_bytes(&mut bytes)?),
                confirmed: match split_bytes(&mut bytes)? {
                    [0] => false,
                    [1] => true,
                    _ => return None,
                },
            });
        }
        Some(Self {
            run: bytes.to_vec(),
            node,
            nodes,
            generations,
        })
    }
}

fn split_bytes<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

/// Returns "node 1" or "nodes 1, 2".
fn name(nodes: &[u32]) -> String {
    let list: Vec<String> = nodes.iter().map(u32::to_string).collect();
    match list.as_slice() {
        [one] => format!("node {one}"),
        _ => format!("nodes {}", list.join(", ")),
    }
}

/// Returns the generations that each of the lacking nodes holds.
fn missing_on(lacking: &[u32], held: &[Vec<Generation>]) -> String {
    let told = lacking.iter().zip(held).map(|(node, numbers)| {
        let numbers: Vec<String> = numbers.iter().map(Generation::to_string).collect();
        match numbers.is_empty() {
            true => format!("node {node} holds none"),
            false => format!("node {node} holds {}", numbers.join(" and ")),
        }
    });
    told.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &[u8] = b"run";

    fn generation(number: u64, start: u64, confirmed: bool) -> HeldGeneration {
        HeldGeneration {
            generation: Generation(number),
            start,
            confirmed,
        }
    }

    /// Prepared and confirmed generations of one start.
    fn prepared(number: u64) -> HeldGeneration {
        generation(number, 1, false)
    }

    fn confirmed(number: u64) -> HeldGeneration {
        generation(number, 1, true)
    }

    fn nodes<const N: usize>(generations: [&[HeldGeneration]; N]) -> Vec<NodeGenerations> {
        let held = (0..)
            .zip(generations)
            .map(|(node, generations)| NodeGenerations {
                run: RUN.to_vec(),
                node,
                nodes: N as u32,
                generations: generations.to_vec(),
            });
        held.collect()
    }

    fn resumed<const N: usize>(generations: [&[HeldGeneration]; N]) -> u64 {
        resume_from(&nodes(generations)).unwrap().0
    }

    fn refusal<const N: usize>(generations: [&[HeldGeneration]; N]) -> String {
        resume_from(&nodes(generations)).unwrap_err().to_string()
    }

    #[test]
    fn nodes_without_generations_start_from_nothing() {
        assert_eq!(resumed([&[], &[]]), 0);
    }

    #[test]
    fn a_first_commit_that_some_node_lacks_is_begun_again() {
        assert_eq!(resumed([&[prepared(1)], &[], &[prepared(1)]]), 0);
        assert_eq!(resumed([&[prepared(1)], &[prepared(1)]]), 1);
    }

    #[test]
    fn the_newest_generation_of_every_node_is_resumed() {
        let (three, four) = (confirmed(3), prepared(4));
        assert_eq!(resumed([&[three], &[three]]), 3);
        assert_eq!(resumed([&[three, four], &[three]]), 3);
        assert_eq!(resumed([&[three, four], &[three, four]]), 4);
        // One has confirmed it, and another has already prepared the next one.
        assert_eq!(resumed([&[confirmed(4)], &[three, four]]), 4);
        let next = [confirmed(4), prepared(5)];
        assert_eq!(resumed([&next, &[three, four], &[confirmed(4)]]), 4);
    }

    #[test]
    fn generations_of_two_starts_are_not_mixed() {
        let three = confirmed(3);
        let [first, second] = [generation(4, 1, false), generation(4, 2, false)];
        assert_eq!(resumed([&[three, first], &[three, second]]), 3);
        let confirmed = generation(4, 2, true);
        let told = refusal([&[three, first], &[confirmed]]);
        assert!(told.starts_with(
            "node 0 lost generation 4, which node 1 confirmed; node 0 holds 3 and 4:"
        ));
    }

    #[test]
    fn a_node_that_lacks_a_confirmed_generation_is_refused() {
        // Restored from an older copy.
        let told = refusal([
            &[confirmed(7)],
            &[confirmed(5)],
            &[confirmed(7), prepared(8)],
        ]);
        assert!(
            told.starts_with(
                "node 1 lost generation 7, which nodes 0, 2 confirmed; node 1 holds 5:"
            ),
            "{told}"
        );
        assert!(told.contains("--resume-from STEP"), "{told}");
        // Wiped.
        let told = refusal([&[], &[confirmed(1)], &[]]);
        assert!(
            told.starts_with(
                "nodes 0, 2 lost generation 1, which node 1 confirmed; node 0 holds none, node 2 holds none:"
            ),
            "{told}"
        );
    }

    #[test]
    fn a_prepared_generation_proves_that_the_one_before_was_confirmed() {
        let told = refusal([&[prepared(3), prepared(4)], &[prepared(2)]]);
        assert!(
            told.starts_with("node 1 lost generation 3, which node 0 confirmed; node 1 holds 2:"),
            "{told}"
        );
    }

    #[test]
    fn a_store_of_another_run_is_refused() {
        let mut held = nodes([&[confirmed(3)], &[confirmed(3)]]);
        held[1].run = b"other".to_vec();
        let told = resume_from(&held).unwrap_err();
        assert_eq!(told, Disagreement::Run { node: 1 });
        assert!(told.to_string().starts_with("the store of node 1 belongs"));
    }

    #[test]
    fn another_number_of_nodes_is_refused() {
        let mut held = nodes([&[confirmed(3)], &[confirmed(3)], &[confirmed(3)]]);
        held.pop();
        let told = resume_from(&held).unwrap_err().to_string();
        assert!(
            told.starts_with("the store of node 0 belongs to a run on 3 node(s), and 2 take part"),
            "{told}"
        );
    }

    #[test]
    fn a_node_that_takes_part_twice_is_refused() {
        let mut held = nodes([&[confirmed(3)], &[confirmed(3)], &[confirmed(3)]]);
        held[1].node = 2;
        let told = resume_from(&held).unwrap_err().to_string();
        assert!(
            told.starts_with("nodes 1, 2 all have the store of node 2"),
            "{told}"
        );
    }

    #[test]
    fn nodes_in_another_order_are_refused() {
        let mut held = nodes([&[confirmed(3)], &[confirmed(3)]]);
        held[0].node = 1;
        held[1].node = 0;
        let told = resume_from(&held).unwrap_err();
        assert_eq!(told, Disagreement::Node { node: 0, stored: 1 });
    }

    #[test]
    fn only_what_every_node_has_prepared_is_confirmed() {
        let prepared = [5, 4, 5].map(Generation);
        assert_eq!(confirmable(&prepared), Generation(4));
        assert_eq!(confirmable(&[Generation(5)]), Generation(5));
    }

    #[test]
    fn a_report_that_is_sent_arrives_unchanged() {
        let held = &nodes([&[], &[confirmed(3), generation(4, u64::MAX, false)]])[1];
        let bytes = held.to_bytes();
        assert_eq!(NodeGenerations::from_bytes(&bytes).as_ref(), Some(held));
        for cut in 0..bytes.len() - RUN.len() {
            assert_eq!(
                NodeGenerations::from_bytes(&bytes[..cut]),
                None,
                "{cut} bytes"
            );
        }
    }
}
