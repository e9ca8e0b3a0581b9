//! `trainer plan`: plans a run, or a model without a run.

use std::path::{Path, PathBuf};

use clap::Args;
use offload_support::console::out;
use offload_support::{errln, outln};
use serde_json::json;
use swapper::Daemon;
use training_run::AskTorch;
use training_run::config::RunSettings;
use training_run::dry_run::DryRun;
use training_run::open::check_drives;
use training_run::plan::{
    Beginning, Hardware, Overrides, PlacesTable, Plan, Question, REPORT_VERSION, Refusal,
    RunLength, compare_places, known_gpus, read_model,
};
use training_state::plan::{Drives, parse_count, parse_drives, parse_memory, parse_rate};
use training_state::run::{RunId, resolved};
use training_state::store::StoreError;

/// Examples shown below the options.
pub(crate) const EXAMPLES: &str = "Examples:
  trainer plan configs/demo.toml
  trainer plan RUN.toml --gpu-memory 139GiB --host-memory 128GiB --cores 16 --drives 4x6.2GB/s:3.2GB/s
  trainer plan RUN.toml --json | jq .bound
  trainer plan RUN.toml --deepspeed ds_config.json     # DeepSpeed's file as it is, below the run file
  trainer plan --model config.json                     # a model, on this machine
  trainer plan RUN.toml --nodes 8 --gpus 8 --network 25GB/s      # one of eight such nodes
  trainer plan --model config.json --gpus 4 --gpu-memory 24GiB --tflops 80 --host-memory 256GiB --drives 2x6.2GB/s:3.2GB/s \\
      --seq-len 4096 --micro-batch 1 --accumulation 8 --tokens 2G --tbw 1200TB";

/// Tokens of a sequence of a model without a run.
const SEQ_LEN: u64 = 2048;

/// Arguments of `trainer plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// The run file: TOML, or JSON if its name ends in .json.
    #[arg(value_name = "RUN.toml", required_unless_present_any = ["model", "deepspeed"], conflicts_with = "model")]
    file: Option<PathBuf>,
    /// DeepSpeed configuration (JSON); the run file completes it.
    #[arg(long, value_name = "ds_config.json", conflicts_with = "model")]
    deepspeed: Option<PathBuf>,
    /// Replace a setting. The value is TOML; other text is a string, unless it begins with [, {, " or '.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Print JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    asked: AskedArgs,
    #[command(flatten)]
    machine: MachineArgs,
}

/// A run without a configuration file.
#[derive(Args)]
struct AskedArgs {
    /// Plan this model instead of a run: its config.json, or a directory that contains one. Needs no other
    /// files.
    #[arg(long, value_name = "config.json")]
    model: Option<PathBuf>,
    /// Tokens in a sequence; by default 2048, or the most that the model has positions for.
    #[arg(long, value_name = "N", requires = "model")]
    seq_len: Option<u64>,
    /// Sequences that each process computes at a time.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    micro_batch: u64,
    /// Micro-batches of each process in a step.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "model", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    accumulation: u64,
    /// Plan 32-bit training instead of bf16 with a 32-bit master.
    #[arg(long, requires = "model")]
    fp32: bool,
    /// Steps of the run.
    #[arg(long, value_name = "N", requires = "model", conflicts_with = "tokens", value_parser = parse_count)]
    steps: Option<u64>,
    /// Tokens of the run, for example 2G.
    #[arg(long, value_name = "N", default_value = "1G", requires = "model", value_parser = parse_count)]
    tokens: u64,
}

