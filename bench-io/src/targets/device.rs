//! The I/O engine alone, without daemon, shared rings and checksums.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offloadd::api::geometry::{Geometry, SlotClass};
use offloadd::api::ids::{DeviceIndex, SlotIndex};
use offloadd::arena::{Arena, LockPolicy};
use offloadd::engine::{Engine, EngineChoice, Io, IoDone, Memory};
use offloadd::io::{IoId, IoOp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, OFlags};

use super::{Flight, Target, Way};
use crate::random_data;

/// A target's files, and how to open them.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFiles {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) direct: bool,
    pub(crate) writes: bool,
}

/// Files that no other program may write or mount meanwhile.
#[derive(Debug)]
pub(crate) struct Claim(#[expect(dead_code, reason = "held")] Vec<File>);

impl DeviceFiles {
    /// Locks the files that will be written, once for all jobs, against a daemon's store, a mounted drive and another
    /// measurement.
    ///
    /// # Errors
    /// One of them is in use, or cannot be opened for writing.
    pub(crate) fn claim(&self) -> Result<Claim> {
        let written = if self.writes { &self.paths[..] } else { &[] };
        let claimed = written.iter().map(|path| claim_one(path));
        Ok(Claim(claimed.collect::<Result<_>>()?))
    }

    /// Opens the files for an engine.
    ///
    /// # Errors
    /// A file is missing or not accessible.
    pub(crate) fn open(&self) -> Result<Vec<Arc<File>>> {
        self.paths.iter().map(|path| self.open_one(path)).collect()
    }

    fn open_one(&self, path: &Path) -> Result<Arc<File>> {
        let shown = path.display();
        kind_of(path)?;
        let mut flags = OFlags::CLOEXEC;
        if self.direct {
            flags |= OFlags::DIRECT;
        }
        let opened = OpenOptions::new()
            .read(true)
            .write(self.writes)
            .custom_flags(flags.bits() as i32)
            .open(path);
        let file = match opened {
            Err(e)
                if self.direct
                    && e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
            {
                bail!(
                    "{shown}: the file system does not support direct I/O; use --direct 0 to measure through the page cache"
                )
            }
            opened => opened.with_context(|| format!("opening {shown}"))?,
        };
        Ok(Arc::new(file))
    }
}

fn claim_one(path: &Path) -> Result<File> {
    let shown = path.display();
    let mut flags = OFlags::CLOEXEC;
    if kind_of(path)?.is_block_device() {
        // The kernel grants exclusive use to one holder: a file system, swap, a RAID, or this program.
        flags |= OFlags::EXCL;
    }
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let file = match opened {
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
            bail!(
                "{shown}: in use: mounted, swap, part of a RAID, or opened by another program; writing would destroy its content"
            )
        }
        opened => opened.with_context(|| format!("opening {shown} for writing"))?,
    };
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!(
            "{shown}: in use: a running offloadd serves this store (stop it, or measure through it with --socket), or another \
             measurement writes to it"
        );
    }
    Ok(file)
}

/// Accepts files and block devices. Nothing else is opened: a pipe would wait for a writer.
fn kind_of(path: &Path) -> Result<FileType> {
    let shown = path.display();
    let kind = std::fs::metadata(path)
        .with_context(|| format!("{shown}"))?
        .file_type();
    ensure!(
        kind.is_file() || kind.is_block_device(),
        "{shown}: neither a file nor a block device; use --directory for a directory"
    );
    Ok(kind)
}

/// Size of a file or block device.
///
/// # Errors
/// The path is neither, or its size cannot be read.
pub(crate) fn bytes_of(path: &Path) -> Result<u64> {
    kind_of(path)?;
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    // A block device's metadata reports 0; its end is its size.
    rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
        .with_context(|| format!("reading the size of {}", path.display()))
}

/// An engine on some files, with one buffer per operation in flight.
pub(crate) struct DeviceTarget {
    engine: Engine,
    files: Vec<Arc<File>>,
    about: String,
    paths: Vec<PathBuf>,
    block_bytes: u32,
    /// Registered with the kernel like the daemon's. The bytes are not examined.
    arena: Arc<Arena>,
    geometry: Geometry,
    free: Vec<u32>,
    flights: Vec<Option<Flight>>,
    done: Vec<IoDone>,
}

