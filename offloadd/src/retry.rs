//! What a start does to devices, tried again: a drive that is reset or a path that switches answers errors for some seconds,
//! and a daemon that cannot write at its start writes nothing until somebody starts it once more.

use std::time::Duration;

/// Before each further try: over in some seconds, which a reset takes, long before a service manager loses patience.
pub const WAITS: [Duration; 3] = [
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// `attempt` until it succeeds, and once more than there are `waits`, each told in the log. What it begins anew must be whole.
///
/// # Errors
/// Of the last attempt.
pub fn patiently<T, E: std::fmt::Display>(
    waits: &[Duration],
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for wait in waits {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) => {
                tracing::warn!("{error}: tried again in {} ms", wait.as_millis());
                std::thread::sleep(*wait);
            }
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_tried_once_more_than_it_is_waited_and_not_after_it_went_well() {
        let tries = |good_at: u32| {
            let mut count = 0;
            let result = patiently(&[Duration::ZERO; 3], || {
                count += 1;
                if count == good_at {
                    Ok(count)
                } else {
                    Err(format!("try {count}"))
                }
            });
            (result, count)
        };
        assert_eq!(tries(1), (Ok(1), 1));
        assert_eq!(tries(4), (Ok(4), 4));
        assert_eq!(tries(9), (Err("try 4".to_owned()), 4));
    }
}
