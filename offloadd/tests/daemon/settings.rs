//! Tests settings before a start and in a running daemon. What could go wrong: a check that accepts what a start refuses, or disturbs a daemon; a
//! reload that applies half of a file, or ends the daemon; a change that is silently ignored.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Daemon, Store, eventually, expect_tiles, fill_tiles, open, program, words};
use crate::growth::device;

const SOON: Duration = Duration::from_secs(60);

fn check(config: &Path) -> Output {
    let mut command = program();
    command.arg("check-config").arg(config).output().unwrap()
}

/// Returns the errors about these settings.
fn refusal(config: &Path) -> String {
    let output = check(config);
    assert_eq!(output.status.code(), Some(78), "{}", words(&output));
    assert!(output.stdout.is_empty(), "{}", words(&output));
    words(&output)
}

fn change(store: &Store, from: &str, to: &str) {
    let text = std::fs::read_to_string(&store.config).unwrap();
    let changed = text.replace(from, to);
    assert_ne!(changed, text);
    std::fs::write(&store.config, changed).unwrap();
}

#[test]
fn good_settings_are_printed_whole_and_can_be_read_again_beside_a_daemon() {
    let store = Store::new(2, "auto");
    let _daemon = store.serve();
    let output = check(&store.config);
    assert!(output.status.success(), "{}", words(&output));
    let resolved = String::from_utf8(output.stdout).unwrap();
    assert!(resolved.contains("sessions_max = 64\n"), "{resolved}");
    let again = store.dir.path().join("again.toml");
    std::fs::write(&again, resolved).unwrap();
    assert!(check(&again).status.success());
}

#[test]
fn nobody_is_advised_to_format_a_file_that_holds_something_else() {
    let store = Store::new(1, "auto");
    // One file is as small as /etc/passwd, the other larger than the beginning of a store.
    for bytes in [1000, 4 << 20] {
        let text = "root:x:0:0:root:/root:/bin/bash\n".repeat(bytes / 32 + 1);
        std::fs::write(&store.devices[0], &text).unwrap();
        let printed = refusal(&store.config);
        assert!(!printed.contains("format"), "{printed}");
        assert!(
            printed.contains("content that offloadd did not write"),
            "{printed}"
        );
        assert_eq!(std::fs::read_to_string(&store.devices[0]).unwrap(), text);
    }
    // An empty file is allowed.
    std::fs::write(&store.devices[0], []).unwrap();
    let printed = refusal(&store.config);
    assert!(printed.contains("offloadd format"), "{printed}");
}

#[test]
fn what_a_start_would_refuse_is_refused_with_what_mends_it() {
    let store = Store::new(2, "auto");
    let good = std::fs::read_to_string(&store.config).unwrap();
    let device = store.devices[1].display().to_string();
    let cases = [
        ("64MiB", "4000TiB", "arena_bytes_max = \""),
        ("socket = ", "sockets = ", "did you mean `socket`"),
        ("device1", "device9", "offloadd format"),
        ("/run/offloadd.sock", "/device0", "not a socket exists at"),
        (
            "/run/offloadd.sock",
            "/no/such/run/offloadd.sock",
            "cannot create its directory",
        ),
        ("/device1", "", "devices = [regular files or block devices]"),
        (
            "offloadd.sock\"",
            "offloadd.sock\"\nsessions_max = 0",
            "sessions_max",
        ),
    ];
    for (from, to, printed) in cases {
        std::fs::write(&store.config, &good).unwrap();
        change(&store, from, to);
        let message = refusal(&store.config);
        assert!(message.contains(printed), "{to}: {message}");
        // A start refuses it, too.
        store.refusal();
    }
    let other = Store::new(2, "auto");
    std::fs::write(&store.config, &good).unwrap();
    change(&store, &device, other.devices[1].to_str().unwrap());
    let message = refusal(&store.config);
    assert!(message.contains("belongs to store"), "{message}");
    // Every wrong device is named, not only the first.
    std::fs::write(&store.config, good.replace("/device", "/none")).unwrap();
    let message = refusal(&store.config);
    assert!(
        message.contains("none0") && message.contains("none1"),
        "{message}"
    );
}

#[test]
fn what_can_be_served_but_should_not_be_is_named_with_what_mends_it() {
    let store = Store::new(1, "auto");
    let device = store.devices[0].display().to_string();
    let shell = |line: &str| {
        let output = std::process::Command::new("sh").args(["-c", line]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", words(&output));
    };
    let copied = format!(
        "cp --sparse=always {device} {device}.new && mv {device}.new {device} && chmod 600 {device}"
    );
    for (made, why, fix) in [
        (
            format!("chmod 606 {device}"),
            "has mode 0606, so that other users could read",
            format!("chmod 600 {device}"),
        ),
        (
            copied,
            "has holes",
            format!("fallocate --length {} {device}", 8 << 20),
        ),
    ] {
        assert!(!words(&check(&store.config)).contains(why));
        shell(&made);
        let checked = words(&check(&store.config));
        let hint = format!("HINT    device {device}: ");
        assert!(
            checked.contains(&hint) && checked.contains(why) && checked.contains(&fix),
            "{checked}"
        );
        let output = program()
            .args(["doctor", "--config"])
            .arg(&store.config)
            .output()
            .unwrap();
        assert_eq!(words(&output).matches(why).count(), 1, "{}", words(&output));
        let printed = store.serve().last_words();
        let warned = printed
            .lines()
            .find(|line| line.contains("WARN") && line.contains(why));
        assert!(warned.expect(&printed).contains(&fix), "{printed}");
        // What is advised removes the cause.
        shell(&fix);
        assert!(!words(&check(&store.config)).contains(why));
    }
}

#[test]
fn a_store_in_memory_is_made_with_a_warning() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let tiles = dir.path().join("tiles");
    let mut command = program();
    let output = command
        .arg("format")
        .arg(&tiles)
        .args(["--size", "8MiB"])
        .output();
    let printed = words(&output.unwrap());
    if printed.contains("O_DIRECT") {
        println!(
            "skipped: a_store_in_memory_is_made_with_a_warning: no direct I/O on tmpfs before Linux 6.6"
        );
        return;
    }
    assert!(
        printed.contains("tmpfs stores its files in memory: they do not survive a reboot"),
        "{printed}"
    );
}

