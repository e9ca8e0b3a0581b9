//! Tests of `bench-io run`: a job measures the right target, directions are counted separately, no files stay behind, writes destroy nothing without
//! permission, unreliable results have their warnings, and wrong options are refused before bytes move.

use std::time::{Duration, Instant};

use offload_client::Daemon;
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{
    TRIES, alone, assert_empty, bench_io, daemon, drive, json, printed, program, refused,
};

const SMALL: [&str; 8] = [
    "--bs=64k",
    "--size=16m",
    "--iodepth=8",
    "--runtime=0.3",
    "--ramp_time=0.1",
    "--numjobs=2",
    "--json",
    "--rwmixread=70",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["run"], &SMALL[..], more].concat()
}

#[test]
fn every_rw_gives_its_figures_on_both_targets_and_leaves_nothing() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    for (target, rw) in [
        ("device", "read"),
        ("device", "randrw"),
        ("device", "write"),
        ("daemon", "rw"),
        ("daemon", "randread"),
        ("daemon", "randwrite"),
    ] {
        let report = json(&with(&[
            "--target",
            target,
            "--rw",
            rw,
            "--directory",
            path,
        ]));
        assert_eq!(report["target"], target);
        assert_eq!(report["settings"]["rw"], rw);
        for (way, moved) in [
            ("read", rw.contains('r') && !rw.ends_with("write")),
            ("write", rw.ends_with('w') || rw.ends_with("write")),
        ] {
            let found = &report[way];
            assert_eq!(found.is_object(), moved, "{target} {rw}: {report}");
            if moved {
                assert_eq!(
                    found["bytes"].as_u64(),
                    found["ops"].as_u64().map(|ops| ops << 16)
                );
                let latency = |name: &str| found[format!("latency_ns_{name}")].as_u64().unwrap();
                assert!(
                    latency("p50") > 0 && latency("p50") <= latency("p99"),
                    "{report}"
                );
                assert!(latency("p999") <= latency("max"), "{report}");
            }
        }
        if rw == "randrw" {
            let ops = |way: &str| report[way]["ops"].as_f64().unwrap();
            let share = ops("read") / (ops("read") + ops("write"));
            assert!((0.65..0.75).contains(&share), "{report}");
        }
        assert_eq!(report["cpu"]["daemon_s"].is_number(), target == "daemon");
        assert_empty(dir.path());
    }
}

#[test]
fn a_run_once_over_moves_all_bytes() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    let once = [
        "run",
        "--bs=64k",
        "--size=16m",
        "--runtime=0",
        "--iodepth=128",
        "--json",
        "--directory",
        path,
    ];
    for target in ["device", "daemon"] {
        let report = json(&[&once[..], &["--target", target]].concat());
        assert_eq!(report["read"]["bytes"], 16 << 20, "{target}");
        if report["drives"].is_null() {
            println!("skipped: no block device under {path}: what drives themselves moved");
            continue;
        }
        // Other processes may have moved more.
        let of_drives = &report["drives"]["read_bytes_per_s"];
        let (counted, ours) = (of_drives.as_f64(), report["read"]["bytes_per_s"].as_f64());
        assert!(counted.unwrap() > 0.9 * ours.unwrap(), "{report}");
    }
}

