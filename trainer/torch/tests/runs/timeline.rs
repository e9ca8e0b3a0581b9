//! `--trace` records some steps in a file, and writes nothing without the option.
//!
//! Errors that these tests find: the file is invalid JSON or incomplete, a step's transfers are missing or
//! counted for another step, two computations overlap, a failed run leaves no file, tracing changes the run.
//! Bytes are compared with metrics.jsonl.

use std::path::Path;

use serde_json::Value;

use crate::harness::{Harness, Run, fail, succeed};

/// Event of the timeline; times in microseconds.
#[derive(Debug)]
struct Event {
    track: String,
    name: String,
    row: u64,
    start: f64,
    end: f64,
    bytes: u64,
}

fn read(path: &Path) -> Vec<Event> {
    let text = std::fs::read_to_string(path).expect("a timeline");
    let events: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    let spans = events.iter().filter(|event| event["ph"] == "X");
    spans
        .map(|event| {
            let start = event["ts"].as_f64().unwrap();
            Event {
                track: event["cat"].as_str().unwrap().to_owned(),
                name: event["name"].as_str().unwrap().to_owned(),
                row: event["tid"].as_u64().unwrap(),
                start,
                end: start + event["dur"].as_f64().unwrap(),
                bytes: event["args"]["bytes"].as_u64().unwrap_or(0),
            }
        })
        .collect()
}

fn traced(run: &Run, path: &Path, args: &[&str]) -> Vec<Event> {
    let mut command = run.command("train");
    command.arg("--trace").arg(path).args(args);
    assert!(succeed(command).contains("for ui.perfetto.dev"));
    read(path)
}

#[test]
fn a_timeline_shows_what_each_step_computed_and_moved() {
    let harness = Harness::new();
    let sets = ["train.steps=8", "offload.optimizer_step=deferred"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    let events = traced(&run, &harness.path("trace.json"), &["--trace-steps", "3"]);
    let of = |track: &str| -> Vec<&Event> { events.iter().filter(|e| e.track == track).collect() };
    let steps = of("steps");
    let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, ["step 3", "step 4", "step 5"], "after the first two");

    // All bytes up to the end of these steps: a span belongs to the step in which it ended, or to the pause
    // before it.
    let metrics = run.metrics();
    for (track, key) in [
        ("reads", "device_read_bytes"),
        ("writes", "device_written_bytes"),
    ] {
        let moved: u64 = of(track).iter().map(|event| event.bytes).sum();
        let told: u64 = metrics[2..5]
            .iter()
            .map(|line| line[key].as_u64().unwrap())
            .sum();
        assert_eq!(moved, told, "{track}");
    }

    // One thread computes: no overlaps, everything within a step, and the right turns in each.
    let compute = of("compute");
    for pair in compute.windows(2) {
        assert!(
            pair[0].row == pair[1].row && pair[0].end <= pair[1].start + 0.001,
            "{pair:?}"
        );
    }
    for step in &steps {
        let within = |event: &&&Event| event.start >= step.start && event.end <= step.end;
        let names: Vec<&str> = compute
            .iter()
            .filter(within)
            .map(|event| &*event.name)
            .collect();
        let expected = [
            "forward unit 0",
            "forward unit 1",
            "forward unit 2",
            "head",
            "reduce unit 3",
            "backward unit 2",
            "reduce unit 2",
            "backward unit 1",
            "reduce unit 1",
            "backward unit 0",
            "reduce unit 0",
        ];
        assert_eq!(names, expected);
    }
    assert_eq!(compute.len(), 3 * 11);

    for (track, least) in [
        ("updates", 3),
        ("commits", 2),
        ("gather and scatter", 3 * 11),
    ] {
        assert!(of(track).len() >= least, "{} {track}", of(track).len());
    }
    let (first, last) = (steps[0].start, steps[2].end);
    for event in &events {
        // Transfers of a deferred step may begin before the step does.
        assert!(
            event.start <= event.end && event.end >= first - 1e6 && event.end <= last,
            "{event:?}"
        );
    }
}

#[test]
fn timelines_of_ranks_show_collectives_during_computation() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.steps=4"]);
    let mut command = run.launch(2);
    let path = harness.path("trace.json");
    command.args(["--trace-steps", "1", "--trace"]).arg(&path);
    succeed(command);
    for path in [path, harness.path("trace.json.1")] {
        let events = read(&path);
        let of = |track: &'static str| events.iter().filter(move |e| e.track == track);
        let mut names: Vec<&str> = of("collectives").map(|event| &*event.name).collect();
        names.sort_unstable();
        let shards = ["0", "1", "1", "2", "2", "3"].map(|unit| format!("shards of unit {unit}"));
        let sums = ["0", "1", "2", "3"].map(|unit| format!("sums of unit {unit}"));
        assert_eq!(names, [&shards[..], &sums[..]].concat());
        // A unit's shards arrive while the previous unit computes, and its sums are taken while the next one
        // computes.
        let during = |between: &str, computed: &str| {
            let mut pairs = of("collectives").flat_map(|a| of("compute").map(move |b| (a, b)));
            pairs.any(|(a, b)| {
                (&*a.name, &*b.name) == (between, computed) && a.start <= b.start && b.end <= a.end
            })
        };
        for (between, computed) in [
            ("shards of unit 1", "forward unit 0"),
            ("shards of unit 3", "forward unit 2"),
            ("shards of unit 1", "backward unit 2"),
            ("sums of unit 3", "backward unit 2"),
            ("sums of unit 2", "backward unit 1"),
        ] {
            assert!(during(between, computed), "{between} during {computed}");
        }
    }
}

#[test]
fn a_timeline_changes_no_bit_and_without_the_flag_there_is_none() {
    let harness = Harness::new();
    let plain = harness.run("plain", &[]).with(&harness.nvme());
    let watched = harness.run("watched", &[]).with(&harness.nvme());
    plain.train();
    assert!(!plain.dir.join("trace.json").exists());
    traced(&watched, &harness.path("trace.json"), &[]);
    assert_eq!(plain.bits("loss"), watched.bits("loss"));
    assert_eq!(plain.fingerprint(), watched.fingerprint());
}

#[test]
fn a_failed_run_leaves_its_timeline() {
    let harness = Harness::new();
    let sets = [
        "optimizer.params.lr=1e30",
        "scheduler={}",
        "train.steps=2",
        "gradient_clipping=0",
    ];
    let run = harness.run("run", &sets);
    let mut command = run.command("train");
    let path = harness.path("trace.json");
    command
        .args(["--trace-steps", "1000", "--trace"])
        .arg(&path);
    let text = fail(command);
    assert!(text.contains("training diverged"), "{text}");
    let events = read(&path);
    assert!(events.iter().any(|event| event.track == "compute"));
}

#[test]
fn a_timeline_that_cannot_be_written_is_refused_before_the_start() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    let mut command = run.command("train");
    command.args(["--trace", "/nonexistent/trace.json"]);
    let text = fail(command);
    assert!(
        text.contains("--trace: cannot write /nonexistent/trace.json"),
        "{text}"
    );
    assert!(!run.dir.exists());
}
