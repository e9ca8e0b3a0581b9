//! Tests that streams run concurrently, that events order them, and that compiler errors name the fault.
//!
//! Likely faults are a wait that is missing or on the wrong stream, so that a copy sees old bytes, and an event that is reported too early.

use std::time::{Duration, Instant};

use kernels::gpu::{CompileOptions, DeviceBuffer, Gpu, GpuError, Stream};

use crate::device::{downloaded, gpu};

/// Bytes of one copy, which takes some tens of microseconds of a GPU's memory bandwidth.
fn copy_bytes(gpu: &Gpu) -> usize {
    (gpu.info().memory_bytes as usize / 1024).min(64 << 20)
}

/// Enqueues work of some milliseconds that ends with `last` in the first byte of `buffer`.
fn enqueue_long_work(gpu: &Gpu, stream: &Stream, buffer: &DeviceBuffer, last: &DeviceBuffer) {
    let other = gpu.alloc(copy_bytes(gpu)).unwrap();
    for _ in 0..300 {
        stream
            .copy(other.at(0), buffer.at(0), copy_bytes(gpu))
            .unwrap();
    }
    stream
        .copy(last.at(0), buffer.at(0), copy_bytes(gpu))
        .unwrap();
    // Kept until the caller has synchronized: freeing waits for the device, which would hide a missing wait.
    std::mem::forget(other);
}

fn filled(gpu: &Gpu, stream: &Stream, byte: u8) -> DeviceBuffer {
    let buffer = gpu.alloc(copy_bytes(gpu)).unwrap();
    gpu.upload(stream, &buffer, &[(0, &vec![byte; copy_bytes(gpu)])])
        .unwrap();
    buffer
}

#[test]
fn a_stream_that_waits_for_an_event_sees_what_came_before_it() {
    let Some(gpu) = gpu() else { return };
    let (first, second) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let (shared, last) = (filled(&gpu, &first, 1), filled(&gpu, &first, 7));
    let copy = filled(&gpu, &first, 2);
    enqueue_long_work(&gpu, &first, &shared, &last);
    let written = first.record().unwrap();
    assert!(
        !written.is_done().unwrap(),
        "the work takes milliseconds, so that the wait below matters"
    );
    second.wait(&written).unwrap();
    drop(written);
    second
        .copy(shared.at(0), copy.at(0), copy_bytes(&gpu))
        .unwrap();
    assert!(downloaded(&gpu, &second, &copy, 0, copy_bytes(&gpu)) == vec![7; copy_bytes(&gpu)]);
}

#[test]
fn streams_do_not_wait_for_each_other_by_themselves() {
    let Some(gpu) = gpu() else { return };
    let (busy, free) = (gpu.default_stream(), gpu.stream().unwrap());
    let (shared, last) = (filled(&gpu, &busy, 1), filled(&gpu, &busy, 7));
    enqueue_long_work(&gpu, &busy, &shared, &last);
    let written = busy.record().unwrap();
    free.fill_zero(last.at(0), 1).unwrap();
    free.synchronize().unwrap();
    assert!(
        !written.is_done().unwrap(),
        "a stream waited for the default stream"
    );
    written.synchronize().unwrap();
    assert!(written.is_done().unwrap());
}

#[test]
fn a_borrowed_stream_is_the_owners_and_outlives_the_borrow() {
    let Some(gpu) = gpu() else { return };
    let (owner, second) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let (shared, last) = (filled(&gpu, &owner, 1), filled(&gpu, &owner, 7));
    let copy = filled(&gpu, &owner, 2);
    enqueue_long_work(&gpu, &owner, &shared, &last);
    // SAFETY: `owner` outlives it.
    let borrowed = unsafe { gpu.borrowed_stream(owner.raw()) };
    let written = borrowed.record().unwrap();
    drop(borrowed);
    assert!(
        !written.is_done().unwrap(),
        "it stands behind the owner's work"
    );
    second.wait(&written).unwrap();
    second
        .copy(shared.at(0), copy.at(0), copy_bytes(&gpu))
        .unwrap();
    assert!(downloaded(&gpu, &second, &copy, 0, copy_bytes(&gpu)) == vec![7; copy_bytes(&gpu)]);
    owner.synchronize().unwrap();
}

#[test]
fn timed_events_tell_the_time_between_them() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let (shared, last) = (filled(&gpu, &stream, 1), filled(&gpu, &stream, 7));
    let start = Instant::now();
    let before = stream.record_timed().unwrap();
    enqueue_long_work(&gpu, &stream, &shared, &last);
    let after = stream.record_timed().unwrap();
    after.synchronize().unwrap();
    let elapsed = Duration::from_secs_f32(after.elapsed_ms_since(&before).unwrap() / 1e3);
    assert!(
        elapsed > Duration::from_millis(1),
        "{elapsed:?} for 300 copies"
    );
    assert!(
        elapsed <= start.elapsed() + Duration::from_millis(1),
        "{elapsed:?}"
    );
    let untimed = stream.record().unwrap();
    untimed.synchronize().unwrap();
    untimed
        .elapsed_ms_since(&before)
        .expect_err("an event without a time");
}

#[test]
fn a_source_that_is_wrong_gives_the_compilers_words() {
    let Some(gpu) = gpu() else { return };
    let source = "KERNEL broken(float *x) { x[0] = nowhere_declared; }";
    let error = gpu
        .compile("broken.cu", source, &CompileOptions::default())
        .unwrap_err();
    assert!(matches!(error, GpuError::Compile { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("nowhere_declared") && text.contains("broken.cu"),
        "{text}"
    );
    assert!(text.contains(&gpu.info().arch), "{text}");
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    let Some(gpu) = gpu() else { return };
    let module = gpu
        .compile(
            "fine.cu",
            "KERNEL fine(float *x) { x[0] = VALUE; }",
            &CompileOptions {
                defines: vec![("VALUE".to_owned(), "1.0f".to_owned())],
                contract: true,
            },
        )
        .unwrap();
    module.function("fine").unwrap();
    let error = module.function("not_fine").unwrap_err().to_string();
    assert!(
        error.contains("not_fine") && error.contains("fine.cu"),
        "{error}"
    );
}

#[test]
fn the_same_device_is_opened_once_and_one_too_many_is_refused() {
    let Some(gpu) = gpu() else { return };
    println!("{:?}", gpu.info());
    // As the kernel writes it: 0000:41:00.0.
    let pci = &gpu.info().pci;
    let digits = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    assert!(pci.len() >= 12 && pci.ends_with(".0"), "{pci}");
    assert!(
        pci.split([':', '.']).all(|part| part.chars().all(digits)),
        "{pci}"
    );
    let count = Gpu::count().unwrap();
    assert!(count >= 1);
    let error = Gpu::open(count).unwrap_err();
    assert!(
        error.is_absent() && error.to_string().contains(&format!("device {count}")),
        "{error}"
    );
    let again = Gpu::open(0).unwrap();
    assert!(std::ptr::eq(
        gpu.kernels().unwrap(),
        again.kernels().unwrap()
    ));
}
