//! Waits for ranks, or for the launchers of other hosts: either all end well, or the first one that fails ends the others.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::LaunchError;
use super::failure::Failure;
use super::members::Members;
use super::outside::{News, Outside};

/// Interval between checks of the ranks. The standard library cannot wait for one of several processes.
const LOOK: Duration = Duration::from_millis(10);

/// Time limits for ranks to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time from SIGTERM to SIGKILL after a rank has failed. The others need some seconds to notice which
    /// rank is gone or does not answer, and their messages are useful.
    pub(super) end: Duration,
    /// The same after another node has failed, which was noticed some seconds after the failure.
    pub(super) end_after_node: Duration,
    /// Time from the first rank that ended well to the last: they should end together.
    pub(super) close: Duration,
    /// Number of hosts that may fail without ending the others.
    pub(super) failures_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            end: Duration::from_secs(8),
            end_after_node: Duration::from_secs(4),
            close: Duration::from_secs(60),
            failures_max: 0,
        }
    }
}

/// Waits until all members have ended. Forwards requests to end. Returns 0, or the status of a rank that was asked to stop.
pub(super) fn supervise(
    mut members: Members,
    limits: Limits,
    outside: &mut Outside<'_>,
) -> Result<u8, LaunchError> {
    let mut failure: Option<(Failure, Instant)> = None;
    let mut first_end: Option<Instant> = None;
    while members.all_run() {
        for signal in outside.requests.pending() {
            members.signal(signal);
        }
        if members.members.iter().any(|member| member.ended.is_some()) {
            first_end.get_or_insert_with(Instant::now);
        }
        match &failure {
            None => {
                let news = outside.news();
                if matches!(news, Some(News::EndedWell)) {
                    first_end.get_or_insert_with(Instant::now);
                }
                let stayed = first_end.filter(|since| since.elapsed() > limits.close);
                failure =
                    if let (Some(News::Failed(node, how)), Some(nodes)) = (news, outside.nodes) {
                        let failure = members.failure_of_node(node, how, nodes);
                        Some((failure, limits.end_after_node))
                    } else {
                        (members.failure(limits.failures_max))
                            .or_else(|| {
                                stayed.and_then(|since| {
                                    members.stayed(since.elapsed(), limits.failures_max)
                                })
                            })
                            .map(|failure| (failure, limits.end))
                    }
                    .map(|(failure, time)| (failure, Instant::now() + time));
                if let Some((failure, _)) = &failure {
                    outside.report(failure);
                    members.signal(Signal::TERM);
                }
            }
            Some((_, until)) if Instant::now() > *until => members.signal(Signal::KILL),
            Some(_) => {}
        }
        std::thread::sleep(LOOK);
    }
    match failure
        .map(|(failure, _)| failure)
        .or(members.failure(limits.failures_max))
    {
        None => Ok(members.stopped().unwrap_or(0)),
        Some(failure) => {
            outside.report(&failure);
            Err(outside.explained(failure, &members).into())
        }
    }
}

#[cfg(test)]
mod tests {
    //! Errors that these tests find: a rank outlives the others, the wrong rank is reported, an unresponsive
    //! rank is waited for without end.

    use std::process::Command;

    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    use super::super::requests::LaunchRequests;
    use super::*;

    /// A generous limit between ranks that end well, because the machine may be busy.
    const LIMITS: Limits = Limits {
        end: Duration::from_millis(300),
        end_after_node: Duration::from_millis(300),
        close: Duration::from_secs(60),
        failures_max: 0,
    };

    /// Runs these shell scripts as ranks; returns the failure and the time taken.
    fn run(scripts: &[&str]) -> (Option<Failure>, Duration) {
        run_within(LIMITS, scripts)
    }

    fn supervised(
        limits: Limits,
        mut members: Members,
        scripts: &[&str],
    ) -> Result<u8, LaunchError> {
        let mut requests = LaunchRequests::new().unwrap();
        for script in scripts {
            let mut command = Command::new("sh");
            command
                .arg("-c")
                .arg(script)
                .stdin(std::process::Stdio::piped());
            members.start(command).unwrap();
        }
        let mut outside = Outside {
            requests: &mut requests,
            nodes: None,
            since: Instant::now(),
        };
        supervise(members, limits, &mut outside)
    }