#[test]
fn a_daemon_that_runs_already_is_measured_and_its_store_given_back() {
    let dir = drive();
    let daemon = daemon(dir.path());
    let socket = daemon.socket().to_str().unwrap();
    let report = json(&with(&["--socket", socket, "--rw=rw"]));
    assert_eq!(report["target"], "daemon");
    assert!(
        report["read"]["ops"].as_u64() > Some(0) && report["write"]["ops"].as_u64() > Some(0),
        "{report}"
    );
    let device = report["devices"][0]["path"].as_str().unwrap();
    assert!(device.ends_with("/tiles"), "{device}");
    let jobs = Daemon::connect(daemon.socket()).unwrap().jobs().unwrap();
    assert_eq!(jobs, []);
    let printed = refused(&[
        "run",
        "--socket",
        socket,
        "--bs=64k",
        "--size=1m",
        "--iodepth=65",
    ]);
    assert!(printed.contains("the daemon grants only 64"), "{printed}");
    // Either setting may be the limit.
    for limit in ["iodepth_max in its settings", "inflight_max of your quota"] {
        assert!(printed.contains(limit), "{printed}");
    }
    let printed = refused(&["run", "--socket", socket, "--size=1g", "--iodepth=2"]);
    assert!(printed.contains("free"), "{printed}");
    let printed = refused(&["run", "--socket", "/no/such/socket"]);
    assert!(printed.contains("/no/such/socket"), "{printed}");
}

#[test]
fn a_job_file_says_what_the_flags_leave_open() {
    let dir = drive();
    let file = dir.path().join("jobs.fio");
    let text = "[global]\nbs=4k\ngroup_reporting\n[reads]\nrw=randread\ntarget=device\n[writes]\nrw=write\n";
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let path = dir.path().to_str().unwrap();
    // Options of fio's command line that change nothing are accepted too.
    let report = json(&with(&[
        "--directory",
        path,
        file,
        "--section=reads",
        "--time_based",
        "--thread=1",
    ]));
    assert_eq!(report["settings"]["rw"], "randread");
    assert_eq!(report["settings"]["name"], "reads");
    // The option overrides the file.
    assert_eq!(report["settings"]["bs"], 65536);
    let warnings = report["warnings"].to_string();
    assert!(
        warnings.contains("without effect here: thread, time_based, group_reporting"),
        "{warnings}"
    );
    let printed = refused(&["run", file]);
    assert!(printed.contains("choose one with --section"), "{printed}");
    std::fs::write(file, "[job]\nblocksiz=4096").unwrap();
    let printed = refused(&["run", file]);
    assert!(
        printed.contains("jobs.fio") && printed.contains("did you mean `blocksize`?"),
        "{printed}"
    );
}

#[test]
fn a_result_comes_before_what_is_said_of_it() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    let words = [
        "run",
        "--directory",
        path,
        "--name=mine",
        "--target=device",
        "--bs=64k",
        "--size=16m",
        "--runtime=200ms",
    ];
    let output = bench_io(&words);
    let printed = String::from_utf8(output.stdout).unwrap();
    let at = |part: &str| {
        printed
            .find(part)
            .unwrap_or_else(|| panic!("{part}: {printed}"))
    };
    assert!(printed.starts_with("mine:\nread "), "{printed}");
    assert!(at(" IOPS   latency min ") < at("\nwarning: "), "{printed}");
    assert!(!printed[at("\nwarning: ")..].contains("IOPS"), "{printed}");
}

#[test]
fn nothing_is_written_to_a_directory_that_nobody_named() {
    let dir = drive();
    let run = ["run", "--size=16m"];
    let output = program().args(run).current_dir(dir.path()).output();
    let output = output.expect("bench-io starts");
    let printed = printed(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("--directory ."), "{printed}");
    assert_empty(dir.path());
}

#[test]
fn a_file_is_destroyed_only_when_that_was_said() {
    let dir = drive();
    let file = dir.path().join("precious");
    std::fs::write(&file, vec![7; 4 << 20]).unwrap();
    let path = file.to_str().unwrap();
    let write = [
        "run",
        "--rw=write",
        "--bs=64k",
        "--runtime=0",
        "--filename",
        path,
    ];
    let printed = refused(&write);
    assert!(printed.contains("--overwrite"), "{printed}");
    assert_eq!(std::fs::read(&file).unwrap(), vec![7; 4 << 20]);
    let report = json(&[&write[..], &["--overwrite", "--json"]].concat());
    assert_eq!(report["write"]["bytes"], 4 << 20);
    assert!(std::fs::read(&file).unwrap() != vec![7; 4 << 20]);
}

