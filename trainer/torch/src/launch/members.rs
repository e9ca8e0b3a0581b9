//! Processes that a launcher has started: the ranks of its node, or remote shells to other hosts.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use offload_support::errln;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::LaunchError;
use super::failure::{Failure, How};
use super::meeting::Agreement;
use super::requests::line;

/// Started rank, or remote shell in which a host's launcher runs.
pub(super) struct Member {
    pub(super) child: Child,
    pub(super) ended: Option<ExitStatus>,
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
    pub(super) members: Vec<Member>,
    kind: Kind,
}

/// Returns the status of a rank that was asked to stop and ended in order.
fn stopped(status: ExitStatus) -> Option<u8> {
    let asked = [SIGINT, SIGTERM, SIGHUP].map(|signal| 128 + signal);
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
    pub(super) fn all_run(&mut self) -> bool {
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
    pub(super) fn signal(&mut self, signal: Signal) {
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
    pub(super) fn failure(&mut self, failures_max: usize) -> Option<Failure> {
        self.failed(failures_max)?;
        self.all_run();
        let failure = self.failed(failures_max);
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

    fn failed(&self, failures_max: usize) -> Option<Failure> {
        let failed = (0..self.members.len()).filter_map(|number| {
            let how = self.how_failed(number)?;
            Some(self.failure_of(number, how))
        });
        let failed: Vec<Failure> = failed.collect();
        if failed.len() <= failures_max {
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
    pub(super) fn stopped(&self) -> Option<u8> {
        self.members
            .iter()
            .find_map(|member| stopped(member.ended?))
    }

    /// The failure of a member that stays when others have ended well. If failures are tolerated, it is killed.
    pub(super) fn stayed(&mut self, waited: Duration, failures_max: usize) -> Option<Failure> {
        if failures_max > 0 {
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

    pub(super) fn failure_of_node(&self, node: usize, how: How, nodes: &Agreement) -> Failure {
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
        if self.all_run() {
            self.signal(Signal::KILL);
        }
        for member in &mut self.members {
            // It was waited for before, or was just killed.
            let _ = member.child.wait();
        }
    }
}
