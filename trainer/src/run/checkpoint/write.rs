//! Writing one rank's file of a checkpoint.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use swapper::TileRange;

use super::{
    BUFFER_BYTES, CheckpointError, Checkpoints, END, MAGIC, VERSION, first_path, part_path,
};
use crate::fingerprint::Fingerprint;
use crate::run::folder::make_folder;

/// A file with all of its tiles, which is not of a checkpoint yet.
pub struct Begun {
    output: Output,
    temporary: PathBuf,
    path: PathBuf,
}

impl Checkpoints {
    /// Writes `rank`'s file of step `step`. `tiles` is called once and hands every tile of the rank (range, `param`, `state`)
    /// to its argument. `blob` is the run's state: rank 0's counts.
    ///
    /// # Errors
    /// The drive is full or fails; the checkpoint before stays.
    pub fn begin<E: From<CheckpointError>>(
        &self,
        step: u64,
        rank: u32,
        blob: &[u8],
        tiles: impl FnOnce(&mut dyn FnMut(&TileRange, &[u8], &[u8])) -> Result<(), E>,
    ) -> Result<Begun, E> {
        let step = format!("{step:012}");
        let path = match rank {
            0 => first_path(&self.folder, &step),
            rank => part_path(&self.folder, &step, rank),
        };
        let temporary = self.folder.join(format!("{rank}.new"));
        make_folder(&self.folder).map_err(CheckpointError::io("make the folder of", &path))?;
        let file = File::create(&temporary).map_err(CheckpointError::io("write", &temporary))?;
        let mut output = Output {
            writer: BufWriter::with_capacity(BUFFER_BYTES, file),
            hash: Fingerprint::default(),
            error: None,
        };
        output.add(MAGIC);
        output.add(&VERSION.to_le_bytes());
        let blob_bytes = u32::try_from(blob.len()).expect("a short blob");
        output.add(&blob_bytes.to_le_bytes());
        output.add(blob);
        tiles(&mut |range, param, state| {
            output.number(range.unit as u64);
            output.number(range.elems.start);
            output.number(param.len() as u64);
            output.number(state.len() as u64);
            output.add(param);
            output.add(state);
        })?;
        output.number(END);
        let begun = Begun {
            output,
            temporary,
            path,
        };
        Ok(begun.checked()?)
    }
}

impl Begun {
    /// Puts the file on the drive under its name, and answers its fingerprint. Rank 0 calls it when all others have, with
    /// their fingerprints in the order of ranks: then the checkpoint is there. The others' files have no parts.
    ///
    /// # Errors
    /// The drive is full or fails; the checkpoint before stays.
    pub fn finish(mut self, parts: &[u64]) -> Result<u64, CheckpointError> {
        self.output.number(parts.len() as u64);
        for part in parts {
            self.output.number(*part);
        }
        let Self {
            output,
            temporary,
            path,
        } = self;
        let fingerprint = output
            .finish()
            .map_err(CheckpointError::io("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(CheckpointError::io("name", &path))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(CheckpointError::io("flush the folder of", &path))?;
        Ok(fingerprint)
    }

    /// A drive that is full is told before the other ranks are asked for anything.
    fn checked(mut self) -> Result<Self, CheckpointError> {
        self.output
            .flush()
            .map_err(CheckpointError::io("write", &self.temporary))?;
        Ok(self)
    }
}

/// Keeps the first error, so that tiles can be handed over without asking after each.
struct Output {
    writer: BufWriter<File>,
    hash: Fingerprint,
    error: Option<std::io::Error>,
}

impl Output {
    fn number(&mut self, number: u64) {
        self.add(&number.to_le_bytes());
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.error.is_none() {
            self.hash.add(bytes);
            self.error = self.writer.write_all(bytes).err();
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self.error.take() {
            Some(error) => Err(error),
            None => self.writer.flush(),
        }
    }

    /// The fingerprint of all that was added, which is then on the drive, and itself after it.
    fn finish(mut self) -> std::io::Result<u64> {
        self.flush()?;
        let fingerprint = self.hash.finish();
        self.writer.write_all(&fingerprint.to_le_bytes())?;
        self.writer
            .into_inner()
            .map_err(std::io::IntoInnerError::into_error)?
            .sync_all()?;
        Ok(fingerprint)
    }
}
