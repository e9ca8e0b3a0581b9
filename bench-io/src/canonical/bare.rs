//! The same bytes through an engine alone: no daemon, no shared rings, no checksums. What the daemon is compared with.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use offloadd::arena::{Arena, LockPolicy};
use offloadd::core::{IoId, IoOp};
use offloadd::device::Device;
use offloadd::engine::{Engine, EngineChoice, Io, Memory};

use super::workload::{Rates, Shape};
use crate::stop;

/// First byte that is written: behind a store's superblocks, so that the file stays recognisable while this runs.
const START: u64 = 64 << 20;

/// Writes and reads `shape` on the device at `path`, which must be nobody's store any more: its tiles are overwritten.
pub(crate) fn run(path: &Path, shape: &Shape, choice: EngineChoice) -> Result<Rates> {
    let device = Device::open(path)?;
    let geometry = shape.geometry()?;
    let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try)?);
    let (mut engine, _) =
        Engine::open(choice, &[Arc::clone(device.file())], shape.iodepth as usize)?;
    engine.register(&arena);
    while engine.has_work() {
        engine.start()?;
    }
    let mut pass = |op: IoOp| -> Result<f64> {
        let start = Instant::now();
        let mut free: Vec<u32> = (0..shape.iodepth).collect();
        let mut slot_of = vec![0; shape.tile_count as usize];
        let (mut next, mut finished, mut done) = (0_u32, 0_u32, Vec::new());
        while finished < shape.tile_count {
            while next < shape.tile_count
                && let Some(slot) = free.pop()
            {
                let place = geometry
                    .place(offloadd::api::ids::SlotIndex(slot))
                    .context("a slot of its own geometry")?;
                slot_of[next as usize] = slot;
                engine.submit(Io {
                    id: IoId(u64::from(next)),
                    device: offloadd::api::ids::DeviceIndex(0),
                    op,
                    offset: START + u64::from(next) * u64::from(shape.tile_bytes),
                    bytes: shape.tile_bytes,
                    memory: Memory::Arena {
                        arena: Arc::clone(&arena),
                        offset: place.offset,
                        piece: place.piece,
                    },
                });
                next += 1;
            }
            stop::check()?;
            engine.start()?;
            wait_readable(&engine)?;
            engine.reap(&mut done)?;
            for end in done.drain(..) {
                match end.outcome {
                    Ok(moved) if moved == shape.tile_bytes => {}
                    Ok(moved) => bail!(
                        "{op:?} of {} bytes on {}: only {moved} moved",
                        shape.tile_bytes,
                        device.path()
                    ),
                    Err(errno) => bail!(
                        "{op:?} on {}: {}",
                        device.path(),
                        std::io::Error::from_raw_os_error(errno)
                    ),
                }
                free.push(slot_of[end.id.0 as usize]);
                finished += 1;
            }
        }
        if op == IoOp::Write {
            device.file().sync_data().context("flushing the device")?;
        }
        Ok(shape.total_bytes() as f64 / start.elapsed().as_secs_f64())
    };
    Ok(Rates {
        write_bytes_per_s: pass(IoOp::Write)?,
        read_bytes_per_s: pass(IoOp::Read)?,
    })
}

/// Until the engine has something to reap, a second at most.
fn wait_readable(engine: &Engine) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::from_borrowed_fd(engine.wake(), PollFlags::IN)];
    let second = Timespec::try_from(Duration::from_secs(1)).context("one second")?;
    match poll(&mut fds, Some(&second)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno).context("waiting for the engine"),
    }
}
