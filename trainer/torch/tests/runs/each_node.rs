//! Nodes that share no directory: each keeps every checkpoint (`train.checkpoints_on_each_node`).
//!
//! Errors that these tests find: a node cannot be lost, because it alone has a tile, the run's identity or its metrics; a node that
//! was away brings back steps that were given up; a checkpoint of one node only, or a damaged one, is taken for that of all.
//!
//! A machine is a mount namespace in which the runs and a drive are directories of its own, so these tests need root.
//! `OFFLOADD_ALL_CASES=1 cargo test -p trainer-torch --test runs each_node` also loses nodes with the state at the other place, and kills at
//! more points.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use training_state::run::CheckpointName;

use crate::harness::{Harness, Run, all_cases, finish, spawn, succeed, where_mounted, words};
use crate::nodes::{OnNodes, assert_same_steps, on_nodes, on_one_node};

const STEPS: u64 = 8;

const SETTING: &str = "train.checkpoints_on_each_node=true";

/// Settings with which the state is kept in host memory between steps.
const IN_MEMORY: [&str; 2] = [
    "zero_optimization.offload_param={device = \"cpu\"}",
    "zero_optimization.offload_optimizer={device = \"cpu\"}",
];

/// Machines that share nothing but what a run reads.
struct Machines<'a> {
    harness: &'a Harness,
    in_memory: bool,
    /// Ranks of each node.
    counts: [u32; 3],
    sets: Vec<String>,
}

impl<'a> Machines<'a> {
    /// `None` if this user may not mount.
    fn new(harness: &'a Harness, in_memory: bool) -> Option<Self> {
        std::fs::create_dir_all(harness.path("runs")).unwrap();
        let machines = Self {
            harness,
            in_memory,
            counts: [1; 3],
            sets: vec![SETTING.to_owned(), format!("train.steps={STEPS}")],
        };
        if machines.on(0, 0, &Command::new("true")).is_none() {
            println!("skipped: machines that share no directory: mounting needs root");
            return None;
        }
        Some(machines)
    }

    fn with(&self, sets: &[&str]) -> Self {
        let sets = sets.iter().map(|set| (*set).to_owned());
        Self {
            harness: self.harness,
            in_memory: self.in_memory,
            counts: self.counts,
            sets: self.sets.iter().cloned().chain(sets).collect(),
        }
    }

    fn dir(&self, machine: usize) -> PathBuf {
        self.harness.path(&format!("machine-{machine}"))
    }

    /// What `machine` has in the run's directory.
    fn run_dir(&self, machine: usize) -> PathBuf {
        self.dir(machine).join("runs/run")
    }

    fn checkpoint(&self, machine: usize, step: u64) -> PathBuf {
        self.run_dir(machine)
            .join(format!("checkpoints/step-{step:08}"))
    }

