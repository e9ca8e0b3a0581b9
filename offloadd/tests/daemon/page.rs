//! Tests the metrics endpoint for Prometheus. What could go wrong: text that does not parse, counts that differ from what was moved, a dashboard with
//! metrics that do not exist, a peer that sends nothing or nonsense and keeps others from asking.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use test_hooks::port::ReservedPort;

use crate::common::{Daemon, Store, eventually, expect_tiles, fill_tiles, program, words};

/// Slow peers are disconnected before this.
const SOON: Duration = Duration::from_secs(10);

/// Makes a store whose daemon serves metrics on a unix socket.
fn with_page() -> (Store, PathBuf) {
    let store = Store::new(2, "auto");
    let page = store.dir.path().join("run/metrics.sock");
    listen(&store, &format!("unix:{}", page.display()));
    (store, page)
}

pub(crate) fn listen(store: &Store, address: &str) {
    let mut text = std::fs::read_to_string(&store.config).unwrap();
    text.push_str(&format!("[metrics]\nlisten = {address:?}\n"));
    text.push_str("[quota.default]\nweight = 300\n[quota.job]\nweight = 250\n");
    std::fs::write(&store.config, text).unwrap();
}

/// Returns the answer to a request, head and body.
fn ask(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    (head.into(), body.into())
}

pub(crate) fn get(page: &PathBuf, path: &str) -> (String, String) {
    let stream = UnixStream::connect(page).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    ask(
        stream,
        &format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n"),
    )
}

#[test]
fn a_drain_that_waits_for_a_start_is_seen_by_prometheus_and_in_top() {
    let (store, page) = with_page();
    let _daemon = store.serve();
    let metadata = &store.devices[0];
    let of = |what: &str, more: &str| {
        let (_, text) = get(&page, "/metrics");
        samples(&text)[&format!("{what}{{device=\"{}\"{more}}}", metadata.display())]
    };
    let phase = |name: &str| of("offloadd_device_phase", &format!(",phase=\"{name}\""));
    assert_eq!((phase("settled"), phase("draining")), (1.0, 0.0));
    assert_eq!(of("offloadd_device_stuck", ""), 0.0);
    let mut drain = program();
    drain.args(["device", "drain"]).arg(metadata);
    let drained = drain.arg("--config").arg(&store.config).output().unwrap();
    assert!(drained.status.success(), "{}", words(&drained));
    // The device has the catalog, which moves at a start.
    eventually("it waits for a start", Duration::from_secs(60), || {
        of("offloadd_device_waits_for_start", "") == 1.0
    });
    assert_eq!(of("offloadd_device_stuck", ""), 0.0, "a start repairs it");
    assert_eq!((phase("settled"), phase("draining")), (0.0, 1.0));
    let mut top = program();
    top.args(["top", "--once", "--interval", "0.1", "--config"]);
    let shown = words(&top.arg(&store.config).output().unwrap());
    assert!(
        shown.contains(" to move, all tiles have left it; the store's catalog"),
        "{shown}"
    );
}

/// Returns every sample of a text, by name and labels as written.
fn samples(text: &str) -> HashMap<String, f64> {
    let mut types = HashMap::new();
    let mut samples = HashMap::new();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.last(), Some(&"# EOF"));
    for line in &lines[..lines.len() - 1] {
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<_> = comment.splitn(3, ' ').collect();
            match words[0] {
                "TYPE" => assert_eq!(types.insert(words[1], words[2]), None, "{line}"),
                "HELP" => assert!(words[2].len() > 3, "{line}"),
                "UNIT" => assert!(words[1].ends_with(words[2]), "{line}"),
                other => panic!("{other} in {line}"),
            }
            continue;
        }
        let (name, value) = line.rsplit_once(' ').expect(line);
        let value: f64 = value.parse().expect(line);
        assert_eq!(samples.insert((*name).to_owned(), value), None, "{line}");
        let metric = name.split('{').next().unwrap();
        let of_a_type = types.iter().any(|(of, kind)| {
            let suffixes: &[&str] = match *kind {
                "counter" => &["_total"],
                "gauge" => &[""],
                "histogram" => &["_bucket", "_sum", "_count"],
                kind => panic!("{kind}"),
            };
            metric
                .strip_prefix(of)
                .is_some_and(|rest| suffixes.contains(&rest))
        });
        assert!(of_a_type, "{line} has no type");
    }
    samples
}

