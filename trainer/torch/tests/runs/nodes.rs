//! Nodes train like the ranks of one node, and stay together whatever happens to one of them.
//!
//! Each process is a node, or several are; the nodes share a machine and the run's directory, and have stores
//! of their own. Errors that these tests find: a tile is in no node's store, or in two; a commit counts before
//! every node has it, or is lost after it counted; nodes resume from different commits; a store that is empty,
//! older or another's is trained on; a death is not noticed on another node.
//!
//! `OFFLOADD_ALL_CASES=1` tries two nodes with their gradients in memory too. Many kills, at more points:
//! `OFFLOADD_KILLS=100 cargo test -p trainer-torch --test runs nodes::ranks_and`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use training_state::run::{CheckpointName, node_dir};

use crate::harness::{
    Harness, Run, all_cases, children, device_for, finish, spawn, store_files_in, succeed, until,
    where_mounted, words,
};
use crate::model_dir::random_model;
use crate::ranks::END_WAIT;

/// Settings of a model whose norms and biases differ in each element: those of a fresh model are all equal.
fn model(harness: &Harness) -> [String; 3] {
    let dir = harness.path("model");
    if !dir.exists() {
        random_model(harness, "model", 3);
    }
    [
        format!("model={{path = \"{}\"}}", dir.display()),
        "train_batch_size=12".to_owned(),
        "train_micro_batch_size_per_gpu=1".to_owned(),
    ]
}

/// The same training on one node.
pub(crate) fn on_one_node(harness: &Harness, name: &str) -> Run {
    harness
        .run(name, &[])
        .with(&harness.nvme())
        .with(&model(harness))
}

/// A run on several nodes.
pub(crate) struct OnNodes<'a> {
    harness: &'a Harness,
    name: &'a str,
    sets: Vec<String>,
    /// Ranks of each node.
    counts: Vec<u32>,
}

impl OnNodes<'_> {
    pub(crate) fn with(&self, sets: &[&str]) -> Self {
        let mut sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        sets.splice(0..0, self.sets.clone());
        Self {
            harness: self.harness,
            name: self.name,
            sets,
            counts: self.counts.clone(),
        }
    }

    fn on(&self, counts: &[u32]) -> Self {
        Self {
            counts: counts.to_vec(),
            ..self.with(&[])
        }
    }

    /// Directory with the store of node `node`.
    fn drive(&self, node: usize) -> PathBuf {
        self.harness.path(&format!("drive-{node}"))
    }

    /// The run as node `node` sees it.
    pub(crate) fn run(&self, node: usize) -> Run {
        let drive = self.drive(node);
        std::fs::create_dir_all(&drive).expect("a directory for the node's store");
        let place = ["param", "optimizer"].map(|what| {
            let drive = drive.display();
            format!(
                "zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = \"{drive}\"}}"
            )
        });
        self.harness
            .run(self.name, &[])
            .with(&place)
            .with(&self.sets)
    }

    /// One command for each rank.
    pub(crate) fn commands(&self, args: &[&str]) -> Vec<Command> {
        let port = self.harness.port.number().to_string();
        let ranks: u32 = self.counts.iter().sum();
        let places = self.counts.iter().enumerate();
        let places = places.flat_map(|(node, &count)| (0..count).map(move |local| (node, local)));
        let commands = (0..).zip(places).map(|(rank, (node, local))| {
            let mut command = self.run(node).command("train");
            // Each node has GPUs of its own, if there are as many as ranks.
            let first = self.counts[..node].iter().sum::<u32>();
            let gpus: Vec<String> = (first..first + self.counts[node])
                .map(|gpu| gpu.to_string())
                .collect();
            command.env("CUDA_VISIBLE_DEVICES", gpus.join(","));
            command.args(args).args(device_for(ranks));
            for (name, value) in [
                ("RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_RANK", local),
                ("LOCAL_WORLD_SIZE", self.counts[node]),
            ] {
                command.env(name, u32::to_string(&value));
            }
            command
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port);
            command
        });
        commands.collect()
    }

    fn start(&self) -> Vec<Child> {
        self.commands(&[]).into_iter().map(spawn).collect()
    }

    /// Trains and expects success. Returns the first rank's output.
    pub(crate) fn train(&self, args: &[&str]) -> String {
        let ranks: Vec<Child> = self.commands(args).into_iter().map(spawn).collect();
        let outputs: Vec<Output> = ranks.into_iter().map(finish).collect();
        let all: Vec<_> = outputs.iter().map(words).collect();
        assert!(outputs.iter().all(|o| o.status.success()), "{all:?}");
        all[0].0.clone()
    }

    /// Trains and expects an error on every rank. Returns the messages.
    fn refused(&self, args: &[&str]) -> String {
        let ranks: Vec<Child> = self.commands(args).into_iter().map(spawn).collect();
        let outputs: Vec<Output> = ranks.into_iter().map(finish).collect();
        let all: String = outputs.iter().map(|output| words(output).1).collect();
        let refused = |output: &Output| output.status.code() == Some(1);
        assert!(outputs.iter().all(refused), "{all}");
        all
    }

    fn checkpoint(&self, step: u64) -> String {
        self.run(0).fingerprint_of(Some(CheckpointName::Step(step)))
    }

    /// The file of node `node`'s store.
    fn store(&self, node: usize) -> PathBuf {
        let mut files = store_files_in(&self.drive(node));
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    }
}