    fn nodes(&self, count: usize) -> OnNodes<'a> {
        let mut sets: Vec<&str> = self.sets.iter().map(String::as_str).collect();
        if self.in_memory {
            sets.extend(IN_MEMORY);
        }
        on_nodes(self.harness, "run", &self.counts[..count]).with(&sets)
    }

    /// `command` on `machine` as node `node`.
    fn on(&self, machine: usize, node: usize, command: &Command) -> Option<Command> {
        let mounts = [
            ("runs", "runs".to_owned()),
            ("drive", format!("drive-{node}")),
        ];
        let mounts = mounts.map(|(own, there)| {
            let (own, there) = (self.dir(machine).join(own), self.harness.path(&there));
            std::fs::create_dir_all(&own).unwrap();
            std::fs::create_dir_all(&there).unwrap();
            format!("mount --bind {} {}", own.display(), there.display())
        });
        inside(&mounts.join(" && "), command)
    }

    /// One command for each rank of a run of which node N is on the machine `machines[N]`.
    fn commands(&self, machines: &[usize], args: &[&str]) -> Vec<Command> {
        let commands = self.nodes(machines.len()).commands(args).into_iter();
        let nodes = machines.iter().enumerate();
        let of_rank = nodes.flat_map(|(node, machine)| {
            let ranks = 0..self.counts[node];
            ranks.map(move |_| (node, *machine))
        });
        let on = commands.zip(of_rank);
        on.map(|(command, (node, machine))| self.on(machine, node, &command).unwrap())
            .collect()
    }

    fn ended(&self, commands: Vec<Command>) -> Vec<Output> {
        let ranks: Vec<Child> = commands.into_iter().map(spawn).collect();
        ranks.into_iter().map(finish).collect()
    }

    /// Trains up to `stop_after` and expects success. Returns what the first rank printed.
    fn train(&self, machines: &[usize], stop_after: u64, args: &[&str]) -> String {
        let run = self.with(&[&format!("train.stop_after={stop_after}")]);
        let outputs = self.ended(run.commands(machines, args));
        let all: Vec<_> = outputs.iter().map(words).collect();
        assert!(
            outputs.iter().all(|output| output.status.success()),
            "{all:?}"
        );
        all[0].0.clone()
    }

    /// Like [`Self::train`], from the newest checkpoint after a node was lost.
    fn resume(&self, machines: &[usize], stop_after: u64) -> String {
        let args = match self.in_memory {
            true => &[][..],
            false => &["--resume-from", "newest"],
        };
        self.train(machines, stop_after, args)
    }

    fn refused(&self, machines: &[usize], args: &[&str]) -> String {
        let outputs = self.ended(self.commands(machines, args));
        let all: String = outputs.iter().map(|output| words(output).1).collect();
        let refused = |output: &Output| output.status.code() == Some(1);
        assert!(outputs.iter().all(refused), "{all}");
        all
    }

    /// Removes all that `machine` has.
    fn lose(&self, machine: usize) {
        std::fs::remove_dir_all(self.dir(machine)).unwrap();
    }

    /// The run with the metrics of `machine`.
    fn seen_on(&self, machine: usize) -> Run {
        let mut run = self.nodes(1).run(0);
        run.dir = self.run_dir(machine);
        run
    }

    /// Output of a command of the trainer about the run, on `machine`, which was the node of its number.
    fn asks(&self, machine: usize, args: &[&str]) -> String {
        let run = self.nodes(1).run(0);
        let mut command = run.program();
        command.args(args);
        succeed(self.on(machine, machine, &command).unwrap())
    }

    fn fingerprint(&self, machine: usize, step: u64) -> String {
        let run = self.nodes(1).run(0);
        let mut command = run.command("fingerprint");
        command.args(["--checkpoint", &step.to_string()]);
        succeed(self.on(machine, 0, &command).unwrap())
    }

    /// Expects the checkpoint of `step` on all `machines`, with the same bytes.
    fn same(&self, machines: &[usize], step: u64) {
        let first = files(&self.checkpoint(machines[0], step));
        assert!(
            first.contains_key(Path::new("checkpoint.json")),
            "{first:?}"
        );
        for machine in machines {
            let found = files(&self.checkpoint(*machine, step));
            assert!(found == first, "step {step} on machine {machine}");
        }
    }

    /// The same training on one node with as many ranks, from another run's checkpoint if one is given.
    fn uninterrupted(&self, ranks: u32, from: Option<(PathBuf, u64)>) -> Run {
        let alone = on_one_node(self.harness, &format!("alone-{ranks}"));
        let steps = format!("train.steps={STEPS}");
        let alone = alone.with(&[
            &*steps,
            "train.checkpoint_every=2",
            "train.checkpoints_kept=0",
        ]);
        let mut command = alone.launch(ranks);
        if let Some((checkpoint, stop_after)) = from {
            command.arg("--resume-from").arg(checkpoint);
            command.args(["--set", &format!("train.stop_after={stop_after}")]);
        }
        succeed(command);
        alone
    }
}

/// Places of the state to try, as values of `in_memory`: in a push the one that is given.
fn state_places(in_memory: bool) -> Vec<bool> {
    let all = [in_memory, !in_memory];
    all[..if all_cases() { 2 } else { 1 }].to_vec()
}

/// `command` with its environment where `mount` was called. `None` if this user may not do that.
fn inside(mount: &str, command: &Command) -> Option<Command> {
    let mut inside = where_mounted(mount, command)?;
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            inside.env(name, value);
        }
    }
    Some(inside)
}

/// Contents of the files in `dir`.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries =
        std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .map(|path| {
            (
                path.file_name().unwrap().into(),
                std::fs::read(&path).unwrap(),
            )
        })
        .collect()
}

#[test]
fn any_node_may_be_lost_with_all_that_it_has() {
    for in_memory in state_places(true) {
        let harness = Harness::new();
        let Some(mut machines) = Machines::new(&harness, in_memory) else {
            return;
        };
        machines.counts[1] = 2;
        let said = machines.train(&[0, 1], 4, &[]);
        assert!(
            said.contains("checkpoints/step-00000004 on each of 2 nodes: "),
            "{said}"
        );
        machines.same(&[0, 1], 2);
        machines.same(&[0, 1], 4);
        // The second node, and then the first one with the run's identity and metrics.
        for (lost, step) in [(1, 4), (0, 6)] {
            machines.lose(lost);
            let said = machines.resume(&[0, 1], step + 2);
            let copied = format!("copying the checkpoint of step {step}, ");
            assert!(said.contains(&copied), "{in_memory}, {lost}: {said}");
            let from = format!(" from node {} to node {lost}\n", 1 - lost);
            assert!(said.contains(&from), "{in_memory}, {lost}: {said}");
            machines.same(&[0, 1], step);
            machines.same(&[0, 1], step + 2);
        }
        let alone = machines.uninterrupted(3, None);
        assert_same_steps(&machines.seen_on(0), &alone, "after both nodes were lost");
        let expected = alone.fingerprint_of(Some(CheckpointName::Step(STEPS)));
        for machine in [0, 1] {
            assert_eq!(machines.fingerprint(machine, STEPS), expected, "{machine}");
        }
    }
}

