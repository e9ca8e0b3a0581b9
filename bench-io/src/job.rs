//! Job description: fio's options as flags and as keys of a job file ([`JobOptions`]), and the checked result ([`Job`]).
//!
//! A flag overrides the file. Nothing here touches a device.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use offloadd::api::{BLOCK_BYTES, IODEPTH_MAX, TILE_BYTES_MAX};
use offloadd::engine::EngineChoice;

use crate::units::{Bytes, Seconds, Switch};

/// Threads, each with its own engine or session.
const JOBS_MAX: u32 = 64;

/// Direction and order of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum Access {
    Read,
    Write,
    /// Mixed reads and writes, in order
    #[value(alias = "readwrite")]
    Rw,
    RandRead,
    RandWrite,
    RandRw,
}

impl Access {
    /// The name in fio and here.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Rw => "rw",
            Self::RandRead => "randread",
            Self::RandWrite => "randwrite",
            Self::RandRw => "randrw",
        }
    }

    pub(crate) fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite | Self::RandRw)
    }

    pub(crate) fn reads(self) -> bool {
        !matches!(self, Self::Write | Self::RandWrite)
    }

    pub(crate) fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::RandRead)
    }
}

/// Object of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TargetKind {
    /// The I/O engine alone, on a device or file
    Device,
    /// Through offloadd and shared memory, with checksums
    Daemon,
    /// Through offloadd into and out of a GPU's memory
    Gpu,
}

/// fio's engines with one operation in flight, whatever `iodepth` says. (fio's psync is one too; here psync is threads, `iodepth` of them.)
const ONE_IN_FLIGHT: [&str; 4] = ["sync", "vsync", "pvsync", "pvsync2"];

/// Returns the engine that this name of offloadd or fio means, and its name in the settings.
///
/// # Errors
/// There is none, with what to write.
pub(crate) fn engine_of(word: &str, iodepth: Option<u32>) -> Result<(EngineChoice, String)> {
    let ours = match word {
        "io_uring" => "uring",
        "libaio" => "aio",
        one if ONE_IN_FLIGHT.contains(&one) => {
            ensure!(
                iodepth.is_none_or(|iodepth| iodepth == 1),
                "ioengine = {word}: fio keeps one operation in flight with it, whatever iodepth says: write iodepth=1, or ioengine=psync for \
                 iodepth threads"
            );
            "psync"
        }
        _ => word,
    };
    let engine = EngineChoice::from_name(ours).with_context(|| {
        format!(
            "ioengine = {word}: expected auto, io_uring (uring), libaio (aio), psync, or one of {}",
            ONE_IN_FLIGHT.join(", ")
        )
    })?;
    Ok((engine, ours.to_owned()))
}

/// An unchecked job. Field names are fio's.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobOptions {
    /// Name of the job, printed with its result
    #[arg(long)]
    name: Option<String>,
    /// What is measured [default: daemon]
    #[arg(long, value_enum)]
    target: Option<TargetKind>,
    /// Direction and order of access [default: read]
    #[arg(long, alias = "readwrite", value_enum)]
    rw: Option<Access>,
    /// Percentage of reads in a mix [default: 50]
    #[arg(long, value_name = "N")]
    rwmixread: Option<u32>,
    /// Size of an operation, such as 4m; through the daemon, of a tile [default: 4m]
    #[arg(long, alias = "blocksize", value_name = "BYTES")]
    bs: Option<Bytes>,
    /// Operations in flight of each job [default: 32]
    #[arg(long, value_name = "N")]
    iodepth: Option<u32>,
    /// Threads, each with its own engine or session and part of the bytes [default: 1]
    #[arg(long, value_name = "N")]
    numjobs: Option<u32>,
    /// Time to measure, such as 5, 30s or 2m; 0 moves all bytes once [default: 5s]
    #[arg(long, value_name = "TIME")]
    runtime: Option<Seconds>,
    /// Time to run before measuring [default: 500ms; 0 when runtime is 0]
    #[arg(long = "ramp_time", alias = "ramp-time", value_name = "TIME")]
    ramp_time: Option<Seconds>,
    /// I/O engine: auto, io_uring, libaio or psync [default: auto]
    #[arg(long, value_name = "NAME")]
    ioengine: Option<String>,
    /// Bytes used of each file or device, such as 1g [default: 1g; all of an existing file]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,
    /// 1 bypasses the page cache; 0 uses it, which measures memory [default: 1]
    #[arg(long, value_name = "0|1")]
    direct: Option<Switch>,
    /// Existing file or block device; with --directory, a file there, which is made for this run if it is missing; repeatable
    #[arg(long, value_name = "PATH")]
    filename: Vec<PathBuf>,
    /// Directory on a drive for temporary files; repeatable [default: the current one, after a question]
    #[arg(long, value_name = "DIR")]
    directory: Vec<PathBuf>,
    /// Socket of a running daemon [default: start one for this run]
    #[arg(long, value_name = "PATH", conflicts_with = "directory")]
    socket: Option<PathBuf>,
    /// Allow writes to destroy the content of --filename
    #[arg(long)]
    overwrite: bool,
}

