//! A private daemon as a child process, for people who want to train and not to run a service. It is the same program with the
//! same sockets as the service.
//!
//! ```text
//!   directory/offloadd.toml   its settings, written here at each start
//!   directory/offloadd.log    what it prints, appended; moved to .old when it has become long
//!   directory/run/            0700: its sockets. In $XDG_RUNTIME_DIR or /tmp instead when the path would be too long
//! ```
//!
//! Everything created belongs to this user alone: directories 0700, files 0600.
//!
//! Promises: the child ends when this value is dropped or this process dies in any way. Starting never takes longer than its
//! time limits. Every failure shows the end of the log.

mod dir;
mod keeper;
mod own_dir;

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::ClientError;
use dir::{config_text, make_dir, own_file, socket_place};
use keeper::Keeper;
pub use own_dir::OwnDir;

/// Name of a private daemon's log in its directory.
pub(crate) const LOG: &str = "offloadd.log";

/// Recovery reads a few MB; waiting for the lock of a dying predecessor takes a second.
const START_WAIT: Duration = Duration::from_secs(60);

/// File systems without fallocate are filled with zeros: 1 TB at 300 MB/s.
const FORMAT_WAIT: Duration = Duration::from_secs(3600);

/// Length from which the log is moved to `offloadd.log.old` at a start.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// Last lines of the log to show when the daemon does not start.
const SHOWN_LINES_MAX: usize = 15;

/// Settings of a private daemon.
#[derive(Clone, Debug)]
pub struct PrivateSettings {
    /// Path of the program; by default `offloadd` beside this one, one directory up, or in `PATH`.
    pub program: Option<PathBuf>,
    /// Directory of settings, log and sockets; created if missing.
    pub dir: PathBuf,
    /// Devices of the store, each with the size of a new file. Missing files are formatted if all are missing and have one
    /// size.
    pub devices: Vec<(PathBuf, u64)>,
    /// Host memory that all sessions together may take.
    pub arena_bytes_max: u64,
    /// Operations in flight that one session may ask for.
    pub iodepth_max: u32,
    /// One of [`crate::ENGINES`].
    pub engine: String,
}

/// A running private daemon.
#[derive(Debug)]
pub struct PrivateDaemon {
    socket: PathBuf,
    log: PathBuf,
    pid: u32,
    keeper: Keeper,
    /// Removed with this value, after the child has ended.
    _short_dir: Option<OwnDir>,
}

impl PrivateDaemon {
    /// Formats the store if it is new, starts the daemon, and waits until it listens.
    pub fn start(settings: PrivateSettings) -> Result<Self, ClientError> {
        let program = find_program(settings.program.as_deref())?;
        make_dir(&settings.dir, false)?;
        let log = settings.dir.join(LOG);
        if fs::metadata(&log).is_ok_and(|found| found.len() > LOG_BYTES_MAX) {
            fs::rename(&log, settings.dir.join("offloadd.log.old"))
                .map_err(|e| failed(format!("cannot rename {}: {e}", log.display())))?;
        }
        if is_new(&settings.devices)? {
            format(&program, &settings.devices, &log)?;
            finish_format(&settings.devices)?;
        }
        let (socket, short_dir) = socket_place(&settings.dir)?;
        if let Some(dir) = &short_dir {
            link_log(dir.path(), &log)?;
        }
        let config = settings.dir.join("offloadd.toml");
        let text = config_text(&socket, &settings)?;
        own_file(OpenOptions::new().write(true).truncate(true), &config)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|e| failed(format!("cannot write {}: {e}", config.display())))?;
        let mut command = Command::new(&program);
        command.arg("serve").arg("--config").arg(&config);
        command.arg("--private").stdin(Stdio::null());
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::from(open_log(&log)?));
        let (keeper, pid, stdout) = Keeper::start(command, &program)?;
        // Dropping it after a failure ends the child and removes the directory.
        let daemon = Self {
            socket,
            log,
            pid,
            keeper,
            _short_dir: short_dir,
        };
        daemon.wait_ready(stdout)
    }

    /// Path of the socket, for [`crate::SessionSettings::socket`].
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Process number of the child.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn wait_ready(mut self, stdout: ChildStdout) -> Result<Self, ClientError> {
        let log = open_log(&self.log)?;
        let (sender, ready) = mpsc::sync_channel(1);
        // Ends with the child's output. It reads on after READY, or the child would block on a full pipe.
        std::thread::Builder::new()
            .name("offloadd-output".into())
            .spawn(move || {
                let mut log = log;
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if line.starts_with("READY") {
                        // An error means that the caller stopped waiting.
                        let _ = sender.try_send(());
                    }
                    // A full disk must not stop the daemon's output.
                    let _ = writeln!(log, "{line}");
                }
            })
            .map_err(|e| failed(format!("cannot start a thread: {e}")))?;
        let what = match ready.recv_timeout(START_WAIT) {
            Ok(()) => return Ok(self),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                format!("it was not ready after {} s", START_WAIT.as_secs())
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => match self.keeper.stop() {
                Some(status) => format!("it ended at once ({status})"),
                None => "it closed its output".into(),
            },
        };
        Err(failed(format!("{what}{}", end_of(&self.log))))
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