#[test]
fn a_damaged_store_is_refused_and_left_as_it_is() {
    let store = Store::new(1, "auto");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&store.devices[0])
        .unwrap();
    for offset in [0, 64 << 10] {
        file.write_all_at(&[7; 4096], offset).unwrap();
    }
    let before = std::fs::read(&store.devices[0]).unwrap();
    let message = refusal(&store.config);
    assert!(
        message.contains(&store.devices[0].display().to_string()),
        "{message}"
    );
    assert!(std::fs::read(&store.devices[0]).unwrap() == before);
}

#[test]
fn sighup_takes_up_what_can_change_and_names_what_cannot() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 8);
    fill_tiles(&mut session, 8, working, 10);
    assert!(control.arena_free_bytes() > 32 << 20);

    // A limit below the memory in use takes nothing away.
    change(&store, "64MiB", "8KiB");
    change(&store, "engine", "sessions_max = 1\nengine");
    daemon.signal(Signal::HUP);
    eventually("nothing is free any more", SOON, || {
        control.arena_free_bytes() == 0
    });
    session.commit(&mut control, working, b"one");
    expect_tiles(&mut session, 8, 10);
    let message = control.open_session(open("other")).unwrap_err().message;
    assert!(
        message.contains("1 sessions are open, which is the limit"),
        "{message}"
    );

    change(&store, "8KiB", "128MiB");
    change(&store, "sessions_max = 1\n", "sessions_max = 1000\n");
    let mut text = std::fs::read_to_string(&store.config).unwrap();
    text += "[quota.uid.1000.job.llama]\nweight = 200\n";
    std::fs::write(&store.config, text).unwrap();
    change(&store, "/run/offloadd.sock", "/elsewhere/offloadd.sock");
    daemon.signal(Signal::HUP);
    eventually("there is room again", SOON, || {
        control.arena_free_bytes() > 100 << 20
    });
    let other = control.session("other");
    drop((session, other));
    let printed = daemon.last_words();
    assert!(printed.contains("`socket` needs a restart"), "{printed}");
    let unused = "[quota.uid.1000.job.llama] applies to no job in the store now";
    assert!(printed.contains(unused), "{printed}");
    assert!(
        printed.contains("`sessions_max` above 64, its value at the start"),
        "{printed}"
    );
    for changed in [
        "changed settings applied: arena_bytes_max = 8192 (was 67108864), sessions_max = 1 (was 64)",
        "changed settings applied: arena_bytes_max = 134217728 (was 8192), quota.uid.1000.job.llama.weight = 200 (was unset), \
         sessions_max = 64 (was 1); not applied: `socket` needs a restart; ",
    ] {
        assert!(printed.contains(changed), "{changed}: {printed}");
    }
}

#[test]
fn a_device_that_came_and_was_added_to_the_list_takes_no_restart() {
    let mut store = Store::new(1, "auto");
    let daemon = store.serve();
    let new = store.dir.path().join("device1");
    let output = device(&store, "add", &new, &["--size", "8MiB"]);
    assert!(output.status.success(), "{}", words(&output));
    store.devices.push(new);
    store.write_config(&store.socket(), "auto");
    change(&store, "64MiB", "128MiB");
    daemon.signal(Signal::HUP);
    let mut control = daemon.control();
    eventually("there is more room", SOON, || {
        control.arena_free_bytes() == 128 << 20
    });
    let printed = daemon.last_words();
    assert!(printed.contains("changed settings applied"), "{printed}");
    let uid = rustix::process::geteuid();
    let added = format!(
        "tiles move to it. Add it to `devices` in the settings before the next start uid={uid} pid="
    );
    assert!(printed.contains(&added), "{printed}");
    assert!(!printed.contains("needs a restart"), "{printed}");
}

#[test]
fn wrong_settings_change_nothing_in_a_running_daemon() {
    let store = Store::new(1, "auto");
    let notify = store.dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(SOON)).unwrap();
    let mut command = store.serve_command();
    command.env("NOTIFY_SOCKET", &notify);
    let daemon = Daemon::start(command, store.socket());
    change(&store, "64MiB", "64Mb");
    daemon.signal(Signal::HUP);
    let mut heard = String::new();
    while !heard.contains("were not applied") {
        let mut bytes = [0; 512];
        let length = manager.recv(&mut bytes).expect(&heard);
        heard += &String::from_utf8_lossy(&bytes[..length]);
    }
    let (reloading, ready) = (heard.find("RELOADING=1"), heard.rfind("READY=1"));
    assert!(reloading.is_some() && reloading < ready, "{heard}");
    assert_eq!(daemon.control().arena_free_bytes(), 64 << 20);
    let printed = daemon.last_words();
    assert!(printed.contains("the settings stay unchanged"), "{printed}");
    assert!(printed.contains("64Mb"), "{printed}");
}
