//! Sizes, rates and switches of options and job files, at least 1 and at most what a measurement can mean.

use std::fmt;
use std::str::FromStr;

use offload_support::units::{ApproxRate, parse_bytes, parse_rate};
use serde::{Deserialize, Serialize};

/// A size in bytes, 1 to 8 PiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "u64")]
pub(crate) struct Bytes(pub(crate) u64);

/// A rate in bytes a second, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "u64")]
pub(crate) struct Rate(pub(crate) u64);

/// On or off: `1`, `0`, `true`, `false`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "bool")]
pub(crate) struct Switch(pub(crate) bool);

/// A TOML value: `4194304`, `"4m"` or `true`.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Flag(bool),
    Number(u64),
    Text(String),
}

impl NumberOrText {
    fn text(self) -> String {
        match self {
            Self::Flag(flag) => flag.to_string(),
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text,
        }
    }
}

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

macro_rules! from_toml {
    ($($name:ident),*) => {$(
        impl TryFrom<NumberOrText> for $name {
            type Error = String;

            fn try_from(value: NumberOrText) -> Result<Self, String> {
                value.text().parse()
            }
        }
    )*};
}
from_toml!(Bytes, Rate, Switch);

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl From<Rate> for u64 {
    fn from(rate: Rate) -> Self {
        rate.0
    }
}

impl From<Switch> for bool {
    fn from(switch: Switch) -> Self {
        switch.0
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
    fn in_a_file_numbers_and_words_are_the_same() {
        #[derive(Deserialize)]
        struct File {
            bs: Bytes,
            direct: Switch,
        }
        for text in ["bs = \"1m\"\ndirect = 1", "bs = 1048576\ndirect = true"] {
            let file: File = toml::from_str(text).unwrap();
            assert_eq!((file.bs, file.direct), (Bytes(1 << 20), Switch(true)));
        }
        assert!(toml::from_str::<File>("bs = -1\ndirect = 1").is_err());
        assert!(toml::from_str::<File>("bs = 1\ndirect = 2").is_err());
    }
}
