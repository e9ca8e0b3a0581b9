//! Staying awake for what comes in a moment.
//!
//! To sleep and be woken costs a side 3 us on one processor and 12 across two, more where a processor has to come out of a
//! deep sleep: as long as the bytes of a small tile take. A lone operation pays that at each of its steps, and nothing else is
//! done meanwhile. So whoever waits for one looks on for a while first.
//!
//! Promises: never longer than [`AWAKE_MAX`], and only where it has paid before: a look that ended without what it waited
//! for, or during which the kernel gave the processor to somebody else, is followed by ever more sleeps without one. What
//! waits for nothing, or for slow devices, sleeps as if this were not here.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// A megabyte takes 100 us out of memory and 250 from a fast drive; of what takes longer a wake-up is a small part.
pub const AWAKE_MAX: Duration = Duration::from_micros(250);

/// Without the processor for longer than this: somebody needed it who does not work for us. Whoever is waited for may run
/// here meanwhile, and takes less.
const TAKEN_MAX: Duration = Duration::from_micros(500);

/// After so many misses in a row 2^n - 1 waits go by without a look: what never pays costs a thousandth.
const LEVEL_MAX: u32 = 10;

/// Hits in a row that make up for one miss.
const HITS_A_LEVEL: u32 = 16;

/// Whether looks have paid. One for each thing that is waited for.
#[derive(Debug)]
pub struct AdaptiveSpin {
    /// Where there is one processor, who is waited for could not run meanwhile.
    possible: bool,
    spin_policy: SpinPolicy,
}

impl AdaptiveSpin {
    /// Looks at first.
    pub fn new() -> Self {
        Self {
            possible: std::thread::available_parallelism().is_ok_and(|count| count.get() > 1),
            spin_policy: SpinPolicy::default(),
        }
    }

    /// Calls `came` until it says yes, at most for `limit`; not even once where it would not pay. Whether it said yes.
    ///
    /// # Errors
    /// Those of `came`.
    pub fn watch<E>(
        &mut self,
        limit: Duration,
        came: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        if !self.possible || !self.spin_policy.should_spin() {
            return Ok(false);
        }
        let (begin, used) = (Instant::now(), processor_time());
        let hit = look(limit, || begin.elapsed(), came)?;
        let used = processor_time().saturating_sub(used);
        let taken = begin.elapsed().saturating_sub(used) > TAKEN_MAX;
        self.spin_policy.ended(hit && !taken);
        Ok(hit)
    }
}

impl Default for AdaptiveSpin {
    fn default() -> Self {
        Self::new()
    }
}

/// At least once, until `limit` or [`AWAKE_MAX`] since the begin.
fn look<E>(
    limit: Duration,
    since_begin: impl Fn() -> Duration,
    mut came: impl FnMut() -> Result<bool, E>,
) -> Result<bool, E> {
    let limit = limit.min(AWAKE_MAX);
    loop {
        if came()? {
            return Ok(true);
        }
        if since_begin() >= limit {
            return Ok(false);
        }
        // The kernel may have put whoever is waited for behind us, on the same processor.
        std::thread::yield_now();
    }
}

/// Of this thread.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// When to look, by what came of the looks before.
#[derive(Debug, Default)]
struct SpinPolicy {
    level: u32,
    hits: u32,
    /// Waits that go by without a look.
    resting: u32,
}

impl SpinPolicy {
    fn should_spin(&mut self) -> bool {
        let should_spin = self.resting == 0;
        self.resting = self.resting.saturating_sub(1);
        should_spin
    }

    fn ended(&mut self, hit: bool) {
        if !hit {
            self.level = (self.level + 1).min(LEVEL_MAX);
            self.resting = (1 << self.level) - 1;
            self.hits = 0;
            return;
        }
        self.hits += 1;
        if self.hits == HITS_A_LEVEL {
            self.hits = 0;
            self.level = self.level.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Looks within 10,000 waits of which each `hit(nth look)` is what came of it.
    fn looks(mut hit: impl FnMut(u32) -> bool) -> u32 {
        let mut spin_policy = SpinPolicy::default();
        let mut count = 0;
        for _ in 0..10_000 {
            if spin_policy.should_spin() {
                spin_policy.ended(hit(count));
                count += 1;
            }
        }
        count
    }

    #[test]
    fn what_never_pays_is_hardly_tried_and_what_pays_always_is() {
        assert_eq!(looks(|_| true), 10_000);
        let never = looks(|_| false);
        assert!((10..30).contains(&never), "{never} looks");
        // Two of three are not enough: the third holds up whoever needs the processor.
        let often = looks(|nth| nth % 3 != 0);
        assert!(often < 100, "{often} looks");
        // One in a thousand is chance.
        let nearly = looks(|nth| nth % 1000 != 999);
        assert!(nearly > 9_900, "{nearly} looks");
    }

    #[test]
    fn what_begins_to_pay_is_found_out() {
        let mut spin_policy = SpinPolicy::default();
        for _ in 0..LEVEL_MAX {
            while !spin_policy.should_spin() {}
            spin_policy.ended(false);
        }
        let waits = (0..2 * (1 << LEVEL_MAX)).take_while(|_| !spin_policy.should_spin());
        assert_eq!(waits.count(), (1 << LEVEL_MAX) - 1);
        for _ in 0..HITS_A_LEVEL * LEVEL_MAX {
            spin_policy.ended(true);
            assert!(spin_policy.should_spin());
        }
        spin_policy.ended(false);
        assert_eq!(spin_policy.resting, 1);
    }

    /// What came of looks for `limit` of which the nth sees it and each takes 10 us, and how many there were.
    fn looked(limit: Duration, nth: u64) -> (Result<bool, ()>, u64) {
        let looks = Cell::new(0);
        let came = look(
            limit,
            || Duration::from_micros(10) * looks.get() as u32,
            || {
                looks.set(looks.get() + 1);
                Ok(looks.get() == nth)
            },
        );
        (came, looks.get())
    }

    #[test]
    fn looks_go_on_until_it_came_or_the_limit() {
        let long = Duration::from_secs(3600);
        assert_eq!(looked(long, 3), (Ok(true), 3));
        assert_eq!(looked(long, 25), (Ok(true), 25));
        assert_eq!(looked(long, 26), (Ok(false), 25));
        assert_eq!(looked(Duration::from_micros(50), 26), (Ok(false), 5));
        assert_eq!(looked(Duration::ZERO, 1), (Ok(true), 1));
        assert_eq!(look(long, || Duration::ZERO, || Err(())), Err(()));
    }

    #[test]
    fn a_watch_follows_its_habit() {
        let mut adaptive_spin = AdaptiveSpin {
            possible: true,
            spin_policy: SpinPolicy::default(),
        };
        let long = Duration::from_secs(3600);
        assert_eq!(adaptive_spin.watch(long, || Ok::<_, ()>(false)), Ok(false));
        assert_eq!(adaptive_spin.spin_policy.level, 1);
        // The next one rests.
        assert_eq!(adaptive_spin.watch(long, || Err(())), Ok(false));
        assert_eq!(adaptive_spin.watch(long, || Ok::<_, ()>(true)), Ok(true));
        assert_eq!(adaptive_spin.watch(long, || Err(())), Err(()));
        adaptive_spin.possible = false;
        assert_eq!(adaptive_spin.watch(long, || Err(())), Ok(false));
    }
}
