//! Limits of jobs in one direction of a device, for the sake of jobs beside them that ask for less or have a larger weight.
//!
//! Operations in the kernel cannot be overtaken. A process that reads one small tile after the other would wait each time for
//! everything that a busy job has in flight, whatever the turns. Beside a job that asks for less, pieces of another job start only
//! while not more is in flight than the device moves in its latency ([`AnswerTime`]) plus a quarter of what the other asks for;
//! beside the smallest job a drive is then busy some three quarters of the time. If everything a user asks for fits the window,
//! nothing of it would ever wait for a turn. Beside a user with a larger weight, a user has at most its proportion of what
//! that one has in flight; the same holds for jobs of a user. Without such neighbours everybody has the whole window.
//!
//! A job's demand is the most it had waiting and in flight within the last one or two spans of bytes, because a process that
//! reads tile after tile has nothing there half of the time. A job that asks only now and then limits nobody.

use std::collections::BTreeMap;

use super::answer::AnswerTime;
use super::owner::{TURNS, TurnWeights, User, UserJob};
use crate::io::IoId;

/// Length of a span, in windows of 10 ms.
const SPAN_WINDOWS: u64 = 10;

/// Fewest operations in two spans that make a job a neighbour.
const OPERATIONS_MIN: u32 = 8;

/// Part of the window that others may fill beside a neighbour on a device with a very long latency.
const NEAR_PARTS: u64 = 4;

/// Shortest pieces beside a neighbour.
const NEAR_PIECE_BYTES_MIN: u32 = 32 << 10;

/// Fewest bytes in flight: two of the shortest pieces and some more, so that a slow drive does not idle.
const NEAR_BYTES_MIN: u64 = 84 << 10;

/// Pieces in a shortened window. Fewer leave the drive idle between two; more cost more than they save.
const NEAR_PIECES: u64 = 4;

/// Jobs in one direction of a device.
#[derive(Debug)]
pub(super) struct Interference {
    window_bytes: u64,
    answer: AnswerTime,
    jobs: BTreeMap<UserJob, Asks>,
    /// Bytes handed over in this span.
    span_bytes: u64,
}

#[derive(Debug, Default)]
struct Asks {
    weights: TurnWeights,
    /// Bytes waiting and in flight.
    now_bytes: u64,
    inflight_bytes: u64,
    /// Most bytes in this span and in the one before.
    most_bytes: [u64; 2],
    /// Operations that came in this span and in the one before.
    operations: [u32; 2],
}

impl Asks {
    fn most(&self) -> u64 {
        self.most_bytes[0].max(self.most_bytes[1])
    }

    fn is_neighbour(&self) -> bool {
        self.operations[0].saturating_add(self.operations[1]) >= OPERATIONS_MIN
    }
}

/// Limits beside neighbours.
#[derive(Clone, Copy, Debug)]
struct Near {
    /// Bytes in flight of all jobs.
    all_bytes: u64,
    /// Bytes in flight of the user.
    user_bytes: u64,
    /// Bytes in flight of the job.
    job_bytes: u64,
    /// The lowest limit, without the bytes that the neighbour itself has in flight.
    least_bytes: u64,
}

impl Interference {
    pub(super) fn new(window_bytes: u64, bytes_per_s: u64) -> Self {
        Self {
            window_bytes,
            answer: AnswerTime::new(bytes_per_s),
            jobs: BTreeMap::new(),
            span_bytes: 0,
        }
    }

    pub(super) fn asks(&mut self, job: UserJob, weights: TurnWeights, bytes: u32) {
        let asks = self.jobs.entry(job).or_default();
        asks.weights = weights;
        asks.now_bytes += u64::from(bytes);
        asks.most_bytes[0] = asks.most_bytes[0].max(asks.now_bytes);
        asks.operations[0] = asks.operations[0].saturating_add(1);
    }

    /// Records that a piece has ended; `took_ns` if it succeeded.
    pub(super) fn ended(&mut self, job: UserJob, piece: IoId, bytes: u32, took_ns: Option<u64>) {
        self.gave_up(job, bytes);
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.inflight_bytes -= u64::from(bytes);
        self.answer.ended(piece, took_ns);
    }

    /// Records that `bytes` of a job will not be handed over.
    pub(super) fn gave_up(&mut self, job: UserJob, bytes: u32) {
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.now_bytes -= u64::from(bytes);
    }

