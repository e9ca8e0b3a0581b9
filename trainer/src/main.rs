//! The `trainer` command: every command that needs no libtorch; for `train` and `launch` it becomes `trainer-with-torch`, which lies
//! beside it.

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use trainer::{Command, with_torch};

fn main() -> ExitCode {
    let run = |command| match command {
        Command::Train(_) | Command::Launch(_) => {
            anyhow::bail!(with_torch::become_trainer_with_torch())
        }
        command => trainer::run(command, with_torch::ask_torch),
    };
    ExitCode::from(trainer::outcome(run, |_| None))
}
