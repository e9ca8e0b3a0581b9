//! Heartbeats in a directory of one node: one file per rank, which the rank's process keeps locked.
//!
//! The lock ends with the process, so a dead rank is detected at the next heartbeat. c10d's FileStore is unsuitable: it
//! grows with every write, and a rank stopped inside its lock would block all others.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::heartbeat_store::{BEAT_BYTES, Beat, HeartbeatStore, LastHeartbeat};
use crate::{CollectiveError, World};

/// Heartbeats as locked files in a directory.
pub struct DirHeartbeatStore {
    dir: PathBuf,
    own: File,
    peers: Vec<Option<File>>,
}

impl DirHeartbeatStore {
    /// Claims this rank's file in `dir`.
    ///
    /// # Errors
    /// The directory is missing or not writable, or the rank is taken.
    pub fn open(world: &World, dir: &Path) -> Result<Self, CollectiveError> {
        let failed = |op, error: io::Error| CollectiveError::Rendezvous {
            op,
            place: dir.display().to_string(),
            message: error.to_string(),
        };
        // Under a temporary name until it is locked and written: nobody may see it unlocked while its rank lives.
        let name = beat_path(dir, world.rank);
        let new = name.with_extension(format!("new-{}", std::process::id()));
        let own = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&new)
            .map_err(|error| failed("making a heartbeat file", error))?;
        let placed = own
            .try_lock()
            .map_err(|error| match error {
                TryLockError::Error(error) => failed("locking a heartbeat file", error),
                TryLockError::WouldBlock => unreachable!("nobody else knows this file"),
            })
            .and_then(|()| {
                own.write_all_at(&Beat::default().encode(), 0)
                    .map_err(|error| failed("writing a heartbeat", error))
            })
            .and_then(|()| {
                std::fs::hard_link(&new, &name).map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => CollectiveError::Taken {
                        rank: world.rank,
                        place: dir.display().to_string(),
                    },
                    _ => failed("naming a heartbeat file", error),
                })
            });
        let _ = std::fs::remove_file(&new);
        placed?;
        Ok(DirHeartbeatStore {
            dir: dir.to_path_buf(),
            own,
            peers: (0..world.ranks).map(|_| None).collect(),
        })
    }

    fn failed(&self, op: &'static str, error: &io::Error) -> CollectiveError {
        CollectiveError::Rendezvous {
            op,
            place: self.dir.display().to_string(),
            message: error.to_string(),
        }
    }
}

impl Drop for DirHeartbeatStore {
    fn drop(&mut self) {
        // A process that was just started may still have a copy of the file: other ranks must not wait for its
        // heartbeats.
        let _ = self.own.unlock();
    }
}

impl HeartbeatStore for DirHeartbeatStore {
    fn write(&mut self, beat: &Beat) -> Result<(), CollectiveError> {
        self.own
            .write_all_at(&beat.encode(), 0)
            .map_err(|error| self.failed("writing a heartbeat", &error))
    }

    fn read(&mut self, rank: u32) -> Result<LastHeartbeat, CollectiveError> {
        if self.peers[rank as usize].is_none() {
            match File::open(beat_path(&self.dir, rank)) {
                Ok(file) => self.peers[rank as usize] = Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(LastHeartbeat::Nothing);
                }
                Err(error) => return Err(self.failed("opening a heartbeat file", &error)),
            }
        }
        let file = self.peers[rank as usize].as_ref().expect("opened above");
        // A shared lock, so that concurrent readers both see it. Locking before reading makes a dead rank's last
        // heartbeat final.
        let dead = match file.try_lock_shared() {
            Ok(()) => {
                let _ = file.unlock();
                true
            }
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(error)) => {
                return Err(self.failed("asking for a heartbeat's lock", &error));
            }
        };
        let mut bytes = [0; BEAT_BYTES];
        let beat = file
            .read_exact_at(&mut bytes, 0)
            .ok()
            .and_then(|()| Beat::decode(&bytes));
        Ok(if dead {
            LastHeartbeat::Dead(beat)
        } else {
            LastHeartbeat::Beat(beat)
        })
    }
}

fn beat_path(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("beat-{rank}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_seen_alive_and_then_dead_with_its_last_beat() {
        let dir = tempfile::tempdir().unwrap();
        let mut zero = DirHeartbeatStore::open(&World::of_two(0), dir.path()).unwrap();
        assert_eq!(zero.read(1).unwrap(), LastHeartbeat::Nothing);
        let mut one = DirHeartbeatStore::open(&World::of_two(1), dir.path()).unwrap();
        assert_eq!(
            zero.read(1).unwrap(),
            LastHeartbeat::Beat(Some(Beat::default()))
        );
        let beat = Beat {
            count: 3,
            reached: 9,
            end: None,
        };
        one.write(&beat).unwrap();
        assert_eq!(
            zero.read(1).unwrap(),
            LastHeartbeat::Beat(Some(beat.clone()))
        );
        drop(one);
        assert_eq!(zero.read(1).unwrap(), LastHeartbeat::Dead(Some(beat)));
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files, 2, "no temporary name is left");
    }

    #[test]
    fn a_place_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let first = DirHeartbeatStore::open(&World::of_two(1), dir.path()).unwrap();
        drop(first);
        // Also when its process is gone: its leftover would mislead the others.
        let again = DirHeartbeatStore::open(&World::of_two(1), dir.path()).map(|_| ());
        assert!(matches!(again, Err(CollectiveError::Taken { rank: 1, .. })));
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("nowhere");
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        for place in [missing, file] {
            let error = DirHeartbeatStore::open(&World::of_two(0), &place)
                .map(|_| ())
                .unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&place.display().to_string()), "{text}");
            assert!(text.contains("making a heartbeat file"), "{text}");
        }
    }

    #[test]
    fn a_beat_file_full_of_nonsense_is_no_beat() {
        let dir = tempfile::tempdir().unwrap();
        let mut zero = DirHeartbeatStore::open(&World::of_two(0), dir.path()).unwrap();
        let one = DirHeartbeatStore::open(&World::of_two(1), dir.path()).unwrap();
        one.own.write_all_at(&[0xff; BEAT_BYTES], 0).unwrap();
        assert_eq!(zero.read(1).unwrap(), LastHeartbeat::Beat(None));
        one.own.set_len(0).unwrap();
        assert_eq!(zero.read(1).unwrap(), LastHeartbeat::Beat(None));
    }
}
