//! Saves of runs without a store: all tiles and the run's state in one file, made atomically, the last two kept.
//!
//! ```text
//!   checkpoint/STEP.ckpt   "OFFLCKP1" | version u32 | blob bytes u32 | blob | (tile bytes u64 | tile)... | u64::MAX | fingerprint u64
//! ```
//!
//! Numbers are little endian; the fingerprint covers all before it. A file gets its name when all of it is on the drive, so a
//! crash leaves the file before. Reading checks the fingerprint first: a damaged file is named, and the one before may be used
//! by removing it.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::folder::make_folder;
use crate::fingerprint::Fingerprint;

const MAGIC: &[u8; 8] = b"OFFLCKP1";
const VERSION: u32 = 1;
/// Where the next tile's length would be: a length that no tile has.
const END: u64 = u64::MAX;
const KEPT: usize = 2;
const BLOB_BYTES_MAX: u32 = 1 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// Why a save or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {verb} the checkpoint {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the checkpoint {} is damaged: {message}. Remove it to go on from the one before, or start again with --fresh", path.display())]
    Damaged { path: PathBuf, message: String },
}

/// The checkpoints of a run.
pub struct Checkpoints {
    folder: PathBuf,
}

/// One checkpoint, checked, open at its first tile.
pub struct Checkpoint {
    path: PathBuf,
    reader: BufReader<File>,
    /// The run's state.
    pub blob: Vec<u8>,
}

impl Checkpoints {
    /// Those in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Saves step `step`. `tiles` is called once and hands every tile to its argument, in the order they will be read back.
    ///
    /// # Errors
    /// The drive is full or fails; the checkpoint before stays.
    pub fn save<E: From<CheckpointError>>(
        &self,
        step: u64,
        blob: &[u8],
        tiles: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = self.folder.join(format!("{step:012}.ckpt"));
        let temporary = self.folder.join("new");
        let failed = |verb, path: &Path| {
            let path = path.to_path_buf();
            move |source| CheckpointError::Io { verb, path, source }
        };
        make_folder(&self.folder).map_err(failed("make the folder of", &path))?;
        let file = File::create(&temporary).map_err(failed("write", &temporary))?;
        let mut out = Output {
            writer: BufWriter::with_capacity(BUFFER_BYTES, file),
            hash: Fingerprint::default(),
            error: None,
        };
        out.add(MAGIC);
        out.add(&VERSION.to_le_bytes());
        out.add(
            &u32::try_from(blob.len())
                .expect("a short blob")
                .to_le_bytes(),
        );
        out.add(blob);
        tiles(&mut |bytes: &[u8]| {
            out.add(&(bytes.len() as u64).to_le_bytes());
            out.add(bytes);
        })?;
        out.add(&END.to_le_bytes());
        out.finish().map_err(failed("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(failed("name", &path))?;
        File::open(&self.folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed("flush the folder of", &path))?;
        for old in self.list()?.iter().rev().skip(KEPT) {
            fs::remove_file(old).map_err(failed("remove", old))?;
        }
        Ok(())
    }

    /// The newest checkpoint, if there is one.
    ///
    /// # Errors
    /// It cannot be read or is damaged.
    pub fn newest(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        match self.list()?.pop() {
            None => Ok(None),
            Some(path) => Checkpoint::open(path).map(Some),
        }
    }

    /// Oldest first.
    fn list(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let failed = |source| CheckpointError::Io {
            verb: "list the folder of",
            path: self.folder.clone(),
            source,
        };
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed(source)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "ckpt")
            {
                paths.push(path);
            }
        }
        paths.sort_unstable();
        Ok(paths)
    }
}

impl Checkpoint {
    fn open(path: PathBuf) -> Result<Self, CheckpointError> {
        let failed = |source| CheckpointError::Io {
            verb: "read",
            path: path.clone(),
            source,
        };
        let damaged = |message: String| CheckpointError::Damaged {
            path: path.clone(),
            message,
        };
        check_fingerprint(&path)?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, File::open(&path).map_err(failed)?);
        let mut head = [0u8; 16];
        reader.read_exact(&mut head).map_err(failed)?;
        let version = u32::from_le_bytes(head[8..12].try_into().expect("four bytes"));
        let blob_bytes = u32::from_le_bytes(head[12..].try_into().expect("four bytes"));
        if &head[..8] != MAGIC || version != VERSION || blob_bytes > BLOB_BYTES_MAX {
            return Err(damaged(format!("it is no checkpoint of version {VERSION}")));
        }
        let mut blob = vec![0; blob_bytes as usize];
        reader.read_exact(&mut blob).map_err(failed)?;
        Ok(Self { path, reader, blob })
    }

    /// Reads the next tile into `tile`, which must have the length it was saved with.
    ///
    /// # Errors
    /// There are no more tiles, or the next one has another length: another layout.
    pub fn next_tile(&mut self, tile: &mut [u8]) -> Result<(), CheckpointError> {
        self.expect_length(tile.len() as u64)?;
        self.reader
            .read_exact(tile)
            .map_err(|source| self.failed(source))
    }

    /// Checks that all tiles have been read.
    ///
    /// # Errors
    /// There are more: another layout.
    pub fn end(mut self) -> Result<(), CheckpointError> {
        self.expect_length(END)
    }

    fn expect_length(&mut self, expected: u64) -> Result<(), CheckpointError> {
        let words = |length| match length {
            END => "no more tiles".to_owned(),
            bytes => format!("a tile of {bytes} bytes"),
        };
        let mut length = [0; 8];
        self.reader
            .read_exact(&mut length)
            .map_err(|source| self.failed(source))?;
        let found = u64::from_le_bytes(length);
        if found == expected {
            return Ok(());
        }
        Err(CheckpointError::Damaged {
            path: self.path.clone(),
            message: format!("{} expected, {} found", words(expected), words(found)),
        })
    }

    fn failed(&self, source: std::io::Error) -> CheckpointError {
        CheckpointError::Io {
            verb: "read",
            path: self.path.clone(),
            source,
        }
    }
}

