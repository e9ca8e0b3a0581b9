//! Tests the Debian package: no missing or writable files, a manual page for each command, scripts that work without systemd, an installation that
//! can be removed, and a purge that keeps stores.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", words(&output));
    words(&output)
}

/// Builds the package into `dir`; `None` where it cannot be built.
fn package(dir: &Path) -> Option<PathBuf> {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        println!(
            "skipped: {}: there is no dpkg-deb",
            std::thread::current().name().unwrap_or("a test")
        );
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/deb.sh");
    // A debug build is large: compressing it well takes a minute.
    let printed = run(Command::new(script)
        .env("DPKG_DEB_COMPRESSOR_TYPE", "none")
        .arg("offloadd")
        .arg(Path::new(env!("CARGO_BIN_EXE_offloadd")).with_file_name(""))
        .arg(dir));
    let path = PathBuf::from(printed.trim());
    assert!(path.starts_with(dir), "{printed}");
    Some(path)
}

/// Lists the files below `dir`, with their modes.
fn files(dir: &Path) -> Vec<(String, u32)> {
    fn walk(root: &Path, dir: &Path, found: &mut Vec<(String, u32)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            match metadata.is_dir() {
                true => walk(root, &path, found),
                false => {
                    let name = path.strip_prefix(root).unwrap().display().to_string();
                    found.push((name, metadata.permissions().mode() & 0o7777));
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(dir, dir, &mut found);
    found.sort();
    found
}

/// Lists the commands that the program's help names.
fn commands() -> Vec<String> {
    let help = run(Command::new(env!("CARGO_BIN_EXE_offloadd")).arg("--help"));
    let (_, list) = help.split_once("Commands:\n").unwrap();
    let names = list
        .lines()
        .map_while(|line| line.split_whitespace().next());
    names
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_package_holds_the_program_its_unit_settings_and_pages() {
    let dir = tempfile::tempdir().unwrap();
    let Some(package) = package(dir.path()) else {
        return;
    };
    let tree = dir.path().join("tree");
    run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&tree));
    assert_eq!(std::fs::metadata(&tree).unwrap().mode() & 0o777, 0o755);
    let found = files(&tree);
    let has = |name: &str| found.iter().any(|(other, _)| other == name);
    for name in [
        "usr/lib/systemd/system/offloadd.service",
        "usr/lib/sysusers.d/offloadd.conf",
        "usr/lib/tmpfiles.d/offloadd.conf",
        "etc/offloadd/offloadd.toml",
        "usr/share/doc/offloadd/raw-drives.conf",
        "usr/share/doc/offloadd/metrics-loopback.conf",
        "usr/share/bash-completion/completions/offloadd",
        "usr/share/zsh/vendor-completions/_offloadd",
        "usr/share/fish/vendor_completions.d/offloadd.fish",
        "usr/share/man/man8/offloadd.8.gz",
    ] {
        assert!(has(name), "{name}: {found:?}");
    }
    let copyright = tree.join("usr/share/doc/offloadd/copyright");
    let copyright = std::fs::read_to_string(copyright).unwrap();
    for (license, words) in [
        ("LICENSE-MIT", "Permission is hereby granted"),
        ("LICENSE-APACHE", "Apache License"),
    ] {
        let place = format!("usr/share/doc/offloadd/{license}");
        assert!(copyright.contains(&format!("/{place}")), "{copyright}");
        let text = std::fs::read_to_string(tree.join(&place)).unwrap();
        assert!(text.contains(words), "{place}");
    }
    let unit =
        std::fs::read_to_string(tree.join("usr/lib/systemd/system/offloadd.service")).unwrap();
    assert!(unit.contains("\nMemoryMax="), "memory has no bound: {unit}");
    let commands = commands();
    assert!(commands.len() >= 7, "{commands:?}");
    for command in commands
        .iter()
        .map(String::as_str)
        .chain(["job-delete", "device-add"])
    {
        let page = format!("usr/share/man/man8/offloadd-{command}.8.gz");
        assert!(has(&page), "{page}");
        let text = run(Command::new("gzip").arg("-dc").arg(tree.join(&page)));
        assert!(text.contains(".SH SYNOPSIS"), "{text}");
    }
    for (name, mode) in &found {
        let expected = if name == "usr/bin/offloadd" {
            0o755
        } else {
            0o644
        };
        assert_eq!(*mode, expected, "{name}");
    }
    let program = tree.join("usr/bin/offloadd");
    assert!(run(Command::new(program).arg("--version")).starts_with("offloadd "));
    let completions = tree.join("usr/share/bash-completion/completions/offloadd");
    run(Command::new("bash").arg("-n").arg(&completions));
    let completions = std::fs::read_to_string(completions).unwrap();
    assert!(completions.contains("check-config"));
    // The administrator's changes are kept.
    let control = dir.path().join("control");
    run(Command::new("dpkg-deb")
        .arg("-e")
        .arg(&package)
        .arg(&control));
    let kept = std::fs::read_to_string(control.join("conffiles")).unwrap();
    assert_eq!(kept, "/etc/offloadd/offloadd.toml\n");
    for script in ["postinst", "prerm", "postrm"] {
        run(Command::new("sh").arg("-n").arg(control.join(script)));
        // In a message in double quotes, a command between backticks would run.
        let text = std::fs::read_to_string(control.join(script)).unwrap();
        assert!(!text.contains('`'), "{script}: {text}");
    }
}

/// dpkg with a system of its own below `root`. Its scripts run outside of it and get its path.
fn dpkg(root: &Path) -> Command {
    let mut command = Command::new("dpkg");
    command.arg(format!("--root={}", root.display())).args([
        "--force-script-chrootless",
        "--force-depends",
        "--log=/dev/null",
    ]);
    command
}

#[test]
fn it_installs_and_purges_cleanly_and_stores_stay() {
    if !rustix::process::geteuid().is_root() {
        println!(
            "skipped: {}: only root can install",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(package) = package(dir.path()) else {
        return;
    };
    let root = dir.path().join("root");
    for part in ["info", "updates", "triggers"] {
        std::fs::create_dir_all(root.join("var/lib/dpkg").join(part)).unwrap();
    }
    std::fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    let machine = || ["/etc/passwd", "/etc/group"].map(|file| std::fs::read(file).unwrap());
    let before = (machine(), Path::new("/usr/bin/offloadd").exists());

    let printed = run(dpkg(&root).arg("--install").arg(&package));
    assert!(
        printed.contains("systemctl enable --now offloadd"),
        "{printed}"
    );
    assert!(printed.contains("set the devices in /etc/"), "{printed}");
    assert!(root.join("usr/bin/offloadd").exists());
    let state = root.join("var/lib/offloadd");
    if Command::new("systemd-sysusers")
        .arg("--version")
        .output()
        .is_ok()
    {
        let users = std::fs::read_to_string(root.join("etc/passwd")).unwrap();
        let user = users
            .lines()
            .find(|line| line.starts_with("offloadd:"))
            .expect(&users);
        let uid: u32 = user.split(':').nth(2).unwrap().parse().unwrap();
        let found = std::fs::metadata(&state).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (uid, 0o700));
    } else {
        std::fs::create_dir_all(&state).unwrap();
    }
    // An upgrade keeps changed settings.
    let settings = root.join("etc/offloadd/offloadd.toml");
    let changed = std::fs::read_to_string(&settings).unwrap() + "# mine\n";
    std::fs::write(&settings, &changed).unwrap();
    run(dpkg(&root)
        .args(["--force-confold", "--install"])
        .arg(&package));
    assert_eq!(std::fs::read_to_string(&settings).unwrap(), changed);

    std::fs::write(state.join("tiles"), "months of work").unwrap();
    run(dpkg(&root).args(["--remove", "offloadd"]));
    assert!(settings.exists() && !root.join("usr/bin/offloadd").exists());
    let printed = run(dpkg(&root).args(["--purge", "offloadd"]));
    assert!(
        printed.contains("kept the stores in") && printed.contains("var/lib/offloadd"),
        "{printed}"
    );
    assert!(state.join("tiles").exists());
    let left: Vec<_> = files(&root)
        .into_iter()
        .filter(|(name, _)| !name.starts_with("var/lib/dpkg/") && name.contains("offloadd"))
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(!root.join("etc/offloadd").exists());

    std::fs::remove_file(state.join("tiles")).unwrap();
    run(dpkg(&root).arg("--install").arg(&package));
    run(dpkg(&root).args(["--purge", "offloadd"]));
    assert!(!state.exists());
    assert_eq!((machine(), Path::new("/usr/bin/offloadd").exists()), before);
}
