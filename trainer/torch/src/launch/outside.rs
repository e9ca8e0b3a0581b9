//! The launchers of other nodes as one of them sees them, and requests to end.

use std::time::{Duration, Instant};

use training_ranks::CollectiveError;

use super::failure::{Failure, How};
use super::meeting::Agreement;
use super::members::Members;
use super::requests::LaunchRequests;

/// Interval between two looks at the other launchers.
const LOOK: Duration = Duration::from_millis(10);

/// Time for the launchers of a run that was just agreed on to send their first heartbeat.
const APPEAR: Duration = Duration::from_secs(10);

/// Time after the end of this node's ranks in which the silence of another node is noticed, if that ended them.
const EXPLAIN: Duration = Duration::from_secs(2);

/// Reason with which a launcher ends whose ranks ended well.
pub(super) const ENDED_WELL: &str = "its ranks ended well";

/// Source of requests, and the other nodes, if there are any.
pub(super) struct Outside<'a> {
    pub(super) requests: &'a mut LaunchRequests,
    pub(super) nodes: Option<&'a Agreement>,
    /// Start of the ranks.
    pub(super) since: Instant,
}

/// News from another node.
pub(super) enum News {
    Failed(usize, How),
    EndedWell,
}

impl Outside<'_> {
    pub(super) fn news(&self) -> Option<News> {
        let nodes = self.nodes?;
        let absent = || {
            let waited = self.since.elapsed() > APPEAR;
            let node = waited.then(|| nodes.heartbeat.absent())?.first().copied()?;
            Some(News::Failed(node as usize, How::Absent))
        };
        let Some(gone) = nodes.heartbeat.verdict("launching") else {
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
    pub(super) fn explained(&self, failure: Failure, members: &Members) -> Failure {
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
    pub(super) fn report(&self, failure: &Failure) {
        if let Some(nodes) = self.nodes {
            nodes.heartbeat.end(&failure.to_string());
        }
    }
}
