//! A session of a daemon with shared rings, arena and checksums. Blocks are the tiles of the session's own job; with a
//! GPU they continue to its memory.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use offload_client::{
    Daemon, Durability, EndedOperation, Generation, JobDefinition, Rank, Session, SessionInfo,
    SessionSettings, Slot, SlotClass, Tile, TileIndex, TileKind, Verb,
};
use offload_support::errln;

use super::gpu::{CompletedCopy, GpuMemory};
use super::{Flight, Target, Way};
use crate::random_data;
use crate::units::Bytes;

const JOB_PREFIX: &str = "bench-io-";

/// Name of job `index` of this process in a daemon's store.
pub(crate) fn job_name(index: u32) -> String {
    format!("{JOB_PREFIX}{}-{index}", std::process::id())
}

/// Process of a measurement's job; `None` for other jobs' names.
fn process_of(job: &str) -> Option<u32> {
    let (process, index) = job.strip_prefix(JOB_PREFIX)?.split_once('-')?;
    let whole = |number: &str| number.bytes().all(|byte| byte.is_ascii_digit());
    let is_ours = whole(process) && whole(index) && !index.is_empty();
    process.parse().ok().filter(|_| is_ours)
}

fn is_left(job: &str, open: bool) -> bool {
    // A living process deletes its job itself.
    let lives = |process| Path::new(&format!("/proc/{process}")).exists();
    !open && process_of(job).is_some_and(|process| !lives(process))
}

/// Deletes jobs that killed measurements left in the daemon's store, because nobody else would free their space.
///
/// # Errors
/// There is no daemon.
pub(crate) fn drop_left(socket: &Path) -> Result<()> {
    let daemon = Daemon::connect(socket)?;
    let left = daemon.jobs()?.into_iter();
    for job in left.filter(|job| is_left(&job.job, job.open)) {
        // Another measurement may have deleted it already.
        if let Ok(freed_bytes) = daemon.drop_job(&job.job) {
            errln!(
                "bench-io: deleted the job {} of a killed measurement: {} freed",
                job.job,
                Bytes(freed_bytes)
            );
        }
    }
    Ok(())
}

/// A session and its tiles in flight.
pub(crate) struct DaemonTarget {
    /// Dropped before the session: its copiers hold slots.
    gpu: Option<GpuMemory>,
    /// `None` while it is closed.
    session: Option<Session>,
    socket: std::path::PathBuf,
    job: String,
    info: SessionInfo,
    /// Operations by slot.
    flights: Vec<Option<Flight>>,
    done: Vec<EndedOperation>,
    written: bool,
}

impl DaemonTarget {
    /// Opens a session for job `job` of `tile_count` tiles of `tile_bytes` with `depth` operations in flight; with
    /// `gpu` tiles continue to a GPU.
    ///
    /// # Errors
    /// The daemon is missing, has no space, or grants less than `depth`; or there is no GPU.
    pub(crate) fn open(
        socket: &Path,
        job: &str,
        tile_bytes: u32,
        tile_count: u32,
        depth: u32,
        gpu: bool,
    ) -> Result<Self> {
        let mut session = Session::open(SessionSettings {
            socket: socket.to_owned(),
            job: job.to_owned(),
            rank: Rank(0),
            local_ranks: 1,
            classes: vec![SlotClass {
                slot_bytes: u64::from(tile_bytes),
                slot_count: depth,
            }],
            iodepth: depth,
        })?;
        let info = session.info().clone();
        ensure!(
            info.iodepth == depth,
            "iodepth = {depth}: the daemon grants only {}, limited by iodepth_max in its settings or by inflight_max of your quota, which all \
             your jobs share; raise the limit or use a smaller iodepth",
            info.iodepth
        );
        ensure!(
            info.job.is_none(),
            "the daemon's store has a job `{job}` already, of another bench-io: wait for it to end, or delete the job if it was killed"
        );
        // Before the job is defined: from then on only a complete target frees the job's space.
        let gpu = match gpu {
            true => Some(GpuMemory::open(&session, depth, tile_bytes)?),
            false => None,
        };
        let tiles = (0..tile_count).map(|index| Tile {
            unit: index,
            kind: TileKind::Param,
            elem_offset: 0,
            tile_bytes,
        });
        session.define_tiles(JobDefinition {
            layout: Vec::new(),
            tiles: tiles.collect(),
            durability: Durability::Committed,
            nodes: 1,
        })?;
        let mut target = Self {
            gpu,
            session: Some(session),
            socket: socket.to_owned(),
            job: job.to_owned(),
            info,
            flights: vec![None; depth as usize],
            done: Vec::new(),
            written: false,
        };
        target.session()?.resume(Generation(0))?;
        target.fill_slots()?;
        Ok(target)
    }

    /// Limits that the daemon granted.
    pub(crate) fn info(&self) -> &SessionInfo {
        &self.info
    }

