//! What this program says. `println!` panics when nobody reads any more (`bench-io run | head -1`), and then what is done is not
//! ended in order: a reader that has gone is no failure. A report that a full disk does not take is one.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// All of a report, in the form that was asked for.
///
/// # Errors
/// As of [`out`].
pub(crate) fn report<R: fmt::Display + Serialize>(report: &R, json: bool) -> Result<()> {
    match json {
        true => line(format_args!("{}", serde_json::to_string(report)?)),
        false => out(format_args!("{report}")),
    }
}

/// A line of a result.
///
/// # Errors
/// As of [`out`].
pub(crate) fn line(words: fmt::Arguments) -> Result<()> {
    out(format_args!("{words}\n"))
}

/// A result, ends of lines included.
///
/// # Errors
/// It cannot be written where somebody would read it.
fn out(words: fmt::Arguments) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_fmt(words).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("writing to standard output"),
    }
}

/// Beside the result, to whoever looks on.
pub(crate) fn note(words: fmt::Arguments) {
    // Where it cannot be said, nobody is told.
    let _ = writeln!(io::stderr(), "bench-io: {words}");
}
