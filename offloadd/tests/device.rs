//! Tests that everything that makes a device unusable is found before the device is used, and named with its path and what to do; that a store has
//! one daemon; and that a full disk is found before a run.

mod another_user;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use offloadd::blocks::{BlockErrorCause, Blocks};
use offloadd::device::{Device, DeviceBlocks, DeviceError};
use offloadd::io::AlignedBytes;

use another_user::{again, expect_success};

fn refusal(path: &Path) -> String {
    let message = Device::open(path).unwrap_err().to_string();
    let named = format!("device {}: ", path.display());
    assert!(message.starts_with(&named), "{message}");
    message
}

#[test]
fn a_missing_path_a_directory_and_buffered_file_systems_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("x/y");
    assert!(refusal(&missing).contains("no such file; mount its drive"));
    let dir_itself = refusal(dir.path());
    assert!(dir_itself.contains("neither a regular file nor a block device"));
    // procfs supports direct I/O on no kernel.
    let buffered = refusal(Path::new("/proc/self/comm"));
    assert!(buffered.contains("O_DIRECT"), "{buffered}");
}

const CHILD: &str = "OFFLOADD_TEST_UNWRITABLE";

#[test]
fn a_device_of_another_user_is_named_with_what_to_do() {
    if let Some(path) = std::env::var_os(CHILD) {
        let path = Path::new(&path);
        let dir = path.parent().unwrap();
        // The device itself, or the first directory on the way that is closed.
        for (path, cause) in [
            (path.to_owned(), path.to_owned()),
            (dir.join("closed/b"), dir.join("closed")),
        ] {
            let message = refusal(&path);
            let fix = format!("chown 65534 {}", cause.display());
            assert!(
                message.contains("uid 65534 may not read and write it: ")
                    && message.ends_with(&fix),
                "{message}"
            );
        }
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can become another user",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, vec![0; 4096]).unwrap();
    let open = |path: &Path, mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).unwrap();
    };
    open(dir.path(), 0o755);
    let closed = dir.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    open(&closed, 0o700);
    std::fs::write(closed.join("b"), vec![0; 4096]).unwrap();
    std::os::unix::fs::chown(closed.join("b"), Some(65534), None).unwrap();
    let mut child = again("a_device_of_another_user_is_named_with_what_to_do");
    child.env(CHILD, &path);
    expect_success(child);
}

#[test]
fn a_store_has_one_daemon_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let first = Device::create(&path, Some(1 << 20), false).unwrap();
    let since = Instant::now();
    let error = Device::open(&path).expect_err("the store has a daemon");
    assert!(
        since.elapsed() >= Duration::from_secs(1),
        "it waits for one that is dying"
    );
    let ours = std::process::id();
    assert!(
        matches!(error, DeviceError::Locked { pid: Some(pid), .. } if pid == ours),
        "{error}"
    );
    assert!(error.to_string().contains("by another offloadd"));

    // A predecessor that ends while we wait releases its lock in time.
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(first);
    });
    Device::open(&path).unwrap();
    ending.join().unwrap();
}

/// After an exit the kernel may keep a process's files, and with them the lock, for longer than a second.
#[test]
fn a_lock_whose_owner_has_ended_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiles");
    drop(Device::create(&path, Some(1 << 20), false).unwrap());
    // `flock` takes the lock and ends; `sleep` keeps the open file, like a ring that is being torn down.
    let status = Command::new("sh")
        .args(["-c", "exec 9<>\"$0\"; flock 9; sleep 1.6 &"])
        .arg(&path)
        .status()
        .unwrap();
    assert!(status.success());
    let start = std::time::Instant::now();
    Device::open(&path).unwrap();
    assert!(
        start.elapsed() > Duration::from_secs(1),
        "the lock was free all the time: {:?}",
        start.elapsed()
    );
}

#[test]
fn without_its_lock_the_test_of_one_daemon_fails() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_store_has_one_daemon_at_a_time"])
        .env("OFFLOADD_DISABLE", "lock")
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{words}");
    assert!(words.contains("the store has a daemon"), "{words}");
}

#[test]
fn a_file_that_exists_stays_as_it_is_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("thesis.tex");
    std::fs::write(&path, "years of work").unwrap();
    let error = Device::create(&path, Some(1 << 20), false).unwrap_err();
    assert!(
        error.to_string().contains("--force overwrites it")
            || error.to_string().contains("`--force`"),
        "{error}"
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "years of work");
}

#[test]
fn too_large_a_file_is_refused_naming_both_sizes_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let error = Device::create(&path, Some(1 << 52), false).unwrap_err();
    let DeviceError::NoSpace {
        asked_bytes,
        free_bytes,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(asked_bytes, 1 << 52);
    assert!(free_bytes > 0 && free_bytes < 1 << 52);
    assert!(
        error.to_string().contains("4096.0 TiB are needed"),
        "{error}"
    );
    assert!(!path.exists());
}

#[test]
fn a_files_space_is_reserved_when_it_is_made() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let device = Device::create(&path, Some(3 << 20), false).unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(device.bytes(), 3 << 20);
    assert_eq!(found.len(), 3 << 20);
    let has_holes = |device: &Device| {
        device
            .risks()
            .iter()
            .any(|risk| risk.what.starts_with("has holes"))
    };
    assert!(found.blocks() * 512 >= 3 << 20 && !has_holes(&device));
    let copy = dir.path().join("copy");
    let sparse = std::fs::File::create(&copy).unwrap();
    sparse.set_len(3 << 20).unwrap();
    assert!(has_holes(&Device::open(&copy).unwrap()));
    assert_eq!(
        found.mode() & 0o777,
        0o600,
        "others' parameters are nobody's business"
    );
}

#[test]
fn blocks_move_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let devices = ["a", "b"]
        .map(|name| Device::create(&dir.path().join(name), Some(1 << 20), false).unwrap());
    let mut blocks = DeviceBlocks(&devices);
    let mut some = AlignedBytes::from_slice(&[5; 8192]);
    blocks.write(1, 4096, &some).unwrap();
    blocks.flush(1).unwrap();
    some.as_mut_slice().fill(0);
    blocks.read(1, 4096, &mut some).unwrap();
    assert!(some.as_slice().iter().all(|b| *b == 5));
    blocks.read(0, 4096, &mut some).unwrap();
    assert!(some.as_slice().iter().all(|b| *b == 0), "the other device");
    let error = blocks.read(1, (1 << 20) - 4096, &mut some).unwrap_err();
    assert_eq!(error.cause, BlockErrorCause::Short(4096));
    assert_eq!(error.path, devices[1].path());
    let error = blocks.write(1, 77, &some).unwrap_err();
    assert_eq!(error.cause, BlockErrorCause::Errno(22), "EINVAL");
}

#[test]
fn a_file_that_holds_anything_at_its_beginning_is_not_blank_whatever_its_length() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("file");
    for bytes in [1, 511, 512, 4095, 4096, 4097, 8191, (1 << 20) - 1, 2 << 20] {
        let mut text = vec![0; bytes];
        std::fs::write(&path, &text).unwrap();
        Device::open(&path).unwrap().check_blank().unwrap();
        // The last byte of those that are checked.
        text[bytes.min(1 << 20) - 1] = 1;
        std::fs::write(&path, &text).unwrap();
        let refused = Device::open(&path).unwrap().check_blank();
        assert!(
            matches!(refused, Err(DeviceError::Exists { .. })),
            "{bytes}: {refused:?}"
        );
    }
}
