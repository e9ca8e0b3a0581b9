//! The command line of `trainer`: arguments, and the commands that need no libtorch.
//!
//! ```text
//!   main.rs  trainer ──▶ train, launch ──▶ becomes trainer-with-torch (trainer/torch), which reads the same arguments
//!                    └─▶ any other command: run(), with training-run
//! ```

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod cli;
#[cfg(test)]
mod docs;
pub mod launch;
mod libraries;
pub mod with_torch;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand};
use cli::export::ExportArgs;
use cli::init::InitArgs;
use cli::plan::PlanArgs;
use cli::relocate::MoveArgs;
use cli::remove::RemoveArgs;
use cli::runs::RunsArgs;
use cli::source::SourceArgs;
use launch::LaunchArgs;
use offload_support::console::{self, terminal_columns};
use offload_support::documents::{self, CompletionsArgs, ManArgs, Section};
use offload_support::signals::survive_file_size_limit;
use offload_support::{errln, outln, plain_log};
use training_ranks::World;
use training_run::AskTorch;
use training_run::config::{RunSettings, setting_like};
use training_run::open::StartPoint;
use training_run::run_fingerprint::run_fingerprint;
use training_state::run::CheckpointName;
use training_state::trace::{STEPS_DEFAULT, Trace};

/// Exit status after an error.
const FAILURE: u8 = 1;

/// Trains language models whose parameters and optimizer state live on NVMe drives.
#[derive(Parser)]
#[command(name = "trainer", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What the arguments ask for.
#[derive(Subcommand)]
pub enum Command {
    /// Train a run; the same command resumes a run that was interrupted.
    ///
    /// SIGTERM, SIGINT and SIGHUP end the run after the current step. Nothing is lost, and the exit status is 143, 130 or 129; a second
    /// SIGTERM or SIGINT ends it at once, and what is only in memory is lost;
    /// status 0 means that the run is complete. SIGUSR1 makes a checkpoint after the next step.
    #[command(after_help = "Examples:
  trainer train RUN.toml
  trainer train RUN.toml --set train.steps=50 --set train.run_dir=runs/short
  trainer train RUN.toml --set offload.socket=/run/offloadd/offloadd.sock     # use a daemon that is running
  trainer train RUN.toml --deepspeed ds_config.json                           # read DeepSpeed's file unchanged
  trainer train RUN.toml --from runs/first --set train.run_dir=runs/second    # start with another run's weights
  trainer train RUN.toml --fresh                                              # delete the run and start again
  trainer train RUN.toml --resume-from 120                                    # return to the checkpoint of step 120
  trainer train RUN.toml --trace trace.json                                   # write a timeline of some steps")]
    Train(TrainArgs),
    /// Train with several processes, on this machine or on several: one per GPU, or several on the CPU.
    ///
    /// When one process fails, the others are ended, and its exit status is the launcher's. SIGTERM, SIGINT and SIGHUP end
    /// all processes after the current step, with status 143, 130 or 129; SIGUSR1 makes a checkpoint. Bytes between nodes are not encrypted.
    #[command(after_help = launch::EXAMPLES)]
    Launch(Box<LaunchArgs>),
    /// Write a commented run file for a model and data that fits this machine, with its plan.
    #[command(after_help = cli::init::EXAMPLES)]
    Init(InitArgs),
    /// Show the memory and drive space a run needs and how fast it can be at best. Changes nothing; fails if the run does not fit.
    ///
    /// The exit status is 1 if the run does not fit, or with --model, if it fits in no place of the table; 0 if it fits.
    #[command(after_help = cli::plan::EXAMPLES)]
    Plan(Box<PlanArgs>),
    /// List the keys of a run file with type, default and purpose.
    #[command(after_help = "Examples:
  trainer config-reference                    # all keys
  trainer config-reference train.epochs       # one key
  trainer config-reference train data         # the keys of two tables")]
    ConfigReference {
        /// Keys or tables to show; all by default.
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
    },
    /// Write a run's weights as a Hugging Face model directory: safetensors, config.json and the tokenizer.
    #[command(after_help = cli::export::EXAMPLES)]
    Export(ExportArgs),
    /// Show the first samples of a run as text; tokens that count in the loss are marked. Tokenizes the data if necessary.
    #[command(after_help = cli::preview_data::EXAMPLES)]
    PreviewData {
        #[command(flatten)]
        run: SourceArgs,
        /// Number of samples.
        #[arg(long, value_name = "N", default_value_t = 3)]
        samples: u64,
    },
    /// List runs with their progress, the location of their state and their checkpoints, and stores whose run is gone.
    #[command(after_help = cli::runs::EXAMPLES)]
    Runs(RunsArgs),
    /// Delete a run: its directory and its state in the store. Refuses a run that is being trained.
    #[command(after_help = cli::remove::EXAMPLES)]
    Remove(RemoveArgs),
    /// Move the state of a run to other drives, or into a checkpoint.
    #[command(after_help = cli::relocate::EXAMPLES)]
    Move(MoveArgs),
    /// Print a fingerprint of weights and optimizer state for each unit, at the last committed step.
    #[command(after_help = "Examples:
  trainer fingerprint RUN.toml                     # equal lines mean equal bits, wherever runs keep their state
  trainer fingerprint RUN.toml --checkpoint 40")]
    Fingerprint {
        #[command(flatten)]
        run: SourceArgs,
        /// Read a checkpoint instead: the run's checkpoint of this step, or the one in this directory.
        #[arg(long, value_name = "STEP|DIR")]
        checkpoint: Option<CheckpointName>,
    },
    /// Print a completion script for a shell.
    #[command(after_help = "Examples:
  trainer completions bash > ~/.local/share/bash-completion/completions/trainer
  trainer completions zsh > ~/.zfunc/_trainer")]
    Completions(CompletionsArgs),
    /// Write the manual pages into a directory.
    #[command(after_help = "Example:
  trainer man ~/.local/share/man/man1 && man trainer")]
    Man(ManArgs),
    /// Say whether `train` and `launch` find libtorch, for scripts that install; fails with what to do if not.
    #[command(hide = true)]
    CheckLibtorch,
    /// Print facts about the GPUs as JSON, for `offloadd doctor`.
    #[command(hide = true)]
    GpuFacts,
}

