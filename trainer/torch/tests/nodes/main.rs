//! Runs over several nodes, started by one launcher on each. The nodes are network namespaces.
//!
//! Errors that these tests find: nodes train something else than one node with as many ranks; a node or network that fails
//! is not noticed in time or not named; a launcher listens at other addresses than the given one, or lets a process
//! without the job token in; a slow link that loses packets changes results.

mod failures;
#[allow(dead_code, reason = "whole runs use more of it")]
#[path = "../runs/harness.rs"]
mod harness;
mod network;
#[allow(dead_code, reason = "whole runs use more of it")]
#[path = "../runs/random.rs"]
mod random;

use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use harness::{Harness, Run, fail, finish, spawn, succeed, until, words};
use network::Network;

/// Time in which every launcher notices that a node is gone and ends its ranks.
const END: Duration = Duration::from_secs(10);

/// Extra time on a busy machine.
const SLACK: Duration = Duration::from_secs(10);

const PORT: u16 = 29400;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A run long enough to be interrupted.
const LONG: [&str; 3] = ["train.steps=100000", "scheduler={}", "train.device=cpu"];

/// `trainer launch` on one of a network's nodes, with one rank.
fn launcher(network: &Network, run: &Run, node: u32, options: &[&str]) -> Command {
    let mut command = run.program();
    let rendezvous = format!("{}:{PORT}", network.address(0));
    command
        .args(["launch", "--nproc", "1", "--node-rank", &node.to_string()])
        .args(["--rendezvous", &rendezvous])
        .args(options)
        .arg(run.file());
    for set in run.sets() {
        command.arg("--set").arg(set);
    }
    command.env("OFFLOADD_JOB_TOKEN", TOKEN);
    network.on(node, &command)
}

fn none() -> [&'static str; 2] {
    [
        "zero_optimization.offload_param.device=none",
        "zero_optimization.offload_optimizer.device=none",
    ]
}

/// Two nodes, of which each has taken three steps.
fn two_nodes(network: &Network, run: &Run, options: &[&str]) -> [Child; 2] {
    let one = spawn(launcher(network, run, 1, options));
    let zero = spawn(launcher(network, run, 0, options));
    let zero = until(zero, "three steps", || run.steps_written() >= 3);
    [zero, one]
}

/// Waits for both launchers, which must end in time; returns the time and what they printed.
fn both_end(launchers: [Child; 2], since: Instant) -> [String; 2] {
    let outputs = launchers.map(finish);
    let took = since.elapsed();
    let said = |output: &Output| words(output).1;
    assert!(took < END + SLACK, "{took:?}: {outputs:?}");
    for output in &outputs {
        assert_eq!(output.status.code(), Some(1), "{outputs:?}");
    }
    outputs.each_ref().map(said)
}

#[test]
fn two_nodes_train_as_one_with_two_ranks_also_over_a_link_that_loses_packets() {
    let Some(network) = Network::new(2, "training over a network") else {
        return;
    };
    network.impair(1);
    let harness = Harness::new();
    let sets = [&["train.device=cpu"], &none()[..]].concat();
    let (one_node, two_nodes) = (harness.run("one", &sets), harness.run("two", &sets));
    succeed(one_node.launch(2));
    let other = spawn(launcher(&network, &two_nodes, 1, &["--nnodes", "2"]));
    let said = succeed(launcher(&network, &two_nodes, 0, &["--nnodes", "2"]));
    let other = finish(other);
    assert!(other.status.success(), "{other:?}");
    assert!(said.contains("done:"), "{said}");
    for key in ["loss", "grad_norm"] {
        assert_eq!(one_node.bits(key), two_nodes.bits(key), "{key}");
    }
    assert_eq!(one_node.fingerprint(), two_nodes.fingerprint());
    assert!(network.lost_packets(1) > 0, "the link loses packets");
}

