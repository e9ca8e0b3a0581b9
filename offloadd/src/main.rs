//! The program `offloadd`: its command line, and which function runs each command.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use offload_support::console;
use offload_support::documents::{self, CompletionsArgs, ManArgs, Section};
use offload_support::signals::survive_file_size_limit;

use crate::cli::device::DeviceCommand;
use crate::cli::job::JobCommand;

mod cli;
#[cfg(test)]
mod docs;

#[derive(Parser)]
#[command(name = "offloadd", version, about = "Serves NVMe drives and pinned host memory to training processes", after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  offloadd format /mnt/nvme0/offloadd/tiles /mnt/nvme1/offloadd/tiles --size 500GiB
  offloadd serve --config /etc/offloadd/offloadd.toml
  offloadd top
  offloadd job list
  offloadd verify --config /etc/offloadd/offloadd.toml
  offloadd device add /mnt/nvme2/offloadd/tiles --size 500GiB --config /etc/offloadd/offloadd.toml

The settings are a TOML file. The package installs /etc/offloadd/offloadd.toml with a comment on every setting.
`offloadd check-config FILE` checks a file and prints every setting with its value.";

#[derive(Subcommand)]
enum Command {
    /// Create a store on files or block devices, destroying what they contain
    #[command(after_help = "Examples:
  offloadd format --config /etc/offloadd/offloadd.toml --size 500GiB
  offloadd format /dev/disk/by-id/nvme-SERIAL0 /dev/disk/by-id/nvme-SERIAL1")]
    Format {
        /// Format the devices listed in this settings file
        #[arg(
            long,
            value_name = "FILE",
            conflicts_with = "devices",
            required_unless_present = "devices"
        )]
        config: Option<PathBuf>,
        /// Files to create, or block devices
        #[arg(value_name = "DEVICE")]
        devices: Vec<PathBuf>,
        /// Size of each file, for example 500GiB; a block device is used whole
        #[arg(long, value_name = "SIZE", value_parser = offload_support::units::parse_bytes)]
        size: Option<u64>,
        /// Overwrite existing files and stores
        #[arg(long)]
        force: bool,
        /// End when the parent process ends
        #[arg(long)]
        private: bool,
    },
    /// Serve a store until SIGTERM
    #[command(after_help = "Example:
  offloadd serve --config /etc/offloadd/offloadd.toml      # prints READY when it takes calls, and notifies systemd")]
    Serve {
        /// Settings file
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// End with the parent process or on SIGQUIT, and ignore SIGTERM and SIGINT; the socket's directory is for this user only
        #[arg(long)]
        private: bool,
    },
    /// Run a daemon where there is no systemd; sessions survive its restarts
    #[command(after_help = "Example:
  offloadd supervise --config /etc/offloadd/offloadd.toml
  kill -USR2 PID                                  # restarts the daemon from the installed program; PID is this command's

