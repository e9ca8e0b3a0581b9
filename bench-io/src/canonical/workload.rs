//! The canonical workload: whole tiles written in order, committed, and read back in order, through a daemon and shared
//! memory, checksums on.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use indicatif::ProgressBar;
use offload_client::{
    Durability, Generation, JobDefinition, Rank, Session, SessionSettings, Slot, SlotClass, Tile,
    TileIndex, TileKind,
};
use offloadd::api::geometry::Geometry;

use crate::stop;

/// How much, in what pieces, how many at a time.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) tile_bytes: u32,
    pub(crate) tile_count: u32,
    pub(crate) iodepth: u32,
}

impl Shape {
    pub(crate) fn total_bytes(&self) -> u64 {
        u64::from(self.tile_bytes) * u64::from(self.tile_count)
    }

    /// One slot for each operation in flight.
    pub(crate) fn geometry(&self) -> Result<Geometry> {
        Ok(Geometry::new(&[self.class()])?)
    }

    fn class(&self) -> SlotClass {
        SlotClass {
            slot_bytes: u64::from(self.tile_bytes),
            slot_count: self.iodepth,
        }
    }
}

/// What was reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    /// Up to and with the flush (through the daemon: the commit).
    pub(crate) write_bytes_per_s: f64,
    pub(crate) read_bytes_per_s: f64,
}

/// Runs `shape` against the daemon on `socket`. `progress` counts bytes.
pub(crate) fn run(
    socket: &std::path::Path,
    shape: &Shape,
    progress: &ProgressBar,
) -> Result<(Rates, String)> {
    let mut session = Session::open(SessionSettings {
        socket: socket.to_owned(),
        job: "bench-io".into(),
        rank: Rank(0),
        local_ranks: 1,
        classes: vec![shape.class()],
        iodepth: shape.iodepth,
    })?;
    let info = session.info().clone();
    let about = format!(
        "engine {} ({}), iodepth {}",
        info.engine, info.engine_reason, info.iodepth
    );
    let tiles = (0..shape.tile_count).map(|index| Tile {
        unit: index,
        kind: TileKind::Param,
        elem_offset: 0,
        tile_bytes: shape.tile_bytes,
    });
    session.define_tiles(JobDefinition {
        layout: Vec::new(),
        tiles: tiles.collect(),
        durability: Durability::Committed,
        nodes: 1,
    })?;
    session.resume(Generation(0))?;
    fill_slots(&mut session);
    let write_start = Instant::now();
    pass(&mut session, shape, progress, Session::swap_out)?;
    session.commit(Vec::new())?;
    let write_s = write_start.elapsed().as_secs_f64();
    let read_start = Instant::now();
    pass(&mut session, shape, progress, Session::swap_in)?;
    let read_s = read_start.elapsed().as_secs_f64();
    session.close()?;
    let total = shape.total_bytes() as f64;
    Ok((
        Rates {
            write_bytes_per_s: total / write_s,
            read_bytes_per_s: total / read_s,
        },
        about,
    ))
}

/// Bytes no drive can compress, the same in every run.
fn fill_slots(session: &mut Session) {
    let mut slots: Vec<Slot> = std::iter::from_fn(|| session.take_slot(0)).collect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for slot in &mut slots {
        for word in slot.as_mut_slice().chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
    }
    for slot in slots {
        session.give_slot(slot);
    }
}

/// A swap of one tile, in or out.
type Swap = fn(
    &mut Session,
    TileIndex,
    Slot,
) -> Result<offload_client::Ticket, (Slot, offload_client::ClientError)>;

/// Moves every tile once, as many at a time as there are slots.
fn pass(session: &mut Session, shape: &Shape, progress: &ProgressBar, swap: Swap) -> Result<()> {
    let (mut next, mut finished, mut done) = (0, 0, Vec::new());
    while finished < shape.tile_count {
        while next < shape.tile_count
            && let Some(slot) = session.take_slot(0)
        {
            if let Err((slot, error)) = swap(session, TileIndex(next), slot) {
                session.give_slot(slot);
                return Err(anyhow!(error)).with_context(|| format!("tile {next}"));
            }
            next += 1;
        }
        ensure!(
            session.in_flight_count() > 0,
            "the session has fewer slots than it was granted operations"
        );
        stop::check()?;
        session.wait(Duration::from_secs(1))?;
        session.poll(&mut done)?;
        for end in done.drain(..) {
            session.give_slot(end.slot);
            end.result?;
            finished += 1;
            progress.inc(u64::from(shape.tile_bytes));
        }
    }
    Ok(())
}