#[test]
fn a_surviving_machine_goes_on_as_the_first_node_and_the_lost_one_returns() {
    for in_memory in state_places(false) {
        let harness = Harness::new();
        let Some(machines) = Machines::new(&harness, in_memory) else {
            return;
        };
        machines.train(&[0, 1], 2, &[]);
        if !in_memory {
            // Only the other machine has the first node's part of the state.
            let err = machines.refused(&[1], &[]);
            assert!(
                err.contains("or was copied from another node: resume from"),
                "{err}"
            );
        }
        let said = machines.resume(&[1], 4);
        assert!(said.contains("resumed at step 2"), "{said}");
        let alone = machines.uninterrupted(1, Some((machines.checkpoint(1, 2), 4)));
        let expected = alone.fingerprint_of(Some(CheckpointName::Step(4)));
        assert_eq!(machines.fingerprint(1, 4), expected, "2 -> 1");
        // The first machine has the same stores as before, and less than was done since.
        if !in_memory {
            let err = machines.refused(&[0, 1], &[]);
            assert!(err.contains("or was copied from another node"), "{err}");
        }
        let said = machines.resume(&[0, 1, 2], 6);
        // The refused start has copied it to the first node.
        let copied = match in_memory {
            true => " from node 1 to node 0, 2\n",
            false => " from node 0 to node 2\n",
        };
        assert!(said.contains(copied), "{said}");
        assert!(said.contains("resumed at step 4"), "{said}");
        machines.same(&[0, 1, 2], 4);
        machines.same(&[0, 1, 2], 6);
        assert_eq!(machines.seen_on(0).metrics().len(), 6);
        let alone = machines.uninterrupted(3, Some((machines.checkpoint(1, 4), 6)));
        let expected = alone.fingerprint_of(Some(CheckpointName::Step(6)));
        for machine in [0, 1, 2] {
            assert_eq!(machines.fingerprint(machine, 6), expected, "1 -> 3");
        }
        // Every machine can export, and delete what it has.
        let run_dir = machines.nodes(1).run(0).dir;
        let run_dir = run_dir.to_str().unwrap();
        let out = harness.path("out");
        let export = [
            "export",
            run_dir,
            "--checkpoint",
            "6",
            "--out",
            out.to_str().unwrap(),
        ];
        machines.asks(2, &export);
        assert!(out.join("model.safetensors").exists());
        machines.asks(2, &["remove", run_dir, "--yes"]);
        assert!(!machines.run_dir(2).exists());
    }
}

#[test]
fn a_new_first_node_gets_the_checkpoint_with_the_lowest_loss() {
    let harness = Harness::new();
    let Some(machines) = Machines::new(&harness, true) else {
        return;
    };
    // The loss rises after the fourth step.
    let machines = machines.with(&[
        "data.validation_fraction=0.1",
        "train.eval_every=2",
        "train.checkpoint_best=true",
        "train.checkpoints_kept=1",
        "optimizer.params.lr=0.5",
    ]);
    machines.train(&[0, 1], 6, &[]);
    let losses: Vec<f64> = machines
        .seen_on(0)
        .metrics()
        .iter()
        .filter_map(|line| line["eval_loss"].as_f64())
        .collect();
    assert!(losses[1] < losses[0].min(losses[2]), "{losses:?}");
    machines.lose(0);
    let said = machines.train(&[0, 1], STEPS, &[]);
    for step in [4, 6] {
        assert!(
            said.contains(&format!("copying the checkpoint of step {step}, ")),
            "{said}"
        );
    }
    machines.same(&[0, 1], 4);
    machines.same(&[0, 1], STEPS);
}