/// Arguments of `trainer train`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    run: SourceArgs,
    /// Start with the weights in this run directory or Hugging Face model directory. The optimizer state starts at zero.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Delete an earlier run in the same directory, with its state in the store, and start again.
    #[arg(long)]
    fresh: bool,
    /// Return to the run's checkpoint of this step, or start from the checkpoint in this directory. With "newest", resume from
    /// the store, and from the newest checkpoint if drives were lost or the number of nodes has changed.
    #[arg(long, value_name = "STEP|DIR|newest", conflicts_with = "fresh")]
    resume_from: Option<StartPoint>,
    /// Write a checkpoint into this directory if the run directory has no room for it, as train.checkpoint_dir says.
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// Print the whole plan and all settings; they are in settings.toml in the run directory too.
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    trace: TraceArgs,
}

impl TrainArgs {
    /// Reads the settings of a run of `ranks` processes.
    ///
    /// # Errors
    /// A file cannot be read; settings that are refused.
    pub fn settings(&self, ranks: u32) -> anyhow::Result<RunSettings> {
        let paths = [
            ("model.from", self.from.as_deref()),
            ("train.checkpoint_dir", self.checkpoint_dir.as_deref()),
        ];
        self.run.settings_with(paths, Some(ranks))
    }

    /// Where the run starts.
    pub fn start(&self) -> StartPoint {
        let otherwise = if self.fresh {
            StartPoint::Fresh
        } else {
            StartPoint::GoOn
        };
        self.resume_from.clone().unwrap_or(otherwise)
    }

    /// The timeline to write.
    pub fn trace(&self, rank: u32) -> Trace {
        match &self.trace.trace {
            Some(path) => Trace::new(path, self.trace.trace_steps, rank),
            None => Trace::off(),
        }
    }

    /// Whether the whole plan is printed.
    pub fn verbose(&self) -> bool {
        self.verbose
    }
}

#[derive(Args)]
struct TraceArgs {
    /// Write a timeline of some steps, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Number of steps in the timeline; it starts after two steps.
    #[arg(long, value_name = "N", default_value_t = STEPS_DEFAULT, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=1000))]
    trace_steps: u64,
}

