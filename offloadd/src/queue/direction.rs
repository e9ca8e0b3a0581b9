//! One direction of one device: waiting operations in their order, and bytes in flight.

use std::collections::{BTreeMap, HashMap};

use offload_api::ring::entry::Priority;

use super::fair::Fair;
use super::interference::Interference;
use super::owner::{BACKGROUND_WEIGHT, JobSession, Owner, TURNS, User, UserJob};
use crate::io::IoId;

/// Most pieces in flight in one direction, however small. More do not make a drive faster.
pub const INFLIGHT_COUNT_MAX: usize = 256;

/// Weight of a session among those of its job.
const WEIGHT_EACH: u32 = 1;

/// Turns: users by their weights, a user's jobs by theirs, and a job's sessions equally. Demanded pieces of a job go before its
/// prefetches, and within a session the oldest goes first. Users, jobs and sessions without waiting operations are forgotten,
/// unless they were served ahead of others that wait.
#[derive(Debug)]
pub(super) struct Direction {
    inflight_bytes: u64,
    inflight_count: usize,
    /// Number of waiting operations.
    waiting_count: usize,
    lines: BTreeMap<JobSession, WaitingBySequence>,
    /// Sequence number of each waiting operation, by place.
    numbers: HashMap<usize, u64>,
    numbered: u64,
    users: Fair<User>,
    /// Turns of the jobs of each waiting user.
    jobs: BTreeMap<User, Fair<UserJob>>,
    /// Turns of the sessions of each waiting job. Demands and prefetches are counted apart, so that a session whose prefetches
    /// wait behind demands of others does not save up turns.
    sessions: BTreeMap<UserJob, [Fair<JobSession>; 2]>,
    /// Demanded pieces of a job in a row.
    passed: BTreeMap<UserJob, u32>,
    interference: Interference,
}

/// Waiting operations of a session, demands and prefetches, by sequence number, so that one of thousands is removed quickly.
#[derive(Debug, Default)]
struct WaitingBySequence([BTreeMap<u64, usize>; 2]);

impl WaitingBySequence {
    fn by_priority(&mut self, priority: Priority) -> &mut BTreeMap<u64, usize> {
        &mut self.0[class(priority)]
    }

    fn front(&self, priority: Priority) -> Option<usize> {
        let first = self.0[class(priority)].first_key_value();
        first.map(|(_, place)| *place)
    }

    fn count(&self) -> usize {
        self.0.iter().map(BTreeMap::len).sum()
    }
}

fn class(priority: Priority) -> usize {
    match priority {
        Priority::Demand => 0,
        Priority::Prefetch => 1,
    }
}

/// The next piece to hand over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextPiece {
    pub(super) place: usize,
    pub(super) priority: Priority,
    line: JobSession,
}

impl Direction {
    pub(super) fn new(window_bytes: u64, bytes_per_s: u64) -> Self {
        Self {
            inflight_bytes: 0,
            inflight_count: 0,
            waiting_count: 0,
            lines: BTreeMap::new(),
            numbers: HashMap::new(),
            numbered: 0,
            users: Fair::default(),
            jobs: BTreeMap::new(),
            sessions: BTreeMap::new(),
            passed: BTreeMap::new(),
            interference: Interference::new(window_bytes, bytes_per_s),
        }
    }

    /// Queues an operation of `bytes`.
    pub(super) fn push(&mut self, place: usize, priority: Priority, owner: Owner, bytes: u32) {
        let ((job, _), weights) = owner.line(priority == Priority::Prefetch);
        self.interference.asks(job, weights, bytes);
        self.wait(place, priority, owner);
    }

    /// Abandons the part of an operation that was not handed over, `bytes` long.
    pub(super) fn abandon(&mut self, place: usize, priority: Priority, owner: Owner, bytes: u32) {
        let (line, _) = owner.line(priority == Priority::Prefetch);
        self.interference.gave_up(line.0, bytes);
        self.leave(place, priority, line);
    }

    /// Moves a waiting operation to another priority, behind the others there.
    pub(super) fn promote(&mut self, place: usize, priority: Priority, owner: Owner) {
        let before = match priority {
            Priority::Demand => Priority::Prefetch,
            Priority::Prefetch => Priority::Demand,
        };
        let (line, _) = owner.line(before == Priority::Prefetch);
        self.leave(place, before, line);
        self.wait(place, priority, owner);
    }

