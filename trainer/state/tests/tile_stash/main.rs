//! Pieces that wait on devices come back unchanged, pass after pass: those of host memory, of a GPU, and of a fake one (`kernels/tests/gpu/fake`).
//!
//! Likely faults are a copy that starts before its source is written, a buffer that is overwritten before its copy has ended, and contents used
//! before they have arrived. The fake driver runs enqueued work only when it is waited for, so a missing wait shows as other bytes.

#[path = "../../../../kernels/tests/shared/on_fake.rs"]
mod on_fake;

use std::path::Path;
use std::time::Duration;

use kernels::gpu::{DeviceBuffer, Gpu};
use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{
    Backing, Durability, Schedule, ScratchSettings, Staging, StoreSettings, Swapper,
    SwapperSettings, TileBytes, TileUpdate, UnitShape,
};
use tempfile::TempDir;
use training_state::scratch_copies::{CopyError, HostMemory, ScratchCopies, TensorMemory};
use training_state::tile_stash::{StashBuffer, TileStash};

const PIECE_BYTES: usize = 150_000;

/// More than buffers; their tiles are more than slots.
const PIECES: usize = 7;

/// Passes over all pieces.
const PASSES: usize = 3;

/// A run of one small unit on a drive, with an area for all pieces.
fn open(dir: &TempDir) -> (PrivateDaemon, Swapper<()>) {
    let daemon = PrivateDaemon::start(PrivateSettings {
        program: None,
        dir: dir.path().to_owned(),
        devices: vec![(dir.path().join("tiles"), 64 << 20)],
        arena_bytes_max: 16 << 20,
        engine: "auto".into(),
        iodepth_max: 64,
    })
    .unwrap();
    let unit = UnitShape {
        elems: 4096,
        tile_bytes: TileBytes {
            param_bytes_per_elem: 2,
            grad_bytes_per_elem: 4,
            state_tile_bytes: |elems| elems * 8,
        },
        trained: true,
        other_state: None,
        revised: false,
        external: false,
    };
    let scratch = ScratchSettings::for_tensors(&[PIECE_BYTES as u64; PIECES]).unwrap();
    assert!(scratch.tile_count > 2 * scratch.slot_count, "{scratch:?}");
    let settings = SwapperSettings {
        units: vec![unit],
        tile_elems: 4096,
        param_fraction: 0.0,
        state_fraction: 0.0,
        grad_fraction: 1.0,
        staging: Staging::Slots {
            param: 2,
            state: 2,
            grad: 2,
        },
        schedule: Schedule::Deferred,
        commit_every: 1,
        scratch,
        iodepth: 8,
        backing: Backing::Store(StoreSettings {
            socket: daemon.socket().to_owned(),
            job: "stash".into(),
            durability: Durability::Committed,
            nodes: None,
        }),
        layout: Vec::new(),
        rank: 0,
        ranks: 1,
        node_ranks: None,
    };
    let optimizer = |_: TileUpdate<'_>, _: &()| {};
    let (swapper, _) = Swapper::open(settings, vec![Box::new(optimizer)]).unwrap();
    (daemon, swapper)
}

/// Fills a buffer with `byte`, on a GPU by work that is only enqueued.
fn fill(gpu: Option<&Gpu>, buffer: StashBuffer<'_>, byte: u8) -> Result<(), CopyError> {
    match (gpu, buffer) {
        (Some(gpu), StashBuffer::Gpu(to)) => {
            let source = gpu.alloc(PIECE_BYTES)?;
            let ready = gpu.stream()?;
            gpu.upload(&ready, &source, &[(0, &[byte; PIECE_BYTES])])?;
            let compute = gpu.default_stream();
            compute.copy(source.at(0), to.at(0), PIECE_BYTES)?;
            // Freeing waits for the device, which would hide a missing wait.
            std::mem::forget(source);
        }
        (None, StashBuffer::Host(bytes)) => {
            assert_eq!(bytes.len(), PIECE_BYTES);
            assert_eq!(bytes.as_ptr().align_offset(64), 0);
            bytes.fill(byte);
        }
        _ => panic!("a buffer in another place"),
    }
    Ok(())
}

/// A copy of a piece, on a GPU not waited for.
enum PieceCopy {
    Host(Vec<u8>),
    Gpu(DeviceBuffer),
}

