//! Sizes, rates and switches of options and job files, at least 1 and at most what a measurement can mean.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use offload_support::units::{ApproxRate, parse_bytes, parse_rate};
use serde::Serialize;

/// A size in bytes, 1 to 8 PiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Bytes(pub(crate) u64);

/// A rate in bytes a second, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Rate(pub(crate) u64);

/// A time of at most a day: `5`, `30s`, `500ms`, `2m`; a number alone is seconds, as in fio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seconds(pub(crate) Duration);

/// On or off: `1`, `0`, `true`, `false`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Switch(pub(crate) bool);

/// Most bytes, or bytes a second, of a measurement: beyond 2^53 a double skips whole numbers.
const MAX: u64 = 1 << 53;

fn checked(text: &str, value: u64) -> Result<u64, String> {
    match (1..=MAX).contains(&value) {
        true => Ok(value),
        false => Err(format!("`{text}` is not between 1 byte and 8 PiB")),
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
        checked(text, bytes).map(Self)
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = parse_rate(text).map_err(|error| error.to_string())?;
        checked(text, rate).map(Self)
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        let factor = match &text[number.len()..] {
            "us" => 1e-6,
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => f64::NAN,
        };
        let seconds = number
            .trim()
            .parse()
            .map_or(f64::NAN, |number: f64| number * factor);
        match (0.0..=86_400.0).contains(&seconds) {
            true => Ok(Self(Duration::from_secs_f64(seconds))),
            false => Err(format!(
                "`{text}`: expected a time of at most a day, such as 5, 30s, 500ms or 2m"
            )),
        }
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "1" | "true" => Ok(Self(true)),
            "0" | "false" => Ok(Self(false)),
            other => Err(format!("`{other}`: expected 1, 0, true or false")),
        }
    }
}

/// Exact: `4 MiB`, or the number of bytes.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{} {unit}", self.0 >> shift);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ApproxRate(self.0 as f64).fmt(f)
    }
}

/// A latency for people, from nanoseconds.
pub(crate) struct Micros(pub(crate) u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0 as f64 / 1e3;
        if us < 1000.0 {
            write!(f, "{us:.1} us")
        } else {
            write!(f, "{:.2} ms", us / 1e3)
        }
    }
}

/// Decimals with which `value`, of 1 or more, is written in three digits.
pub(crate) fn decimals(value: f64) -> usize {
    match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    }
}

/// Operations a second for people: `873`, `2.08k`, `1.20M`.
pub(crate) struct Iops(pub(crate) f64);

impl fmt::Display for Iops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, factor) = match self.0 {
            rate if rate < 999.5 => (rate, ""),
            rate if rate < 999_500.0 => (rate / 1e3, "k"),
            rate => (rate / 1e6, "M"),
        };
        let decimals = decimals(value);
        write!(f, "{value:.decimals$}{factor}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_and_more_than_any_drive_has_are_refused() {
        assert_eq!("4m".parse(), Ok(Bytes(4 << 20)));
        assert_eq!("6.2GB/s".parse(), Ok(Rate(6_200_000_000)));
        for wrong in ["0", "99999TiB"] {
            assert!(
                wrong
                    .parse::<Bytes>()
                    .unwrap_err()
                    .contains("between 1 byte"),
                "{wrong}"
            );
        }
        assert!("0".parse::<Rate>().is_err());
    }

    #[test]
    fn operations_a_second_have_three_digits_and_k_or_m() {
        for (rate, text) in [
            (0.5, "0.50"),
            (12.34, "12.3"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (2076.0, "2.08k"),
            (999_600.0, "1.00M"),
            (12_345_678.0, "12.3M"),
        ] {
            assert_eq!(Iops(rate).to_string(), text);
        }
    }

    #[test]
    fn times_have_fios_units() {
        for (text, ms) in [
            ("5", 5000),
            ("1.5s", 1500),
            ("500ms", 500),
            ("2m", 120_000),
            ("24h", 86_400_000),
            ("0", 0),
        ] {
            assert_eq!(
                text.parse(),
                Ok(Seconds(Duration::from_millis(ms))),
                "{text}"
            );
        }
        for wrong in ["", "s", "-1", "25h", "1d", "nan", "inf", "5 parsecs"] {
            assert!(wrong.parse::<Seconds>().is_err(), "{wrong}");
        }
    }
}