    fn wait(&mut self, place: usize, priority: Priority, owner: Owner) {
        let (line, weights) = owner.line(priority == Priority::Prefetch);
        let (job, _) = line;
        let (user, _) = job;
        let weight = match user {
            // The background's weight depends on the jobs beside it and is set with each piece.
            User::Background => self.users.weight(user),
            _ => None,
        };
        self.users.came(user, weight.unwrap_or(weights.user));
        self.jobs.entry(user).or_default().came(job, weights.job);
        self.sessions.entry(job).or_default()[class(priority)].came(line, WEIGHT_EACH);
        let number = self.numbered;
        self.numbered += 1;
        self.numbers.insert(place, number);
        (self.lines.entry(line).or_default().by_priority(priority)).insert(number, place);
        self.waiting_count += 1;
    }

    fn leave(&mut self, place: usize, priority: Priority, line: JobSession) {
        let Some(number) = self.numbers.remove(&place) else {
            return;
        };
        let places = self.lines.get_mut(&line).expect("it waits");
        let left = places.by_priority(priority).remove(&number);
        assert_eq!(left, Some(place), "it waited there");
        self.went(priority, line);
    }

    /// Counts one waiting operation of `line` less, and forgets owners that wait for nothing.
    fn went(&mut self, priority: Priority, line: JobSession) {
        let (job, _) = line;
        let (user, _) = job;
        self.waiting_count -= 1;
        self.users.went(user);
        let jobs = self.jobs.get_mut(&user).expect("it waited");
        jobs.went(job);
        if !jobs.waits() {
            self.jobs.remove(&user);
        }
        let sessions = self.sessions.get_mut(&job).expect("it waited");
        sessions[class(priority)].went(line);
        if !sessions.iter().any(Fair::waits) {
            self.sessions.remove(&job);
            self.passed.remove(&job);
        }
        if self.lines[&line].count() == 0 {
            self.lines.remove(&line);
        }
    }

    /// Returns the next piece to hand over.
    pub(super) fn next(&self) -> Option<NextPiece> {
        let job = self.jobs[&self.users.next()?].next()?;
        let passed = self.passed.get(&job).copied().unwrap_or(0);
        let first = match passed + 1 >= TURNS {
            true => [Priority::Prefetch, Priority::Demand],
            false => [Priority::Demand, Priority::Prefetch],
        };
        first.into_iter().find_map(|priority| {
            let line = self.sessions[&job][class(priority)].next()?;
            let place = self.lines[&line].front(priority)?;
            Some(NextPiece {
                place,
                priority,
                line,
            })
        })
    }

    /// Longest piece of an operation whose first piece is `next`.
    pub(super) fn piece_bytes_max(&self, next: NextPiece) -> u32 {
        self.interference.piece_bytes_max(next.line.0)
    }

    /// Whether a piece of `next` with so many bytes may be handed over. A device without pieces in flight always takes one.
    pub(super) fn has_room(&self, next: NextPiece, bytes: u32) -> bool {
        self.inflight_count == 0
            || self.inflight_count < INFLIGHT_COUNT_MAX
                && (self.interference).has_room(next.line.0, self.inflight_bytes, bytes)
    }

    /// Records that a piece of `next` is handed over, and whether it is the `last` of its operation.
    pub(super) fn hand_over(&mut self, next: NextPiece, piece: IoId, bytes: u32, last: bool) {
        let NextPiece { priority, line, .. } = next;
        let (job, _) = line;
        self.inflight_bytes += u64::from(bytes);
        self.inflight_count += 1;
        self.interference.handed_over(job, piece, bytes);
        let (user, _) = job;
        if user == User::Background {
            self.users.weigh(user, self.background_weight());
        }
        self.users.took(user, bytes);
        (self.jobs.get_mut(&user).expect("it waits")).took(job, bytes);
        let sessions = self.sessions.get_mut(&job).expect("it waits");
        sessions[class(priority)].took(line, bytes);
        match priority {
            Priority::Demand if sessions[class(Priority::Prefetch)].waits() => {
                *self.passed.entry(job).or_default() += 1
            }
            _ => drop(self.passed.remove(&job)),
        }
        if last {
            let places = self.lines.get_mut(&line).expect("it waits");
            let gone = places.by_priority(priority).pop_first();
            assert_eq!(gone.map(|(_, place)| place), Some(next.place));
            self.numbers.remove(&next.place);
            self.went(priority, line);
        }
    }

