//! Limits that keep a device just busy: the size of a piece, and the bytes in flight in each direction.

use std::fs::File;

use offload_api::BLOCK_BYTES;

use crate::drive_queue::queue_number;
use crate::store::superblock::MeasuredRates;

/// Size of a piece where the device does not tell its largest request, and the largest useful one: drives reach their rate with
/// less.
const PIECE_BYTES_MAX: u32 = 1 << 20;

/// Smaller requests cost more than they save, even where the kernel must split larger ones.
const PIECE_BYTES_MIN: u32 = 256 << 10;

/// A window holds the bytes that the device moves in so many milliseconds: far above a drive's latency, and not long for a
/// demanded tile that finds it full.
const WINDOW_MS: u64 = 10;

/// Least window: on slow devices, enough pieces to keep all channels of a drive busy.
const WINDOW_BYTES_MIN: u64 = 8 << 20;

/// Largest window.
const WINDOW_BYTES_MAX: u64 = 64 << 20;

/// Window of a device that was not measured.
const WINDOW_BYTES_UNKNOWN: u64 = 32 << 20;

/// Limits of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Bytes of one request; a multiple of the block.
    pub piece_bytes: u32,
    /// Bytes in flight, of reads and of writes.
    pub window_bytes: [u64; 2],
    /// Rate of reads and of writes; a plausible one where nothing was measured.
    pub bytes_per_s: [u64; 2],
}

impl DeviceLimits {
    /// Returns the limits of an opened device with these rates.
    pub fn for_device(file: &File, rates: &MeasuredRates) -> Self {
        let rates = [rates.read_bytes_per_s, rates.write_bytes_per_s];
        Self {
            piece_bytes: piece_bytes(request_bytes_max(file)),
            window_bytes: rates.map(window_bytes),
            bytes_per_s: rates.map(|rate| match rate {
                0 => WINDOW_BYTES_UNKNOWN / WINDOW_MS * 1000,
                rate => rate,
            }),
        }
    }
}

/// Returns whole blocks of at most `request_bytes_max`, if the device tells it.
fn piece_bytes(request_bytes_max: Option<u64>) -> u32 {
    let bytes = request_bytes_max
        .unwrap_or(u64::MAX)
        .clamp(u64::from(PIECE_BYTES_MIN), u64::from(PIECE_BYTES_MAX)) as u32;
    bytes / BLOCK_BYTES * BLOCK_BYTES
}

/// Returns the window at a rate; 0 is unknown.
fn window_bytes(bytes_per_s: u64) -> u64 {
    match bytes_per_s {
        0 => WINDOW_BYTES_UNKNOWN,
        rate => (rate / 1000 * WINDOW_MS).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX),
    }
}

/// Returns the longest request that the drive under `file` takes, limited by sectors and by pieces of memory of one page each;
/// `None` if it is no block device.
fn request_bytes_max(file: &File) -> Option<u64> {
    let sectors = queue_number(file, "max_sectors_kb")?.checked_mul(1024)?;
    let segments = queue_number(file, "max_segments")?.checked_mul(u64::from(BLOCK_BYTES))?;
    Some(sectors.min(segments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_what_the_device_takes_within_reason_and_whole_blocks() {
        let cases = [
            (None, 1 << 20),
            (Some(512 << 10), 512 << 10),
            (Some(1280 << 10), 1 << 20),
            (Some(4096), 256 << 10),
            (Some(0), 256 << 10),
            (Some(1_000_000), 999_424),
        ];
        for (says, piece) in cases {
            assert_eq!(piece_bytes(says), piece, "{says:?}");
        }
    }

    #[test]
    fn a_window_is_ten_milliseconds_of_the_device_within_reason() {
        let cases = [
            (0, 32 << 20),
            (1, 8 << 20),
            (3_200_000_000, 32_000_000),
            (u64::MAX, 64 << 20),
        ];
        for (rate, window) in cases {
            assert_eq!(window_bytes(rate), window, "{rate}");
        }
    }
}
