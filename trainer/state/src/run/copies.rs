//! Copies files between nodes that share no directory. Every node has a list of files to send; all others receive those that they
//! lack, at the same place below their own directory.
//!
//! ```text
//!   lists ─▶ all nodes know all files ─▶ which are lacking ─▶ rounds: the next part of each node's files ─▶ compared ─▶ synced, renamed
//! ```
//!
//! A round is one gather: all nodes send at once, at most 4 MiB each, so nodes that each have a part of a checkpoint use the network
//! in both directions. Each message of a round begins with its sender's status. A failure on one node thereby ends the copying on
//! all nodes after the same round, and all return its text. A received file gets its name when its fingerprint is that of its list
//! and it is synced.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use test_hooks::kill_point::{Point, reach};

use super::checkpoint::{FINGERPRINT_BYTES, flush};
use super::paths::make_dir;
use super::{CheckpointError, SavedFile};
use crate::fingerprint::Fingerprint;
use crate::ranks::{RankError, Ranks};

/// Bytes that a node sends in a round: large enough for the rate of a network, small beside a unit's buffers.
const PART_BYTES: usize = 4 << 20;

/// A file that a node sends.
#[derive(Debug, Serialize, Deserialize)]
pub struct SentFile {
    /// Path below the directory of the copying.
    pub name: PathBuf,
    pub bytes: u64,
    /// Leading bytes that `fingerprint` covers.
    pub covered_bytes: u64,
    pub fingerprint: u64,
    /// Where the sender reads it.
    #[serde(skip)]
    pub source: Source,
}

/// Source of a file's bytes.
#[derive(Debug)]
pub enum Source {
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Default for Source {
    fn default() -> Self {
        Self::Bytes(Vec::new())
    }
}

impl SentFile {
    /// The file `file` of a checkpoint in `dir`, whose tiles end with their fingerprint.
    pub fn of_tiles(dir: &Path, file: &SavedFile) -> Self {
        Self {
            covered_bytes: file.bytes.saturating_sub(FINGERPRINT_BYTES),
            ..Self::of_file(dir, file)
        }
    }

    /// The file `file` in `dir`, whose fingerprint covers all of it.
    pub fn of_file(dir: &Path, file: &SavedFile) -> Self {
        Self {
            name: PathBuf::from(&file.name),
            bytes: file.bytes,
            covered_bytes: file.bytes,
            fingerprint: file.fingerprint,
            source: Source::File(dir.join(&file.name)),
        }
    }

    /// A file with these contents.
    pub(super) fn from_contents(name: PathBuf, contents: Vec<u8>) -> Self {
        let bytes = contents.len() as u64;
        Self {
            name,
            bytes,
            covered_bytes: bytes,
            fingerprint: Fingerprint::compute(&contents),
            source: Source::Bytes(contents),
        }
    }

    /// Returns whether the file is below `dir`, with the same contents.
    fn is_in(&self, dir: &Path) -> bool {
        let same = || -> std::io::Result<bool> {
            let mut file = File::open(dir.join(&self.name))?;
            if file.metadata()?.len() != self.bytes {
                return Ok(false);
            }
            let (mut hash, mut left) = (Fingerprint::default(), self.covered_bytes);
            let mut buffer = vec![0; PART_BYTES.min(left as usize)];
            while left > 0 {
                let part = &mut buffer[..PART_BYTES.min(left as usize)];
                file.read_exact(part)?;
                hash.add(part);
                left -= part.len() as u64;
            }
            Ok(hash.finish() == self.fingerprint)
        };
        same().unwrap_or(false)
    }

