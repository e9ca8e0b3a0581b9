//! Writes one rank's file of a checkpoint.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use swapper::TileRange;

use super::{BUFFER_BYTES, CheckpointError, END, MAGIC, SavedFile};
use crate::fingerprint::Fingerprint;

/// Writes tiles into a file, in any order.
pub struct TileWriter {
    writer: BufWriter<File>,
    hash: Fingerprint,
    bytes: u64,
    path: PathBuf,
}

impl TileWriter {
    /// Creates `rank`'s file in `dir`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(dir: &Path, rank: u32) -> Result<Self, CheckpointError> {
        let path = dir.join(file_name(rank));
        let file = File::create(&path).map_err(CheckpointError::io("write", &path))?;
        let mut writer = Self {
            writer: BufWriter::with_capacity(BUFFER_BYTES, file),
            hash: Fingerprint::default(),
            bytes: 0,
            path,
        };
        writer.write(MAGIC)?;
        Ok(writer)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the tiles of `range`.
    ///
    /// # Errors
    /// The drive is full or fails.
    pub fn add(
        &mut self,
        range: &TileRange,
        param: &[u8],
        state: &[u8],
    ) -> Result<(), CheckpointError> {
        let numbers = [
            range.unit as u64,
            range.elems.start,
            param.len() as u64,
            state.len() as u64,
        ];
        for number in numbers {
            self.write(&number.to_le_bytes())?;
        }
        self.write(param)?;
        self.write(state)
    }

    /// Completes and syncs the file.
    ///
    /// # Errors
    /// The drive is full or fails.
    pub fn finish(mut self) -> Result<SavedFile, CheckpointError> {
        self.write(&END.to_le_bytes())?;
        let fingerprint = self.hash.clone().finish();
        self.write(&fingerprint.to_le_bytes())?;
        let (bytes, path) = (self.bytes, self.path);
        let on_drive = |writer: BufWriter<File>| {
            let file = writer.into_inner()?;
            file.sync_all()?;
            // Frees the page cache, since the file is not read soon. This is only advice, so a failure does
            // not matter.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
            Ok(())
        };
        on_drive(self.writer).map_err(|source| CheckpointError::Write {
            path: path.clone(),
            written_bytes: bytes,
            source,
        })?;
        let name = path.file_name().expect("a file has a name");
        Ok(SavedFile {
            name: name.to_string_lossy().into_owned(),
            bytes,
            fingerprint,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hash.add(bytes);
        self.writer
            .write_all(bytes)
            .map_err(|source| CheckpointError::Write {
                path: self.path.clone(),
                written_bytes: self.bytes,
                source,
            })?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

pub(super) fn file_name(rank: u32) -> String {
    format!("tiles.{rank}")
}
