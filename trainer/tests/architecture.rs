//! Tests of the dependencies in docs/architecture.md.
//!
//! The error that these tests find: a crate uses one that it must not know (the trainer uses the daemon's
//! messages, the daemon knows its client). Cargo's list of the workspace's real dependencies is compared with
//! the allowed ones. Another test limits `unsafe` to named files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Allowed dependencies. A new one is a design change, and docs/architecture.md must change with it.
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
    (
        "offloadd-python",
        &[
            "kernels",
            "offload-support",
            "swapper",
            "training-settings",
            "training-state",
        ],
    ),
    ("chat-template", &[]),
    ("kernels", &[]),
    ("kernels-torch", &["kernels", "training-ranks"]),
    ("training-ranks", &[]),
    (
        "training-state",
        &["swapper", "kernels", "offload-support", "test-hooks"],
    ),
    (
        "training-settings",
        &["kernels", "offload-support", "training-state"],
    ),
    (
        "training-run",
        &[
            "chat-template",
            "swapper",
            "kernels",
            "offload-support",
            "test-hooks",
            "training-ranks",
            "training-settings",
            "training-state",
        ],
    ),
    (
        "trainer",
        &[
            "kernels",
            "offload-support",
            "swapper",
            "training-ranks",
            "training-run",
            "training-state",
        ],
    ),
    (
        "trainer-torch",
        &[
            "kernels",
            "kernels-torch",
            "offload-support",
            "swapper",
            "test-hooks",
            "trainer",
            "training-ranks",
            "training-run",
            "training-state",
        ],
    ),
    (
        "bench-io",
        &[
            "kernels",
            "offload-client",
            "offload-support",
            "offloadd",
            "trainer",
            "training-run",
        ],
    ),
    ("docs-test", &[]),
];

/// Directories and files that may contain `unsafe`.
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
    "kernels/tests/gpu/memory.rs",
    "kernels/tests/gpu/streams.rs",
    "kernels/torch/src/",
    "trainer/python/src/memory.rs",
];

/// Layers inside `training-run`, the lowest first. A module imports from lower layers only.
const TRAINING_RUN_LAYERS: &[&[&str]] = &[
    &["evaluations", "model"],
    &["computation", "run_record"],
    &["weights"],
    &["config", "runs"],
    &["accelerator"],
    &["data", "plan", "remove"],
    &["dry_run", "open"],
    &["run_state_reader"],
    &["reader", "run_fingerprint"],
    &["export", "relocate"],
];

/// The layers inside `trainer-torch`.
const TRAINER_TORCH_LAYERS: &[&[&str]] =
    &[&["compute", "launch", "ranks", "torch_support"], &["train"]];

/// The layers inside `trainer`.
const TRAINER_LAYERS: &[&[&str]] = &[&["launch", "libraries"], &["with_torch"]];

/// The layers inside `training-state`.
const TRAINING_STATE_LAYERS: &[&[&str]] = &[
    &[
        "checkpoint_tap",
        "fingerprint",
        "learning_rate",
        "metrics",
        "overflow",
        "plan",
        "ranks",
        "scratch_copies",
        "stage",
        "store",
        "trace",
        "update",
    ],
    &["backend", "monitor", "run", "tile_stash"],
    &["checkpointer"],
];

/// The layers inside `training-settings`.
const SETTINGS_LAYERS: &[&[&str]] = &[
    &["error", "json", "rate", "reader", "schema", "values"],
    &["files", "toml"],
    &["keys", "resolve"],
    &["deepspeed"],
    &["parse", "source"],
    &["package"],
];

/// The layers inside `offloadd`.
const OFFLOADD_LAYERS: &[&[&str]] = &[
    &[
        "drive_queue",
        "error_text",
        "findings",
        "io",
        "rate_limiter",
        "retry",
    ],
    &["arena", "blocks", "numa"],
    &["engine", "handover", "store"],
    &["device", "quota"],
    &["config", "core", "queue", "store_devices"],
    &["check", "doctor", "metrics"],
    &["driver", "measure"],
    &["calibrate", "device_admission"],
    &["server"],
    &["daemon"],
];

/// Parts of the daemon's core, each with those it must not import.
const CORE_PARTS: &[(&str, &[&str])] = &[("operations", &["data", "admin"]), ("data", &["admin"])];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace's directory")
        .to_path_buf()
}

/// Crates that need libtorch for builds and tests; all other crates do not.
const LIBTORCH: &[&str] = &["kernels-torch", "trainer-torch"];

/// The workspace's packages from `cargo metadata`.
fn packages() -> Vec<serde_json::Value> {
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
    metadata["packages"].as_array().expect("packages").clone()
}

/// Names of a package's dependencies; test dependencies are included if `dev` is set.
fn dependencies(package: &serde_json::Value, dev: bool) -> BTreeSet<&str> {
    let list = package["dependencies"].as_array().expect("dependencies");
    list.iter()
        .filter(|d| d["kind"].is_null() || dev)
        .filter_map(|d| d["name"].as_str())
        .collect()
}

