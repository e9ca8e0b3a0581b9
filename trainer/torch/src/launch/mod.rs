//! `trainer launch`: starts several ranks of one run as processes of this program, on this machine or as one of several
//! launchers that each start the ranks of their node, and ends them together.
//!
//! ```text
//!   launch ──starts──▶ ranks               environment: torchrun's variables, and the rendezvous directory or address
//!          ──SIGTERM, SIGINT, SIGHUP──▶    each signal is forwarded: every rank ends after its step, with everything committed
//!          ──SIGUSR1──▶                    forwarded too: the ranks make a checkpoint after the next step
//!          ◀──status──                     the first failure ends the others: SIGTERM, later SIGKILL. 128 plus the signal's
//!                                          number is no failure: the rank was asked to stop, and the others end with it
//!          ◀──heartbeats──▶ other nodes    each launcher tells the others why it ends, and notices when one is gone
//! ```
//!
//! Each rank has its own process group, so a terminal's Ctrl-C reaches only the launcher, and each rank gets
//! the signal once. A rank requests SIGTERM for the death of its launcher.

mod failure;
mod meeting;
mod members;
mod outside;
mod remote;
mod requests;
mod supervise;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernels::gpu::nccl_buffer;
use kernels_torch::collective::LauncherStore;
use offload_support::errln;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use swapper::private::OwnDir;
use trainer::launch::{Launch, LaunchArgs, Options};
use training_ranks::{CollectiveError, DIR_VARIABLE, TOKEN_VARIABLE};

pub use failure::Failure;
pub use meeting::MeetingError;
use meeting::{Agreement, Launchers};
use members::Members;
use outside::{ENDED_WELL, Outside};
use remote::launch_hosts;
use requests::LaunchRequests;
use supervise::{Limits, supervise};

/// torchrun's environment variable with the number of restarts so far.
const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// Environment variable with the launcher's process id.
const LAUNCHER_VARIABLE: &str = "OFFLOADD_LAUNCHER";

/// Error of starting or ending ranks.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("cannot install handlers for signals: {0}")]
    Signals(std::io::Error),
    #[error("cannot create the ranks' rendezvous directory in {}: {source}", dir.display())]
    Dir {
        dir: std::path::PathBuf,
        source: std::io::Error,
    },
    #[error("cannot find {what}: {source}")]
    Own {
        what: &'static str,
        source: std::io::Error,
    },
    #[error("cannot start {name} ({program}): {source}")]
    Start {
        name: String,
        program: String,
        source: std::io::Error,
    },
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error(transparent)]
    Meeting(#[from] MeetingError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(
        "the launcher (process {0}) has ended, so this rank ends too: start the run again with the same command"
    )]
    LauncherGone(String),
}

impl LaunchError {
    /// Exit status of the launcher.
    pub fn code(&self) -> u8 {
        match self {
            LaunchError::Failed(failure) => failure.code,
            LaunchError::Meeting(MeetingError::Stopped(signal)) => 128 + signal.as_raw() as u8,
            _ => 1,
        }
    }
}

