//! Tests that the printed settings are those that were measured, that the daemon accepts them, and that the search ends in time.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use offloadd::api::IODEPTH_DEFAULT;
use offloadd::config::Config;
use serde_json::Value;

use crate::harness::{
    assert_empty, drive, json, printed, program, refused, says_how_it_went, says_what_it_is_of,
};

#[test]
fn the_settings_it_prints_are_the_best_it_found_and_load() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    let since = Instant::now();
    let report = json(&[
        "tune",
        "--directory",
        path,
        "--size=16m",
        "--runtime=0.2",
        "--json",
    ]);
    assert!(since.elapsed().as_secs() < 60);
    says_what_it_is_of(&report, dir.path());
    let file = report["daemon_file"].as_str().unwrap();
    let config = Config::parse(file, std::path::Path::new("printed")).unwrap();
    let store = dir.path().join("offloadd.tiles");
    assert_eq!(config.devices, [&*store]);
    assert_eq!(report["format_first"][0], store.to_str().unwrap());
    let tuned = &report["tuned"];
    assert!(
        file.contains(&format!("engine = {}", tuned["engine"])),
        "{file}"
    );
    // A session that asks for the default depth still gets it.
    assert!(config.iodepth_max >= IODEPTH_DEFAULT, "{file}");
    // Settings that the daemon does not have are in the run file.
    let run: toml::Table = report["run_file"].as_str().unwrap().parse().unwrap();
    let number = |key: &str| run["offload"][key].as_integer().unwrap() as u64;
    let bs = tuned["bs"].as_u64().unwrap();
    assert!(
        (bs / 2..=bs).contains(&(10 * number("tile_elems"))),
        "{run}"
    );
    assert_eq!(
        Some(number("iodepth")),
        tuned["iodepth"].as_u64().map(|depth| 2 * depth)
    );
    let trials = tuned["trials"].as_array().unwrap();
    for trial in trials {
        for way in ["read", "write"] {
            // On a busy machine no operation may end in so short a time.
            if !trial["figures"][way].is_null() {
                says_how_it_went(&trial["figures"], way);
            }
        }
    }
    let rate = |trial: &&Value| {
        let of = |way: &str| trial["figures"][way]["bytes_per_s"].as_f64();
        Some(of("read")? + of("write")?)
    };
    let of = |stage: &str| -> Vec<&Value> {
        let of_stage = |trial: &&Value| trial["stage"] == stage;
        trials.iter().filter(of_stage).collect()
    };
    // Each engine is tried equally often, alternating with the others.
    let engines = of("engine");
    let names: Vec<&Value> = engines.iter().map(|trial| &trial["engine"]).collect();
    let here = 3 - tuned["without"].as_array().unwrap().len();
    for (index, name) in names.iter().enumerate() {
        assert_eq!(*name, names[index % here], "{tuned}");
    }
    // The choice is as good as the best, and was tried with the choice of the stage before.
    let is_default = |key: &str| tuned["defaults"].as_array().unwrap().contains(&key.into());
    for (key, fixed) in [("bs", "engine"), ("iodepth", "bs")] {
        let found = of(key);
        let best = found.iter().filter_map(rate).fold(0.0, f64::max);
        assert!(
            found.iter().all(|trial| trial[fixed] == tuned[fixed]),
            "{tuned}"
        );
        let chosen = found.iter().find(|trial| trial[key] == tuned[key]);
        let chosen = chosen.and_then(|trial| {
            // A difference of one operation in each direction does not count.
            let step = 2.0 * trial["bs"].as_f64()? / trial["figures"]["seconds"].as_f64()?;
            Some(rate(trial)? + step)
        });
        let chosen = chosen.unwrap_or(0.0);
        assert!(is_default(key) || chosen >= 0.97 * best, "{key}: {tuned}");
    }
    for chosen in of("chosen") {
        for key in ["engine", "bs", "iodepth"] {
            assert_eq!(chosen[key], tuned[key], "{tuned}");
        }
    }
    assert_empty(dir.path());
}

#[test]
fn what_was_found_is_said_even_where_the_file_for_it_cannot_be_written() {
    let dir = drive();
    // A directory in which nobody can create files.
    let output = program()
        .args([
            "tune",
            "--size=4m",
            "--runtime=0.1",
            "--config=/proc/offloadd.toml",
        ])
        .arg("--directory")
        .arg(dir.path())
        .output()
        .unwrap();
    let words = printed(&output);
    assert!(
        !output.status.success() && words.contains("writing /proc/offloadd.toml"),
        "{words}"
    );
    let found = String::from_utf8_lossy(&output.stdout);
    assert!(found.contains("iodepth_max = "), "{found}");
    assert_empty(dir.path());
}

#[test]
fn what_cannot_be_tried_is_refused() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    let twice = format!("{path}/.");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(path, &link).unwrap();
    let no_text = dir.path().join(OsStr::from_bytes(b"x\xff"));
    std::fs::create_dir(&no_text).unwrap();
    let output = program()
        .args(["tune", "--directory"])
        .arg(no_text)
        .output();
    let words = printed(&output.unwrap());
    assert!(words.contains("is not UTF-8"), "{words}");
    for (args, why) in [
        (vec![], "--directory"),
        (
            vec!["--directory", path, "--directory", link.to_str().unwrap()],
            "--directory: settings of these directories: devices: ",
        ),
        (vec!["--directory", path, "--runtime=60"], "0.1 to 3"),
        (vec!["--directory", path, "--size=1m"], "at least 4 MiB"),
        (
            vec!["--directory", "/no/such/directory"],
            "/no/such/directory",
        ),
        (
            vec!["--directory", path, "--config", "/dev/null"],
            "already exists",
        ),
        // Only the engine alone is tried; `run` measures through a daemon and into a GPU.
        (vec!["--directory", path, "--target=gpu"], "--target"),
        (vec!["--directory", path, "--socket=/x"], "--socket"),
        // Refused before anything is measured.
        (
            vec!["--directory", path, "--directory", &twice],
            "--directory: settings of these directories: devices: ",
        ),
        (
            vec!["--directory", path, "--config", "/no/such/directory/x"],
            "create it first",
        ),
    ] {
        let printed = refused(&[&["tune"], &args[..]].concat());
        assert!(printed.contains(why), "{args:?}: {printed}");
    }
}