pub(crate) fn on_nodes<'a>(harness: &'a Harness, name: &'a str, counts: &[u32]) -> OnNodes<'a> {
    let more = ["train.checkpoint_every=2", "train.checkpoints_kept=0"].map(str::to_owned);
    OnNodes {
        harness,
        name,
        sets: model(harness).into_iter().chain(more).collect(),
        counts: counts.to_vec(),
    }
}

pub(crate) fn assert_same_steps(found: &Run, expected: &Run, what: &str) {
    for key in ["loss", "grad_norm", "lr", "tokens"] {
        assert_eq!(found.bits(key), expected.bits(key), "{key}, {what}");
    }
}

#[test]
fn two_nodes_train_as_two_ranks_of_one_node_bit_for_bit() {
    let harness = Harness::new();
    let all = [
        (
            "nvme",
            &[
                "offload.gradients=nvme",
                "offload.optimizer_step=immediate",
                "offload.staging_bytes=200000",
            ][..],
        ),
        (
            "memory",
            &["offload.gradients=cpu", "train.sequence_parallel=2"],
        ),
    ];
    for &(name, sets) in &all[..if all_cases() { 2 } else { 1 }] {
        let nodes = on_nodes(&harness, name, &[1, 1]).with(sets);
        let out = harness.path(&format!("{name}-out"));
        let export = format!("train.export_to={}", out.display());
        nodes.with(&[&export]).train(&[]);
        let alone_name = format!("{name}-alone");
        let alone_out = harness.path(&format!("{name}-alone-out"));
        let alone = on_one_node(&harness, &alone_name)
            .with(sets)
            .with(&["train.checkpoint_every=2", "train.checkpoints_kept=0"])
            .with(&[format!("train.export_to={}", alone_out.display())]);
        succeed(alone.launch(2));
        assert_same_steps(&nodes.run(0), &alone, name);
        for step in [2, 6] {
            let expected = alone.fingerprint_of(Some(CheckpointName::Step(step)));
            assert_eq!(nodes.checkpoint(step), expected, "{name}, step {step}");
        }
        let weights = |dir: &PathBuf| std::fs::read(dir.join("model.safetensors")).unwrap();
        assert!(
            weights(&out) == weights(&alone_out),
            "{name}: exported weights"
        );
    }
}

