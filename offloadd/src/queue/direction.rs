//! One way of one device: who waits, in which order, and how much is in flight.

use std::collections::{BTreeMap, HashMap};

use offload_api::ring::entry::Priority;

use super::fair::Fair;
use super::interference::Neighbours;
use super::owner::{BACKGROUND_WEIGHT, Job, Line, Owner, User};
use crate::io::IoId;

/// Of so many pieces of a job, one is of what is moved ahead of its use while something else is wanted: an eighth, enough to
/// go on, little enough to be hardly felt.
pub const TURNS: u32 = 8;

/// Pieces of one way in flight, however small: more do not make a drive faster.
pub const INFLIGHT_COUNT_MAX: usize = 256;

/// Of a session among its job's.
const WEIGHT_EACH: u32 = 1;

/// Users take turns by their shares, and so do a user's jobs; a job's sessions by equal ones. Of a job, what is wanted goes before what
/// is moved ahead; of a session, what came first. Who waits for nothing is known nowhere here, but for a user, a job or a
/// session that owes something to others who wait.
#[derive(Debug)]
pub(super) struct Direction {
    inflight_bytes: u64,
    inflight_count: usize,
    /// Operations that wait.
    waiting_count: usize,
    lines: BTreeMap<Line, Places>,
    /// Of each operation that waits, its number: in the order in which they came, to where they wait.
    numbers: HashMap<usize, u64>,
    numbered: u64,
    users: Fair<User>,
    /// Of each user that waits, by what its jobs take turns.
    jobs: BTreeMap<User, Fair<Job>>,
    /// Of each job that waits, its sessions: what is wanted and what is moved ahead are counted apart, so that nobody whom the
    /// wanted of others pass saves up turns among these.
    sessions: BTreeMap<Job, [Fair<Line>; 2]>,
    /// Wanted pieces in a row that went before others of their job.
    passed: BTreeMap<Job, u32>,
    interference: Neighbours,
}

/// What a session waits for: wanted, ahead. By their numbers, so that one leaves from among thousands at once.
#[derive(Debug, Default)]
struct Places([BTreeMap<u64, usize>; 2]);

impl Places {
    fn of(&mut self, urgency: Priority) -> &mut BTreeMap<u64, usize> {
        &mut self.0[class(urgency)]
    }

    fn front(&self, urgency: Priority) -> Option<usize> {
        let first = self.0[class(urgency)].first_key_value();
        first.map(|(_, place)| *place)
    }

    fn count(&self) -> usize {
        self.0.iter().map(BTreeMap::len).sum()
    }
}

fn class(urgency: Priority) -> usize {
    match urgency {
        Priority::Demand => 0,
        Priority::Prefetch => 1,
    }
}

