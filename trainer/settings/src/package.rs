//! The settings of the Python package, from DeepSpeed's file or a dict.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;
use training_state::learning_rate::LrSchedule;
use training_state::overflow::OverflowPolicy;

use crate::error::SettingsError;
use crate::parse::{ParsedSettings, parse};
use crate::reader::{Reader, Remarks};
use crate::resolve::batch::{Batch, Sizes, batch};
use crate::resolve::optimizer::{master, moments, optimizer};
use crate::resolve::precision::{is_on, scaling};
use crate::resolve::reports::{Monitor, monitor_of};
use crate::resolve::schedule::schedule;
use crate::resolve::{Faults, at_least, bytes, fraction, not_negative, tier, value, within, word};
use crate::toml::{Bf16Toml, OwnToml, PackageToml, SchedulerToml, ZeroToml};
use crate::values::{OptimizerKind, Tier};
use crate::{deepspeed, files, json};

/// Bytes of a unit above which the experts of a layer are divided: a GPU holds four such units and their gradients, and transfers are long.
const UNIT_BYTES_MAX: u64 = 512 << 20;

/// Checked settings of a script that the package trains.
#[derive(Clone, Debug, Serialize)]
pub struct PackageSettings {
    /// Where the optimizer state is, and the parameters with it unless they stay.
    pub device: Tier,
    /// Whether the parameters stay where the model has them, whole on each rank.
    pub parameters_stay: bool,
    /// Directories of device files, without duplicates.
    pub nvme: Vec<PathBuf>,
    /// `None` if left out: what applies then depends on who calls.
    pub gradient_clipping: Option<f64>,
    /// Ranks that have parts of one sequence.
    pub sequence_parallel_size: u32,
    /// Samples of a step over all ranks and of a rank's micro-batch, where the file says so, and micro-batches.
    pub train_batch_size: Option<u64>,
    pub micro_batch: Option<u64>,
    pub micro_batches: Option<u64>,
    pub steps_per_print: Option<u64>,
    pub wall_clock_breakdown: bool,
    /// PyTorch's name of the type that the file switches on.
    pub precision: Option<&'static str>,
    /// What happens to a step that overflows.
    pub overflow: OverflowPolicy,
    pub use_node_local_storage: bool,
    pub tensorboard: Option<Monitor>,
    pub csv_monitor: Option<Monitor>,
    /// Whether gradients of 16-bit parameters lie in tiles as fp32.
    pub fp32_gradients: bool,
    /// The optimizer, where the file has one.
    pub optimizer: Option<Optimizer>,
    /// The schedule as written, where the file has one: [`schedule_of`] resolves it.
    pub scheduler: Option<SchedulerToml>,
    pub run_dir: Option<PathBuf>,
    pub units: Vec<String>,
    pub unit_bytes_max: u64,
    pub optimizer_step: &'static str,
    pub resident_fraction: f64,
    /// `None` chooses by the host's memory.
    pub gradients: Option<&'static str>,
    pub activations: &'static str,
    pub shard: &'static str,
    pub moments: &'static str,
    pub master: &'static str,
    pub commit_every: u64,
    /// 0 chooses by the size of the state.
    pub staging_bytes: u64,
    /// `None` chooses by where the model computes.
    pub optimizer_device: Option<&'static str>,
    pub update_threads: Option<u64>,
    pub socket: Option<PathBuf>,
    pub program: Option<PathBuf>,
    pub compute_device: Option<String>,
    /// Keys of DeepSpeed without effect.
    pub without_effect: Vec<String>,
    /// Lines for the person who wrote the settings.
    pub said: Vec<String>,
}

/// An optimizer's parameters.
#[derive(Clone, Debug, Serialize)]
pub struct Optimizer {
    #[serde(rename = "type")]
    pub kind: OptimizerKind,
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
}

