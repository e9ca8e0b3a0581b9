//! Signals that a program was started to ignore, and one that it must survive.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGXFSZ;

/// Whether the program that started this one made it ignore `signal`, as nohup does with SIGHUP.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Makes a write beyond the limit of a file's size (`ulimit -f`) fail with EFBIG, which the program reports. Otherwise SIGXFSZ
/// would end it without a word. A program that this one starts begins with the usual action again.
pub fn survive_file_size_limit() {
    // A handler that cannot be installed leaves the usual action.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}
