//! The ranks of a run around the step: what one cannot do none does, and the first keeps the run's directory and store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use kernels_torch::collective::{CollectiveError, Comm, Rendezvous, Timeouts, World};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::RunSettings;
use crate::train::TrainError;

/// Between two rounds in which ranks say how far they are. Short beside whatever is done together.
const ROUND: Duration = Duration::from_millis(20);

/// So long after its death a rank is known to be dead, even on a busy machine: some heartbeats. Launchers wait twice as long.
const DEATH_WAIT: Duration = Duration::from_secs(4);

/// How far a rank is with what all do together.
const WORKING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// This process among those that train the run.
pub(crate) struct Ranks {
    comm: Arc<Comm>,
}

impl Ranks {
    /// Finds the others as the environment says; a process of its own where it says nothing.
    ///
    /// # Errors
    /// An environment that contradicts itself, processes on several nodes, ranks that do not come.
    pub(crate) fn from_env() -> Result<Self, TrainError> {
        let world = World::from_env()?;
        if !world.one_node() {
            return Err(TrainError::Nodes {
                ranks: world.ranks,
                local_ranks: world.local_ranks,
            });
        }
        let at = Rendezvous::from_env(&world)?;
        let comm = Comm::connect(world, &at, Timeouts::default())?;
        Ok(Self {
            comm: Arc::new(comm),
        })
    }

    /// A run of one process.
    pub(crate) fn alone() -> Self {
        Self {
            comm: Arc::new(Comm::alone()),
        }
    }

    /// The connection itself, for what is done in every step.
    pub(crate) fn comm(&self) -> Arc<Comm> {
        self.comm.clone()
    }

    /// This one, from 0.
    pub(crate) fn rank(&self) -> u32 {
        self.comm.world().rank
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.comm.world().ranks
    }

    /// Whether this one keeps the run's directory, its private daemon and its metrics, and speaks to people.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Whether any rank says so. All then know.
    ///
    /// # Errors
    /// A rank is gone.
    pub(crate) fn any(&self, own: bool) -> Result<bool, TrainError> {
        let all = self.comm.all_gather_bytes(&[u8::from(own)])?;
        Ok(all.iter().any(|said| said[0] != 0))
    }

    /// Sums over the ranks: the same on all.
    ///
    /// # Errors
    /// A rank is gone.
    pub(crate) fn sum(&self, values: &mut [f64]) -> Result<(), TrainError> {
        Ok(self.comm.all_reduce_sum_f64(values)?)
    }

    /// Every rank's numbers, in the order of ranks.
    ///
    /// # Errors
    /// A rank is gone.
    pub(crate) fn numbers<const N: usize>(
        &self,
        own: [u64; N],
    ) -> Result<Vec<[u64; N]>, TrainError> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.comm.all_gather_bytes(&own)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("as sent"));
        let numbers = |bytes: &Vec<u8>| std::array::from_fn(|n| number(&bytes[n * 8..n * 8 + 8]));
        Ok(all.iter().map(numbers).collect())
    }

    /// Refuses ranks that were given another run than the first: other settings, or another text.
    ///
    /// # Errors
    /// What is different; a rank is gone.
    pub(crate) fn check_same_run(
        &self,
        settings: &RunSettings,
        text_fingerprint: u64,
    ) -> Result<(), TrainError> {
        let same = |what: &str, value: &str| self.comm.same_everywhere(what, value);
        same("the program", env!("CARGO_PKG_VERSION"))?;
        let lines = settings.lines();
        // As many calls on every rank.
        same("the number of settings", &lines.len().to_string())?;
        for line in lines {
            same("a setting", &line)?;
        }
        same(
            "the text's fingerprint",
            &format!("{text_fingerprint:016x}"),
        )?;
        Ok(())
    }

    /// Does `work` on every rank and answers when all have done theirs, however long one takes; `what` says in words what is
    /// done. `work` itself must not talk to other ranks.
    ///
    /// # Errors
    /// The work's own; that another rank's failed; a rank is gone.
    pub(crate) fn together<T>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
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
            match others? {
                None => Ok(result),
                Some(rank) => Err(TrainError::OtherRank {
                    rank,
                    what: what.to_owned(),
                }),
            }
        })
    }

    /// What the first rank's `work` gives, on every rank. The others wait.
    ///
    /// # Errors
    /// As of [`Self::together`].
    pub(crate) fn by_first<T: Serialize + DeserializeOwned>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        let found = self.together(what, || self.is_first().then(work).transpose())?;
        let told = found.as_ref().map_or_else(Vec::new, |found| {
            serde_json::to_vec(found).expect("plain data")
        });
        let told = self.comm.broadcast_bytes(0, told)?;
        match found {
            Some(found) => Ok(found),
            None => Ok(serde_json::from_slice(&told).expect("the same program on every rank")),
        }
    }

    /// Ends the connection: with the others, or telling them why without.
    ///
    /// # Errors
    /// A rank is gone.
    pub(crate) fn end<T>(&self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        match result {
            Ok(ended) => {
                self.comm.barrier()?;
                self.comm.give_up("it had finished");
                Ok(ended)
            }
            Err(error) => {
                let error = self.blame(error);
                self.give_up(&error);
                Err(error)
            }
        }
    }

    /// With the rank that died, if that may be why: heartbeats tell of it after what it kept has failed.
    fn blame(&self, error: TrainError) -> TrainError {
        let until = Instant::now() + DEATH_WAIT;
        while self.count() > 1
            && error.may_follow_a_death(self.is_first())
            && Instant::now() < until
        {
            match self.comm.gone() {
                Some(death @ CollectiveError::Died { .. }) => {
                    let error = Box::new(error);
                    return TrainError::AfterDeath { death, error };
                }
                // It lives and has its own words.
                Some(_) => break,
                None => std::thread::sleep(ROUND),
            }
        }
        error
    }

    /// Tells the others that this rank ends, and why. Only the first reason counts.
    pub(crate) fn give_up(&self, error: &TrainError) {
        self.comm.give_up(&error.to_string());
    }

    /// Rounds until all ranks are done (`None`) or one has failed. All ranks see the same rounds and leave after the same.
    fn rounds(&self, state: &AtomicU8) -> Result<Option<u32>, CollectiveError> {
        loop {
            let all = self
                .comm
                .all_gather_bytes(&[state.load(Ordering::Acquire)])?;
            if let Some(rank) = all.iter().position(|said| said[0] == FAILED) {
                return Ok(Some(rank as u32));
            }
            if all.iter().all(|said| said[0] == DONE) {
                return Ok(None);
            }
            std::thread::park_timeout(ROUND);
        }
    }
}

/// Ends the rounds with `end`, also when the work panics.
struct Progress<'a> {
    state: &'a AtomicU8,
    end: u8,
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        self.state.store(self.end, Ordering::Release);
    }
}
