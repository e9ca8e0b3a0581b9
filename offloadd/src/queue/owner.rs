//! Whose operation it is, as far as turns depend on it.

use super::direction::TURNS;
use crate::io::SessionId;
use crate::quota::{SHARE_DEFAULT, SHARE_MAX};

/// Who asks a device for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The daemon: records, the catalog, tiles that move.
    Daemon,
    /// A process.
    Session {
        /// Its user.
        uid: u32,
        /// The user's part beside those of others, 1 to [`SHARE_MAX`](crate::quota::SHARE_MAX).
        user_share: u32,
        /// The job's part of that beside his other jobs, as many.
        job_share: u32,
        /// Its job, by any number that is this job's alone.
        job: u64,
        /// Itself.
        session: SessionId,
    },
}

/// Whoever has a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum User {
    /// What somebody waits for.
    Daemon,
    /// Tiles that move, wear: nobody waits.
    Background,
    Uid(u32),
}

/// One of a user's.
pub(super) type Job = (User, u64);

/// Sessions of a job have equal parts.
pub(super) type Line = (Job, SessionId);

/// Of tiles that move while no user waits. Beside users they have less, see [`Direction`](super::way::Way).
pub(super) const BACKGROUND_WEIGHT: u32 = SHARE_DEFAULT;

/// What turns weigh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weights {
    /// [`TURNS`] times the user's share, so that the part of tiles that move beside the smallest share is a whole number.
    pub(super) user: u32,
    /// The job's share among its user's.
    pub(super) job: u32,
}

impl Owner {
    /// Where its operations stand, and what they weigh.
    pub(super) fn line(self, background: bool) -> (Line, Weights) {
        let daemon = |user, weight| {
            let weights = Weights {
                user: weight,
                job: SHARE_DEFAULT,
            };
            (((user, 0), SessionId(0)), weights)
        };
        match self {
            Self::Daemon if background => daemon(User::Background, BACKGROUND_WEIGHT),
            // Records and the catalog: short, few, and somebody waits for each, whatever the users' shares are.
            Self::Daemon => daemon(User::Daemon, SHARE_MAX * TURNS),
            Self::Session {
                uid,
                user_share,
                job_share,
                job,
                session,
            } => {
                for share in [user_share, job_share] {
                    assert!((1..=SHARE_MAX).contains(&share), "a share of {share}");
                }
                let weights = Weights {
                    user: user_share * TURNS,
                    job: job_share,
                };
                (((User::Uid(uid), job), session), weights)
            }
        }
    }
}
