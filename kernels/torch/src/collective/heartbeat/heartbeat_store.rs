//! What ranks write for each other to read: a beat, as a line of text.

use super::CollectiveError;

/// Bytes of a beat as written, always the same, so that a later one covers an earlier one whole.
pub(super) const BEAT_BYTES: usize = 512;

/// Where ranks leave their beats for each other.
pub(crate) trait HeartbeatStore: Send {
    /// Leaves this rank's beat in place of its last one.
    fn write(&mut self, beat: &Beat) -> Result<(), CollectiveError>;
    /// The last beat of `rank`.
    fn read(&mut self, rank: u32) -> Result<Seen, CollectiveError>;
}

/// A rank on the board. A beat is `None` where what stands there cannot be read.
#[derive(Debug, PartialEq)]
pub(crate) enum Seen {
    /// It has not come yet.
    Nothing,
    /// Its last beat; whether it is alive the next one will tell.
    Beat(Option<Beat>),
    /// Its last beat, and its process is gone for certain.
    Dead(Option<Beat>),
}

/// What a rank says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Beat {
    /// Goes up with each.
    pub(crate) count: u64,
    /// The number of the operation it has come to.
    pub(crate) reached: u64,
    /// Why it ended, once it does.
    pub(crate) end: Option<String>,
}

impl Beat {
    /// As written: `COUNT REACHED =REASON`, or `-` in place of the reason, filled up with line ends.
    pub(crate) fn encode(&self) -> [u8; BEAT_BYTES] {
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

    /// `None` for anything but what [`Beat::encode`] writes: another process may be writing, or have written nonsense.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Beat> {
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
