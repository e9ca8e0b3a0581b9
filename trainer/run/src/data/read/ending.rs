//! The ending of a file's name, which tells its format.

use std::path::Path;

/// Returns whether a file is text or records compressed with gzip, which are read directly.
pub(super) fn is_gzip(path: &Path) -> bool {
    last_ending(path) == "gz"
        && path.file_stem().is_some_and(|packed| {
            let ending = last_ending(Path::new(packed));
            ["jsonl", "json", "csv", "tsv", "txt"].contains(&ending.as_str())
        })
}

/// Returns the ending that tells a file's format: in lower case, without `.gz` if the file is read directly.
pub(super) fn ending(path: &Path) -> String {
    match path.file_stem() {
        Some(packed) if is_gzip(path) => last_ending(Path::new(packed)),
        _ => last_ending(path),
    }
}

fn last_ending(path: &Path) -> String {
    let ending = path.extension().unwrap_or_default();
    ending.to_string_lossy().to_ascii_lowercase()
}
