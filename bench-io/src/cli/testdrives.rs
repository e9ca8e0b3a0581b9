//! `bench-io testdrives`: creates, shows, uses and destroys rate-limited drives.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use offload_support::{errln, outln};

use crate::testdrives::{self, Drives, DrivesPlan, RateLimit};
use crate::units::{Bytes, Rate};

pub(crate) const EXAMPLES: &str = "Examples, as root:
  bench-io testdrives create 4 8g 6.2GB/s 3.2GB/s --loop-devices 2   # four drives of 6.2 GB/s read and 3.2 GB/s write
  bench-io testdrives exec -- trainer train RUN.toml                 # only processes started by exec are limited
  bench-io testdrives destroy";

/// Rate-limited drives.
#[derive(Args)]
pub(crate) struct TestdrivesArgs {
    #[command(subcommand)]
    command: TestdrivesCommand,
}

#[derive(Subcommand)]
enum TestdrivesCommand {
    /// Create COUNT drives in memory and print their directories
    Create {
        /// Number of drives
        count: u32,
        /// Size of each drive, such as 8GiB
        size: Bytes,
        /// Read limit of each drive, such as 6.2GB/s
        read: Rate,
        /// Write limit of each drive, such as 3.2GB/s
        write: Rate,
        /// Loop devices, each with its directory, that make up one drive; one moves about 5 GB/s
        #[arg(long, value_name = "N", default_value_t = 1)]
        loop_devices: u32,
        /// Join all drives in one btrfs directory, for programs that take a single path
        #[arg(long)]
        raid0: bool,
        /// Only check whether this machine and user can create drives
        #[arg(long)]
        probe: bool,
        /// Name of the set, when several exist
        #[arg(long, default_value = "")]
        name: String,
    },
    /// Run COMMAND, and every process it starts, under the drives' limits
    Exec {
        /// Name of the set
        #[arg(long, default_value = "")]
        name: String,
        /// Command and arguments
        #[arg(last = true, required = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Destroy the drives, and any that killed measurements left behind
    Destroy {
        /// Destroy only this set
        #[arg(long)]
        name: Option<String>,
    },
    /// List the drives
    Show {
        /// Print a JSON list
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(args: TestdrivesArgs) -> Result<()> {
    match args.command {
        TestdrivesCommand::Create {
            count,
            size,
            read,
            write,
            loop_devices,
            raid0,
            probe,
            name,
        } => {
            if probe {
                return match testdrives::missing(raid0) {
                    Some(what) => bail!("rate-limited drives need {what}"),
                    None => Ok(()),
                };
            }
            let drives = Drives::create(&DrivesPlan {
                name,
                count,
                bytes: size.0,
                limit: RateLimit {
                    read: read.0,
                    write: write.0,
                },
                loop_devices,
                raid0,
            })?;
            for dir in &drives.state().dirs {
                outln!("{}", dir.display());
            }
            Ok(())
        }
        TestdrivesCommand::Exec { name, command } => {
            Drives::open(&name)?.enter()?.stay();
            let (program, words) = command.split_first().context("a command is required")?;
            let error = Command::new(program).args(words).exec();
            Err(error).with_context(|| format!("starting {}", program.display()))
        }
        TestdrivesCommand::Destroy { name: Some(name) } => Drives::open(&name)?.destroy(),
        TestdrivesCommand::Destroy { name: None } => destroy_all(),
        TestdrivesCommand::Show { json } => show(json),
    }
}

/// Destroys the unnamed set and every orphaned one.
fn destroy_all() -> Result<()> {
    let orphaned = testdrives::destroy_orphaned()?;
    match Drives::open("") {
        Err(_) if orphaned > 0 && !testdrives::names().contains(&String::new()) => Ok(()),
        unnamed => unnamed?.destroy(),
    }
}

fn show(json: bool) -> Result<()> {
    let mut found = Vec::new();
    for name in testdrives::names() {
        match Drives::open(&name) {
            Ok(drives) => found.push((name, drives)),
            Err(error) => errln!("bench-io: {error:#}"),
        }
    }
    if json {
        let found: Vec<_> = found
            .iter()
            .map(|(name, drives)| serde_json::json!({"name": name, "state": drives.state()}))
            .collect();
        outln!("{}", serde_json::to_string(&found)?);
        return Ok(());
    }
    for (name, drives) in &found {
        let state = drives.state();
        let named = match (&name[..], testdrives::is_orphaned(name)) {
            ("", _) => String::new(),
            (name, false) => format!(" ({name})"),
            (name, true) => format!(" ({name}, orphaned by a killed measurement)"),
        };
        outln!(
            "{} devices{named}, each {} read and {} written:",
            state.devices.len(),
            Rate(state.limit.read),
            Rate(state.limit.write)
        );
        for dir in &state.dirs {
            outln!("  {}", dir.display());
        }
    }
    if found.is_empty() {
        outln!("no rate-limited drives");
    }
    Ok(())
}
