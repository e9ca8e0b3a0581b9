//! Sizes, rates and switches as fio's users write them: `4m`, `4MiB`, `6.2G`, `620MB/s`, `direct=1`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes. `k`, `m`, `g`, `t` are powers of 1024, as in fio; `KiB`, `MiB`, ... too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "u64")]
pub(crate) struct Bytes(pub(crate) u64);

/// Bytes a second. `K`, `M`, `G` are powers of 1000, as drives are sold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "u64")]
pub(crate) struct Rate(pub(crate) u64);

/// On or off: `1`, `0`, `true`, `false`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "bool")]
pub(crate) struct Switch(pub(crate) bool);

/// What a TOML value of ours may be.
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

/// A positive number and what follows it, in lower case.
fn split(text: &str) -> Result<(f64, String), String> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let number: f64 = text[..end]
        .parse()
        .map_err(|_| format!("`{text}` does not begin with a number"))?;
    Ok((number, text[end..].trim().to_ascii_lowercase()))
}

fn power(unit: &str) -> Option<i32> {
    Some(match unit {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return None,
    })
}

fn whole(value: f64, text: &str) -> Result<u64, String> {
    // 2^53: beyond it a double skips whole numbers, and no drive is as large.
    if !(1.0..9.0e15).contains(&value) {
        return Err(format!("`{text}` is not between 1 byte and 8 PiB"));
    }
    Ok(value.round() as u64)
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text)?;
        let short = unit.strip_suffix("ib").unwrap_or(&unit);
        let power = power(short)
            .ok_or_else(|| format!("`{text}`: the unit is none of k, m, g, t, KiB, MiB, GiB"))?;
        whole(number * 1024_f64.powi(power), text).map(Self)
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split(text)?;
        let short = unit.strip_suffix("/s").unwrap_or(&unit);
        let short = short.strip_suffix('b').unwrap_or(short);
        let power = power(short)
            .ok_or_else(|| format!("`{text}`: the unit is none of K, M, G, MB/s, GB/s"))?;
        whole(number * 1000_f64.powi(power), text).map(Self)
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "1" | "true" => Ok(Self(true)),
            "0" | "false" => Ok(Self(false)),
            other => Err(format!("`{other}` is none of 1, 0, true, false")),
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

/// `4 MiB`, as people read it; other numbers as they are.
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

/// In GB/s, or MB/s where that says more.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", SpeedText(self.0 as f64))
    }
}

/// A measured speed for people: three figures that mean something.
pub(crate) struct SpeedText(pub(crate) f64);

impl fmt::Display for SpeedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1e9 {
            write!(f, "{:.1} MB/s", self.0 / 1e6)
        } else {
            write!(f, "{:.2} GB/s", self.0 / 1e9)
        }
    }
}

/// A time for people.
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
    fn fio_and_drive_makers_count_differently_and_both_are_understood() {
        let bytes = |text: &str| text.parse::<Bytes>().map(|b| b.0);
        assert_eq!(bytes("4m"), Ok(4 << 20));
        assert_eq!(bytes("4MiB"), Ok(4 << 20));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("1.5g"), Ok(3 << 29));
        let rate = |text: &str| text.parse::<Rate>().map(|r| r.0);
        assert_eq!(rate("6.2G"), Ok(6_200_000_000));
        assert_eq!(rate("620MB/s"), Ok(620_000_000));
        for wrong in ["", "m", "-1", "4MB", "1e9", "0", "9999999t", "4 m b"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "6GiB", "fast", "0"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
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
