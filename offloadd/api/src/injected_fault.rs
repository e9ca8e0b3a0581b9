//! One operation of a real daemon goes wrong, counted from its start: for tests that try every one of them.
//!
//! `OFFLOADD_FAULT=kill@17` ends the process with SIGKILL instead of its 17th operation on a device; `EIO@17` answers an
//! errno in its place (any of the names below), `short@17` half of what was asked; `EIO@17+` that one and all later ones.
//! `cut@17` is a power cut: of what devices were given and not told to flush, any sectors are lost, and the process ends.
//!
//! Only with the feature `safeguard`, which only test builds have.

/// What happens instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    /// The process is killed.
    Kill,
    /// The power goes.
    Cut,
    /// The device answers this.
    Errno(i32),
    /// The device moves half.
    Short,
}

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    /// Instead of the operation.
    pub instead: Instead,
    /// Which, from 0 on.
    pub at: u64,
    /// All later ones too.
    pub for_good: bool,
}

impl InjectedFault {
    /// From its words.
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

    /// What happens instead of operation `number`.
    pub fn of(&self, number: u64) -> Option<Instead> {
        let met = self.at == number || self.for_good && self.at < number;
        met.then_some(self.instead)
    }
}

/// What a test asked for. Panics when it makes no sense: a test that believes in a mishap must not run without one.
#[cfg(feature = "safeguard")]
pub fn injected_fault() -> Option<InjectedFault> {
    let text = std::env::var("OFFLOADD_FAULT").ok()?;
    let injected_fault = InjectedFault::parse(&text);
    Some(
        injected_fault
            .unwrap_or_else(|| panic!("OFFLOADD_FAULT={text}: it is WHAT@NUMBER or WHAT@NUMBER+")),
    )
}

/// What a test asked for: nothing, in this build.
#[cfg(not(feature = "safeguard"))]
pub const fn injected_fault() -> Option<InjectedFault> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_what_they_say() {
        let once = InjectedFault::parse("EIO@3").unwrap();
        assert_eq!(once.of(3), Some(Instead::Errno(5)));
        assert_eq!((once.of(2), once.of(4)), (None, None));
        let for_good = InjectedFault::parse("short@3+").unwrap();
        assert_eq!(
            (for_good.of(2), for_good.of(9)),
            (None, Some(Instead::Short))
        );
        for nonsense in ["", "EIO", "EIO@", "EIO@x", "EDOM@1", "kill@-1"] {
            assert_eq!(InjectedFault::parse(nonsense), None, "{nonsense}");
        }
    }
}
