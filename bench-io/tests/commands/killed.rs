//! What could go wrong: a bench-io that is killed leaves a program that goes on, drives that nobody takes away, or a part of
//! one that no list names; or a living one loses its own. Needs what rate-limited drives need.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::{alone, bench_io, cannot_make_testdrives, program, said, script};
use crate::testdrives::Set;

/// A machine that does other things too still comes to it in this time.
const TIMEOUT: Duration = Duration::from_secs(60);

fn until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !there() {
        assert!(Instant::now() < deadline, "{what} in {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process runs. One that nobody has waited for yet does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// Loop devices and mounts, as the machine lists them.
fn listed() -> String {
    let loops = Command::new("losetup").arg("-l").output().unwrap();
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    format!("{}{mounts}", String::from_utf8_lossy(&loops.stdout))
}

#[test]
fn a_killed_run_takes_its_trainer_along_and_the_next_takes_its_drives_away() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    // Its plan is small, and it trains for ever.
    let trainer = script(
        dir.path(),
        "trainer",
        r#"case $1 in
plan) echo '{"parameters": 1, "tokens_per_step": 1, "gradient_accumulation_steps": 1, "device_bytes": 1, "hardware": {"cores": 1},
    "step": {"read_bytes": 1, "written_bytes": 1}, "bound": {"s": 1, "wall": "", "forward_s": 1, "backward_s": 1}}' ;;
train) echo $$ > "$STARTED.new"; mv "$STARTED.new" "$STARTED"; exec sleep 600 ;;
esac"#,
    );
    let mut training = program()
        .args(["training", "--run=/any.toml", "--drives=1"])
        .args(["--read=2GB/s", "--write=2GB/s", "--trainer"])
        .arg(trainer)
        .env("STARTED", &started)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("a trainer", || started.exists());
    let trainer = std::fs::read_to_string(&started).unwrap();
    let trainer = trainer.trim();
    let name = format!("training-{}", training.id());
    let drives = format!("/run/testdrives-{name}");
    let drives = Path::new(&drives);

    // While it lives they are its own.
    let other = Set::new("beside");
    other.create(&["1", "16m", "1MB/s", "1MB/s"]);
    assert!(drives.exists() && runs(trainer));

    training.kill().unwrap();
    training.wait().unwrap();
    until("the trainer's end", || !runs(trainer));
    let shown = bench_io(&["testdrives", "show"]).stdout;
    let shown = String::from_utf8_lossy(&shown).into_owned();
    assert!(
        shown.contains(&format!("({name}, orphaned by a killed measurement)")),
        "{shown}"
    );
    let next = Set::new("next");
    let output = bench_io(&[
        "testdrives",
        "create",
        "--name",
        &next.0,
        "1",
        "16m",
        "1MB/s",
        "1MB/s",
    ]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains(&name), "{}", said(&output));
    assert!(!drives.exists() && !listed().contains(&name));
    // What a person made is a person's to take away.
    assert!(Path::new(&other.dir()).exists());
}

#[test]
fn an_up_that_is_killed_after_any_step_is_taken_away_whole() {
    if cannot_make_testdrives() {
        return;
    }
    // Each `up` takes away what was left, also what another test is looking at.
    let _alone = alone();
    // What another run left is taken away here, not by the tools below.
    Set::new("before").create(&["1", "16m", "1MB/s", "1MB/s"]);
    let path = std::env::var("PATH").unwrap();
    for tool in ["losetup", "mkfs.ext4", "mount"] {
        let real = std::env::split_paths(&path).map(|dir| dir.join(tool));
        let real = real.into_iter().find(|real| real.is_file()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        // The memory's own mount is the step before the first device.
        let lines = format!(
            "{} \"$@\"\ncase \"$*\" in *tmpfs*) exit $?;; esac\nkill -9 $PPID",
            real.display()
        );
        script(dir.path(), tool, &lines);
        let set = Set::new(&format!("killed-{}", &tool[..4]));
        let killed = program()
            .args([
                "testdrives",
                "create",
                "--name",
                &set.0,
                "2",
                "16m",
                "1MB/s",
                "1MB/s",
            ])
            .env("PATH", format!("{}:{path}", dir.path().display()))
            .output()
            .unwrap();
        assert_eq!(killed.status.code(), None, "{tool}: {}", said(&killed));
        assert!(listed().contains(&set.0), "{tool}");
        let down = bench_io(&["testdrives", "destroy", "--name", &set.0]);
        assert!(down.status.success(), "{tool}: {}", said(&down));
        assert!(!listed().contains(&set.0), "{tool}: {}", listed());
        assert!(!Path::new(&set.dir()).exists(), "{tool}");
    }
}
