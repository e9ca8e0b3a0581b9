//! Writes a token file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crc_fast::crc32_iscsi as crc32c;

use super::super::DataError;
use super::super::findings::Findings;
use super::super::tokenize::NOT_COUNTED;
use super::format::{FINDINGS_BYTES_MAX, HEADER_BYTES, Header};
use super::{BLOCK_BYTES, ELEMENTS_AT};
use training_state::fingerprint::Fingerprint;

/// Accepts training and validation elements in any order. Validation elements are kept in a separate
/// temporary file until the end.
pub(in crate::data) struct TokenFileWriter<'a> {
    file: &'a File,
    path: &'a Path,
    header: Header,
    /// Bytes of an incomplete block.
    pending: Vec<u8>,
    table: Vec<u8>,
    print: Fingerprint,
    held_out: Option<File>,
    held_out_counted: u64,
    findings: Findings,
}

impl<'a> TokenFileWriter<'a> {
    /// Starts writing into `file`, whose path is `path`.
    pub(in crate::data) fn new(
        file: &'a File,
        path: &'a Path,
        header: Header,
    ) -> Result<Self, DataError> {
        let writer = Self {
            file,
            path,
            header,
            pending: Vec::with_capacity(2 * BLOCK_BYTES),
            table: Vec::new(),
            print: Fingerprint::default(),
            held_out: None,
            held_out_counted: 0,
            findings: Findings::default(),
        };
        // Removes what an earlier attempt left.
        writer.done(file.set_len(0))?;
        let mut file = file;
        writer.done(file.seek(SeekFrom::Start(ELEMENTS_AT)))?;
        Ok(writer)
    }

    /// Appends training elements.
    pub(in crate::data) fn train(&mut self, elements: &[u32]) -> Result<(), DataError> {
        self.header.train_elems += elements.len() as u64;
        self.header.counted += counted(elements);
        let header = self.header.clone();
        header.pack(elements, &mut self.pending);
        self.write_blocks(false)
    }

    /// Appends validation elements.
    pub(in crate::data) fn hold(&mut self, elements: &[u32]) -> Result<(), DataError> {
        self.header.held_elems += elements.len() as u64;
        self.header.counted += counted(elements);
        self.held_out_counted += counted(elements);
        let mut bytes = Vec::new();
        self.header.pack(elements, &mut bytes);
        if self.held_out.is_none() {
            let dir = self.path.parent().unwrap_or(Path::new("."));
            self.held_out = Some(self.done(tempfile::tempfile_in(dir))?);
        }
        let mut held_out = self.held_out.as_ref().expect("made above");
        self.done(held_out.write_all(&bytes))
    }

    /// Header of what has been written so far.
    pub(in crate::data) fn header(&self) -> &Header {
        &self.header
    }

    /// Number of validation elements written that count in the loss.
    pub(in crate::data) fn held_counted(&self) -> u64 {
        self.held_out_counted
    }

    /// Counts one more document.
    pub(in crate::data) fn document(&mut self) {
        self.header.documents += 1;
    }

    /// Counts elements that fill a window up.
    pub(in crate::data) fn padding(&mut self, elems: usize) {
        self.header.padding += elems as u64;
    }

    /// Counts a document with an empty answer.
    pub(in crate::data) fn unanswered(&mut self) {
        self.header.unanswered += 1;
    }

    /// Counts a document that repeats the beginning of a conversation.
    pub(in crate::data) fn repeated(&mut self) {
        self.header.repeated += 1;
    }

    /// What was found in the data so far.
    pub(in crate::data) fn findings(&mut self) -> &mut Findings {
        &mut self.findings
    }

    /// Counts a document that was divided.
    pub(in crate::data) fn divided(&mut self) {
        self.header.divided += 1;
    }

    /// Completes the file. Its last `last_held` training elements become validation elements.
    pub(in crate::data) fn finish(mut self, last_held: u64) -> Result<Header, DataError> {
        if let Some(mut held_out) = self.held_out.take() {
            self.done(held_out.rewind())?;
            let mut bytes = vec![0; BLOCK_BYTES];
            loop {
                let read = self.done(held_out.read(&mut bytes))?;
                if read == 0 {
                    break;
                }
                self.pending.extend_from_slice(&bytes[..read]);
                self.write_blocks(false)?;
            }
        }
        self.write_blocks(true)?;
        self.header.train_elems -= last_held;
        self.header.held_elems += last_held;
        self.header.fingerprint = self.print.clone().finish();
        self.header.table_crc = crc32c(&self.table);
        let mut file = self.file;
        self.done(file.write_all(&self.table))?;
        let findings = self.findings.encode(FINDINGS_BYTES_MAX);
        self.header.findings_bytes = findings.len() as u32;
        self.header.findings_crc = crc32c(&findings);
        self.done(self.file.write_all_at(&findings, HEADER_BYTES as u64))?;
        // The header is written last: without it the file is not a token file.
        self.done(self.file.write_all_at(&self.header.encode(), 0))?;
        Ok(self.header)
    }

    fn write_blocks(&mut self, all: bool) -> Result<(), DataError> {
        let mut from = 0;
        while self.pending.len() - from >= BLOCK_BYTES || all && self.pending.len() > from {
            let end = self.pending.len().min(from + BLOCK_BYTES);
            let block = &self.pending[from..end];
            self.print.add(block);
            self.table.extend_from_slice(&crc32c(block).to_le_bytes());
            let mut file = self.file;
            self.done(file.write_all(block))?;
            from = end;
        }
        self.pending.drain(..from);
        Ok(())
    }

    fn done<T>(&self, result: std::io::Result<T>) -> Result<T, DataError> {
        result.map_err(|source| DataError::Cache {
            verb: "write",
            path: self.path.into(),
            source,
        })
    }
}

fn counted(elements: &[u32]) -> u64 {
    let counting = elements
        .iter()
        .filter(|element| *element & NOT_COUNTED == 0);
    counting.count() as u64
}
