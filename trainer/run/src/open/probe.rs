//! Which nodes see the same directory.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::RunError;
use training_state::ranks::Ranks;
use training_state::run::{DirError, make_dir};

/// Time in which a file that the first node wrote appears on the others. Network file systems keep what they
/// have read of a directory for some seconds.
pub(super) const PROBE_WAIT: Duration = Duration::from_secs(5);

/// Time for a file to be seen by another node if the nodes probably share no directory. Every start of such a run waits this long, so it
/// is short; a network file system asks its server at once for a name that it has never read.
pub(super) const PROBE_WAIT_SEPARATE: Duration = Duration::from_secs(1);

/// Returns which nodes' files this node sees in `dir` after at most `wait`, by node: its own, and those of nodes that share the
/// directory. Ranks that are not the first of their node get an empty list. All ranks must call it.
///
/// # Errors
/// A node cannot write there; a rank is gone.
pub(super) fn seen(ranks: &Ranks, dir: &Path, wait: Duration) -> Result<Vec<bool>, RunError> {
    let name = ranks.on_all_ranks::<_, RunError>("writing into the run's directory", || {
        if !ranks.is_first_of_node() {
            return Ok(String::new());
        }
        // RandomState is seeded by the kernel's random number generator.
        let number = RandomState::new().build_hasher().finish();
        let name = format!(".seen-by-all-{number:016x}");
        let path = dir.join(&name);
        let written = make_dir(dir).and_then(|()| std::fs::write(&path, []));
        written.map_err(|source| DirError::Io {
            verb: "write",
            path,
            source,
        })?;
        Ok(name)
    })?;
    let names = ranks.messages(name.clone().into_bytes())?;
    let firsts = ranks.first_ranks().iter();
    let paths = firsts.map(|&first| dir.join(&*String::from_utf8_lossy(&names[first as usize])));
    let paths: Vec<PathBuf> = paths.collect();
    let deadline = Instant::now() + wait;
    let seen = ranks.on_all_ranks::<_, RunError>("looking for the nodes' files", || {
        while ranks.is_first_of_node() {
            let seen: Vec<bool> = paths.iter().map(|path| path.exists()).collect();
            if seen.iter().all(|seen| *seen) || Instant::now() > deadline {
                return Ok(seen);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Vec::new())
    })?;
    if ranks.is_first_of_node() {
        // A file that stays does no harm.
        let _ = std::fs::remove_file(dir.join(name));
    }
    Ok(seen)
}
