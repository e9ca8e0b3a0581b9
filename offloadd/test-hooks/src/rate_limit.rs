//! Speed limits of devices: `OFFLOADD_RATE_LIMIT=60000000,30000000` limits each device to so many bytes read and written a second;
//! `OFFLOADD_RATE_LIMIT="b=30000000,15000000;60000000,30000000"` has other limits for files whose name begins with `b`.

/// Speed of one device, with reads and writes at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Bytes read a second.
    pub read_bytes_per_s: u64,
    /// Bytes written a second.
    pub write_bytes_per_s: u64,
}

impl RateLimit {
    /// Parses "READ,WRITE", both at least 1.
    pub fn parse(text: &str) -> Option<Self> {
        let (read, write) = text.split_once(',')?;
        let rate = |text: &str| text.trim().parse::<u64>().ok().filter(|&rate| rate > 0);
        Some(Self {
            read_bytes_per_s: rate(read)?,
            write_bytes_per_s: rate(write)?,
        })
    }
}

/// Speeds of all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimits {
    named: Vec<(String, RateLimit)>,
    others: RateLimit,
}

impl RateLimits {
    /// Parses any number of "NAME=READ,WRITE;" and then "READ,WRITE" for the other devices.
    pub fn parse(text: &str) -> Option<Self> {
        let (named, others) = match text.rsplit_once(';') {
            Some((named, others)) => (named.split(';').collect(), others),
            None => (Vec::new(), text),
        };
        let named = named.into_iter().map(|one| {
            let (name, limit) = one.split_once('=').filter(|(name, _)| !name.is_empty())?;
            Some((name.to_owned(), RateLimit::parse(limit)?))
        });
        Some(Self {
            named: named.collect::<Option<_>>()?,
            others: RateLimit::parse(others)?,
        })
    }

    /// Returns the speed of the device with this file name.
    pub fn for_file(&self, file_name: &str) -> RateLimit {
        let mut named = self.named.iter();
        named
            .find(|(name, _)| file_name.starts_with(name))
            .map_or(self.others, |(_, limit)| *limit)
    }
}

/// Returns the speeds a test asked for. Panics on a value that cannot be parsed, so that no test runs without them.
#[cfg(feature = "active")]
pub fn limits() -> Option<RateLimits> {
    let text = std::env::var("OFFLOADD_RATE_LIMIT").ok()?;
    Some(
        RateLimits::parse(&text)
            .unwrap_or_else(|| panic!("OFFLOADD_RATE_LIMIT={text}: it is READ,WRITE")),
    )
}

/// Returns the speeds a test asked for: none, in this build.
#[cfg(not(feature = "active"))]
pub const fn limits() -> Option<RateLimits> {
    None
}