/// Parses a file's text as DeepSpeed does. `path` is for messages.
///
/// # Errors
/// The text is not JSON, or not an object.
pub fn parse_text(text: &str, path: &Path) -> Result<Value, SettingsError> {
    let syntax = |message: String| SettingsError::Syntax {
        path: path.into(),
        format: "JSON",
        message,
    };
    let tree = json::parse(text).map_err(syntax)?;
    match tree.is_object() {
        true => Ok(tree),
        false => Err(syntax(
            "expected a JSON object, such as {\"train_batch_size\": 8}".into(),
        )),
    }
}

/// Reads the JSON file at `path`.
///
/// # Errors
/// The file cannot be read, or is not a JSON object.
pub fn read_json(path: &Path) -> Result<Value, SettingsError> {
    parse_text(
        &files::read_text(path, "the DeepSpeed configuration")?,
        path,
    )
}

/// Checks `tree`, whose keys are told about as those of `name`, for a run of `ranks` processes.
///
/// # Errors
/// All errors found, each with the key's path and what to do.
pub fn check(mut tree: Value, name: &str, ranks: u32) -> Result<PackageSettings, SettingsError> {
    let mut said = Remarks::default();
    let ignored = deepspeed::simplify(&mut tree, Reader::Package);
    deepspeed::note_ignored(&ignored, name, Reader::Package, &mut said);
    let has_optimizer = is_filled(&tree, "optimizer");
    let ParsedSettings {
        config,
        faults,
        without_effect,
    } = parse::<PackageToml>(tree, Reader::Package, &mut said);
    let lines = said.warnings.iter().map(|text| format!("warning: {text}"));
    let said = lines.chain(said.notes.iter().cloned()).collect();
    match resolve(&config, has_optimizer, ranks) {
        Ok(settings) => SettingsError::all(faults).map(|()| PackageSettings {
            without_effect,
            said,
            ..settings
        }),
        Err(more) => Err(SettingsError::with_more(faults, more)),
    }
}

fn is_filled(tree: &Value, key: &str) -> bool {
    tree.get(key)
        .and_then(Value::as_object)
        .is_some_and(|table| !table.is_empty())
}

/// Resolves the schedule of a script's optimizer whose learning rate is `lr`.
///
/// # Errors
/// The schedule is unknown, or its parameters contradict each other.
pub fn schedule_of(scheduler: &SchedulerToml, lr: f64) -> Result<LrSchedule, SettingsError> {
    schedule(scheduler, lr, None, &mut Vec::new())
}