#[test]
fn a_store_that_is_served_is_not_written_over() {
    let dir = drive();
    let file = dir.path().join("store");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let served = std::fs::File::open(&file).unwrap();
    served.lock().unwrap();
    let printed = refused(&[
        "run",
        "--rw=write",
        "--overwrite",
        "--bs=64k",
        "--filename",
        file.to_str().unwrap(),
    ]);
    assert!(
        printed.contains("a running offloadd serves this store"),
        "{printed}"
    );
    assert_eq!(std::fs::read(&file).unwrap(), vec![7; 1 << 20]);
}

#[test]
fn what_makes_a_result_mean_little_is_said() {
    let dir = drive();
    let file = dir.path().join("hole");
    let hole = std::fs::File::create(&file).unwrap();
    hole.set_len(4 << 20).unwrap();
    let path = file.to_str().unwrap();
    let report = json(&[
        "run",
        "--bs=64k",
        "--runtime=0.3",
        "--json",
        "--filename",
        path,
        "--direct=0",
    ]);
    let warnings = report["warnings"].to_string();
    for words in [
        "page cache",
        "not written from byte 0 on",
        "0.30 s is too short",
    ] {
        assert!(warnings.contains(words), "{words}: {warnings}");
    }
}

#[test]
fn wrong_words_are_refused_before_anything_is_made() {
    let dir = drive();
    let path = dir.path().to_str().unwrap();
    for (args, words) in [
        (vec!["--iodepth=1025"], "iodepth = 1025: must be 1 to 1024"),
        (vec!["--bs=5000"], "a multiple of 4096"),
        (vec!["--bs=4x"], "unknown unit"),
        (vec!["--rw=sideways"], "randread"),
        (vec!["--ioengine=magic"], "expected auto, io_uring"),
        (vec!["--size=1m", "--bs=1m", "--numjobs=2"], "too small"),
        (vec!["--runtime=NaN"], "expected a time of at most a day"),
        (vec!["--verify=crc32c"], "compared with its checksum"),
    ] {
        let printed = refused(&[&["run", "--directory", path], &args[..]].concat());
        assert!(printed.contains(words), "{args:?}: {printed}");
        assert_empty(dir.path());
    }
    let without_command = refused(&["--name=job", "--rw=read"]);
    assert!(
        without_command.contains("follow `bench-io run`"),
        "{without_command}"
    );
    let many = ["--bs=64m", "--size=64g", "--iodepth=1024", "--numjobs=64"];
    let printed = refused(&[&["run", "--directory", path], &many[..]].concat());
    assert!(printed.contains("are available"), "{printed}");
    let pipe = dir.path().join("pipe");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let printed = refused(&["run", "--filename", pipe.to_str().unwrap()]);
    assert!(
        printed.contains("neither a file nor a block device"),
        "{printed}"
    );
    let printed = refused(&["run", "--filename", "/no/such/file"]);
    assert!(printed.contains("/no/such/file"), "{printed}");
    let printed = refused(&["run", "--directory", "/no/such/directory"]);
    assert!(printed.contains("/no/such/directory"), "{printed}");
}

#[test]
fn a_depth_that_is_not_reached_is_said() {
    let dir = drive();
    let of = |iodepth: &str| {
        let path = dir.path().to_str().unwrap();
        let words = [
            "run",
            "--target=device",
            "--bs=1m",
            "--size=4m",
            "--runtime=1",
        ];
        let more = [
            "--ramp_time=0",
            "--json",
            "--iodepth",
            iodepth,
            "--directory",
            path,
        ];
        json(&[&words[..], &more].concat())["warnings"].to_string()
    };
    let printed = of("32");
    assert!(
        printed.contains("only 4 operations of 1 MiB fit"),
        "{printed}"
    );
    assert!(printed.contains("instead of 32"), "{printed}");
    assert!(!of("4").contains("fit in the size of each job"));
}

