//! Waits for ranks, or for the launchers of other hosts: either all end well, or the first one that fails ends the others.

use std::fmt;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use kernels_torch::collective::CollectiveError;
use offload_support::errln;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::LaunchError;
use super::meeting::Agreed;
use super::requests::{Requests, line};

/// Interval between checks of the ranks. The standard library cannot wait for one of several processes.
const LOOK: Duration = Duration::from_millis(10);

/// Time for the launchers of a run that was just agreed on to send their first heartbeat.
const APPEAR: Duration = Duration::from_secs(10);

/// Time after the end of this node's ranks in which the silence of another node is noticed, if that ended them.
const EXPLAIN: Duration = Duration::from_secs(2);

/// Reason with which a launcher ends whose ranks ended well.
pub(super) const ENDED_WELL: &str = "its ranks ended well";

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

/// The rank, host or node that failed first.
#[derive(Debug, PartialEq)]
pub struct Failure {
    /// Exit status for the launcher: the rank's own status, or 128 plus the signal that killed it.
    pub code: u8,
    /// Number of the node that failed, among those that take part; `None` for a member.
    node: Option<usize>,
    /// Name of the rank, host or node.
    name: String,
    how: How,
    /// Others that were ended.
    others: String,
}

#[derive(Debug, PartialEq)]
enum How {
    Exited(u8),
    Killed(i32),
    /// It still ran after the others had ended.
    Stayed(Duration),
    /// The launcher of a node sends no heartbeats.
    Silent(f64),
    /// The launcher of a node did not send a first heartbeat.
    Absent,
    /// The launcher of a node gave up.
    Left(String),
}

impl std::error::Error for Failure {}

impl Failure {
    /// Number of the node that no longer answers, among those that take part. A node whose rank failed still does.
    pub(super) fn gone(&self) -> Option<usize> {
        match self.how {
            How::Silent(_) | How::Absent => self.node,
            _ => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.name)?;
        match &self.how {
            How::Exited(code) => write!(f, "ended with status {code}")?,
            How::Killed(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("unknown");
                write!(f, "was killed by signal {signal} ({name})")?;
            }
            How::Stayed(waited) => write!(
                f,
                "still ran {:.0} s after another had ended",
                waited.as_secs_f64()
            )?,
            How::Silent(silent_s) => write!(
                f,
                "has not answered for {silent_s:.1} s: its launcher was killed or stopped, or the network between the nodes is down"
            )?,
            How::Absent => write!(f, "did not start its ranks")?,
            How::Left(reason) => write!(f, "failed: {reason}")?,
        }
        f.write_str(&self.others)
    }
}

/// Started rank, or remote shell in which a host's launcher runs.
struct Member {
    child: Child,
    ended: Option<ExitStatus>,
    /// Its failure was reported and tolerated.
    reported: bool,
}

/// Name of the members in messages, and how they receive signals.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Processes of this node, whose numbers begin with this one; they receive signals.
    Ranks(u32),
    /// Remote shells to these hosts. Signals do not cross them, so they receive lines.
    Hosts(Vec<String>),
}

/// All ranks or hosts. Dropping it kills and waits for those that are left.
pub(super) struct Members {
    members: Vec<Member>,
    kind: Kind,
}

/// Source of requests, and the other nodes, if there are any.
pub(super) struct Outside<'a> {
    pub(super) requests: &'a mut Requests,
    pub(super) nodes: Option<&'a Agreed>,
    /// Start of the ranks.
    pub(super) since: Instant,
}

/// News from another node.
enum News {
    Failed(usize, How),
    EndedWell,
}

