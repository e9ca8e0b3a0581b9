//! Failures at random moments of a step: ranks, daemons and nodes are killed, and the link between the nodes is cut. After
//! each, the same command resumes the run.
//!
//! Errors that this test finds: a launcher or rank that does not end; a start that is refused after a failure; a step that was
//! committed is lost; state of different steps is mixed, so that later losses differ.
//!
//! `OFFLOADD_KILLS=100 OFFLOADD_PARTITIONS=50 cargo test -p trainer-torch --test nodes failures -- --nocapture` makes that many.

use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use training_state::run::CheckpointName;

use crate::harness::{Harness, Run, children, finish, spawn, succeed, until, words};
use crate::network::Network;
use crate::random::Random;
use crate::{END, SLACK, launcher, none};

const OPTIONS: [&str; 2] = ["--nnodes", "2"];

/// Longest random delay after a step: several steps take this long.
const DELAY_MS: u64 = 60;

/// Steps of the undisturbed run in one start, which has a time limit.
const STEPS_OF_A_START: u64 = 300;

#[derive(Clone, Copy, Debug)]
enum Failure {
    Rank(u32),
    Daemon(u32),
    Node(u32),
    Partition,
}

fn number_from(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// Failures of all kinds in random order.
fn failures(random: &mut Random) -> Vec<Failure> {
    use Failure::{Daemon, Node, Partition, Rank};
    let kills = [Node(1), Rank(0), Daemon(1), Node(0), Rank(1), Daemon(0)];
    let kills = (kills.into_iter().cycle()).take(number_from("OFFLOADD_KILLS", 1));
    let partitions = number_from("OFFLOADD_PARTITIONS", 0);
    let mut all: Vec<Failure> = kills.collect();
    all.extend(std::iter::repeat_n(Partition, partitions));
    for i in (1..all.len()).rev() {
        all.swap(i, random.below(i as u64 + 1) as usize);
    }
    all
}

/// Starts the launcher of every node; node 0 comes last.
fn start(network: &Network, run: &Run) -> [Child; 2] {
    let one = spawn(launcher(network, run, 1, &OPTIONS));
    [spawn(launcher(network, run, 0, &OPTIONS)), one]
}

fn strike(failure: Failure, network: &Network, launchers: &[Child; 2]) {
    let only_child = |of: u32, what: &str| -> Pid {
        let found = children(of);
        assert_eq!(found.len(), 1, "{failure:?}: {what}");
        found[0]
    };
    let rank = |node: u32| only_child(launchers[node as usize].id(), "a launcher's rank");
    // A process may have ended because of another one.
    match failure {
        Failure::Rank(node) => _ = kill_process(rank(node), Signal::KILL),
        Failure::Daemon(node) => {
            let rank = rank(node).as_raw_nonzero().get() as u32;
            _ = kill_process(only_child(rank, "a rank's daemon"), Signal::KILL);
        }
        Failure::Node(node) => {
            network.cut(node);
            network.kill(node);
        }
        Failure::Partition => network.cut(1),
    }
}

/// Step that a start resumed at, as its first rank has printed it.
fn resumed_at(out: &str) -> u64 {
    let after = out.split("resumed at step ").nth(1);
    let digits = after.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    digits.map_or(0, |digits| digits.parse().expect("a step"))
}

#[test]
fn a_failure_at_any_moment_loses_no_committed_step_and_changes_no_bit() {
    let Some(network) = Network::new(2, "failures at random moments") else {
        return;
    };
    let mut random = Random::from_seed(Random::seed("failures"));
    let harness = Harness::new();
    let sets = ["train.steps=100000", "scheduler={}", "train.device=cpu"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    let mut told = 0;
    let mut repeated: BTreeMap<u64, u32> = BTreeMap::new();
    let mut slowest = Duration::ZERO;
    let failures = failures(&mut random);
    for (number, &failure) in failures.iter().enumerate() {
        let [zero, one] = start(&network, &run);
        let steps = told + 1 + random.below(3);
        let zero = until(zero, "its next steps", || run.steps_written() >= steps);
        std::thread::sleep(Duration::from_millis(random.below(DELAY_MS)));
        let launchers = [zero, one];
        strike(failure, &network, &launchers);
        let since = Instant::now();
        let outputs = launchers.map(finish);
        slowest = slowest.max(since.elapsed());
        assert!(since.elapsed() < END + SLACK, "{failure:?}: {outputs:?}");
        assert!(
            outputs.iter().all(|output| !output.status.success()),
            "{failure:?}: {outputs:?}"
        );
        for node in 0..2 {
            network.join(node);
        }
        let resumed = resumed_at(&words(&outputs[0]).0);
        // A step is reported when it is computed, and the commit of the step before is confirmed.
        assert!(
            resumed <= told && resumed + 1 >= told,
            "{told}: {outputs:?}"
        );
        *repeated.entry(told - resumed).or_default() += 1;
        told = run.steps_written();
        println!("{number}: {failure:?} after step {told}");
    }
    let last = told + 2;
    let to_the_last = [
        format!("train.stop_after={last}"),
        format!("train.checkpoint_every={last}"),
    ];
    let run = run.with(&to_the_last);
    let [zero, one] = start(&network, &run).map(finish);
    assert!(
        zero.status.success() && one.status.success(),
        "{zero:?} {one:?}"
    );
    *(repeated.entry(told - resumed_at(&words(&zero).0))).or_default() += 1;
    let undisturbed = || harness.run("undisturbed", &[&sets[..], &none()].concat());
    for step in (STEPS_OF_A_START..last).step_by(STEPS_OF_A_START as usize) {
        succeed(
            undisturbed()
                .with(&[format!("train.stop_after={step}")])
                .launch(2),
        );
    }
    let undisturbed = undisturbed().with(&to_the_last);
    succeed(undisturbed.launch(2));
    for key in ["loss", "grad_norm"] {
        assert_eq!(run.bits(key), undisturbed.bits(key), "{key}");
    }
    let state = |run: &Run| run.fingerprint_of(Some(CheckpointName::Step(last)));
    assert_eq!(state(&run), state(&undisturbed));
    println!(
        "{} failures in {last} steps; repeated steps and how often: {repeated:?}; the slowest end took {:.1} s",
        failures.len(),
        slowest.as_secs_f64()
    );
}
