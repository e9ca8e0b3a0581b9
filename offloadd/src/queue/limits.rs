//! What keeps a device busy and not more: the size of a piece, and how many bytes are in flight each way.

use std::fs::File;

use offload_api::BLOCK_BYTES;

use crate::drive_queue::queue_number;
use crate::store::format::MeasuredRates;

/// Where a device does not say what it takes as one request, and the most that is worth while: drives reach their rate
/// with less.
const PIECE_BYTES_MAX: u32 = 1 << 20;

/// Smaller requests cost more than they are worth, even where the kernel must cut these again.
const PIECE_BYTES_MIN: u32 = 256 << 10;

/// A window holds what the device moves in so many milliseconds: above a drive's latency by far, and not long for whoever
/// is wanted and finds it full.
const WINDOW_MS: u64 = 10;

/// Of slow devices: enough pieces that none of a drive's channels is idle.
const WINDOW_BYTES_MIN: u64 = 8 << 20;

/// Of fast ones, whatever was measured.
const WINDOW_BYTES_MAX: u64 = 64 << 20;

/// Where nothing was measured.
const WINDOW_BYTES_UNKNOWN: u64 = 32 << 20;

/// What is handed to one device at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// One request; a multiple of the block.
    pub piece_bytes: u32,
    /// In flight: read, written.
    pub window_bytes: [u64; 2],
    /// What it moves: read, written. Where nothing was measured, what its window was made for.
    pub bytes_per_s: [u64; 2],
}

impl DeviceLimits {
    /// For an opened device that was measured when its store was made.
    pub fn of(file: &File, rates: &MeasuredRates) -> Self {
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

/// Whole requests of at most `request_bytes_max`, which a device may not tell.
fn piece_bytes(request_bytes_max: Option<u64>) -> u32 {
    let bytes = request_bytes_max
        .unwrap_or(u64::MAX)
        .clamp(u64::from(PIECE_BYTES_MIN), u64::from(PIECE_BYTES_MAX)) as u32;
    bytes / BLOCK_BYTES * BLOCK_BYTES
}

/// At `bytes_per_s`, 0 = unknown.
fn window_bytes(bytes_per_s: u64) -> u64 {
    match bytes_per_s {
        0 => WINDOW_BYTES_UNKNOWN,
        rate => (rate / 1000 * WINDOW_MS).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX),
    }
}

/// The longest request the drive under `file` takes: in sectors, and in pieces of memory, each a page at worst. `None`
/// where no block device says so.
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