impl Outside<'_> {
    fn news(&self) -> Option<News> {
        let nodes = self.nodes?;
        let absent = || {
            let waited = self.since.elapsed() > APPEAR;
            let node = waited.then(|| nodes.heartbeat.absent())?.first().copied()?;
            Some(News::Failed(node as usize, How::Absent))
        };
        let Some(gone) = nodes.heartbeat.gone() else {
            return absent();
        };
        Some(match gone {
            CollectiveError::Left { reason, .. } if reason == ENDED_WELL => News::EndedWell,
            CollectiveError::Left { rank, reason, .. } => {
                News::Failed(rank as usize, How::Left(reason))
            }
            CollectiveError::Silent { rank, silent_s, .. } => {
                News::Failed(rank as usize, How::Silent(silent_s))
            }
            // The store's connection was closed.
            CollectiveError::Died { rank, .. } => {
                let reason = "its launcher, which runs the rendezvous, is gone".to_owned();
                News::Failed(rank as usize, How::Left(reason))
            }
            error => News::Failed(nodes.own, How::Left(error.to_string())),
        })
    }

    /// The failure of a node that no longer answers, if a rank of this node ended because of it: both are noticed at nearly
    /// the same time.
    fn explained(&self, failure: Failure, members: &Members) -> Failure {
        let until = Instant::now() + EXPLAIN;
        let (How::Exited(_), None, Some(nodes)) = (&failure.how, failure.node, self.nodes) else {
            return failure;
        };
        while Instant::now() < until {
            if let Some(News::Failed(node, how @ How::Silent(_))) = self.news() {
                return members.failure_of_node(node, how, nodes);
            }
            std::thread::sleep(LOOK);
        }
        failure
    }

    /// Tells the launchers of other nodes why this one ends.
    fn tell(&self, failure: &Failure) {
        if let Some(nodes) = self.nodes {
            nodes.heartbeat.end(&failure.to_string());
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
    while members.look() {
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
                        (members.failure(&limits))
                            .or_else(|| {
                                stayed.and_then(|since| members.stayed(since.elapsed(), &limits))
                            })
                            .map(|failure| (failure, limits.end))
                    }
                    .map(|(failure, time)| (failure, Instant::now() + time));
                if let Some((failure, _)) = &failure {
                    outside.tell(failure);
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
        .or(members.failure(&limits))
    {
        None => Ok(members.stopped().unwrap_or(0)),
        Some(failure) => {
            outside.tell(&failure);
            Err(outside.explained(failure, &members).into())
        }
    }
}

/// Returns the status of a rank that was asked to stop and ended in order.
fn stopped(status: ExitStatus) -> Option<u8> {
    let asked = [SIGINT, SIGTERM].map(|signal| 128 + signal);
    let code = status.code().filter(|code| asked.contains(code))?;
    Some(code as u8)
}

impl Members {
    /// Ranks of this node; the first one that is started has number `first`.
    pub(super) fn ranks(first: u32) -> Members {
        Members {
            members: Vec::new(),
            kind: Kind::Ranks(first),
        }
    }

    /// Remote shells to hosts with these names.
    pub(super) fn hosts(names: Vec<String>) -> Members {
        Members {
            members: Vec::new(),
            kind: Kind::Hosts(names),
        }
    }

    /// Starts the next member.
    pub(super) fn start(&mut self, mut command: Command) -> Result<&mut Child, LaunchError> {
        let child = command.spawn().map_err(|source| LaunchError::Start {
            name: self.name(self.members.len()),
            program: command.get_program().to_string_lossy().into_owned(),
            source,
        })?;
        self.members.push(Member {
            child,
            ended: None,
            reported: false,
        });
        Ok(&mut self.members.last_mut().expect("just added").child)
    }

    fn name(&self, number: usize) -> String {
        match &self.kind {
            Kind::Ranks(first) => format!("rank {}", *first as usize + number),
            Kind::Hosts(names) => format!("host {}", names[number]),
        }
    }

    /// Checks which members have ended. Returns false when all have.
    fn look(&mut self) -> bool {
        for member in self
            .members
            .iter_mut()
            .filter(|member| member.ended.is_none())
        {
            // An error would mean that the process is not a child.
            member.ended = member.child.try_wait().expect("a child can be waited for");
        }
        self.members.iter().any(|member| member.ended.is_none())
    }

    /// Sends a signal to all members that have not ended. They have not been waited for, so their process ids
    /// are still valid.
    fn signal(&mut self, signal: Signal) {
        let by_line = matches!(self.kind, Kind::Hosts(_)) && signal != Signal::KILL;
        for member in self
            .members
            .iter_mut()
            .filter(|member| member.ended.is_none())
        {
            match &mut member.child.stdin {
                // A shell that is just ending no longer reads.
                Some(input) if by_line => drop(input.write_all(line(signal).as_bytes())),
                _ => drop(kill_process(Pid::from_child(&member.child), signal)),
            }
        }
    }

    /// Returns the member that caused the failure. A killed rank takes precedence, because the others then end
    /// by themselves. All members are checked again, because the killed one may have ended just after the last
    /// check and a rank that noticed just before it.
    fn failure(&mut self, limits: &Limits) -> Option<Failure> {
        self.failed(limits)?;
        self.look();
        let failure = self.failed(limits);
        for number in 0..self.members.len() {
            let left = self
                .members
                .iter()
                .filter(|member| member.ended.is_none())
                .count();
            let tolerated = failure.is_none() && !self.members[number].reported;
            if let Some(how) = self.how_failed(number).filter(|_| tolerated) {
                self.members[number].reported = true;
                let mut failure = self.failure_of(number, how);
                failure.others = match left {
                    1 => "; 1 host is left".to_owned(),
                    count => format!("; {count} hosts are left"),
                };
                errln!("trainer: {failure}");
            }
        }
        failure
    }

    fn failed(&self, limits: &Limits) -> Option<Failure> {
        let failed = (0..self.members.len()).filter_map(|number| {
            let how = self.how_failed(number)?;
            Some(self.failure_of(number, how))
        });
        let failed: Vec<Failure> = failed.collect();
        if failed.len() <= limits.failures_max {
            return None;
        }
        (failed.into_iter()).min_by_key(|failure| matches!(failure.how, How::Exited(_)))
    }

    fn how_failed(&self, number: usize) -> Option<How> {
        let failed = |status: &ExitStatus| !status.success() && stopped(*status).is_none();
        let status = self.members[number].ended.filter(failed)?;
        Some(match (status.code(), status.signal()) {
            (Some(code), _) => How::Exited(code as u8),
            (None, signal) => How::Killed(signal.unwrap_or(0)),
        })
    }

    /// Returns the status of the first rank that was asked to stop, if any.
    fn stopped(&self) -> Option<u8> {
        self.members
            .iter()
            .find_map(|member| stopped(member.ended?))
    }

    /// The failure of a member that stays when others have ended well. If failures are tolerated, it is killed.
    fn stayed(&mut self, waited: Duration, limits: &Limits) -> Option<Failure> {
        if limits.failures_max > 0 {
            self.signal(Signal::KILL);
            return None;
        }
        let number = self
            .members
            .iter()
            .position(|member| member.ended.is_none())?;
        Some(self.failure_of(number, How::Stayed(waited)))
    }

    fn failure_of(&self, number: usize, how: How) -> Failure {
        let noun = match self.kind {
            Kind::Ranks(_) => "rank",
            Kind::Hosts(_) => "host",
        };
        let name = match self.kind {
            Kind::Ranks(_) => {
                let pid = self.members[number].child.id();
                format!("{} (process {pid})", self.name(number))
            }
            Kind::Hosts(_) => self.name(number),
        };
        Failure {
            code: match how {
                How::Exited(code) => code,
                How::Killed(signal) => 128 + signal as u8,
                _ => 1,
            },
            node: None,
            name,
            how,
            others: match self.members.len() - 1 {
                0 => String::new(),
                1 => format!(", and the other {noun} was ended"),
                count => format!(", and the other {count} {noun}s were ended"),
            },
        }
    }

    fn failure_of_node(&self, node: usize, how: How, nodes: &Agreed) -> Failure {
        Failure {
            code: 1,
            node: Some(node),
            name: nodes.members[node].to_string(),
            how,
            others: match self.members.len() {
                1 => "; this node's rank was ended".to_owned(),
                count => format!("; the {count} ranks of this node were ended"),
            },
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        if self.look() {
            self.signal(Signal::KILL);
        }
        for member in &mut self.members {
            // It was waited for before, or was just killed.
            let _ = member.child.wait();
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
        let mut requests = Requests::new().unwrap();
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
        let failure = ranks.failure(&LIMITS).unwrap();
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
