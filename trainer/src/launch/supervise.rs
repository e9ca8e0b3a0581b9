//! Waits for ranks: either all end well, or the first one that fails ends the others.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::LaunchError;

/// Interval between checks of the ranks. The standard library cannot wait for one of several processes.
const LOOK: Duration = Duration::from_millis(10);

/// Time limits for ranks to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time from SIGTERM to SIGKILL after a rank has failed. The others need some seconds to notice which
    /// rank is gone or does not answer, and their messages are useful.
    pub(super) end: Duration,
    /// Time from the first rank that ended well to the last: they should end together.
    pub(super) close: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            end: Duration::from_secs(8),
            close: Duration::from_secs(60),
        }
    }
}

/// The rank that failed first.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// Number of the rank.
    pub rank: u32,
    /// Process id of the rank.
    pub pid: u32,
    /// Exit status for the launcher: the rank's own status, or 128 plus the signal that killed it.
    pub code: u8,
    /// How it failed.
    how: How,
    others_count: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum How {
    Exited(u8),
    Killed(i32),
    /// It still ran after the others had ended.
    Stayed(Duration),
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (process {}) ", self.rank, self.pid)?;
        match &self.how {
            How::Exited(code) => write!(f, "ended with status {code}")?,
            How::Killed(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("unknown");
                write!(f, "was killed by signal {signal} ({name})")?;
            }
            How::Stayed(waited) => write!(
                f,
                "still ran {:.0} s after another rank had ended",
                waited.as_secs_f64()
            )?,
        }
        match self.others_count {
            0 => Ok(()),
            1 => write!(f, ", and the other rank was ended"),
            count => write!(f, ", and the other {count} ranks were ended"),
        }
    }
}

/// Started rank.
struct Rank {
    child: Child,
    ended: Option<ExitStatus>,
}

/// All ranks. Dropping it kills and waits for those that are left.
#[derive(Default)]
struct Ranks(Vec<Rank>);

/// Starts all of `commands` as ranks and waits until they have ended. Forwards SIGTERM and SIGINT. Returns 0,
/// or the status of a rank that was asked to stop.
pub(super) fn supervise(
    commands: impl Iterator<Item = Command>,
    limits: Limits,
) -> Result<u8, LaunchError> {
    // Installed before the ranks start, so that no signal is lost.
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(LaunchError::Signals)?;
    let mut ranks = Ranks::default();
    for (mut command, rank) in commands.zip(0..) {
        let child = command
            .spawn()
            .map_err(|source| LaunchError::Start { rank, source })?;
        ranks.0.push(Rank { child, ended: None });
    }
    let mut failure: Option<(Failure, Instant)> = None;
    let mut first_end: Option<Instant> = None;
    while ranks.look() {
        for signal in signals.pending() {
            ranks.signal(if signal == SIGINT {
                Signal::INT
            } else {
                Signal::TERM
            });
        }
        if ranks.0.iter().any(|rank| rank.ended.is_some()) {
            first_end.get_or_insert_with(Instant::now);
        }
        match &failure {
            None => {
                let stayed = first_end.filter(|since| since.elapsed() > limits.close);
                failure = (ranks.failure())
                    .or_else(|| stayed.and_then(|since| ranks.stayed(since.elapsed())))
                    .map(|failure| (failure, Instant::now()));
                if failure.is_some() {
                    ranks.signal(Signal::TERM);
                }
            }
            Some((_, since)) if since.elapsed() > limits.end => ranks.signal(Signal::KILL),
            Some(_) => {}
        }
        std::thread::sleep(LOOK);
    }
    match failure.map(|(failure, _)| failure).or(ranks.failure()) {
        None => Ok(ranks.stopped().unwrap_or(0)),
        Some(failure) => Err(failure.into()),
    }
}

/// Returns the status of a rank that was asked to stop and ended in order.
fn stopped(status: ExitStatus) -> Option<u8> {
    let asked = [SIGINT, SIGTERM].map(|signal| 128 + signal);
    let code = status.code().filter(|code| asked.contains(code))?;
    Some(code as u8)
}

