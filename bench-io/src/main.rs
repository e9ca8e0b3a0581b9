//! Measures drives with tiles, directly and through the daemon.
//!
//! ```text
//!   cli ──▶ job (fio's words) ──▶ bench ──▶ load ──▶ target: the engine alone, or a session of the daemon
//!                                   └──▶ report: figures, CPU time, what they were taken on, warnings
//! ```

#![forbid(unsafe_code)]
// They panic when the reader has gone: `outln!` and `errln!` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod child;
mod cli;
mod confirm;
#[cfg(test)]
mod docs;
mod drive;
mod figures;
mod fio;
mod job;
mod job_file;
mod load;
mod machine;
mod place;
mod prepared;
mod progress;
mod random_data;
mod report;
mod rounds;
mod scale;
mod shell;
mod shuffle;
mod stop;
mod targets;
mod testdrives;
mod training;
mod trial;
mod units;
mod watch;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use offload_support::documents::{self, CompletionsArgs, ManArgs, Section};
use offload_support::signals::survive_file_size_limit;
use offload_support::{console, errln};

use crate::cli::run::RunArgs;
use crate::cli::scale::ScaleArgs;
use crate::cli::testdrives::TestdrivesArgs;
use crate::cli::training::TrainingArgs;

/// Measures drives with tiles, directly and through offloadd.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:
  bench-io scale --directory /mnt/nvme0                        # through the daemon, beside fio
  bench-io run --directory /mnt/nvme0 --rw randread --bs 64k   # one job in fio's terms"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure one job, described by fio's options, on a device or through the daemon
    #[command(after_help = cli::run::EXAMPLES)]
    Run(RunArgs),
    /// Measure whether the rates of 1 to N drives add up, compared with fio
    #[command(after_help = cli::scale::EXAMPLES)]
    Scale(ScaleArgs),
    /// Predict a training step's time from the rates of drives, or train and compare
    #[command(after_help = cli::training::EXAMPLES)]
    Training(TrainingArgs),
    /// Create and destroy drives of a known speed in memory, as root
    #[command(after_help = cli::testdrives::EXAMPLES)]
    Testdrives(TestdrivesArgs),
    /// Print a completion script for a shell
    #[command(after_help = "Examples:
  bench-io completions bash > ~/.local/share/bash-completion/completions/bench-io
  bench-io completions zsh > ~/.zfunc/_bench-io")]
    Completions(CompletionsArgs),
    /// Write the manual pages into a directory
    #[command(after_help = "Example:
  bench-io man ~/.local/share/man/man1 && man bench-io")]
    Man(ManArgs),
    /// Become PROGRAM and be killed when the parent process PARENT dies
    #[command(name = child::WORD, hide = true)]
    EndWith {
        parent: u32,
        #[arg(last = true, required = true)]
        program: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    survive_file_size_limit();
    let arguments = Arguments::try_parse().unwrap_or_else(|error| with_command(error).exit());
    // Lost output fails a command that succeeded otherwise.
    match run(arguments).and_then(|()| Ok(console::finish()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            errln!("bench-io: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Adds to an error about an option or a job file of fio without a command the command that takes them.
fn with_command(mut error: clap::Error) -> clap::Error {
    let first = std::env::args().nth(1).unwrap_or_default();
    let is_fio = match error.kind() {
        ErrorKind::UnknownArgument => first.starts_with('-'),
        ErrorKind::InvalidSubcommand => std::path::Path::new(&first).is_file(),
        _ => false,
    };
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.trim_start_matches('-').to_owned(),
        _ => String::new(),
    };
    if error.kind() == ErrorKind::UnknownArgument {
        let key = text(&error, ContextKind::InvalidArg);
        if !job_file::may_suggest(&key, &text(&error, ContextKind::SuggestedArg)) {
            error.remove(ContextKind::SuggestedArg);
            // It names the option that was to be suggested.
            error.remove(ContextKind::Usage);
        }
        if job_file::is_verify(&key) {
            let tip = ContextValue::StyledStrs(vec![job_file::VERIFY.into()]);
            error.insert(ContextKind::Suggested, tip);
        }
    }
    if is_fio {
        let tip = "fio's options and job files follow `bench-io run`";
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![tip.into()]),
        );
    }
    error
}

fn run(arguments: Arguments) -> Result<()> {
    // The other program handles its own signals.
    if !matches!(arguments.command, Command::EndWith { .. }) {
        stop::listen()?;
    }
    match arguments.command {
        Command::Run(args) => cli::run::run(args),
        Command::Scale(args) => cli::scale::run(args),
        Command::Training(args) => cli::training::run(&args),
        Command::Testdrives(args) => cli::testdrives::run(args),
        Command::Completions(args) => {
            documents::completions(&args, Arguments::command());
            Ok(())
        }
        Command::Man(args) => Ok(documents::man(&args, Section::Users, Arguments::command())?),
        Command::EndWith { parent, program } => child::become_program(parent, &program),
    }
}