/// Adds to an error about an option of another program, such as --learning_rate, the setting that it stands for.
fn with_key(mut error: clap::Error) -> clap::Error {
    let option = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) if error.kind() == ErrorKind::UnknownArgument => option,
        _ => return error,
    };
    let key = setting_like(option.trim_start_matches('-'));
    if let Some(key) = key.filter(|_| error.get(ContextKind::SuggestedArg).is_none()) {
        let tip = format!("settings are keys of the run file: use --set {key}=VALUE");
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![tip.into()]),
        );
    }
    error
}

/// Prints why arguments were refused, or the help that they asked for, and ends the process.
fn refuse(error: clap::Error) -> ! {
    let error = with_key(error);
    let _ = error.print();
    let _ = console::finish();
    std::process::exit(error.exit_code())
}

/// Reads the arguments and runs what they ask for with `run`. Returns the exit status; after an error the one that `code` knows, or 1.
pub fn outcome(
    run: impl FnOnce(Command) -> anyhow::Result<u8>,
    code: impl FnOnce(&anyhow::Error) -> Option<u8>,
) -> u8 {
    survive_file_size_limit();
    // The name in `top` and for `pkill -x`. It only fails without /proc.
    let _ = rustix::thread::set_name(c"trainer");
    plain_log::install();
    let command = Cli::try_parse()
        .unwrap_or_else(|error| refuse(error))
        .command;
    // Run directories contain private data and weights, so only the owner may read them. Exports and manual pages are meant
    // to be shared.
    if !matches!(command, Command::Export(_) | Command::Man(_)) {
        let others = rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO;
        rustix::process::umask(others);
    }
    let result = run(command).and_then(|status| {
        console::finish()?;
        Ok(status)
    });
    result.unwrap_or_else(|error| {
        // Each message includes its cause, so printing the chain would repeat it.
        errln!("trainer: {}{error}", rank_name());
        code(&error).unwrap_or(FAILURE)
    })
}

/// Runs a command that needs no libtorch and returns the exit status.
///
/// # Errors
/// Those of the command.
///
/// Panics for `train` and `launch`, which the program with libtorch runs.
pub fn run(command: Command, torch: AskTorch) -> anyhow::Result<u8> {
    match command {
        Command::Train(_) | Command::Launch(_) => unreachable!("trainer-with-torch runs it"),
        Command::Init(args) => cli::init::run(&args, torch)?,
        Command::Plan(args) => cli::plan::plan(*args, torch)?,
        Command::Runs(args) => cli::runs::list(&args)?,
        Command::Move(args) => cli::relocate::run(&args)?,
        Command::Remove(args) => return cli::remove::run(&args),
        Command::ConfigReference { keys } => {
            let columns = terminal_columns(&std::io::stdout());
            console::out(format_args!(
                "{}",
                training_run::config::listing(&keys, columns)?
            ));
        }
        Command::Completions(args) => documents::completions(&args, Cli::command()),
        Command::CheckLibtorch => with_torch::check().map_err(anyhow::Error::msg)?,
        Command::GpuFacts => {
            let facts = cli::gpu_facts::facts(torch)?;
            outln!("{}", serde_json::to_string(&facts)?);
        }
        Command::Man(args) => documents::man(&args, Section::Users, Cli::command())?,
        Command::Export(args) => cli::export::run(args)?,
        Command::Fingerprint { run, checkpoint } => {
            outln!("{}", run_fingerprint(run.settings(None)?, checkpoint)?);
        }
        Command::PreviewData { run, samples } => {
            cli::preview_data::preview(&run.settings(None)?, samples)?;
        }
    }
    Ok(0)
}

/// Prefix that identifies this process among those of one run in messages.
fn rank_name() -> String {
    match World::from_env() {
        Ok(world) if world.ranks > 1 => format!("rank {}: ", world.rank),
        _ => String::new(),
    }
}

/// Reads the arguments of `trainer train` that a launcher was given.
pub fn train_args(args: &[OsString]) -> TrainArgs {
    let line = ["trainer", "train"].map(OsString::from);
    let cli = Cli::try_parse_from(line.iter().chain(args)).unwrap_or_else(|error| refuse(error));
    let Command::Train(args) = cli.command else {
        unreachable!("the arguments were parsed as `train`")
    };
    args
}
