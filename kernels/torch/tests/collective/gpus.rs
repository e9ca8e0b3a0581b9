//! Tests collectives between GPUs: NCCL gets the right counts, places and formats, an operation starts only when its stream has reached it, and no
//! stream waits forever for a dead rank.
//!
//! Runs with one rank, and with as many as there are GPUs; skips without a GPU. Results are compared with Gloo's on the same bytes.

use std::time::{Duration, Instant};

use kernels::gpu::{DeviceBuffer, Gpu, Stream};
use kernels::reduce::GradType;
use kernels_torch::HostBuffer;
use kernels_torch::collective::{Comm, GpuComm};
use tch::Kind;
use training_ranks::CollectiveError;

use crate::harness::{
    MEASURED, Meet, all_succeed, connect, is_rank_of, on_ranks, run, signal_myself,
};
use crate::values::filled;

/// Returns the number of GPUs; prints what is missing if there is none.
fn gpus(test: &str) -> Option<u32> {
    if is_rank_of(test) {
        return Some(1);
    }
    match Gpu::count() {
        Ok(count) => Some(count),
        Err(error) => {
            println!("skipped: no GPU for NCCL ({error})");
            None
        }
    }
}

/// Elements of a shard that keeps a GPU busy for some time; the fake driver is slow.
fn large() -> usize {
    match std::env::var_os("KERNELS_FAKE") {
        Some(_) => 70_000,
        None => 4 << 20,
    }
}

/// Returns this rank's GPU, a stream of its own, and the connection with the others.
fn open(comm: &Comm) -> (Gpu, Stream, GpuComm) {
    let gpu = Gpu::open(comm.world().local_rank).unwrap();
    let stream = gpu.stream().unwrap();
    let gpus = GpuComm::connect(comm, &gpu).unwrap();
    (gpu, stream, gpus)
}

fn uploaded(gpu: &Gpu, stream: &Stream, mut from: HostBuffer) -> DeviceBuffer {
    let bytes = from.bytes_mut();
    let buffer = gpu.alloc(bytes.len()).unwrap();
    gpu.upload(stream, &buffer, &[(0, bytes)]).unwrap();
    buffer
}

fn downloaded(gpu: &Gpu, stream: &Stream, from: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; from.bytes()];
    gpu.download(stream, from, &mut [(0, &mut bytes)]).unwrap();
    bytes
}

/// Returns a number whose sums are exact in every format, and therefore the same in every order.
fn small(rank: usize, elem: usize) -> f32 {
    ((rank * 5 + elem * 3) % 17) as f32 - 8.0
}

#[test]
fn gpus_gather_and_sum_what_gloo_does() {
    const NAME: &str = "gpus::gpus_gather_and_sum_what_gloo_does";
    let Some(count) = gpus(NAME) else { return };
    let mut counts = vec![1, count];
    counts.dedup();
    on_ranks(NAME, &counts, Meet::Dir, |comm| {
        let (gpu, stream, gpus) = open(&comm);
        let (rank, ranks) = (comm.world().rank as usize, comm.world().ranks as usize);
        for (grad_type, kind) in [
            (GradType::Fp32, Kind::Float),
            (GradType::Bf16, Kind::BFloat16),
            (GradType::Fp16, Kind::Half),
        ] {
            for shard in [0, 1, 7, 4099, large()] {
                let elems = ranks * shard;
                let own = || filled(kind, elems, |elem| small(rank, elem));
                let on_gpu = uploaded(&gpu, &stream, own());
                let elem_bytes = grad_type.elem_bytes();
                gpus.all_gather(&stream, on_gpu.at(0), elems, elem_bytes)
                    .unwrap();
                let gathered = downloaded(&gpu, &stream, &on_gpu);
                let on_gpu = uploaded(&gpu, &stream, own());
                gpus.reduce_scatter(&stream, on_gpu.at(0), elems, grad_type)
                    .unwrap();
                let summed = downloaded(&gpu, &stream, &on_gpu);
                gpus.check().unwrap();

                let pending = comm.all_gather_start(own(), elems).unwrap();
                let shown = format!("{grad_type:?}, {ranks} shards of {shard} elements");
                assert!(
                    pending.wait().unwrap().bytes_mut() == gathered,
                    "gathered {shown}"
                );
                let pending = comm.reduce_scatter_start(own(), elems, grad_type).unwrap();
                let shard_bytes = shard * elem_bytes;
                let place = rank * shard_bytes..(rank + 1) * shard_bytes;
                assert!(
                    pending.wait().unwrap().bytes_mut()[place.clone()] == summed[place],
                    "summed {shown}"
                );
            }
        }
        for part in [0, 1, 4099, large()] {
            let own = || {
                filled(Kind::Float, ranks * part, |elem| {
                    (rank * ranks * part + elem) as f32
                })
            };
            let sent = uploaded(&gpu, &stream, own());
            let received = gpu.alloc(sent.bytes()).unwrap();
            let elems = ranks * part;
            gpus.all_to_all(&stream, sent.at(0), received.at(0), elems, 4)
                .unwrap();
            let received = downloaded(&gpu, &stream, &received);
            gpus.check().unwrap();
            let expected = comm.all_to_all(own()).unwrap().bytes_mut().to_vec();
            assert!(received == expected, "{ranks} parts of {part} elements");
        }
        let values: Vec<u8> = (0..40)
            .flat_map(|i| f64::from(i + rank as i32).to_le_bytes())
            .collect();
        let on_gpu = gpu.alloc(values.len()).unwrap();
        gpu.upload(&stream, &on_gpu, &[(0, &values)]).unwrap();
        gpus.all_reduce_sum_f64(&stream, on_gpu.at(0), 40).unwrap();
        let sums = downloaded(&gpu, &stream, &on_gpu);
        for (i, sum) in sums.chunks_exact(8).enumerate() {
            let expected: f64 = (0..ranks).map(|rank| (i + rank) as f64).sum();
            assert_eq!(sum, expected.to_le_bytes());
        }
        comm.barrier().unwrap();
        drop(gpus);
        comm.close().unwrap();
    });
}