/// Properties of another machine.
#[derive(Args)]
struct MachineArgs {
    /// Host memory for the run, for example 128GiB; by default what is available on this machine.
    #[arg(long, value_name = "BYTES", value_parser = parse_memory)]
    host_memory: Option<u64>,
    /// Memory of each process's GPU, for example 139GiB; 0 for none; by default this machine's.
    #[arg(long, value_name = "BYTES", value_parser = parse_memory)]
    gpu_memory: Option<u64>,
    /// Name of the GPU with --gpu-memory, for its rates and its kernels of attention; without it 150 TFLOPS and
    /// torch's attention are assumed.
    #[arg(long, value_name = "NAME", requires = "gpu_memory", value_parser = clap::builder::PossibleValuesParser::new(known_gpus()))]
    gpu: Option<String>,
    /// Number of drives with the read and write rate of each, for example 2x6.2GB/s:3.2GB/s; by default what
    /// the run measured. Checkpoints are written at the rate of one of them.
    #[arg(long, value_name = "NxREAD:WRITE", value_parser = parse_drives, conflicts_with_all = ["read", "write"])]
    drives: Option<Drives>,
    /// Read rate of all drives together, for example 6.2GB/s.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    read: Option<f64>,
    /// Write rate of all drives together, for example 3.2GB/s.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    write: Option<f64>,
    /// Rated endurance of each drive, for example 1200TB.
    #[arg(long, value_name = "BYTES", value_parser = parse_memory)]
    tbw: Option<u64>,
    /// Cores for the optimizer, for all processes together.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=65536))]
    cores: Option<u64>,
    /// Processes on each node, one for each GPU.
    #[arg(long, visible_alias = "gpus", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Number of nodes like this machine that train the run together.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    nodes: u32,
    /// Rate between a node and the others in each direction, for example 25GB/s.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    network: Option<f64>,
    /// Rate of forward and backward in one process, in 10^12 operations per second, with 6 operations for
    /// each parameter and token.
    #[arg(long, value_name = "N", value_parser = parse_tflops)]
    tflops: Option<f64>,
}

impl MachineArgs {
    fn overrides(&self) -> Overrides {
        let of_all = |rate: fn(&Drives) -> f64| {
            let drives = self.drives.as_ref();
            drives.map(|drives| rate(drives) * drives.count as f64)
        };
        Overrides {
            host_memory_bytes: self.host_memory,
            gpu_memory_bytes: self.gpu_memory,
            gpu_name: self.gpu.clone(),
            read_bytes_per_s: self.read.or(of_all(|drives| drives.read_bytes_per_s)),
            write_bytes_per_s: self.write.or(of_all(|drives| drives.write_bytes_per_s)),
            drives_count: self.drives.map(|drives| drives.count),
            drive_rating_bytes: self.tbw,
            cores: self.cores,
            tflops: self.tflops,
            network_bytes_per_s: self.network,
        }
    }

    /// Returns the processes of all nodes, if their number is given.
    fn all_ranks(&self) -> Option<u32> {
        match self.nodes {
            1 => self.ranks,
            nodes => Some(self.ranks.unwrap_or(1) * nodes),
        }
    }
}

fn parse_tflops(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(tflops) if tflops.is_finite() && tflops > 0.0 => Ok(tflops),
        _ => Err(format!("\"{text}\": expected a number above 0")),
    }
}

/// Prints the plan, even of a run that does not fit.
///
/// # Errors
/// The settings or the model cannot be planned; the run does not fit.
pub(crate) fn plan(args: PlanArgs, torch: AskTorch) -> anyhow::Result<()> {
    if let Some(path) = &args.asked.model {
        return plan_model(path, &args, torch);
    }
    let ranks = args.machine.all_ranks();
    let settings = super::source::read(&args.file, &args.deepspeed, &args.sets, ranks)?;
    let machine = &args.machine;
    let run = DryRun::new(settings, machine.nodes, &machine.overrides(), torch)?;
    print_run(run, args.json)
}

