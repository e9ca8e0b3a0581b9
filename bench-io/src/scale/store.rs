//! The daemon's side of a scaling measurement: a private store on the first drives, and the streams on it.

use anyhow::{Context, Result, ensure};
use offloadd::api::IODEPTH_MAX;

use super::{Load, ScalePlan};
use crate::bench::{Bench, BenchPlan, TargetPlan};
use crate::figures::Figures;
use crate::load::{StreamPlan, Timing};
use crate::place::OwnDaemon;
use crate::progress::Progress;
use crate::targets::Way;

/// A filled store on some drives, with an open session.
pub(super) struct Store {
    /// Dropped before the daemon.
    bench: Bench,
    _daemon: OwnDaemon,
    pub(super) drives: usize,
    pub(super) bs: u32,
    tile_count: u64,
    /// Operations in flight, bounded by the session's limit and by the number of tiles (a tile moves once at a time).
    one_way_depth: u32,
    depth: u32,
}

impl Store {
    /// Formats with the rate limits on, because placement follows the rates a format measures; fills with them off.
    ///
    /// # Errors
    /// No room, or no daemon.
    pub(super) fn new(
        plan: &ScalePlan,
        bs: u32,
        drives: usize,
        set_limit: impl Fn(bool) -> Result<()>,
        progress: &Progress,
    ) -> Result<Self> {
        let dirs = drives * plan.dirs_per_drive;
        set_limit(true)?;
        progress.say("formatting a store");
        let tile_count = plan.size / u64::from(bs) * dirs as u64;
        ensure!(
            tile_count >= 2,
            "size = {}: too small for operations of {bs} bytes",
            plan.size
        );
        let depth_max = u64::from(IODEPTH_MAX).min(tile_count);
        let one_way = plan.own_depth(bs, dirs).min(depth_max) as u32;
        let depth = (2 * u64::from(one_way)).min(depth_max) as u32;
        let slot_bytes = u64::from(bs) * u64::from(depth);
        let daemon = OwnDaemon::start(
            &plan.dirs[..dirs],
            plan.size,
            slot_bytes,
            depth,
            &plan.engine,
        )?;
        let bench = Bench::open(BenchPlan {
            target: TargetPlan::Daemon {
                socket: daemon.socket().to_owned(),
                tile_count: u32::try_from(tile_count).context("too many tiles; use a larger bs")?,
                gpu: false,
            },
            block_bytes: bs,
            depth,
            jobs: 1,
        })?;
        let store = Self {
            bench,
            _daemon: daemon,
            drives,
            bs,
            tile_count,
            one_way_depth: one_way,
            depth,
        };
        set_limit(false)?;
        store.bench.fill(
            &[vec![store.stream(0, tile_count, Way::Write, depth)]],
            progress,
        )?;
        Ok(store)
    }

    /// Operations in flight.
    pub(super) fn depth(&self, load: Load) -> u32 {
        match load {
            Load::Both => self.depth,
            _ => self.one_way_depth,
        }
    }

    fn stream(&self, first: u64, count: u64, way: Way, depth: u32) -> StreamPlan {
        StreamPlan {
            device: 0,
            blocks: (first, count),
            reads: way == Way::Read,
            writes: way == Way::Write,
            read_percent: 50,
            random: false,
            depth,
        }
    }

    /// Moves tiles for the duration of the plan.
    ///
    /// # Errors
    /// The daemon or an operation fails.
    pub(super) fn run(
        &self,
        plan: &ScalePlan,
        load: Load,
        progress: &Progress,
        what: &str,
    ) -> Result<Figures> {
        let (half, depth) = (self.tile_count / 2, self.depth(load));
        let rest = self.tile_count - half;
        let streams = match load {
            Load::Read => vec![self.stream(0, self.tile_count, Way::Read, depth)],
            Load::Write => vec![self.stream(0, self.tile_count, Way::Write, depth)],
            Load::Both => vec![
                self.stream(0, half, Way::Read, depth / 2),
                self.stream(half, rest, Way::Write, depth / 2),
            ],
        };
        let timing = Timing {
            ramp: plan.ramp,
            runtime: plan.runtime,
        };
        let figures = self.bench.run(&[streams], timing, progress, what)?;
        Ok(figures)
    }
}