Sessions keep their memory, their rings and what they have written since the last commit. If the settings cannot be served, the
running daemon stays, and the log says why. SIGHUP reloads the settings; SIGTERM ends the daemon and its sessions. With systemd,
`offloadd check-config FILE && systemctl restart offloadd` restarts the daemon in the same way.")]
    Supervise {
        /// Settings file
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Check a settings file before a start or a reload; exits with 78 if it cannot be served
    #[command(after_help = "Example:
  offloadd check-config /etc/offloadd/offloadd.toml      # safe beside a running daemon: locks and changes no device

Prints each problem with a command that fixes it, or the complete settings as they would be served. After a change, run
`systemctl reload offloadd` or send the daemon SIGHUP; its log names the settings that need a restart.")]
    CheckConfig {
        /// Settings file
        #[arg(value_name = "FILE")]
        config: PathBuf,
    },
    /// Report what on this machine stops a daemon or slows it down; exits with 1 if there are problems
    #[command(after_help = "Examples:
  offloadd doctor                                            # checks the settings of the installed service
  offloadd doctor /mnt/nvme0 /mnt/nvme1                      # before there is a store: directories or block devices
  offloadd doctor --config /etc/offloadd/offloadd.toml --json

Checks the kernel, io_uring, memory limits and huge pages; for each device direct I/O, space and file system. Of NVIDIA's GPUs it
says what their driver tells, and with `trainer` beside it how fast they copy, and whether torch, NCCL and cuDNN are found.
Changes nothing. Each hint or problem comes with a command that fixes it.")]
    Doctor {
        /// Directories and devices to check
        #[arg(value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Check these settings and their devices as well
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List, show and delete the jobs of a store
    #[command(subcommand)]
    Job(JobCommand),
    /// Read everything a store contains and report damage; exits with 1 if there is any
    #[command(after_help = "Examples:
  offloadd verify                                           # through the daemon, beside its work: your jobs, or all for root
  offloadd verify --rate 1GB/s --json
  offloadd verify --config runs/mine/offloadd/offloadd.toml # a run with a private daemon, running or not

A daemon verifies committed tiles only, at 200 MB/s unless --rate is given. It runs one verification per user at a time, and
`scrub_bytes_per_s_max` in its settings limits all users together. Without a daemon, the command locks the store, reads it at full
speed, and checks the store's own structures as well.")]
    Verify(cli::verify::VerifyOptions),
    /// Print a completion script for a shell
    #[command(after_help = "Examples:
  offloadd completions bash > ~/.local/share/bash-completion/completions/offloadd
  offloadd completions zsh > ~/.zfunc/_offloadd")]
    Completions(CompletionsArgs),
    /// Write the manual pages into a directory
    #[command(after_help = "Example:
  offloadd man ~/.local/share/man/man8 && man offloadd")]
    Man(ManArgs),
    /// List, add, drain and calibrate the devices of a store
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Show the throughput and latency of a running daemon's drives and jobs
    #[command(after_help = "Examples:
  offloadd top                                                   # updates every second until Ctrl-C
  offloadd top --once --interval 10                              # one table: averages over ten seconds
  offloadd top --config runs/mine/offloadd/offloadd.toml         # a run with a private daemon
  offloadd top --json | jq .devices                              # one line of JSON per interval

Everyone sees all devices and their own jobs; root and the daemon's user see all jobs. `weight` is the configured weight of a user
beside other users, or of a job beside its user's other jobs. `actual` is the part of all bytes moved during the interval that a user
had, or of the user's bytes that a job had. Bandwidth
that one does not use goes to the others. `total written` counts from the daemon's start.")]
    Top(cli::top::TopOptions),
}

fn main() -> ExitCode {
    survive_file_size_limit();
    let result = match Arguments::parse().command {
        Command::Format {
            config,
            devices,
            size,
            force,
            private,
        } => cli::format::run(config, devices, size, force, private).map(|()| ExitCode::SUCCESS),
        Command::Serve { config, private } => {
            cli::serve::run(&config, private).map(|()| ExitCode::SUCCESS)
        }
        Command::Supervise { config } => cli::supervise::run(&config).map(|()| ExitCode::SUCCESS),
        Command::CheckConfig { config } => Ok(cli::check_config::run(&config)),
        Command::Doctor {
            paths,
            config,
            json,
        } => cli::doctor::run(config, paths, json),
        Command::Completions(args) => {
            documents::completions(&args, Arguments::command());
            (console::finish().map_err(Into::into)).map(|()| ExitCode::SUCCESS)
        }
        Command::Man(args) => documents::man(&args, Section::Administrators, Arguments::command())
            .map_err(Into::into)
            .map(|()| ExitCode::SUCCESS),
        Command::Job(command) => cli::job::run(command).map(|()| ExitCode::SUCCESS),
        Command::Verify(options) => cli::verify::run(&options),
        Command::Device(command) => cli::device::run(command).map(|()| ExitCode::SUCCESS),
        Command::Top(options) => cli::top::run(options).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("offloadd: {}", offloadd::error_text::whole(&error));
        ExitCode::FAILURE
    })
}
