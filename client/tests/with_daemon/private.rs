//! Tests that a private daemon ends with its user, reports why it did not start, never formats over a store with a missing drive, and can be reached
//! even if its directory's path is too long for a socket.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::real::*;
use offload_client::private::{PrivateDaemon, PrivateSettings};
use offload_client::{ClientError, Daemon};

fn is_alive(pid: u32) -> bool {
    // A zombie counts as dead: perhaps nobody has waited for it yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
}

fn assert_dies(pid: u32) {
    let until = Instant::now() + Duration::from_secs(60);
    while is_alive(pid) {
        assert!(Instant::now() < until, "pid {pid} lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn it_ends_with_its_value_and_starts_again_on_the_same_store() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    write(&mut session, 0..TILE_COUNT, 1);
    session.commit(Vec::new()).unwrap();
    let pid = daemon.pid();
    drop(daemon);
    assert!(!is_alive(pid));
    let gone = session.wait(LONG).unwrap_err();
    assert!(matches!(gone, ClientError::DaemonGone { .. }), "{gone}");
    // Who reads the error finds the log.
    let log = gone
        .to_string()
        .split_once("its log ")
        .unwrap()
        .1
        .to_owned();
    let log = log.split_once(" says why").unwrap().0.to_owned();
    assert!(std::fs::read_to_string(log).unwrap().contains("READY"));
    let daemon = place.start();
    assert_eq!(
        Daemon::connect(daemon.socket())
            .unwrap()
            .jobs()
            .unwrap()
            .len(),
        1
    );
}

const KEEPER: &str = "OFFLOAD_TEST_KEEPER_FOLDER";

#[test]
fn it_dies_with_its_process_however_that_ends_but_not_with_a_thread() {
    if let Some(dir) = std::env::var_os(KEEPER) {
        let dir = PathBuf::from(dir);
        let settings = PrivateSettings {
            engine: "psync".into(),
            ..settings_in(&dir)
        };
        // Started by a thread that ends at once; the daemon keeps running.
        let start = std::thread::spawn(|| PrivateDaemon::start(settings).unwrap());
        let daemon = start.join().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        Daemon::connect(daemon.socket()).unwrap();
        println!("\npid {}", daemon.pid());
        std::thread::sleep(LONG);
        return;
    }
    let place = Place::new();
    let mut keeper = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "private::it_dies_with_its_process_however_that_ends_but_not_with_a_thread",
            "--nocapture",
        ])
        .env(KEEPER, place.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = BufReader::new(keeper.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("pid ")?.parse::<u32>().ok())
        .expect("it says the daemon's pid");
    assert!(is_alive(pid));
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    // A run that is started again at once need not wait for the old daemon's end itself.
    let next = place.start();
    assert_dies(pid);
    Daemon::connect(next.socket()).unwrap();
}

#[test]
fn a_missing_device_is_named_and_nothing_is_formatted() {
    let place = Place::new();
    let (gone, _) = place.devices().remove(1);
    std::fs::remove_file(&gone).unwrap();
    let error = PrivateDaemon::start(place.settings())
        .unwrap_err()
        .to_string();
    assert!(error.contains(gone.to_str().unwrap()), "{error}");
    assert!(!gone.exists());
}

/// Starts that were killed while they formatted, or while they renamed the formatted devices.
#[test]
fn a_store_whose_making_was_interrupted_is_made_by_the_next_start() {
    let place = Place::new();
    let unfinished = |device: &Path| PathBuf::from(format!("{}.new", device.display()));
    let devices: Vec<PathBuf> = place.devices().into_iter().map(|(path, _)| path).collect();
    for device in &devices {
        std::fs::remove_file(device).unwrap();
    }
    std::fs::write(unfinished(&devices[0]), "half of a superblock").unwrap();
    drop(PrivateDaemon::start(place.settings()).unwrap());
    assert!(
        devices
            .iter()
            .all(|device| device.exists() && !unfinished(device).exists())
    );

    std::fs::rename(&devices[1], unfinished(&devices[1])).unwrap();
    drop(PrivateDaemon::start(place.settings()).unwrap());
    assert!(devices[1].exists());
}

#[test]
fn why_it_did_not_start_is_shown_from_its_log() {
    let place = Place::new();
    let (damaged, bytes) = place.devices().remove(0);
    std::fs::write(&damaged, vec![0; bytes as usize]).unwrap();
    let before = Instant::now();
    let error = PrivateDaemon::start(place.settings()).unwrap_err();
    let words = error.to_string();
    assert!(matches!(error, ClientError::Private { .. }));
    assert!(
        words.contains("offloadd.log") && words.contains("a.tiles"),
        "{words}"
    );
    assert!(before.elapsed() < Duration::from_secs(10));

    let mut settings = place.settings();
    settings.program = Some("/nowhere/offloadd".into());
    let words = PrivateDaemon::start(settings).unwrap_err().to_string();
    assert!(words.contains("/nowhere/offloadd"), "{words}");
}

#[test]
fn a_second_one_on_the_same_store_is_refused_by_name() {
    let place = Place::new();
    let first = place.start();
    let other = dir();
    let mut settings = place.settings();
    settings.dir = other.path().to_owned();
    let words = PrivateDaemon::start(settings).unwrap_err().to_string();
    assert!(words.contains("another offloadd"), "{words}");
    Daemon::connect(first.socket()).unwrap();
}

/// Returns a directory whose path is too long for a socket.
fn deep(dir: &Path) -> PathBuf {
    dir.join("d".repeat(60)).join("e".repeat(60))
}

#[test]
fn a_deep_directory_gets_its_sockets_elsewhere_for_itself_alone() {
    let place = Place::new();
    let deep = deep(place.dir.path());
    let mut settings = place.settings();
    settings.dir = deep.clone();
    let daemon = PrivateDaemon::start(settings).unwrap();
    let socket = daemon.socket().to_owned();
    assert!(!socket.starts_with(&deep));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(socket.parent().unwrap()), 0o700);
    Daemon::connect(&socket).unwrap();
    drop(daemon);
    assert!(!socket.parent().unwrap().exists());

    let daemon = place.start();
    assert_eq!(mode(daemon.socket().parent().unwrap()), 0o700);
}