#[test]
fn operations_follow_the_order_of_their_stream() {
    const NAME: &str = "gpus::operations_follow_the_order_of_their_stream";
    let Some(count) = gpus(NAME) else { return };
    on_ranks(NAME, &[count], Meet::Dir, |comm| {
        let (gpu, stream, gpus) = open(&comm);
        let (rank, ranks) = (comm.world().rank as usize, comm.world().ranks as usize);
        let elems = ranks * large();
        let work = gpu.alloc(elems * 4).unwrap();
        let source = uploaded(
            &gpu,
            &stream,
            filled(Kind::Float, elems, |elem| small(rank, elem)),
        );
        let results: Vec<DeviceBuffer> = (0..20).map(|_| gpu.alloc(elems * 4).unwrap()).collect();
        let began = Instant::now();
        for result in &results {
            // The host does not wait in between.
            stream.copy(source.at(0), work.at(0), elems * 4).unwrap();
            gpus.all_gather(&stream, work.at(0), elems, 4).unwrap();
            stream.copy(work.at(0), result.at(0), elems * 4).unwrap();
        }
        let enqueued = began.elapsed();
        stream.synchronize().unwrap();
        gpus.check().unwrap();
        if rank == 0 {
            let gb_s = 20.0 * (elems * 4) as f64 / began.elapsed().as_secs_f64() / 1e9;
            println!(
                "{MEASURED}all-gather on {ranks} GPUs: {gb_s:.0} GB/s of gathered bytes, enqueued in {enqueued:?}"
            );
        }
        let shard = elems / ranks;
        let expected = filled(Kind::Float, elems, |elem| small(elem / shard, elem))
            .bytes_mut()
            .to_vec();
        for result in &results {
            assert!(downloaded(&gpu, &stream, result) == expected);
        }
        comm.barrier().unwrap();
        drop(gpus);
        comm.close().unwrap();
    });
}

#[test]
fn a_killed_rank_ends_the_streams_of_the_others_and_is_named() {
    const NAME: &str = "gpus::a_killed_rank_ends_the_streams_of_the_others_and_is_named";
    let Some(count) = gpus(NAME) else { return };
    if is_rank_of(NAME) {
        let comm = connect(crate::harness::TIMEOUTS).unwrap();
        let (gpu, stream, gpus) = open(&comm);
        if comm.world().rank == 1 {
            signal_myself("KILL");
        }
        let elems = comm.world().ranks as usize * large();
        let buffer = gpu.alloc(elems * 4).unwrap();
        let began = Instant::now();
        // NCCL itself would wait forever.
        let ended = (0..1000).find_map(|_| {
            let gathered = gpus.all_gather(&stream, buffer.at(0), elems, 4);
            let _ = stream.synchronize();
            gathered.and_then(|()| gpus.check()).err()
        });
        assert!(
            // A killed process that used a GPU takes seconds to disappear, so it may be silent before it counts as dead.
            matches!(
                ended,
                Some(
                    CollectiveError::Died { rank: 1, .. } | CollectiveError::Silent { rank: 1, .. }
                )
            ),
            "{ended:?}"
        );
        drop((gpus, comm));
        assert!(
            began.elapsed() < Duration::from_secs(15),
            "{:?}",
            began.elapsed()
        );
        std::process::exit(0);
    }
    if count < 2 {
        println!("skipped: one GPU only: nobody else to be killed");
        return;
    }
    all_succeed(&run(NAME, count, Meet::Dir, &[]), |rank| rank != 1);
}
