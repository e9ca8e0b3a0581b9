//! `trainer init`: writes a run file for a model and data on this machine. Asks nothing.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use offload_support::outln;
use offload_support::paths::Word;
use offload_support::units::CountOf;
use serde_json::Value;
use swapper::Daemon;
use training_run::AskTorch;
use training_run::config::{RunSettings, check};
use training_run::data::{Corpus, DataError, Frame, length};
use training_run::plan::{
    CheckpointsPlan, Hardware, Overrides, Place, PlaceReport, Plan, compare_places, read_model,
};
use training_run::weights::{WeightsError, look_for};
use training_state::run::{RunId, resolved};
use training_state::store::{StoreError, check_is_dir, check_mounted, free_bytes};

pub(crate) const EXAMPLES: &str = "Examples:
  trainer init Qwen3-8B chats.jsonl                       # writes Qwen3-8B.toml
  trainer init Qwen3-8B chats.jsonl more/ --out run.toml
  trainer init Qwen3-8B chats.jsonl --nvme /mnt/nvme0 --nvme /mnt/nvme1
  trainer init Qwen3-8B chats.jsonl --set offload.socket=/run/offloadd/offloadd.sock   # state with a daemon that several users share
  trainer init Qwen3-8B-Base chats.jsonl --set data.chat_template=chatml   # for a tokenizer without a chat template";

/// Template with which a run is planned if the tokenizer has none.
const PLANNED_TEMPLATE: &str = "chatml";

/// Longest sequence that is proposed; models accept longer ones, which take more memory.
const SEQ_LEN_MAX: usize = 4096;

/// Shortest sequence that is proposed for short data. Most conversations fit into it.
const SEQ_LEN_MIN: usize = 1024;

/// Most sequences of a step that are proposed.
const STEP_SEQUENCES_MAX: u64 = 16;

/// Steps of an epoch that short data shall have, if it has as many windows.
const EPOCH_STEPS_MIN: u64 = 10;

/// Steps of an epoch up to which a fine-tuning passes over the data three times. More data is learned in one pass.
const STEPS_FOR_3_EPOCHS: u64 = 1000;

/// Fewest training windows for which 2 % or 10 % of the documents are reserved for validation.
const WINDOWS_FOR_2_PERCENT: u64 = 1000;
const WINDOWS_FOR_10_PERCENT: u64 = 50;

/// Arguments of `trainer init`.
#[derive(Args)]
pub struct InitArgs {
    /// Hugging Face model directory, or its config.json.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Training data: files or directories.
    #[arg(value_name = "DATA", required = true)]
    data: Vec<PathBuf>,
    /// Run file to write; by default the name of the model's directory or file with .toml. An existing file is not changed.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Directory on a drive that keeps the state; several spread it. Without it, drives are used only if the state fits nowhere
    /// else: the mounted NVMe drive with the most free space, or this directory.
    #[arg(long, value_name = "DIR")]
    nvme: Vec<PathBuf>,
    /// Set a key of the run file. The value is TOML; other text is a string.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

/// A run file that is being tried.
struct Draft<'a> {
    args: &'a InitArgs,
    torch: AskTorch,
    name: String,
    seq_len: usize,
    step_sequences: u64,
    micro_batch: u64,
    has_weights: bool,
    on_gpu: bool,
    place: Place,
    /// Directories on drives; none if a shared daemon has the state.
    nvme: Vec<PathBuf>,
    /// The shared daemon that keeps the state.
    daemon: Option<Daemon>,
    validation_fraction: f64,
    /// Estimate of the steps of an epoch.
    epoch_steps: u64,
    /// Whether prompts can be left out of the loss.
    has_completions: bool,
    /// Names of chat templates, if the data needs one and the tokenizer has none.
    templates: Option<String>,
    /// Minutes between checkpoints, for a state in memory.
    checkpoint_min: Option<u64>,
}

