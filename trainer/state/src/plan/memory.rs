//! Parses a size of memory on the command line of a plan.

use offload_support::units::parse_bytes;

/// A smaller size than any machine has, so the unit is missing.
const MEMORY_BYTES_MIN: u64 = 1 << 20;

/// Parses a size of memory; 0 means none. Refuses 24, which would be 24 bytes.
///
/// # Errors
/// The message refers to `text`.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_bytes(text).map_err(|error| error.to_string())? {
        bytes @ 1..MEMORY_BYTES_MIN => Err(format!(
            "`{text}` is {bytes} bytes; add a unit, such as {bytes}GiB"
        )),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_a_unit_is_refused() {
        assert_eq!(parse_memory("139GiB"), Ok(139 << 30));
        assert_eq!(parse_memory("0"), Ok(0));
        assert!(parse_memory("24").unwrap_err().contains("such as 24GiB"));
        assert!(parse_memory("6.2Gb").is_err());
    }
}
