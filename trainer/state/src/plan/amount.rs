//! Parses amounts on the command line of a plan, such as drives: `2x6.2GB/s:3.2GB/s`.

use offload_support::units::parse_rate as rate;

/// A lower rate than any drive or network has, so the unit is missing.
const RATE_BYTES_PER_S_MIN: u64 = 1 << 20;

/// Parses a rate. Refuses 6, which would be 6 bytes a second.
///
/// # Errors
/// The message refers to `text`.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    match rate(text).map_err(|error| error.to_string())? {
        rate @ ..RATE_BYTES_PER_S_MIN if text.ends_with(|last: char| last.is_ascii_digit()) => Err(
            format!("`{text}` is {rate} bytes per second; add a unit, such as {text}GB/s"),
        ),
        rate @ ..RATE_BYTES_PER_S_MIN => Err(format!(
            "`{text}` is {rate} bytes per second, less than any drive or network has; expected a rate such as 6.2GB/s"
        )),
        rate => Ok(rate as f64),
    }
}

/// Equal drives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drives {
    pub count: u64,
    /// Read rate of each drive.
    pub read_bytes_per_s: f64,
    /// Write rate of each drive.
    pub write_bytes_per_s: f64,
}

/// Largest number of drives; a larger value is taken for a typing error.
const DRIVES_MAX: u64 = 1024;

/// Parses drives, as `2x6.2GB/s:3.2GB/s`; without a count, one drive.
///
/// # Errors
/// The message refers to `text`.
pub fn parse_drives(text: &str) -> Result<Drives, String> {
    let wrong = || {
        format!(
            "\"{text}\": expected a count and the read and write rate of each drive, for example 2x6.2GB/s:3.2GB/s"
        )
    };
    let (count, rates) = match text.split_once('x') {
        None if text.trim() == "0" => (0, text),
        Some((count, rates)) => (count.trim().parse().map_err(|_| wrong())?, rates),
        None => (1, text),
    };
    if !(1..=DRIVES_MAX).contains(&count) {
        return Err(format!(
            "\"{text}\": expected 1 to {DRIVES_MAX} drives; a run without drives needs no rates of them"
        ));
    }
    let (read, write) = rates.split_once(':').ok_or_else(wrong)?;
    Ok(Drives {
        count,
        read_bytes_per_s: parse_rate(read)?,
        write_bytes_per_s: parse_rate(write)?,
    })
}

/// Parses a count of at least 1, as `2000000` or `2M`.
///
/// # Errors
/// The message refers to `text`.
pub fn parse_count(text: &str) -> Result<u64, String> {
    match offload_support::units::parse_count(text).map_err(|error| error.to_string())? {
        0 => Err(format!("`{text}`: expected at least 1")),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_and_counts_are_parsed() {
        let two = Drives {
            count: 2,
            read_bytes_per_s: 6.2e9,
            write_bytes_per_s: 3.2e9,
        };
        assert_eq!(parse_drives("2x6.2GB/s:3.2GB/s"), Ok(two));
        assert_eq!(parse_drives("6.2GB:3.2GB"), Ok(Drives { count: 1, ..two }));
        for wrong in [
            "",
            "2x",
            "2x6GB/s",
            "0x6GB/s:3GB/s",
            "x:",
            "-1x1GB:1GB",
            "2x6GB:0GB",
            "2x6:3",
        ] {
            assert!(parse_drives(wrong).is_err(), "{wrong}");
        }
        let slow = parse_rate("1MB/s").unwrap_err();
        assert!(slow.ends_with("such as 6.2GB/s"), "{slow}");
        let without = parse_rate("6").unwrap_err();
        assert!(without.ends_with("add a unit, such as 6GB/s"), "{without}");
        for none in ["0", "0x6GB/s:3GB/s"] {
            let error = parse_drives(none).unwrap_err();
            assert!(error.contains("without drives needs no rates"), "{error}");
        }
        assert_eq!(parse_count("2M"), Ok(2_000_000));
        assert!(parse_count("0").is_err());
    }
}
