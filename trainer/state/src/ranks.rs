//! Operations of all ranks of a run: either all succeed or none counts. The first rank of each node manages
//! what belongs to the node: its directory, store and daemon. The first rank of all manages the rest: metrics,
//! checkpoints, what is printed.
//!
//! Everything is built on one operation of the caller's process group, [`Group::gather`].

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Interval between rounds in which ranks exchange their progress. Short compared with any joint operation.
const ROUND: Duration = Duration::from_millis(20);

/// Progress of a rank in a joint operation.
const WORKING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The processes that train a run.
pub trait Group: Send + Sync {
    /// Number of this process, from 0.
    fn rank(&self) -> u32;

    /// Number of processes.
    fn ranks(&self) -> u32;

    /// Returns every rank's bytes in the order of ranks. All ranks must pass the same number of bytes.
    ///
    /// # Errors
    /// A rank is gone.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError>;
}

/// Error of the process group.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct GroupError(pub Box<dyn Error + Send + Sync>);

/// Error of a joint operation.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("rank {rank} failed while {what}: see its own message")]
    OtherRank { rank: u32, what: String },
    #[error(
        "rank {rank} is process {local_rank} of {local_ranks} on its node, which does not follow the ranks before it: number ranks node by node (with Slurm: --distribution=block)"
    )]
    Nodes {
        rank: u32,
        local_rank: u32,
        local_ranks: u32,
    },
}

struct Alone;

impl Group for Alone {
    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        1
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        Ok(vec![own.to_vec()])
    }
}

/// The ranks that train the run, seen from this process.
#[derive(Clone)]
pub struct Ranks {
    group: Arc<dyn Group>,
    /// First rank of each node.
    first_ranks: Arc<[u32]>,
}

impl Ranks {
    /// Makes a run whose processes are all on one node.
    pub fn new(group: Arc<dyn Group>) -> Self {
        Self {
            group,
            first_ranks: Arc::new([0]),
        }
    }

    /// Makes a run of one process.
    pub fn alone() -> Self {
        Self::new(Arc::new(Alone))
    }

    /// Asks all ranks on which node they are. This one is process `local_rank` of `local_ranks` on its node.
    ///
    /// # Errors
    /// The ranks of a node do not follow each other; a rank is gone.
    pub fn on_nodes(
        group: Arc<dyn Group>,
        local_rank: u32,
        local_ranks: u32,
    ) -> Result<Self, RankError> {
        let one_node = Self::new(group);
        let local_numbers = one_node.numbers([local_rank, local_ranks].map(u64::from))?;
        let first_ranks = first_ranks(&local_numbers)?;
        Ok(Self {
            first_ranks: first_ranks.into(),
            ..one_node
        })
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// Number of processes.
    pub fn count(&self) -> u32 {
        self.group.ranks()
    }

    /// Returns whether this rank is the first of all, which manages metrics and checkpoints, and prints.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// First rank of each node.
    pub fn first_ranks(&self) -> &[u32] {
        &self.first_ranks
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.first_ranks.len() as u32
    }

    /// Number of this process's node, from 0.
    pub fn node(&self) -> u32 {
        self.node_of(self.rank())
    }

    /// Number of the node of `rank`.
    pub fn node_of(&self, rank: u32) -> u32 {
        node_of(&self.first_ranks, rank)
    }

    /// Ranks on this node.
    pub fn local(&self) -> Range<u32> {
        ranks_of(&self.first_ranks, self.node(), self.count())
    }

    /// Number of this process on its node, from 0.
    pub fn local_rank(&self) -> u32 {
        self.rank() - self.local().start
    }

    /// Returns whether this rank is the first of its node, which manages the node's directory, store and daemon.
    pub fn is_first_of_node(&self) -> bool {
        self.local_rank() == 0
    }

    /// Returns whether `own` is true on any rank. All ranks get the same result.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn any(&self, own: bool) -> Result<bool, RankError> {
        let all = self.group.gather(&[u8::from(own)])?;
        Ok(all.iter().any(|told| told[0] != 0))
    }

