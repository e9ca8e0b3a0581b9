//! Installs the package on a Debian, whose systemd runs the daemon with sandbox and seccomp filter enforced. What could go wrong: scripts that fail
//! under systemd, READY that never comes, a filter that forbids io_uring or direct I/O, a daemon that does not come back, sessions that do not
//! survive its restart, a removal that deletes stores.
//!
//! `offloadd/tests/guest/debian.sh` makes the Debian (root, apt); without it the test is skipped. It takes some minutes, most of them for an emulated
//! processor to boot.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::machine::Parts;
use crate::writer;

const GENERATIONS: u64 = 3;

/// Time limit of the guest: an emulated processor on a busy machine is slow.
const LONG: Duration = Duration::from_secs(1500);

/// Init script that PID 1 runs when it has started everything.
const INIT: &str = "#!/bin/sh
cat > /etc/systemd/system/payload.service <<END
[Unit]
After=multi-user.target
[Service]
ExecStart=/payload/payload.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
END
mkdir -p /etc/systemd/system/multi-user.target.wants
ln -sf ../payload.service /etc/systemd/system/multi-user.target.wants/
# It would take the line that the test reads.
ln -sf /dev/null /etc/systemd/system/serial-getty@ttyS0.service
# Should the test be killed, nobody else switches the machine off.
(sleep 1600; echo o >/proc/sysrq-trigger) &
exec /sbin/init
";

#[test]
fn systemd_runs_the_installed_daemon() {
    if let Some(socket) = std::env::var_os(writer::SOCKET) {
        let socket = Path::new(&socket);
        return match std::env::var_os(writer::RESTART) {
            None => writer::commit_generations(socket, GENERATIONS),
            Some(dir) => writer::survive_a_restart(socket, Path::new(&dir)),
        };
    }
    let Some(parts) = Parts::find() else { return };
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest/debian.ext4");
    if !made.exists() {
        println!(
            "skipped: systemd_runs_the_installed_daemon: no target/guest/debian.ext4 (offloadd/tests/guest/debian.sh makes it)"
        );
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("image");
    std::fs::copy(made, &image).unwrap();
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/deb.sh");
    crate::initramfs::stripped_daemon(dir.path());
    let output = Command::new(package)
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .arg("offloadd")
        .arg(dir.path())
        .arg(dir.path())
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    let files = [
        (
            "payload/offloadd.deb",
            std::fs::read(printed.trim()).unwrap(),
        ),
        ("payload/payload.sh", include_bytes!("payload.sh").to_vec()),
        ("payload/init", INIT.into()),
    ];
    let mut machine = parts.boot_system(dir.path(), &image, &files, LONG);
    let (mut ok, mut ended) = (0, false);
    let mut facts = Vec::new();
    while let Some(line) = machine.line() {
        if let Some((_, told)) = line.split_once("GUEST ") {
            println!("{told}");
            ok += u32::from(told.starts_with("OK "));
            facts.extend(told.strip_prefix("FACT ").map(str::to_owned));
            ended |= told == "END";
        }
    }
    let printed = machine.printed().join("\n");
    assert!(ended && !printed.contains("GUEST FAILED"), "{printed}");
    assert!(ok >= 23, "{ok} steps: {printed}");
    let fact = |what: &str| {
        let found = facts.iter().find(|fact| fact.starts_with(what));
        found.unwrap_or_else(|| panic!("nothing told of {what}: {printed}"))
    };
    assert!(fact("READY").contains("engine uring"), "{printed}");
    // 2: a filter. The daemon has no capability and can get none.
    assert_eq!(fact("Seccomp:"), "Seccomp: 2");
    assert_eq!(fact("NoNewPrivs:"), "NoNewPrivs: 1");
    assert_eq!(fact("CapEff:"), "CapEff: 0000000000000000");
    assert!(fact("less: READY").contains("engine psync"), "{printed}");
    let [held, again] =
        ["held {", "held again {"].map(|what| fact(what).split_once('{').unwrap().1);
    assert!(held.contains(writer::JOB), "{held}");
    assert_eq!(held, again, "what it held before it was killed");
    assert_eq!(fact("Result="), "Result=success");
}
