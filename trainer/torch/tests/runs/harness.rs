//! Runs the built `trainer` for tests: a tiny model, a generated text, configurations as a user would write
//! them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kernels::gpu::Gpu;
use rustix::process::Pid;
use serde_json::Value;
use tempfile::TempDir;
use test_hooks::port::ReservedPort;
use training_run::open::RunError;
use training_state::run::CheckpointName;

use crate::random::Random;

/// Whether to run every case of a table, as `make nightly` does, or only those of a push (docs/contributing.md).
pub(crate) fn all_cases() -> bool {
    std::env::var_os("OFFLOADD_ALL_CASES").is_some()
}

/// Time limit of any run in a test, so that a hanging one fails its test.
const RUN_WAIT: Duration = Duration::from_secs(60);

/// Directory with a text, in which runs and stores are created.
pub(crate) struct Harness {
    dir: TempDir,
    /// Port at which ranks without a launcher meet.
    pub(crate) port: ReservedPort,
}

/// The program that users start, beside the one that trains.
pub(crate) fn trainer() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_trainer-with-torch")).with_file_name("trainer");
    assert!(
        program.is_file(),
        "{} is missing: build it first (cargo build -p trainer)",
        program.display()
    );
    program
}

/// Configuration of a run, and settings applied to it.
pub(crate) struct Run {
    pub(crate) dir: PathBuf,
    file: PathBuf,
    sets: Vec<String>,
}

impl Harness {
    /// Creates the directory on the drive of the target directory, so that direct I/O uses a real drive.
    pub(crate) fn new() -> Self {
        let dir =
            tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for the test");
        let harness = Self {
            dir,
            port: ReservedPort::new(),
        };
        std::fs::write(harness.path("text"), text(20_000)).expect("the text is written");
        std::fs::create_dir(harness.path("drive")).expect("a directory for the store");
        harness
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a run named `name` with `sets` applied to the tiny configuration.
    pub(crate) fn run(&self, name: &str, sets: &[&str]) -> Run {
        let file = self.path(&format!("{name}.toml"));
        let dir = self.path(&format!("runs/{name}"));
        std::fs::write(&file, run_file(&self.path("text"), &dir)).expect("the run file is written");
        Run {
            dir,
            file,
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
        }
    }

    /// Makes a run from `settings` alone, as JSON.
    pub(crate) fn run_of_json(&self, name: &str, settings: &Value) -> Run {
        let file = self.path(&format!("{name}.json"));
        std::fs::write(&file, settings.to_string()).expect("the run file is written");
        let dir = settings["train"]["run_dir"]
            .as_str()
            .expect("a run directory")
            .into();
        Run {
            dir,
            file,
            sets: Vec::new(),
        }
    }

    /// Settings that keep parameters and optimizer state in a private store of this test.
    pub(crate) fn nvme(&self) -> Vec<String> {
        let drive = self.path("drive");
        ["param", "optimizer"]
            .iter()
            .map(|what| {
                let drive = drive.display();
                format!("zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = \"{drive}\"}}")
            })
            .collect()
    }

    /// Files of private stores in this test's directory.
    pub(crate) fn store_files(&self) -> Vec<PathBuf> {
        store_files_in(&self.path("drive"))
    }
}

/// Returns a command that runs `mount` and then `command` in its own mount namespace, which needs no cleanup.
/// `None` if the user may not do that.
pub(crate) fn where_mounted(mount: &str, command: &Command) -> Option<Command> {
    let namespace = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        command
    };
    let probe = namespace(mount).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return None;
    }
    let mut inside = namespace(&format!("{mount} && exec \"$@\""));
    inside.arg(command.get_program()).args(command.get_args());
    inside
        .env_remove("RUST_BACKTRACE")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Some(inside)
}

/// Files of private stores in `dir`, without the links beside them.
pub(crate) fn store_files_in(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("the drive's directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| path.extension().is_some_and(|ending| ending == "tiles"))
        .collect()
}

/// Settings that let this number of ranks compute: on processors if there are fewer GPUs.
pub(crate) fn device_for(ranks: u32) -> &'static [&'static str] {
    if Gpu::count().is_ok_and(|gpus| gpus < ranks) {
        &["--set", "train.device=cpu"]
    } else {
        &[]
    }
}

impl Run {
    /// The configuration.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Settings applied to the configuration.
    pub(crate) fn sets(&self) -> &[String] {
        &self.sets
    }