#[test]
fn a_file_that_somebody_else_holds_is_not_written_to() {
    let dir = drive();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let held = std::fs::File::open(&path).unwrap();
    // The job of another measurement takes the same lock.
    held.lock_shared().unwrap();
    let file = path.to_str().unwrap();
    let words = [
        "run",
        "--filename",
        file,
        "--bs=64k",
        "--runtime=1",
        "--ramp_time=0",
    ];
    let printed = refused(&[&words[..], &["--rw=write", "--overwrite"]].concat());
    assert!(printed.contains("in use"), "{printed}");
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
    // Reading is allowed, and two jobs of one measurement may share a file.
    assert!(bench_io(&words).status.success());
    drop(held);
    json(
        &[
            &words[..],
            &["--rw=write", "--overwrite", "--numjobs=2", "--json"],
        ]
        .concat(),
    );
}

#[test]
fn a_daemon_that_serves_others_too_is_no_measure_of_its_processor_time() {
    let _alone = alone();
    let dir = drive();
    let daemon = daemon(dir.path());
    let socket = daemon.socket().to_str().unwrap();
    let words = ["run", "--bs=64k", "--size=16m", "--iodepth=8"];
    let words = [&words[..], &["--socket", socket]].concat();
    let mut other = program().args(&words).arg("--runtime=600").spawn().unwrap();
    let since = Instant::now();
    let jobs = || Daemon::connect(daemon.socket()).unwrap().jobs().unwrap();
    while !jobs().iter().any(|job| job.open && job.reserved_bytes > 0) {
        assert!(since.elapsed().as_secs() < 60, "no job");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut reports = Vec::new();
    // On a busy machine the other process may make no progress for a while.
    let found = (0..TRIES).any(|_| {
        let report = json(&[&words[..], &["--runtime=0.5", "--json"]].concat());
        let is_said = report["warnings"].to_string().contains("include that work");
        let is_unknown = report["drives"].is_null();
        if is_unknown {
            println!("skipped: no block device under the tests: what others had moved by a daemon");
        }
        reports.push(report);
        is_said || is_unknown
    });
    kill_process(Pid::from_child(&other), Signal::TERM).unwrap();
    other.wait().unwrap();
    assert!(found, "{reports:?}");
}

#[test]
fn what_is_counted_twice_is_said_or_refused() {
    let dir = drive();
    let [one, other] = ["one", "other"].map(|name| dir.path().join(name));
    for made in [&one, &other] {
        std::fs::create_dir(made).unwrap();
    }
    let [one, other] = [&one, &other].map(|path| path.to_str().unwrap());
    let words = [
        "run",
        "--target=device",
        "--size=1m",
        "--bs=64k",
        "--json",
        "--directory",
        one,
        "--directory",
        other,
    ];
    let report = json(&words);
    let warnings = report["warnings"].to_string();
    assert!(
        warnings.contains("so they are not two drives"),
        "{warnings}"
    );
    let file = dir.path().join("file");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let [file, link] = [&file, &link].map(|path| path.to_str().unwrap());
    for way in [&["--rw=read"][..], &["--rw=write", "--overwrite"]] {
        let words = ["run", "--bs=64k", "--filename", file, "--filename", link];
        let printed = refused(&[&words, way].concat());
        assert!(printed.contains("name each file once"), "{printed}");
    }
    assert_eq!(std::fs::read(file).unwrap(), vec![7; 1 << 20]);
}

#[test]
fn help_has_examples() {
    let commands = ["run", "scale", "training", "testdrives"];
    let helps = commands.map(|command| vec![command, "--help"]);
    for command in helps.iter().chain([&vec!["--help"]]) {
        let output = bench_io(command);
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed.contains("Examples"), "{command:?}: {printed}");
        assert!(printed.contains("\n  bench-io"), "{command:?}: {printed}");
    }
}