fn find_program(configured: Option<&Path>) -> Result<PathBuf, ClientError> {
    if let Some(program) = configured {
        if program.is_file() {
            return Ok(program.to_owned());
        }
        return Err(failed(format!(
            "there is no program at {}",
            program.display()
        )));
    }
    let exe = std::env::current_exe().ok();
    let near = exe.iter().flat_map(|exe| exe.ancestors().skip(1).take(2));
    let near: Vec<PathBuf> = near.map(Path::to_owned).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = (near.iter().cloned())
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join("offloadd"));
    programs.find(|program| program.is_file()).ok_or_else(|| {
        let near: Vec<String> = near.iter().map(|dir| dir.display().to_string()).collect();
        failed(format!(
            "there is no program `offloadd` in {}, nor in PATH; build it (`cargo build -p offloadd`), or set the socket of a running daemon",
            near.join(", ")
        ))
    })
}

/// Whether no device exists yet. If only some exist, a device is missing and must not be formatted. If a format was interrupted
/// while the finished devices were renamed, the renaming is completed.
fn is_new(devices: &[(PathBuf, u64)]) -> Result<bool, ClientError> {
    let missing: Vec<_> = devices.iter().filter(|(path, _)| !path.exists()).collect();
    if missing.len() == devices.len() {
        return Ok(true);
    }
    if !missing.is_empty() && missing.iter().all(|(path, _)| unfinished(path).exists()) {
        finish_format(devices)?;
        return Ok(false);
    }
    match missing.first() {
        None => Ok(false),
        Some((path, _)) => Err(failed(format!(
            "device {} is missing while other devices of its store exist: mount its drive, or delete the others to start a new store",
            path.display()
        ))),
    }
}

/// Name of a device until all devices are formatted. A start that is killed while it formats leaves only such files, and the
/// next one formats them again.
fn unfinished(device: &Path) -> PathBuf {
    let mut name = device.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Gives formatted devices their final names.
fn finish_format(devices: &[(PathBuf, u64)]) -> Result<(), ClientError> {
    for (path, _) in devices.iter().filter(|(path, _)| !path.exists()) {
        let dir = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::rename(unfinished(path), path)
            .and_then(|()| File::open(dir)?.sync_all())
            .map_err(|e| {
                failed(format!(
                    "cannot rename the new device {}: {e}",
                    path.display()
                ))
            })?;
    }
    Ok(())
}

fn format(program: &Path, devices: &[(PathBuf, u64)], log: &Path) -> Result<(), ClientError> {
    let Some((_, bytes)) = devices.first() else {
        return Err(failed("no devices are configured".into()));
    };
    if devices.iter().any(|(_, other)| other != bytes) {
        return Err(failed(
            "the devices have different sizes; format them with `offloadd format`".into(),
        ));
    }
    for (path, _) in devices {
        if let Some(parent) = path.parent() {
            make_dir(parent, false)?;
        }
    }
    // Without --force the format overwrites nothing, even if a file is created at this moment.
    let left: Vec<bool> = devices
        .iter()
        .map(|(path, _)| is_left(&unfinished(path)))
        .collect::<Result<_, _>>()?;
    let mut command = Command::new(program);
    command
        .arg("format")
        .args(devices.iter().map(|(path, _)| unfinished(path)));
    command.arg("--size").arg(bytes.to_string());
    command.arg("--private");
    if left.contains(&true) {
        command.arg("--force");
    }
    let output = open_log(log)?;
    let errors = output
        .try_clone()
        .map_err(|e| failed(format!("cannot write the log {}: {e}", log.display())))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .spawn()
        .map_err(|e| failed(format!("cannot start {}: {e}", program.display())))?;
    match keeper::wait(&mut child, FORMAT_WAIT) {
        Some(status) if status.success() => Ok(()),
        status => {
            keeper::end(&mut child);
            let how = status.map_or_else(|| "took too long".into(), |s| s.to_string());
            Err(failed(format!(
                "cannot format the devices ({how}){}",
                end_of(log)
            )))
        }
    }
}

/// Whether a killed start left this file. A file of another user or a link is refused: the store would be theirs to read, or
/// the target of the link would be overwritten.
fn is_left(new: &Path) -> Result<bool, ClientError> {
    let us = rustix::process::geteuid().as_raw();
    match fs::symlink_metadata(new) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(format!(
            "cannot read the metadata of {}: {error}",
            new.display()
        ))),
        Ok(found) if found.is_file() && found.uid() == us => Ok(true),
        Ok(_) => Err(failed(format!(
            "{} exists and is not a file of uid {us}: remove it, or choose a device in a directory of your own",
            new.display()
        ))),
    }
}

fn open_log(log: &Path) -> Result<File, ClientError> {
    own_file(OpenOptions::new().append(true), log)
        .map_err(|e| failed(format!("cannot open the log {}: {e}", log.display())))
}

/// Links to the log from the socket's directory, so that every process that knows the socket finds it.
fn link_log(dir: &Path, log: &Path) -> Result<(), ClientError> {
    let linked =
        std::path::absolute(log).and_then(|log| std::os::unix::fs::symlink(log, dir.join(LOG)));
    linked.map_err(|e| failed(format!("cannot link to the log in {}: {e}", dir.display())))
}

/// Last lines of the log, for a message.
fn end_of(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    let from = lines.len().saturating_sub(SHOWN_LINES_MAX);
    let mut shown = format!("; the end of its log {}:", log.display());
    for line in &lines[from..] {
        write!(shown, "\n  {line}").expect("writing to a String");
    }
    shown
}

fn failed(what: String) -> ClientError {
    ClientError::Private { what }
}
