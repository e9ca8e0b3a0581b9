//! Moves the device files of a private store to other directories, so that a crash at any time leaves a whole store at the old or at
//! the new place.
//!
//! ```text
//!   lock ─▶ copied to FILE.moving, synced ─▶ renamed to FILE ─▶ (the caller records the new place) ─▶ old files removed
//! ```

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::daemon::{link_of, lock};
use super::{StoreError, check_dirs, file_system};

/// Bytes that are copied at a time.
const PART_BYTES: usize = 8 << 20;

/// Files that are being moved. They are locked, so no daemon serves them.
pub struct Relocation {
    files: Vec<FileMove>,
}

struct FileMove {
    from: PathBuf,
    to: PathBuf,
    /// The open file, which holds the lock.
    file: File,
    bytes: u64,
    /// Whether both places are on one file system, where the file is renamed.
    renames: bool,
}

impl Relocation {
    /// Locks `files` and checks that each of `dirs` can hold the file at its place in the list.
    ///
    /// # Errors
    /// A file is missing or in use; a directory cannot hold its file, or holds one of this name.
    pub fn new(files: &[PathBuf], dirs: &[PathBuf]) -> Result<Self, StoreError> {
        let mut moved = Vec::new();
        for (from, dir) in files.iter().zip(dirs) {
            let to = dir.join(from.file_name().expect("a device file has a name"));
            if to == *from {
                continue;
            }
            if to.symlink_metadata().is_ok() {
                return Err(StoreError::Exists { path: to });
            }
            let file = File::open(from).map_err(failed("open", from))?;
            lock(&file).map_err(|_| StoreError::Busy { path: from.clone() })?;
            let bytes = file
                .metadata()
                .map_err(failed("read the size of", from))?
                .len();
            let numbers = [file_system(from), file_system(dir)].map(Result::ok);
            let renames = numbers[0].is_some() && numbers[0] == numbers[1];
            check_dirs(std::slice::from_ref(&to), if renames { 0 } else { bytes })?;
            moved.push(FileMove {
                from: from.clone(),
                to,
                file,
                bytes,
                renames,
            });
        }
        Ok(Self { files: moved })
    }

    /// Bytes to copy.
    pub fn bytes(&self) -> u64 {
        let copied = self.files.iter().filter(|moved| !moved.renames);
        copied.map(|moved| moved.bytes).sum()
    }

    /// Copies the files, and tells `progress` the bytes. They have their new names at the end.
    ///
    /// # Errors
    /// A drive is full or fails. The old files are unchanged.
    pub fn copy(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        for moved in self.files.iter_mut().filter(|moved| !moved.renames) {
            let path = moving(&moved.to);
            if let Err(error) = copy_to(&mut moved.file, &path, progress) {
                // The error says more than what is left.
                let _ = fs::remove_file(&path);
                return Err(failed("write", &path)(error));
            }
        }
        for moved in &self.files {
            let from = match moved.renames {
                true => moved.from.clone(),
                false => moving(&moved.to),
            };
            fs::rename(&from, &moved.to).map_err(failed("rename", &from))?;
            for dir in [moved.to.parent(), moved.from.parent()]
                .into_iter()
                .flatten()
            {
                (File::open(dir).and_then(|dir| dir.sync_all())).map_err(failed("sync", dir))?;
            }
        }
        Ok(())
    }

    /// Removes the old files and their links, once the new place is recorded.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove_old(self) -> Result<(), StoreError> {
        for moved in &self.files {
            for path in [moved.from.clone(), link_of(&moved.from)] {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(failed("remove", &path)(error));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Name of a file until it is copied.
fn moving(to: &Path) -> PathBuf {
    to.with_extension("moving")
}

fn copy_to(from: &mut File, path: &Path, progress: &mut dyn FnMut(u64)) -> std::io::Result<()> {
    let mut to = File::create(path)?;
    let mut part = vec![0; PART_BYTES];
    loop {
        match from.read(&mut part)? {
            0 => break,
            count => {
                to.write_all(&part[..count])?;
                progress(count as u64);
            }
        }
    }
    to.sync_all()
}

fn failed<'a>(verb: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> StoreError + 'a {
    move |source| StoreError::Io {
        verb,
        path: path.to_owned(),
        source,
    }
}