/// Reads the whole file once: nothing of a damaged one is taken.
fn check_fingerprint(path: &Path) -> Result<(), CheckpointError> {
    let failed = |source| CheckpointError::Io {
        verb: "read",
        path: path.into(),
        source,
    };
    let damaged = |message: String| CheckpointError::Damaged {
        path: path.into(),
        message,
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut left = file
        .metadata()
        .map_err(failed)?
        .len()
        .checked_sub(8)
        .ok_or_else(|| damaged("it is too short".into()))?;
    let mut hash = Fingerprint::default();
    let mut buffer = vec![0; BUFFER_BYTES];
    while left > 0 {
        let part = &mut buffer[..BUFFER_BYTES.min(left as usize)];
        file.read_exact(part).map_err(failed)?;
        hash.add(part);
        left -= part.len() as u64;
    }
    let mut expected = [0; 8];
    file.read_exact(&mut expected).map_err(failed)?;
    let (expected, found) = (u64::from_le_bytes(expected), hash.finish());
    if expected == found {
        Ok(())
    } else {
        Err(damaged(format!(
            "fingerprint {expected:016x} expected, {found:016x} found"
        )))
    }
}

/// Keeps the first error, so that tiles can be handed over without asking after each.
struct Output {
    writer: BufWriter<File>,
    hash: Fingerprint,
    error: Option<std::io::Error>,
}

impl Output {
    fn add(&mut self, bytes: &[u8]) {
        if self.error.is_none() {
            self.hash.add(bytes);
            self.error = self.writer.write_all(bytes).err();
        }
    }

    fn finish(mut self) -> std::io::Result<()> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.writer.write_all(&self.hash.finish().to_le_bytes())?;
        self.writer
            .into_inner()
            .map_err(std::io::IntoInnerError::into_error)?
            .sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(checkpoints: &Checkpoints, step: u64) {
        let tiles = |take: &mut dyn FnMut(&[u8])| {
            take(&[step as u8; 100]);
            take(&[7; 5]);
            Ok::<(), CheckpointError>(())
        };
        checkpoints
            .save(step, format!("blob {step}").as_bytes(), tiles)
            .unwrap();
    }

    #[test]
    fn the_newest_of_two_kept_checkpoints_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path().join("checkpoint"));
        assert!(checkpoints.newest().unwrap().is_none());
        for step in 1..=4 {
            save(&checkpoints, step);
        }
        assert_eq!(checkpoints.list().unwrap().len(), KEPT);
        let mut newest = checkpoints.newest().unwrap().unwrap();
        assert_eq!(newest.blob, b"blob 4");
        let (mut one, mut two) = ([0; 100], [0; 5]);
        newest.next_tile(&mut one).unwrap();
        newest.next_tile(&mut two).unwrap();
        assert_eq!((one, two), ([4; 100], [7; 5]));
        newest.end().unwrap();
    }

    #[test]
    fn other_tiles_than_expected_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path().to_path_buf());
        save(&checkpoints, 1);
        let newest = || checkpoints.newest().unwrap().unwrap();
        let refused = |result: Result<(), CheckpointError>| result.unwrap_err().to_string();
        let text = refused(newest().next_tile(&mut [0; 99]));
        assert!(
            text.contains("a tile of 99 bytes expected, a tile of 100 bytes found"),
            "{text}"
        );
        let text = refused(newest().end());
        assert!(
            text.contains("no more tiles expected, a tile of 100 bytes found"),
            "{text}"
        );
        let mut whole = newest();
        whole.next_tile(&mut [0; 100]).unwrap();
        whole.next_tile(&mut [0; 5]).unwrap();
        let text = refused(whole.next_tile(&mut [0; 5]));
        assert!(
            text.contains("a tile of 5 bytes expected, no more tiles found"),
            "{text}"
        );
    }

    #[test]
    fn a_flipped_bit_anywhere_is_found_and_the_file_named() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path().to_path_buf());
        save(&checkpoints, 1);
        let path = checkpoints.list().unwrap().remove(0);
        let good = fs::read(&path).unwrap();
        for byte in 0..good.len() {
            let mut bad = good.clone();
            bad[byte] ^= 0x10;
            fs::write(&path, &bad).unwrap();
            let text = checkpoints.newest().err().unwrap().to_string();
            assert!(
                text.contains("is damaged") && text.contains("000000000001.ckpt"),
                "{text}"
            );
        }
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).unwrap();
            assert!(checkpoints.newest().is_err(), "cut to {length}");
        }
    }

    #[test]
    fn a_save_that_fails_leaves_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path().to_path_buf());
        save(&checkpoints, 1);
        let fails = |_: &mut dyn FnMut(&[u8])| -> Result<(), CheckpointError> {
            Err(CheckpointError::Damaged {
                path: "x".into(),
                message: "x".into(),
            })
        };
        assert!(checkpoints.save(2, b"", fails).is_err());
        assert_eq!(checkpoints.newest().unwrap().unwrap().blob, b"blob 1");
    }
}