#[test]
fn nodes_resume_what_they_committed_and_another_number_of_nodes_is_refused() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 2]);
    nodes.with(&["train.stop_after=3"]).train(&[]);
    let said = nodes.train(&["--resume-from", "newest"]);
    assert!(said.contains("resumed at step 3"), "{said}");
    let alone = on_one_node(&harness, "alone");
    succeed(alone.launch(3));
    assert_same_steps(&nodes.run(0), &alone, "1 + 2 ranks");
    let err = nodes.on(&[3]).refused(&[]);
    assert!(
        err.contains("keeps its state on 2 node(s), and this start has 1: start as many"),
        "{err}"
    );
    let err = nodes.on(&[2, 1]).refused(&[]);
    assert!(err.contains("the ranks of each node changed"), "{err}");
    // One process cannot read what several nodes hold.
    let mut command = nodes.run(0).command("fingerprint");
    let err = words(&finish(spawn({
        command.env_remove("RANK");
        command
    })))
    .1;
    assert!(
        err.contains(
            "is divided over 2 nodes, and this command reads one directory: name a checkpoint"
        ),
        "{err}"
    );
}

#[test]
fn a_checkpoint_carries_over_to_other_numbers_of_nodes() {
    let harness = Harness::new();
    let two = on_nodes(&harness, "run", &[1, 1]).with(&["train.steps=8"]);
    two.with(&["train.stop_after=2"]).train(&[]);
    let before = two.checkpoint(2);
    // One node with one rank, which stops before its first step.
    let one = two.on(&[1]);
    let said = one
        .with(&["train.stop_after=2"])
        .train(&["--resume-from", "newest"]);
    let note = "divided over 2 node(s), and this start has 1: resuming from the newest checkpoint, of step 2; 0 step(s) are repeated";
    assert!(said.contains(note), "{said}");
    assert_eq!(one.run(0).fingerprint(), before, "2 -> 1");
    one.with(&["train.stop_after=4"]).train(&[]);
    let before = two.checkpoint(4);
    // Three nodes write the state that they took into a checkpoint of the same step.
    let three = two.on(&[1, 1, 1]);
    three
        .with(&["train.stop_after=6"])
        .train(&["--resume-from", "4"]);
    assert_eq!(three.checkpoint(4), before);
    let alone = on_one_node(&harness, "alone");
    let alone = alone.with(&[
        "train.steps=8",
        "train.stop_after=6",
        "train.checkpoint_every=2",
    ]);
    let from = nodes_checkpoint(&two, 4);
    let mut command = alone.launch(3);
    command.args(["--resume-from", from.to_str().unwrap()]);
    succeed(command);
    let expected = alone.fingerprint_of(Some(CheckpointName::Step(6)));
    assert_eq!(three.checkpoint(6), expected, "1 -> 3");
    // The same nodes go back: their stores begin anew together.
    three
        .with(&["train.stop_after=6"])
        .train(&["--resume-from", "4"]);
    assert_eq!(three.checkpoint(6), expected, "3 -> 3");
    let said = three.train(&[]);
    assert!(said.contains("resumed at step 6"), "{said}");
}

fn nodes_checkpoint(nodes: &OnNodes, step: u64) -> PathBuf {
    (nodes.run(0).dir).join(format!("checkpoints/step-{step:08}"))
}

