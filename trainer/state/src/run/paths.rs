//! Paths of a run that stay the same, and directories that survive a power loss.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Absolute path with symbolic links resolved as far as it exists: it does not change when the directory is
/// created.
pub fn resolved(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let existing = whole
        .ancestors()
        .find_map(|ancestor| Some((ancestor, fs::canonicalize(ancestor).ok()?)));
    match existing {
        Some((ancestor, real)) => match whole.strip_prefix(ancestor) {
            Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
            _ => real,
        },
        None => whole,
    }
}

/// Creates the directory and its parents and syncs each parent, so that files synced inside survive a power
/// loss.
pub fn make_dir(path: &Path) -> std::io::Result<()> {
    let whole = resolved(path);
    let missing = whole.ancestors().filter(|ancestor| !ancestor.exists());
    let above: Vec<&Path> = missing.filter_map(Path::parent).collect();
    fs::create_dir_all(&whole)?;
    above
        .into_iter()
        .try_for_each(|dir| File::open(dir)?.sync_all())
}
