//! Tests that rate-limited drives have their rates, that `exec` applies the limits, that nothing remains after `destroy` or a failed `create`, and
//! that sets are independent. Needs root, loop devices and the block cgroup.

use std::path::Path;
use std::process::Command;

use crate::harness::{
    TRIES, alone, bench_io, cannot_make_testdrives, json, printed, program, refused, script,
};

/// A set of drives of one test, destroyed even if the test fails.
pub(crate) struct Set(pub(crate) String);

impl Set {
    pub(crate) fn new(test: &str) -> Self {
        Self(format!("{test}-{}", std::process::id()))
    }

    /// Command that creates the set; `words` are the number, size and rates of its drives.
    pub(crate) fn create_command(&self, words: &[&str]) -> Command {
        let mut command = program();
        command.args(["testdrives", "create", "--name", &self.0]);
        command.args(words);
        command
    }

    /// Creates the set and returns the directories of its drives.
    pub(crate) fn create(&self, words: &[&str]) -> Vec<String> {
        let output = self.create_command(words).output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
        let printed = String::from_utf8_lossy(&output.stdout);
        printed.lines().map(str::to_owned).collect()
    }

    pub(crate) fn dir(&self) -> String {
        format!("/run/testdrives-{}", self.0)
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        if Path::new(&self.dir()).exists() {
            bench_io(&["testdrives", "destroy", "--name", &self.0]);
        }
    }
}

/// Measures one direction on `dirs`, with or without the limits, in bytes per second.
fn rate(set: &Set, limited: bool, rw: &str, dirs: &[String]) -> f64 {
    let mut words = vec![];
    if limited {
        words.extend([
            "testdrives",
            "exec",
            "--name",
            &set.0,
            "--",
            env!("CARGO_BIN_EXE_bench-io"),
        ]);
    }
    words.extend([
        "run",
        "--target=device",
        "--size=16m",
        "--bs=512k",
        "--iodepth=16",
        "--ramp_time=0.2",
        "--runtime=1",
        "--json",
        "--rw",
        rw,
    ]);
    for dir in dirs {
        words.extend(["--directory", dir]);
    }
    json(&words)[rw]["bytes_per_s"].as_f64().unwrap()
}

/// Returns the first rate that is `right`, or the rates of all tries.
fn undisturbed(measure: impl Fn() -> f64, right: impl Fn(f64) -> bool) -> Result<f64, Vec<f64>> {
    let mut wrong = Vec::new();
    while wrong.len() < TRIES {
        match measure() {
            rate if right(rate) => return Ok(rate),
            rate => wrong.push(rate),
        }
    }
    Err(wrong)
}

#[test]
fn drives_are_as_fast_as_they_were_made_and_leave_nothing() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let set = Set::new("exact");
    let dirs = set.create(&["2", "64m", "60MB/s", "30MB/s"]);
    assert_eq!(dirs.len(), 2);
    for (rw, limit) in [("read", 60e6), ("write", 30e6)] {
        let two = undisturbed(
            || rate(&set, true, rw, &dirs),
            |two| (0.95..1.05).contains(&(two / limit / 2.0)),
        );
        assert!(two.is_ok(), "{rw}: {two:?}");
        let free = undisturbed(
            || rate(&set, false, rw, &dirs),
            |free| free > 1.5 * 2.0 * limit,
        );
        assert!(free.is_ok(), "{rw} outside the group: {free:?}");
    }
    let shown = bench_io(&["testdrives", "show"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains(&dirs[1]));
    let mut again = set.create_command(&["1", "64m", "1MB/s", "1MB/s"]);
    let again = again.output().unwrap();
    assert!(!again.status.success());
    let again = printed(&again);
    let down = format!(
        "already exists; destroy its drives with `bench-io testdrives destroy --name {}`",
        set.0
    );
    assert!(again.contains(&down), "{again}");

    // Writing to the device would destroy its file system.
    let shown = json(&["testdrives", "show", "--json"]);
    let mut shown = shown.as_array().unwrap().iter();
    let ours = shown.find(|one| one["name"] == set.0.as_str()).unwrap();
    let device = ours["state"]["devices"][0].as_str().unwrap();
    let words = [
        "--rw=write",
        "--overwrite",
        "--bs=64k",
        "--size=1m",
        "--runtime=0.1",
    ];
    let said_so = refused(&[&["run", "--filename", device], &words[..]].concat());
    assert!(said_so.contains("in use: mounted"), "{said_so}");

    let output = bench_io(&["testdrives", "destroy", "--name", &set.0]);
    assert!(output.status.success(), "{}", printed(&output));
    assert!(!Path::new(&set.dir()).exists());
    let loops = std::process::Command::new("losetup")
        .arg("-l")
        .output()
        .unwrap();
    let loops = String::from_utf8_lossy(&loops.stdout).into_owned();
    assert!(!loops.contains(&set.0), "{loops}");
    let gone = refused(&["testdrives", "exec", "--name", &set.0, "--", "true"]);
    assert!(gone.contains("no drives in"), "{gone}");
}

#[test]
fn a_create_that_fails_half_way_leaves_nothing() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let set = Set::new("half");
    let path = std::env::var("PATH").unwrap();
    let dir = tempfile::tempdir().unwrap();
    script(dir.path(), "mkfs.ext4", "echo no room >&2\nexit 1");
    let output = (set.create_command(&["2", "16m", "1MB/s", "1MB/s"]))
        .env("PATH", format!("{}:{path}", dir.path().display()))
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(printed(&output).contains("no room"), "{}", printed(&output));
    assert!(!Path::new(&set.dir()).exists());
}

#[test]
fn what_cannot_be_made_is_refused() {
    for (words, why) in [
        (&["0", "1g", "1MB/s", "1MB/s"][..], "1 to 64 loop devices"),
        (&["1", "1m", "1MB/s", "1MB/s"], "at least 16 MiB"),
        (&["1", "1g", "fast", "1MB/s"], "begin with a number"),
        (
            &["--name", "../x", "1", "1g", "1MB/s", "1MB/s"],
            "--name ../x",
        ),
    ] {
        let printed = refused(&[&["testdrives", "create"], words].concat());
        assert!(printed.contains(why), "{words:?}: {printed}");
    }
}
