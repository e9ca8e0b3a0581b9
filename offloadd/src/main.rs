//! The program `offloadd`: format a store, serve it, verify it, watch it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};

use crate::cli::device::DeviceCommand;
use crate::cli::top::Choice;

mod cli;
#[cfg(test)]
mod docs;

#[derive(Parser)]
#[command(name = "offloadd", version, about = "Serves drives and pinned host memory to training processes", after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  offloadd format /mnt/nvme0/offloadd.tiles /mnt/nvme1/offloadd.tiles --size 500GiB
  offloadd serve --config /etc/offloadd.toml
  offloadd verify --config /etc/offloadd.toml
  offloadd device add /mnt/nvme2/offloadd.tiles --size 500GiB --config /etc/offloadd.toml
  offloadd top

The settings, all of them, with what they are when left out; devices must be given, and what [metrics] and [quota] show are
examples:
  socket = \"/run/offloadd/offloadd.sock\"      # calls; descriptors go over <socket>.fds beside it
  devices = [\"/mnt/nvme0/offloadd.tiles\", \"/mnt/nvme1/offloadd.tiles\"]
  arena_bytes_max = \"64GiB\"                   # host memory of all sessions together
  engine = \"auto\"                             # auto, uring, aio, psync
  require_locked = false                      # refuse to run when memory cannot be locked
  sessions_max = 64
  iodepth_max = 64                            # operations in flight of one session
  rated_tbw = [600, 600]               # what the drives' makers allow, to warn at 80 %; nothing when left out
  scrub_bytes_per_s_max = \"512MiB\"            # what `offloadd verify` of all users reads together, a second
  rebalance_bytes_per_s_max = \"200MiB\"             # what is copied while tiles move between devices, a second, where
                                              # `device add|drain --rate` and `device rate` say nothing; no limit when left out
  [metrics]                                   # counts for Prometheus; without it `offloadd top` has them
  listen = \"unix:/run/offloadd/metrics.sock\" # or \"127.0.0.1:9464\"; nothing that other machines reach
  [quota.default]                             # of each user; [quota.uid.1000]: of this one
  host_bytes_max = \"32GiB\"                  # each key may be left out: no limit
  device_bytes_max = \"2TiB\"
  jobs_max = 256                              # in the store, open or not; 256 when left out, as the store has 1024 places
  sessions_max = 8
  inflight_max = 256                          # operations, as much as all sessions' iodepths together
  share = 100                                 # 1 to 10000: of what a drive moves, beside other users
  [quota.job]                                 # of each job; [quota.uid.1000.job.llama]: of this one of his
  sessions_max = 8                            # the same keys
  share = 100                                 # of its user's part, beside his other jobs";

#[derive(Subcommand)]
enum Command {
    /// Make a store of files or block devices; what is on them is lost
    #[command(after_help = "Examples:
  offloadd format --config /etc/offloadd.toml --size 500GiB
  offloadd format /dev/disk/by-id/nvme-SERIAL0 /dev/disk/by-id/nvme-SERIAL1")]
    Format {
        /// Take the devices of these settings
        #[arg(
            long,
            value_name = "FILE",
            conflicts_with = "devices",
            required_unless_present = "devices"
        )]
        config: Option<PathBuf>,
        /// Files to make, or block devices
        #[arg(value_name = "DEVICE")]
        devices: Vec<PathBuf>,
        /// Of each file, like 500GiB; a block device is taken whole
        #[arg(long, value_name = "SIZE", value_parser = offload_support::units::parse_bytes)]
        size: Option<u64>,
        /// Overwrite files that exist and stores that are there
        #[arg(long)]
        force: bool,
        /// End with the parent process
        #[arg(long)]
        private: bool,
    },
    /// Serve a store until SIGTERM
    #[command(after_help = "Example:
  offloadd serve --config /etc/offloadd.toml      # ready when it says READY, and to systemd")]
    Serve {
        /// The settings
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// End with the parent process, or by SIGQUIT: SIGTERM and SIGINT are left to the parent. The socket's directory belongs to this user alone
        #[arg(long)]
        private: bool,
    },
    /// Keep a daemon running where there is no systemd: processes train on while it is restarted
    #[command(after_help = "Example:
  offloadd supervise --config /etc/offloadd.toml
  kill -USR2 PID                                  # of this: another daemon, of the program that is installed then

