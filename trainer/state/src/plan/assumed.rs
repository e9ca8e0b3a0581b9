//! Rates that a plan takes for those of hardware of which none were measured.

use offload_support::pcie::Link;

/// Rates of a fast PCIe 4 drive, so that a fast drive gets enough staging.
pub const DRIVE_READ_BYTES_PER_S: f64 = 6.2e9;
/// See [`DRIVE_READ_BYTES_PER_S`].
pub const DRIVE_WRITE_BYTES_PER_S: f64 = 3.2e9;

/// PCIe 5 with 16 lanes, in each direction: 55.6 GB/s were measured in one direction alone, 102 GB/s in both
/// together.
const BUS_BYTES_PER_S: f64 = 50e9;

/// The part of a link's rate that [`BUS_BYTES_PER_S`] is: of 16 lanes of PCIe 5, 63 GB/s.
const BUS_SHARE: f64 = BUS_BYTES_PER_S / 63.015e9;

/// Rate between host memory and a GPU with this link, in each direction, both used at once. Without a link, that of a large GPU.
pub fn bus_bytes_per_s(link: Option<Link>) -> f64 {
    link.map_or(BUS_BYTES_PER_S, |link| BUS_SHARE * link.bytes_per_s())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_is_as_fast_as_the_link_allows() {
        let rate = |lanes, gt_per_s| bus_bytes_per_s(Some(Link { lanes, gt_per_s })) / 1e9;
        assert!((rate(16, 32.0) - 50.0).abs() < 0.01);
        assert!((rate(16, 16.0) - 25.0).abs() < 0.01);
        assert!((rate(4, 16.0) - 6.25).abs() < 0.01);
        assert_eq!(bus_bytes_per_s(None), BUS_BYTES_PER_S);
    }
}