fn resolve(
    config: &PackageToml,
    has_optimizer: bool,
    ranks: u32,
) -> Result<PackageSettings, Vec<SettingsError>> {
    let faults = &mut Faults::default();
    let own = &config.offloadd;
    let placement = faults.collect(placement(&config.zero_optimization, own, ranks));
    if let Some(clipping) = config.gradient_clipping {
        faults.collect(not_negative("gradient_clipping", clipping));
    }
    let batch = faults.collect(batch_of(config, ranks));
    let precision = faults.collect(precision(config));
    let optimizer = match has_optimizer {
        true => {
            let found = optimizer(
                &config.optimizer,
                &Bf16Toml::default(),
                Reader::Package,
                &mut Remarks::default(),
                faults,
            );
            found.map(|found| Optimizer {
                kind: found.kind,
                lr: found.lr,
                betas: found.betas,
                eps: found.eps,
                weight_decay: found.weight_decay,
            })
        }
        false => None,
    };
    let scheduler = config.scheduler.kind.is_some().then_some(&config.scheduler);
    if let Some(scheduler) = scheduler {
        let lr = optimizer.as_ref().map_or(0.0, |optimizer| optimizer.lr);
        faults.collect(schedule_of(scheduler, lr));
    }
    let tensorboard = faults.collect(monitor_of(&config.tensorboard, "tensorboard.job_name"));
    let csv_monitor = faults.collect(monitor_of(&config.csv_monitor, "csv_monitor.job_name"));
    let fp32_gradients = faults.collect(fp32_gradients(config));
    let steps_per_print = config.steps_per_print.map(|steps| steps.number());
    faults.collect(at_least("steps_per_print", steps_per_print.unwrap_or(1), 1));
    let choices = Choices::new(config, faults);
    let (
        Some(Placement {
            device,
            parameters_stay,
            nvme,
        }),
        Some((sequence_parallel_size, batch)),
        Some((precision, overflow)),
        Some(choices),
        true,
    ) = (placement, batch, precision, choices, faults.0.is_empty())
    else {
        return Err(std::mem::take(&mut faults.0));
    };
    Ok(PackageSettings {
        device,
        parameters_stay,
        nvme,
        gradient_clipping: config.gradient_clipping,
        sequence_parallel_size,
        train_batch_size: batch.map(|batch| {
            batch.micro_batch * batch.micro_batches * u64::from(ranks / sequence_parallel_size)
        }),
        micro_batch: batch.map(|batch| batch.micro_batch),
        micro_batches: batch.map_or(config.gradient_accumulation_steps, |batch| {
            Some(batch.micro_batches)
        }),
        steps_per_print,
        wall_clock_breakdown: config.wall_clock_breakdown.unwrap_or(false),
        precision,
        overflow,
        use_node_local_storage: config.checkpoint.use_node_local_storage.unwrap_or(false),
        tensorboard: tensorboard.flatten(),
        csv_monitor: csv_monitor.flatten(),
        fp32_gradients: fp32_gradients.unwrap_or(true),
        optimizer,
        scheduler: scheduler.cloned(),
        run_dir: own.run_dir.clone(),
        units: own.units.clone().unwrap_or_default(),
        unit_bytes_max: choices.unit_bytes_max,
        optimizer_step: choices.optimizer_step,
        resident_fraction: choices.resident_fraction,
        gradients: choices.gradients,
        activations: choices.activations,
        shard: choices.shard,
        moments: choices.moments,
        master: choices.master,
        commit_every: own.commit_every.unwrap_or(1),
        staging_bytes: choices.staging_bytes,
        optimizer_device: choices.optimizer_device,
        update_threads: own.update_threads,
        socket: own.socket.clone(),
        program: own.program.clone(),
        compute_device: own.compute_device.clone(),
        without_effect: Vec::new(),
        said: Vec::new(),
    })
}

/// Where the state is, and the directories of its device files.
struct Placement {
    device: Tier,
    parameters_stay: bool,
    nvme: Vec<PathBuf>,
}

/// Ranks that have parts of one sequence, which divide the number of ranks, and the sizes of the batch, for which they count once.
fn batch_of(config: &PackageToml, ranks: u32) -> Result<(u32, Option<Batch>), SettingsError> {
    let size = config.sequence_parallel_size.unwrap_or(1);
    let sequence_ranks = match u32::try_from(size) {
        Ok(size) if size > 0 && ranks.is_multiple_of(size) => size,
        _ => {
            return Err(value(
                "sequence_parallel_size",
                format!("{size}: it must be at least 1 and divide the number of ranks ({ranks})"),
            ));
        }
    };
    let sizes = Sizes {
        train: config.train_batch_size,
        micro: config.train_micro_batch_size_per_gpu,
        accumulated: config.gradient_accumulation_steps,
    };
    Ok((sequence_ranks, batch(sizes, Some(ranks / sequence_ranks))?))
}

