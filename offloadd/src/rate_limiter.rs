//! Limits the rate at which tiles are copied to other devices, in bytes a second. A core: the caller passes the time.
//!
//! The copied bytes take their time from the start of the copying. Slow copying saves nothing up: at most one batch is copied
//! at once.

use std::time::{Duration, Instant};

/// The last batch, and when its copying began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RateLimiter {
    last: Option<(Instant, u64)>,
}

impl RateLimiter {
    /// Records `bytes` copied since `began`.
    pub(crate) fn copied(&mut self, began: Instant, bytes: u64) {
        self.last = Some((began, bytes));
    }

    /// Returns when more may be copied; `None` for at once. The limit may have changed since.
    pub(crate) fn next(&self, bytes_per_s_max: Option<u64>) -> Option<Instant> {
        let (began, bytes) = self.last?;
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s_max?.max(1));
        // At most 584 years, which the clock can express.
        began.checked_add(Duration::from_nanos(ns.try_into().unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_copied_is_paid_for_from_its_beginning_on() {
        let mut rate_limiter = RateLimiter::default();
        assert_eq!(rate_limiter.next(Some(1 << 20)), None, "nothing was copied");
        let began = Instant::now();
        rate_limiter.copied(began, 3 << 20);
        let after = |seconds| Some(began + Duration::from_secs(seconds));
        assert_eq!(rate_limiter.next(Some(1 << 20)), after(3));
        // The limit is changed in between, or removed.
        assert_eq!(rate_limiter.next(Some(3 << 20)), after(1));
        assert_eq!(rate_limiter.next(Some(1 << 19)), after(6));
        assert_eq!(rate_limiter.next(None), None);
        assert_eq!(rate_limiter.next(Some(u64::MAX)), Some(began));
        // Extreme numbers do not end the daemon.
        rate_limiter.copied(began, u64::MAX);
        assert!(rate_limiter.next(Some(0)).is_none_or(|at| at > began));
    }

    /// Copies as a driver does: however long each batch takes, no stretch of time has more bytes than the limit and one batch allow.
    #[test]
    fn no_pause_saves_anything_up() {
        let (rate, batch) = (100u64, 50u64);
        let mut rate_limiter = RateLimiter::default();
        let start = Instant::now();
        let mut now = start;
        let mut begun = Vec::new();
        for took_ms in [10, 400, 9000, 10, 0, 20_000, 10, 10, 10, 700, 10] {
            now = rate_limiter.next(Some(rate)).map_or(now, |at| at.max(now));
            begun.push(now);
            rate_limiter.copied(now, batch);
            now += Duration::from_millis(took_ms);
        }
        for (index, from) in begun.iter().enumerate() {
            for (count, to) in begun[index..].iter().enumerate() {
                let stretch = to.duration_since(*from).as_secs_f64();
                let copied = (count as u64 * batch) as f64;
                assert!(copied <= rate as f64 * stretch + 1e-6, "{begun:?}");
            }
        }
        // The limiter never idles: short batches follow each other as fast as the limit allows.
        assert_eq!(
            begun[1].duration_since(begun[0]),
            Duration::from_millis(500)
        );
    }
}
