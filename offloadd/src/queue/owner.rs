//! Owners of operations, reduced to the fields that turns depend on.

use crate::io::SessionId;
use crate::quota::{WEIGHT_DEFAULT, WEIGHT_MAX};

/// While some pieces of a job are demanded, one piece in this many is a prefetch: an eighth is enough for progress and is hardly noticed.
pub const TURNS: u32 = 8;

/// Owner of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The daemon: records, the catalog, tiles that move.
    Daemon,
    /// A session of a process.
    Session {
        /// User of the process.
        uid: u32,
        /// Weight of the user beside other users, 1 to [`WEIGHT_MAX`].
        user_weight: u32,
        /// Weight of the job beside the user's other jobs, in the same range.
        job_weight: u32,
        /// Any number that identifies the job.
        job: u64,
        session: SessionId,
    },
}

/// A user or another competitor with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum User {
    /// Operations of the daemon that somebody waits for.
    Daemon,
    /// Operations nobody waits for: tiles that move.
    Background,
    Uid(u32),
}

/// A job of a user.
pub(super) type UserJob = (User, u64);

/// A session of a job. Sessions of a job have equal parts.
pub(super) type JobSession = (UserJob, SessionId);

/// Weight of tiles that move while no user waits. Beside users it is lower, see [`Direction`](super::direction::Direction).
pub(super) const BACKGROUND_WEIGHT: u32 = WEIGHT_DEFAULT;

/// Weights of turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TurnWeights {
    /// [`TURNS`] times the user's weight, so that an eighth of the smallest weight, for tiles that move, is a whole number.
    pub(super) user: u32,
    /// The job's weight among its user's jobs.
    pub(super) job: u32,
}

impl Owner {
    /// Returns the line in which operations of this owner wait, and their weights.
    pub(super) fn line(self, background: bool) -> (JobSession, TurnWeights) {
        let daemon = |user, weight| {
            let weights = TurnWeights {
                user: weight,
                job: WEIGHT_DEFAULT,
            };
            (((user, 0), SessionId(0)), weights)
        };
        match self {
            Self::Daemon if background => daemon(User::Background, BACKGROUND_WEIGHT),
            // Records and the catalog are short and few, and somebody waits for each.
            Self::Daemon => daemon(User::Daemon, WEIGHT_MAX * TURNS),
            Self::Session {
                uid,
                user_weight,
                job_weight,
                job,
                session,
            } => {
                for share in [user_weight, job_weight] {
                    assert!((1..=WEIGHT_MAX).contains(&share), "a share of {share}");
                }
                let weights = TurnWeights {
                    user: user_weight * TURNS,
                    job: job_weight,
                };
                (((User::Uid(uid), job), session), weights)
            }
        }
    }
}
