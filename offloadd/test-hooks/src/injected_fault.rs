//! Lets one device operation of a real daemon fail, counted from its start, so that tests can try each of them.
//!
//! `OFFLOADD_FAULT=kill@17` kills the process with SIGKILL instead of operation 17; `EIO@17` answers an errno in its place (any
//! of the names below), `short@17` moves half of the bytes; `EIO@17+` also fails all later operations. `cut@17` cuts the power:
//! any sectors that were written and not flushed are lost, and the process is killed.
//!
//! `OFFLOADD_FAULT_FLUSH=PATH` fails flushes of devices with EIO while there is a file at PATH, which the test creates and
//! deletes.

use std::path::PathBuf;

/// Event that replaces an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    /// The process is killed.
    Kill,
    /// The power is cut.
    Cut,
    /// The device answers this errno.
    Errno(i32),
    /// The device moves half of the bytes.
    Short,
}

/// A fault and when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    /// Instead of the operation.
    pub instead: Instead,
    /// Number of the operation, from 0.
    pub at: u64,
    /// Whether it also happens to all later operations.
    pub for_good: bool,
}

impl InjectedFault {
    /// Parses a value of `OFFLOADD_FAULT`.
    pub fn parse(text: &str) -> Option<Self> {
        let (what, at) = text.split_once('@')?;
        let instead = match what {
            "kill" => Instead::Kill,
            "cut" => Instead::Cut,
            "short" => Instead::Short,
            "EIO" => Instead::Errno(5),
            "ENOSPC" => Instead::Errno(28),
            "ETIMEDOUT" => Instead::Errno(110),
            _ => return None,
        };
        let number = at.strip_suffix('+');
        Some(Self {
            instead,
            at: number.unwrap_or(at).parse().ok()?,
            for_good: number.is_some(),
        })
    }

    /// Returns what happens instead of operation `number`.
    pub fn instead_of(&self, number: u64) -> Option<Instead> {
        let met = self.at == number || self.for_good && self.at < number;
        met.then_some(self.instead)
    }
}

/// Returns the fault a test asked for. Panics on a value that cannot be parsed, so that no test runs without its fault.
#[cfg(feature = "active")]
pub fn injected_fault() -> Option<InjectedFault> {
    let text = std::env::var("OFFLOADD_FAULT").ok()?;
    let injected_fault = InjectedFault::parse(&text);
    Some(
        injected_fault
            .unwrap_or_else(|| panic!("OFFLOADD_FAULT={text}: it is WHAT@NUMBER or WHAT@NUMBER+")),
    )
}

/// Returns the fault a test asked for: none, in this build.
#[cfg(not(feature = "active"))]
pub const fn injected_fault() -> Option<InjectedFault> {
    None
}

/// Returns the path of the file whose existence makes flushes fail.
#[cfg(feature = "active")]
pub fn failing_flushes() -> Option<PathBuf> {
    std::env::var_os("OFFLOADD_FAULT_FLUSH").map(PathBuf::from)
}

/// Returns the path of the file whose existence makes flushes fail: none, in this build.
#[cfg(not(feature = "active"))]
pub const fn failing_flushes() -> Option<PathBuf> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_what_they_say() {
        let once = InjectedFault::parse("EIO@3").unwrap();
        assert_eq!(once.instead_of(3), Some(Instead::Errno(5)));
        assert_eq!((once.instead_of(2), once.instead_of(4)), (None, None));
        let for_good = InjectedFault::parse("short@3+").unwrap();
        assert_eq!(
            (for_good.instead_of(2), for_good.instead_of(9)),
            (None, Some(Instead::Short))
        );
        for nonsense in ["", "EIO", "EIO@", "EIO@x", "EDOM@1", "kill@-1"] {
            assert_eq!(InjectedFault::parse(nonsense), None, "{nonsense}");
        }
    }
}
