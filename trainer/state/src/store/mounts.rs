//! Tells a directory on a drive from what is left of it when the drive is not mounted: an empty directory of the system's disk, in
//! which a run would begin anew.
//!
//! ```text
//!   /etc/fstab                                   mount points that the system knows
//!   ~/.local/state/offloadd/mount-points         those on which runs kept something before, written by each start
//!   an empty directory in /mnt or /media         where drives are mounted, unless a file says otherwise
//!   /proc/self/mountinfo                         what is mounted now
//! ```

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use offload_support::paths::Word;

/// Most mount points that are remembered; the oldest are forgotten.
const REMEMBERED_MAX: usize = 256;

/// Directories in which, or in whose directories, drives are mounted.
const DRIVES_IN: [&str; 2] = ["/mnt", "/media"];
const DRIVES_BELOW: [&str; 2] = ["/media", "/run/media"];

/// A path on a drive that is not mounted.
#[derive(Debug, thiserror::Error)]
#[error("{} is on a drive that is not mounted: {why}. Nothing was written", path.display())]
pub struct NotMounted {
    path: PathBuf,
    why: String,
}

/// Checks that the drive of `path` is mounted, as far as the system or an earlier start knows its mount point. The path is absolute and
/// has no symbolic links.
///
/// # Errors
/// It is not mounted.
pub fn check_mounted(path: &Path) -> Result<(), NotMounted> {
    let mounted = mounted();
    if mounted.is_empty() {
        return Ok(());
    }
    let fstab = fs::read("/etc/fstab").unwrap_or_default();
    let remembered = remembered_file().map(|file| (fs::read(&file).unwrap_or_default(), file));
    let why = missing(path, &mounted, &of_fstab(&fstab)).map(|point| {
        let (shown, word) = (point.display(), Word(point));
        format!("/etc/fstab has the mount point {shown}: mount it (`mount {word}`)")
    });
    let why = why.or_else(|| {
        let (text, file) = remembered.as_ref()?;
        let known = lines(text);
        let point = missing(path, &mounted, &known)?;
        Some(format!(
            "it was mounted on {} when a run last used it. Mount it, or remove that line from {} if the directory belongs to this disk now",
            point.display(),
            file.display()
        ))
    });
    let why = why.or_else(|| {
        let empty = empty_mount_point(path, &mounted)?;
        Some(format!(
            "{} is empty, and drives are mounted there. Mount it, or make the directory yourself (`mkdir -p {}`) if it shall be on this disk",
            empty.display(),
            Word(&match empty == *path {
                true => path.join("offload"),
                false => path.to_owned(),
            })
        ))
    });
    match why {
        Some(why) => Err(NotMounted {
            path: path.to_owned(),
            why,
        }),
        None => Ok(()),
    }
}

/// Remembers the mount points of `paths`, given as to [`check_mounted`], for that function in later starts. A failure is ignored: the file only helps to notice
/// a mistake.
pub fn remember_mounts<'a>(paths: impl IntoIterator<Item = &'a Path>) {
    let Some(file) = remembered_file() else {
        return;
    };
    let mounted = mounted();
    let points = paths.into_iter().filter_map(|path| {
        let points = mounted.iter().filter(|point| path.starts_with(point));
        let nearest = points.max_by_key(|point| point.as_os_str().len())?;
        nearest.parent().is_some().then(|| nearest.clone())
    });
    let points: BTreeSet<PathBuf> = points.collect();
    let mut known = lines(&fs::read(&file).unwrap_or_default());
    let before = known.len();
    known.extend(
        points
            .into_iter()
            .filter(|point| !known.contains(point))
            .collect::<Vec<_>>(),
    );
    if known.len() == before {
        return;
    }
    let kept = &known[known.len().saturating_sub(REMEMBERED_MAX)..];
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(file.parent().expect("the file is in a directory"))?;
        let new = file.with_extension(format!("new-{}", std::process::id()));
        let mut out = fs::File::create(&new)?;
        for point in kept {
            out.write_all(point.as_os_str().as_bytes())?;
            out.write_all(b"\n")?;
        }
        fs::rename(&new, &file)
    };
    let _ = write();
}