fn placement(zero: &ZeroToml, own: &OwnToml, ranks: u32) -> Result<Placement, SettingsError> {
    const PATH: &str = "zero_optimization.offload_param.nvme_path";
    within("zero_optimization.stage", zero.stage.unwrap_or(3), 0, 3)?;
    let param = tier(
        "zero_optimization.offload_param.device",
        zero.offload_param.device.as_deref(),
    )?;
    let optimizer = tier(
        "zero_optimization.offload_optimizer.device",
        zero.offload_optimizer.device.as_deref(),
    )?;
    let device = [Tier::Nvme, Tier::Cpu, Tier::None]
        .into_iter()
        .find(|tier| [param, optimizer].contains(tier))
        .unwrap_or(Tier::None);
    // A file for stage 3 expects its parameters to be divided among the ranks: they need not fit into one GPU.
    let divided = zero.stage == Some(3) && ranks > 1 && device != Tier::None;
    let placed = |nvme| Placement {
        device,
        parameters_stay: param == Tier::None && !divided,
        nvme,
    };
    if device != Tier::Nvme || own.socket.is_some() {
        return Ok(placed(Vec::new()));
    }
    let of = |wanted: &dyn Fn(Tier) -> bool| {
        let tables = [
            (param, &zero.offload_param),
            (optimizer, &zero.offload_optimizer),
        ];
        let mut found: Vec<PathBuf> = Vec::new();
        for (_, table) in tables.into_iter().filter(|(tier, _)| wanted(*tier)) {
            for path in table.nvme_path.iter().flat_map(|paths| paths.list()) {
                if !path.as_os_str().is_empty() && !found.contains(&path) {
                    found.push(path);
                }
            }
        }
        found
    };
    // A path beside another device counts only if there is no other.
    let mut paths = of(&|tier| tier == Tier::Nvme);
    if paths.is_empty() {
        paths = of(&|_| true);
    }
    if paths.is_empty() {
        return Err(SettingsError::Missing {
            key: PATH,
            message: "name a directory on an NVMe drive, or several in a list",
        });
    }
    for path in &mut paths {
        if !path.is_dir() {
            let message = format!(
                "{} is not a directory: make it, or name another one",
                path.display()
            );
            return Err(value(PATH, message));
        }
        if let Ok(absolute) = std::path::absolute(&path) {
            *path = absolute;
        }
    }
    Ok(placed(paths))
}

/// PyTorch's name of the type that is switched on, and what happens to a step that overflows.
fn precision(
    config: &PackageToml,
) -> Result<(Option<&'static str>, OverflowPolicy), SettingsError> {
    Ok(match is_on(&config.bf16, &config.fp16)? {
        (_, true) => (Some("float16"), scaling(&config.fp16)?),
        (bf16, _) => {
            let skips = bf16 && config.bf16.check_grad_overflow == Some(true);
            let policy = match skips {
                true => OverflowPolicy::Skips,
                false => OverflowPolicy::Stops,
            };
            (bf16.then_some("bfloat16"), policy)
        }
    })
}

/// `data_types.grad_accum_dtype`; without it, fp32 unless a step is known to have one backward pass.
fn fp32_gradients(config: &PackageToml) -> Result<bool, SettingsError> {
    match config.data_types.grad_accum_dtype.as_deref() {
        None => Ok(config.gradient_accumulation_steps != Some(1)),
        given => word(
            "data_types.grad_accum_dtype",
            given,
            &[("fp32", true), ("bf16", false), ("fp16", false)],
        ),
    }
}

/// The values of `offloadd` that are words or in a range.
struct Choices {
    optimizer_step: &'static str,
    resident_fraction: f64,
    gradients: Option<&'static str>,
    activations: &'static str,
    shard: &'static str,
    moments: &'static str,
    master: &'static str,
    staging_bytes: u64,
    unit_bytes_max: u64,
    optimizer_device: Option<&'static str>,
}

