//! Storage of heartbeats, which ranks write for each other as lines of text.

use crate::CollectiveError;

/// Fixed size of a written heartbeat, so that a new one overwrites the old one completely.
pub const BEAT_BYTES: usize = 512;

/// Place in which ranks publish their heartbeats.
pub trait HeartbeatStore: Send {
    /// Replaces this rank's heartbeat.
    fn write(&mut self, beat: &Beat) -> Result<(), CollectiveError>;
    /// Reads the last heartbeat of `rank`.
    fn read(&mut self, rank: u32) -> Result<LastHeartbeat, CollectiveError>;
}

/// Last heartbeat of a rank. A heartbeat is `None` if it cannot be parsed.
#[derive(Debug, PartialEq)]
pub enum LastHeartbeat {
    /// The rank has not come yet.
    Nothing,
    /// The last heartbeat; the next one will show whether the rank is alive.
    Beat(Option<Beat>),
    /// The last heartbeat of a rank whose process is certainly dead.
    Dead(Option<Beat>),
}

/// A heartbeat.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Beat {
    /// Incremented with each heartbeat.
    pub count: u64,
    /// Number of the operation that the rank has reached.
    pub reached: u64,
    /// Why the rank ended, once it does.
    pub end: Option<String>,
}

impl Beat {
    /// Encodes as `COUNT REACHED =REASON`, or `-` in place of the reason, padded with line ends.
    pub fn encode(&self) -> [u8; BEAT_BYTES] {
        let end = match &self.end {
            Some(reason) => format!("={}", reason.replace('\n', " ")),
            None => "-".to_owned(),
        };
        let mut text = format!("{} {} {end}", self.count, self.reached);
        let mut length = text.len().min(BEAT_BYTES);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        text.truncate(length);
        let mut bytes = [b'\n'; BEAT_BYTES];
        bytes[..length].copy_from_slice(text.as_bytes());
        bytes
    }

    /// Returns `None` for anything that [`Beat::encode`] does not write: another process may be writing, or have
    /// written garbage.
    pub fn decode(bytes: &[u8]) -> Option<Beat> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut parts = text.trim_end_matches('\n').splitn(3, ' ');
        let count = parts.next()?.parse().ok()?;
        let reached = parts.next()?.parse().ok()?;
        let end = match parts.next()? {
            "-" => None,
            end => Some(end.strip_prefix('=')?.to_owned()),
        };
        Some(Beat {
            count,
            reached,
            end,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_comes_back_as_it_was() {
        for end in [
            None,
            Some(""),
            Some("no space left on /mnt/nvme0"),
            Some("-"),
        ] {
            let beat = Beat {
                count: u64::MAX,
                reached: 7,
                end: end.map(str::to_owned),
            };
            assert_eq!(Beat::decode(&beat.encode()), Some(beat));
        }
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let beat = Beat {
            count: 1,
            reached: 1,
            end: Some("ü".repeat(1000)),
        };
        let end = Beat::decode(&beat.encode()).unwrap().end.unwrap();
        assert!(end.len() > 500 && end.chars().all(|c| c == 'ü'));
        let lines = Beat {
            end: Some("one\ntwo\n".into()),
            ..beat
        };
        let end = Beat::decode(&lines.encode()).unwrap().end.unwrap();
        assert_eq!(end, "one two ");
    }

    #[test]
    fn nonsense_is_no_beat() {
        for bytes in [
            &b""[..],
            b"1",
            b"1 2",
            b"1 2 3",
            b"x 2 -",
            b"1 -2 -",
            b"\xff\xff",
            &[0; BEAT_BYTES],
            &[b'\n'; BEAT_BYTES],
        ] {
            assert_eq!(Beat::decode(bytes), None, "{bytes:?}");
        }
    }
}
