//! Finds a run's files: those named and those in named directories, in a fixed order.

use std::collections::HashMap;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::ending::{ending, is_gzip};
use super::open::open;
use super::{Format, SourceFile, first};
use crate::config::DataFile;
use crate::data::DataError;

/// Limits for the number of files in directories and for nesting, which stop the search in a cycle of mounts.
const FILES_MAX: usize = 1_000_000;
const DEPTH_MAX: usize = 64;
/// Bytes examined at the start of a file in a directory: it is text if these are UTF-8 without zero bytes.
const PROBE_BYTES: u64 = 8192;

/// Bytes of text for a byte of a file compressed with gzip, roughly.
const GZIP_RATIO: u64 = 3;

/// Files found.
#[derive(Debug, Default)]
pub(in crate::data) struct FoundFiles {
    pub(in crate::data) sources: Vec<SourceFile>,
    /// Number of files in directories that were skipped.
    pub(in crate::data) passed_over: usize,
}

impl FoundFiles {
    /// Returns whether all files are single documents. The last tokens are then reserved for evaluation, since
    /// there may be only one file.
    pub(in crate::data) fn are_whole(&self) -> bool {
        let mut sources = self.sources.iter();
        sources.all(|source| source.format.is_one_document())
    }

    /// Files of entry number `entry`.
    pub(in crate::data) fn sources_of_entry(
        &self,
        entry: usize,
    ) -> impl Iterator<Item = &SourceFile> {
        let sources = self.sources.iter();
        sources.filter(move |source| source.entry == entry)
    }

    /// Estimate of the bytes of all files if none were compressed with gzip.
    pub(in crate::data) fn unpacked_bytes(&self) -> u64 {
        let unpacked = self
            .sources
            .iter()
            .map(|source| match is_gzip(&source.path) {
                true => GZIP_RATIO * source.bytes,
                false => source.bytes,
            });
        unpacked.sum()
    }
}

/// Finds the files of `entries` in the given order. A named file is taken according to its extension. A
/// directory stands for all records and token id files below it, or, if it has none, for its text files; one
/// saved by `datasets` for its training split. They are sorted by path; hidden files and directories, links, empty and binary files are skipped.
pub(in crate::data) fn find(
    entries: &[DataFile],
    key: &'static str,
) -> Result<FoundFiles, DataError> {
    let mut found = FoundFiles::default();
    for (number, entry) in entries.iter().enumerate() {
        let before = found.sources.len();
        if entry.path.is_dir() {
            dir(&entry.path, key, &mut found)?;
        } else {
            found.sources.push(file(&entry.path, key)?);
        }
        for source in &mut found.sources[before..] {
            (source.entry, source.records) = (number, entry.format);
        }
    }
    let mut seen = HashMap::new();
    for source in &found.sources {
        if let Some(first) = seen.insert(source.identity, &source.path) {
            return Err(DataError::Twice {
                key,
                first: first.clone(),
                second: source.path.clone(),
            });
        }
    }
    Ok(found)
}

/// Examines a file that was named directly.
fn file(path: &Path, key: &'static str) -> Result<SourceFile, DataError> {
    let metadata = metadata(path, key)?;
    // Reading a device or a pipe may never end, or never begin.
    if !metadata.is_file() {
        return Err(DataError::NoFile {
            key,
            path: path.into(),
        });
    }
    let instead = match ending(path).as_str() {
        "gz" => {
            "unpack it first: only .jsonl.gz, .json.gz, .csv.gz, .tsv.gz and .txt.gz are read as they are"
        }
        "zst" | "bz2" | "xz" | "zip" | "tar" => "unpack it first",
        "bin" => "if it contains token ids, rename it to .u16 or .u32 according to their width",
        _ if metadata.len() == 0 => {
            return Err(DataError::Empty {
                key,
                path: path.into(),
            });
        }
        _ => return Ok(source(path, &metadata)),
    };
    Err(DataError::Format {
        key,
        path: path.into(),
        instead,
    })
}