#[test]
fn the_text_parses_and_says_what_was_moved() {
    let (store, page) = with_page();
    let mut daemon = store.serve();
    assert!(
        daemon.ready.contains("metrics at unix:/"),
        "{}",
        daemon.ready
    );
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 6);
    fill_tiles(&mut session, 6, working, 10);
    expect_tiles(&mut session, 6, 10);
    expect_tiles(&mut session, 1, 10);
    session.commit(&mut control, working, b"step 1");

    let (head, text) = get(&page, "/metrics");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    let samples = samples(&text);
    let uid = rustix::process::geteuid().as_raw();
    let of_job = format!("{{job_name=\"tiny\",uid=\"{uid}\"}}");
    for (name, expected) in [
        ("offloadd_job_read_bytes_total", 7.0 * 4096.0),
        ("offloadd_job_written_bytes_total", 6.0 * 4096.0),
        ("offloadd_job_commit_seconds_count", 1.0),
        ("offloadd_job_commits_failed_total", 0.0),
        ("offloadd_job_generation", 1.0),
        ("offloadd_job_slots", 4.0),
        ("offloadd_job_slots_used", 0.0),
        ("offloadd_job_weight", 250.0),
        ("offloadd_job_sessions", 1.0),
    ] {
        assert_eq!(
            samples.get(&format!("{name}{of_job}")),
            Some(&expected),
            "{name}"
        );
    }
    let of_user = format!("offloadd_user_weight{{uid=\"{uid}\"}}");
    assert_eq!(samples[&of_user], 300.0);
    let device = |name: &str| -> f64 {
        let of = store.devices.iter();
        of.map(|path| samples[&format!("{name}{{device=\"{}\"}}", path.display())])
            .sum()
    };
    assert_eq!(device("offloadd_device_read_bytes_total"), 7.0 * 4096.0);
    // Tiles, the job's definition and the catalog, the record: all whole blocks.
    let written = device("offloadd_device_written_bytes_total");
    assert!(
        written >= 8.0 * 4096.0 && written % 4096.0 == 0.0,
        "{written}"
    );
    assert!(device("offloadd_device_busy_seconds_total") > 0.0);
    assert!(device("offloadd_device_free_bytes") > 0.0);
    assert_eq!(device("offloadd_device_slow"), 0.0);
    assert_eq!(device("offloadd_device_stuck"), 0.0);
    assert!(samples["offloadd_arena_used_bytes"] > 0.0);

    // In each histogram buckets only grow and the last one equals the count, and there are as many reads as were made.
    let mut reads = 0.0;
    for path in &store.devices {
        let labels = format!("device=\"{}\",op=\"read\"", path.display());
        let name = "offloadd_device_operation_seconds";
        let count = samples[&format!("{name}_count{{{labels}}}")];
        let start = format!("{name}_bucket{{le=\"");
        let end = format!("\",{labels}}}");
        let buckets = samples.iter().filter_map(|(name, count)| {
            let bound = name.strip_prefix(&start)?.strip_suffix(&end)?;
            Some((bound.replace("+Inf", "inf").parse::<f64>().unwrap(), *count))
        });
        let mut buckets: Vec<_> = buckets.collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(buckets.len() > 20, "{buckets:?}");
        assert!(buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        assert_eq!(*buckets.last().unwrap(), (f64::INFINITY, count));
        reads += count;
    }
    assert_eq!(reads, 7.0);

    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    assert!(!page.exists(), "its socket goes with it");
}

#[test]
fn the_dashboard_draws_what_is_counted() {
    let (store, page) = with_page();
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 1);
    // Some lines appear only after something was written.
    fill_tiles(&mut session, 1, working, 10);
    let (_, text) = get(&page, "/metrics");
    let counted = samples(&text);
    let counted: Vec<&str> = counted
        .keys()
        .map(|name| name.split('{').next().unwrap())
        .collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/grafana.json");
    let dashboard = std::fs::read_to_string(path).unwrap();
    let json: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let panels = json["panels"].as_array().unwrap();
    assert!(panels.len() >= 10);
    let mut drawn = 0;
    for panel in panels {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let names: Vec<_> = words.filter(|word| word.starts_with("offloadd_")).collect();
            assert!(!names.is_empty(), "{expression}");
            for name in names {
                assert!(
                    counted.contains(&name),
                    "{name} of {} is not counted",
                    panel["title"]
                );
                drawn += 1;
            }
        }
    }
    assert!(drawn >= 20, "{drawn}");
}

#[test]
fn it_answers_on_loopback_and_only_what_it_is_for() {
    let store = Store::new(1, "psync");
    let port = ReservedPort::new();
    let address = port.address();
    listen(&store, &address.to_string());
    let _daemon = store.serve();
    let status = |request: &str| {
        let (head, _) = ask(TcpStream::connect(address).unwrap(), request);
        head.split(' ').nth(1).unwrap().to_owned()
    };
    let end = "HTTP/1.1\r\nHost: here\r\n\r\n";
    assert_eq!(status(&format!("GET /metrics {end}")), "200");
    assert_eq!(status(&format!("HEAD /metrics {end}")), "200");
    assert_eq!(status(&format!("GET / {end}")), "404");
    assert_eq!(
        status(&format!("GET /metrics/../../etc/passwd {end}")),
        "404"
    );
    assert_eq!(status(&format!("POST /metrics {end}")), "405");
    assert_eq!(status("nonsense\r\n\r\n"), "400");
    let long = "x".repeat(64 << 10);
    let head = format!("GET /metrics HTTP/1.1\r\nHost: here\r\nX: {long}\r\n\r\n");
    assert_eq!(status(&head), "431");
}

#[test]
fn peers_that_say_nothing_keep_nobody_from_asking() {
    let (store, page) = with_page();
    let daemon = store.serve();
    let hold = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(&page).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    let mut held: Vec<_> = (0..60).map(|_| hold(b"")).collect();
    held.extend((0..20).map(|_| hold(b"GET /metrics HTTP/1.1\r\nHos")));
    held.extend((0..20).map(|_| hold(&[0xff; 300])));
    let start = Instant::now();
    let (head, _) = get(&page, "/metrics");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    // Calls have their own socket and threads.
    let start = Instant::now();
    daemon.control().arena_free_bytes();
    assert!(start.elapsed() < SOON);
    drop(held);
}

#[test]
fn a_living_daemons_page_is_not_taken_and_a_dead_ones_is() {
    let (store, page) = with_page();
    let mut daemon = store.serve();
    let other = Store::new(1, "psync");
    listen(&other, &format!("unix:{}", page.display()));
    let refusal = other.refusal();
    assert!(refusal.contains("another offloadd (pid "), "{refusal}");
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(page.exists());
    let _after: Daemon = other.serve();
    assert!(get(&page, "/metrics").0.starts_with("HTTP/1.1 200 "));
}
