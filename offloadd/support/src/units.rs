//! One grammar for sizes, rates, counts and times, wherever a person writes them: options, settings, job files.
//!
//! ```text
//!   size   = number [unit]         4096   64GiB   1.5m   5 GB
//!   rate   = number [unit] ["/s"]  6.2GB/s   200MiB/s   1000000    bytes a second
//!   count  = number [factor]       2M   1.5G   7
//!   time   = number ("s" | "min" | "h" | "d")   30min   1.5h   90 s
//!   number = digits ["." digits]   no sign, no exponent
//!   unit   = "B" | KB MB GB TB (powers of 1000) | KiB MiB GiB TiB | k m g t (both powers of 1024)
//!   factor = K M G T (powers of 1000)
//! ```
//!
//! The prefix may be upper or lower case, `B` and `iB` may not: `Gb` usually means gigabits. A lone letter is a size as in
//! fio and refused in a rate, where readers disagree on its meaning. Fractions are exact and rounded to the nearest byte.

use std::fmt;
use std::time::Duration;

/// Why a text is not a size, a rate or a count. The message is complete: it names the text and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The text has no number in front.
    #[error("`{text}` does not begin with a number; expected {expected}")]
    NoNumber {
        /// The whole text.
        text: String,
        /// Expected form.
        expected: &'static str,
    },
    /// The number is followed by something that is no unit.
    #[error("`{text}`: unknown unit `{unit}`; expected {expected}")]
    UnknownUnit {
        /// The whole text.
        text: String,
        /// Everything behind the number.
        unit: String,
        /// Expected form.
        expected: &'static str,
    },
    /// A number alone, where its unit is needed.
    #[error("`{text}` has no unit; expected {expected}")]
    NoUnit {
        /// The whole text.
        text: String,
        /// Expected form.
        expected: &'static str,
    },
    /// The value does not fit 64 bits.
    #[error("`{text}` is more than 2^64")]
    TooLarge {
        /// The whole text.
        text: String,
    },
}

/// Most digits behind the point that are read: more make no difference to a number of bytes below 2^64.
const FRACTION_DIGITS_MAX: usize = 18;

const SIZE: &str = "a size such as 64GiB, 5GB, 1m or 4096 (KiB, MiB, GiB, TiB, k, m, g, t: powers of 1024; KB, MB, GB, TB: powers of 1000)";
const RATE: &str = "a rate such as 200MB/s, 6.2GB/s or 500MiB/s";
const COUNT: &str = "a count such as 2000000, 2M, 1.5G, 7B or 7e9";
const TIME: &str = "a time such as 90s, 30min, 1.5h or 1d";

/// Reads a size in bytes: `64GiB`, `5GB`, `1.5m`, `4096`.
///
/// # Errors
/// See [`UnitError`].
pub fn parse_bytes(text: &str) -> Result<u64, UnitError> {
    parse(text, SIZE, |unit| letter(unit).or_else(|| bytes_unit(unit)))
}

/// Reads a rate in bytes a second: `6.2GB/s`, `200MiB/s`, `1000000`.
///
/// # Errors
/// See [`UnitError`].
pub fn parse_rate(text: &str) -> Result<u64, UnitError> {
    parse(text, RATE, |unit| {
        bytes_unit(unit.strip_suffix("/s").unwrap_or(unit).trim_end())
    })
}

/// Reads a count: `2M`, `1.5G`, `7B`, `7e9`, `7`. B is a billion, as in the names of models.
///
/// # Errors
/// See [`UnitError`].
pub fn parse_count(text: &str) -> Result<u64, UnitError> {
    parse(text, COUNT, |unit| match unit {
        "" => Some(1),
        "B" | "b" => Some(1_000_000_000),
        one => match one.strip_prefix(['e', 'E']) {
            Some(exponent) if !exponent.is_empty() => 10_u64.checked_pow(exponent.parse().ok()?),
            _ => power(one).map(|power| 1000_u64.pow(power)),
        },
    })
}

/// Reads a time: `30min`, `1.5h`, `90s`, `1d`. It is rounded to whole seconds.
///
/// # Errors
/// See [`UnitError`].
pub fn parse_time(text: &str) -> Result<Duration, UnitError> {
    let seconds = parse(text, TIME, |unit| match unit {
        "s" => Some(1),
        "min" => Some(60),
        "h" => Some(3600),
        "d" => Some(86400),
        _ => None,
    });
    seconds.map(Duration::from_secs)
}