#[test]
fn a_node_whose_store_is_lost_or_older_or_anothers_is_refused_by_name() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]);
    nodes.with(&["train.stop_after=2"]).train(&[]);
    let [first, second] = [nodes.store(0), nodes.store(1)];
    let older = harness.path("older");
    std::fs::copy(&second, &older).unwrap();
    nodes.with(&["train.stop_after=4"]).train(&[]);
    let newest = harness.path("newest");
    std::fs::copy(&second, &newest).unwrap();

    std::fs::remove_file(&second).unwrap();
    let err = nodes.refused(&[]);
    assert!(err.contains("node 1 lost generation"), "{err}");
    assert!(
        err.contains("holds none") && err.contains("--resume-from"),
        "{err}"
    );

    std::fs::copy(&older, &second).unwrap();
    let err = nodes.refused(&[]);
    assert!(err.contains("node 1 lost generation"), "{err}");

    std::fs::copy(&first, &second).unwrap();
    let err = nodes.refused(&[]);
    assert!(err.contains("node 1: the store on "), "{err}");
    assert!(err.contains("not the part of node 1 of run "), "{err}");

    // The newest content is as good as before.
    std::fs::copy(&newest, &second).unwrap();
    let said = nodes.with(&["train.stop_after=5"]).train(&[]);
    assert!(said.contains("resumed at step 4"), "{said}");

    // Without it, all go back to a checkpoint, also when the first attempt is interrupted.
    std::fs::remove_file(&second).unwrap();
    let newest = ["--resume-from", "newest"];
    let mut commands = nodes.commands(&newest);
    commands[1].env("OFFLOADD_KILL", "opening@1");
    let ranks: Vec<Child> = commands.into_iter().map(spawn).collect();
    let said: Vec<_> = ranks.into_iter().map(|rank| words(&finish(rank))).collect();
    assert!(
        said[0].0.contains("node 1 has lost ")
            && said[0].0.contains("of step 4; 1 step(s) are repeated"),
        "{said:?}"
    );
    let err = nodes.refused(&[]);
    assert!(
        err.contains("was interrupted while it took its state from a checkpoint"),
        "{err}"
    );
    let said = nodes.train(&newest);
    assert!(said.contains("did not take all state"), "{said}");
    let alone = on_one_node(&harness, "alone");
    succeed(alone.launch(2));
    assert_same_steps(&nodes.run(0), &alone, "after a lost drive");

    // Another run's directory on the second node.
    let other = on_nodes(&harness, "other", &[1, 1]);
    other.with(&["train.stop_after=1"]).train(&[]);
    let part = node_dir(&nodes.run(0).dir, 1);
    std::fs::copy(node_dir(&other.run(0).dir, 1).join("job"), part.join("job")).unwrap();
    let err = nodes.refused(&[]);
    assert!(
        err.contains("holds the part of node 1 of run other-"),
        "{err}"
    );
}

#[test]
fn checkpoints_in_a_directory_that_not_all_nodes_see_are_refused() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]);
    let dir = nodes.run(0).dir;
    std::fs::create_dir_all(&dir).unwrap();
    let mut commands = nodes.commands(&[]);
    let second = commands.pop().unwrap();
    let Some(mut hidden) =
        where_mounted(&format!("mount -t tmpfs none {}", dir.display()), &second)
    else {
        println!(
            "skipped: checkpoints_in_a_directory_that_not_all_nodes_see_are_refused: mounting a tmpfs needs root"
        );
        return;
    };
    for (name, value) in second.get_envs() {
        if let Some(value) = value {
            hidden.env(name, value);
        }
    }
    let first = spawn(commands.pop().unwrap());
    let err = words(&finish(spawn(hidden))).1;
    assert!(
        err.contains("node 1 does not see the run's directory")
            && err.contains("set train.checkpoints_on_each_node = true"),
        "{err}"
    );
    let err = words(&finish(first)).1;
    assert!(
        err.contains("rank 1 failed while looking for the run's directory"),
        "{err}"
    );
}

/// Lets the ranks end after one of them was killed, and expects that the others name it.
fn end_all(ranks: Vec<Child>, killed: usize, after: &str) {
    let since = Instant::now();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = finish(child);
        let err = words(&output).1;
        assert!(!output.status.success(), "{after}: rank {rank} went on");
        if rank != killed {
            assert!(err.contains(&format!("rank {killed} ")), "{after}: {err}");
        }
    }
    assert!(since.elapsed() < END_WAIT, "{after}: {:?}", since.elapsed());
}

/// What is killed when a rank reaches a point.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Itself,
    /// The daemon of its node.
    Daemon,
}