/// Writes the run file with the largest micro-batch that fits, in the fastest place where one does.
///
/// # Errors
/// The model or the data cannot be read, nothing fits, or the file exists.
pub(crate) fn run(args: &InitArgs, torch: AskTorch) -> anyhow::Result<()> {
    for dir in &args.nvme {
        check_mounted(&resolved(dir))?;
        check_is_dir(dir)?;
    }
    let model = read_model(&args.model)?;
    let path = std::fs::canonicalize(&args.model)?;
    let dir = if path.is_dir() {
        path.as_path()
    } else {
        path.parent().expect("a file is in a directory")
    };
    // configs/models/Llama-3-8B.json is named by its file, DIR/config.json by its directory.
    let named = path.is_file() && path.file_name() != Some("config.json".as_ref());
    let name = if named {
        path.file_stem()
    } else {
        dir.file_name()
    };
    let name = name.unwrap_or("run".as_ref());
    let name = name.to_string_lossy().into_owned();
    let out = (args.out.clone()).unwrap_or_else(|| PathBuf::from(format!("{name}.toml")));
    let is_shared = is_set(&args.sets, "offload", "socket")?;
    if is_shared && !args.nvme.is_empty() {
        anyhow::bail!(
            "--nvme and offload.socket: the daemon keeps the state on devices of its own: leave one of them out"
        );
    }
    let mut draft = Draft {
        args,
        torch,
        name,
        seq_len: model.max_position_embeddings.min(SEQ_LEN_MAX),
        step_sequences: STEP_SEQUENCES_MAX,
        micro_batch: STEP_SEQUENCES_MAX,
        has_weights: has_weights(dir)?,
        on_gpu: false,
        place: match is_shared {
            true => Place::Drives,
            false => Place::Host,
        },
        nvme: match args.nvme.as_slice() {
            _ if is_shared => Vec::new(),
            [] => vec![roomiest_drive()],
            given => given.to_vec(),
        },
        daemon: None,
        validation_fraction: 0.0,
        epoch_steps: 1,
        has_completions: false,
        templates: None,
        checkpoint_min: None,
    };
    let text = draft.choose()?;
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => anyhow::anyhow!(
            "{} already exists: name another file with --out, or remove it",
            out.display()
        ),
        _ => anyhow::anyhow!("cannot write {}: {error}", out.display()),
    };
    let mut file = std::fs::File::create_new(&out).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    if !draft.has_weights {
        outln!(
            "warning: {} has no weights: the run starts with random ones (model.init)",
            dir.display()
        );
    }
    if let Some(names) = &draft.templates {
        outln!(
            "warning: the tokenizer has no chat template, which conversations need: set data.chat_template in {} to {names}, or to a file",
            out.display()
        );
        outln!(
            "wrote {}; next: set data.chat_template there, then trainer train {}",
            out.display(),
            Word(&out)
        );
        return Ok(());
    }
    outln!(
        "wrote {}; next: trainer train {}",
        out.display(),
        Word(&out)
    );
    Ok(())
}