fn copy_of(gpu: Option<&Gpu>, buffer: StashBuffer<'_>) -> Result<PieceCopy, CopyError> {
    Ok(match (gpu, buffer) {
        (Some(gpu), StashBuffer::Gpu(from)) => {
            let to = gpu.alloc(PIECE_BYTES)?;
            let compute = gpu.default_stream();
            compute.copy(from.at(0), to.at(0), PIECE_BYTES)?;
            PieceCopy::Gpu(to)
        }
        (None, StashBuffer::Host(bytes)) => PieceCopy::Host(bytes.to_vec()),
        _ => panic!("a buffer in another place"),
    })
}

fn pieces_come_back_unchanged(gpu: Option<&Gpu>) {
    let dir = on_fake::scratch();
    let (_daemon, swapper) = open(&dir);
    let mut stash = TileStash::new(gpu, PIECE_BYTES).unwrap();
    stash.attach(swapper.scratch().unwrap(), gpu).unwrap();
    for pass in 0..PASSES {
        let content = |piece: usize| (pass * 50 + piece + 1) as u8;
        for piece in 0..PIECES {
            let filled = stash.put(piece, |buffer| fill(gpu, buffer, content(piece)));
            filled.unwrap();
        }
        let mut taken = Vec::new();
        for piece in (0..PIECES).rev() {
            let found = stash.take_piece(piece, |buffer| copy_of(gpu, buffer));
            taken.push((piece, found.unwrap()));
            // The next piece arrives while this one is used; on every second pass nobody fetches it early.
            if piece > 0 && pass % 2 == 0 {
                stash.fetch(piece - 1).unwrap();
            }
        }
        for (piece, found) in taken {
            let bytes = match found {
                PieceCopy::Host(bytes) => bytes,
                PieceCopy::Gpu(buffer) => {
                    let mut bytes = vec![0; PIECE_BYTES];
                    let (gpu, all) = (buffer.gpu(), &mut [(0, &mut bytes[..])]);
                    gpu.download(&gpu.default_stream(), &buffer, all).unwrap();
                    bytes
                }
            };
            assert!(
                bytes == vec![content(piece); PIECE_BYTES],
                "piece {piece} of pass {pass}"
            );
        }
    }
    drop(stash);
    swapper.close().unwrap();
}

#[test]
fn pieces_of_host_memory_come_back_unchanged() {
    pieces_come_back_unchanged(None);
}

/// Memory in which the thread that copies meets a broken invariant.
struct PanickingMemory;

impl HostMemory for PanickingMemory {
    fn read(&self, _: usize, _: &mut [u8]) {
        panic!("a read");
    }

    fn write(&self, _: usize, _: &[u8]) {
        panic!("a write");
    }
}

#[test]
fn a_panic_of_the_thread_that_copies_is_an_error_for_all_who_wait() {
    let dir = on_fake::scratch();
    let (_daemon, swapper) = open(&dir);
    let copies = ScratchCopies::start(swapper.scratch().unwrap(), None).unwrap();
    let tiles = || 0..copies.area().tiles_of(PIECE_BYTES as u64);
    let leave = || {
        let memory = TensorMemory::Host(Box::new(PanickingMemory));
        let number = copies.leave(memory, PIECE_BYTES, tiles(), None);
        number.expect("it was not stopped")
    };
    // The second one is begun before or after the panic, the third one after it.
    for number in [leave(), leave()] {
        let told = copies.wait(number, Duration::from_secs(60));
        assert!(matches!(told, Some(Err(CopyError::Panicked))), "{told:?}");
    }
    let last = leave();
    assert!(copies.has_result(last));
    let told = copies.wait(last, Duration::ZERO);
    assert!(matches!(told, Some(Err(CopyError::Panicked))), "{told:?}");
    copies.stop().unwrap().join().unwrap_err();
    swapper.close().unwrap();
}

#[test]
fn pieces_of_a_gpu_come_back_unchanged() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: pieces of a GPU");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{:?}", gpu.info());
    pieces_come_back_unchanged(Some(&gpu));
}

#[test]
fn pieces_of_a_fake_gpu_come_back_unchanged() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = manifest.join("../../kernels/tests/gpu/fake");
    let source = source.canonicalize().unwrap_or(source);
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = ["pieces_of_a_gpu_"];
    on_fake::run_on_fake(&source, &libraries, &[], &tests, on_fake::CUDA_INFO);
}
