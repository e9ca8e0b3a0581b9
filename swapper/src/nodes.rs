//! A job whose tiles are divided among several nodes, each with a daemon and a store of its own.
//!
//! ```text
//!   open:    each rank: what its node's store holds ──▶ all ranks ──▶ resume_from: one generation for all
//!   commit:  prepared on this node ──▶ the thread of `Confirmer` tells all ──▶ prepared on every node ──▶ confirm here
//! ```
//!
//! `offload_client::nodes` has the rules. A commit ends for the core when it is confirmed.

use std::error::Error;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use offload_client::nodes::{HeldGeneration, NodeGenerations, confirmable, resume_from};
use offload_client::{Generation, JobRecord};

use crate::SwapperError;

/// Bytes before each blob of a commit: the number of the start that committed it.
const START_BYTES: usize = 8;

/// Purposes of messages, for errors.
const COMPARING: &str = "comparing the nodes' stores";
const CONFIRMING: &str = "confirming a commit";

/// Messages between the ranks of all nodes.
pub trait Exchange: Send + Sync {
    /// Gives `own` to all ranks and returns each rank's message, in the order of ranks. One thread at a time calls it, in the
    /// same order on every rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>;

    /// Tells the other ranks that this one has failed, and why: all their calls end soon.
    fn give_up(&self, reason: &str);
}

/// The nodes of a job.
#[derive(Clone)]
pub struct Nodes {
    /// Identity of the run.
    pub run: Vec<u8>,
    /// Number of this node, from 0.
    pub node: u32,
    /// First rank of each node.
    pub first_ranks: Vec<u32>,
    /// Connection to the other ranks.
    pub exchange: Arc<dyn Exchange>,
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes")
            .field("node", &self.node)
            .field("first_ranks", &self.first_ranks)
            .finish_non_exhaustive()
    }
}

/// Result of an agreement at the start.
pub(crate) struct Agreement {
    /// Generation that all nodes resume from; 0 for a fresh start.
    pub(crate) generation: Generation,
    /// Number of this start, the same on every rank.
    pub(crate) start: u64,
}

impl Nodes {
    /// Number of nodes.
    pub(crate) fn count(&self) -> u32 {
        self.first_ranks.len() as u32
    }

    /// Agrees with the other nodes on the generation to resume from. `record` is this node's record of the job.
    pub(crate) fn agree(&self, record: Option<&JobRecord>) -> Result<Agreement, SwapperError> {
        let held = NodeGenerations {
            run: self.run.clone(),
            node: self.node,
            nodes: record.map_or(self.count(), |record| record.nodes),
            generations: record.map_or_else(Vec::new, generations),
        };
        // RandomState is seeded by the kernel's random number generator.
        let own_start = RandomState::new().build_hasher().finish();
        let mut own = own_start.to_le_bytes().to_vec();
        own.extend(held.to_bytes());
        let all = self.exchange(COMPARING, &own)?;
        let told = |rank: u32| {
            let (start, held) = all.get(rank as usize)?.split_first_chunk()?;
            Some((
                u64::from_le_bytes(*start),
                NodeGenerations::from_bytes(held)?,
            ))
        };
        let told: Option<Vec<_>> = self.first_ranks.iter().map(|&rank| told(rank)).collect();
        let told = told.ok_or_else(|| foreign_message(COMPARING))?;
        let start = told[0].0;
        let held: Vec<NodeGenerations> = told.into_iter().map(|(_, held)| held).collect();
        let generation = resume_from(&held)?;
        Ok(Agreement { generation, start })
    }

    /// Tells the other ranks that `generation` is prepared here. Returns the generation that all nodes may confirm.
    fn confirmable(&self, generation: Generation) -> Result<Generation, SwapperError> {
        let all = self.exchange(CONFIRMING, &generation.0.to_le_bytes())?;
        let number = |message: &Vec<u8>| {
            let bytes = message[..].try_into().ok()?;
            Some(Generation(u64::from_le_bytes(bytes)))
        };
        let prepared: Option<Vec<Generation>> = all.iter().map(number).collect();
        let prepared = prepared.ok_or_else(|| foreign_message(CONFIRMING))?;
        Ok(confirmable(&prepared))
    }

    fn exchange(&self, doing: &'static str, own: &[u8]) -> Result<Vec<Vec<u8>>, SwapperError> {
        let all = self.exchange.exchange(own);
        all.map_err(|source| SwapperError::OtherNodes { doing, source })
    }
}

fn foreign_message(doing: &'static str) -> SwapperError {
    SwapperError::OtherNodes {
        doing,
        source: "a rank sent a message that does not fit this program's version: start the same program on all nodes".into(),
    }
}

fn generations(record: &JobRecord) -> Vec<HeldGeneration> {
    let held = record.generations.iter().map(|held| {
        let blob = held.blobs.first().map_or(&[][..], |blob| &blob.blob);
        let (start, _) = split(blob).unwrap_or_default();
        HeldGeneration {
            generation: held.generation,
            start,
            confirmed: held.confirmed,
        }
    });
    held.collect()
}