Sessions go on with their memory, their rings and what they have written since the last commit. SIGHUP reloads the settings,
SIGTERM ends the daemon and its sessions. With systemd, `systemctl restart offloadd` does the same.")]
    Supervise {
        /// The settings
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Say whether settings could be served, before a start or a reload; ends with 78 if not
    #[command(after_help = "Example:
  offloadd check-config /etc/offloadd/offloadd.toml      # beside a running daemon too; no device is locked or changed

What is wrong is told with the line that mends it; otherwise all settings are printed as they would be served.
After a change: systemctl reload offloadd, or SIGHUP to the daemon, which says what takes a restart.")]
    CheckConfig {
        /// The settings
        #[arg(value_name = "FILE")]
        config: PathBuf,
    },
    /// Say what of this machine is in the way of a daemon, or makes it slow; ends with 1 if there are problems
    #[command(after_help = "Examples:
  offloadd doctor                                            # of the service, where it is installed
  offloadd doctor /mnt/nvme0 /mnt/nvme1                      # before there is a store: directories or block devices
  offloadd doctor --config /etc/offloadd/offloadd.toml --json

Kernel, io_uring, memory limits, huge pages; of each device direct I/O, space, file system, and of the drive beneath it
link, write cache, scheduler and NUMA node. Nothing is changed; each hint and problem comes with the line that mends it.")]
    Doctor {
        /// Directories and devices to look at
        #[arg(value_name = "PATH")]
        places: Vec<PathBuf>,
        /// Look at these settings and their devices as well
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Say what a store holds: jobs and whose they are, tiles, generations, steps
    #[command(after_help = "Examples:
  offloadd inspect                                          # of the service: your jobs, or all for root
  offloadd inspect --config runs/mine/offloadd/offloadd.toml # of a run with a private daemon, whether it runs or not
  offloadd inspect --json | jq '.jobs[].generations'")]
    Inspect {
        #[command(flatten)]
        at: cli::At,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Give a job's room back; what it holds is lost
    #[command(after_help = "Examples:
  offloadd inspect                                          # names the jobs, whose they are and what they hold
  offloadd drop qwen                                        # yours, if nobody could go on from it
  offloadd drop qwen --force                                # with the generation it could be gone on from
  offloadd drop qwen --uid 1000 --force                     # of another: root and who runs the daemon may
  offloadd drop qwen --config runs/mine/offloadd/offloadd.toml # of a run with a private daemon")]
    Drop {
        /// The job; nobody may have it open
        #[arg(value_name = "JOB")]
        job: String,
        /// Its owner, if it is not you
        #[arg(long)]
        uid: Option<u32>,
        /// Also what could be gone on from
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        at: cli::At,
    },
    /// Go on without a record that a device does not give: until then its job is not gone on from
    #[command(after_help = "Examples:
  offloadd inspect                                          # names the jobs, their records and generations
  offloadd give-up qwen                                     # yours, of the service
  offloadd give-up qwen --rate 1GB/s                        # compares faster than the usual 200 MB/s
  offloadd give-up qwen --uid 1000                          # of another: root and who runs the daemon may
  offloadd give-up qwen --config runs/mine/offloadd/offloadd.toml # of a run with a private daemon

The record may be the newest generation: start the daemon again first, the device may give it then. The generation before it
may have been written over since, so its tiles are compared first, and one that is not whole is refused: then --force gives
the record up all the same, and what is left is no whole generation.")]
    DiscardUnreadable {
        /// The job
        #[arg(value_name = "JOB")]
        job: String,
        /// Its owner, if it is not you
        #[arg(long)]
        uid: Option<u32>,
        /// Whether or not what is left is whole
        #[arg(long)]
        force: bool,
        /// Read at most so much a second beside a daemon's work, like 200MB/s
        #[arg(long, value_name = "RATE", value_parser = cli::verify::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        at: cli::At,
    },
    /// Read everything a store holds and name what is damaged; ends with 1 if anything is
    #[command(after_help = "Examples:
  offloadd verify                                           # the service reads beside its work: your jobs, or all for root
  offloadd verify --rate 1GB/s --json
  offloadd verify --config runs/mine/offloadd/offloadd.toml # of a run with a private daemon, whether it runs or not

A daemon reads 200 MB/s if nothing else is said, for each user once at a time, for users together not more than
`scrub_bytes_per_s_max` of its settings, and only what is committed; without a daemon the
store is locked, read as fast as it can be, and its own structures are looked at as well.")]
    Verify {
        /// The store of these settings
        #[arg(long, value_name = "FILE", conflicts_with = "socket")]
        config: Option<PathBuf>,
        /// By the daemon that answers here
        #[arg(long, value_name = "SOCKET")]
        socket: Option<PathBuf>,
        /// Read at most so much a second, like 200MB/s
        #[arg(long, value_name = "RATE", value_parser = cli::verify::rate)]
        rate: Option<u64>,
        /// Only this job, of a running daemon
        #[arg(long, value_name = "NAME")]
        job: Option<String>,
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Print what a shell completes commands with
    #[command(after_help = "Examples:
  offloadd completions bash > ~/.local/share/bash-completion/completions/offloadd
  offloadd completions zsh > ~/.zfunc/_offloadd")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the pages of the manual into a directory
    #[command(after_help = "Example:
  offloadd man ~/.local/share/man/man8 && man offloadd")]
    Man {
        /// Where to
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Bring devices into a store, take them out, and list them, while jobs run or without a daemon
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Show what a running daemon's drives and jobs do, once a second
    #[command(after_help = "Examples:
  offloadd top                                                   # Ctrl-C ends
  offloadd top --once --interval 10                              # one table, over ten seconds
  offloadd top --config runs/mine/offloadd/offloadd.toml         # of a run with a private daemon
  offloadd top --json | jq .devices                              # a line every interval

Everybody sees devices and his own jobs; root and who runs the daemon see all jobs. `share` of a user is his part of what
drives move beside other users, of a job its part of its user's; `got` is what came of it in the interval. Who wants less gets
less, and the rest is the others'.")]
    Top {
        /// Where the daemon answers: `socket` of its settings
        #[arg(
            long,
            value_name = "SOCKET",
            default_value = offloadd::config::SOCKET_DEFAULT
        )]
        socket: PathBuf,
        /// Take the socket of these settings
        #[arg(long, value_name = "FILE", conflicts_with = "socket")]
        config: Option<PathBuf>,
        /// Print one table and end
        #[arg(long)]
        once: bool,
        /// For programs: a line every interval, or one with --once
        #[arg(long)]
        json: bool,
        /// Between two looks
        #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = cli::top::interval)]
        interval: Duration,
    },
}

fn main() -> ExitCode {
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
            places,
            config,
            json,
        } => cli::doctor::run(config, places, json),
        Command::Completions { shell } => {
            cli::documents::completions(shell, Arguments::command()).map(|()| ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            cli::documents::man(&dir, Arguments::command()).map(|()| ExitCode::SUCCESS)
        }
        Command::Inspect { at, json } => cli::inspect::run(&at, json).map(|()| ExitCode::SUCCESS),
        Command::Drop {
            job,
            uid,
            force,
            at,
        } => cli::drop::run(cli::drop::Choice {
            job,
            uid,
            force,
            at,
        })
        .map(|()| ExitCode::SUCCESS),
        Command::DiscardUnreadable {
            job,
            uid,
            force,
            rate,
            at,
        } => cli::discard_unreadable::run(cli::discard_unreadable::Choice {
            job,
            uid,
            force,
            bytes_per_s: rate,
            at,
        })
        .map(|()| ExitCode::SUCCESS),
        Command::Verify {
            config,
            socket,
            rate,
            job,
            json,
        } => cli::verify::run(cli::verify::Choice {
            at: cli::At { config, socket },
            bytes_per_s: rate,
            job,
            json,
        }),
        Command::Device(command) => cli::device::run(command).map(|()| ExitCode::SUCCESS),
        Command::Top {
            socket,
            config,
            once,
            json,
            interval,
        } => cli::top::run(Choice {
            socket,
            config,
            once,
            json,
            interval,
        })
        .map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("offloadd: {}", cli::whole(&error));
        ExitCode::FAILURE
    })
}