fn parse(
    text: &str,
    expected: &'static str,
    factor: impl Fn(&str) -> Option<u64>,
) -> Result<u64, UnitError> {
    let trimmed = text.trim();
    let end = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..end], trimmed[end..].trim_start());
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, fraction),
        None => (number, "0"),
    };
    let is_number = |digits: &str| !digits.is_empty() && !digits.contains('.');
    if !is_number(whole) || !is_number(fraction) {
        return Err(UnitError::NoNumber {
            text: text.into(),
            expected,
        });
    }
    let factor = factor(unit).ok_or_else(|| match unit {
        "" => UnitError::NoUnit {
            text: text.into(),
            expected,
        },
        unit => UnitError::UnknownUnit {
            text: text.into(),
            unit: unit.into(),
            expected,
        },
    })?;
    scaled(whole, fraction, factor).ok_or_else(|| UnitError::TooLarge { text: text.into() })
}

/// `whole.fraction * factor`, rounded to the nearest whole number.
fn scaled(whole: &str, fraction: &str, factor: u64) -> Option<u64> {
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS_MAX)];
    let scale = 10_u128.pow(fraction.len() as u32);
    let fraction: u128 = fraction.parse().ok()?;
    let fraction = (fraction * u128::from(factor) + scale / 2) / scale;
    let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    whole.checked_add(u64::try_from(fraction).ok()?)
}

fn bytes_unit(unit: &str) -> Option<u64> {
    match unit {
        "" | "B" => Some(1),
        unit => match unit.strip_suffix("iB") {
            Some(prefix) => letter(prefix),
            None => power(unit.strip_suffix('B')?).map(|power| 1000_u64.pow(power)),
        },
    }
}

fn letter(unit: &str) -> Option<u64> {
    power(unit).map(|power| 1 << (10 * power))
}

fn power(prefix: &str) -> Option<u32> {
    match prefix {
        "k" | "K" => Some(1),
        "m" | "M" => Some(2),
        "g" | "G" => Some(3),
        "t" | "T" => Some(4),
        _ => None,
    }
}

/// A size for people, to one decimal: `12.3 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApproxBytes(pub u64);

impl fmt::Display for ApproxBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let text = match self.0 {
            0..1024 => format!("{} bytes", self.0),
            1024..0x10_0000 => format!("{:.1} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes / f64::from(1 << 20)),
            0x4000_0000..0x100_0000_0000 => format!("{:.1} GiB", bytes / f64::from(1 << 30)),
            _ => format!("{:.1} TiB", bytes / (1_u64 << 40) as f64),
        };
        // With the width of the format string: tables align sizes.
        f.pad(&text)
    }
}

/// A rate for people: `620.0 MB/s`, `6.20 GB/s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApproxRate(pub f64);

impl fmt::Display for ApproxRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1e9 {
            write!(f, "{:.1} MB/s", self.0 / 1e6)
        } else {
            write!(f, "{:.2} GB/s", self.0 / 1e9)
        }
    }
}

/// A duration for people, the two largest units: `5s`, `1m05s`, `1h02m`, `1d01h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApproxTime(pub Duration);

impl fmt::Display for ApproxTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            s @ 0..60 => write!(f, "{s}s"),
            s @ 60..3600 => write!(f, "{}m{:02}s", s / 60, s % 60),
            s @ 3600..86400 => write!(f, "{}h{:02}m", s / 3600, s / 60 % 60),
            s => write!(f, "{}d{:02}h", s / 86400, s / 3600 % 24),
        }
    }
}

/// A number of things: `1 session`, `3 sessions`, `2 batches`. The noun must form its plural with an s, or es after ch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountOf<N>(pub N, pub &'static str);