impl Choices {
    fn new(config: &PackageToml, faults: &mut Faults) -> Option<Self> {
        fn one_of(
            faults: &mut Faults,
            key: &'static str,
            given: &Option<String>,
            words: &[&'static str],
        ) -> Option<&'static str> {
            let words: Vec<_> = words.iter().map(|word| (*word, *word)).collect();
            faults.collect(word(key, given.as_deref(), &words))
        }
        let (own, bf16) = (&config.offloadd, &config.bf16);
        // The first word is the default.
        let optimizer_step = one_of(
            faults,
            "offloadd.optimizer_step",
            &own.optimizer_step,
            &["deferred", "immediate"],
        );
        let optimizer_device = one_of(
            faults,
            "offloadd.optimizer_device",
            &own.optimizer_device,
            &["auto", "cpu", "gpu", "shared"],
        );
        let gradients = one_of(
            faults,
            "offloadd.gradients",
            &own.gradients,
            &["auto", "cpu", "nvme"],
        );
        let activations = activations(config, faults);
        let shard = one_of(faults, "offloadd.shard", &own.shard, &["auto", "all"]);
        let moments = faults.collect(moments("offloadd.moments", &own.moments, bf16));
        let master = faults.collect(master("offloadd.master", &own.master, bf16));
        let resident_fraction = faults.collect(fraction(
            "offloadd.resident_fraction",
            own.resident_fraction.unwrap_or(0.0),
        ));
        let staging_bytes =
            faults.collect(bytes("offloadd.staging_bytes", own.staging_bytes.as_ref()));
        let unit_bytes_max = faults.collect(bytes(
            "offloadd.unit_bytes_max",
            own.unit_bytes_max.as_ref(),
        ));
        for (key, number) in [
            ("offloadd.commit_every", own.commit_every),
            ("offloadd.update_threads", own.update_threads),
        ] {
            faults.collect(at_least(key, number.unwrap_or(1), 1));
        }
        if let Some(program) = &own.program
            && !program.is_file()
        {
            faults.0.push(value(
                "offloadd.program",
                format!(
                    "{} is not a file: name the program offloadd, or leave the key out",
                    program.display()
                ),
            ));
        }
        let chosen = |word: &'static str| (word != "auto").then_some(word);
        Some(Self {
            optimizer_step: optimizer_step?,
            resident_fraction: resident_fraction?.get(),
            gradients: chosen(gradients?),
            activations: activations?,
            shard: shard?,
            moments: moments?.word(),
            master: master?.word(),
            staging_bytes: staging_bytes?.unwrap_or(0),
            unit_bytes_max: unit_bytes_max?.unwrap_or(UNIT_BYTES_MAX),
            optimizer_device: chosen(optimizer_device?),
        })
    }
}