    /// Returns every rank's bytes in the order of ranks. All ranks must pass the same number of bytes.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        Ok(self.group.gather(own)?)
    }

    /// Returns every rank's numbers in the order of ranks.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn numbers<const N: usize>(&self, own: [u64; N]) -> Result<Vec<[u64; N]>, RankError> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.group.gather(&own)?;
        let number =
            |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("a number has eight bytes"));
        let numbers = |bytes: &Vec<u8>| std::array::from_fn(|n| number(&bytes[n * 8..n * 8 + 8]));
        Ok(all.iter().map(numbers).collect())
    }

    /// Does `work` on every rank and returns when all ranks have finished, without a time limit. `what` names
    /// the work in errors. `work` must not communicate with other ranks.
    ///
    /// # Errors
    /// The work's own error; another rank's work failed; a rank is gone.
    pub fn on_all_ranks<T, E: From<RankError>>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        if self.count() == 1 {
            return work();
        }
        let state = AtomicU8::new(WORKING);
        std::thread::scope(|scope| {
            let rounds = scope.spawn(|| self.rounds(&state));
            let mut progress = Progress {
                state: &state,
                end: FAILED,
            };
            let result = work();
            if result.is_ok() {
                progress.end = DONE;
            }
            drop(progress);
            rounds.thread().unpark();
            let others = rounds.join().expect("the rounds do not panic");
            let result = result?;
            match others.map_err(RankError::from)? {
                None => Ok(result),
                Some(rank) => Err(E::from(RankError::OtherRank {
                    rank,
                    what: what.to_owned(),
                })),
            }
        })
    }

    /// Does `work` on the first rank and returns its result on every rank.
    ///
    /// # Errors
    /// Same as [`Self::on_all_ranks`].
    pub fn by_first<T: Serialize + DeserializeOwned, E: From<RankError>>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.by(0, what, work)
    }

    /// Does `work` on the first rank of each node and returns its result on every rank of that node.
    ///
    /// # Errors
    /// Same as [`Self::on_all_ranks`].
    pub fn by_first_of_node<T: Serialize + DeserializeOwned, E: From<RankError>>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.by(self.local().start, what, work)
    }

    /// Does `work` on `rank` and returns its result. Ranks may name different ones.
    fn by<T: Serialize + DeserializeOwned, E: From<RankError>>(
        &self,
        rank: u32,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let works = self.rank() == rank;
        let found = self.on_all_ranks(what, || works.then(work).transpose())?;
        if self.count() == 1 {
            return Ok(found.expect("the only rank works"));
        }
        let own = found.as_ref().map_or_else(Vec::new, |found| {
            serde_json::to_vec(found).expect("plain data")
        });
        let told = &self.messages(own)?[rank as usize];
        match found {
            Some(found) => Ok(found),
            None => Ok(serde_json::from_slice(told).expect("the same program on every rank")),
        }
    }

    /// Returns every rank's bytes in the order of ranks; they may have different lengths.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn messages(&self, mut own: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        let lengths = self.numbers([own.len() as u64])?;
        let lengths = lengths.iter().map(|&[length]| length as usize);
        own.resize(lengths.clone().max().unwrap_or(0), 0);
        let mut all = self.group.gather(&own)?;
        for (message, length) in all.iter_mut().zip(lengths) {
            message.truncate(length);
        }
        Ok(all)
    }

    /// Runs rounds until all ranks are done (`None`) or one has failed. All ranks see the same rounds and
    /// leave after the same one.
    fn rounds(&self, state: &AtomicU8) -> Result<Option<u32>, GroupError> {
        loop {
            let all = self.group.gather(&[state.load(Ordering::Acquire)])?;
            if let Some(rank) = all.iter().position(|told| told[0] == FAILED) {
                return Ok(Some(rank as u32));
            }
            if all.iter().all(|told| told[0] == DONE) {
                return Ok(None);
            }
            std::thread::park_timeout(ROUND);
        }
    }
}

/// Finds the first rank of each node from every rank's number on its node and number of ranks there.
///
/// # Errors
/// The ranks of a node do not follow each other.
pub fn first_ranks(local_numbers: &[[u64; 2]]) -> Result<Vec<u32>, RankError> {
    let mut first_ranks: Vec<u32> = Vec::new();
    for (rank, &[local_rank, local_ranks]) in (0..).zip(local_numbers) {
        let follows = match first_ranks.last() {
            Some(&first) if local_rank > 0 => {
                let [_, expected] = local_numbers[first as usize];
                u64::from(rank - first) == local_rank && local_ranks == expected
            }
            // A node begins: the one before must be complete.
            Some(&first) => u64::from(rank - first) == local_numbers[first as usize][1],
            None => local_rank == 0,
        };
        let is_whole = local_rank + 1 == local_ranks || rank as usize + 1 < local_numbers.len();
        if !follows || local_rank >= local_ranks || !is_whole {
            return Err(RankError::Nodes {
                rank,
                local_rank: local_rank as u32,
                local_ranks: local_ranks as u32,
            });
        }
        if local_rank == 0 {
            first_ranks.push(rank);
        }
    }
    Ok(first_ranks)
}

/// Node of `rank`, where `first_ranks` has the first rank of each node.
pub fn node_of(first_ranks: &[u32], rank: u32) -> u32 {
    let before = first_ranks.iter().filter(|&&first| first <= rank);
    before.count() as u32 - 1
}

/// Ranks of `node` in a run of `count` ranks.
pub fn ranks_of(first_ranks: &[u32], node: u32, count: u32) -> Range<u32> {
    let node = node as usize;
    let next = first_ranks.get(node + 1);
    first_ranks[node]..next.copied().unwrap_or(count)
}