fn plan_model(path: &Path, args: &PlanArgs, torch: AskTorch) -> anyhow::Result<()> {
    let asked = &args.asked;
    let model = read_model(path)?;
    let question = Question {
        seq_len: (asked.seq_len).unwrap_or(SEQ_LEN.min(model.max_position_embeddings as u64)),
        micro_batch: asked.micro_batch,
        micro_batches: asked.accumulation,
        fp32: asked.fp32,
        ranks: args.machine.all_ranks().unwrap_or(1),
        length: match asked.steps {
            Some(steps) => RunLength::Steps(steps),
            None => RunLength::Tokens(asked.tokens),
        },
    };
    let mut settings = question.settings(&model, &args.sets)?;
    settings.local_ranks = settings.ranks / args.machine.nodes;
    let hardware = Hardware::new(&settings, &args.machine.overrides(), torch);
    if question.ranks > 1 && hardware.gpu.is_none() && args.machine.gpu_memory.is_none() {
        errln!(
            "note: planning {} processes that compute on the CPU: add --gpu-memory for a machine with GPUs",
            question.ranks
        );
    }
    let places = compare_places(&settings, &hardware);
    let fits = places.iter().any(|place| place.fits);
    if args.json {
        let report = json!({
            "version": REPORT_VERSION,
            "fits": fits,
            "parameters": model.params_count(),
            "tokens_per_step": settings.step_tokens(),
            "gradient_accumulation_steps": settings.batch.micro_batches,
            "ranks": settings.ranks,
            "sequence_parallel": settings.batch.sequence_ranks,
            "nodes": args.machine.nodes,
            "hardware": hardware,
            "places": places,
        });
        outln!("{}", serde_json::to_string_pretty(&report)?);
        return checked(fits, &settings, hardware);
    }
    outln!(
        "model     {:.2} G parameters, {} tokens in a step, {} {}{}",
        model.params_count() as f64 / 1e9,
        settings.step_tokens(),
        settings.ranks,
        if settings.ranks == 1 {
            "process"
        } else {
            "processes"
        },
        match settings.batch.sequence_ranks {
            1 => String::new(),
            ranks => format!(", {ranks} for each sequence"),
        }
    );
    outln!("{hardware}");
    out(format_args!("{}", PlacesTable(&places)));
    checked(fits, &settings, hardware)
}

/// Refuses a run that fits in no place.
fn checked(fits: bool, settings: &RunSettings, hardware: Hardware) -> anyhow::Result<()> {
    if fits {
        return Ok(());
    }
    let plan = Plan::new(settings, hardware)?;
    let change = (plan.problems().first()).map_or("", |problem| problem.change.as_str());
    anyhow::bail!("the run fits in none of these places: {change}")
}

fn print_run(run: DryRun, json: bool) -> anyhow::Result<()> {
    let DryRun {
        settings,
        length,
        hardware,
        mut plan,
    } = run;
    let settings = &settings;
    let mut warnings = settings.warnings.clone();
    warnings.extend(check_drives(settings).err().map(|error| error.to_string()));
    let missing = settings.placement.nvme_paths.iter();
    warnings.extend(missing.filter(|dir| !dir.exists()).map(|dir| {
        format!(
            "nvme_path: {} does not exist here: training needs the directory",
            dir.display()
        )
    }));
    if let Ok(plan) = &mut plan {
        warnings.extend(plan.loss_warning(settings));
        let run_dir = resolved(&settings.train.run_dir);
        // A path of another machine says nothing about this machine's root file system.
        let is_here = |dir: &Path| dir.parent().is_some() && dir.exists();
        if run_dir.ancestors().any(is_here) {
            warnings.extend(plan.check_space(settings, &run_dir, Beginning::found(&run_dir))?);
        }
        if let Some(socket) = &settings.offload.socket {
            let job = RunId::for_dir(&run_dir).0.job;
            let checked = Daemon::connect(socket)
                .map_err(|error| StoreError::Daemon(error).into())
                .and_then(|daemon| plan.check_daemon(&daemon, &job));
            warnings.extend(checked.err().map(|error| {
                format!("{error}; so this plan does not know what offloadd lets this user have")
            }));
        }
    }
    if json {
        let report = match &plan {
            Ok(plan) => serde_json::to_string_pretty(&plan.report()),
            Err(error) => serde_json::to_string_pretty(&Refusal::new(error)),
        };
        outln!("{}", report?);
        for warning in &warnings {
            errln!("warning: {warning}");
        }
    } else {
        for warning in &warnings {
            outln!("warning: {warning}");
        }
        for note in &settings.notes {
            outln!("note: {note}");
        }
        if length.is_some_and(|length| !length.is_exact) {
            outln!(
                "note: the length of the data is estimated from the sizes of its files; it is known once the data is tokenized"
            );
        }
        for line in settings.summary() {
            outln!("{line}");
        }
        if let Ok(plan) = &plan {
            outln!("{plan}");
        }
        // A GPU that cannot be used refuses every place.
        if plan.is_ok() && hardware.unusable_gpu.is_none() {
            outln!("elsewhere");
            for line in PlacesTable(&compare_places(settings, &hardware))
                .to_string()
                .lines()
            {
                outln!("  {line}");
            }
        }
    }
    Ok(plan?.check()?)
}
