//! Header of a token file, and encoding of its elements.

use crc_fast::crc32_iscsi as crc32c;

use super::super::tokenize::{BEGINS, MARKS, NOT_COUNTED};
use super::{BLOCK_BYTES, ELEMENTS_AT};

const MAGIC: u64 = u64::from_le_bytes(*b"TOKENS\r\n");
const VERSION: u64 = 4;
const WORDS: usize = 16;
pub(super) const HEADER_BYTES: usize = WORDS * 8;
/// Most bytes of the findings, which are between header and elements.
pub(super) const FINDINGS_BYTES_MAX: usize = ELEMENTS_AT as usize - HEADER_BYTES;

/// Header of a token file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct Header {
    pub(in crate::data) key: u64,
    pub(in crate::data) elem_bytes: usize,
    /// Documents longer than a window, which were divided.
    pub(in crate::data) divided: u64,
    pub(in crate::data) train_elems: u64,
    pub(in crate::data) held_elems: u64,
    pub(in crate::data) documents: u64,
    pub(in crate::data) fingerprint: u64,
    pub(in crate::data) counted: u64,
    /// Elements that fill windows up.
    pub(in crate::data) padding: u64,
    /// Documents with an answer that is empty.
    pub(in crate::data) unanswered: u64,
    /// Documents that repeat the beginning of a conversation for an answer that the chat template changes later.
    pub(in crate::data) repeated: u64,
    pub(in crate::data) table_crc: u32,
    /// Bytes of the findings, and their checksum.
    pub(in crate::data) findings_bytes: u32,
    pub(in crate::data) findings_crc: u32,
}

impl Header {
    pub(in crate::data) fn elems(&self) -> u64 {
        self.train_elems + self.held_elems
    }

    pub(in crate::data) fn elements_bytes(&self) -> u64 {
        self.elems() * self.elem_bytes as u64
    }

    pub(super) fn blocks(&self) -> u64 {
        self.elements_bytes().div_ceil(BLOCK_BYTES as u64)
    }

    pub(super) fn file_bytes(&self) -> u64 {
        ELEMENTS_AT + self.elements_bytes() + 4 * self.blocks()
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let words: [u64; WORDS - 1] = [
            MAGIC,
            VERSION,
            self.key,
            self.elem_bytes as u64,
            self.divided,
            self.train_elems,
            self.held_elems,
            self.documents,
            self.fingerprint,
            self.counted,
            u64::from(self.table_crc),
            self.padding,
            self.unanswered,
            self.repeated,
            u64::from(self.findings_bytes) | u64::from(self.findings_crc) << 32,
        ];
        let mut bytes = [0; HEADER_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let crc = u64::from(crc32c(&bytes[..HEADER_BYTES - 8]));
        bytes[HEADER_BYTES - 8..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes the first bytes of a file.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().expect("eight bytes"));
        }
        if words[0] != MAGIC {
            return Err("it is not a token file".into());
        }
        if words[WORDS - 1] != u64::from(crc32c(&bytes[..HEADER_BYTES - 8])) {
            return Err("its header fails its checksum".into());
        }
        if words[1] != VERSION {
            return Err(format!(
                "it has format version {}, but this trainer reads version {VERSION}",
                words[1]
            ));
        }
        let header = Self {
            key: words[2],
            elem_bytes: words[3] as usize,
            divided: words[4],
            train_elems: words[5],
            held_elems: words[6],
            documents: words[7],
            fingerprint: words[8],
            counted: words[9],
            table_crc: words[10] as u32,
            padding: words[11],
            unanswered: words[12],
            repeated: words[13],
            findings_bytes: words[14] as u32,
            findings_crc: (words[14] >> 32) as u32,
        };
        // A limit no real file exceeds; below it the sizes cannot overflow.
        let elems = words[5]
            .checked_add(words[6])
            .filter(|elems| *elems < 1 << 56);
        let findings = header.findings_bytes as usize <= FINDINGS_BYTES_MAX;
        if ![2, 4].contains(&words[3]) || elems.is_none() || !findings || header.encode() != *bytes
        {
            return Err("its header contradicts itself".into());
        }
        Ok(header)
    }

    /// Appends the stored form of `elements` to `out`.
    pub(super) fn pack(&self, elements: &[u32], out: &mut Vec<u8>) {
        // The marks are the two highest bits of an element of any width.
        let shift = 32 - 8 * self.elem_bytes;
        for &element in elements {
            let stored = (element & !MARKS) | (element & MARKS) >> shift;
            out.extend_from_slice(&stored.to_le_bytes()[..self.elem_bytes]);
        }
    }

    /// Decodes stored bytes and appends the elements to `out`.
    pub(super) fn unpack(&self, bytes: &[u8], out: &mut Vec<u32>) {
        let shift = 32 - 8 * self.elem_bytes;
        let (counts, begins) = (NOT_COUNTED >> shift, BEGINS >> shift);
        out.extend(bytes.chunks_exact(self.elem_bytes).map(|bytes| {
            let mut word = [0; 4];
            word[..self.elem_bytes].copy_from_slice(bytes);
            let stored = u32::from_le_bytes(word);
            let marks = stored & (counts | begins);
            (stored & !marks) | marks << shift
        }));
    }
}