/// Sets the result `end` for the rounds, even if the work panics.
struct Progress<'a> {
    state: &'a AtomicU8,
    end: u8,
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        self.state.store(self.end, Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;

    /// Ranks as threads that gather through shared memory.
    struct Threads {
        rank: u32,
        shared: Arc<(Barrier, Mutex<Vec<Vec<u8>>>)>,
    }

    impl Group for Threads {
        fn rank(&self) -> u32 {
            self.rank
        }

        fn ranks(&self) -> u32 {
            self.shared.1.lock().unwrap().len() as u32
        }

        fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
            let (barrier, all) = &*self.shared;
            all.lock().unwrap()[self.rank as usize] = own.to_vec();
            barrier.wait();
            let all = all.lock().unwrap().clone();
            barrier.wait();
            assert!(all.iter().all(|bytes| bytes.len() == own.len()));
            Ok(all)
        }
    }

    pub(crate) fn on_ranks<T: Send>(count: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
        let shared = Arc::new((Barrier::new(count), Mutex::new(vec![Vec::new(); count])));
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..count as u32)
                .map(|rank| {
                    let shared = shared.clone();
                    let work = &work;
                    scope.spawn(move || work(Ranks::new(Arc::new(Threads { rank, shared }))))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_get_the_first_ranks_result() {
        let found = on_ranks(3, |ranks| {
            ranks.by_first::<_, RankError>("looking", || {
                assert!(ranks.is_first());
                Ok(vec!["a".to_owned(), "bc".to_owned()])
            })
        });
        for found in found {
            assert_eq!(found.unwrap(), ["a", "bc"]);
        }
        let any = on_ranks(3, |ranks| ranks.any(ranks.rank() == 2).unwrap());
        assert_eq!(any, [true; 3]);
        let numbers = on_ranks(2, |ranks| {
            ranks.numbers([u64::from(ranks.rank()), 7]).unwrap()
        });
        assert_eq!(numbers, [[[0, 7], [1, 7]], [[0, 7], [1, 7]]]);
    }

    #[test]
    fn each_rank_knows_its_node() {
        let counts = [2u32, 1, 3];
        let local_numbers: Vec<[u32; 2]> = counts
            .iter()
            .flat_map(|&count| (0..count).map(move |local| [local, count]))
            .collect();
        let shared = Arc::new((Barrier::new(6), Mutex::new(vec![Vec::new(); 6])));
        let found: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6u32)
                .map(|rank| {
                    let shared = shared.clone();
                    let [local_rank, local_ranks] = local_numbers[rank as usize];
                    scope.spawn(move || {
                        let group = Arc::new(Threads { rank, shared });
                        let ranks = Ranks::on_nodes(group, local_rank, local_ranks).unwrap();
                        let first = ranks
                            .by_first_of_node::<_, RankError>("looking", || Ok(ranks.rank()))
                            .unwrap();
                        let message = vec![7; rank as usize];
                        let lengths: Vec<usize> = ranks
                            .messages(message)
                            .unwrap()
                            .iter()
                            .map(Vec::len)
                            .collect();
                        assert_eq!(lengths, [0, 1, 2, 3, 4, 5]);
                        assert_eq!(ranks.is_first_of_node(), rank == first);
                        (
                            ranks.node(),
                            ranks.nodes(),
                            ranks.local(),
                            ranks.local_rank(),
                            first,
                        )
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(found[1], (0, 3, 0..2, 1, 0));
        assert_eq!(found[2], (1, 3, 2..3, 0, 2));
        assert_eq!(found[5], (2, 3, 3..6, 2, 3));
    }

    #[test]
    fn ranks_that_are_not_numbered_node_by_node_are_refused() {
        let refused = |local_numbers: &[[u64; 2]]| match first_ranks(local_numbers) {
            Err(RankError::Nodes { rank, .. }) => rank,
            other => panic!("{other:?}"),
        };
        assert_eq!(first_ranks(&[[0, 1], [0, 2], [1, 2]]).unwrap(), [0, 1]);
        // Alternating between nodes, as with Slurm's --distribution=cyclic.
        assert_eq!(refused(&[[0, 2], [0, 2], [1, 2], [1, 2]]), 1);
        assert_eq!(refused(&[[1, 2], [0, 2]]), 0);
        assert_eq!(refused(&[[0, 2], [1, 3]]), 1);
        assert_eq!(refused(&[[0, 2], [1, 2], [2, 2]]), 2);
        assert_eq!(refused(&[[0, 1], [0, 2]]), 1);
    }

    #[test]
    fn a_failed_rank_fails_all_and_keeps_its_own_error() {
        let ended = on_ranks(3, |ranks| {
            ranks.on_all_ranks("counting", || match ranks.rank() {
                1 => Err(RankError::Group(GroupError("out of fingers".into()))),
                rank => Ok(rank),
            })
        });
        let words: Vec<String> = ended
            .into_iter()
            .map(|ended| ended.unwrap_err().to_string())
            .collect();
        let others = "rank 1 failed while counting: see its own message";
        assert_eq!(words, [others, "out of fingers", others]);
    }
}
