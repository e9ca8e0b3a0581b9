//! Tests the values of collectives: every shard in its place, no tail lost or overwritten, sums in rank order rounded once, and operations that do
//! not mix up their bytes. Every value is compared with what one process computes alone.

use half::{bf16, f16};
use kernels::reduce::GradType;
use kernels_torch::HostBuffer;
use kernels_torch::collective::{Comm, TensorExchange};
use tch::{Kind, Tensor};
use training_ranks::{Rendezvous, World};

use crate::harness::{Meet, TIMEOUTS, all_succeed, is_rank_of, on_ranks, run};

const RANKS: &[u32] = &[1, 2, 3, 4];

/// Elements of a shard: none, one, odd, and more than one packet of the network.
const SHARD_ELEMS: [usize; 5] = [0, 1, 7, 4099, 150_001];

/// Elements of the buffer after the gathered ones, which must not change.
const TAIL_ELEMS: usize = 3;

/// Returns a value that identifies its origin, exact in every format.
fn value(rank: usize, elem: usize) -> f32 {
    let whole = (rank * 31 + elem * 7) % 255;
    whole as f32 - 100.0
}

fn encode(kind: Kind, value: f32) -> Vec<u8> {
    match kind {
        Kind::Float => value.to_le_bytes().to_vec(),
        Kind::Double => f64::from(value).to_le_bytes().to_vec(),
        Kind::BFloat16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Kind::Half => f16::from_f32(value).to_le_bytes().to_vec(),
        other => panic!("not tried: {other:?}"),
    }
}

/// Makes a buffer with `value` of each element's number.
pub(crate) fn filled(kind: Kind, elems: usize, value: impl Fn(usize) -> f32) -> HostBuffer {
    let mut buffer = HostBuffer::zeros(kind, elems).unwrap();
    let bytes: Vec<u8> = (0..elems)
        .flat_map(|elem| encode(kind, value(elem)))
        .collect();
    buffer.bytes_mut().copy_from_slice(&bytes);
    buffer
}

fn who(comm: &Comm) -> (usize, usize) {
    (comm.world().rank as usize, comm.world().ranks as usize)
}

#[test]
fn every_shard_arrives_in_its_place_on_every_rank() {
    const NAME: &str = "values::every_shard_arrives_in_its_place_on_every_rank";
    on_ranks(NAME, RANKS, Meet::Dir, |comm| {
        let (rank, ranks) = who(&comm);
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            for shard in SHARD_ELEMS {
                let elems = ranks * shard;
                let mine = |elem: usize| match elem {
                    elem if elem >= elems => 77.0,
                    elem if elem / shard == rank => value(rank, elem % shard),
                    _ => -1.0,
                };
                let buffer = filled(kind, elems + TAIL_ELEMS, mine);
                let mut all = comm
                    .all_gather_start(buffer, elems)
                    .unwrap()
                    .wait()
                    .unwrap();
                let expected = |elem: usize| match elem {
                    elem if elem >= elems => 77.0,
                    elem => value(elem / shard, elem % shard),
                };
                let mut expected = filled(kind, elems + TAIL_ELEMS, expected);
                assert!(
                    all.bytes_mut() == expected.bytes_mut(),
                    "{kind:?}, shards of {shard} elements"
                );
            }
        }
        comm.close().unwrap();
    });
}

#[test]
fn every_part_reaches_its_rank_also_among_neighbours() {
    const NAME: &str = "values::every_part_reaches_its_rank_also_among_neighbours";
    on_ranks(NAME, &[1, 2, 4], Meet::Dir, |comm| {
        let (rank, ranks) = who(&comm);
        for part in SHARD_ELEMS {
            // Part r of rank s has the numbers of both.
            let of = |from: usize, to: usize, elem: usize| value(from * ranks + to, elem);
            let sent = |elem: usize| of(rank, elem / part, elem % part);
            let received = |elem: usize| of(elem / part, rank, elem % part);
            let sent = filled(Kind::Float, ranks * part, sent);
            let mut found = comm.all_to_all(sent).unwrap();
            let mut expected = filled(Kind::Float, ranks * part, received);
            assert!(found.bytes_mut() == expected.bytes_mut(), "parts of {part}");
        }
        if ranks == 1 {
            return comm.close().unwrap();
        }
        let exchange = TensorExchange::connect(&comm, 2, None).unwrap();
        assert_eq!((exchange.rank(), exchange.ranks()), (rank % 2, 2));
        let group = (rank / 2) as i64;
        // Number of the group, of the rank that sends and of the one that receives.
        let parts = [0, 1].map(|to| 100 * group + 10 * (rank % 2) as i64 + to);
        // Not contiguous.
        let parts = Tensor::from_slice(&parts)
            .view([2, 1])
            .expand([2, 3], false);
        let found = exchange.all_to_all(&parts).unwrap();
        assert_eq!(found.size(), [2, 3]);
        let expected = [0, 1].map(|from| 100 * group + 10 * from + (rank % 2) as i64);
        for (from, expected) in expected.into_iter().enumerate() {
            let found = Vec::<i64>::try_from(found.get(from as i64)).unwrap();
            assert_eq!(found, [expected; 3], "from neighbour {from}");
        }
        let mut sums = [1.0, rank as f64];
        exchange.sum(&mut sums).unwrap();
        assert_eq!(sums, [2.0, (4 * (rank / 2) + 1) as f64]);
        drop(exchange);
        comm.close().unwrap();
    });
}