/// Starts the run and kills the victim when `rank` reaches `point`. All must end, and resume.
fn kill_at(nodes: &OnNodes, rank: usize, point: &str, victim: Victim) {
    let after = format!("{victim:?} of rank {rank} at {point}");
    let run = nodes.run(0);
    let reported = run.steps_written();
    let held = nodes.harness.path("held");
    let mut commands = nodes.commands(&[]);
    commands[rank].env("OFFLOADD_KILL", point);
    if matches!(victim, Victim::Daemon) {
        commands[rank].env("OFFLOADD_KILL_HOLDS", &held);
    }
    let mut ranks: Vec<Child> = commands.into_iter().map(spawn).collect();
    if matches!(victim, Victim::Daemon) {
        let child = until(ranks.remove(rank), &after, || held.exists());
        let daemons = children(child.id());
        assert_eq!(daemons.len(), 1, "{after}: daemons");
        kill_process(daemons[0], Signal::KILL).expect("the daemon exists");
        std::fs::remove_file(&held).expect("the rank waits for it");
        ranks.insert(rank, child);
    }
    end_all(ranks, rank, &after);
    let told = run.steps_written();
    assert!(told >= reported, "{after}: metrics went back");
    let stop_after = format!("train.stop_after={}", told.max(1));
    let said = nodes.with(&[&stop_after]).train(&[]);
    let resumed = said.split("resumed at step ").nth(1);
    let resumed = resumed.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    let resumed = resumed.map_or(0, |step| step.parse().unwrap());
    // One commit may be in progress, and one waiting for it, while the next step is reported.
    assert!(resumed + 2 >= told, "{after}: {said}");
}

#[test]
fn ranks_and_daemons_killed_around_a_commit_resume_bit_for_bit() {
    use Victim::{Daemon, Itself};
    let harness = Harness::new();
    // Not the second rank itself: the first one notices its death by its silence, after some seconds.
    let mut kills = vec![
        (0, "prepared@1".to_owned(), Itself),
        (1, "prepared@2".to_owned(), Daemon),
        (0, "confirming@2".to_owned(), Itself),
    ];
    if let Ok(count) = std::env::var("OFFLOADD_KILLS") {
        let count: usize = count.parse().expect("a number of kills");
        let points = [
            "committing",
            "prepared",
            "confirming",
            "committed",
            "writing",
            "backward",
        ];
        let situations = points.iter().flat_map(|point| {
            [
                (0, point, Itself),
                (1, point, Daemon),
                (1, point, Itself),
                (0, point, Daemon),
            ]
        });
        let numbered = situations.cycle().enumerate().take(count);
        let with_number = numbered
            .map(|(i, (rank, point, victim))| (rank, format!("{point}@{}", 1 + i % 3), victim));
        kills = with_number.collect();
    }
    let steps = 8 + 4 * kills.len();
    let sets = [
        format!("train.steps={steps}"),
        format!("train.checkpoint_every={steps}"),
    ];
    let [steps_set, checkpoint_set] = [&*sets[0], &*sets[1]];
    let nodes = on_nodes(&harness, "run", &[1, 1]).with(&[steps_set, checkpoint_set]);
    for (rank, point, victim) in kills {
        println!("{victim:?} of rank {rank} at {point}");
        kill_at(&nodes, rank, &point, victim);
    }
    nodes.train(&[]);
    let alone = on_one_node(&harness, "alone").with(&sets);
    succeed(alone.launch(2));
    assert_same_steps(&nodes.run(0), &alone, "after all kills");
    let last = steps as u64;
    let expected = alone.fingerprint_of(Some(CheckpointName::Step(last)));
    assert_eq!(nodes.checkpoint(last), expected);
}