    fn run_within(limits: Limits, scripts: &[&str]) -> (Option<Failure>, Duration) {
        let since = Instant::now();
        let failure = match supervised(limits, Members::ranks(0), scripts) {
            Ok(_) => None,
            Err(LaunchError::Failed(failure)) => Some(failure),
            Err(other) => panic!("{other}"),
        };
        (failure, since.elapsed())
    }

    /// Number of the rank that failed.
    fn number(failure: &Failure) -> u32 {
        let number = failure.name.split(' ').nth(1).unwrap();
        number.parse().unwrap()
    }

    #[test]
    fn ranks_that_end_well_are_no_failure() {
        assert_eq!(run(&["exit 0", "sleep 0.05", "exit 0"]).0, None);
    }

    #[test]
    fn ranks_that_were_asked_to_stop_are_no_failure_and_give_their_status() {
        // The second one is not killed while it closes.
        let scripts = ["exit 143", "sleep 0.4; exit 143"];
        let status = supervised(LIMITS, Members::ranks(0), &scripts);
        assert_eq!(status.unwrap(), 143);
        let (failure, _) = run(&["sleep 0.05; exit 130", "exit 1"]);
        assert_eq!(failure.unwrap().code, 1);
    }

    #[test]
    fn the_first_failure_ends_the_others_and_gives_the_status() {
        let (failure, took) = run(&["exec sleep 600", "sleep 0.05; exit 7", "exec sleep 600"]);
        let failure = failure.unwrap();
        assert_eq!((number(&failure), failure.code), (1, 7));
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
        assert_eq!((number(&failure), failure.code), (1, 137), "{failure}");
        // The killed rank ends after it was checked, and one that noticed before its own check.
        let mut ranks = Members::ranks(0);
        for script in ["exit 1", "kill -9 $$"] {
            let mut command = Command::new("sh");
            command.arg("-c").arg(script);
            let pid = Pid::from_child(ranks.start(command).unwrap());
            let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(pid), ended).unwrap();
        }
        let first = &mut ranks.members[0];
        first.ended = first.child.try_wait().unwrap();
        let failure = ranks.failure(LIMITS.failures_max).unwrap();
        assert_eq!((number(&failure), failure.code), (1, 137));
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
        assert_eq!(number(&failure.unwrap()), 2);
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
        assert_eq!((number(&failure), failure.code), (1, 1));
        assert!(failure.to_string().contains("still running"), "{failure}");
        assert!(took < Duration::from_secs(60), "{took:?}");
    }

    #[test]
    fn a_launcher_that_gives_up_leaves_no_rank_behind() {
        let start = |program: &str| {
            let mut command = Command::new(program);
            command.arg("60");
            command
        };
        let mut ranks = Members::ranks(4);
        let pid = Pid::from_child(ranks.start(start("sleep")).unwrap());
        let text = ranks
            .start(start("/no/such/program"))
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("cannot start rank 5 (/no/such/program)"),
            "{text}"
        );
        drop(ranks);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }

    fn hosts() -> Members {
        Members::hosts(vec!["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn hosts_receive_signals_as_lines() {
        // The first one fails; the second one reads that it is to end.
        let (first, second) = (
            "exit 5",
            "read line; test \"$line\" = terminate && exit 143; exit 1",
        );
        let Err(LaunchError::Failed(failure)) = supervised(LIMITS, hosts(), &[first, second])
        else {
            panic!("a host failed")
        };
        assert_eq!(
            failure.to_string(),
            "host a ended with status 5, and the other host was ended"
        );
    }

    #[test]
    fn as_many_hosts_may_fail_as_the_run_can_do_without() {
        let limits = Limits {
            failures_max: 1,
            ..LIMITS
        };
        assert_eq!(
            supervised(limits, hosts(), &["exit 5", "sleep 0.4"]).unwrap(),
            0
        );
        let failed = supervised(limits, hosts(), &["exit 5", "sleep 0.1; exit 6"]);
        assert!(matches!(failed, Err(LaunchError::Failed(_))), "{failed:?}");
        // A shell to a host that is gone may never end.
        let limits = Limits {
            close: LIMITS.end,
            ..limits
        };
        assert_eq!(
            supervised(limits, hosts(), &["exec sleep 600", "exit 0"]).unwrap(),
            0
        );
    }
}