impl Ranks {
    /// Checks which ranks have ended. Returns false when all have.
    fn look(&mut self) -> bool {
        for rank in self.0.iter_mut().filter(|rank| rank.ended.is_none()) {
            // An error would mean that the process is not a child.
            rank.ended = rank.child.try_wait().expect("a child can be waited for");
        }
        self.0.iter().any(|rank| rank.ended.is_none())
    }

    /// Sends a signal to all ranks that have not ended. They have not been waited for, so their process ids
    /// are still valid.
    fn signal(&self, signal: Signal) {
        for rank in self.0.iter().filter(|rank| rank.ended.is_none()) {
            let _ = kill_process(Pid::from_child(&rank.child), signal);
        }
    }

    /// Returns the rank that caused the failure. A killed rank takes precedence, because the others then end
    /// by themselves. All ranks are checked again, because the killed one may have ended just after the last
    /// check and a rank that noticed just before it.
    fn failure(&mut self) -> Option<Failure> {
        self.failed()?;
        self.look();
        self.failed()
    }

    fn failed(&self) -> Option<Failure> {
        let failed = (self.0.iter().zip(0..)).filter_map(|(rank, number)| {
            let failed = |status: &ExitStatus| !status.success() && stopped(*status).is_none();
            let status = rank.ended.filter(failed)?;
            let how = match (status.code(), status.signal()) {
                (Some(code), _) => How::Exited(code as u8),
                (None, signal) => How::Killed(signal.unwrap_or(0)),
            };
            Some(self.failure_of(number, how))
        });
        failed.min_by_key(|failure| matches!(failure.how, How::Exited(_)))
    }

    /// Returns the status of the first rank that was asked to stop, if any.
    fn stopped(&self) -> Option<u8> {
        self.0.iter().find_map(|rank| stopped(rank.ended?))
    }

    fn stayed(&self, waited: Duration) -> Option<Failure> {
        let mut ranks = self.0.iter().zip(0..);
        let (_, number) = ranks.find(|(rank, _)| rank.ended.is_none())?;
        Some(self.failure_of(number, How::Stayed(waited)))
    }

