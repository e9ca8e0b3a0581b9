//! `bench-io testdrives`: drives of a known speed, made, shown, used and taken away.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};

use crate::console;
use crate::testdrives::{self, Drives, DrivesPlan, Pace};
use crate::units::{Bytes, Rate};

/// Shown below the commands.
pub(crate) const EXAMPLES: &str = "Examples, as root:
  bench-io paced up 4 8g 6.2G 3.2G --parts 2      # four drives of 6.2 GB/s read and 3.2 written, two loop devices each
  bench-io paced exec -- trainer train RUN.toml   # at their pace; what is started otherwise is not paced
  bench-io paced down";

/// Paced drives.
#[derive(Args)]
pub(crate) struct PacedArgs {
    #[command(subcommand)]
    command: PacedCommand,
}

#[derive(Subcommand)]
enum PacedCommand {
    /// Make COUNT drives in memory and print their directories
    Up {
        count: u32,
        /// Of each drive, as 8g
        size: Bytes,
        /// Bytes a second, as 6.2G
        read: Rate,
        /// Bytes a second, as 3.2G
        write: Rate,
        /// Loop devices, and so directories, of each drive: one copies some 5 GB/s
        #[arg(long, value_name = "N", default_value_t = 1)]
        parts: u32,
        /// One directory over all of them (btrfs), for programs that take a single path
        #[arg(long)]
        raid0: bool,
        /// Only say whether this machine and user could
        #[arg(long)]
        probe: bool,
        /// Of the set, where there are several
        #[arg(long, default_value = "")]
        name: String,
    },
    /// Run COMMAND at the drives' pace, with all it starts
    Exec {
        /// Of the set
        #[arg(long, default_value = "")]
        name: String,
        /// What to run
        #[arg(last = true, required = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Take them away, and what killed measurements left
    Down {
        /// Of a set: only that one
        #[arg(long)]
        name: Option<String>,
    },
    /// Say which there are
    Show {
        /// A list of JSON objects
        #[arg(long)]
        json: bool,
    },
}

/// Does it.
///
/// # Errors
/// What is missing, or what failed.
pub(crate) fn run(args: PacedArgs) -> Result<()> {
    match args.command {
        PacedCommand::Up {
            count,
            size,
            read,
            write,
            parts,
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
            let drives = Drives::up(&DrivesPlan {
                name,
                count,
                bytes: size.0,
                pace: Pace {
                    read: read.0,
                    write: write.0,
                },
                parts,
                raid0,
            })?;
            for dir in &drives.state().dirs {
                console::line(format_args!("{}", dir.display()))?;
            }
            Ok(())
        }
        PacedCommand::Exec { name, command } => {
            Drives::open(&name)?.enter()?.stay();
            let (program, words) = command.split_first().context("what to run")?;
            let error = Command::new(program).args(words).exec();
            Err(error).with_context(|| format!("starting {}", program.display()))
        }
        PacedCommand::Down { name: Some(name) } => Drives::open(&name)?.down(),
        PacedCommand::Down { name: None } => down_all(),
        PacedCommand::Show { json } => show(json),
    }
}

/// The usual set, and what is nobody's any more.
fn down_all() -> Result<()> {
    let left = testdrives::take_away_left()?;
    match Drives::open("") {
        Err(_) if left > 0 && !testdrives::names().contains(&String::new()) => Ok(()),
        usual => usual?.down(),
    }
}

fn show(json: bool) -> Result<()> {
    let mut found = Vec::new();
    for name in testdrives::names() {
        // One that cannot be read hides none of the others.
        match Drives::open(&name) {
            Ok(drives) => found.push((name, drives)),
            Err(error) => console::note(format_args!("{error:#}")),
        }
    }
    if json {
        let found: Vec<_> = found
            .iter()
            .map(|(name, drives)| serde_json::json!({"name": name, "state": drives.state()}))
            .collect();
        return console::line(format_args!("{}", serde_json::to_string(&found)?));
    }
    for (name, drives) in &found {
        let state = drives.state();
        let named = match (&name[..], testdrives::is_left(name)) {
            ("", _) => String::new(),
            (name, false) => format!(" ({name})"),
            (name, true) => format!(" ({name}, left by a killed measurement)"),
        };
        console::line(format_args!(
            "{} devices{named}, each {} read and {} written:",
            state.devices.len(),
            Rate(state.pace.read),
            Rate(state.pace.write)
        ))?;
        for dir in &state.dirs {
            console::line(format_args!("  {}", dir.display()))?;
        }
    }
    if found.is_empty() {
        console::line(format_args!("no rate-limited drives"))?;
    }
    Ok(())
}