/// Puts the number of the start before a blob.
fn join(start: u64, blob: &[u8]) -> Vec<u8> {
    [&start.to_le_bytes(), blob].concat()
}

/// Returns the number of the start that committed a blob, and the rest; `None` for a blob of another program.
pub(crate) fn split(blob: &[u8]) -> Option<(u64, &[u8])> {
    let (start, rest) = blob.split_first_chunk::<START_BYTES>()?;
    Some((u64::from_le_bytes(*start), rest))
}

/// Asks the other nodes, one prepared generation after the other, on a thread of its own.
pub(crate) struct Confirmer {
    prepared: Sender<Generation>,
    start: u64,
    exchange: Arc<dyn Exchange>,
}

impl Confirmer {
    /// Starts the thread. `start` is the number of this start; `answer` gets each generation that all nodes may confirm, and returns
    /// false when nobody waits any more.
    pub(crate) fn start(
        nodes: Nodes,
        start: u64,
        answer: impl Fn(Result<Generation, SwapperError>) -> bool + Send + 'static,
    ) -> Self {
        let (sender, receiver) = channel();
        let exchange = Arc::clone(&nodes.exchange);
        // Not joined: it may wait for a rank that is gone until its heartbeats stop. It ends with the sender.
        std::thread::spawn(move || {
            while let Ok(generation) = receiver.recv() {
                let asked = Instant::now();
                let found = nodes.confirmable(generation);
                tracing::debug!(%generation, waited = ?asked.elapsed(), "prepared on all nodes");
                if !answer(found) {
                    return;
                }
            }
        });
        Self {
            prepared: sender,
            start,
            exchange,
        }
    }

    /// Marks the blob of a commit as one of this start.
    pub(crate) fn mark(&self, blob: &[u8]) -> Vec<u8> {
        join(self.start, blob)
    }

    /// Tells the other nodes that this one has failed. The training thread learns it with its next request, but it may be
    /// waiting for a rank that waits for this node's commit.
    pub(crate) fn give_up(&self, error: &SwapperError) {
        self.exchange.give_up(&error.to_string());
    }

    /// Asks for `generation`, which is prepared on this node.
    pub(crate) fn ask(&self, generation: Generation) {
        // The thread ends early only when nobody waits for its answer.
        let _ = self.prepared.send(generation);
    }
}

#[cfg(test)]
mod tests {
    use offload_client::{Durability, GenerationRecord, Rank, RankBlob};

    use super::*;

    /// The other rank's messages, with this rank's in between.
    struct FixedMessages(Vec<Vec<u8>>);

    impl Exchange for FixedMessages {
        fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
            let mut all = self.0.clone();
            all.insert(1, own.to_vec());
            Ok(all)
        }

        fn give_up(&self, _reason: &str) {}
    }

    fn second_of_two(other: Vec<u8>) -> Nodes {
        Nodes {
            run: b"run".to_vec(),
            node: 1,
            first_ranks: vec![0, 1],
            exchange: Arc::new(FixedMessages(vec![other])),
        }
    }

    fn record(nodes: u32, generations: &[(u64, u64)]) -> JobRecord {
        let generations = generations
            .iter()
            .map(|(generation, start)| GenerationRecord {
                generation: Generation(*generation),
                confirmed: true,
                blobs: vec![RankBlob {
                    rank: Rank(1),
                    blob: join(*start, b"state"),
                }],
            });
        JobRecord {
            layout: Vec::new(),
            tiles: Vec::new(),
            durability: Durability::Committed,
            nodes,
            generations: generations.collect(),
            clean: true,
        }
    }

    fn message(start: u64, generations: &[(u64, u64)]) -> Vec<u8> {
        let held = NodeGenerations {
            run: b"run".to_vec(),
            node: 0,
            nodes: 2,
            generations: super::generations(&record(2, generations)),
        };
        join(start, &held.to_bytes())
    }

    #[test]
    fn all_resume_from_one_generation_with_the_first_ranks_number() {
        let nodes = second_of_two(message(77, &[(3, 5), (4, 5)]));
        let agreed = nodes.agree(Some(&record(2, &[(4, 5)]))).unwrap();
        assert_eq!((agreed.generation, agreed.start), (Generation(4), 77));
        let refused = |record: &JobRecord| nodes.agree(Some(record)).err().unwrap().to_string();
        // The same number of another start.
        assert!(refused(&record(2, &[(4, 6)])).contains("lost generation 4"));
        assert!(refused(&record(1, &[(4, 5)])).contains("a run on 1 node(s)"));
        assert!(nodes.agree(None).is_err());
    }

    #[test]
    fn a_message_of_another_program_is_refused() {
        let nodes = second_of_two(b"HTTP/1.1".to_vec());
        let error = nodes.agree(None).err().unwrap().to_string();
        assert!(error.contains("this program's version"), "{error}");
        let nodes = second_of_two(vec![1]);
        assert!(nodes.confirmable(Generation(1)).is_err());
    }
}
