//! How long a starting daemon waits for a device that returns errors. A drive that is reset, or a path that switches, recovers within seconds, while
//! a daemon that gives up writes nothing until somebody restarts it.

use std::time::Duration;

pub use offload_support::retry::retry;

/// Pauses between attempts: longer in all than a reset takes, much shorter than a service manager's time limit.
pub const WAITS: [Duration; 3] = [
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(3),
];