/// A checked job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) name: Option<String>,
    pub(crate) rw: Access,
    /// Percentage of reads in a mix.
    pub(crate) read_percent: u32,
    pub(crate) bs: u32,
    /// Operations in flight of each of `numjobs`.
    pub(crate) iodepth: u32,
    pub(crate) numjobs: u32,
    /// Zero moves all bytes once.
    pub(crate) runtime: Duration,
    pub(crate) ramp: Duration,
    pub(crate) engine: EngineChoice,
    /// The engine's name in the settings.
    pub(crate) engine_word: String,
    /// Bytes used of each file or device; `None` uses all.
    pub(crate) size: Option<u64>,
    pub(crate) direct: bool,
    pub(crate) place: Place,
    /// Whether tiles continue to a GPU's memory.
    pub(crate) gpu: bool,
}

/// Location of the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The engine alone, on existing files or block devices. Writing was allowed if the job writes.
    Files(Vec<PathBuf>),
    /// The engine alone, on files made for this run.
    NewFiles(Vec<PathBuf>),
    /// A private daemon with a device in each directory.
    Private(Vec<PathBuf>),
    /// A running daemon.
    Socket(PathBuf),
}

impl JobOptions {
    /// Takes missing options from `file`.
    pub(crate) fn over(self, file: Self) -> Self {
        // The options that name a location override each other.
        let (filename, directory, socket) = match self.names_place() {
            true => (self.filename, self.directory, self.socket),
            false => (file.filename, file.directory, file.socket),
        };
        Self {
            name: self.name.or(file.name),
            target: self.target.or(file.target),
            rw: self.rw.or(file.rw),
            rwmixread: self.rwmixread.or(file.rwmixread),
            bs: self.bs.or(file.bs),
            iodepth: self.iodepth.or(file.iodepth),
            numjobs: self.numjobs.or(file.numjobs),
            runtime: self.runtime.or(file.runtime),
            ramp_time: self.ramp_time.or(file.ramp_time),
            ioengine: self.ioengine.or(file.ioengine),
            size: self.size.or(file.size),
            direct: self.direct.or(file.direct),
            filename,
            directory,
            socket,
            overwrite: self.overwrite || file.overwrite,
        }
    }

    /// Whether a file, directory or daemon is named, so that the current directory stays as it is.
    pub(crate) fn names_place(&self) -> bool {
        self.socket.is_some() || !self.filename.is_empty() || !self.directory.is_empty()
    }

