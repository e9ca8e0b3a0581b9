//! Finds and reads the text files of a run: what is named, and what lies in named folders, in one fixed order.

use std::io::Read;
use std::path::{Path, PathBuf};

/// Text is held in memory; more than this is no text for bytes as tokens.
const TEXT_BYTES_MAX: u64 = 8 << 30;
/// Files in folders, and how deep: a loop of mounts must not go on for ever.
const FILES_MAX: usize = 1_000_000;
const DEPTH_MAX: usize = 64;
/// A file of a folder counts as text when this much of its start is UTF-8 without zero bytes.
const PROBE_BYTES: usize = 8192;

/// Why a run has no text.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("data.files: cannot read {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("data.files: {} is empty: write some text into it, or name another file", path.display())]
    Empty { path: PathBuf },
    #[error("data.files: {} is neither a file nor a folder: name one, with text in it", path.display())]
    NoFile { path: PathBuf },
    #[error("data.files: {} has no text file in it", path.display())]
    NoText { path: PathBuf },
    #[error("data.files: {} has more than {FILES_MAX} files or folders {DEPTH_MAX} deep: name a smaller folder", path.display())]
    TooMany { path: PathBuf },
    #[error("data.files: more than {} GiB of text", TEXT_BYTES_MAX >> 30)]
    TooLarge,
    #[error(
        "data.files: the {part} has {bytes} bytes, one window of train.seq_len = {seq_len} tokens needs {needed}: give more text or shorter windows"
    )]
    TooShort {
        part: &'static str,
        bytes: usize,
        needed: usize,
        seq_len: usize,
    },
}

/// What was read.
pub(super) struct Text {
    pub(super) bytes: Vec<u8>,
    pub(super) files: usize,
}

/// Reads `paths` in the order given. A file is taken as it is. A folder stands for the text files below it, sorted by path;
/// hidden files and folders, links and binary files are passed over.
pub(super) fn read(paths: &[PathBuf]) -> Result<Text, DataError> {
    let mut text = Text {
        bytes: Vec::new(),
        files: 0,
    };
    for path in paths {
        if path.is_dir() {
            let before = text.files;
            for file in files_below(path)? {
                append(&file, true, &mut text)?;
            }
            if text.files == before {
                return Err(DataError::NoText { path: path.clone() });
            }
        } else {
            append(path, false, &mut text)?;
        }
    }
    Ok(text)
}

fn append(path: &Path, in_folder: bool, text: &mut Text) -> Result<(), DataError> {
    let failed = |source| DataError::Read {
        path: path.into(),
        source,
    };
    // Devices and pipes never end, or never begin.
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(DataError::NoFile { path: path.into() });
    }
    let left_bytes = TEXT_BYTES_MAX - text.bytes.len() as u64;
    if metadata.len() > left_bytes {
        return Err(DataError::TooLarge);
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut content = Vec::new();
    // A file that grows while it is read, or tells no length, ends here too.
    let mut bounded = file.take(left_bytes + 1);
    bounded.read_to_end(&mut content).map_err(failed)?;
    if content.len() as u64 > left_bytes {
        return Err(DataError::TooLarge);
    }
    if in_folder && !is_text(&content) {
        return Ok(());
    }
    if content.is_empty() {
        return Err(DataError::Empty { path: path.into() });
    }
    text.bytes.extend_from_slice(&content);
    text.files += 1;
    Ok(())
}

/// Not empty, no zero byte, and UTF-8 as far as the probe goes (a character cut by its end is fine).
fn is_text(content: &[u8]) -> bool {
    let probe = &content[..content.len().min(PROBE_BYTES)];
    let utf8 = match std::str::from_utf8(probe) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none() && content.len() > probe.len(),
    };
    !probe.is_empty() && utf8 && !probe.contains(&0)
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut folders = vec![(folder.to_path_buf(), 0)];
    while let Some((current, depth)) = folders.pop() {
        if depth > DEPTH_MAX || files.len() + folders.len() > FILES_MAX {
            return Err(DataError::TooMany {
                path: folder.into(),
            });
        }
        let failed = |source| DataError::Read {
            path: current.clone(),
            source,
        };
        for entry in std::fs::read_dir(&current).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                folders.push((entry.path(), depth + 1));
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort_unstable();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_stands_for_its_text_files_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("b/.hidden")).unwrap();
        for (name, content) in [
            ("c.txt", "3"),
            ("b/two", "2"),
            ("a.rs", "1"),
            ("b/.hidden/x", "h"),
            (".x", "h"),
            ("bin", "\0"),
            ("empty", ""),
        ] {
            std::fs::write(at(name), content).unwrap();
        }
        let text = read(&[folder.path().into()]).unwrap();
        assert_eq!((text.bytes.as_slice(), text.files), (b"123".as_slice(), 3));
    }

    #[test]
    fn an_empty_file_or_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(
            read(&[folder.path().into()]),
            Err(DataError::NoText { .. })
        ));
        let empty = folder.path().join("empty");
        std::fs::write(&empty, "").unwrap();
        assert!(
            read(&[empty])
                .err()
                .unwrap()
                .to_string()
                .contains("empty is empty: write some text into it")
        );
        let missing = folder.path().join("missing");
        assert!(
            read(&[missing])
                .err()
                .unwrap()
                .to_string()
                .contains("missing")
        );
    }
}
