//! A bounded number of attempts, with a pause before each new one.

use std::time::Duration;

/// Runs `attempt` until it succeeds: once, and again after each of `waits`. Logs every failure that is retried.
///
/// # Errors
/// The error of the last attempt.
pub fn retry<T, E: std::fmt::Display>(
    waits: impl IntoIterator<Item = Duration>,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for wait in waits {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) => {
                tracing::warn!("{error}; retrying in {} ms", wait.as_millis());
                std::thread::sleep(wait);
            }
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_end_with_the_first_success_or_after_the_last_wait() {
        let attempts = |good_at: u32| {
            let mut count = 0;
            let result = retry([Duration::ZERO; 3], || {
                count += 1;
                if count == good_at {
                    Ok(count)
                } else {
                    Err(count)
                }
            });
            (result, count)
        };
        assert_eq!(attempts(1), (Ok(1), 1));
        assert_eq!(attempts(4), (Ok(4), 4));
        assert_eq!(attempts(9), (Err(4), 4));
    }
}