/// Whose piece is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) place: usize,
    pub(super) urgency: Priority,
    line: Line,
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
            interference: Neighbours::new(window_bytes, bytes_per_s),
        }
    }

    pub(super) fn set_limits(&mut self, window_bytes: u64, bytes_per_s: u64) {
        self.interference.set_limits(window_bytes, bytes_per_s);
    }

    /// An operation of `bytes` comes.
    pub(super) fn push(&mut self, place: usize, urgency: Priority, owner: Owner, bytes: u32) {
        let ((job, _), weights) = owner.line(urgency == Priority::Prefetch);
        self.interference.asks(job, weights, bytes);
        self.wait(place, urgency, owner);
    }

    /// What the operation still had to hand over is given up.
    pub(super) fn discard_unreadable(
        &mut self,
        place: usize,
        urgency: Priority,
        owner: Owner,
        bytes: u32,
    ) {
        let (line, _) = owner.line(urgency == Priority::Prefetch);
        self.interference.gave_up(line.0, bytes);
        self.leave(place, urgency, line);
    }

    /// It waits among others of another urgency from now on, behind them.
    pub(super) fn urge(&mut self, place: usize, urgency: Priority, owner: Owner) {
        let before = match urgency {
            Priority::Demand => Priority::Prefetch,
            Priority::Prefetch => Priority::Demand,
        };
        let (line, _) = owner.line(before == Priority::Prefetch);
        self.leave(place, before, line);
        self.wait(place, urgency, owner);
    }

    fn wait(&mut self, place: usize, urgency: Priority, owner: Owner) {
        let (line, weights) = owner.line(urgency == Priority::Prefetch);
        let (job, _) = line;
        let (user, _) = job;
        let weight = match user {
            // It follows from those beside it at each piece, and not from what comes.
            User::Background => self.users.weight(user),
            _ => None,
        };
        self.users.came(user, weight.unwrap_or(weights.user));
        self.jobs.entry(user).or_default().came(job, weights.job);
        self.sessions.entry(job).or_default()[class(urgency)].came(line, WEIGHT_EACH);
        let number = self.numbered;
        self.numbered += 1;
        self.numbers.insert(place, number);
        (self.lines.entry(line).or_default().of(urgency)).insert(number, place);
        self.waiting_count += 1;
    }

    fn leave(&mut self, place: usize, urgency: Priority, line: Line) {
        let Some(number) = self.numbers.remove(&place) else {
            return;
        };
        let places = self.lines.get_mut(&line).expect("it waits");
        let left = places.of(urgency).remove(&number);
        assert_eq!(left, Some(place), "it waited there");
        self.went(urgency, line);
    }

    /// One operation of `line` waits no more. Who waits for nothing is not kept.
    fn went(&mut self, urgency: Priority, line: Line) {
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
        sessions[class(urgency)].went(line);
        if !sessions.iter().any(Fair::waits) {
            self.sessions.remove(&job);
            self.passed.remove(&job);
        }
        if self.lines[&line].count() == 0 {
            self.lines.remove(&line);
        }
    }

    /// Whose piece is next.
    pub(super) fn next(&self) -> Option<Next> {
        let job = self.jobs[&self.users.next()?].next()?;
        let passed = self.passed.get(&job).copied().unwrap_or(0);
        let first = match passed + 1 >= TURNS {
            true => [Priority::Prefetch, Priority::Demand],
            false => [Priority::Demand, Priority::Prefetch],
        };
        first.into_iter().find_map(|urgency| {
            let line = self.sessions[&job][class(urgency)].next()?;
            let place = self.lines[&line].front(urgency)?;
            Some(Next {
                place,
                urgency,
                line,
            })
        })
    }

    /// How long a piece of an operation may be whose first one is `next`.
    pub(super) fn piece_bytes_max(&self, next: Next) -> u32 {
        self.interference.piece_bytes_max(next.line.0)
    }

    /// Whether the piece of `next`, of so many bytes, may be handed over. One always may.
    pub(super) fn has_room(&self, next: Next, bytes: u32) -> bool {
        self.inflight_count == 0
            || self.inflight_count < INFLIGHT_COUNT_MAX
                && (self.interference).has_room(next.line.0, self.inflight_bytes, bytes)
    }

    /// A piece of `next` is handed over; it was the `last` one of its operation, or not.
    pub(super) fn hand_over(&mut self, next: Next, piece: IoId, bytes: u32, last: bool) {
        let Next { urgency, line, .. } = next;
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
        sessions[class(urgency)].took(line, bytes);
        match urgency {
            Priority::Demand if sessions[class(Priority::Prefetch)].waits() => {
                *self.passed.entry(job).or_default() += 1
            }
            _ => drop(self.passed.remove(&job)),
        }
        if last {
            let places = self.lines.get_mut(&line).expect("it waits");
            let gone = places.of(urgency).pop_first();
            assert_eq!(gone.map(|(_, place)| place), Some(next.place));
            self.numbers.remove(&next.place);
            self.went(urgency, line);
        }
    }

    /// Of tiles that move: an eighth of what the least of those has who wait beside them.
    fn background_weight(&self) -> u32 {
        let users = |user| matches!(user, User::Uid(_));
        let least = self.users.least_weight(users);
        least.map_or(BACKGROUND_WEIGHT, |least| least / TURNS)
    }

    /// A piece has ended; if well, after so long.
    pub(super) fn take_back(
        &mut self,
        owner: Owner,
        urgency: Priority,
        piece: IoId,
        bytes: u32,
        took_ns: Option<u64>,
    ) {
        let ((job, _), _) = owner.line(urgency == Priority::Prefetch);
        self.inflight_bytes -= u64::from(bytes);
        self.inflight_count -= 1;
        self.interference.ended(job, piece, bytes, took_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::SessionId;

    /// Session `number` of a job of its own, of user `number` unless said otherwise.
    fn session(number: u64) -> Owner {
        Owner::Session {
            uid: number as u32,
            user_share: 100,
            job_share: 100,
            job: number,
            session: SessionId(number),
        }
    }

    /// The order in which operations of (owner, pieces) that all wait are handed over, piece by piece.
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
            user_share: 100,
            job_share: 100,
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
        direction.discard_unreadable(0, Priority::Prefetch, one, 1);
        assert_eq!(direction.next().map(|next| next.place), Some(1));
        direction.discard_unreadable(1, Priority::Prefetch, two, 1);
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