#[test]
fn a_stopped_rank_and_a_killed_daemon_end_all_nodes() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]);
    let nodes = nodes.with(&["train.steps=100000", "scheduler={}"]);
    // Making a run writes its file, which ranks that start would find empty.
    let run = nodes.run(0);
    let begun = || {
        let steps = run.steps_written();
        let mut ranks = nodes.start();
        let first = ranks.remove(0);
        ranks.insert(
            0,
            until(first, "two steps", || run.steps_written() >= steps + 2),
        );
        ranks
    };
    for node in [0, 1] {
        let mut ranks = begun();
        let daemons = children(ranks[node].id());
        assert_eq!(daemons.len(), 1, "the node's daemon");
        kill_process(daemons[0], Signal::KILL).unwrap();
        let since = Instant::now();
        let second = finish(ranks.pop().unwrap());
        let first = finish(ranks.pop().unwrap());
        assert!(since.elapsed() < END_WAIT, "{:?}", since.elapsed());
        let errors = [words(&first).1, words(&second).1];
        assert!(errors[node].contains("offloadd"), "{errors:?}");
        assert!(
            errors[1 - node].contains(&format!("rank {node} ")),
            "{errors:?}"
        );
    }
    let mut ranks = begun();
    let stopped = ranks.pop().unwrap();
    kill_process(Pid::from_child(&stopped), Signal::STOP).unwrap();
    let since = Instant::now();
    let err = words(&finish(ranks.pop().unwrap())).1;
    assert!(since.elapsed() < END_WAIT, "{:?}", since.elapsed());
    assert!(err.contains("rank 1 has not answered for"), "{err}");
    kill_process(Pid::from_child(&stopped), Signal::KILL).unwrap();
    finish(stopped);
}

#[test]
fn removing_a_run_on_its_first_node_removes_the_parts_that_are_there() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]).with(&["train.stop_after=1"]);
    nodes.train(&[]);
    let run = nodes.run(0);
    let part = node_dir(&run.dir, 1);
    let command = |verb: &str, dir: &Path| {
        let mut command = run.program();
        command.arg(verb).arg(dir);
        command
    };
    let said = succeed(command("runs", &part));
    assert!(
        said.contains("\n  the part of node 1 of run run-"),
        "{said}"
    );
    assert!(!said.contains("step 0"), "{said}");
    // Without --yes, nothing is deleted. A store that is not here is on another machine.
    let listed = |dir: &Path| words(&finish(spawn(command("remove", dir)))).0;
    let store = nodes.store(1);
    let elsewhere = harness.path("elsewhere");
    std::fs::rename(&store, &elsewhere).unwrap();
    let said = listed(&run.dir);
    assert!(
        said.contains(&format!("not {}, ", part.display())),
        "{said}"
    );
    std::fs::rename(&elsewhere, &store).unwrap();
    let said = listed(&run.dir);
    assert!(said.contains(store.to_str().unwrap()), "{said}");
    let mut remove = command("remove", &run.dir);
    remove.arg("--yes");
    succeed(remove);
    assert!(!run.dir.exists() && !store.exists() && store_files_in(&nodes.drive(0)).is_empty());
}

#[test]
fn a_failed_store_ends_the_other_nodes_before_its_training_thread_asks_again() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]);
    let held = harness.path("held");
    let mut commands = nodes.commands(&[]);
    // Between two requests to its swapper.
    (commands[1].env("OFFLOADD_KILL", "backward@3")).env("OFFLOADD_KILL_HOLDS", &held);
    let [first, second] = commands.try_into().expect("two ranks");
    let (first, second) = (spawn(first), spawn(second));
    let second = until(second, "its second step's backward", || held.exists());
    let daemons = children(second.id());
    assert_eq!(daemons.len(), 1, "the node's daemon");
    kill_process(daemons[0], Signal::KILL).unwrap();
    let since = Instant::now();
    let err = words(&finish(first)).1;
    assert!(since.elapsed() < END_WAIT, "{:?}", since.elapsed());
    assert!(
        err.contains("rank 1 ended while rank 0 waited for it") && err.contains("offloadd"),
        "{err}"
    );
    std::fs::remove_file(&held).expect("the rank waits for it");
    let err = words(&finish(second)).1;
    println!("{err}");
    assert!(
        err.contains("offloadd") && !err.contains("rank 0 ended"),
        "{err}"
    );
}
