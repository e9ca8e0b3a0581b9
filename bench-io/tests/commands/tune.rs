//! What could go wrong: what is printed for the daemon is not what was measured, or the daemon refuses it; it takes minutes.

use std::time::Instant;

use offloadd::config::Config;

use crate::lab::{assert_empty, drive, json, refused};

#[test]
fn the_settings_it_prints_are_the_best_it_found_and_load() {
    let folder = drive();
    let path = folder.path().to_str().unwrap();
    let since = Instant::now();
    let report = json(&[
        "tune",
        "--folder",
        path,
        "--size=16m",
        "--runtime=0.2",
        "--json",
    ]);
    assert!(since.elapsed().as_secs() < 60);
    let settings = report["settings"].as_str().unwrap();
    let config = Config::parse(settings, std::path::Path::new("printed")).unwrap();
    assert_eq!(config.devices, [folder.path().join("offloadd.tiles")]);
    let tuned = &report["tuned"];
    assert!(
        settings.contains(&format!("engine = {}", tuned["engine"])),
        "{settings}"
    );
    assert_eq!(
        u64::from(config.iodepth_max),
        2 * tuned["iodepth"].as_u64().unwrap()
    );
    let trials = tuned["trials"].as_array().unwrap();
    let rate = |trial: &serde_json::Value| {
        trial["read_bytes_per_s"].as_f64().unwrap() + trial["write_bytes_per_s"].as_f64().unwrap()
    };
    // The depths were tried last, before the three runs with what was chosen.
    let depths = &trials[trials.len() - 7..trials.len() - 3];
    let best = depths.iter().map(rate).fold(0.0, f64::max);
    let chosen = depths
        .iter()
        .find(|trial| trial["iodepth"] == tuned["iodepth"])
        .unwrap();
    assert!(rate(chosen) >= 0.97 * best, "{tuned}");
    assert!(
        depths
            .iter()
            .all(|trial| trial["bs"] == tuned["bs"] && trial["load"] == "both"),
        "{tuned}"
    );
    assert_empty(folder.path());
}

#[test]
fn what_cannot_be_tried_is_refused() {
    let folder = drive();
    let path = folder.path().to_str().unwrap();
    for (args, why) in [
        (vec![], "--folder"),
        (vec!["--folder", path, "--runtime=60"], "0.1 to 3"),
        (vec!["--folder", path, "--size=1m"], "at least 4 MiB"),
        (vec!["--folder", "/no/such/folder"], "/no/such/folder"),
        (
            vec!["--folder", path, "--config", "/dev/null"],
            "it exists already",
        ),
    ] {
        let said = refused(&[&["tune"], &args[..]].concat());
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
