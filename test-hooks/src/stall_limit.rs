//! Shortens the time in which tiles may not move before a trainer gives up, for tests: `OFFLOADD_STALL_LIMIT_MS=3000` instead of
//! minutes.

use std::time::Duration;

/// Returns the limit a test asked for. Panics on a value that cannot be parsed, so that no test runs without its limit.
#[cfg(feature = "active")]
pub fn stall_limit() -> Option<Duration> {
    let text = std::env::var("OFFLOADD_STALL_LIMIT_MS").ok()?;
    let limit_ms = text.parse();
    Some(Duration::from_millis(limit_ms.unwrap_or_else(|_| {
        panic!("OFFLOADD_STALL_LIMIT_MS={text}: it is a number of milliseconds")
    })))
}

/// Returns the limit a test asked for: none, in this build.
#[cfg(not(feature = "active"))]
pub const fn stall_limit() -> Option<Duration> {
    None
}