    fn failure_of(&self, number: usize, how: How) -> Failure {
        Failure {
            rank: number as u32,
            pid: self.0[number].child.id(),
            code: match how {
                How::Exited(code) => code,
                How::Killed(signal) => 128 + signal as u8,
                How::Stayed(_) => 1,
            },
            how,
            others_count: self.0.len() - 1,
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.look() {
            self.signal(Signal::KILL);
        }
        for rank in &mut self.0 {
            // It was waited for before, or was just killed.
            let _ = rank.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    //! Errors that these tests find: a rank outlives the others, the wrong rank is reported, an unresponsive
    //! rank is waited for without end.

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    /// A generous limit between ranks that end well, because the machine may be busy.
    const LIMITS: Limits = Limits {
        end: Duration::from_millis(300),
        close: Duration::from_secs(60),
    };

    /// Runs these shell scripts as ranks; returns the failure and the time taken.
    fn run(scripts: &[&str]) -> (Option<Failure>, Duration) {
        run_within(LIMITS, scripts)
    }

    fn run_within(limits: Limits, scripts: &[&str]) -> (Option<Failure>, Duration) {
        let since = Instant::now();
        let commands = scripts.iter().map(|script| {
            let mut command = Command::new("sh");
            command.arg("-c").arg(script);
            command
        });
        let failure = match supervise(commands, limits) {
            Ok(_) => None,
            Err(LaunchError::Failed(failure)) => Some(failure),
            Err(other) => panic!("{other}"),
        };
        (failure, since.elapsed())
    }

    #[test]
    fn ranks_that_end_well_are_no_failure() {
        assert_eq!(run(&["exit 0", "sleep 0.05", "exit 0"]).0, None);
    }

    #[test]
    fn ranks_that_were_asked_to_stop_are_no_failure_and_give_their_status() {
        let script = |script: &str| {
            let mut command = Command::new("sh");
            command.arg("-c").arg(script);
            command
        };
        // The second one is not killed while it closes.
        let scripts = ["exit 143", "sleep 0.4; exit 143"].map(script);
        assert_eq!(supervise(scripts.into_iter(), LIMITS).unwrap(), 143);
        let (failure, _) = run(&["sleep 0.05; exit 130", "exit 1"]);
        assert_eq!(failure.unwrap().code, 1);
    }

    #[test]
    fn the_first_failure_ends_the_others_and_gives_the_status() {
        let (failure, took) = run(&["exec sleep 600", "sleep 0.05; exit 7", "exec sleep 600"]);
        let failure = failure.unwrap();
        assert_eq!((failure.rank, failure.code), (1, 7));
        let text = failure.to_string();
        assert!(
            text.contains("rank 1 (process ")
                && text.contains(") ended with status 7, and the other 2 ranks were ended"),
            "{text}"
        );
        assert!(took < Duration::from_secs(60), "{took:?}");
    }

    #[test]
    fn a_killed_rank_is_reported_before_those_that_noticed() {
        // Two ranks end as soon as they see that the killed one is gone or a zombie.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid").display().to_string();
        let notices = format!(
            "until [ -s {file} ]; do sleep 0.01; done; stat=/proc/$(cat {file})/stat
            while grep -qs ') [^Z]' $stat; do :; done; exit 1"
        );
        let killed = format!("echo $$ >{file}.new; mv {file}.new {file}; kill -9 $$");
        let (failure, _) = run(&[&notices, &killed, &notices]);
        let failure = failure.unwrap();
        assert_eq!((failure.rank, failure.code), (1, 137), "{failure}");
        // The killed rank ends after it was checked, and one that noticed before its own check.
        let mut ranks = Ranks::default();
        for script in ["exit 1", "kill -9 $$"] {
            let child = Command::new("sh").arg("-c").arg(script).spawn().unwrap();
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(Pid::from_child(&child)), ended).unwrap();
            ranks.0.push(Rank { child, ended: None });
        }
        ranks.0[0].ended = ranks.0[0].child.try_wait().unwrap();
        let failure = ranks.failure().unwrap();
        assert_eq!((failure.rank, failure.code), (1, 137));
        let text = failure.to_string();
        assert!(
            text.contains("was killed by signal 9 (SIGKILL), and the other rank was ended"),
            "{text}"
        );
    }

    #[test]
    fn a_rank_that_ignores_sigterm_or_is_stopped_is_killed() {
        let (failure, took) = run(&[
            "trap '' TERM; while true; do sleep 0.05; done",
            "kill -STOP $$; exit 0",
            "sleep 0.1; exit 3",
        ]);
        assert_eq!(failure.unwrap().rank, 2);
        assert!(
            took >= LIMITS.end && took < Duration::from_secs(60),
            "{took:?}"
        );
    }

    #[test]
    fn a_rank_that_stays_when_another_has_ended_is_a_failure() {
        let limits = Limits {
            close: LIMITS.end,
            ..LIMITS
        };
        let (failure, took) = run_within(limits, &["exit 0", "exec sleep 600"]);
        let failure = failure.unwrap();
        assert_eq!((failure.rank, failure.code), (1, 1));
        assert!(failure.to_string().contains("still ran"), "{failure}");
        assert!(took < Duration::from_secs(60), "{took:?}");
    }

    #[test]
    fn a_launcher_that_gives_up_leaves_no_rank_behind() {
        let start = |program: &str| {
            let mut command = Command::new(program);
            command.arg("60");
            command
        };
        let commands = [start("sleep"), start("/no/such/program")];
        let text = supervise(commands.into_iter(), LIMITS)
            .unwrap_err()
            .to_string();
        assert!(text.contains("cannot start rank 1"), "{text}");
        let child = start("sleep").spawn().unwrap();
        let pid = Pid::from_child(&child);
        drop(Ranks(vec![Rank { child, ended: None }]));
        assert!(rustix::process::test_kill_process(pid).is_err());
    }
}