    pub(super) fn handed_over(&mut self, job: UserJob, piece: IoId, bytes: u32) {
        let asks = self.jobs.get_mut(&job).expect("it asked");
        asks.inflight_bytes += u64::from(bytes);
        self.answer.handed_over(piece, bytes);
        self.span_bytes += u64::from(bytes);
        if self.span_bytes < SPAN_WINDOWS * self.window_bytes {
            return;
        }
        self.span_bytes = 0;
        self.answer.go_on();
        for asks in self.jobs.values_mut() {
            asks.most_bytes = [asks.now_bytes, asks.most_bytes[0]];
            asks.operations = [0, asks.operations[0]];
        }
        self.jobs.retain(|_, asks| asks.most() > 0);
    }

    /// Whether a piece of `job` may be handed over with so much in flight.
    pub(super) fn has_room(&self, job: UserJob, inflight_bytes: u64, bytes: u32) -> bool {
        let bytes = u64::from(bytes);
        let Some(near) = self.near(job) else {
            return inflight_bytes + bytes <= self.window_bytes;
        };
        let user_bytes = self.of_user(job.0, |asks| asks.inflight_bytes);
        let job_bytes = self.jobs[&job].inflight_bytes;
        inflight_bytes + bytes <= near.all_bytes
            && (user_bytes == 0 || user_bytes + bytes <= near.user_bytes)
            && (job_bytes == 0 || job_bytes + bytes <= near.job_bytes)
    }

    /// Longest piece of `job`.
    pub(super) fn piece_bytes_max(&self, job: UserJob) -> u32 {
        let Some(near) = self.near(job) else {
            return u32::MAX;
        };
        let block = u64::from(offload_api::BLOCK_BYTES);
        let bytes = near.least_bytes / NEAR_PIECES / block * block;
        bytes.clamp(NEAR_PIECE_BYTES_MIN.into(), u32::MAX.into()) as u32
    }

    /// Returns the limits of `job`; `None` without a neighbour.
    fn near(&self, job: UserJob) -> Option<Near> {
        let asks = self.jobs.get(&job)?;
        // The daemon's own records are few and go first.
        if job.0 == User::Daemon {
            return None;
        }
        let answer = |other_bytes| {
            (self.answer.bytes_beside(other_bytes))
                .max(NEAR_BYTES_MIN)
                .min(self.window_bytes / NEAR_PARTS)
        };
        let others = || {
            (self.jobs.iter()).filter(|(other, asks)| {
                **other != job && matches!(other.0, User::Uid(_)) && asks.is_neighbour()
            })
        };
        // The job with the least demand sets the limit: the longer an operation takes anyway, the less a short wait matters.
        // Its own bytes in flight do not count, or the drive would idle.
        let less = others().filter(|(_, other)| other.most() < asks.most());
        let least = less.min_by_key(|(_, other)| other.most());
        let beside_least = least.map(|(_, other)| {
            let near = answer(other.most()) + other.most() / 4;
            (near, other.inflight_bytes)
        });
        // Less than keeps the drive busy would help nobody.
        let part = |most: u64, weight: u32, of: u32| {
            (most * u64::from(weight) / u64::from(of))
                .max(2 * answer(u64::MAX))
                .max(answer(most))
        };
        let weights = asks.weights;
        let users = others().filter(|(other, _)| other.0 != job.0);
        let beside_users = users.filter_map(|(other, asks)| {
            let weight = match job.0 {
                User::Background => asks.weights.user / TURNS,
                _ => weights.user,
            };
            let most = || self.of_user(other.0, Asks::most);
            (asks.weights.user > weight).then(|| part(most(), weight, asks.weights.user))
        });
        let jobs =
            others().filter(|(other, asks)| other.0 == job.0 && asks.weights.job > weights.job);
        let beside_jobs = jobs.map(|(_, asks)| part(asks.most(), weights.job, asks.weights.job));
        let within = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX).min(self.window_bytes);
        let user_bytes = within(beside_users.min());
        let job_bytes = within(beside_jobs.min());
        let (near, inflight) = beside_least.unwrap_or((self.window_bytes, 0));
        let least_bytes = near.min(user_bytes).min(job_bytes);
        (least_bytes < self.window_bytes).then(|| Near {
            all_bytes: (near + inflight).min(self.window_bytes),
            user_bytes,
            job_bytes,
            least_bytes,
        })
    }

    fn of_user(&self, user: User, bytes: impl Fn(&Asks) -> u64) -> u64 {
        let jobs = self.jobs.range((user, 0)..=(user, u64::MAX));
        jobs.map(|(_, asks)| bytes(asks)).sum()
    }
}
