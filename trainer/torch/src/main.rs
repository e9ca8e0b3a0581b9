//! The program that trains. `trainer` has found libtorch and becomes it for `train` and `launch`, with the same arguments.

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use kernels::gpu::Gpu;
use offload_support::{errln, outln};
use trainer::Command;
use trainer::with_torch::TORCH_SUPPORT;
use trainer_torch::launch::{self, LaunchError};
use trainer_torch::torch_support::torch_support;
use trainer_torch::train::train;
use training_ranks::World;

fn main() -> ! {
    kernels_torch::exit(outcome())
}

/// Runs the command that the arguments name and returns the exit status.
fn outcome() -> u8 {
    if let Err(error) = launch::end_with_launcher() {
        errln!("trainer: {error}");
        return error.code();
    }
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(TORCH_SUPPORT) {
        return print_torch_support(args.next().as_deref());
    }
    let run = |command| match command {
        Command::Train(args) => {
            let world = World::from_env()?;
            let settings = args.settings(world.ranks)?;
            let trace = args.trace(world.rank);
            Ok(train(settings, &args.start(), &trace, args.verbose())?)
        }
        Command::Launch(args) => launch::run(&args),
        _ => anyhow::bail!("trainer-with-torch trains only: call `trainer`, which lies beside it"),
    };
    trainer::outcome(run, |error| error.downcast_ref().map(LaunchError::code))
}

/// Tells `trainer` what torch can do on the GPU of this number.
fn print_torch_support(index: Option<&str>) -> u8 {
    let gpu = index.and_then(|index| index.parse().ok()).map(Gpu::open);
    match gpu {
        Some(Ok(gpu)) => {
            let support = serde_json::to_string(&torch_support(gpu.info()));
            outln!("{}", support.expect("plain data"));
            0
        }
        Some(Err(error)) => {
            errln!("{error}");
            1
        }
        None => {
            errln!("{TORCH_SUPPORT} needs the number of a GPU");
            1
        }
    }
}