    pub(crate) fn with(mut self, sets: &[impl AsRef<str>]) -> Self {
        self.sets
            .extend(sets.iter().map(|set| set.as_ref().to_owned()));
        self
    }

    /// `trainer launch` with `ranks` ranks.
    pub(crate) fn launch(&self, ranks: u32) -> Command {
        let mut command = self.command_of(&["launch", "--nproc", &ranks.to_string()]);
        if !self.sets.iter().any(|set| set.starts_with("train.device=")) {
            command.args(device_for(ranks));
        }
        command
    }

    pub(crate) fn command(&self, verb: &str) -> Command {
        self.command_of(&[verb])
    }

    fn command_of(&self, verb: &[&str]) -> Command {
        let mut command = self.program();
        command.args(verb).arg(self.file());
        for set in &self.sets {
            command.arg("--set").arg(set);
        }
        command
    }

    /// The program without arguments.
    pub(crate) fn program(&self) -> Command {
        let mut command = Command::new(trainer());
        // No test may depend on, or change, what runs of this user have remembered.
        command.env("XDG_STATE_HOME", "/dev/null");
        command
            .env_remove("RUST_BACKTRACE")
            .env_remove("RUST_LIB_BACKTRACE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Trains and expects success. Returns the output.
    pub(crate) fn train(&self) -> String {
        succeed(self.command("train"))
    }

    /// Trains and expects an error. Returns the message.
    pub(crate) fn refused(&self) -> String {
        fail(self.command("train"))
    }

    /// Fingerprints of the run: the output of `trainer fingerprint`, computed in this process to avoid
    /// loading libtorch again.
    pub(crate) fn fingerprint(&self) -> String {
        self.fingerprint_of(None)
    }

    /// Like [`Run::fingerprint`], of a checkpoint.
    pub(crate) fn fingerprint_of(&self, checkpoint: Option<CheckpointName>) -> String {
        match self.fingerprint_if_any(checkpoint) {
            Some(fingerprint) => fingerprint,
            None => panic!("{}: nothing was committed yet", self.dir.display()),
        }
    }

    /// Like [`Run::fingerprint_of`], or `None` if nothing was committed yet.
    pub(crate) fn fingerprint_if_any(&self, checkpoint: Option<CheckpointName>) -> Option<String> {
        let source = training_run::config::Source {
            run: Some(self.file.clone()),
            sets: self.sets.clone(),
            ..Default::default()
        };
        let settings = training_run::config::read(&source, None).expect("settings");
        match training_run::run_fingerprint::run_fingerprint(settings, checkpoint) {
            Ok(fingerprint) => Some(format!("{fingerprint}\n")),
            Err(RunError::NothingCommitted { .. }) => None,
            Err(error) => panic!("fingerprint of {}: {error}", self.dir.display()),
        }
    }

    /// The lines of metrics.jsonl.
    pub(crate) fn metrics(&self) -> Vec<Value> {
        let path = self.dir.join("metrics.jsonl");
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.lines()
            .map(|line| serde_json::from_str(line).expect("a line of JSON"))
            .collect()
    }

    /// The run's settings.toml.
    pub(crate) fn settings(&self) -> String {
        std::fs::read_to_string(self.dir.join("settings.toml")).expect("settings.toml")
    }

    /// Removes the number of steps from the configuration, which then sets the length in epochs.
    pub(crate) fn without_steps(self) -> Self {
        let text = std::fs::read_to_string(&self.file).expect("the run file");
        std::fs::write(&self.file, text.replace("steps = 6\n", ""))
            .expect("the run file is written");
        self
    }

    /// Number of lines in metrics.jsonl, while the run may still write.
    pub(crate) fn steps_written(&self) -> u64 {
        let text = std::fs::read_to_string(self.dir.join("metrics.jsonl"));
        text.map_or(0, |text| text.lines().count() as u64)
    }

    /// Bits of one number in every step.
    pub(crate) fn bits(&self, key: &str) -> Vec<u64> {
        self.metrics()
            .iter()
            .map(|line| {
                line[key]
                    .as_f64()
                    .unwrap_or_else(|| panic!("{key} in {line}"))
                    .to_bits()
            })
            .collect()
    }
}

/// Runs to the end, expects success and returns stdout.
pub(crate) fn succeed(command: Command) -> String {
    let output = finish(spawn(command));
    let (out, err) = words(&output);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}

/// Runs to the end, expects an error without a panic and returns stderr.
pub(crate) fn fail(command: Command) -> String {
    let output = finish(spawn(command));
    let (out, err) = words(&output);
    assert_eq!(
        output.status.code(),
        Some(1),
        "expected an error: {}\n{out}\n{err}",
        output.status
    );
    err
}

pub(crate) fn spawn(mut command: Command) -> Child {
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Waits with a time limit; kills a process that hangs.
pub(crate) fn finish(mut child: Child) -> Output {
    // The programs print little, so a full pipe does not block them.
    let deadline = Instant::now() + RUN_WAIT;
    while child.try_wait().expect("the child can be asked").is_none() {
        if Instant::now() > deadline {
            kill_all(&mut child);
            panic!(
                "the process hung for {RUN_WAIT:?}: {:?}",
                words(&output_of(child))
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    output_of(child)
}

/// Output of an ended process. Its children may still hold its pipes, so this also waits with a time limit.
fn output_of(child: Child) -> Output {
    let (said, output) = std::sync::mpsc::channel();
    std::thread::spawn(move || said.send(child.wait_with_output()));
    let output = output.recv_timeout(RUN_WAIT);
    let output = output.unwrap_or_else(|_| {
        panic!("the process has ended, but a child has held its pipes for {RUN_WAIT:?}")
    });
    output.expect("its words")
}

/// Kills a process and all that it started: a launcher's ranks and their daemon would continue.
fn kill_all(child: &mut Child) {
    let mut all = children(child.id());
    let mut looked = 0;
    while looked < all.len() {
        let more = children(all[looked].as_raw_nonzero().get() as u32);
        all.extend(more);
        looked += 1;
    }
    child.kill().expect("killed");
    for pid in all {
        // It may have ended with its parent.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Waits with a time limit until `condition` holds while `child` runs. A child that ends or hangs before
/// fails the test with its output. `what` completes the sentence "it ended before ...".
pub(crate) fn until(mut child: Child, what: &str, mut condition: impl FnMut() -> bool) -> Child {
    let deadline = Instant::now() + RUN_WAIT;
    while !condition() {
        let ended = child.try_wait().expect("the child can be asked").is_some();
        if ended && !condition() {
            panic!("it ended before {what}: {:?}", words(&finish(child)));
        }
        if Instant::now() > deadline {
            kill_all(&mut child);
            panic!(
                "{RUN_WAIT:?} and not yet {what}: {:?}",
                words(&output_of(child))
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

/// Child processes of all threads of a process.
pub(crate) fn children(parent: u32) -> Vec<Pid> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{parent}/task")) else {
        return Vec::new();
    };
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok())
        .flat_map(|pids| {
            pids.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
        .collect()
}

pub(crate) fn words(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Sentences of a small vocabulary in an order that does not repeat, so that there is something to learn.
pub(crate) fn text(bytes: usize) -> String {
    const WORDS: [&str; 12] = [
        "tile ", "unit ", "slot ", "moves ", "reads ", "keeps ", "the ", "a ", "drive ", "often ",
        "never ", "well. ",
    ];
    let mut text = String::new();
    let mut random = Random::from_seed(1);
    while text.len() < bytes {
        // Draws with higher bits than a plain draw; the expected figures of these tests depend on this text.
        text += WORDS[random.below((WORDS.len() as u64) << 7) as usize >> 7];
    }
    text
}

fn run_file(text: &Path, dir: &Path) -> String {
    format!(
        r#"
train_micro_batch_size_per_gpu = 2
optimizer = {{ type = "AdamW", params = {{ lr = 3e-3, betas = [0.9, 0.95], weight_decay = 0.1 }} }}
scheduler = {{ type = "WarmupDecayLR", params = {{ warmup_num_steps = 2, warmup_type = "linear" }} }}

[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[data]
files = ["{}"]

[train]
steps = 6
seq_len = 16
seed = 7
run_dir = "{}"
threads = 1

[offload]
tile_elems = 4096
# Less than the tiles take, or a run would never read back what it wrote.
staging_bytes = 100000
"#,
        text.display(),
        dir.display()
    )
}

#[test]
fn a_hanging_process_is_killed_with_its_children() {
    let mut command = Command::new("sh");
    command.args(["-c", "sh -c 'sleep 600; true' & wait"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = spawn(command);
    let id = child.id();
    let below = || children(id).first().map(|pid| pid.as_raw_nonzero().get());
    let mut child = until(child, "it started others", || {
        below().is_some_and(|below| !children(below as u32).is_empty())
    });
    kill_all(&mut child);
    // Waits for the pipes of all processes.
    assert_eq!(output_of(child).status.code(), None);
}