    /// Name of the GPU, if one is used.
    pub(crate) fn gpu(&self) -> Option<&str> {
        self.gpu.as_ref().map(GpuMemory::about)
    }

    fn session(&mut self) -> Result<&mut Session> {
        self.session.as_mut().context("the session is open")
    }

    fn fill_slots(&mut self) -> Result<()> {
        let session = self.session()?;
        let mut slots: Vec<Slot> = std::iter::from_fn(|| session.take_slot(0)).collect();
        for (index, slot) in slots.iter_mut().enumerate() {
            random_data::fill(slot.as_mut_slice(), index as u64 + 1);
        }
        for slot in slots {
            session.give_slot(slot);
        }
        Ok(())
    }

    /// Starts moving a tile between its slot and its device.
    fn swap(&mut self, slot: Slot, flight: Flight) -> Result<()> {
        let (index, tile) = (slot.index().0 as usize, TileIndex(flight.block as u32));
        let session = self.session()?;
        let started = match flight.way {
            Way::Read => session.swap_in(tile, slot),
            Way::Write => session.swap_out(tile, slot),
        };
        if let Err((slot, error)) = started {
            session.give_slot(slot);
            return Err(anyhow!(error))
                .with_context(|| format!("{} of tile {tile}", flight.way.word()));
        }
        self.written |= flight.way == Way::Write;
        self.flights[index] = Some(flight);
        Ok(())
    }

    /// Completes an operation whose tile has arrived.
    fn end(&mut self, slot: Slot, flight: Flight, ended: &mut Vec<Flight>) -> Result<()> {
        self.session()?.give_slot(slot);
        ended.push(flight);
        Ok(())
    }
}

impl Target for DaemonTarget {
    fn start(&mut self, flight: Flight) -> Result<()> {
        let session = self.session()?;
        let slot = session.take_slot(0).context("more operations than slots")?;
        match (&mut self.gpu, flight.way) {
            (Some(gpu), Way::Write) => gpu.start(slot, flight),
            _ => self.swap(slot, flight),
        }
    }

    fn wait(&mut self, limit: Duration, ended: &mut Vec<Flight>) -> Result<()> {
        let mut done = std::mem::take(&mut self.done);
        // A copy to the GPU is shorter than a device operation: while copies are in flight, they end next.
        let copying = self.gpu.as_ref().is_some_and(GpuMemory::is_busy);
        let session = self.session()?;
        session.poll(&mut done)?;
        if done.is_empty() && !copying {
            session.wait(limit)?;
            session.poll(&mut done)?;
        }
        let copied = match (&mut self.gpu, copying) {
            (Some(gpu), true) => gpu.wait(if done.is_empty() {
                limit
            } else {
                Duration::ZERO
            })?,
            _ => Vec::new(),
        };
        for one in done.drain(..) {
            one.result?;
            let index = one.slot.index().0 as usize;
            let flight = self.flights[index].take();
            let flight = flight.context("a slot of an operation that was started")?;
            match (&mut self.gpu, one.verb) {
                (Some(gpu), Verb::SwapIn) => gpu.start(one.slot, flight)?,
                _ => self.end(one.slot, flight, ended)?,
            }
        }
        for CompletedCopy {
            slot,
            flight,
            result,
        } in copied
        {
            result?;
            match flight.way {
                Way::Read => self.end(slot, flight, ended)?,
                Way::Write => self.swap(slot, flight)?,
            }
        }
        self.done = done;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if std::mem::take(&mut self.written) {
            self.session()?.commit(Vec::new())?;
        }
        Ok(())
    }
}

/// Deletes the job, to free its space in a shared store.
impl Drop for DaemonTarget {
    fn drop(&mut self) {
        // The GPU's copiers hold slots of the session: drop them first.
        self.gpu = None;
        let mut give_back = || -> Result<()> {
            let Some(session) = self.session.take() else {
                bail!("closed already");
            };
            session.close()?;
            Daemon::connect(&self.socket)?.drop_job(&self.job)?;
            Ok(())
        };
        // The next measurement deletes the job.
        if let Err(error) = give_back() {
            errln!(
                "bench-io: the job {} could not be deleted from the daemon's store: {error:#}",
                self.job
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_dead_measurement_called_so_is_left() {
        // Above the largest process number.
        let dead = "bench-io-4194305-0";
        assert!(is_left(dead, false));
        assert!(!is_left(dead, true), "somebody has it open");
        assert!(!is_left(&job_name(0), false), "this one lives");
        for other in [
            "bench-io-llama",
            "bench-io-4194305",
            "bench-io-4194305-",
            "bench-io--0",
            "bench-io-4194305-0-mine",
            "bench-io-+4194305-0",
            "my-bench-io-4194305-0",
        ] {
            assert!(!is_left(other, false), "{other}");
        }
    }
}
