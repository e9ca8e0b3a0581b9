//! Reading a checkpoint: tiles by their place in the model, whichever rank wrote them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use swapper::TileRange;

use super::{
    BLOB_BYTES_MAX, BUFFER_BYTES, CheckpointError, END, MAGIC, VERSION, part_path, step_of,
};
use crate::fingerprint::Fingerprint;

/// Of the fingerprint at a file's end.
const FINGERPRINT_BYTES: u64 = 8;

/// One checkpoint. Files are opened, and checked as a whole, when a tile is asked for that those before do not have.
pub struct Checkpoint {
    /// The file that says which others there are.
    first: PathBuf,
    /// The run's state.
    pub blob: Vec<u8>,
    /// Files of the other ranks that were not looked into yet, and their fingerprints; the next one is the last.
    pub(super) unread: Vec<(PathBuf, u64)>,
    files: Vec<PartFile>,
    /// By unit and first element.
    tiles: HashMap<(u64, u64), Place>,
}

/// A file whose fingerprint is right.
struct PartFile {
    path: PathBuf,
    reader: BufReader<File>,
}

struct Place {
    /// In `Checkpoint::files`.
    file: usize,
    offset: u64,
    param_bytes: u64,
    state_bytes: u64,
}

impl Checkpoint {
    pub(super) fn open(first: PathBuf, rank: u32) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self {
            blob: Vec::new(),
            unread: Vec::new(),
            files: Vec::new(),
            tiles: HashMap::new(),
            first: first.clone(),
        };
        let parts = checkpoint.read_file(&first, None)?;
        let folder = first.parent().unwrap_or(Path::new("."));
        let numbered = parts.into_iter().zip(1..).map(|(fingerprint, number)| {
            let path = part_path(folder, step_of(&first), number);
            (number, path, fingerprint)
        });
        // With as many ranks as before all of a rank's tiles are in its own file. It comes last, so it is read next.
        let (own, others): (Vec<_>, Vec<_>) = numbered.partition(|(number, ..)| *number == rank);
        let files = others.into_iter().rev().chain(own);
        checkpoint.unread = files
            .map(|(_, path, fingerprint)| (path, fingerprint))
            .collect();
        Ok(checkpoint)
    }

    /// Reads the tiles of `range`, which must have the lengths they were saved with.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or holds no such tiles: another layout.
    pub fn tile(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let key = (range.unit as u64, range.elems.start);
        while !self.tiles.contains_key(&key) {
            let Some((path, fingerprint)) = self.unread.pop() else {
                let (unit, elem) = key;
                let message = format!("it has no tile of unit {unit} from element {elem} on");
                return Err(self.damaged(&self.first, message));
            };
            self.read_file(&path, Some(fingerprint))?;
        }
        let place = &self.tiles[&key];
        let saved = (place.param_bytes, place.state_bytes);
        let expected = (param.len() as u64, state.len() as u64);
        if saved != expected {
            let message = format!(
                "tiles of {} and {} bytes expected, {} and {} found",
                expected.0, expected.1, saved.0, saved.1
            );
            return Err(self.damaged(&self.files[place.file].path, message));
        }
        let PartFile { path, reader } = &mut self.files[place.file];
        // Tiles come in order: mostly the next one starts where the last one ended, a few words on.
        let at = reader
            .stream_position()
            .map_err(CheckpointError::io("read", path))?;
        reader
            .seek_relative(place.offset as i64 - at as i64)
            .and_then(|()| reader.read_exact(param))
            .and_then(|()| reader.read_exact(state))
            .map_err(CheckpointError::io("read", path))
    }

    /// Checks a file and takes up where its tiles are. Answers the fingerprints of the parts that it vouches for.
    fn read_file(
        &mut self,
        path: &Path,
        vouched: Option<u64>,
    ) -> Result<Vec<u64>, CheckpointError> {
        let found = self.check_fingerprint(path)?;
        if let Some(expected) = vouched
            && expected != found
        {
            let message = format!(
                "it is of another save: fingerprint {expected:016x} expected, {found:016x} found"
            );
            return Err(self.damaged(path, message));
        }
        let file = File::open(path).map_err(CheckpointError::io("read", path))?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, file);
        let file = self.files.len();
        let (blob, tiles, parts) = match read_contents(&mut reader, file) {
            Ok(contents) => contents,
            Err(Unusable::Io(source)) => return Err(CheckpointError::io("read", path)(source)),
            Err(Unusable::Wrong(message)) => return Err(self.damaged(path, message)),
        };
        if vouched.is_none() {
            self.blob = blob;
        }
        self.tiles.extend(tiles);
        self.files.push(PartFile {
            path: path.to_owned(),
            reader,
        });
        Ok(parts)
    }

    /// Reads the whole file once: nothing of a damaged one is taken.
    fn check_fingerprint(&self, path: &Path) -> Result<u64, CheckpointError> {
        let mut file = match File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(self.damaged(path, "the file is missing".into()));
            }
            opened => opened.map_err(CheckpointError::io("read", path))?,
        };
        let bytes = file
            .metadata()
            .map_err(CheckpointError::io("read", path))?
            .len();
        let Some(mut left) = bytes.checked_sub(FINGERPRINT_BYTES) else {
            return Err(self.damaged(path, "it is too short".into()));
        };
        let mut hash = Fingerprint::default();
        let mut buffer = vec![0; BUFFER_BYTES];
        while left > 0 {
            let part = &mut buffer[..BUFFER_BYTES.min(left as usize)];
            file.read_exact(part)
                .map_err(CheckpointError::io("read", path))?;
            hash.add(part);
            left -= part.len() as u64;
        }
        let expected = number(&mut file).map_err(CheckpointError::io("read", path))?;
        let found = hash.finish();
        if expected == found {
            return Ok(found);
        }
        let message = format!("fingerprint {expected:016x} expected, {found:016x} found");
        Err(self.damaged(path, message))
    }

    fn damaged(&self, path: &Path, message: String) -> CheckpointError {
        CheckpointError::Damaged {
            path: path.to_owned(),
            first: self.first.clone(),
            message,
        }
    }
}

