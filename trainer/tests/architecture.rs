//! The picture of dependencies in docs/architecture.md is true.
//!
//! What could go wrong: a crate reaches past its neighbour (the trainer talks to the daemon's messages, the daemon
//! learns of its client) and nobody notices. This asks cargo for the workspace's real dependencies and compares them
//! with the arrows that are allowed; it also holds `unsafe` to the files that are named for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who may depend on whom. A new arrow is a design change: the picture in docs/architecture.md changes with it.
const ARROWS: &[(&str, &[&str])] = &[
    ("test-hooks", &[]),
    ("offload-support", &[]),
    ("offload-api", &[]),
    (
        "offloadd",
        &["offload-api", "offload-support", "test-hooks"],
    ),
    ("offload-client", &["offload-api", "test-hooks"]),
    ("swapper", &["offload-client", "test-hooks"]),
    ("offloadd-python", &["kernels", "swapper"]),
    ("kernels", &[]),
    ("kernels-torch", &["kernels"]),
    (
        "trainer",
        &[
            "swapper",
            "kernels",
            "kernels-torch",
            "offload-support",
            "test-hooks",
        ],
    ),
    (
        "bench-io",
        &["kernels", "offload-client", "offload-support", "offloadd"],
    ),
    ("docs-test", &[]),
];

/// Directories and files in which `unsafe` may stand.
const UNSAFE_PLACES: &[&str] = &[
    "offloadd/api/src/ring/map.rs",
    "offloadd/api/tests/ring_loom.rs",
    "offloadd/src/arena.rs",
    "offloadd/src/engine/aio.rs",
    "offloadd/src/driver/process.rs",
    "offloadd/src/handover/inherited.rs",
    "offloadd/src/engine/uring.rs",
    "offloadd/src/engine/psync.rs",
    "client/src/mapping.rs",
    "kernels/src/",
    "kernels/torch/src/",
    "trainer/python/src/memory.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace's directory")
        .to_path_buf()
}

#[test]
fn nothing_depends_on_anything_the_picture_does_not_show() {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    assert_eq!(
        names,
        allowed.keys().copied().collect(),
        "the crates of the workspace"
    );
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let found: BTreeSet<&str> = package["dependencies"]
            .as_array()
            .expect("dependencies")
            .iter()
            .filter(|d| d["kind"].is_null())
            .filter_map(|d| d["name"].as_str())
            .filter(|d| names.contains(d))
            .collect();
        assert_eq!(
            found,
            allowed[name].iter().copied().collect(),
            "{name} depends on"
        );
    }
}

#[test]
fn unsafe_stands_only_in_the_files_named_for_it() {
    let mut wrong = Vec::new();
    each_source(&root(), &mut |path| {
        let shown = path
            .strip_prefix(root())
            .expect("under the root")
            .display()
            .to_string();
        let text = std::fs::read_to_string(path).expect("a readable source file");
        let used = text.lines().map(str::trim_start).any(|line| {
            let code = line.split("//").next().unwrap_or_default();
            ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"]
                .iter()
                .any(|word| code.contains(word))
        });
        let named = UNSAFE_PLACES.iter().any(|place| shown.starts_with(place));
        if used && !named && !shown.ends_with("architecture.rs") {
            wrong.push(shown);
        }
    });
    assert_eq!(
        wrong,
        Vec::<String>::new(),
        "unsafe outside the files named in UNSAFE_PLACES"
    );
}

#[test]
fn every_source_file_says_what_it_is_for() {
    let mut silent = Vec::new();
    each_source(&root(), &mut |path| {
        let text = std::fs::read_to_string(path).expect("a readable source file");
        if !text.starts_with("//!") {
            silent.push(path.display().to_string());
        }
    });
    assert_eq!(
        silent,
        Vec::<String>::new(),
        "files that do not open with //!"
    );
}

fn each_source(dir: &Path, see: &mut dyn FnMut(&Path)) {
    for entry in std::fs::read_dir(dir).expect("a readable directory") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            each_source(&path, see);
        } else if name.ends_with(".rs") {
            see(&path);
        }
    }
}