/// One start of the ranks.
struct Round {
    number: u32,
    /// Numbers of the first rank and of all ranks.
    first_rank: u32,
    ranks: u32,
    variables: Vec<(&'static str, OsString)>,
    nodes: Option<Agreement>,
    _dir: Option<OwnDir>,
}

/// Starts what the arguments of `trainer launch` ask for.
///
/// # Errors
/// Arguments of `launch` or of `train` that are refused, so that this is said once and not by each rank; those of the ranks.
pub fn run(args: &LaunchArgs) -> anyhow::Result<u8> {
    let (options, ranks) = args.options()?;
    let train = trainer::train_args(&args.train);
    if let Some(ranks) = ranks {
        train.settings(ranks)?;
    }
    Ok(match options {
        Options::Node(options) => launch(options, &args.train)?,
        Options::Hosts(hosts) => launch_hosts(&hosts, &args.train)?,
    })
}

/// Starts ranks as processes `trainer train ARGS...` and waits until all have ended. After a failure it starts them again, as
/// often as allowed. Returns the exit status: 0 when the run is done, the ranks' status when they were asked to stop earlier.
///
/// # Errors
/// Ranks cannot be started; nodes do not come; the first rank or node that failed, with its status.
fn launch(mut options: Launch, args: &[OsString]) -> Result<u8, LaunchError> {
    let mut requests = LaunchRequests::new()?;
    if options.controlled {
        let token = requests.follow_input()?;
        if let Some(meeting) = &mut options.meeting {
            meeting.token = Some(token);
        }
    }
    let meeting = options.meeting.clone().map(Launchers);
    let meeting = meeting.as_ref();
    // Node 0 runs the store until all have ended.
    let _store: Option<LauncherStore> = match meeting {
        Some(meeting) => meeting.serve()?,
        None => None,
    };
    let mut expected: BTreeSet<u32> =
        (0..meeting.map_or(1, |meeting| meeting.0.nodes.max)).collect();
    let mut number = 0;
    loop {
        let round = match meeting {
            Some(meeting) => meet(meeting, &options, number, expected.clone(), &mut requests)?,
            None => alone(&options, number)?,
        };
        let failure = match run_round(&options, &round, args, &mut requests) {
            Ok(status) => {
                close(&round);
                return Ok(status);
            }
            Err(LaunchError::Failed(failure)) => failure,
            Err(error) => {
                if let Some(nodes) = &round.nodes {
                    nodes.heartbeat.end(&error.to_string());
                    nodes.heartbeat.wait_for_ends();
                }
                return Err(error);
            }
        };
        if let Some(nodes) = &round.nodes {
            if nodes.own == 0 {
                // The others read here why this launcher ends.
                nodes.heartbeat.wait_for_ends();
            }
            expected = nodes.members.iter().map(|member| member.node).collect();
            if let Some(gone) = failure.gone() {
                expected.remove(&nodes.members[gone].node);
            }
        }
        if round.number >= options.restarts_max {
            return Err(failure.into());
        }
        number = round.number + 1;
        let most = options.restarts_max;
        errln!("trainer: {failure}; starting again (restart {number} of at most {most})");
    }
}

/// Meets the launchers of other nodes.
fn meet(
    meeting: &Launchers,
    options: &Launch,
    number: u32,
    expected: BTreeSet<u32>,
    requests: &mut LaunchRequests,
) -> Result<Round, LaunchError> {
    let most = options.restarts_max;
    let agreed = meeting.meet(options.ranks, most, number, expected, requests)?;
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("MASTER_ADDR", meeting.0.host.clone().into()),
        ("MASTER_PORT", meeting.0.port.to_string().into()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ("TORCHELASTIC_RUN_ID", "launch".into()),
        (RESTART_COUNT, agreed.round.to_string().into()),
        ("TORCHELASTIC_MAX_RESTARTS", most.to_string().into()),
        ("GROUP_RANK", agreed.own.to_string().into()),
        ("GROUP_WORLD_SIZE", agreed.members.len().to_string().into()),
    ];
    if let Some(token) = &meeting.0.token {
        variables.push((TOKEN_VARIABLE, token.secret().into()));
    }
    Ok(Round {
        number: agreed.round,
        first_rank: agreed.first_rank(),
        ranks: agreed.ranks(),
        variables,
        nodes: Some(agreed),
        _dir: None,
    })
}

/// The ranks of this launcher are all ranks, and meet in a directory.
fn alone(options: &Launch, number: u32) -> Result<Round, LaunchError> {
    let base = std::env::temp_dir();
    let dir = OwnDir::new(&base, "offloadd-launch-")
        .map_err(|source| LaunchError::Dir { dir: base, source })?;
    Ok(Round {
        number,
        first_rank: 0,
        ranks: options.ranks,
        variables: vec![
            (DIR_VARIABLE, dir.path().into()),
            // Ranks that were started again wait for a daemon that may be starting again too.
            (RESTART_COUNT, number.to_string().into()),
        ],
        nodes: None,
        _dir: Some(dir),
    })
}

/// Starts the ranks of this node and waits for them.
fn run_round(
    options: &Launch,
    round: &Round,
    args: &[OsString],
    requests: &mut LaunchRequests,
) -> Result<u8, LaunchError> {
    let program = std::env::current_exe().map_err(|source| LaunchError::Own {
        what: "this program",
        source,
    })?;
    let mut members = Members::ranks(round.first_rank);
    for local_rank in 0..options.ranks {
        let mut command = Command::new(&program);
        command.arg("train").args(args).stdin(Stdio::null());
        command.env_remove(DIR_VARIABLE);
        command
            .envs(variables(options.ranks, round, local_rank))
            .envs(round.variables.iter().map(|(name, value)| (name, value)))
            .env(LAUNCHER_VARIABLE, getpid().to_string())
            .process_group(0);
        members.start(command)?;
    }
    let mut outside = Outside {
        requests,
        nodes: round.nodes.as_ref(),
        since: Instant::now(),
    };
    supervise(members, Limits::default(), &mut outside)
}

/// Variables of rank `local_rank` among the `local_ranks` of this node: its numbers, as torchrun sets them, and what libraries read when
/// they are loaded.
fn variables(local_ranks: u32, round: &Round, local_rank: u32) -> Vec<(&'static str, String)> {
    let numbers = [
        ("RANK", round.first_rank + local_rank),
        ("LOCAL_RANK", local_rank),
        ("WORLD_SIZE", round.ranks),
        ("LOCAL_WORLD_SIZE", local_ranks),
    ];
    let numbers = numbers.map(|(name, number)| (name, number.to_string()));
    let buffer = nccl_buffer(round.ranks > local_ranks);
    let buffer = buffer.map(|(name, bytes)| (name, bytes.to_owned()));
    numbers.into_iter().chain(buffer).collect()
}

/// Tells the other launchers that this node's ranks ended well. Node 0 runs the store and waits for them.
fn close(round: &Round) {
    const LOOK: Duration = Duration::from_millis(50);
    let Some(nodes) = &round.nodes else {
        return;
    };
    nodes.heartbeat.end(ENDED_WELL);
    let until = Instant::now() + Limits::default().close;
    let is_gone = || match nodes.heartbeat.verdict("launching") {
        None | Some(CollectiveError::Left { .. }) => false,
        Some(_) => true,
    };
    while nodes.own == 0 && !nodes.heartbeat.others_ended() && !is_gone() && Instant::now() < until
    {
        std::thread::sleep(LOOK);
    }
}

/// Makes a rank receive SIGTERM when its launcher dies. Does nothing in a process that was not started by
/// `launch`.
///
/// # Errors
/// The launcher is already dead.
pub fn end_with_launcher() -> Result<(), LaunchError> {
    let Some(launcher) = std::env::var_os(LAUNCHER_VARIABLE) else {
        return Ok(());
    };
    let launcher = launcher.to_string_lossy().into_owned();
    // The only possible error is an invalid signal.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // The launcher may have died before the request.
    let parent = getppid().map(|pid| pid.to_string());
    if parent.as_deref() == Some(launcher.as_str()) {
        Ok(())
    } else {
        Err(LaunchError::LauncherGone(launcher))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_several_nodes_get_the_size_of_buffers_for_sockets() {
        let round = Round {
            number: 0,
            first_rank: 2,
            ranks: 4,
            variables: Vec::new(),
            nodes: None,
            _dir: None,
        };
        let numbers = [
            ("RANK", "3".to_owned()),
            ("LOCAL_RANK", "1".to_owned()),
            ("WORLD_SIZE", "4".to_owned()),
        ];
        for local_ranks in [2, 4] {
            let mut expected = numbers.to_vec();
            expected.push(("LOCAL_WORLD_SIZE", local_ranks.to_string()));
            let buffer = nccl_buffer(local_ranks < 4);
            expected.extend(buffer.map(|(name, bytes)| (name, bytes.to_owned())));
            assert_eq!(variables(local_ranks, &round, 1), expected);
        }
    }
}