    /// Checks the options.
    ///
    /// # Errors
    /// The first option that is wrong.
    pub(crate) fn check(self) -> Result<Job> {
        let target = self.target.unwrap_or(match self.filename.is_empty() {
            true => TargetKind::Daemon,
            false => TargetKind::Device,
        });
        let bs = self.bs.unwrap_or(Bytes(4 << 20)).0;
        ensure!(
            bs.is_multiple_of(u64::from(BLOCK_BYTES))
                && (1..=u64::from(TILE_BYTES_MAX)).contains(&bs),
            "bs = {bs}: must be a multiple of {BLOCK_BYTES} bytes, at most {}",
            Bytes(u64::from(TILE_BYTES_MAX))
        );
        let iodepth = match self.ioengine.as_deref() {
            Some(engine) if ONE_IN_FLIGHT.contains(&engine) => self.iodepth.unwrap_or(1),
            _ => self.iodepth.unwrap_or(32),
        };
        ensure!(
            (1..=IODEPTH_MAX).contains(&iodepth),
            "iodepth = {iodepth}: must be 1 to {IODEPTH_MAX}"
        );
        let numjobs = self.numjobs.unwrap_or(1);
        ensure!(
            (1..=JOBS_MAX).contains(&numjobs),
            "numjobs = {numjobs}: must be 1 to {JOBS_MAX}"
        );
        let read_percent = self.rwmixread.unwrap_or(50);
        ensure!(
            (1..=99).contains(&read_percent),
            "rwmixread = {read_percent}: must be 1 to 99; for 0 or 100 use rw=write or rw=read"
        );
        let time = |given: Option<Seconds>, default_ms| {
            given.map_or(Duration::from_millis(default_ms), |time| time.0)
        };
        let runtime = time(self.runtime, 5000);
        let ramp = time(self.ramp_time, if runtime.is_zero() { 0 } else { 500 });
        ensure!(
            !runtime.is_zero() || ramp.is_zero(),
            "ramp_time must be 0 when runtime is 0, because then every byte counts"
        );
        let (engine, word) = engine_of(self.ioengine.as_deref().unwrap_or("auto"), self.iodepth)?;
        let rw = self.rw.unwrap_or(Access::Read);
        let place = self.target_place(target, rw, &word)?;
        let size = match (self.size, &place) {
            (Some(size), _) => Some(size.0),
            (None, Place::Files(_)) => None,
            (None, _) => Some(1 << 30),
        };
        if let Some(size) = size {
            let (ops, what) = match rw.reads() && rw.writes() {
                true => (2, ", one to read and one to write"),
                false => (1, ""),
            };
            ensure!(
                size / u64::from(numjobs) >= bs * ops,
                "size = {}: too small for {numjobs} jobs with operations of {}{what}",
                Bytes(size),
                Bytes(bs)
            );
        }
        Ok(Job {
            name: self.name,
            rw,
            read_percent,
            bs: bs as u32,
            iodepth,
            numjobs,
            runtime,
            ramp,
            engine,
            engine_word: word,
            size,
            direct: self.direct.is_none_or(|switch| switch.0),
            place,
            gpu: target == TargetKind::Gpu,
        })
    }

    fn direct(&self) -> bool {
        self.direct.is_none_or(|switch| switch.0)
    }

    /// Checks the options that name a location.
    fn target_place(&self, target: TargetKind, rw: Access, engine: &str) -> Result<Place> {
        let dirs = match self.directory.is_empty() {
            true => vec![PathBuf::from(".")],
            false => self.directory.clone(),
        };
        if target == TargetKind::Device {
            ensure!(self.socket.is_none(), "socket needs target = daemon or gpu");
            if self.filename.is_empty() {
                return Ok(Place::NewFiles(dirs));
            }
            let files = match &self.directory[..] {
                [] => self.filename.clone(),
                [dir] => {
                    let files = in_directory(dir, &self.filename)?;
                    if files.iter().all(|file| !file.exists()) {
                        return Ok(Place::NewFiles(vec![dir.clone(); files.len()]));
                    }
                    files
                }
                dirs => bail!(
                    "filename with {} directories: name one, or the files with their whole paths",
                    dirs.len()
                ),
            };
            ensure!(
                !rw.writes() || self.overwrite,
                "rw = {} destroys the content of {}; allow that with --overwrite",
                rw.word(),
                files[0].display()
            );
            return Ok(Place::Files(files));
        }
        if let Some(file) = self.filename.first() {
            bail!(
                "filename = {}: a daemon uses its own files; use directory or socket instead",
                file.display()
            );
        }
        ensure!(
            self.direct(),
            "direct = 0: the daemon always bypasses the page cache"
        );
        let Some(socket) = &self.socket else {
            return Ok(Place::Private(dirs));
        };
        ensure!(
            self.directory.is_empty(),
            "socket and directory exclude each other: a running daemon has its own devices"
        );
        ensure!(
            engine == "auto",
            "ioengine = {engine}: a running daemon has its engine already"
        );
        Ok(Place::Socket(socket.clone()))
    }
}

