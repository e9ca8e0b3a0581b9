//! Tests that bytes arrive at their places and that freed memory is available again.
//!
//! Likely faults are a piece at a wrong offset, a copy still running when the call returns, an accepted range beyond a buffer, memory that stays
//! pinned, and leaked device memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::{downloaded, gpu, uploaded};
use crate::shared::Random;

const MIB: usize = 1 << 20;

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..len.div_ceil(8))
        .flat_map(|_| random.bits().to_le_bytes())
        .take(len)
        .collect()
}

#[test]
fn pieces_arrive_at_their_offsets_both_ways() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let bytes = random_bytes(1, 3 * MIB + 7);
    let (first, rest) = bytes.split_at(12_345);
    let (second, third) = rest.split_at(MIB);
    let buffer = gpu.alloc(bytes.len()).unwrap();
    assert_eq!(buffer.bytes(), bytes.len());
    // Unordered pieces, one of them empty.
    let pieces = [
        (12_345 + MIB, third),
        (0, first),
        (5, &[][..]),
        (12_345, second),
    ];
    gpu.upload(&stream, &buffer, &pieces).unwrap();
    assert!(downloaded(&gpu, &stream, &buffer, 0, bytes.len()) == bytes);
    let (mut low, mut high) = (vec![0; 1000], vec![0; 77]);
    gpu.download(&stream, &buffer, &mut [(2 * MIB, &mut high), (1, &mut low)])
        .unwrap();
    assert!(low == bytes[1..1001] && high == bytes[2 * MIB..2 * MIB + 77]);
}

#[test]
fn rates_of_copies_both_ways_are_those_of_copies_that_were_made() {
    let Some(gpu) = gpu() else { return };
    let start = std::time::Instant::now();
    let rates = gpu.copy_rates().unwrap();
    let elapsed_s = start.elapsed().as_secs_f64();
    println!("{rates:?}");
    for rate in [rates.to_gpu_bytes_per_s, rates.from_gpu_bytes_per_s] {
        // 512 MiB each way were copied within this time.
        assert!(
            (536_870_912.0 / elapsed_s..1e12).contains(&rate),
            "{rates:?} in {elapsed_s} s"
        );
    }
}

#[test]
fn copies_within_the_device_and_zeros_touch_their_range_only() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let bytes = random_bytes(2, MIB);
    let from = uploaded(&gpu, &stream, 0, &bytes);
    let to = uploaded(&gpu, &stream, 0, &vec![0xAB; MIB]);
    stream.copy(from.at(100), to.at(1000), 5001).unwrap();
    stream.fill_zero(to.at(10), 33).unwrap();
    let mut expected = vec![0xAB; MIB];
    expected[1000..6001].copy_from_slice(&bytes[100..5101]);
    expected[10..43].fill(0);
    assert!(downloaded(&gpu, &stream, &to, 0, MIB) == expected);
}

#[test]
fn a_range_beyond_its_buffer_or_over_itself_is_refused() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(1000).unwrap();
    let refused = |work: &dyn Fn()| catch_unwind(AssertUnwindSafe(work)).is_err();
    assert!(refused(&|| drop(stream.fill_zero(buffer.at(1), 1000))));
    assert!(refused(&|| drop(
        stream.fill_zero(buffer.at(usize::MAX), 2)
    )));
    assert!(refused(&|| drop(stream.copy(
        buffer.at(0),
        buffer.at(600),
        500
    ))));
    assert!(refused(&|| drop(stream.copy(
        buffer.at(0),
        buffer.at(499),
        500
    ))));
    stream.copy(buffer.at(0), buffer.at(500), 500).unwrap();
    assert!(refused(&|| drop(gpu.upload(
        &stream,
        &buffer,
        &[(999, &[0; 2])]
    ))));
    assert!(refused(&|| drop(gpu.download(
        &stream,
        &buffer,
        &mut [(0, &mut [0; 1001])]
    ))));
    stream.fill_zero(buffer.at(0), 1000).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn copies_enqueued_before_a_panic_are_done_when_it_is_caught() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(MIB).unwrap();
    let mut bytes = vec![1; MIB];
    // The second piece does not fit; the first is already in flight then.
    let pieces = [(0, &bytes[..]), (MIB, &bytes[..1])];
    catch_unwind(AssertUnwindSafe(|| gpu.upload(&stream, &buffer, &pieces))).unwrap_err();
    // The bytes belong to the caller again.
    bytes.fill(2);
    assert!(downloaded(&gpu, &stream, &buffer, 0, MIB) == vec![1; MIB]);
}

