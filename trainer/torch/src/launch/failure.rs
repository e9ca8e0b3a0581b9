//! The rank, host or node that failed first, in words.

use std::fmt;
use std::time::Duration;

/// The rank, host or node that failed first.
#[derive(Debug, PartialEq)]
pub struct Failure {
    /// Exit status for the launcher: the rank's own status, or 128 plus the signal that killed it.
    pub code: u8,
    /// Number of the node that failed, among those that take part; `None` for a member.
    pub(super) node: Option<usize>,
    /// Name of the rank, host or node.
    pub(super) name: String,
    pub(super) how: How,
    /// Others that were ended.
    pub(super) others: String,
}

/// How it failed.
#[derive(Debug, PartialEq)]
pub(super) enum How {
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
                "was still running {:.0} s after another had ended",
                waited.as_secs_f64()
            )?,
            How::Silent(silent_s) => write!(
                f,
                "has not answered for {silent_s:.1} s: its launcher was killed or stopped, or the network between the nodes is down"
            )?,
            How::Absent => write!(
                f,
                "came to the rendezvous, but its launcher has not answered since: look at its messages"
            )?,
            How::Left(reason) => write!(f, "failed: {reason}")?,
        }
        f.write_str(&self.others)
    }
}