/// Returns fio's meaning of `directory` and `filename` together: the files in that directory.
fn in_directory(dir: &Path, names: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let file = |name: &PathBuf| {
        ensure!(
            name.is_relative(),
            "filename = {} with directory = {}: the name must be relative to the directory",
            name.display(),
            dir.display()
        );
        Ok(dir.join(name))
    };
    names.iter().map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> JobOptions {
        let (options, _) = crate::job_file::parse(&format!("[job]\n{text}"), None).unwrap();
        options
    }

    fn refused(text: &str) -> String {
        match crate::job_file::parse(&format!("[job]\n{text}"), None) {
            Ok((options, _)) => options.check().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_flag_wins_over_the_file() {
        let file = words("rw=randread\nbs=1m\ndirectory=/a");
        let job = words("bs=2m").over(file).check().unwrap();
        assert_eq!((job.rw, job.bs), (Access::RandRead, 2 << 20));
        assert_eq!(job.place, Place::Private(vec!["/a".into()]));
        let file = words("directory=/a");
        let job = words("filename=/b").over(file).check().unwrap();
        assert_eq!(job.place, Place::Files(vec!["/b".into()]));
    }

    #[test]
    fn fios_other_words_are_known() {
        for (engine, ours) in [
            ("io_uring", EngineChoice::Uring),
            ("libaio", EngineChoice::Aio),
            ("pvsync2", EngineChoice::Psync),
        ] {
            let job = words(&format!("ioengine={engine}\nreadwrite=readwrite"));
            let job = job.check().unwrap();
            assert_eq!((job.engine, job.rw), (ours, Access::Rw));
            assert_eq!(job.engine_word, ours.name());
        }
    }

    #[test]
    fn fios_directory_and_filename_together_are_a_file_there() {
        let job = words("directory=.\nfilename=Cargo.toml").check().unwrap();
        assert_eq!(job.place, Place::Files(vec!["./Cargo.toml".into()]));
        let job = words("directory=.\nfilename=ssd.test.file\nrw=randwrite")
            .check()
            .unwrap();
        assert_eq!(
            job.place,
            Place::NewFiles(vec![".".into()]),
            "as in fio's ssd-test.fio"
        );
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_word() {
        for (text, word) in [
            ("bs=5000", "bs = 5000"),
            ("bs=1g", "bs = "),
            ("iodepth=0", "iodepth = 0"),
            ("numjobs=1000", "numjobs"),
            ("rwmixread=0", "rwmixread"),
            ("runtime=-1", "runtime"),
            ("runtime=0\nramp_time=1", "ramp_time"),
            ("ioengine=magic", "ioengine"),
            ("size=1m", "size"),
            ("rw=rw\nsize=4m", "one to read and one to write"),
            ("direct=0", "direct = 0"),
            ("target=daemon\nfilename=/x", "filename"),
            ("target=device\nsocket=/x", "socket"),
            ("target=gpu\nfilename=/x", "filename"),
            ("rw=write\nfilename=/x", "--overwrite"),
            ("filename=/x\ndirectory=/y", "relative to the directory"),
            ("filename=x\ndirectory=/y:/z", "filename with 2 directories"),
            ("rw=write\nfilename=Cargo.toml\ndirectory=.", "--overwrite"),
            ("ioengine=sync\niodepth=4", "iodepth=1"),
            ("ioengine=posixaio", "io_uring (uring), libaio (aio), psync"),
            ("verify=crc32c", "target=daemon"),
            ("verify_fatal=1", "target=daemon"),
            ("overwite=1", "did you mean `overwrite`?"),
            ("socket=/x\nioengine=psync", "ioengine"),
        ] {
            let message = refused(text);
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