fn dir(path: &Path, key: &'static str, found: &mut FoundFiles) -> Result<(), DataError> {
    if let Some(dict) = json(&path.join("dataset_dict.json"), key)? {
        return split(path, &dict, key, found);
    }
    let mut sources = Vec::new();
    let mut passed_over = 0;
    let saved = saved(path, key)?;
    for file in files_below(path, key)? {
        // Besides its tables, a saved data set has files that describe it, and temporary ones.
        if saved.as_ref().is_some_and(|saved| !saved.contains(&file)) {
            passed_over += 1;
            continue;
        }
        let mut source = source(&file, &metadata(&file, key)?);
        // Such a file among others may as well be text, for example of a program.
        let unsure = matches!(source.format, Format::Array | Format::Separated);
        if unsure && !matches!(first([&source], key, false, false), Ok(Some(_))) {
            source.format = Format::Plain;
        }
        if source.bytes == 0 {
            passed_over += 1;
        } else {
            sources.push(source);
        }
    }
    // Text files beside records usually describe them.
    let records = sources.iter().any(|source| source.format != Format::Plain);
    let splits = sources
        .iter()
        .any(|source| split_of(&source.path) == Some(Split::Train));
    let before = found.sources.len();
    for source in sources {
        let wanted = if splits && split_of(&source.path) == Some(Split::Other) {
            false
        } else if records {
            source.format != Format::Plain
        } else {
            is_text(&source, key)?
        };
        if wanted {
            found.sources.push(source);
        } else {
            passed_over += 1;
        }
    }
    found.passed_over += passed_over;
    if found.sources.len() == before {
        return Err(DataError::NoText {
            key,
            path: path.into(),
        });
    }
    Ok(())
}

/// Finds the files of the training split of a dictionary of data sets, which `datasets` saved.
fn split(
    path: &Path,
    dict: &serde_json::Value,
    key: &'static str,
    found: &mut FoundFiles,
) -> Result<(), DataError> {
    let splits = dict["splits"].as_array().into_iter().flatten();
    let splits: Vec<&str> = splits.filter_map(serde_json::Value::as_str).collect();
    if splits.contains(&"train") {
        found.passed_over += splits.len() - 1;
        return dir(&path.join("train"), key, found);
    }
    Err(DataError::Setting {
        key,
        message: format!(
            "{} has no split \"train\": name the directory of one of its splits ({})",
            path.display(),
            splits.join(", ")
        ),
    })
}

/// Tables of a data set that `datasets` saved in this directory; `None` if it is another directory.
fn saved(path: &Path, key: &'static str) -> Result<Option<Vec<PathBuf>>, DataError> {
    let Some(state) = json(&path.join("state.json"), key)? else {
        return Ok(None);
    };
    let files = state["_data_files"].as_array().map(|files| {
        let names = files.iter().filter_map(|file| file["filename"].as_str());
        names.map(|name| path.join(name)).collect()
    });
    Ok(files)
}

/// Reads a JSON file, if it exists.
fn json(path: &Path, key: &'static str) -> Result<Option<serde_json::Value>, DataError> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read(path).map_err(DataError::reading(key, path))?;
    let parsed = serde_json::from_slice(&text);
    parsed.map(Some).map_err(|error| DataError::Damaged {
        path: path.into(),
        message: format!("it is not JSON: {error}"),
    })
}

/// Part of a data set that a file holds according to its name.
#[derive(PartialEq)]
enum Split {
    Train,
    Other,
}

/// Finds the split in a name like `train-00000-of-00002.parquet`, as data sets are published.
fn split_of(path: &Path) -> Option<Split> {
    let stem = path.file_stem()?.to_str()?;
    match stem.split(['-', '_', '.']).next()? {
        "train" => Some(Split::Train),
        "test" | "validation" | "valid" | "val" | "dev" | "eval" => Some(Split::Other),
        _ => None,
    }
}

fn source(path: &Path, metadata: &std::fs::Metadata) -> SourceFile {
    SourceFile {
        path: path.into(),
        format: match ending(path).as_str() {
            "jsonl" => Format::Lines,
            "json" => Format::Array,
            "csv" | "tsv" => Format::Separated,
            "parquet" => Format::Parquet,
            "arrow" => Format::Arrow,
            "u16" | "u32" | "npy" => Format::Ids,
            _ => Format::Plain,
        },
        records: None,
        entry: 0,
        bytes: metadata.len(),
        version: [
            metadata.mtime(),
            metadata.mtime_nsec(),
            metadata.ctime(),
            metadata.ctime_nsec(),
            metadata.ino() as i64,
        ],
        identity: (metadata.dev(), metadata.ino()),
    }
}

fn metadata(path: &Path, key: &'static str) -> Result<std::fs::Metadata, DataError> {
    std::fs::metadata(path).map_err(DataError::reading(key, path))
}

/// Returns whether a file is not empty, has no zero byte, and is UTF-8 in its first bytes. A character cut
/// off at the end of these is accepted.
fn is_text(source: &SourceFile, key: &'static str) -> Result<bool, DataError> {
    let mut probe = Vec::new();
    open(source)
        .and_then(|(file, _)| file.take(PROBE_BYTES).read_to_end(&mut probe))
        .map_err(DataError::reading(key, &source.path))?;
    let utf8 = match std::str::from_utf8(&probe) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none() && probe.len() as u64 == PROBE_BYTES,
    };
    Ok(!probe.is_empty() && utf8 && !probe.contains(&0))
}

