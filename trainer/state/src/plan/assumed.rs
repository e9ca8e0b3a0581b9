//! Rates that a plan takes for those of hardware of which none were measured.

/// Rates of a fast PCIe 4 drive, so that a fast drive gets enough staging.
pub const DRIVE_READ_BYTES_PER_S: f64 = 6.2e9;
/// See [`DRIVE_READ_BYTES_PER_S`].
pub const DRIVE_WRITE_BYTES_PER_S: f64 = 3.2e9;

/// PCIe 5 with 16 lanes, in each direction: 55.6 GB/s were measured in one direction alone, 102 GB/s in both
/// together.
pub const BUS_BYTES_PER_S: f64 = 50e9;

/// Parameters that one core updates in a second: 16 together reached 5.0 to 5.6 G (split bf16 master, AVX-512).
pub const UPDATE_PARAMS_PER_S: f64 = 0.35e9;
