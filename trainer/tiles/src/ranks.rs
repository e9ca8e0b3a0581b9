//! Operations of all ranks of a run: either all succeed or none counts. The first rank manages the run's
//! directory and store.
//!
//! Everything is built on one operation of the caller's process group, [`Group::gather`].

use std::error::Error;
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
pub struct Ranks(Arc<dyn Group>);

impl Ranks {
    pub fn new(group: Arc<dyn Group>) -> Self {
        Self(group)
    }

    /// Makes a run of one process.
    pub fn alone() -> Self {
        Self(Arc::new(Alone))
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> u32 {
        self.0.rank()
    }

    /// Number of processes.
    pub fn count(&self) -> u32 {
        self.0.ranks()
    }

    /// Returns whether this rank is the first, which manages the run's directory, private daemon and metrics,
    /// and prints.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns whether `own` is true on any rank. All ranks get the same result.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn any(&self, own: bool) -> Result<bool, RankError> {
        let all = self.0.gather(&[u8::from(own)])?;
        Ok(all.iter().any(|told| told[0] != 0))
    }

    /// Returns every rank's numbers in the order of ranks.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn numbers<const N: usize>(&self, own: [u64; N]) -> Result<Vec<[u64; N]>, RankError> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.0.gather(&own)?;
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
    pub fn together<T, E: From<RankError>>(
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
    /// Same as [`Self::together`].
    pub fn by_first<T: Serialize + DeserializeOwned, E: From<RankError>>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let found = self.together(what, || self.is_first().then(work).transpose())?;
        let own = found.as_ref().map_or_else(Vec::new, |found| {
            serde_json::to_vec(found).expect("plain data")
        });
        let told = self.first_bytes(own)?;
        match found {
            Some(found) => Ok(found),
            None => Ok(serde_json::from_slice(&told).expect("the same program on every rank")),
        }
    }

    /// Returns the first rank's bytes on every rank; `own` of the others is ignored.
    fn first_bytes(&self, mut own: Vec<u8>) -> Result<Vec<u8>, RankError> {
        if self.count() == 1 {
            return Ok(own);
        }
        let [length] = self.numbers([own.len() as u64])?[0];
        own.resize(length as usize, 0);
        Ok(self.0.gather(&own)?.swap_remove(0))
    }

    /// Runs rounds until all ranks are done (`None`) or one has failed. All ranks see the same rounds and
    /// leave after the same one.
    fn rounds(&self, state: &AtomicU8) -> Result<Option<u32>, GroupError> {
        loop {
            let all = self.0.gather(&[state.load(Ordering::Acquire)])?;
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
mod tests {
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

    fn on_ranks<T: Send>(count: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
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
    fn a_failed_rank_fails_all_and_keeps_its_own_error() {
        let ended = on_ranks(3, |ranks| {
            ranks.together("counting", || match ranks.rank() {
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
