//! The speed a test wants devices to have. Only with the feature `safeguard`, which only test builds have:
//! `OFFLOADD_PACE=60000000,30000000` is bytes read and bytes written a second, each device for itself;
//! `OFFLOADD_PACE="b=30000000,15000000;60000000,30000000"` has another pace for files whose name begins with `b`.
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

/// Of each device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paces {
    named: Vec<(String, Pace)>,
    others: Pace,
}

impl Paces {
    /// Any number of "NAME=READ,WRITE;", then "READ,WRITE" of the others.
    pub fn parse(text: &str) -> Option<Self> {
        let (named, others) = match text.rsplit_once(';') {
            Some((named, others)) => (named.split(';').collect(), others),
            None => (Vec::new(), text),
        };
        let named = named.into_iter().map(|one| {
            let (name, pace) = one.split_once('=').filter(|(name, _)| !name.is_empty())?;
            Some((name.to_owned(), Pace::parse(pace)?))
        });
        Some(Self {
            named: named.collect::<Option<_>>()?,
            others: Pace::parse(others)?,
        })
    }

    /// Of the device whose file has this name.
    pub fn of(&self, file_name: &str) -> Pace {
        let mut named = self.named.iter();
        named
            .find(|(name, _)| file_name.starts_with(name))
            .map_or(self.others, |(_, pace)| *pace)
    }
}

/// What a test asked for. Panics when it makes no sense: a test that believes in a pace must not run without one.
#[cfg(feature = "safeguard")]
pub fn paces() -> Option<Paces> {
    let text = std::env::var("OFFLOADD_PACE").ok()?;
    Some(Paces::parse(&text).unwrap_or_else(|| panic!("OFFLOADD_PACE={text}: it is READ,WRITE")))
}

/// What a test asked for: nothing, in this build.
#[cfg(not(feature = "safeguard"))]
pub const fn paces() -> Option<Paces> {
    None
}