    /// Returns whether the name stays below a directory.
    fn is_below(&self) -> bool {
        let mut parts = self.name.components();
        parts.all(|part| matches!(part, Component::Normal(_)))
    }
}

/// Sends this node's files `own`. If this node `receives`, it writes those of the other nodes below `dir`, except files that are
/// there already. `nodes` has one rank for each node; all must call it. A node that has failed before passes its error.
///
/// # Errors
/// This node's error, or that of another node with its number; a node is gone.
pub fn copy(
    nodes: &Ranks,
    dir: &Path,
    own: Result<Vec<SentFile>, CheckpointError>,
    receives: bool,
) -> Result<(), CheckpointError> {
    let me = nodes.rank() as usize;
    let (own, mut failure) = match own {
        Ok(own) => (own, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let lists = nodes.messages(serde_json::to_vec(&own).expect("plain data"))?;
    let lists = lists.iter().map(|list| {
        let list = serde_json::from_slice::<Vec<SentFile>>(list);
        list.expect("the same program on every node")
    });
    let mut lists: Vec<Vec<SentFile>> = lists.collect();
    // The others' lists do not say where they read.
    lists[me] = own;
    if let Some(file) = lists.iter().flatten().find(|file| !file.is_below()) {
        failure.get_or_insert_with(|| {
            CheckpointError::damaged(&file.name, "its name leads out of the directory")
        });
    }
    let lacking = lists.iter().enumerate().flat_map(|(node, list)| {
        let is_received = receives && node != me;
        let lacks = move |file: &SentFile| is_received && file.is_below() && !file.is_in(dir);
        list.iter().map(move |file| u8::from(lacks(file)))
    });
    let lacking: Vec<u8> = lacking.collect();
    let all_lacking = nodes.gather(&lacking)?;

    let streams = (0..nodes.count()).map(Stream::from_node);
    let mut streams: Vec<Stream> = streams.collect();
    let files = lists.into_iter().enumerate();
    let files = files.flat_map(|(node, list)| list.into_iter().map(move |file| (node, file)));
    for (number, (node, file)) in files.enumerate() {
        if all_lacking.iter().any(|lacking| lacking[number] != 0) {
            streams[node].add(file, lacking[number] != 0);
        }
    }
    // Every node knows the lengths, so a failure does not change the number of rounds that the others make.
    let longest_bytes = streams.iter().map(|stream| stream.left_bytes).max();
    let mut left_bytes = longest_bytes.unwrap_or(0);
    while left_bytes > 0 {
        let part_bytes = left_bytes.min(PART_BYTES as u64);
        left_bytes -= part_bytes;
        let mut message = vec![0; 1 + part_bytes as usize];
        if failure.is_none() {
            failure = streams[me].send(&mut message[1..]).err();
        }
        message[0] = u8::from(failure.is_some());
        let all = nodes.gather(&message)?;
        if all.iter().any(|message| message[0] != 0) {
            break;
        }
        for (node, message) in all.iter().enumerate().filter(|(node, _)| *node != me) {
            if failure.is_none() {
                failure = streams[node].receive(dir, &message[1..]).err();
            }
        }
        reach(Point::CopyingFiles);
    }
    // Syncing may take longer than any other operation between nodes.
    nodes.on_all_ranks::<_, RankError>("syncing copied files", || {
        for (node, stream) in streams.iter_mut().enumerate() {
            if failure.is_none() && node != me {
                // Files without bytes need no round.
                let ended = stream.receive(dir, &[]);
                failure = ended.and_then(|()| stream.finish()).err();
            }
        }
        Ok(())
    })?;
    agree(nodes, failure.map_or(Ok(()), Err))
}

/// Returns this node's result, or the error of the first node that has one: with its number if it is another node.
///
/// # Errors
/// Same as [`copy`].
pub(super) fn agree(
    nodes: &Ranks,
    own: Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let text = own.as_ref().err().map(ToString::to_string);
    let texts = nodes.messages(text.unwrap_or_default().into_bytes())?;
    own?;
    let failed = (0..).zip(&texts).find(|(_, text)| !text.is_empty());
    failed.map_or(Ok(()), |(node, text)| {
        Err(CheckpointError::OtherNode {
            node,
            message: String::from_utf8_lossy(text).into_owned(),
        })
    })
}

/// The files that one node sends, in their order, and how far they have come.
struct Stream {
    node: u32,
    /// With whether this node receives it.
    files: VecDeque<(SentFile, bool)>,
    left_bytes: u64,
    /// Bytes done of the first file.
    done_bytes: u64,
    /// The first file, while it is received.
    open: Option<(File, Fingerprint)>,
    /// Files of which all bytes were received, with their final paths.
    complete: Vec<(File, PathBuf)>,
}

impl Stream {
    fn from_node(node: u32) -> Self {
        Self {
            node,
            files: VecDeque::new(),
            left_bytes: 0,
            done_bytes: 0,
            open: None,
            complete: Vec::new(),
        }
    }

    fn add(&mut self, file: SentFile, is_lacking: bool) {
        self.left_bytes += file.bytes;
        self.files.push_back((file, is_lacking));
    }

    /// Fills `part` with the next bytes, as far as there are any.
    fn send(&mut self, mut part: &mut [u8]) -> Result<(), CheckpointError> {
        while let Some((file, _)) = self.files.front() {
            let (at, count) = (self.done_bytes, part.len().min(self.first_left()));
            let (now, rest) = part.split_at_mut(count);
            match &file.source {
                Source::Bytes(bytes) => now.copy_from_slice(&bytes[at as usize..][..count]),
                Source::File(path) => File::open(path)
                    .and_then(|file| file.read_exact_at(now, at))
                    .map_err(CheckpointError::io("read", path))?,
            }
            if !self.advance(count) {
                break;
            }
            part = rest;
        }
        Ok(())
    }

    /// Writes the bytes of `part` into the files below `dir` that this node lacks.
    fn receive(&mut self, dir: &Path, mut part: &[u8]) -> Result<(), CheckpointError> {
        while let Some((file, is_lacking)) = self.files.front() {
            let (now, rest) = part.split_at(part.len().min(self.first_left()));
            if *is_lacking {
                let path = dir.join(&file.name);
                let (mut open, mut hash) = match self.open.take() {
                    Some(open) => open,
                    None => (create(&path)?, Fingerprint::default()),
                };
                let covered = file.covered_bytes.saturating_sub(self.done_bytes);
                hash.add(&now[..now.len().min(covered as usize)]);
                (open.write_all(now)).map_err(|source| CheckpointError::Write {
                    path: path.clone(),
                    written_bytes: self.done_bytes,
                    source,
                })?;
                if self.done_bytes + now.len() as u64 == file.bytes {
                    let found = hash.finish();
                    if found != file.fingerprint {
                        let (node, expected) = (self.node, file.fingerprint);
                        let message = format!(
                            "node {node} sent bytes with fingerprint {found:016x}, expected {expected:016x}: its file is damaged"
                        );
                        return Err(CheckpointError::damaged(&path, message));
                    }
                    self.complete.push((open, path));
                } else {
                    self.open = Some((open, hash));
                }
            }
            if !self.advance(now.len()) {
                break;
            }
            part = rest;
        }
        Ok(())
    }

    /// Bytes of the first file that are not done.
    fn first_left(&self) -> usize {
        let first = self.files.front();
        first.map_or(0, |(file, _)| (file.bytes - self.done_bytes) as usize)
    }

    /// Counts `count` bytes of the first file. Returns whether it is done, and the next one is the first.
    fn advance(&mut self, count: usize) -> bool {
        self.left_bytes -= count as u64;
        self.done_bytes += count as u64;
        let is_done = self.first_left() == 0;
        if is_done {
            self.files.pop_front();
            self.done_bytes = 0;
        }
        is_done
    }

    /// Syncs the received files and gives them their names.
    fn finish(&mut self) -> Result<(), CheckpointError> {
        for (file, path) in self.complete.drain(..) {
            let named = file.sync_all();
            // Frees the page cache, since the file is not read soon. This is only advice, so a failure does not matter.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
            named
                .and_then(|()| fs::rename(received(&path), &path))
                .map_err(CheckpointError::io("write", &path))?;
            path.parent().map_or(Ok(()), flush)?;
        }
        Ok(())
    }
}

/// Creates the file that becomes `path` when it is complete.
fn create(path: &Path) -> Result<File, CheckpointError> {
    let dir = path.parent().unwrap_or(path);
    make_dir(dir)
        .and_then(|()| File::create(received(path)))
        .map_err(CheckpointError::io("write", path))
}

/// Path of the file that becomes `path` when it is complete.
pub(super) fn received(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}