impl DeviceTarget {
    /// Opens an engine for `depth` operations of `block_bytes`. Call it on the thread that will use it.
    ///
    /// # Errors
    /// The files, the engine or the memory are not available.
    pub(crate) fn open(
        files: &DeviceFiles,
        choice: EngineChoice,
        block_bytes: u32,
        depth: u32,
    ) -> Result<Self> {
        let opened = files.open()?;
        let (mut engine, reason) = Engine::open(choice, &opened, depth as usize)?;
        let geometry = Geometry::new(&[SlotClass {
            slot_bytes: u64::from(block_bytes),
            slot_count: depth,
        }])?;
        let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try)?);
        fill(&arena, &geometry)?;
        engine.register(&arena);
        while engine.has_work() {
            engine.start()?;
        }
        Ok(Self {
            about: format!("{} ({reason})", engine.name()),
            engine,
            files: opened,
            paths: files.paths.clone(),
            block_bytes,
            arena,
            geometry,
            free: (0..depth).rev().collect(),
            flights: vec![None; depth as usize],
            done: Vec::new(),
        })
    }

    /// Name of the engine, and why it was chosen.
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    fn ended(&mut self, done: IoDone) -> Result<Flight> {
        let slot = done.id.0 as usize;
        let flight = self.flights[slot]
            .take()
            .context("an operation that was started")?;
        let path = self.paths[flight.device as usize].display();
        let offset = flight.block * u64::from(self.block_bytes);
        let tried = || {
            let way = flight.way.word();
            format!("{way} of {} bytes at {offset} of {path}", self.block_bytes)
        };
        match done.outcome {
            Ok(moved) if moved == self.block_bytes => {}
            Ok(moved) => bail!("{}: only {moved} bytes were moved", tried()),
            Err(errno) => bail!("{}: {}", tried(), io::Error::from_raw_os_error(errno)),
        }
        self.free.push(slot as u32);
        Ok(flight)
    }
}

impl Target for DeviceTarget {
    fn start(&mut self, flight: Flight) -> Result<()> {
        let slot = self.free.pop().context("more operations than buffers")?;
        let offset = flight.block * u64::from(self.block_bytes);
        let place = self.geometry.slot_place(SlotIndex(slot));
        let place = place.context("a slot of its own geometry")?;
        self.engine.submit(Io {
            id: IoId(u64::from(slot)),
            device: DeviceIndex(flight.device),
            op: match flight.way {
                Way::Read => IoOp::Read,
                Way::Write => IoOp::Write,
            },
            offset,
            bytes: self.block_bytes,
            memory: Memory::Arena {
                arena: Arc::clone(&self.arena),
                offset: place.offset,
                piece: place.piece,
            },
        });
        self.flights[slot as usize] = Some(flight);
        Ok(())
    }

    fn wait(&mut self, limit: Duration, ended: &mut Vec<Flight>) -> Result<()> {
        self.engine.start()?;
        let mut done = std::mem::take(&mut self.done);
        self.engine.reap(&mut done)?;
        if done.is_empty() {
            let again = self.engine.again_after().unwrap_or(limit);
            let limit = Timespec::try_from(limit.min(again)).context("a limit of seconds")?;
            let wake = self.engine.wake();
            match poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&limit)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno).context("waiting for the engine"),
            }
            self.engine.reap(&mut done)?;
        }
        for one in done.drain(..) {
            ended.push(self.ended(one)?);
        }
        self.done = done;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        for (file, path) in self.files.iter().zip(&self.paths) {
            file.sync_data()
                .with_context(|| format!("flushing {}", path.display()))?;
        }
        Ok(())
    }
}

/// Fills the arena through its memory file, because the mapping belongs to the engine.
fn fill(arena: &Arena, geometry: &Geometry) -> Result<()> {
    let file = File::from(arena.as_fd().try_clone_to_owned()?);
    let mut bytes = vec![0; 1 << 20];
    random_data::fill(&mut bytes, 1);
    let mut offset = 0;
    while offset < geometry.arena_bytes() {
        let now = (geometry.arena_bytes() - offset).min(bytes.len() as u64) as usize;
        file.write_all_at(&bytes[..now], offset)
            .context("filling the buffers")?;
        offset += now as u64;
    }
    Ok(())
}
