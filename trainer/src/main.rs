//! `trainer`: trains a run, or prints what a run holds.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

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
    #[command(after_help = "Examples:
  trainer train configs/demo.toml
  trainer train configs/demo.toml --set train.steps=50 --set train.run_folder=runs/short
  trainer train configs/demo.toml --set offload.socket=/run/offloadd/offloadd.sock   # through a daemon that runs already
  trainer train configs/demo.toml --fresh                                            # forget the run and start again")]
    Train {
        #[command(flatten)]
        run: RunArgs,
        /// Forget what an earlier run of the same folder left, in the folder and in the store.
        #[arg(long)]
        fresh: bool,
    },
    /// Print a fingerprint of weights and optimizer state, unit by unit, at the last committed step.
    #[command(after_help = "Example:
  trainer digest configs/demo.toml        # equal lines: equal bits, wherever the runs keep their state")]
    Digest {
        #[command(flatten)]
        run: RunArgs,
    },
}

#[derive(Args)]
struct RunArgs {
    /// The run file: TOML, or JSON when its name ends in .json.
    #[arg(value_name = "RUN.toml")]
    file: PathBuf,
    /// Replace a setting of the file; the value is TOML, or plain text.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl RunArgs {
    fn settings(&self, ranks: Option<u32>) -> anyhow::Result<trainer::config::RunSettings> {
        let file = self.file.display();
        trainer::config::read(&self.file, &self.sets, ranks)
            .map_err(|error| anyhow::anyhow!("{file}: {error}"))
    }
}

/// Turns a waiting libgomp thread spins before it sleeps: some 50 us. Its own choice is milliseconds, which is nothing lost
/// on free cores, but beside an optimizer thread, a daemon or another run steps took 2.5 times as long (4 threads on 4
/// cores); with this they did not, and on free cores no difference was seen.
const SPIN_COUNT: &str = "20000";

/// libgomp reads its environment when it is loaded, before `main`: so this program starts itself once more, unless the
/// environment says something already.
fn spin_briefly() {
    use std::os::unix::process::CommandExt;
    let chosen = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"]
        .iter()
        .any(|name| std::env::var_os(name).is_some());
    if chosen {
        return;
    }
    // Returns only when it cannot; then the run is slower on a busy machine, and right all the same.
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let mut args = std::env::args_os();
    let mut again = std::process::Command::new(program);
    // The name it was called by stays: help shows it, and so do `ps` and `pkill`.
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    let _ = again.args(args).env("GOMP_SPINCOUNT", SPIN_COUNT).exec();
}

fn main() -> ExitCode {
    spin_briefly();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Each message has its cause's in it: the chain would say everything twice.
            eprintln!("trainer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train { run, fresh } => trainer::train::train(run.settings(Some(1))?, fresh)?,
        Command::Digest { run } => println!("{}", trainer::digest::digest(run.settings(None)?)?),
    }
    Ok(())
}
