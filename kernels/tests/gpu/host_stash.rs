//! Tests that contents stored in host memory come back unchanged.
//!
//! Likely faults are a copy that starts before its source is written, a buffer or host memory that is overwritten before its copy has ended, and
//! contents used before they have arrived. The fake driver runs enqueued work only when it is waited for, so a missing wait shows as other bytes.

use kernels::gpu::{Gpu, HostStash, Stream};

use crate::device::{downloaded, gpu};

const PIECE_BYTES: usize = 100_000;

/// Fills the next buffer with `byte` on `stream` and stores it.
fn put(gpu: &Gpu, host_stash: &mut HostStash, stream: &Stream, piece: usize, byte: u8) {
    let source = gpu.alloc(PIECE_BYTES).unwrap();
    let ready = gpu.stream().unwrap();
    gpu.upload(&ready, &source, &[(0, &vec![byte; PIECE_BYTES])])
        .unwrap();
    let room = host_stash.room(stream).unwrap();
    stream.copy(source.at(0), room.at(0), PIECE_BYTES).unwrap();
    host_stash.put(piece, stream).unwrap();
    // Freeing waits for the device, which would hide a missing wait.
    std::mem::forget(source);
}

/// Takes a piece on `stream` into a buffer of its own, without waiting.
fn copy_of_piece(
    gpu: &Gpu,
    host_stash: &mut HostStash,
    stream: &Stream,
    piece: usize,
) -> kernels::gpu::DeviceBuffer {
    let to = gpu.alloc(PIECE_BYTES).unwrap();
    let from = host_stash.buffer_of(piece, stream).unwrap();
    stream.copy(from.at(0), to.at(0), PIECE_BYTES).unwrap();
    host_stash.taken(piece, stream).unwrap();
    to
}

#[test]
fn pieces_come_back_as_they_were_put_pass_after_pass() {
    let Some(gpu) = gpu() else { return };
    let compute = gpu.default_stream();
    let pieces = 7;
    let mut host_stash = HostStash::new(&gpu, pieces, PIECE_BYTES).unwrap();
    assert!(host_stash.host_bytes() >= pieces * PIECE_BYTES);
    for pass in 0..3 {
        let content = |piece: usize| (pass * 50 + piece + 1) as u8;
        for piece in 0..pieces {
            put(&gpu, &mut host_stash, &compute, piece, content(piece));
        }
        let mut taken = Vec::new();
        for piece in (0..pieces).rev() {
            taken.push((piece, copy_of_piece(&gpu, &mut host_stash, &compute, piece)));
            // The next piece arrives while this one is used; on every second pass nobody fetches it early.
            if piece > 0 && pass % 2 == 0 {
                host_stash.fetch(piece - 1).unwrap();
            }
        }
        for (piece, found) in taken {
            let bytes = downloaded(&gpu, &compute, &found, 0, PIECE_BYTES);
            assert!(
                bytes == vec![content(piece); PIECE_BYTES],
                "piece {piece} of pass {pass}"
            );
        }
    }
}
