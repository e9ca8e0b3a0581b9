//! The limit of a file's length (`ulimit -f`, `LimitFSIZE=`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;

/// Makes a write beyond the limit fail with EFBIG, which a program can report. Without this, SIGXFSZ ends the process without a word. Every
/// program calls it first; processes that it starts have the default again.
///
/// # Errors
/// The handler cannot be installed.
pub fn fail_writes_beyond() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}
