//! Tests that the rates of drives add up and that the measurement notices when they do not: rate-limited drives must reach their limits, and with the
//! safeguard `placement` disabled the same call must fail.

use serde_json::Value;

use crate::harness::{
    TRIES, alone, assert_empty, bench_io, cannot_make_testdrives, drawn, json, printed, program,
    refused, says_how_it_went, says_what_it_is_of,
};

const TWO_DRIVES: [&str; 13] = [
    "scale",
    "--testdrives=2",
    "--drives=2",
    "--read=60MB/s",
    "--write=30MB/s",
    "--bs=512k",
    "--size=32m",
    "--runtime=1",
    "--tolerance=5",
    "--fio=none",
    "--json",
    "--iodepth=40",
    "--out",
];

#[test]
fn two_rate_limited_drives_give_twice_what_was_set_and_a_picture_shows_it() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let out = tempfile::tempdir().unwrap();
    let path = out.path().to_str().unwrap();
    let mut tries = (0..TRIES).map(|_| bench_io(&[&TWO_DRIVES[..], &[path]].concat()));
    let last = tries.next().unwrap();
    let output = match last.status.success() {
        true => last,
        false => tries.find(|output| output.status.success()).unwrap_or(last),
    };
    assert!(output.status.success(), "{}", printed(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let words: Vec<(&str, bool)> = rows
        .iter()
        .map(|row| {
            (
                row["load"].as_str().unwrap(),
                row["unlimited"].as_bool().unwrap(),
            )
        })
        .collect();
    let loads = ["read", "write", "both"];
    let expected = [false, true].map(|unlimited| loads.map(|load| (load, unlimited)));
    assert_eq!(words, expected.concat());
    // Per drive, with no tile twice: half of the 128 when both directions run.
    let depths = rows.iter().map(|row| row["iodepth"].as_u64().unwrap());
    assert_eq!(depths.collect::<Vec<_>>(), [80, 80, 128, 80, 80, 128]);
    let rate = |row: usize, way: &str| rows[row]["daemon"][way]["bytes_per_s"].as_f64().unwrap();
    for (row, way, set) in [
        (0, "read", 120e6),
        (1, "write", 60e6),
        (2, "read", 120e6),
        (2, "write", 60e6),
    ] {
        let off = rate(row, way) / set;
        assert!((0.95..1.05).contains(&off), "{way}: {off}; {report}");
    }
    // Without its limit the machine is faster, so the limit was measured above.
    assert!(rate(3, "read") > 240e6, "{report}");
    let svg = drawn(&out.path().join("scale.json"));
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    for line in [
        "limit set: 60.0 MB/s read and 30.0 MB/s written per drive",
        "direct, size ",
    ] {
        assert!(svg.contains(line), "{line}: {svg}");
    }
}

#[test]
fn fio_stands_beside_us_with_the_command_it_was_called_with() {
    let version = std::process::Command::new("fio").arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        println!("skipped: fio_stands_beside_us_with_the_command_it_was_called_with: no fio");
        return;
    }
    let _alone = alone();
    let (dir, out) = (crate::harness::drive(), tempfile::tempdir().unwrap());
    let path = dir.path().to_str().unwrap();
    let report = json(&[
        "scale",
        "--directory",
        path,
        "--out",
        out.path().to_str().unwrap(),
        "--size=8m",
        "--bs=64k",
        "--runtime=0.3",
        "--rounds=3",
        "--json",
    ]);
    assert_eq!(report["settings"]["rounds"], 3);
    says_what_it_is_of(&report, dir.path());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let (fio, load) = (&row["fio"], row["load"].as_str().unwrap());
        let command = fio["command"].as_str().unwrap();
        for (way, loads) in [("read", ["read", "both"]), ("write", ["write", "both"])] {
            let goes = loads.contains(&load);
            assert_eq!(
                fio[way]["bytes_per_s"].as_f64().unwrap() > 0.0,
                goes,
                "{row}"
            );
            assert_eq!(command.contains(&format!("--rw={way} ")), goes, "{command}");
            // Latencies cover the jobs of both directions.
            let latency = &fio[way]["latency_ns"];
            assert_eq!(latency["p999"].as_u64().is_some(), goes, "{row}");
            if goes {
                says_how_it_went(&row["daemon"], way);
            }
        }
        for word in [
            "--ioengine=io_uring",
            "--direct=1",
            "--fixedbufs=1",
            "--bs=65536",
            "--iodepth=32",
        ] {
            assert!(command.contains(word), "{command}");
        }
        assert!(row["limit_bytes_per_s"].is_null());
        assert_eq!(row["unlimited"], false, "{row}");
        // The figures shown are those of one round, within the range of all rounds.
        let rate = |side: &Value| -> f64 {
            let of = |way: &str| match &side[way] {
                Value::Object(way) => way["bytes_per_s"].as_f64().unwrap(),
                _ => side[format!("{way}_bytes_per_s")].as_f64().unwrap_or(0.0),
            };
            of("read") + of("write")
        };
        for (side, found) in [("daemon", rate(&row["daemon"])), ("fio", rate(fio))] {
            let range = &row["rounds"][side];
            let (min, max) = (
                range["min"].as_f64().unwrap(),
                range["max"].as_f64().unwrap(),
            );
            assert!(0.0 < min && min <= found && found <= max, "{row}");
        }
    }
    let svg = drawn(&out.path().join("scale.json"));
    assert!(
        svg.contains("through offloadd") && svg.contains("fio") && svg.contains("direct, size "),
        "{svg}"
    );
    assert_empty(dir.path());
    let shown = bench_io(&[
        "scale",
        "--directory",
        path,
        "--size=8m",
        "--bs=64k",
        "--runtime=0.5",
        "--rounds=2",
    ]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let table = shown.lines().filter(|line| line.starts_with('|'));
    assert_eq!(table.clone().count(), 3 * (2 + 3), "{shown}");
    let widest = table.map(|line| line.chars().count()).max().unwrap();
    assert!(widest <= 120, "{widest} columns: {shown}");
}

