//! Rates of scrubs and of tiles that move.

use offload_support::units::parse_rate;

/// Default rate of a scrub by a daemon; an NVMe drive reads this beside training without a noticeable delay.
pub(super) const SCRUB_BYTES_PER_S: u64 = 200_000_000;

/// Parses the rate of a scrub or a move in bytes per second. A slower one would take years, and no machine is faster.
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let rate = parse_rate(text).map_err(|error| error.to_string())?;
    match (1 << 20..=10_000_000_000_000).contains(&rate) {
        true => Ok(rate),
        false => Err(format!("`{text}` is not between 1MiB/s and 10000GB/s")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit_and_bounds() {
        assert_eq!(rate("200MB/s"), Ok(200_000_000));
        assert_eq!(rate("1.5 GB/s"), Ok(1_500_000_000));
        assert_eq!(rate("2MiB"), Ok(2 << 20));
        for wrong in [
            "",
            "200",
            "MB/s",
            "1kB/s",
            "-5MB/s",
            "1e99GB/s",
            "20000GB/s",
            "nanMB/s",
            "5mb",
        ] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