#[test]
fn a_partition_is_named_on_both_sides_and_everything_ends() {
    let Some(network) = Network::new(2, "a partition") else {
        return;
    };
    let harness = Harness::new();
    let run = harness.run("run", &[&LONG[..], &none()].concat());
    let launchers = two_nodes(&network, &run, &["--nnodes", "2"]);
    network.cut(1);
    let [zero, one] = both_end(launchers, Instant::now());
    assert!(
        zero.contains("trainer: node 1 (") && zero.contains("has not answered for"),
        "{zero}"
    );
    assert!(
        one.contains("trainer: node 0 (") && one.contains("has not answered for"),
        "{one}"
    );
}

#[test]
fn the_death_of_the_first_node_is_named_by_the_other_one() {
    let Some(network) = Network::new(2, "the death of a node") else {
        return;
    };
    let harness = Harness::new();
    let run = harness.run("run", &[&LONG[..], &none()].concat());
    let [zero, one] = two_nodes(&network, &run, &["--nnodes", "2"]);
    // Without the cut, the kernel would close the dead node's connections.
    network.cut(0);
    network.kill(0);
    let since = Instant::now();
    let output = finish(one);
    let took = since.elapsed();
    finish(zero);
    let err = words(&output).1;
    assert!(took < END + SLACK, "{took:?}: {err}");
    assert!(
        err.contains("trainer: node 0 (") && err.contains("has not answered for"),
        "{err}"
    );
}

#[test]
fn a_rank_that_dies_is_named_on_both_nodes() {
    let Some(network) = Network::new(2, "the death of a rank") else {
        return;
    };
    let harness = Harness::new();
    let run = harness.run("run", &[&LONG[..], &none()].concat());
    let launchers = two_nodes(&network, &run, &["--nnodes", "2"]);
    let ranks = harness::children(launchers[1].id());
    rustix::process::kill_process(ranks[0], rustix::process::Signal::KILL).unwrap();
    let since = Instant::now();
    let outputs = launchers.map(finish);
    assert!(since.elapsed() < END + SLACK, "{outputs:?}");
    let [zero, one] = outputs.each_ref().map(|output| words(output).1);
    assert!(
        one.contains("trainer: rank 1 (process ") && one.contains("was killed by signal 9"),
        "{one}"
    );
    assert!(
        zero.contains("trainer: node 1 (") && zero.contains("rank 1 (process "),
        "{zero}"
    );
    assert_eq!(outputs[1].status.code(), Some(128 + 9), "{one}");
}

#[test]
fn the_nodes_that_are_left_start_again_with_the_newest_checkpoint() {
    let Some(network) = Network::new(2, "a restart with fewer nodes") else {
        return;
    };
    let harness = Harness::new();
    let sets = [&LONG[..], &["train.checkpoint_every=2"]].concat();
    let run = harness.run("run", &sets).with(&harness.nvme());
    let options = ["--nnodes", "1:2", "--max-restarts", "1"];
    let [one, zero] = [1, 0].map(|node| {
        let mut command = launcher(&network, &run, node, &options);
        command.args(["--resume-from", "newest"]);
        spawn(command)
    });
    let checkpoint = run.dir.join("checkpoints/step-00000002");
    let zero = until(zero, "a checkpoint", || checkpoint.exists());
    network.cut(1);
    network.kill(1);
    finish(one);
    let before = run.steps_written();
    let zero = until(zero, "steps without node 1", || {
        run.steps_written() >= before + 3
    });
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&zero),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let output = finish(zero);
    let (out, err) = words(&output);
    assert_eq!(output.status.code(), Some(143), "{out}\n{err}");
    assert!(
        err.contains("trainer: node 1 (")
            && err.contains("starting again (restart 1 of at most 1)"),
        "{err}"
    );
    assert!(
        out.contains("divided over 2 node(s), and this start has 1: resuming from the newest"),
        "{out}"
    );
    assert!(out.contains("resumed at step "), "{out}");
}