#[test]
fn only_two_crates_need_libtorch() {
    let packages = packages();
    let found: BTreeSet<&str> = packages
        .iter()
        .filter(|package| {
            let found = dependencies(package, true);
            found.contains("tch") || found.contains("torch-sys") || found.contains("kernels-torch")
        })
        .filter_map(|package| package["name"].as_str())
        .collect();
    assert_eq!(found, LIBTORCH.iter().copied().collect());
}

#[test]
fn crates_have_only_the_allowed_dependencies() {
    let packages = packages();
    let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    assert_eq!(
        names,
        allowed.keys().copied().collect(),
        "the crates of the workspace"
    );
    for package in &packages {
        let name = package["name"].as_str().expect("a name");
        let found: BTreeSet<&str> = dependencies(package, false)
            .intersection(&names)
            .copied()
            .collect();
        assert_eq!(
            found,
            allowed[name].iter().copied().collect(),
            "{name} depends on"
        );
    }
}

#[test]
fn unsafe_is_only_in_the_named_files() {
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
fn modules_of_the_trainer_import_from_lower_layers_only() {
    assert_layers(&root().join("trainer/src"), TRAINER_LAYERS);
    assert_layers(&root().join("trainer/run/src"), TRAINING_RUN_LAYERS);
    assert_layers(&root().join("trainer/torch/src"), TRAINER_TORCH_LAYERS);
    assert_layers(&root().join("trainer/state/src"), TRAINING_STATE_LAYERS);
    assert_layers(&root().join("trainer/settings/src"), SETTINGS_LAYERS);
}

#[test]
fn modules_of_the_daemon_import_from_lower_layers_only() {
    assert_layers(&root().join("offloadd/src"), OFFLOADD_LAYERS);
    for (part, forbidden) in CORE_PARTS {
        let mut file_count = 0;
        each_source(&root().join("offloadd/src/core").join(part), &mut |path| {
            let text = std::fs::read_to_string(path).expect("a readable source file");
            for other in *forbidden {
                assert!(
                    !names_module(&text, other),
                    "{} imports core::{other}",
                    path.display()
                );
            }
            file_count += 1;
        });
        assert!(file_count > 0, "core::{part} has files");
    }
}

/// Whether code names a path through `module`, as `super::module::Name` does.
fn names_module(text: &str, module: &str) -> bool {
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    code.into_iter().any(|line| {
        line.match_indices(&format!("{module}::"))
            .any(|(at, _)| !line[..at].ends_with(is_name))
    })
}

#[test]
fn paths_through_a_module_are_found_and_others_are_not() {
    assert!(names_module("use super::admin::Admin;", "admin"));
    assert!(names_module("use super::{admin::Admin, data};", "admin"));
    assert!(!names_module(
        "use super::Data; // see admin::Admin",
        "admin"
    ));
    assert!(!names_module("use crate::metadata::Name;", "data"));
}

fn assert_layers(src: &Path, layers: &[&[&str]]) {
    let layer_of: BTreeMap<&str, usize> = (0..)
        .zip(layers)
        .flat_map(|(layer, modules)| modules.iter().map(move |module| (*module, layer)))
        .collect();
    let mut found = BTreeSet::new();
    let mut wrong = BTreeSet::new();
    each_source(src, &mut |path| {
        let inside = path.strip_prefix(src).expect("under the sources");
        let module = inside.components().next().expect("a file");
        let module = Path::new(&module).with_extension("");
        let module = module.to_str().expect("a plain name").to_owned();
        // The roots of the library and the program name every module; the program's own modules use the
        // library from outside.
        if ["lib", "main", "cli", "docs"].contains(&&*module) {
            return;
        }
        let text = std::fs::read_to_string(path).expect("a readable source file");
        for import in crate_imports(&text) {
            let (from, to) = (layer_of.get(&*module), layer_of.get(&*import));
            if import != module && !(to.is_some() && to < from) {
                wrong.insert(format!("{module} imports {import} ({})", inside.display()));
            }
        }
        found.insert(module);
    });
    assert_eq!(
        found,
        layer_of.keys().map(|module| (*module).to_owned()).collect(),
        "every module of {} has its layer",
        src.display()
    );
    assert_eq!(
        wrong,
        BTreeSet::new(),
        "imports from the same or a higher layer"
    );
}

/// Returns the first segments of all paths that begin with `crate::`, including those of `crate::{a, b}`.
fn crate_imports(text: &str) -> BTreeSet<String> {
    let code: String = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .flat_map(|line| [line, "\n"])
        .collect();
    let first_segment = |path: &str| {
        let path = path.trim_start();
        let end = path.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        path[..end.unwrap_or(path.len())].to_owned()
    };
    let mut imports = BTreeSet::new();
    for (at, prefix) in code.match_indices("crate::") {
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            imports.insert(first_segment(rest));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (place, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    imports.insert(first_segment(&group[start..place]));
                    start = place + 1;
                    if c == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    imports.remove("");
    imports
}

#[test]
fn paths_into_the_crate_are_found_in_every_form() {
    let text = "use crate::run::{Dir, a::B};\nuse crate::{store, plan::{self, Plan}};\n// crate::comment\nlet x = crate::data::LIMIT; crate::check!(x);";
    let expected = ["check", "data", "plan", "run", "store"].map(str::to_owned);
    assert_eq!(crate_imports(text), BTreeSet::from(expected));
}

#[test]
fn every_source_file_begins_with_a_module_comment() {
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
