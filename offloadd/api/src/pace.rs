//! The speed a test wants every device to have. Only with the feature `removable`, which only test builds have:
//! `OFFLOADD_PACE=60000000,30000000` is bytes read and bytes written a second, each device for itself.
//!
//! Without the feature the answer is the constant `None` and no code is left.

/// Bytes a second of one device, both ways at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Read.
    pub read_bytes_per_s: u64,
    /// Written.
    pub write_bytes_per_s: u64,
}

impl Pace {
    /// "READ,WRITE", both at least 1.
    pub fn parse(text: &str) -> Option<Self> {
        let (read, write) = text.split_once(',')?;
        let rate = |text: &str| text.trim().parse::<u64>().ok().filter(|&rate| rate > 0);
        Some(Self {
            read_bytes_per_s: rate(read)?,
            write_bytes_per_s: rate(write)?,
        })
    }
}

/// What a test asked for. Panics when it is not two numbers: a test that believes in a pace must not run without one.
#[cfg(feature = "removable")]
pub fn pace() -> Option<Pace> {
    let text = std::env::var("OFFLOADD_PACE").ok()?;
    Some(Pace::parse(&text).unwrap_or_else(|| panic!("OFFLOADD_PACE={text}: it is READ,WRITE")))
}

/// What a test asked for: nothing, in this build.
#[cfg(not(feature = "removable"))]
pub const fn pace() -> Option<Pace> {
    None
}