/// Returns whether the directory has weights to start with. Weights that cannot be read are an error: a run that
/// starts with random ones instead would not be the fine-tuning that was asked for.
fn has_weights(dir: &Path) -> anyhow::Result<bool> {
    match look_for(dir) {
        Ok(()) => Ok(true),
        Err(WeightsError::None { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the mount point of the NVMe drive with the most free space that this user may write to, or the current directory.
fn roomiest_drive() -> PathBuf {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let drives = mounts.lines().filter(|line| line.starts_with("/dev/nvme"));
    let dirs = drives
        .filter_map(|line| line.split(' ').nth(1))
        .map(PathBuf::from);
    let writable = dirs.filter(|dir| {
        dir.is_dir() && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
    });
    let roomiest = writable.max_by_key(|dir| free_bytes(dir).unwrap_or(0));
    roomiest.unwrap_or_else(|| PathBuf::from("."))
}

impl Draft<'_> {
    /// Chooses micro-batch and place, and returns the run file with its plan.
    fn choose(&mut self) -> anyhow::Result<String> {
        let mut settings = self.settings()?;
        if let Some(socket) = &settings.offload.socket {
            self.daemon = Some(Daemon::connect(socket).map_err(StoreError::Daemon)?);
        }
        let hardware = Hardware::new(&settings, &Overrides::default(), self.torch);
        self.on_gpu = hardware.gpu.is_some();
        settings = self.settings()?;
        let mut windows = match length(&settings) {
            Err(DataError::NoTemplate { names, .. }) => {
                self.templates = Some(names);
                settings = self.settings()?;
                length(&settings)?.windows
            }
            found => found?.windows,
        };
        while windows < EPOCH_STEPS_MIN && self.seq_len >= 2 * SEQ_LEN_MIN {
            self.seq_len /= 2;
            settings = self.settings()?;
            windows = length(&settings)?.windows;
        }
        while self.step_sequences > 1 && windows / self.step_sequences < EPOCH_STEPS_MIN {
            self.step_sequences /= 2;
        }
        self.micro_batch = self.step_sequences;
        self.epoch_steps = windows.div_ceil(self.step_sequences);
        self.has_completions =
            Corpus::find(&settings.data, &Frame::from_settings(&settings))?.has_completions();
        self.validation_fraction = match windows {
            WINDOWS_FOR_2_PERCENT.. => 0.02,
            WINDOWS_FOR_10_PERCENT.. => 0.1,
            _ => 0.0,
        };
        let free = self.nvme.iter().map(|dir| free_bytes(dir).unwrap_or(0));
        // Each directory gets the same part of the store.
        let free = free.min().unwrap_or(0) * self.nvme.len() as u64;
        let mut refused = Vec::new();
        while self.micro_batch > 0 {
            settings = self.settings()?;
            settings.set_windows(windows)?;
            if let Some(daemon) = &self.daemon {
                match shared_place(daemon, &settings, &hardware)? {
                    Ok(place) => {
                        self.place = place;
                        return self.with_plan(hardware, windows);
                    }
                    Err(problems) => refused = problems,
                }
                self.micro_batch /= 2;
                continue;
            }
            let found = compare_places(&settings, &hardware);
            // Of equal steps the first is taken, which is the nearest place.
            let best = (found.iter())
                .filter(|place| place.fits && place.device_bytes <= free)
                // With drives GPU memory is left to others, unless it is asked for.
                .filter(|place| place.place != Place::DrivesHostAndGpu)
                .filter(|place| self.args.nvme.is_empty() || place.device_bytes > 0)
                .min_by(|a, b| a.step_s.total_cmp(&b.step_s));
            if let Some(best) = best {
                self.place = best.place;
                return self.with_plan(hardware, windows);
            }
            let on_drives = found.iter().map(|place| place.device_bytes);
            let on_drives = on_drives.filter(|bytes| *bytes > 0).min();
            let drives = on_drives.filter(|bytes| *bytes > free).map(|bytes| {
                format!(
                    "drives: the state takes {}, more than is free in {}: name other directories with --nvme",
                    offload_support::units::ApproxBytes(bytes),
                    self.nvme[0].display()
                )
            });
            let of_place = |place: &PlaceReport| {
                let lines = place.refused.iter();
                let lines = lines.map(|line| format!("{}: {line}", place.place.word()));
                lines.collect::<Vec<_>>()
            };
            refused = found.iter().flat_map(of_place).chain(drives).collect();
            self.micro_batch /= 2;
        }
        self.micro_batch = 1;
        anyhow::bail!(
            "no run with {} of {} tokens in a step fits this machine:\n  {}{}",
            CountOf(self.step_sequences, "sequence"),
            settings.batch.seq_len,
            refused.join("\n  "),
            self.smaller_run(hardware)?
        )
    }

    /// Says with which options a smaller run fits that keeps its state on the drives; empty if none does.
    fn smaller_run(&mut self, hardware: Hardware) -> anyhow::Result<String> {
        self.place = Place::Drives;
        let plan = Plan::new(&self.settings()?, hardware)?;
        let Some(advice) = plan.advice else {
            return Ok(String::new());
        };
        let sets = advice.changes.iter();
        let sets = sets.map(|(key, value)| format!("--set {key}={}", value.replace('"', "")));
        let sets = sets.collect::<Vec<_>>().join(" ");
        Ok(format!("\na smaller run fits: trainer init with {sets}"))
    }

    /// Returns the run file with its plan as comments.
    fn with_plan(&mut self, hardware: Hardware, windows: u64) -> anyhow::Result<String> {
        let mut settings = self.settings()?;
        settings.set_windows(windows)?;
        let mut plan = Plan::new(&settings, hardware)?;
        if !settings.placement.has_store() {
            self.checkpoint_min = (plan.checkpoints.as_ref()).map(CheckpointsPlan::interval_min);
        }
        plan.epochs = Some(settings.epochs(windows));
        let mut text = format!(
            "# A run of {} on this machine, written by `trainer init`. Its paths are relative to the directory in which `trainer init` was called.\n#\n",
            self.name
        );
        for line in plan.overview(&settings) {
            text += &format!("# {line}\n");
        }
        text += "#\n# The length of the data is estimated. `trainer plan` shows the whole plan, docs/training.md explains the keys.\n\n";
        Ok(text + &self.text(self.templates.as_ref().map(|names| {
            format!("# chat_template = \"{PLANNED_TEMPLATE}\" # the tokenizer has none: choose {names}, or name a file\n")
        }))?)
    }

    fn settings(&self) -> anyhow::Result<RunSettings> {
        // The choice between templates hardly changes a plan.
        let template = self.templates.is_some();
        let template = template.then(|| format!("chat_template = \"{PLANNED_TEMPLATE}\"\n"));
        let tree: Value = toml::from_str(&self.text(template)?)?;
        Ok(check(tree, &self.name, None)?)
    }

    /// Returns the line of the passes over the data; none where --set names a number of steps.
    fn length(&self, epochs: u32) -> anyhow::Result<String> {
        let steps = CountOf(self.epoch_steps, "step");
        Ok(match is_set(&self.args.sets, "train", "steps")? {
            true => String::new(),
            false => {
                format!("epochs = {epochs} # passes over the data, of about {steps} each\n")
            }
        })
    }

    /// Returns the run file, with a line for the chat template if one must be chosen.
    fn text(&self, template: Option<String>) -> anyhow::Result<String> {
        let template = template.unwrap_or_default();
        let quoted = |path: &Path| Value::from(path.to_string_lossy()).to_string();
        let list = |paths: &[PathBuf]| {
            let paths: Vec<String> = paths.iter().map(|path| quoted(path)).collect();
            format!("[{}]", paths.join(", "))
        };
        let (init, lr, epochs) = match self.has_weights {
            true if self.epoch_steps <= STEPS_FOR_3_EPOCHS => ("", "2e-5", 3),
            true => ("", "2e-5", 1),
            false => (
                "init = \"random\" # the directory has no weights\n",
                "3e-4",
                1,
            ),
        };
        let drive = match self.nvme.as_slice() {
            [] => "{ device = \"nvme\" }".to_owned(), // with the daemon of `offload.socket`
            nvme => format!("{{ device = \"nvme\", nvme_path = {} }}", list(nvme)),
        };
        let host = "{ device = \"cpu\" }".to_owned();
        let [param, optimizer] = match self.place {
            Place::Gpu => [None, None],
            Place::HostAndGpu | Place::Host => [Some(&host); 2],
            Place::HostAndDrives => [Some(&host), Some(&drive)],
            Place::DrivesHostAndGpu | Place::DrivesAndHost | Place::Drives => [Some(&drive); 2],
        };
        let length = self.length(epochs)?;
        let mut offload = String::new();
        for (what, device) in [("param", param), ("optimizer", optimizer)] {
            if let Some(device) = device {
                offload += &format!("offload_{what} = {device}\n");
            }
        }
        let resident = match self.place {
            Place::DrivesAndHost => {
                "\n[offload]\nresident_fraction = \"auto\" # as much as host memory has room for\n"
            }
            _ => "",
        };
        let checkpoints = match self.checkpoint_min {
            Some(minutes) => format!(
                "checkpoint_every = \"{minutes}min\" # a crash loses what came after the last one: the state is in memory\n"
            ),
            None => String::new(),
        };
        let (fraction, validation) = (self.validation_fraction, self.validation_fraction > 0.0);
        let [fraction, evaluation] = match validation {
            true => [
                format!("validation_fraction = {fraction}\n"),
                "eval_every = \"epoch\"\ncheckpoint_best = true # keeps the checkpoint with the lowest validation loss\n".into(),
            ],
            false => ["# validation_fraction = 0.1 # the data is short: name eval_files, or train without validation\n".into(), String::new()],
        };
        let loss_on = match self.has_completions {
            true => {
                "loss_on = \"completions\" # what the model is to answer; \"all\" counts prompts too\n"
            }
            false => "",
        };
        let text = format!(
            r#"train_micro_batch_size_per_gpu = {micro_batch} # sequences computed at a time
gradient_accumulation_steps = {accumulation} # a step has the product of both

[bf16]
enabled = {bf16} # {why}

[optimizer]
type = "AdamW"
params = {{ lr = {lr}, weight_decay = 0.01 }}

[scheduler]
type = "cosine"
params = {{ warmup_ratio = 0.03 }}

[zero_optimization] # where the state is kept; a place left out means the memory of the device that computes
{offload}
[model]
path = {model}
{init}
[data]
files = {data}
{template}{loss_on}{fraction}
[train]
{length}seq_len = {seq_len} # tokens; longer documents are cut, and a start counts them
{checkpoints}{evaluation}run_dir = {run_dir}
{resident}"#,
            micro_batch = self.micro_batch,
            accumulation = self.step_sequences / self.micro_batch,
            bf16 = self.on_gpu,
            why = match self.on_gpu {
                true => "16-bit arithmetic with a 32-bit master copy",
                false => "many processors compute faster in fp32",
            },
            model = quoted(&self.args.model),
            data = list(&self.args.data),
            seq_len = self.seq_len,
            run_dir = quoted(&Path::new("runs").join(&self.name)),
        );
        with_sets(text, &self.args.sets)
    }
}

/// Returns the place where the shared `daemon` keeps the state of the run, if it leaves this user enough; otherwise everything that
/// does not fit.
///
/// # Errors
/// The run cannot be planned, or the daemon does not answer.
fn shared_place(
    daemon: &Daemon,
    settings: &RunSettings,
    hardware: &Hardware,
) -> anyhow::Result<Result<Place, Vec<String>>> {
    let job = RunId::for_dir(&resolved(&settings.train.run_dir)).0.job;
    let mut refused = Vec::new();
    // The daemon may leave less host memory than the machine has.
    for place in [Place::DrivesAndHost, Place::Drives] {
        let mut plan = place.plan(settings, hardware)?;
        plan.check_daemon(daemon, &job)?;
        if plan.problems().is_empty() {
            return Ok(Ok(place));
        }
        refused = plan.problems().iter().map(ToString::to_string).collect();
    }
    Ok(Err(refused))
}

/// Whether `sets` have a value for the key of the table.
fn is_set(sets: &[String], table: &str, key: &str) -> anyhow::Result<bool> {
    let set: toml::Table = toml::from_str(&with_sets(String::new(), sets)?)?;
    Ok(set.get(table).is_some_and(|table| table.get(key).is_some()))
}

/// Sets keys in a run file, whose comments stay.
fn with_sets(text: String, sets: &[String]) -> anyhow::Result<String> {
    if sets.is_empty() {
        return Ok(text);
    }
    let mut file: toml_edit::DocumentMut = text.parse()?;
    for set in sets {
        let Some((key, value)) = set.split_once('=') else {
            anyhow::bail!("--set {set}: expected KEY=VALUE");
        };
        let parsed = value.trim().parse::<toml_edit::Value>();
        let value = parsed.unwrap_or_else(|_| value.trim().into());
        let mut parts = key.trim().split('.').peekable();
        let mut table: &mut dyn toml_edit::TableLike = file.as_table_mut();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.insert(part, toml_edit::value(value));
                break;
            }
            let item = table.entry(part).or_insert_with(toml_edit::table);
            table = item
                .as_table_like_mut()
                .ok_or_else(|| anyhow::anyhow!("--set {set}: {part} is not a table"))?;
        }
    }
    Ok(file.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_key_is_found_in_its_table() {
        let sets = ["train.steps=5", "train={ seed = 1 }"].map(String::from);
        assert!(is_set(&sets[..1], "train", "steps").unwrap());
        assert!(!is_set(&sets[1..], "train", "steps").unwrap());
        assert!(!is_set(&[], "train", "steps").unwrap());
    }

    #[test]
    fn a_set_key_replaces_or_joins_those_of_the_file() {
        let text = "a = 1 # first\n\n[data]\nfiles = [\"x\"] # which\nparams = { lr = 1.0 }\n";
        let sets = [
            "data.chat_template=chatml",
            "data.params.lr=2e-5",
            "a=[2]",
            "new.b=true",
        ];
        let found = with_sets(text.into(), &sets.map(String::from)).unwrap();
        for line in [
            "a = [2]",
            "chat_template = \"chatml\"",
            "files = [\"x\"] # which",
            "lr = 2e-5",
            "[new]\nb = true",
        ] {
            assert!(found.contains(line), "{found}");
        }
        for wrong in ["a", "a.b=1"] {
            assert!(with_sets(text.into(), &[wrong.into()]).is_err());
        }
    }
}