const DEEP: &str = "OFFLOAD_TEST_DEEP_FOLDER";

/// A process whose private daemon has its socket in `base`; killed at the end of the test.
struct Deep {
    process: Child,
    socket: PathBuf,
    _place: Place,
}

impl Deep {
    fn start(base: &Path) -> Self {
        let place = Place::new();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "private::what_a_killed_process_left_elsewhere_is_removed_by_the_next_start",
                "--nocapture",
            ])
            .env(DEEP, place.dir.path())
            .env("XDG_RUNTIME_DIR", base)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let socket = BufReader::new(process.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .find_map(|line| Some(PathBuf::from(line.strip_prefix("socket ")?)))
            .expect("it says where its socket is");
        assert!(socket.starts_with(base), "{}", socket.display());
        Self {
            process,
            socket,
            _place: place,
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn has_dir(&self) -> bool {
        self.socket.parent().unwrap().exists()
    }
}

impl Drop for Deep {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn what_a_killed_process_left_elsewhere_is_removed_by_the_next_start() {
    if let Some(dir) = std::env::var_os(DEEP) {
        let dir = PathBuf::from(dir);
        let settings = PrivateSettings {
            dir: deep(&dir),
            ..settings_in(&dir)
        };
        let daemon = PrivateDaemon::start(settings).unwrap();
        println!("\nsocket {}", daemon.socket().display());
        std::thread::sleep(10 * LONG);
        return;
    }
    // A short path, whatever the tests' own directory is.
    let base = tempfile::tempdir().unwrap();
    let [mut killed, living] = [(); 2].map(|()| Deep::start(base.path()));
    killed.kill();
    assert!(killed.has_dir(), "nobody could remove it");
    let next = Deep::start(base.path());
    assert!(!killed.has_dir());
    for lives in [&living, &next] {
        Daemon::connect(&lives.socket).unwrap();
    }
}

#[test]
fn a_device_that_others_can_read_or_change_is_refused() {
    let place = Place::new();
    drop(place.start());
    let (device, _) = place.devices().remove(0);
    let refusal = || {
        PrivateDaemon::start(place.settings())
            .unwrap_err()
            .to_string()
    };
    let set_mode = |mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&device, mode).unwrap();
    };
    for mode in [0o666, 0o640, 0o601] {
        set_mode(mode);
        let words = refusal();
        let fix = format!("chmod 600 {}", device.display());
        assert!(
            words.contains(&format!("mode {mode:04o}")) && words.contains(&fix),
            "{words}"
        );
    }
    set_mode(0o600);
    let elsewhere = place.dir.path().join("elsewhere");
    std::fs::rename(&device, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &device).unwrap();
    let words = refusal();
    assert!(words.contains("it is a symbolic link"), "{words}");
    std::fs::rename(&elsewhere, &device).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&device, Some(65534), None).unwrap();
        let words = refusal();
        assert!(words.contains("belongs to uid 65534"), "{words}");
        std::os::unix::fs::chown(&device, Some(0), None).unwrap();
    }
    place.start();
}

#[test]
fn what_somebody_laid_where_a_device_is_to_be_made_is_not_written_over() {
    let place = Place::new();
    for (device, _) in place.devices() {
        std::fs::remove_file(device).unwrap();
    }
    let (device, _) = place.devices().remove(0);
    let new = PathBuf::from(format!("{}.new", device.display()));
    let precious = place.dir.path().join("precious");
    std::fs::write(&precious, "mine").unwrap();
    std::os::unix::fs::symlink(&precious, &new).unwrap();
    let words = PrivateDaemon::start(place.settings())
        .unwrap_err()
        .to_string();
    assert!(
        words.contains("remove it") && words.contains(new.to_str().unwrap()),
        "{words}"
    );
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "mine");
}

#[test]
fn nobody_else_can_read_what_it_makes() {
    let place = Place::new();
    let _daemon = place.start();
    let mut dirs = vec![place.dir.path().to_owned()];
    let mut seen = 0;
    while let Some(dir) = dirs.pop() {
        for entry in dir.read_dir().unwrap() {
            let (path, found) = entry.map(|e| (e.path(), e.metadata().unwrap())).unwrap();
            if found.is_dir() {
                dirs.push(path.clone());
            }
            // Sockets have other modes; their directory is closed to other users.
            if found.is_dir() || found.is_file() {
                seen += 1;
                assert_eq!(found.mode() & 0o077, 0, "{}", path.display());
            }
        }
    }
    assert!(seen >= 5, "{seen}");
}

#[test]
fn it_keeps_no_descriptor_of_its_parent() {
    let place = Place::new();
    let (reader, _writer) = std::io::pipe().unwrap();
    rustix::io::fcntl_setfd(&reader, rustix::io::FdFlags::empty()).unwrap();
    let name = |path: PathBuf| std::fs::read_link(path).unwrap_or_default();
    let ours = name(format!("/proc/self/fd/{}", reader.as_raw_fd()).into());
    assert!(ours.to_str().unwrap().starts_with("pipe:"));
    let daemon = place.start();
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    let open: Vec<_> = open.map(|entry| name(entry.unwrap().path())).collect();
    assert!(open.len() > 3 && !open.contains(&ours), "{open:?}");
}