#[test]
fn a_launcher_listens_at_its_address_only_and_a_process_without_the_token_is_kept_out() {
    let Some(network) = Network::new(2, "the listener's address") else {
        return;
    };
    let harness = Harness::new();
    let run = harness.run("run", &[&LONG[..], &none()].concat());
    // Longer than the two launchers below take, on a slow machine too.
    let options = ["--nnodes", "2", "--rendezvous-timeout", "15"];
    let zero = spawn(launcher(&network, &run, 0, &options));
    // In the kernel's table: addresses in hexadecimal of the machine's byte order, and state 0A for a listener.
    let listeners = || -> Vec<String> {
        let tables = network.output(0, &["cat", "/proc/net/tcp", "/proc/net/tcp6"]);
        let lines = tables
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let listening = lines.filter(|fields| fields.get(3) == Some(&"0A"));
        listening.map(|fields| fields[1].to_owned()).collect()
    };
    let zero = until(zero, "the launcher listens", || !listeners().is_empty());
    let address = u32::from_ne_bytes([10, 77, 0, 1]);
    assert_eq!(listeners(), [format!("{address:08X}:{PORT:04X}")]);
    for token in [None, Some("another-token-of-somebody")] {
        let mut without = launcher(
            &network,
            &run,
            1,
            &["--nnodes", "2", "--rendezvous-timeout", "1"],
        );
        match token {
            None => without.env_remove("OFFLOADD_JOB_TOKEN"),
            Some(token) => without.env("OFFLOADD_JOB_TOKEN", token),
        };
        let err = fail(without);
        assert!(
            err.contains("still missing at the rendezvous 10.77.0.1:29400"),
            "{err}"
        );
        assert!(err.contains("OFFLOADD_JOB_TOKEN"), "{err}");
    }
    let output = finish(zero);
    let err = words(&output).1;
    assert!(err.contains("after 15 s node 1 is still missing"), "{err}");
    assert!(!err.contains(TOKEN), "{err}");
    assert!(!run.dir.exists(), "nothing was created");
}

#[test]
fn hosts_of_a_file_are_started_through_a_remote_shell_and_end_together() {
    let Some(network) = Network::new(2, "a host file") else {
        return;
    };
    let harness = Harness::new();
    let run = harness.run("run", &[&LONG[..], &none()].concat());
    let hostfile = harness.path("hosts");
    let hosts = format!(
        "# two\n{} slots=1\n{} slots=1\n",
        network.address(0),
        network.address(1)
    );
    std::fs::write(&hostfile, hosts).unwrap();
    // Like ssh: the command is a line for a shell on that host.
    let shell = harness.path("shell");
    let script = format!(
        "#!/bin/sh\nexec ip netns exec {}-$((${{1##*.}} - 1)) sh -c \"$2\"\n",
        network.namespace(0).trim_end_matches("-0")
    );
    std::fs::write(&shell, script).unwrap();
    succeeds(Command::new("chmod").arg("700").arg(&shell));
    let mut command = run.program();
    command
        .args(["launch", "--hostfile"])
        .arg(&hostfile)
        .arg("--remote-shell")
        .arg(&shell);
    command.arg(run.file());
    for set in run.sets() {
        command.arg("--set").arg(set);
    }
    let child = until(spawn(command), "three steps", || run.steps_written() >= 3);
    for node in 0..2 {
        // Each node's launcher and rank have the token in their environment at most.
        let pids = network.pids(node);
        assert!(pids.len() >= 2, "{pids:?}");
        for pid in pids {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let token = environment
                .split('\0')
                .find_map(|variable| variable.strip_prefix("OFFLOADD_JOB_TOKEN="));
            let line = String::from_utf8_lossy(&line).into_owned();
            assert!(token.is_none_or(|token| !line.contains(token)), "{line}");
        }
    }
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let output = finish(child);
    let (out, err) = words(&output);
    assert_eq!(output.status.code(), Some(143), "{out}\n{err}");
    assert!(
        out.lines().any(|line| line.starts_with("[10.77.0.1] ")),
        "{out}"
    );
    let steps = run.metrics().len();
    assert!(
        run.fingerprint().starts_with(&format!("step {steps}\n")),
        "all {steps} steps are saved"
    );
}

fn succeeds(command: &mut Command) {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}
