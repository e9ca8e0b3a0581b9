//! Tests that when a rank dies, is stopped, gives up or hangs, the others do not wait forever and name the right rank.
//!
//! One rank of three does this to itself; the others must return an error that names it, in time, from whatever they were waiting for.

use std::time::{Duration, Instant};

use kernels::reduce::GradType;
use kernels_torch::HostBuffer;
use kernels_torch::collective::{Comm, ExchangeError, TensorExchange};
use tch::{Device, Kind, Tensor};
use training_ranks::{CollectiveError, Timeouts};

use crate::harness::{Meet, TIMEOUTS, all_succeed, connect, is_rank_of, run, signal_myself};

/// Many elements, so that the network's buffers do not hold them all.
const ELEMS: usize = 3 << 20;

/// Runs the operations of a step twice; errors are returned as they occur.
fn work(comm: &Comm) -> Result<(), CollectiveError> {
    let buffer = |kind| HostBuffer::zeros(kind, ELEMS).unwrap();
    let gather = comm.all_gather_start(buffer(Kind::BFloat16), ELEMS)?;
    let scatter = comm.reduce_scatter_start(buffer(Kind::Float), ELEMS, GradType::Fp32)?;
    comm.all_reduce_sum_f64(&mut [1.0])?;
    gather.wait()?;
    scatter.wait()?;
    comm.barrier()
}

/// Rank `bad` runs `act` after some steps; all others must fail with an error for which `holds` is true, within `limit` of their last successful
/// step. `timeouts` are those of the others.
fn the_others_name(
    test: &str,
    meet: Meet,
    bad: u32,
    timeouts: Timeouts,
    limit: Duration,
    act: impl Fn(Comm),
    holds: impl Fn(&CollectiveError) -> bool,
) {
    if is_rank_of(test) {
        let comm = connect(timeouts).unwrap();
        for _ in 0..3 {
            work(&comm).unwrap();
        }
        if comm.world().rank == bad {
            act(comm);
            std::process::exit(0);
        }
        let began = Instant::now();
        let error = work(&comm).unwrap_err();
        let took = began.elapsed();
        assert!(holds(&error), "{error:?}");
        assert!(took < limit, "{took:?}: {error}");
        // The connection stays broken and returns the same error.
        assert_eq!(comm.barrier().unwrap_err(), error);
        drop(comm);
        let took = began.elapsed();
        assert!(took < limit + SOON, "ending took {took:?}");
        std::process::exit(0);
    }
    all_succeed(&run(test, 3, meet, &[]), |rank| rank != bad);
}

/// Less than the time limit of an operation.
const SOON: Duration = Duration::from_secs(15);

#[test]
fn a_killed_rank_is_named_by_all_others() {
    let name = "gone::a_killed_rank_is_named_by_all_others";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Died { rank: 1, .. });
    let act = |_comm: Comm| signal_myself("KILL");
    the_others_name(name, Meet::Dir, 1, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_killed_neighbour_is_named_by_an_exchange() {
    let name = "gone::a_killed_neighbour_is_named_by_an_exchange";
    if is_rank_of(name) {
        let comm = connect(TIMEOUTS).unwrap();
        let exchange = TensorExchange::connect(&comm, 2, None).unwrap();
        let parts = Tensor::zeros([2, ELEMS as i64], (Kind::Float, Device::Cpu));
        drop(exchange.all_to_all(&parts).unwrap());
        if comm.world().rank == 1 {
            signal_myself("KILL");
        }
        let began = Instant::now();
        let error = exchange.all_to_all(&parts).unwrap_err();
        let ExchangeError::Collective(CollectiveError::Died { rank: 1, .. }) = error else {
            panic!("{error:?}");
        };
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        std::process::exit(0);
    }
    all_succeed(&run(name, 2, Meet::Dir, &[]), |rank| rank != 1);
}

#[test]
fn a_rank_killed_with_an_operation_under_way_is_named() {
    let name = "gone::a_rank_killed_with_an_operation_under_way_is_named";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Died { rank: 0, .. });
    let act = |comm: Comm| {
        let buffer = HostBuffer::zeros(Kind::BFloat16, ELEMS).unwrap();
        let _gather = comm.all_gather_start(buffer, ELEMS).unwrap();
        signal_myself("KILL");
    };
    the_others_name(name, Meet::Dir, 0, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_stopped_rank_is_named_by_all_others() {
    let name = "gone::a_stopped_rank_is_named_by_all_others";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Silent { rank: 2, .. });
    let act = |_comm: Comm| signal_myself("STOP");
    the_others_name(name, Meet::Dir, 2, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_killed_rank_is_named_over_tcp_by_its_silence() {
    let name = "gone::a_killed_rank_is_named_over_tcp_by_its_silence";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Silent { rank: 1, .. });
    let act = |_comm: Comm| signal_myself("KILL");
    the_others_name(name, Meet::Tcp, 1, TIMEOUTS, SOON, act, holds);
}

#[test]
fn the_rank_that_runs_the_store_is_named_when_it_is_killed() {
    let name = "gone::the_rank_that_runs_the_store_is_named_when_it_is_killed";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Died { rank: 0, .. });
    let act = |_comm: Comm| signal_myself("KILL");
    the_others_name(name, Meet::Tcp, 0, TIMEOUTS, SOON, act, holds);
}

#[test]
fn the_rank_that_runs_the_store_is_named_when_it_is_stopped() {
    let name = "gone::the_rank_that_runs_the_store_is_named_when_it_is_stopped";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Silent { rank: 0, .. });
    let act = |_comm: Comm| signal_myself("STOP");
    the_others_name(name, Meet::Tcp, 0, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_rank_that_gives_up_is_named_with_its_reason() {
    let name = "gone::a_rank_that_gives_up_is_named_with_its_reason";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Left { rank: 1, reason, .. } if reason == "no space left on /mnt/nvme0");
    let act = |comm: Comm| comm.give_up("no space left on /mnt/nvme0");
    the_others_name(name, Meet::Dir, 1, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_rank_that_runs_the_store_and_gives_up_is_named_with_its_reason() {
    let name = "gone::a_rank_that_runs_the_store_and_gives_up_is_named_with_its_reason";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Left { rank: 0, reason, .. } if reason == "the disk is full");
    let act = |comm: Comm| {
        comm.give_up("the disk is full");
        drop(comm);
    };
    the_others_name(name, Meet::Tcp, 0, TIMEOUTS, SOON, act, holds);
}

#[test]
fn a_rank_that_just_ends_is_named() {
    let name = "gone::a_rank_that_just_ends_is_named";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Left { rank: 2, reason, .. } if reason.contains("without saying why"));
    the_others_name(name, Meet::Dir, 2, TIMEOUTS, SOON, drop, holds);
}

#[test]
fn a_rank_that_is_alive_but_does_not_come_is_named() {
    let name = "gone::a_rank_that_is_alive_but_does_not_come_is_named";
    let holds = |error: &CollectiveError| matches!(error, CollectiveError::Behind { ranks, .. } if ranks == &[1]);
    let timeouts = Timeouts {
        operation: Duration::from_secs(2),
        ..TIMEOUTS
    };
    let act = |_: Comm| std::thread::sleep(Duration::from_secs(6));
    the_others_name(name, Meet::Dir, 1, timeouts, SOON, act, holds);
}