/// Returns values whose sum depends on the order.
fn rough(rank: usize, elem: usize) -> f32 {
    let mut bits =
        (rank as u32 + 1).wrapping_mul(2_654_435_761) ^ (elem as u32 + 1).wrapping_mul(40_503);
    bits ^= bits << 13;
    bits ^= bits >> 17;
    bits ^= bits << 5;
    let exponent = [1.0f32, 1e3, 1e-3, 1e5][(bits >> 8) as usize % 4];
    (bits as f32 / u32::MAX as f32 - 0.5) * exponent
}

/// Returns a value as it is read back from its format.
fn stored(grad_type: GradType, value: f32) -> f32 {
    match grad_type {
        GradType::Fp32 => value,
        GradType::Bf16 => bf16::from_f32(value).to_f32(),
        GradType::Fp16 => f16::from_f32(value).to_f32(),
    }
}

#[test]
fn every_rank_gets_the_sum_of_its_shard_in_the_ranks_order() {
    const NAME: &str = "values::every_rank_gets_the_sum_of_its_shard_in_the_ranks_order";
    on_ranks(NAME, RANKS, Meet::Dir, |comm| {
        let (rank, ranks) = who(&comm);
        for (grad_type, kind) in [
            (GradType::Fp32, Kind::Float),
            (GradType::Bf16, Kind::BFloat16),
            (GradType::Fp16, Kind::Half),
        ] {
            for shard in SHARD_ELEMS {
                let elems = ranks * shard;
                let grads = filled(kind, elems + TAIL_ELEMS, |elem| rough(rank, elem));
                let pending = comm.reduce_scatter_start(grads, elems, grad_type);
                let mut sums = pending.unwrap().wait().unwrap();
                let expected = |elem: usize| {
                    let own = elem < elems && elem / shard == rank;
                    if !own || ranks == 1 {
                        return rough(rank, elem);
                    }
                    (0..ranks)
                        .map(|rank| stored(grad_type, rough(rank, elem)))
                        .reduce(|sum, x| sum + x)
                        .unwrap()
                };
                let mut expected = filled(kind, elems + TAIL_ELEMS, expected);
                assert!(
                    sums.bytes_mut() == expected.bytes_mut(),
                    "{grad_type:?}, shards of {shard} elements"
                );
            }
        }
        comm.close().unwrap();
    });
}

#[test]
fn sums_of_f64_have_the_same_bits_on_every_rank() {
    const NAME: &str = "values::sums_of_f64_have_the_same_bits_on_every_rank";
    on_ranks(NAME, RANKS, Meet::Dir, |comm| {
        let (rank, ranks) = who(&comm);
        let x = |rank: usize, i: usize| f64::from(rough(rank, i)) * 1e9 + 1.0 / 3.0;
        for count in [0, 1, 40] {
            let mut values: Vec<f64> = (0..count).map(|i| x(rank, i)).collect();
            comm.all_reduce_sum_f64(&mut values).unwrap();
            for (i, value) in values.iter().enumerate() {
                let expected = (1..ranks).fold(x(0, i), |sum, rank| sum + x(rank, i));
                assert_eq!(value.to_bits(), expected.to_bits());
            }
        }
        comm.close().unwrap();
    });
}

#[test]
fn several_operations_go_on_at_once_and_end_in_any_order() {
    const NAME: &str = "values::several_operations_go_on_at_once_and_end_in_any_order";
    on_ranks(NAME, &[3], Meet::Dir, |comm| {
        let (rank, ranks) = who(&comm);
        for round in 0..10 {
            // Not at the same time: one rank or another is late.
            std::thread::sleep(std::time::Duration::from_millis(
                ((rank + round) % 3) as u64 * 3,
            ));
            let elems = 3 * 5000;
            let gather = |shift: usize| {
                let buffer = filled(Kind::Float, elems, |elem| value(rank + shift, elem));
                comm.all_gather_start(buffer, elems).unwrap()
            };
            let (first, second) = (gather(0), gather(10));
            let grads = filled(Kind::Float, elems, |elem| rough(rank, elem));
            let sum = comm
                .reduce_scatter_start(grads, elems, GradType::Fp32)
                .unwrap();
            // Nobody waits for this operation.
            drop(gather(20));
            let mut values = [rank as f64];
            comm.all_reduce_sum_f64(&mut values).unwrap();
            assert_eq!(values, [3.0]);
            let mut sum = sum.wait().unwrap();
            let expected = |elem: usize| match elem / 5000 {
                shard if shard == rank => {
                    (1..ranks).fold(rough(0, elem), |s, r| s + rough(r, elem))
                }
                _ => rough(rank, elem),
            };
            assert!(sum.bytes_mut() == filled(Kind::Float, elems, expected).bytes_mut());
            for (pending, shift) in [(second, 10), (first, 0)] {
                let mut all = pending.wait().unwrap();
                let expected = |elem: usize| value(elem / 5000 + shift, elem);
                assert!(all.bytes_mut() == filled(Kind::Float, elems, expected).bytes_mut());
            }
        }
        comm.close().unwrap();
    });
}

