//! Bytes and rates as people write them on a command line: `139GiB`, `6.2GB/s`.

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

/// Bytes: a number, with or without a unit.
///
/// # Errors
/// What is no number of bytes, in words for a person.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    amount(text)
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("\"{text}\": expected bytes, as 137438953472 or 128GiB"))
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

fn amount(text: &str) -> Option<f64> {
    let text = text.trim();
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1.0));
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
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_rate("6.2GB/s"), Ok(6.2e9));
        assert_eq!(parse_rate("3.2GB"), Ok(3.2e9));
        for wrong in ["", "GiB", "-1GiB", "inf", "nan", "1e30", "6.2 Gb/s", "x"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
        assert!(parse_rate("0GB/s").is_err());
    }
}