#[test]
fn a_checkpoint_whose_exchange_or_naming_was_cut_is_made_again_or_completed() {
    let harness = Harness::new();
    let Some(machines) = Machines::new(&harness, true) else {
        return;
    };
    // At a start the nodes copy the run's files once; then each checkpoint is copied and named once. A kill in the middle of copying
    // leaves the checkpoint on no node, and one between the names on one.
    let all = [
        (1, "copying-files@3", 4, false),
        (0, "naming-checkpoint@1", 4, true),
        (0, "copying-files@2", 6, false),
        (1, "naming-checkpoint@1", 6, true),
    ];
    let kills = if all_cases() { &all[..] } else { &all[..2] };
    for &(killed, kill, step, named) in kills {
        let mut commands = machines.commands(&[0, 1], &[]);
        commands[killed].env("OFFLOADD_KILL", kill);
        let outputs = machines.ended(commands);
        assert!(
            outputs.iter().all(|output| !output.status.success()),
            "{kill}: {outputs:?}"
        );
        assert!(!machines.checkpoint(killed, step).exists(), "{kill}");
        let other = machines.checkpoint(1 - killed, step);
        assert_eq!(other.exists(), named, "{kill}");
        let until = if named { step } else { step - 2 };
        let said = machines.train(&[0, 1], until, &[]);
        if named {
            let copied = format!(" from node {} to node {killed}\n", 1 - killed);
            assert!(said.contains(&copied), "{kill}: {said}");
        }
        let resumed = format!("resumed at step {until}");
        assert!(said.contains(&resumed), "{kill}: {said}");
        machines.same(&[0, 1], until);
    }
    machines.train(&[0, 1], STEPS, &[]);
    let alone = machines.uninterrupted(2, None);
    assert_same_steps(
        &machines.seen_on(0),
        &alone,
        "after kills while copying and between two names",
    );
    machines.same(&[0, 1], STEPS);
}

#[test]
fn a_full_or_damaged_node_is_named_and_nothing_is_lost() {
    let harness = Harness::new();
    let Some(machines) = Machines::new(&harness, false) else {
        return;
    };
    // Room for a checkpoint, and not for all. A checkpoint takes 0.8 MB, and asks for 1 MiB more.
    let mut commands = machines.commands(&[0, 1], &[]);
    let second = machines.nodes(2).commands(&[]).remove(1);
    let tmpfs = format!(
        "mount -t tmpfs -o size=3M none {}",
        harness.path("runs").display()
    );
    commands[1] = inside(&tmpfs, &second).unwrap();
    let outputs = machines.ended(commands);
    let (out, err) = words(&outputs[0]);
    assert!(
        outputs.iter().all(|output| output.status.code() == Some(1)),
        "{out}\n{err}"
    );
    assert!(
        err.contains("node 1: the checkpoint ") && err.contains(" free: free some space"),
        "{err}"
    );
    assert!(err.contains("; earlier checkpoints are kept"), "{err}");
    assert!(
        err.contains(" could not be made; the first error: "),
        "{err}"
    );
    assert!(
        machines.checkpoint(0, 2).exists() && !machines.checkpoint(0, STEPS).exists(),
        "{out}"
    );
    assert_eq!(machines.seen_on(0).metrics().len(), STEPS as usize);

    // A damaged file of a copy.
    machines.lose(0);
    machines.lose(1);
    machines.train(&[0, 1], 4, &[]);
    let tiles = machines.checkpoint(1, 4).join("tiles.1");
    let whole = std::fs::read(&tiles).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    std::fs::write(&tiles, damaged).unwrap();
    let err = machines.refused(&[0, 1], &["--resume-from", "4"]);
    assert!(err.contains("step-00000004/tiles.1 is damaged"), "{err}");
    std::fs::remove_dir_all(machines.checkpoint(1, 4)).unwrap();
    let said = machines.train(&[0, 1], STEPS, &["--resume-from", "4"]);
    assert!(said.contains(" from node 0 to node 1\n"), "{said}");
    machines.same(&[0, 1], 4);
    let alone = machines.uninterrupted(2, None);
    assert_same_steps(&machines.seen_on(0), &alone, "after damage");
}

#[test]
fn nodes_of_which_only_some_share_the_directory_are_refused() {
    let harness = Harness::new();
    let Some(machines) = Machines::new(&harness, true) else {
        return;
    };
    let err = machines.refused(&[0, 0, 1], &[]);
    assert!(
        err.contains("nodes 0, 1 see the same ") && err.contains(", but not all nodes do"),
        "{err}"
    );
}

#[test]
fn nodes_that_share_the_directory_write_each_checkpoint_once() {
    let harness = Harness::new();
    let nodes = on_nodes(&harness, "run", &[1, 1]).with(&[SETTING]);
    let said = nodes.train(&[]);
    let note = "note: train.checkpoints_on_each_node: all nodes see the same ";
    assert!(said.contains(note), "{said}");
    assert!(!said.contains("on each of"), "{said}");
    let alone = on_one_node(&harness, "alone");
    succeed(alone.launch(2));
    assert_same_steps(&nodes.run(0), &alone, "one directory");
}