#[test]
fn it_fails_when_all_tiles_go_to_one_device() {
    if cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    // The output for a rate limit, which only test builds support, shows whether offloadd is a test build.
    let dir = crate::harness::drive();
    let probe = program()
        .args([
            "run",
            "--size=1m",
            "--bs=64k",
            "--runtime=0",
            "--json",
            "--directory",
        ])
        .arg(dir.path())
        .env("OFFLOADD_RATE_LIMIT", "60000000,30000000")
        .output()
        .unwrap();
    if !String::from_utf8_lossy(&probe.stdout).contains("RateLimit {") {
        println!(
            "skipped: it_fails_when_all_tiles_go_to_one_device: this offloadd was built without the test hooks; `cargo test` of the workspace builds it with them"
        );
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let output = program()
        .args(TWO_DRIVES)
        .arg(out.path())
        .env("OFFLOADD_DISABLE", "placement")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let words = printed(&output);
    assert!(words.contains("2 drives, read, bs 524288: -5"), "{words}");
    assert!(words.contains("from the limit"), "{words}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (args, why) in [
        // Refused because they have no effect: drives without a rate limit have their own speed.
        (&["--directory=.", "--read=1KB/s"][..], "--read"),
        (&["--directory=.", "--loop-devices=7"], "--loop-devices"),
        (&[][..], "--directory"),
        (&["--directory=/x", "--testdrives=2"], "cannot be used with"),
        (&["--directory=/x", "--drives=2"], "there are only 1"),
        (&["--directory=/x", "--bs=5000"], "a multiple of 4096"),
        (
            &["--directory=/x", "--bs=4m", "--size=4m"],
            "at least two operations",
        ),
        (&["--directory=/x", "--tolerance=5"], "--testdrives"),
        (&["--directory=/x", "--rounds=0"], "--rounds"),
        (&["--testdrives=1", "--slow-last"], "--testdrives 2 or more"),
        (
            &["--directory=/no/such/directory", "--fio=none"],
            "/no/such/directory",
        ),
        (&["--directory=/x", "--fio=/no/such/fio"], "/no/such/fio"),
    ] {
        let printed = refused(&[&["scale"], args].concat());
        assert!(printed.contains(why), "{args:?}: {printed}");
    }
}
