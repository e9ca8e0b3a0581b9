//! Bytes, rates, drives and counts as people write them on a command line: `139GiB`, `6.2GB/s`.

/// Longest first, so that `GiB` is not read as `B`.
const UNITS: [(&str, f64); 9] = [
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("B", 1.0),
];

/// More bytes, or bytes a second, than anything has: a typing error.
const AMOUNT_MAX: f64 = 1e18;

/// Bytes: a number with its unit. Only 0 needs none: who writes 24 means no bytes.
///
/// # Errors
/// What is no number of bytes, in words for a person.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    amount(text)
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("\"{text}\": expected bytes with their unit, as 128GiB"))
}

/// Bytes a second: as bytes, with `/s` at the end or not; more than 0.
///
/// # Errors
/// What is no rate, in words for a person.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    amount(text.strip_suffix("/s").unwrap_or(text))
        .filter(|rate| *rate > 0.0)
        .ok_or_else(|| format!("\"{text}\": expected bytes a second, as 6.2GB/s"))
}

/// Drives, all alike: how many, what each reads and what each writes a second, as `2x6.2GB/s:3.2GB/s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drives {
    pub count: u64,
    pub read_bytes_per_s: f64,
    pub write_bytes_per_s: f64,
}

/// More of them in one machine is a typing error.
const DRIVES_MAX: u64 = 1024;

/// Drives: `2x6.2GB/s:3.2GB/s`, or without a count for one.
///
/// # Errors
/// What is not written so, in words for a person.
pub fn parse_drives(text: &str) -> Result<Drives, String> {
    let wrong = || {
        format!("\"{text}\": expected drives and what each reads and writes, as 2x6.2GB/s:3.2GB/s")
    };
    let (count, rates) = match text.split_once('x') {
        Some((count, rates)) => (count.trim().parse().map_err(|_| wrong())?, rates),
        None => (1, text),
    };
    if !(1..=DRIVES_MAX).contains(&count) {
        return Err(wrong());
    }
    let (read, write) = rates.split_once(':').ok_or_else(wrong)?;
    Ok(Drives {
        count,
        read_bytes_per_s: parse_rate(read)?,
        write_bytes_per_s: parse_rate(write)?,
    })
}

/// A count: a number, or one with K, M, G or T behind it.
///
/// # Errors
/// What is no count of at least 1, in words for a person.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let factors = [("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)];
    let trimmed = text.trim();
    let (number, factor) = factors
        .iter()
        .find_map(|(unit, factor)| Some((trimmed.strip_suffix(unit)?, *factor)))
        .unwrap_or((trimmed, 1.0));
    let count = number.trim().parse::<f64>().ok().map(|n| n * factor);
    count
        .filter(|count| (1.0..=AMOUNT_MAX).contains(count))
        .map(|count| count as u64)
        .ok_or_else(|| format!("\"{text}\": expected a count of at least 1, as 2000000 or 2M"))
}

fn amount(text: &str) -> Option<f64> {
    let text = text.trim();
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .or((text == "0").then_some((text, 1.0)))?;
    let amount = number.trim().parse::<f64>().ok()? * factor;
    (0.0..=AMOUNT_MAX).contains(&amount).then_some(amount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        assert_eq!(parse_bytes("139GiB"), Ok(139 << 30));
        assert_eq!(parse_bytes("1.5 MiB"), Ok(3 << 19));
        assert_eq!(parse_bytes("4096B"), Ok(4096));
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_rate("6.2GB/s"), Ok(6.2e9));
        assert_eq!(parse_rate("3.2GB"), Ok(3.2e9));
        for wrong in [
            "", "GiB", "24", "4096", "-1GiB", "inf", "nan", "1e30", "6.2 Gb/s", "x",
        ] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
        assert!(parse_rate("0GB/s").is_err());
    }

    #[test]
    fn drives_and_counts_are_read_as_people_write_them() {
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
        ] {
            assert!(parse_drives(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_count("2M"), Ok(2_000_000));
        assert_eq!(parse_count("1.5G"), Ok(1_500_000_000));
        assert_eq!(parse_count("7"), Ok(7));
        for wrong in ["", "0", "-1", "M", "1e40", "nan", "2 MB"] {
            assert!(parse_count(wrong).is_err(), "{wrong}");
        }
    }
}