#[test]
fn everyone_has_what_one_rank_broadcasts() {
    const NAME: &str = "values::everyone_has_what_one_rank_broadcasts";
    on_ranks(NAME, RANKS, Meet::Tcp, |comm| {
        let (rank, ranks) = who(&comm);
        for root in 0..ranks {
            for length in [0, 1, 100_000] {
                let of = |rank: usize| vec![rank as u8 + 1; length];
                // The length that the other ranks pass must not matter.
                let own = if rank == root {
                    of(rank)
                } else {
                    vec![9; rank]
                };
                let found = comm.broadcast_bytes(root as u32, own).unwrap();
                assert_eq!(found, of(root));
            }
        }
        comm.close().unwrap();
    });
}

#[test]
fn a_barrier_waits_for_the_last_and_differences_are_named() {
    const NAME: &str = "values::a_barrier_waits_for_the_last_and_differences_are_named";
    on_ranks(NAME, &[3], Meet::Dir, |comm| {
        let (rank, _) = who(&comm);
        comm.barrier().unwrap();
        let dir = std::env::var(training_ranks::DIR_VARIABLE).unwrap();
        let late = std::path::Path::new(&dir).join("late");
        if rank == 1 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            std::fs::write(&late, "").unwrap();
        }
        comm.barrier().unwrap();
        assert!(late.exists(), "it did not wait for rank 1");

        comm.same_everywhere("the model", "a llama").unwrap();
        let own = if rank == 2 {
            "another llama"
        } else {
            "a llama"
        };
        let error = comm
            .same_everywhere("the model", own)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "the model is not the same on all ranks: rank 0 has a llama, rank 2 has another llama"
        );
        comm.close().unwrap();
    });
}

fn side_connection_works_beside_the_first(test: &str, meet: Meet) {
    const ROUNDS: u8 = 20;
    on_ranks(test, &[1, 3], meet, |comm| {
        let (rank, ranks) = who(&comm);
        let side = comm.connect_side().unwrap();
        let of = |round: u8| {
            (0..ranks as u8)
                .map(|rank| vec![rank, round])
                .collect::<Vec<_>>()
        };
        std::thread::scope(|scope| {
            // Ranks call the two connections in different orders.
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let all = side.all_gather_bytes(&[rank as u8, round]).unwrap();
                    assert_eq!(all, of(round));
                }
            });
            for round in ROUNDS..2 * ROUNDS {
                let all = comm.all_gather_bytes(&[rank as u8, round]).unwrap();
                assert_eq!(all, of(round));
            }
        });
        // Its end is not this rank's end.
        drop(side);
        comm.barrier().unwrap();
        comm.close().unwrap();
    });
}

#[test]
fn the_ranks_of_each_node_have_a_group_of_their_own() {
    const NAME: &str = "values::the_ranks_of_each_node_have_a_group_of_their_own";
    // Nodes with 2, 1 and 2 ranks.
    const PLACES: [(u32, u32); 5] = [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)];
    if !is_rank_of(NAME) {
        return all_succeed(&run(NAME, PLACES.len() as u32, Meet::Tcp, &[]), |_| true);
    }
    let world = World::from_env().unwrap();
    let (local_rank, local_ranks) = PLACES[world.rank as usize];
    let world = World {
        local_rank,
        local_ranks,
        ..world
    };
    let at = Rendezvous::from_env(&world).unwrap();
    let comm = Comm::connect(world, &at, TIMEOUTS).unwrap();
    let node = comm.connect_node().unwrap();
    let own = [world.rank as u8];
    let all = node.all_gather_bytes(&own).unwrap().concat();
    let first = own[0] - local_rank as u8;
    assert_eq!(all, Vec::from_iter(first..first + local_ranks as u8));
    // The first ranks of the nodes have one too.
    if local_rank == 0 {
        let node = [0, 2, 3].iter().position(|&first| first == world.rank);
        let firsts = comm.connect_first_ranks(node.unwrap() as u32, 3).unwrap();
        let all = firsts.all_gather_bytes(&own).unwrap().concat();
        assert_eq!(all, [0, 2, 3]);
    }
    assert_eq!(
        comm.all_gather_bytes(&own).unwrap().concat(),
        [0, 1, 2, 3, 4]
    );
    drop(node);
    comm.close().unwrap();
    std::process::exit(0);
}

#[test]
fn a_side_connection_works_beside_the_first_in_a_directory() {
    const NAME: &str = "values::a_side_connection_works_beside_the_first_in_a_directory";
    side_connection_works_beside_the_first(NAME, Meet::Dir);
}

#[test]
fn a_side_connection_works_beside_the_first_over_tcp() {
    const NAME: &str = "values::a_side_connection_works_beside_the_first_over_tcp";
    side_connection_works_beside_the_first(NAME, Meet::Tcp);
}