/// Where inputs of checkpointed blocks wait. DeepSpeed's key applies if our own is absent.
fn activations(config: &PackageToml, faults: &mut Faults) -> Option<&'static str> {
    const KEY: &str = "offloadd.activations";
    let own = config.offloadd.activations.as_deref();
    let asked = config.activation_checkpointing.cpu_checkpointing == Some(true);
    if own == Some("nvme") {
        let message = "\"nvme\" is not supported: use \"cpu\", pinned host memory";
        faults.0.push(value(KEY, message));
        return None;
    }
    let given = own.or(asked.then_some("cpu"));
    faults.collect(word(KEY, given, &[("gpu", "gpu"), ("cpu", "cpu")]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(tree: Value) -> Result<PackageSettings, String> {
        check(tree, "ds.json", 1).map_err(|error| error.to_string())
    }

    #[test]
    fn deepspeeds_switches_of_masters_and_moments_are_read_and_contradict_no_key() {
        let of = |bf16: Value, own: Value| {
            let found = read(json!({"bf16": bf16, "offloadd": own}))?;
            Ok::<_, String>([found.master, found.moments])
        };
        let on = json!({"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true});
        let off = json!({"bf16_master_weights_and_grads": false, "bf16_optimizer_states": false});
        assert_eq!(of(json!({}), json!({})).unwrap(), ["fp32", "fp32"]);
        assert_eq!(of(off.clone(), json!({})).unwrap(), ["fp32", "fp32"]);
        assert_eq!(of(on.clone(), json!({})).unwrap(), ["bf16", "bf16"]);
        let same = json!({"master": "bf16", "moments": "bf16"});
        assert_eq!(of(on.clone(), same.clone()).unwrap(), ["bf16", "bf16"]);
        // They count in a run in bf16 alone, and moments need masters, as there.
        let states = "bf16_optimizer_states";
        for (bf16, part) in [
            (
                json!({"enabled": true, states: true}),
                "needs bf16_master_weights_and_grads",
            ),
            (
                json!({"enabled": false, "bf16_master_weights_and_grads": true}),
                "bf16.enabled is not",
            ),
            (
                json!({"enabled": "auto", "bf16_master_weights_and_grads": true, states: true}),
                "bf16.enabled is not",
            ),
        ] {
            let text = of(bf16, json!({})).unwrap_err();
            assert!(text.contains(part), "{text}");
        }
        for (bf16, own) in [(on, json!({"master": "fp32"})), (off, same)] {
            let text = of(bf16, own).unwrap_err();
            let part = "contradicts bf16.bf16_master_weights_and_grads: leave one of them out";
            assert!(
                text.contains("offloadd.master") && text.contains(part),
                "{text}"
            );
        }
    }

    #[test]
    fn what_deepspeed_accepts_is_accepted_and_told() {
        let text = r#"{ // as DeepSpeed reads it
            "_comment": "mine", "my.note": 1, "comms_config": {"verbose": true}, "compile": {"deepcompile": true},
            "amd_specific": {"a": {"b": 1}}, "bfloat16": {"enabled": true}, "zero_optimization": true, "steps_per_print": Infinity,
            "train_batch_size": 8e0, "gradient_clippping": 1, "wandb": {"enabled": false}, "optimizer": null,
        }"#;
        let found = check(
            parse_text(text, Path::new("ds.json")).unwrap(),
            "ds.json",
            2,
        )
        .unwrap();
        assert_eq!(found.precision, Some("bfloat16"));
        assert_eq!(
            (found.train_batch_size, found.micro_batch),
            (Some(8), Some(4))
        );
        assert_eq!((found.gradient_clipping, found.device), (None, Tier::None));
        assert_eq!(found.without_effect, ["compile", "amd_specific"]);
        assert!(found.optimizer.is_none() && found.steps_per_print > Some(1 << 60));
        let said = found.said.join("\n");
        for part in [
            "warning: gradient_clippping in ds.json has no effect: DeepSpeed does not know it; did you mean `gradient_clipping`?",
            "_comment",
            "my.note",
            "comms_config",
            "nor has it in DeepSpeed",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    #[test]
    fn everything_wrong_is_told_at_once() {
        let told = read(json!({
            "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2},
            "zero_optimization": {"stage": 7, "overlap_com": true, "zero_quantized_weights": true},
            "optimizer": {"type": "Adagrad"}, "scheduler": {"type": "WarmupDecayLR"}, "bf16": {"enabled": "yes"},
            "offloadd": {"moments": "fp8", "comit_every": 2, "update_threads": 0}, "offload": {},
        }));
        let told = told.unwrap_err();
        for part in [
            "12 settings are wrong\n",
            "train_batch_size: 7 is not a multiple",
            "pipeline is not supported: leave it out: all ranks",
            "zero_optimization.stage: 7: must be 0 to 3",
            "unknown key `zero_optimization.overlap_com`; did you mean `zero_optimization.overlap_comm`?",
            "zero_optimization.zero_quantized_weights is not supported",
            "optimizer.type: \"Adagrad\" is not supported: use \"AdamW\", \"Adam\" or \"Lion\"",
            "scheduler.params.total_num_steps is missing",
            "bf16.enabled: expected true",
            "offloadd.moments: \"fp8\": use \"fp32\" or \"bf16\"",
            "unknown key `offloadd.comit_every`; did you mean `offloadd.commit_every`?",
            "offloadd.update_threads: 0: must be at least 1",
            "unknown key `offload`; did you mean `offloadd`?",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn inputs_of_blocks_wait_where_a_key_says() {
        let of = |own: Value, theirs: Value| {
            read(
                json!({"offloadd": own, "activation_checkpointing": {"cpu_checkpointing": theirs}}),
            )
            .map(|found| found.activations)
        };
        assert_eq!(of(json!({}), json!(null)).unwrap(), "gpu");
        assert_eq!(of(json!({}), json!(true)).unwrap(), "cpu");
        assert_eq!(
            of(json!({"activations": "gpu"}), json!(true)).unwrap(),
            "gpu"
        );
        assert_eq!(
            of(json!({"activations": "cpu"}), json!(false)).unwrap(),
            "cpu"
        );
        let refused = |word: &str| of(json!({"activations": word}), json!(null)).unwrap_err();
        assert!(
            refused("nvme")
                .contains("offloadd.activations: \"nvme\" is not supported: use \"cpu\"")
        );
        assert!(refused("disk").contains("offloadd.activations: \"disk\": use \"gpu\" or \"cpu\""));
    }

    #[test]
    fn the_whole_state_is_in_one_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (a, b) = (path("a"), path("b"));
        let zero = |param: Value, optimizer: Value| {
            let tables = json!({"offload_param": param, "offload_optimizer": optimizer});
            read(json!({"zero_optimization": tables})).map(|found| (found.device, found.nvme))
        };
        let nvme = |path: &Path| json!({"device": "nvme", "nvme_path": path});
        let cpu = || json!({"device": "cpu"});
        assert_eq!(zero(cpu(), json!({})).unwrap().0, Tier::Cpu);
        assert_eq!(
            zero(cpu(), nvme(&a)).unwrap(),
            (Tier::Nvme, vec![a.clone()])
        );
        assert_eq!(zero(nvme(&a), nvme(&b)).unwrap().1, [a.clone(), b.clone()]);
        assert_eq!(
            zero(nvme(&a), json!({"device": "cpu", "nvme_path": b}))
                .unwrap()
                .1,
            std::slice::from_ref(&a)
        );
        assert_eq!(
            zero(json!({"device": "nvme"}), json!({"nvme_path": [b, b]}))
                .unwrap()
                .1,
            std::slice::from_ref(&b)
        );
        assert!(
            zero(json!({"device": "nvme"}), cpu())
                .unwrap_err()
                .contains("nvme_path is missing")
        );
        assert!(
            zero(nvme(Path::new("/nowhere/x")), cpu())
                .unwrap_err()
                .contains("is not a directory")
        );
        let stays = |zero: Value, ranks: u32| {
            let tree = json!({"zero_optimization": zero});
            check(tree, "ds.json", ranks).unwrap().parameters_stay
        };
        for (zero, ranks, expected) in [
            (json!({"stage": 3}), 2, true),
            (json!({"stage": 2, "offload_optimizer": cpu()}), 2, true),
            (json!({"stage": 3, "offload_optimizer": nvme(&a)}), 1, true),
            (json!({"stage": 3, "offload_optimizer": cpu()}), 2, false),
            (json!({"stage": 3, "offload_param": cpu()}), 1, false),
        ] {
            assert_eq!(stays(zero.clone(), ranks), expected, "{zero} {ranks}");
        }
        let behind_socket = json!({"zero_optimization": {"offload_param": {"device": "nvme"}}, "offloadd": {"socket": "/run/x"}});
        assert_eq!(read(behind_socket).unwrap().nvme, Vec::<PathBuf>::new());
    }

    #[test]
    fn ranks_of_one_sequence_count_once_in_a_batch() {
        let tree = json!({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2});
        let found = check(tree.clone(), "ds.json", 4).unwrap();
        assert_eq!(
            (found.sequence_parallel_size, found.train_batch_size),
            (2, Some(8))
        );
        assert_eq!(found.micro_batches, Some(2));
        let error = check(tree, "ds.json", 3).unwrap_err().to_string();
        assert!(error.contains("divide the number of ranks (3)"), "{error}");
    }

    #[test]
    fn a_schedule_has_the_optimizers_rate_unless_it_has_its_own() {
        let scheduler = read(
            json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "last_batch_iteration": -1}}}),
        );
        let scheduler = scheduler.unwrap().scheduler.unwrap();
        let Ok(LrSchedule::Warmup(warmup)) = schedule_of(&scheduler, 0.5) else {
            panic!("a warm-up")
        };
        assert_eq!((warmup.max_lr, warmup.steps), (0.5, 4));
        let linear = json!({"scheduler": {"type": "linear", "params": {"total_num_steps": 10, "warmup_ratio": 0.2}}});
        let linear = read(linear).unwrap().scheduler.unwrap();
        assert_eq!(
            schedule_of(&linear, 1.0).unwrap(),
            LrSchedule::Linear {
                lr: 1.0,
                warmup_steps: 2,
                total_steps: 10
            }
        );
    }
}
