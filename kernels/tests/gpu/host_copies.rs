//! Tests that copies in host memory have the bytes of their newest source.
//!
//! Likely faults are a copy that starts before its source is written, a source or a copy that is overwritten while it is
//! copied, and a copy that is put back before it is complete. The fake driver runs enqueued work only when it is waited
//! for, so a missing wait shows as other bytes.

use kernels::gpu::{Gpu, HostCopies};

use crate::device::{downloaded, gpu};

const BYTES: [usize; 3] = [100_000, 1, 50_000];

/// A buffer with `bytes` times `byte` that is complete.
fn filled(gpu: &Gpu, bytes: usize, byte: u8) -> kernels::gpu::DeviceBuffer {
    let buffer = gpu.alloc(bytes).unwrap();
    let ready = gpu.stream().unwrap();
    let content = vec![byte; bytes];
    gpu.upload(&ready, &buffer, &[(0, &content)]).unwrap();
    buffer
}

#[test]
fn copies_are_put_back_as_often_as_asked_and_replaced_by_newer_ones() {
    let Some(gpu) = gpu() else { return };
    let (compute, up) = (gpu.default_stream(), gpu.stream().unwrap());
    let mut copies = HostCopies::new(&gpu, &BYTES).unwrap();
    assert!(copies.host_bytes() >= BYTES.iter().sum());
    // One buffer for all, as units take turns in few.
    let buffer = gpu.alloc(BYTES[0] + 64).unwrap();
    let mut put_back = Vec::new();
    for pass in 0..3u8 {
        let content = |number: usize| pass * 50 + number as u8 + 1;
        for (number, bytes) in BYTES.into_iter().enumerate() {
            let source = filled(&gpu, bytes, content(number));
            compute.copy(source.at(0), buffer.at(64), bytes).unwrap();
            let written = compute.record().unwrap();
            let free = copies.keep(number, buffer.at(64), &written).unwrap();
            compute.wait(&free).unwrap();
            // Freeing waits for the device, which would hide a missing wait.
            std::mem::forget(source);
        }
        for number in (0..BYTES.len()).rev().chain(0..BYTES.len()) {
            let to = gpu.alloc(BYTES[number] + 64).unwrap();
            copies.put_back(number, to.at(64), &up).unwrap();
            put_back.push((number, content(number), to));
        }
    }
    for (number, byte, found) in put_back {
        let bytes = downloaded(&gpu, &up, &found, 64, BYTES[number]);
        assert!(bytes == vec![byte; BYTES[number]], "copy {number}, {byte}");
    }
}