/// File with the mount points that runs used.
fn remembered_file() -> Option<PathBuf> {
    let state = match std::env::var_os("XDG_STATE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME").filter(|dir| !dir.is_empty())?)
            .join(".local/state"),
    };
    Some(state.join("offloadd/mount-points"))
}

/// Mount points of this process's mount namespace; empty if the system does not tell.
fn mounted() -> BTreeSet<PathBuf> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let rows = text.split(|byte| *byte == b'\n');
    let points = rows.filter_map(|row| row.split(|byte| *byte == b' ').nth(4));
    points.map(unescaped).collect()
}

/// Mount points in the text of /etc/fstab.
fn of_fstab(text: &[u8]) -> Vec<PathBuf> {
    let rows = text.split(|byte| *byte == b'\n');
    let points = rows.filter_map(|row| {
        let mut fields = row
            .split(|byte| byte.is_ascii_whitespace())
            .filter(|field| !field.is_empty());
        let first = fields.next()?;
        let point = fields.next().filter(|_| !first.starts_with(b"#"))?;
        point.starts_with(b"/").then(|| unescaped(point))
    });
    points.collect()
}

fn lines(text: &[u8]) -> Vec<PathBuf> {
    let lines = text.split(|byte| *byte == b'\n');
    let lines = lines.filter(|line| line.starts_with(b"/"));
    lines
        .map(|line| PathBuf::from(OsString::from_vec(line.to_vec())))
        .collect()
}

/// Decodes the octal numbers that stand for spaces and the like.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let code = (byte == b'\\')
            .then(|| std::str::from_utf8(after.get(..3)?).ok())
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// The deepest of the `known` mount points above `path`, or `path` itself, if it is not mounted.
fn missing<'a>(path: &Path, mounted: &BTreeSet<PathBuf>, known: &'a [PathBuf]) -> Option<&'a Path> {
    let above = known.iter().filter(|point| path.starts_with(point));
    let nearest = above.max_by_key(|point| point.as_os_str().len())?;
    (nearest.parent().is_some() && !mounted.contains(nearest)).then_some(nearest)
}

/// The last directory of `path` that exists, if drives are mounted there and it is empty.
fn empty_mount_point(path: &Path, mounted: &BTreeSet<PathBuf>) -> Option<PathBuf> {
    let existing = path.ancestors().find(|dir| dir.exists())?;
    let parent = existing.parent()?;
    let is_in = |dir: &Path, of: &[&str]| of.iter().any(|of| dir == Path::new(of));
    let is_point = is_in(existing, &DRIVES_IN)
        || is_in(parent, &DRIVES_IN)
        || parent.parent().is_some_and(|dir| is_in(dir, &DRIVES_BELOW));
    let is_empty = || fs::read_dir(existing).is_ok_and(|mut entries| entries.next().is_none());
    (is_point && !mounted.contains(existing) && is_empty()).then(|| existing.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths<const N: usize>(paths: [&str; N]) -> Vec<PathBuf> {
        paths.map(PathBuf::from).into()
    }

    #[test]
    fn a_path_below_a_known_mount_point_needs_its_drive() {
        let fstab = b"# /dev/sdz /mnt/no ext4\nUUID=1 / ext4 defaults 0 1\n\n/dev/nvme0n1 /mnt/big\\040drive\text4 noauto 0 0\nUUID=2 none swap sw 0 0\n/dev/sdb /data xfs\n";
        let known = of_fstab(fstab);
        assert_eq!(known, paths(["/", "/mnt/big drive", "/data"]));
        let mounted: BTreeSet<PathBuf> = paths(["/", "/proc", "/data"]).into_iter().collect();
        for (path, expected) in [
            ("/mnt/big drive/run", Some("/mnt/big drive")),
            ("/mnt/big drive", Some("/mnt/big drive")),
            ("/mnt/big", None),
            ("/data/run", None),
            ("/home/run", None),
        ] {
            let found = missing(Path::new(path), &mounted, &known);
            assert_eq!(found, expected.map(Path::new), "{path}");
        }
    }

    #[test]
    fn remembered_lines_and_mountinfo_are_read() {
        assert_eq!(lines(b"/a b\nnone\n\n/c\n"), paths(["/a b", "/c"]));
        assert_eq!(unescaped(b"/a\\040b\\"), Path::new("/a b\\"));
        assert!(mounted().contains(Path::new("/proc")));
    }
}
