//! Tests that the command reference and the shell lines in documents match the program, and that the pictures of
//! stored results are drawn as the program draws.

use std::collections::BTreeMap;

use clap::CommandFactory;
use serde_json::Value;

use super::Arguments;
use crate::machine::Machine;
use crate::scale::Load;
use crate::{scale, training};

#[test]
fn the_command_reference_in_docs_is_current() {
    docs_test::assert_page(
        "docs/cli/bench-io.md",
        &docs_test::reference(Arguments::command()),
    );
}

#[test]
fn documents_call_commands_that_exist() {
    docs_test::assert_commands_parse(&Arguments::command());
}

fn stored(path: &str) -> Value {
    let text = std::fs::read_to_string(docs_test::root().join(path)).expect("stored results");
    serde_json::from_str(&text).expect("JSON")
}

fn machine(report: &Value) -> String {
    let machine = serde_json::from_value::<Machine>(report["machine"].clone());
    machine.expect("a machine").to_string()
}

#[test]
fn the_pictures_of_measured_drives_are_current() {
    for name in ["fast", "scale"] {
        let report = stored(&format!("bench-io/measured/{name}.json"));
        let rows = report["rows"].as_array().expect("rows");
        let bs = rows.last().expect("a row")["bs"].as_u64().expect("bytes");
        let rate = |way: &Value, direction: &str| way[direction]["bytes_per_s"].as_f64();
        let both = |way: &Value| {
            let rates = ["read", "write"].map(|direction| rate(way, direction));
            rates.into_iter().flatten().sum::<f64>()
        };
        let rows = rows
            .iter()
            .filter(|row| row["bs"] == bs && row["unlimited"] == false);
        let rows = rows.map(|row| {
            let load = Load::ALL
                .into_iter()
                .find(|load| row["load"] == load.word());
            let load = load.expect("a load");
            let limit = |index: usize| row["limit_bytes_per_s"][index].as_f64().unwrap_or(0.0);
            let read = if load.reads() { limit(0) } else { 0.0 };
            let write = if load.writes() { limit(1) } else { 0.0 };
            scale::picture::Drawn {
                drives: row["drives"].as_f64().expect("drives"),
                load,
                limit: row["limit_bytes_per_s"].is_array().then_some(read + write),
                fio: row["fio"].is_object().then(|| both(&row["fio"])),
                offloadd: both(&row["daemon"]),
                one_thread: row["one_thread_bytes_per_s"].as_f64(),
            }
        });
        let limit = |direction: &str| {
            let bps = report["limit"][direction].as_f64().expect("a limit");
            format!("{:.2} GB/s", bps / 1e9)
        };
        let about = [
            machine(&report),
            format!(
                "limit set: {} read and {} written per drive",
                limit("read_bps"),
                limit("write_bps")
            ),
        ];
        let drawn = scale::picture::draw(bs as u32, &about, &rows.collect::<Vec<_>>());
        docs_test::assert_page(&format!("bench-io/measured/{name}.svg"), &drawn);
    }
}

/// TFLOPS that DeepSpeed reached in the training table of `trainer/bench`, by drives: of several runs the median.
fn deepspeed_measured() -> BTreeMap<u64, f64> {
    let results = stored("trainer/bench/results.json");
    let mut found = BTreeMap::new();
    for (row, drives) in [("deepspeed-nvme1", 1), ("deepspeed-nvme4", 4)] {
        let runs = results.as_array().expect("rows").iter();
        let runs = runs.filter(|run| run["row"] == row && run["model"] == "1.3b");
        let mut tflops: Vec<f64> = runs.filter_map(|run| run["tflops"].as_f64()).collect();
        tflops.sort_by(f64::total_cmp);
        let middle = tflops.len() / 2;
        let median = (tflops[middle] + tflops[(tflops.len() - 1) / 2]) / 2.0;
        found.insert(drives, median);
    }
    found
}

#[test]
fn the_picture_of_measured_training_is_current() {
    let report = stored("bench-io/measured/training.json");
    let peers = deepspeed_measured();
    let rows = report["rows"].as_array().expect("rows");
    let ours = |key: &str| rows[0]["ours"][key].as_f64().expect("a number");
    let (parameters, tokens) = (ours("parameters"), ours("tokens"));
    let tflops = |step: &Value| Some(6.0 * parameters * tokens / step["step_s"].as_f64()? / 1e12);
    let drawn = rows.iter().map(|row| training::picture::Drawn {
        drives: row["drives"].as_f64().expect("drives"),
        predicted: tflops(&row["ours"]),
        measured: tflops(&row["measured"]),
        deepspeed_predicted: tflops(&row["deepspeed"]),
        deepspeed_measured: peers.get(&row["drives"].as_u64().expect("drives")).copied(),
    });
    let about = [
        machine(&report),
        format!("Llama with {:.0} M parameters, {tokens} tokens per step, one H200", parameters / 1e6),
        format!("rates: {}", report["rates"].as_str().expect("a text")),
        "DeepSpeed, measured: 0.19.8 on drives of the same rates, median of the runs in trainer/bench/results.json".into(),
    ];
    let drawn = training::picture::draw(&about, &drawn.collect::<Vec<_>>());
    docs_test::assert_page("bench-io/measured/training.svg", &drawn);
}
