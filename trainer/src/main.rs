//! `trainer`: trains a run, or prints what a run holds.

#![forbid(unsafe_code)]
// They panic when nobody reads: `outln!` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cli;
#[cfg(test)]
mod docs;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use cli::export::ExportArgs;
use cli::plan::PlanArgs;
use cli::remove::RemoveArgs;
use cli::runs::RunsArgs;
use cli::source::SourceArgs;
use kernels_torch::collective::World;
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES};
use offload_support::console;
use offload_support::{errln, outln};
use trainer::launch::{self, LaunchError};
use trainer::run::CheckpointName;
use trainer::trace::{STEPS_DEFAULT, Trace};
use trainer::train::Start;

/// Trains language models whose parameters and optimizer state live on NVMe drives.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train; the same command again goes on where the run was left.
    ///
    /// SIGTERM and SIGINT end it after the step, with all of it kept, and with status 143 or 130: status 0 means that the run is
    /// done.
    #[command(after_help = "Examples:
  trainer train configs/demo.toml
  trainer train configs/demo.toml --set train.steps=50 --set train.run_dir=runs/short
  trainer train configs/demo.toml --set offload.socket=/run/offloadd/offloadd.sock   # through a daemon that runs already
  trainer train RUN.toml --deepspeed ds_config.json                                  # DeepSpeed's file as it is, below the run file
  trainer train RUN.toml --from runs/first --set train.run_dir=runs/second        # another run's weights, other data
  trainer train configs/demo.toml --fresh                                            # forget the run and start again
  trainer train configs/demo.toml --resume-from 120                                  # go back to the checkpoint of step 120
  trainer train configs/demo.toml --trace trace.json                                 # a timeline of some steps")]
    Train {
        #[command(flatten)]
        run: SourceArgs,
        /// Start with the weights of this run (its directory), or of this directory of Hugging Face's. The optimizer starts anew.
        #[arg(long, value_name = "DIR")]
        from: Option<PathBuf>,
        /// Forget what an earlier run of the same directory left, in the directory and in the store.
        #[arg(long)]
        fresh: bool,
        /// Go back to a checkpoint of the run, by its step, or begin from any checkpoint, by its directory.
        #[arg(long, value_name = "STEP|DIR", conflicts_with = "fresh")]
        resume_from: Option<CheckpointName>,
        #[command(flatten)]
        trace: TraceArgs,
    },
    /// Train with several processes of this machine that share the model: one a GPU, or some on the processor.
    ///
    /// The first that fails ends the others, and its status is the launcher's. SIGTERM and SIGINT end all of them in order,
    /// with status 143 or 130.
    #[command(after_help = "Examples:
  trainer launch --nproc 4 RUN.toml
  trainer launch --nproc 2 RUN.toml --set train.steps=50 --fresh     # what `trainer train` takes
  trainer train RUN.toml        # goes on with one process where the two were")]
    Launch {
        /// How many processes.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
        nproc: u32,
        /// The run file, and whatever else `trainer train` takes.
        #[arg(
            value_name = "RUN.toml [--set KEY=VALUE]... [--fresh]",
            required = true,
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        train: Vec<OsString>,
    },
    /// Show what a run takes and how fast it can be at best. Touches nothing; fails when the run would not fit.
    #[command(after_help = cli::plan::EXAMPLES)]
    Plan(Box<PlanArgs>),
    /// List every key of a run file: its type, its default, what it is for.
    #[command(after_help = "Examples:
  trainer keys | grep ^train
  trainer keys --markdown > deepspeed-keys.md")]
    Keys {
        /// Print what becomes of each of DeepSpeed's keys instead, those that are not read included, as Markdown.
        #[arg(long)]
        markdown: bool,
    },
    /// Write a run's weights as a directory that Hugging Face's library loads: safetensors, config.json, the tokenizer.
    #[command(after_help = cli::export::EXAMPLES)]
    Export(ExportArgs),
    /// Show the first samples of a run as text, with what counts in the loss marked. Makes the tokens if they are not there.
    #[command(after_help = cli::tokens::EXAMPLES)]
    Tokens {
        #[command(flatten)]
        run: SourceArgs,
        /// How many.
        #[arg(long, value_name = "N", default_value_t = 3)]
        samples: u64,
    },
    /// List runs: how far each is, where its state is, the saves it can go back to; and stores whose run is gone.
    #[command(after_help = cli::runs::EXAMPLES)]
    Runs(RunsArgs),
    /// Delete a run: its directory, and what its store keeps of it. Refuses a run that a trainer works on.
    #[command(after_help = cli::remove::EXAMPLES)]
    Remove(RemoveArgs),
    /// Print a fingerprint of weights and optimizer state, unit by unit, at the last committed step.
    #[command(after_help = "Example:
  trainer digest configs/demo.toml        # equal lines: equal bits, wherever the runs keep their state")]
    Digest {
        #[command(flatten)]
        run: SourceArgs,
        /// Of a checkpoint instead: the step of one of the run's, or a directory.
        #[arg(long, value_name = "STEP|DIR")]
        checkpoint: Option<CheckpointName>,
    },
}