    /// Weight of tiles that move: an eighth of the least weight that waits beside them.
    fn background_weight(&self) -> u32 {
        let users = |user| matches!(user, User::Uid(_));
        let least = self.users.least_weight(users);
        least.map_or(BACKGROUND_WEIGHT, |least| least / TURNS)
    }

    /// Records that a piece has ended; `took_ns` if it succeeded.
    pub(super) fn take_back(
        &mut self,
        owner: Owner,
        priority: Priority,
        piece: IoId,
        bytes: u32,
        took_ns: Option<u64>,
    ) {
        let ((job, _), _) = owner.line(priority == Priority::Prefetch);
        self.inflight_bytes -= u64::from(bytes);
        self.inflight_count -= 1;
        self.interference.ended(job, piece, bytes, took_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::SessionId;

    /// Returns session `number` of a job of its own, of user `number` unless the test changes it.
    fn session(number: u64) -> Owner {
        Owner::Session {
            uid: number as u32,
            user_weight: 100,
            job_weight: 100,
            job: number,
            session: SessionId(number),
        }
    }

    /// Returns the order in which operations of (owner, pieces) that all wait are handed over, piece by piece.
    fn order(waiting: &[(Owner, u32)]) -> Vec<usize> {
        let mut direction = Direction::new(1 << 30, 1 << 30);
        let mut left: Vec<u32> = waiting.iter().map(|(_, pieces)| *pieces).collect();
        for (place, (owner, pieces)) in waiting.iter().enumerate() {
            direction.push(place, Priority::Demand, *owner, *pieces);
        }
        let mut order = Vec::new();
        while let Some(next) = direction.next() {
            left[next.place] -= 1;
            direction.hand_over(next, IoId(0), 1, left[next.place] == 0);
            order.push(next.place);
        }
        order
    }

    #[test]
    fn who_floods_makes_another_wait_for_one_piece_before_each_of_its_own() {
        let (flood, other) = (session(1), session(2));
        let same_job = Owner::Session {
            uid: 1,
            user_weight: 100,
            job_weight: 100,
            job: 1,
            session: SessionId(3),
        };
        for other in [other, same_job] {
            let mut waiting = vec![(flood, 4); 100];
            waiting.push((other, 4));
            let order = order(&waiting);
            assert_eq!(order.len(), 404);
            let last = order.iter().rposition(|&place| place == 100).unwrap();
            assert_eq!(last, 7, "eight pieces, four of them its own");
        }
    }

    #[test]
    fn one_owners_operations_stay_in_their_order_and_nothing_is_lost() {
        let [one, two] = [session(1), session(2)];
        assert_eq!(order(&[(one, 2), (one, 1), (one, 1)]), [0, 0, 1, 2]);
        assert_eq!(
            order(&[(one, 2), (two, 1), (Owner::Daemon, 1), (one, 1)]),
            [2, 0, 1, 0, 3]
        );
        let mut direction = Direction::new(1 << 30, 1 << 30);
        direction.push(0, Priority::Prefetch, one, 1);
        direction.push(1, Priority::Prefetch, two, 1);
        direction.abandon(0, Priority::Prefetch, one, 1);
        assert_eq!(direction.next().map(|next| next.place), Some(1));
        direction.abandon(1, Priority::Prefetch, two, 1);
        assert_eq!(direction.next(), None);
    }

    #[test]
    fn nobody_is_remembered_who_waits_for_nothing() {
        let mut direction = Direction::new(1 << 30, 1 << 30);
        for number in 0..1000 {
            direction.push(0, Priority::Demand, session(number), 4096);
            let next = direction.next().unwrap();
            direction.hand_over(next, IoId(0), 4096, true);
            direction.take_back(session(number), Priority::Demand, IoId(0), 4096, None);
        }
        assert!(direction.lines.is_empty() && direction.passed.is_empty());
        assert!(direction.jobs.is_empty() && direction.sessions.is_empty());
        assert_eq!(
            (direction.users.known_count(), direction.waiting_count),
            (0, 0)
        );
        assert!(direction.numbers.is_empty());
    }
}
