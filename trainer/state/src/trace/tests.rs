//! Errors that these tests find: a viewer cannot read the file, or shows two events at one place; a long run
//! fills memory or disk; a file is incomplete, or written without being requested.

use std::time::Duration;

use serde_json::Value;

use super::*;

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a file");
    serde_json::from_str(&text).expect("JSON")
}

/// Start and end in microseconds, row and name of all events.
fn spans(events: &[Value]) -> Vec<(f64, f64, u64, String)> {
    let of = |event: &Value| {
        let start = event["ts"].as_f64()?;
        let end = start + event["dur"].as_f64()?;
        Some((
            start,
            end,
            event["tid"].as_u64()?,
            event["name"].as_str()?.to_owned(),
        ))
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn only_the_steps_after_the_first_two_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let trace = Trace::new(&path, 3, 0);
    trace.begin(100);
    let mut wanted = Vec::new();
    for step in 0..10 {
        let start = Instant::now();
        drop(trace.span(Track::Compute, || format!("forward {step}")));
        let begins = trace.begins_after();
        trace.finish_step(step, start, Spans::default());
        wanted.push((begins, trace.has_ended()));
    }
    let at = |find: fn(&(bool, bool)) -> bool| wanted.iter().position(find);
    assert_eq!((at(|step| step.0), at(|step| step.1)), (Some(1), Some(4)));
    assert_eq!(wanted.iter().filter(|step| step.0 || step.1).count(), 2);
    assert_eq!(trace.write().unwrap(), Some(&*path));
    let names: Vec<String> = spans(&read(&path)).into_iter().map(|span| span.3).collect();
    for step in 0..10 {
        let recorded = (2..5).contains(&step);
        for name in [format!("step {step}"), format!("forward {step}")] {
            assert_eq!(names.contains(&name), recorded, "{name}");
        }
    }
}

#[test]
fn a_short_run_is_recorded_from_its_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let trace = Trace::new(&dir.path().join("trace.json"), 5, 0);
    trace.begin(2);
    assert!(trace.recording());
    trace.begin(3);
    assert!(!trace.recording());
}

#[test]
fn overlapping_events_get_separate_lanes_and_nested_ones_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    let trace = Trace::new(&path, 5, 0);
    let at = |ms: u64| Instant::now() + Duration::from_millis(1000 + ms);
    for (start, end) in [(0, 10), (2, 4), (3, 20), (5, 9), (11, 12)] {
        trace.record(Track::Read, format!("{start}"), at(start), at(end));
        trace.record(Track::Move, format!("{start}"), at(0), at(100));
    }
    trace.write().unwrap();
    let events = read(&path);
    let all = spans(&events);
    let reads: Vec<_> = all
        .iter()
        .filter(|(.., row, _)| (6000..7000).contains(row))
        .collect();
    assert_eq!(reads.len(), 5);
    for (i, a) in reads.iter().enumerate() {
        for b in &reads[i + 1..] {
            assert!(a.2 != b.2 || a.1 <= b.0 || b.1 <= a.0, "{a:?} and {b:?}");
        }
    }
    let rows = |track: std::ops::Range<u64>| {
        let mut rows: Vec<u64> = all
            .iter()
            .map(|span| span.2)
            .filter(|row| track.contains(row))
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows.len()
    };
    assert_eq!((rows(6000..7000), rows(3000..4000)), (3, 1));
    let named = |name: &str| events.iter().any(|event| event["args"]["name"] == name);
    assert!(named("reads 2") && named("gather and scatter") && named("rank 0"));
}

#[test]
fn nothing_is_recorded_without_a_file() {
    let trace = Trace::off();
    trace.begin(100);
    let guard = trace.span(Track::Compute, || panic!("the name is not needed"));
    drop(guard);
    assert!(!trace.recording() && !trace.begins_after() && !trace.has_ended());
    assert_eq!(trace.write().unwrap(), None);
}

#[test]
fn each_rank_writes_its_own_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    for rank in 0..3 {
        Trace::new(&path, 5, rank).write().unwrap();
    }
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["trace.json", "trace.json.1", "trace.json.2"]);
    // Viewers take process 0 for the idle process and show nothing of it.
    assert_eq!(read(&dir.path().join("trace.json.2"))[0]["pid"], 3);
}

#[test]
fn a_path_that_cannot_be_written_is_named() {
    let trace = Trace::new(Path::new("/nonexistent/trace.json"), 5, 0);
    trace.write().unwrap_err();
    let text = trace.check().unwrap_err().to_string();
    assert!(
        text.contains("--trace: cannot write /nonexistent/trace.json"),
        "{text}"
    );
}