#[test]
fn memory_given_back_is_free_again() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    // Far more than the device has, unless it is freed.
    let bytes = (gpu.info().memory_bytes / 16) as usize;
    for _ in 0..40 {
        let buffer = gpu.alloc(bytes).unwrap();
        let clone = buffer.clone();
        drop(buffer);
        // The clone keeps the memory, and is dropped with work in flight.
        stream.fill_zero(clone.at(0), bytes).unwrap();
    }
    stream.synchronize().unwrap();
}

#[test]
fn more_memory_than_there_is_is_refused_and_named() {
    let Some(gpu) = gpu() else { return };
    let bytes = 2 * gpu.info().memory_bytes as usize;
    let error = gpu.alloc(bytes).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    assert!(gpu.free_bytes().unwrap() <= gpu.info().memory_bytes);
}

#[test]
fn registered_memory_is_pinned_until_it_is_dropped() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let memory = random_bytes(3, 8 * MIB);
    let address = memory.as_ptr() as usize;
    let dropped = Arc::new(AtomicBool::new(false));
    let keep = SetOnDrop(dropped.clone());
    let registration = gpu.register(address, memory.len(), Box::new(keep)).unwrap();
    assert_eq!(
        (registration.address(), registration.bytes()),
        (address, memory.len())
    );
    gpu.register(address, memory.len(), Box::new(()))
        .expect_err("it is pinned already");
    let buffer = uploaded(&gpu, &stream, 0, &memory);
    assert!(downloaded(&gpu, &stream, &buffer, 0, memory.len()) == memory);
    assert!(!dropped.load(Ordering::SeqCst));
    drop(registration);
    assert!(
        dropped.load(Ordering::SeqCst),
        "what kept the memory is let go"
    );
    drop(
        gpu.register(address, memory.len(), Box::new(()))
            .expect("unpinned, so it can be pinned again"),
    );
}

#[test]
fn memory_that_is_not_mapped_is_not_pinned() {
    let Some(gpu) = gpu() else { return };
    // The first page is never mapped.
    let error = gpu.register(4096, 4096, Box::new(())).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("4096 bytes of host memory at 0x1000"),
        "{error}"
    );
}

#[test]
fn borrowed_memory_is_written_and_read_and_stays_with_its_owner() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let bytes = random_bytes(4, MIB);
    let owner = gpu.alloc(MIB).unwrap();
    // SAFETY: `owner` outlives it, and `downloaded` waits for the copies.
    let borrowed = unsafe { gpu.borrowed_buffer(owner.address(), MIB) };
    gpu.upload(&stream, &borrowed, &[(0, &bytes)]).unwrap();
    drop(borrowed.clone());
    drop(borrowed);
    assert!(downloaded(&gpu, &stream, &owner, 0, MIB) == bytes);
}

#[test]
fn another_stream_can_wait_for_copies_before_the_host_has() {
    let Some(gpu) = gpu() else { return };
    let (copies, compute) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let bytes = random_bytes(5, MIB);
    let up = gpu.alloc(MIB).unwrap();
    let other = uploaded(&gpu, &compute, 0, &vec![1; MIB]);
    gpu.upload_then(&copies, &up, &[(0, &bytes)], || {
        compute.wait(&copies.record()?)?;
        compute.copy(up.at(0), other.at(0), MIB)
    })
    .unwrap();
    let mut found = vec![0; MIB];
    let mut taken = None;
    copies.wait(&compute.record().unwrap()).unwrap();
    gpu.download_then(&copies, &other, &mut [(0, &mut found)], || {
        taken = Some(copies.record()?);
        Ok(())
    })
    .unwrap();
    assert!(found == bytes);
    assert!(taken.expect("it ran").is_done().unwrap());
}

#[test]
fn copies_are_waited_for_when_what_comes_after_them_fails() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let buffer = gpu.alloc(MIB).unwrap();
    let mut bytes = vec![1; MIB];
    gpu.upload_then(&stream, &buffer, &[(0, &bytes)], || {
        gpu.alloc(usize::MAX / 2).map(drop)
    })
    .unwrap_err();
    bytes.fill(2);
    assert!(downloaded(&gpu, &stream, &buffer, 0, MIB) == vec![1; MIB]);
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
