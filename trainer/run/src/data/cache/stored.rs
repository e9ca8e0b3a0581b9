//! A complete token file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crc_fast::crc32_iscsi as crc32c;

use super::super::DataError;
use super::super::findings::Findings;
use super::format::{HEADER_BYTES, Header};
use super::{BLOCK_BYTES, ELEMENTS_AT};

/// Complete token file, read in ranges. Every returned element has passed its checksum.
pub(in crate::data) struct TokenFile {
    file: File,
    path: PathBuf,
    header: Header,
    findings: Findings,
    /// Checksum of each block; takes a 16,384th of the elements' size.
    table: Vec<u32>,
    /// The block that [`TokenFile::read`] has read last: short windows, and those of a small file, lie in it again.
    last: Mutex<CheckedBlock>,
}

/// A block that has passed its checksum.
#[derive(Default)]
struct CheckedBlock {
    /// `None` if the bytes are of no block.
    number: Option<u64>,
    bytes: Vec<u8>,
}

impl TokenFile {
    /// Opens the file at `path`; returns `None` if there is none.
    ///
    /// # Errors
    /// The file does not match `key`, its header or table is damaged, or it cannot be read.
    pub(in crate::data) fn open(path: &Path, key: u64) -> Result<Option<Self>, DataError> {
        let failed = |source| DataError::Cache {
            verb: "read",
            path: path.into(),
            source,
        };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let damaged = |message: &str| DataError::DamagedCache {
            path: path.into(),
            offset: 0,
            message: message.into(),
        };
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes < ELEMENTS_AT {
            return Err(damaged("it ends before its elements"));
        }
        let mut start = [0; HEADER_BYTES];
        file.read_exact_at(&mut start, 0).map_err(failed)?;
        let header = Header::decode(&start).map_err(|message| damaged(&message))?;
        if header.key != key {
            return Err(damaged("its key differs from the one in its name"));
        }
        if bytes != header.file_bytes() {
            return Err(damaged("its length differs from the one in its header"));
        }
        let mut table = vec![0; 4 * header.blocks() as usize];
        file.read_exact_at(&mut table, ELEMENTS_AT + header.elements_bytes())
            .map_err(failed)?;
        if crc32c(&table) != header.table_crc {
            return Err(damaged("its table of checksums fails its own checksum"));
        }
        let mut findings = vec![0; header.findings_bytes as usize];
        file.read_exact_at(&mut findings, HEADER_BYTES as u64)
            .map_err(failed)?;
        let found = Findings::decode(&findings);
        let found = found.filter(|_| crc32c(&findings) == header.findings_crc);
        let Some(findings) = found else {
            return Err(damaged("its findings fail their checksum"));
        };
        let table = table.chunks_exact(4);
        Ok(Some(Self {
            table: table
                .map(|crc| u32::from_le_bytes(crc.try_into().expect("four bytes")))
                .collect(),
            file,
            path: path.into(),
            header,
            findings,
            last: Mutex::default(),
        }))
    }

    pub(in crate::data) fn header(&self) -> &Header {
        &self.header
    }

    /// What was found in the data.
    pub(in crate::data) fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Reads and checks the whole file. Calls `tell` with the number of bytes checked since the last call.
    ///
    /// # Errors
    /// The first damage found.
    pub(in crate::data) fn verify(&self, tell: &mut dyn FnMut(u64)) -> Result<(), DataError> {
        let mut bytes = Vec::new();
        for block in 0..self.header.blocks() {
            self.block(block, &mut bytes)?;
            tell(bytes.len() as u64);
        }
        Ok(())
    }

    /// Appends `count` elements from element `first` on to `out`.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub(in crate::data) fn read(
        &self,
        first: u64,
        count: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), DataError> {
        let width = self.header.elem_bytes as u64;
        let mut at = first * width;
        let end = at + count as u64 * width;
        assert!(
            end <= self.header.elements_bytes(),
            "elements {first} and {count} more"
        );
        // Its number is set only where its bytes are whole.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        while at < end {
            let block = at / BLOCK_BYTES as u64;
            if last.number != Some(block) {
                last.number = None;
                self.block(block, &mut last.bytes)?;
                last.number = Some(block);
            }
            let start = block * BLOCK_BYTES as u64;
            let upto = end.min(start + last.bytes.len() as u64);
            let part = &last.bytes[(at - start) as usize..(upto - start) as usize];
            self.header.unpack(part, out);
            at = upto;
        }
        Ok(())
    }

    /// Reads a block and verifies its checksum.
    fn block(&self, block: u64, bytes: &mut Vec<u8>) -> Result<(), DataError> {
        let start = block * BLOCK_BYTES as u64;
        let left = self.header.elements_bytes() - start;
        bytes.resize(left.min(BLOCK_BYTES as u64) as usize, 0);
        let offset = ELEMENTS_AT + start;
        let damaged = |message: String| DataError::DamagedCache {
            path: self.path.clone(),
            offset,
            message,
        };
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => damaged("it ends here".into()),
                _ => DataError::Cache {
                    verb: "read",
                    path: self.path.clone(),
                    source: error,
                },
            })?;
        let (expected, found) = (self.table[block as usize], crc32c(bytes));
        if found == expected {
            Ok(())
        } else {
            Err(damaged(format!(
                "the checksum is {found:08x}, expected {expected:08x}"
            )))
        }
    }
}
