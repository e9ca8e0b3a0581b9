//! A 64-bit fingerprint of bytes. It shows whether two runs have the same weights, or whether a file differs
//! from what was written. It is not cryptographically secure.
//!
//! Processes eight bytes at a time: `hash = mix(hash ^ word) * ODD`. The last word is padded with zeros, and
//! the length is mixed in at the end. The result does not depend on how the bytes are divided into calls.

const ODD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Fingerprint in progress.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    hash: u64,
    length_bytes: u64,
    /// Bytes of an incomplete word; the first `length_bytes % 8` are valid.
    rest: [u8; 8],
}

impl Default for Fingerprint {
    fn default() -> Self {
        Self {
            hash: ODD,
            length_bytes: 0,
            rest: [0; 8],
        }
    }
}

impl Fingerprint {
    /// Returns the fingerprint of `bytes`.
    pub fn compute(bytes: &[u8]) -> u64 {
        let mut fingerprint = Self::default();
        fingerprint.add(bytes);
        fingerprint.finish()
    }

    /// Appends `bytes`.
    pub fn add(&mut self, mut bytes: &[u8]) {
        let pending = (self.length_bytes % 8) as usize;
        self.length_bytes += bytes.len() as u64;
        if pending > 0 {
            let taken = bytes.len().min(8 - pending);
            self.rest[pending..pending + taken].copy_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if pending + taken < 8 {
                return;
            }
            self.word(self.rest);
        }
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.word(word.try_into().expect("eight bytes"));
        }
        let rest = words.remainder();
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    /// Returns the fingerprint of all bytes added.
    pub fn finish(mut self) -> u64 {
        let pending = (self.length_bytes % 8) as usize;
        if pending > 0 {
            let mut last = [0; 8];
            last[..pending].copy_from_slice(&self.rest[..pending]);
            self.word(last);
        }
        self.word(self.length_bytes.to_le_bytes());
        self.hash ^ (self.hash >> 31)
    }

    fn word(&mut self, word: [u8; 8]) {
        let mixed = self.hash ^ u64::from_le_bytes(word);
        self.hash = (mixed ^ (mixed >> 32)).wrapping_mul(ODD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_into_calls_makes_no_difference() {
        let bytes: Vec<u8> = (0..100u8).collect();
        for first in 0..30 {
            for second in first..50 {
                let mut cut = Fingerprint::default();
                cut.add(&bytes[..first]);
                cut.add(&bytes[first..second]);
                cut.add(&bytes[second..]);
                assert_eq!(cut.finish(), Fingerprint::compute(&bytes));
            }
        }
    }

    #[test]
    fn every_bit_and_the_length_change_the_fingerprint() {
        let bytes = vec![0u8; 33];
        let mut seen = std::collections::HashSet::from([Fingerprint::compute(&bytes)]);
        for bit in 0..33 * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(Fingerprint::compute(&flipped)), "bit {bit}");
        }
        for length in 0..33 {
            assert!(
                seen.insert(Fingerprint::compute(&bytes[..length])),
                "length {length}"
            );
        }
    }
}
