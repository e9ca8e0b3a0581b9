//! Errors of templates.

use std::fmt;

/// Why a template cannot be read or rendered.
#[derive(Debug)]
pub struct Error {
    message: String,
    /// Line of the template, from 1.
    line: Option<usize>,
    /// Whether the template itself raised it.
    raised: bool,
}

impl Error {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            line: None,
            raised: false,
        }
    }

    /// An error that the template raises with `raise_exception`.
    pub(crate) fn raised(message: impl Into<String>) -> Self {
        Self {
            raised: true,
            ..Self::new(message)
        }
    }

    /// Adds the line, unless an inner statement has done so.
    pub(crate) fn at(mut self, line: usize) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) if !self.raised => write!(f, "{} (line {line})", self.message),
            _ => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}