/// Why a file with the right fingerprint cannot be used.
enum Unusable {
    Io(std::io::Error),
    Wrong(String),
}

impl From<std::io::Error> for Unusable {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

type Contents = (Vec<u8>, Vec<((u64, u64), Place)>, Vec<u64>);

/// The blob, where the tiles are, and the fingerprints of parts. The contents of tiles are passed over.
fn read_contents(reader: &mut BufReader<File>, file: usize) -> Result<Contents, Unusable> {
    let mut head = [0u8; 16];
    reader.read_exact(&mut head)?;
    let version = u32::from_le_bytes(head[8..12].try_into().expect("four bytes"));
    let blob_bytes = u32::from_le_bytes(head[12..].try_into().expect("four bytes"));
    if &head[..8] != MAGIC || version != VERSION || blob_bytes > BLOB_BYTES_MAX {
        return Err(Unusable::Wrong(format!(
            "it is no checkpoint of version {VERSION}"
        )));
    }
    let mut blob = vec![0; blob_bytes as usize];
    reader.read_exact(&mut blob)?;
    let mut tiles = Vec::new();
    loop {
        let unit = number(reader)?;
        if unit == END {
            break;
        }
        let [elem, param_bytes, state_bytes] = [number(reader)?, number(reader)?, number(reader)?];
        let offset = reader.stream_position()?;
        let bytes = param_bytes
            .checked_add(state_bytes)
            .and_then(|bytes| i64::try_from(bytes).ok())
            .ok_or_else(|| Unusable::Wrong(format!("a tile of {param_bytes} bytes")))?;
        reader.seek_relative(bytes)?;
        let place = Place {
            file,
            offset,
            param_bytes,
            state_bytes,
        };
        tiles.push(((unit, elem), place));
    }
    let count = number(reader)?;
    let mut parts = Vec::new();
    // Grows with what is there, not with what the count says.
    for _ in 0..count {
        parts.push(number(reader)?);
    }
    Ok((blob, tiles, parts))
}

fn number(reader: &mut impl Read) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    reader.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
