//! What is said to people. `println!` panics when nobody reads any more (`trainer train RUN.toml | head`), in the middle of a step:
//! here a reader that has gone is no failure, and a result that a full disk does not take is one at the end.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

/// The first error of stdout.
static LOST: OnceLock<String> = OnceLock::new();

/// As `println!`, but it neither panics nor ends anything.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { $crate::console::out(format_args!("{}\n", format_args!($($words)*))) };
}

/// As `eprintln!`, in the same way.
#[macro_export]
macro_rules! say_beside {
    ($($words:tt)*) => { $crate::console::beside(format_args!($($words)*)) };
}

/// On stdout, ends of lines included.
pub fn out(words: fmt::Arguments) {
    if let Err(error) = io::stdout().lock().write_fmt(words)
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = LOST.set(error.to_string());
    }
}

/// A line on stderr. Where it cannot be said, nobody is told.
pub fn beside(words: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{words}");
}

/// Whether what is written to `stream` may have colours: a terminal, and no `NO_COLOR` that asks for none.
pub fn in_colour(stream: &impl IsTerminal) -> bool {
    let none_wanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !none_wanted
}

/// A part of the result could not be written where somebody would read it.
#[derive(Debug, thiserror::Error)]
#[error("writing to standard output: {0}; not all that was said is there")]
pub struct Unsaid(String);

/// At the end: whether all was said that somebody reads.
///
/// # Errors
/// It was not.
pub fn all() -> Result<(), Unsaid> {
    if let Err(error) = io::stdout().flush()
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = LOST.set(error.to_string());
    }
    LOST.get().map_or(Ok(()), |why| Err(Unsaid(why.clone())))
}