fn files_below(dir: &Path, key: &'static str) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut dirs = vec![(dir.to_path_buf(), 0)];
    while let Some((current, depth)) = dirs.pop() {
        if depth > DEPTH_MAX || files.len() + dirs.len() > FILES_MAX {
            return Err(DataError::TooMany {
                key,
                path: dir.into(),
                files_max: FILES_MAX,
                depth_max: DEPTH_MAX,
            });
        }
        let failed = DataError::reading(key, &current);
        for entry in std::fs::read_dir(&current).map_err(&failed)? {
            let entry = entry.map_err(&failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(&failed)?;
            if kind.is_dir() {
                dirs.push((entry.path(), depth + 1));
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

    fn entry(path: &Path) -> DataFile {
        DataFile::new(path.into())
    }

    #[test]
    fn a_directory_with_splits_stands_for_its_training_split() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let find = || find(&[entry(dir.path())], "data.files");
        std::fs::create_dir_all(at("data")).unwrap();
        for name in [
            "train-00000-of-00002",
            "train-00001-of-00002",
            "test-00000-of-00001",
        ] {
            std::fs::write(at(&format!("data/{name}.parquet")), "x").unwrap();
        }
        std::fs::write(at("README.md"), "x").unwrap();
        let found = find().unwrap();
        assert_eq!((names(&found, dir.path()).len(), found.passed_over), (2, 2));
        // As `datasets` saves a dictionary of data sets.
        for (split, table) in [("train", "data-0.arrow"), ("test", "data-0.arrow")] {
            std::fs::create_dir(at(split)).unwrap();
            std::fs::write(at(split).join(table), "x").unwrap();
            std::fs::write(at(split).join("cache-1.arrow"), "x").unwrap();
            let state = format!(r#"{{"_data_files": [{{"filename": "{table}"}}]}}"#);
            std::fs::write(at(split).join("state.json"), state).unwrap();
        }
        std::fs::write(at("dataset_dict.json"), r#"{"splits": ["train", "test"]}"#).unwrap();
        assert_eq!(names(&find().unwrap(), dir.path()), ["train/data-0.arrow"]);
        std::fs::write(at("dataset_dict.json"), r#"{"splits": ["dev", "test"]}"#).unwrap();
        let text = find().unwrap_err().to_string();
        assert!(
            text.contains("no split \"train\"") && text.contains("(dev, test)"),
            "{text}"
        );
    }

    fn names(found: &FoundFiles, dir: &Path) -> Vec<String> {
        let paths = found.sources.iter().map(|source| &source.path);
        paths
            .map(|path| path.strip_prefix(dir).unwrap().display().to_string())
            .collect()
    }

    #[test]
    fn a_directory_stands_for_its_text_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
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
        let find = || find(&[entry(dir.path())], "data.files").unwrap();
        let found = find();
        assert_eq!(names(&found, dir.path()), ["a.rs", "b/two", "c.txt"]);
        assert_eq!((found.passed_over, found.unpacked_bytes()), (2, 3));
        // The README of a dataset is not part of the data.
        std::fs::write(at("b/rows.jsonl"), "{}").unwrap();
        let found = find();
        assert_eq!(names(&found, dir.path()), ["b/rows.jsonl"]);
        assert_eq!(found.passed_over, 5);
    }

    #[test]
    fn a_json_file_in_a_directory_is_records_if_its_fields_are_known() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("package.json"), "{\n  \"name\": \"program\"\n}\n").unwrap();
        std::fs::write(at("main.js"), "run()").unwrap();
        let find = || find(&[entry(dir.path())], "data.files").unwrap();
        assert_eq!(names(&find(), dir.path()), ["main.js", "package.json"]);
        std::fs::write(at("data.json"), "[{\"text\": \"words\"}]").unwrap();
        assert_eq!(names(&find(), dir.path()), ["data.json"]);
    }

    #[test]
    fn a_file_that_is_named_twice_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("a.txt"), dir.path().join("b.txt"));
        std::fs::write(&path, "words").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for second in [&path, &link, &dir.path().to_path_buf()] {
            let error = find(&[entry(&path), entry(second)], "data.files").unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("data.files: ") && text.contains("are the same file"),
                "{text}"
            );
        }
    }

    #[test]
    fn unreadable_files_are_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path| {
            let error = find(&[entry(path)], "data.files").unwrap_err();
            error.to_string()
        };
        assert!(refused(dir.path()).contains(".u16, .u32, .npy or text file"));
        for (name, content, part) in [
            ("empty", "", "empty is empty: name a file with text in it"),
            ("empty.jsonl", "", "empty.jsonl is empty"),
            ("a.bin.gz", "x", "unpack it first: only .jsonl.gz"),
            ("train.bin", "x", ".u16 or .u32"),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert!(refused(&path).contains(part), "{}", refused(&path));
        }
        assert!(refused(&dir.path().join("missing")).contains("missing: No such file"));
    }
}