impl<N: fmt::Display + PartialEq + From<u8>> fmt::Display for CountOf<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, noun) = self;
        let ending = match *count == N::from(1) {
            true => "",
            false if noun.ends_with("ch") => "es",
            false => "s",
        };
        write!(f, "{count} {noun}{ending}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_read_with_each_kind_of_unit() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096B", 4096),
            ("0", 0),
            ("1m", 1 << 20),
            ("4K", 4096),
            ("64GiB", 64 << 30),
            (" 3 KiB ", 3072),
            ("2TiB", 2 << 40),
            ("1.5g", 3 << 29),
            ("5GB", 5_000_000_000),
            ("1.1KiB", 1126),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn rates_and_counts_are_powers_of_1000_unless_the_unit_says_otherwise() {
        assert_eq!(parse_rate("6.2GB/s"), Ok(6_200_000_000));
        assert_eq!(parse_rate("620MB"), Ok(620_000_000));
        assert_eq!(parse_rate("200 MiB/s"), Ok(200 << 20));
        assert_eq!(parse_rate("1000000"), Ok(1_000_000));
        assert_eq!(parse_count("2M"), Ok(2_000_000));
        assert_eq!(parse_count("1.5G"), Ok(1_500_000_000));
        assert_eq!(parse_count("7"), Ok(7));
        assert_eq!(parse_count("6.7e9"), Ok(6_700_000_000));
        assert_eq!(parse_count("7E+9"), Ok(7_000_000_000));
    }

    #[test]
    fn times_are_read_with_each_unit() {
        for (text, seconds) in [
            ("90s", 90),
            ("30min", 1800),
            (" 1.5 h ", 5400),
            ("1d", 86400),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(
            parse_time("30").unwrap_err().to_string(),
            "`30` has no unit; expected a time such as 90s, 30min, 1.5h or 1d"
        );
        assert!(parse_time("30m").is_err(), "months, minutes or metres");
    }

    #[test]
    fn a_refused_text_is_named_with_what_would_be_right() {
        let refused = |text| parse_bytes(text).unwrap_err().to_string();
        for text in ["", "GiB", "-1GiB", "+1", ".5g", "1.", "1.2.3", "inf", "nan"] {
            assert!(
                refused(text).contains("does not begin with a number"),
                "{text}"
            );
        }
        for text in ["1e9", "4mb", "6.2Gb", "64gib", "1x", "1 m b", "1PiB"] {
            assert!(refused(text).contains("unknown unit"), "{text}");
        }
        assert_eq!(
            parse_rate("6.2G").unwrap_err().to_string(),
            "`6.2G`: unknown unit `G`; expected a rate such as 200MB/s, 6.2GB/s or 500MiB/s"
        );
        for text in ["2MB", "7e-9", "7e", "7e20", "-7e9", "7e9B"] {
            assert!(parse_count(text).is_err(), "{text}");
        }
        assert!(refused("99999999999TiB").contains("more than 2^64"));
        assert!(refused("16777216.5TiB").contains("more than 2^64"));
    }

    #[test]
    fn values_are_shown_with_the_unit_a_person_would_choose() {
        let sizes =
            [5, 2048, 3 << 20, 12 << 30, 3 << 40].map(|bytes| ApproxBytes(bytes).to_string());
        assert_eq!(
            sizes,
            ["5 bytes", "2.0 KiB", "3.0 MiB", "12.0 GiB", "3.0 TiB"]
        );
        assert_eq!(format!("{:>8}|", ApproxBytes(5)), " 5 bytes|");
        assert_eq!(ApproxRate(620e6).to_string(), "620.0 MB/s");
        assert_eq!(ApproxRate(6.2e9).to_string(), "6.20 GB/s");
        let times = [5, 65, 3725, 90_000].map(|s| ApproxTime(Duration::from_secs(s)).to_string());
        assert_eq!(times, ["5s", "1m05s", "1h02m", "1d01h"]);
        let counts = [0_u64, 1, 2].map(|count| CountOf(count, "tile").to_string());
        assert_eq!(counts, ["0 tiles", "1 tile", "2 tiles"]);
        let batches = [1_u64, 2].map(|count| CountOf(count, "batch").to_string());
        assert_eq!(batches, ["1 batch", "2 batches"]);
    }

    const UNITS: [(&str, u64); 13] = [
        ("", 1),
        ("B", 1),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("k", 1 << 10),
        ("M", 1 << 20),
        ("g", 1 << 30),
        ("T", 1 << 40),
    ];

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_panic(text in ".{0,24}|[0-9.]{0,24}[kKMGTiB/s ]{0,6}") {
            let _ = (parse_bytes(&text), parse_rate(&text), parse_count(&text), parse_time(&text));
        }

        #[test]
        fn a_whole_number_times_its_unit_is_exact(number: u32, unit in 0..UNITS.len(), space in " {0,2}") {
            let (name, factor) = UNITS[unit];
            let expected = u64::from(number).checked_mul(factor);
            prop_assert_eq!(parse_bytes(&format!("{number}{space}{name}")).ok(), expected);
        }

        #[test]
        fn a_fraction_is_within_half_a_byte(thousandths in 0_u64..1_000_000, unit in 0..UNITS.len()) {
            let (name, factor) = UNITS[unit];
            let text = format!("{}.{:03}{name}", thousandths / 1000, thousandths % 1000);
            let bytes = u128::from(parse_bytes(&text).unwrap());
            let exact_thousandths = u128::from(thousandths) * u128::from(factor);
            prop_assert!((bytes * 1000).abs_diff(exact_thousandths) <= 500, "{}: {}", text, bytes);
        }

        #[test]
        fn a_rate_is_the_size_of_one_second(number: u32, unit in 0..9_usize, per_second: bool) {
            let text = format!("{number}{}", UNITS[unit].0);
            let suffix = if per_second { "/s" } else { "" };
            prop_assert_eq!(parse_rate(&format!("{text}{suffix}")).ok(), parse_bytes(&text).ok());
        }
    }
}
