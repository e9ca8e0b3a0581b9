//! Tests that a killed bench-io leaves no program running and no drives, complete or partial, that the next one does not destroy, and that nobody
//! destroys the drives of a living one. Needs rate-limited drives.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::{alone, bench_io, cannot_make_testdrives, printed, program, script};
use crate::testdrives::Set;
use crate::training::run_file;

/// Time limit that a busy machine also keeps.
const TIMEOUT: Duration = Duration::from_secs(60);

fn until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !there() {
        assert!(Instant::now() < deadline, "{what} in {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process runs; a zombie does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// Lists the loop devices and mounts of the machine.
fn listed() -> String {
    let loops = Command::new("losetup").arg("-l").output().unwrap();
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    format!("{}{mounts}", String::from_utf8_lossy(&loops.stdout))
}

#[test]
fn a_killed_run_ends_its_trainer_and_the_next_destroys_its_drives() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    // A trainer that trains forever.
    let trainer = script(
        dir.path(),
        "trainer",
        r#"echo $$ > "$STARTED.new"; mv "$STARTED.new" "$STARTED"; exec sleep 600"#,
    );
    let mut training = program()
        .args(["training", "--drives=1", "--run", &run_file(dir.path())])
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

    // While the process lives, the drives belong to it.
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
    let mut create = next.create_command(&["1", "16m", "1MB/s", "1MB/s"]);
    let output = create.output().unwrap();
    assert!(output.status.success(), "{}", printed(&output));
    assert!(printed(&output).contains(&name), "{}", printed(&output));
    assert!(!drives.exists() && !listed().contains(&name));
    // Drives that a person created are kept.
    assert!(Path::new(&other.dir()).exists());
}

#[test]
fn drives_of_a_create_killed_after_any_step_are_destroyed_whole() {
    if cannot_make_testdrives() {
        return;
    }
    // Each `create` destroys orphaned drives, also those that another test looks at.
    let _alone = alone();
    // Destroys the orphans of earlier runs now, and not with the fake tools below.
    Set::new("before").create(&["1", "16m", "1MB/s", "1MB/s"]);
    let path = std::env::var("PATH").unwrap();
    for tool in ["losetup", "mkfs.ext4", "mount"] {
        let real = std::env::split_paths(&path).map(|dir| dir.join(tool));
        let real = real.into_iter().find(|real| real.is_file()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        // The mount of the memory comes before the first device.
        let lines = format!(
            "{} \"$@\"\ncase \"$*\" in *tmpfs*) exit $?;; esac\nkill -9 $PPID",
            real.display()
        );
        script(dir.path(), tool, &lines);
        let set = Set::new(&format!("killed-{}", &tool[..4]));
        let killed = (set.create_command(&["2", "16m", "1MB/s", "1MB/s"]))
            .env("PATH", format!("{}:{path}", dir.path().display()))
            .output()
            .unwrap();
        assert_eq!(killed.status.code(), None, "{tool}: {}", printed(&killed));
        assert!(listed().contains(&set.0), "{tool}");
        let down = bench_io(&["testdrives", "destroy", "--name", &set.0]);
        assert!(down.status.success(), "{tool}: {}", printed(&down));
        assert!(!listed().contains(&set.0), "{tool}: {}", listed());
        assert!(!Path::new(&set.dir()).exists(), "{tool}");
    }
}
