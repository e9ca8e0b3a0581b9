//! Reads a checkpoint: finds tiles by unit and element, whichever rank wrote them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use swapper::{Kind, Layout, TileRange, TileVisitor};

use super::write::file_name;
use super::{
    BUFFER_BYTES, CheckpointDescription, CheckpointError, DESCRIPTION, END, MAGIC, SavedFile,
};
use crate::fingerprint::Fingerprint;
use crate::run::dir::{Difference, differences};

/// Length of the fingerprint at a file's end.
pub(in crate::run) const FINGERPRINT_BYTES: u64 = 8;

/// Unit and first element of a range.
type Key = (u64, u64);

/// Open checkpoint. A file is opened and verified as a whole when a tile is needed that the opened files do
/// not contain.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    pub description: CheckpointDescription,
    /// Files not opened yet; the last one is next.
    pub(super) unread: Vec<SavedFile>,
    files: Vec<TileFile>,
    tiles: HashMap<Key, Place>,
}

/// Open file with a verified fingerprint.
#[derive(Debug)]
struct TileFile {
    path: PathBuf,
    reader: BufReader<File>,
}

#[derive(Debug)]
struct Place {
    /// Index in `Checkpoint::files`.
    file: usize,
    offset: u64,
    param_bytes: u64,
    state_bytes: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`. Reads the file of `rank` first: if the number of ranks has not changed,
    /// it contains all tiles of this rank.
    ///
    /// # Errors
    /// There is none, or its description is damaged.
    pub fn open(dir: &Path, rank: u32) -> Result<Self, CheckpointError> {
        let description = CheckpointDescription::read(dir).map_err(|error| match error {
            CheckpointError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                CheckpointError::Missing {
                    path: dir.to_owned(),
                    has: Vec::new(),
                }
            }
            error => error,
        })?;
        // A checkpoint must not refer to files outside its directory.
        let foreign =
            |file: &&SavedFile| Path::new(&file.name).file_name() != Some(file.name.as_ref());
        if let Some(file) = description.files.iter().find(foreign) {
            return Err(CheckpointError::damaged(
                dir,
                format!(
                    "it names the file {:?}, which is outside its directory",
                    file.name
                ),
            ));
        }
        let own_name = file_name(rank);
        let files = description.files.iter().cloned();
        let (own, mut unread): (Vec<_>, Vec<_>) = files.partition(|file| file.name == own_name);
        unread.reverse();
        unread.extend(own);
        Ok(Self {
            dir: dir.to_owned(),
            description,
            unread,
            files: Vec::new(),
            tiles: HashMap::new(),
        })
    }

    /// Opens the checkpoint in `dir` and returns it with the fingerprint of its description, which has those of its other files.
    /// `None` if a file with tiles is missing or has another length.
    pub fn whole(dir: &Path) -> Option<(Self, u64)> {
        let text = std::fs::read(dir.join(DESCRIPTION)).ok()?;
        let opened = Self::open(dir, 0).ok()?;
        opened.check_sizes().ok()?;
        Some((opened, Fingerprint::compute(&text)))
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Compares the checkpoint's layout with `layout`.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check_layout(&self, layout: &Value) -> Result<(), CheckpointError> {
        let saved = json!({"layout": self.description.layout});
        match differences(&saved, &json!({"layout": layout}))
            .into_iter()
            .next()
        {
            None => Ok(()),
            Some(Difference { what, was, now }) => Err(CheckpointError::Other {
                path: self.dir.clone(),
                what,
                was,
                now,
            }),
        }
    }

    /// Checks that all files exist and have the right length, without reading them.
    ///
    /// # Errors
    /// The first file that is missing or has another length.
    pub fn check_sizes(&self) -> Result<(), CheckpointError> {
        let mut files = self.description.files.iter();
        files.try_for_each(|file| check_size(&self.dir.join(&file.name), file).map(drop))
    }

    /// Verifies all files that contain the tiles of `ranges`. Calls `seen` with the number of bytes read.
    ///
    /// # Errors
    /// A file is damaged or cannot be read, or the tiles do not exist.
    pub fn check(
        &mut self,
        ranges: &[TileRange],
        seen: &mut dyn FnMut(u64),
    ) -> Result<(), CheckpointError> {
        ranges
            .iter()
            .try_for_each(|range| self.find(range, seen).map(drop))
    }

    /// Reads the tiles of `range`.
    ///
    /// # Errors
    /// The checkpoint cannot be read, is damaged, or has no such tiles or tiles of another length.
    pub fn tile(
        &mut self,
        range: &TileRange,
        param: &mut [u8],
        state: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let key = self.find(range, &mut |_| {})?;
        let place = &self.tiles[&key];
        let saved = (place.param_bytes, place.state_bytes);
        let expected = (param.len() as u64, state.len() as u64);
        if saved != expected {
            let message = format!(
                "expected tiles of {} and {} bytes, found {} and {}",
                expected.0, expected.1, saved.0, saved.1
            );
            return Err(CheckpointError::damaged(
                &self.files[place.file].path,
                message,
            ));
        }
        let TileFile { path, reader } = &mut self.files[place.file];
        // Tiles were mostly written in order, so a relative seek usually stays within the buffer.
        let at = reader
            .stream_position()
            .map_err(CheckpointError::io("read", path))?;
        reader
            .seek_relative(place.offset as i64 - at as i64)
            .and_then(|()| reader.read_exact(param))
            .and_then(|()| reader.read_exact(state))
            .map_err(CheckpointError::io("read", path))
    }

    /// Calls `see` with every range of `layout`, in the order of units and elements.
    ///
    /// # Errors
    /// Same as [`Self::tile`].
    pub fn visit(&mut self, layout: &Layout, see: &mut TileVisitor) -> Result<(), CheckpointError> {
        let mut contents = [Vec::new(), Vec::new()];
        for (range, number) in layout.ranges().iter().zip(0..) {
            for kind in Kind::STORED {
                contents[kind as usize].resize(layout.content_bytes(kind, number), 0);
            }
            let [param, state] = &mut contents;
            self.tile(range, param, state)?;
            see(range, param, state);
        }
        Ok(())
    }

    /// Opens files until one contains the tiles of `range`.
    fn find(
        &mut self,
        range: &TileRange,
        seen: &mut dyn FnMut(u64),
    ) -> Result<Key, CheckpointError> {
        let key = (range.unit as u64, range.elems.start);
        while !self.tiles.contains_key(&key) {
            let Some(file) = self.unread.pop() else {
                let (unit, elem) = key;
                let message = format!("it has no tile of unit {unit} from element {elem} on");
                return Err(CheckpointError::damaged(&self.dir, message));
            };
            self.index(&file, seen)?;
        }
        Ok(key)
    }

    /// Verifies a file and records the positions of its tiles.
    fn index(
        &mut self,
        file: &SavedFile,
        seen: &mut dyn FnMut(u64),
    ) -> Result<(), CheckpointError> {
        let path = self.dir.join(&file.name);
        check_fingerprint(&path, file, seen)?;
        let opened = File::open(&path).map_err(CheckpointError::io("read", &path))?;
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, opened);
        let tiles = match read_places(&mut reader, self.files.len()) {
            Ok(tiles) => tiles,
            Err(Unusable::Io(source)) => return Err(CheckpointError::io("read", &path)(source)),
            Err(Unusable::Wrong(message)) => return Err(CheckpointError::damaged(&path, message)),
        };
        self.tiles.extend(tiles);
        self.files.push(TileFile { path, reader });
        Ok(())
    }
}

/// Opens a file after checking its length.
fn check_size(path: &Path, says: &SavedFile) -> Result<File, CheckpointError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(CheckpointError::damaged(path, "the file is missing"));
        }
        opened => opened.map_err(CheckpointError::io("read", path))?,
    };
    let metadata = file.metadata().map_err(CheckpointError::io("read", path))?;
    if metadata.len() != says.bytes || says.bytes < FINGERPRINT_BYTES {
        let message = format!("expected {} bytes, found {}", says.bytes, metadata.len());
        return Err(CheckpointError::damaged(path, message));
    }
    Ok(file)
}

/// Reads the whole file and checks its fingerprint, so that no tile of a damaged file is used.
fn check_fingerprint(
    path: &Path,
    says: &SavedFile,
    seen: &mut dyn FnMut(u64),
) -> Result<(), CheckpointError> {
    let mut file = check_size(path, says)?;
    let mut left = says.bytes - FINGERPRINT_BYTES;
    let mut hash = Fingerprint::default();
    let mut buffer = vec![0; BUFFER_BYTES];
    while left > 0 {
        let part = &mut buffer[..BUFFER_BYTES.min(left as usize)];
        file.read_exact(part)
            .map_err(CheckpointError::io("read", path))?;
        hash.add(part);
        left -= part.len() as u64;
        seen(part.len() as u64);
    }
    let (own, found) = (
        number(&mut file).map_err(CheckpointError::io("read", path))?,
        hash.finish(),
    );
    for expected in [own, says.fingerprint] {
        if expected != found {
            let message = format!("expected fingerprint {expected:016x}, found {found:016x}");
            return Err(CheckpointError::damaged(path, message));
        }
    }
    Ok(())
}

/// Reason why a file with the right fingerprint cannot be used.
enum Unusable {
    Io(std::io::Error),
    Wrong(String),
}

impl From<std::io::Error> for Unusable {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Finds the tiles of a file and skips their contents.
fn read_places(reader: &mut BufReader<File>, file: usize) -> Result<Vec<(Key, Place)>, Unusable> {
    let mut magic = [0u8; 8];
    reader.read_exact(&mut magic)?;
    if &magic != MAGIC {
        return Err(Unusable::Wrong("it is not a checkpoint file".into()));
    }
    let mut tiles = Vec::new();
    loop {
        let unit = number(reader)?;
        if unit == END {
            return Ok(tiles);
        }
        let [elem, param_bytes, state_bytes] = [number(reader)?, number(reader)?, number(reader)?];
        let offset = reader.stream_position()?;
        let bytes = param_bytes
            .checked_add(state_bytes)
            .and_then(|bytes| i64::try_from(bytes).ok())
            .ok_or_else(|| {
                Unusable::Wrong(format!("its tile of {param_bytes} bytes is too large"))
            })?;
        reader.seek_relative(bytes)?;
        let place = Place {
            file,
            offset,
            param_bytes,
            state_bytes,
        };
        tiles.push(((unit, elem), place));
    }
}

fn number(reader: &mut impl Read) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    reader.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
