//! Output for people and for the programs behind a pipe.
//!
//! `println!` panics when the reader closes the pipe (`trainer train RUN.toml | head`), in the middle of a step. Here a
//! closed reader or terminal is not an error. Any other failure, such as a full disk, is kept for [`finish`], which a program calls
//! once at its end.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first error of stdout, except a closed reader.
static FAILED: OnceLock<String> = OnceLock::new();
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Writes a line to stdout, like `println!`, without panicking.
#[macro_export]
macro_rules! outln {
    ($($words:tt)*) => { $crate::console::out(format_args!("{}\n", format_args!($($words)*))) };
}

/// Writes a line to stderr, like `eprintln!`, without panicking.
#[macro_export]
macro_rules! errln {
    ($($words:tt)*) => { $crate::console::err(format_args!($($words)*)) };
}

/// Part of the output could not be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("writing to standard output: {0}; the output is incomplete")]
pub struct OutputLost(String);

/// Writes `text` to stdout.
pub fn out(text: fmt::Arguments) {
    note(io::stdout().lock().write_fmt(text));
}

/// Writes `text` and a line end to stderr. A failure is ignored: there is nowhere left to report it. A single write keeps the
/// lines of several ranks apart.
pub fn err(text: fmt::Arguments) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Whether the reader of stdout has closed it, so that a program which only prints can end.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Flushes stdout and reports the first failure since the program started.
///
/// # Errors
/// Output was lost for another reason than a closed reader.
pub fn finish() -> Result<(), OutputLost> {
    note(io::stdout().flush());
    FAILED
        .get()
        .map_or(Ok(()), |why| Err(OutputLost(why.clone())))
}

/// Whether output to `stream` may be coloured: it is a terminal, and `NO_COLOR` is not set.
pub fn in_colour(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !refused
}

/// Columns of the terminal that `stream` is; `None` if it is none.
pub fn terminal_columns(stream: &impl std::os::fd::AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Whether stdout is a terminal that was closed.
fn is_hang_up(error: &io::Error) -> bool {
    // A closed terminal is still a character device, but no longer answers as a terminal.
    let is_device = || {
        let stat = rustix::fs::fstat(io::stdout()).map(|stat| stat.st_mode);
        stat.is_ok_and(|mode| rustix::fs::FileType::from_raw_mode(mode).is_char_device())
    };
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) && is_device()
}

fn note(result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe || is_hang_up(&error) => {
            CLOSED.store(true, Ordering::Relaxed);
        }
        Err(error) => {
            let _ = FAILED.set(error.to_string());
        }
    }
}