/// A timeline of some steps.
#[derive(Args)]
struct TraceArgs {
    /// Write a timeline of some steps, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many steps, after the first two.
    #[arg(long, value_name = "N", default_value_t = STEPS_DEFAULT, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=1000))]
    trace_steps: u64,
}

impl TraceArgs {
    /// Of the process `rank`.
    fn trace(&self, rank: u32) -> Trace {
        match &self.trace {
            Some(path) => Trace::new(path, self.trace_steps, rank),
            None => Trace::off(),
        }
    }
}

/// Turns a waiting libgomp thread spins before it sleeps: some 50 us. Its own choice is milliseconds, which is nothing lost
/// on free cores, but beside an optimizer thread, a daemon or another run steps took 2.5 times as long (4 threads on 4
/// cores); with this they did not, and on free cores no difference was seen.
const SPIN_COUNT: &str = "20000";

/// Libraries read their environment when they are loaded, before `main`, or once: so this program starts itself once more
/// with what is missing there. What is there already stays.
fn set_environment() {
    use std::os::unix::process::CommandExt;
    let missing = |name: &str| std::env::var_os(name).is_none();
    let mut settings = Vec::new();
    if missing("GOMP_SPINCOUNT") && missing("OMP_WAIT_POLICY") {
        settings.push(("GOMP_SPINCOUNT", SPIN_COUNT));
    }
    if missing(CUBLAS_WORKSPACE) {
        settings.push((CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0]));
    }
    if settings.is_empty() {
        return;
    }
    // Returns only when it cannot: then the run is slower on a busy machine, and refused on a GPU.
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let mut args = std::env::args_os();
    let mut again = std::process::Command::new(program);
    // The name it was called by stays: help shows it, and so do `ps` and `pkill`.
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    let _ = again.args(args).envs(settings).exec();
}

fn main() -> ExitCode {
    if let Err(error) = launch::end_with_launcher() {
        errln!("trainer: {error}");
        return ExitCode::FAILURE;
    }
    set_environment();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(console::in_colour(&std::io::stderr()))
        // It would panic where nobody reads.
        .log_internal_errors(false)
        .init();
    let command = Cli::parse().command;
    // Checkpoints, tokens and run directories hold somebody's data and weights. An export is made to be handed on.
    if !matches!(command, Command::Export(_)) {
        let others = rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO;
        rustix::process::umask(others);
    }
    let result = run(command).and_then(|status| {
        console::finish()?;
        Ok(status)
    });
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            // Each message has its cause's in it: the chain would say everything twice.
            errln!("trainer: {}{error}", rank_name());
            match error.downcast_ref() {
                Some(LaunchError::Failed(failure)) => failure.code.into(),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Does what was asked. Returns the exit status.
fn run(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Train {
            run,
            from,
            fresh,
            resume_from,
            trace,
        } => {
            let world = World::from_env()?;
            let settings = run.settings_from(from.as_deref(), Some(world.ranks))?;
            let start = match resume_from {
                Some(checkpoint) => Start::Checkpoint(checkpoint),
                None if fresh => Start::Fresh,
                None => Start::GoOn,
            };
            return Ok(trainer::train::train(
                settings,
                &start,
                &trace.trace(world.rank),
            )?);
        }
        Command::Launch { nproc, train } => {
            check_train(&train, nproc)?;
            return Ok(launch::launch(nproc, &train)?);
        }
        Command::Plan(args) => cli::plan::plan(*args)?,
        Command::Runs(args) => cli::runs::list(&args)?,
        Command::Remove(args) => cli::remove::run(&args)?,
        Command::Keys { markdown: true } => {
            console::out(format_args!("{}", trainer::config::markdown()));
        }
        Command::Keys { markdown: false } => {
            console::out(format_args!("{}", trainer::config::listing()));
        }
        Command::Export(args) => cli::export::run(args)?,
        Command::Digest { run, checkpoint } => {
            outln!(
                "{}",
                trainer::digest::digest(run.settings(None)?, checkpoint)?
            );
        }
        Command::Tokens { run, samples } => {
            cli::tokens::tokens(&run.settings(None)?, samples)?;
        }
    }
    Ok(0)
}

/// Whose message this is, where several processes speak.
fn rank_name() -> String {
    match World::from_env() {
        Ok(world) if world.ranks > 1 => format!("rank {}: ", world.rank),
        _ => String::new(),
    }
}

/// What is wrong with the arguments or the run file is said once, by the launcher, not by each rank.
fn check_train(args: &[OsString], ranks: u32) -> anyhow::Result<()> {
    let line = ["trainer", "train"].map(OsString::from);
    let cli = Cli::try_parse_from(line.iter().chain(args)).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Train { run, from, .. } => {
            run.settings_from(from.as_deref(), Some(ranks)).map(drop)
        }
        _ => unreachable!("it was parsed as `train`"),
    }
}
