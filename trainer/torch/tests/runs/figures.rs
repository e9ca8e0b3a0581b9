//! Compares the bytes and bounds in metrics.jsonl with calculations.
//!
//! Errors that these tests find: bytes are counted twice, for another step, or not at all; a bound is not a
//! lower bound. The bytes that a step must move depend only on the number of parameters, so the test
//! calculates them.

use crate::harness::Harness;

/// With bf16 weights, the state is the master's lower half and two fp32 moments.
const STATE_BYTES: u64 = 2 + 4 + 4;
const WEIGHT_BYTES: u64 = 2;

/// Each tile is padded to whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// Values of the tests' configuration.
const TILE_ELEMS: u64 = 4096;
const STAGING_BYTES: u64 = 100_000;

/// Number of layers for which staging is a small part of all tiles.
const LAYERS: u64 = 12;

#[test]
fn a_step_on_a_drive_writes_twelve_bytes_a_parameter_and_reads_up_to_fourteen() {
    let harness = Harness::new();
    let sets = [
        "bf16.enabled=true",
        "offload.optimizer_step=deferred",
        "train.steps=8",
    ];
    let layers = format!("model.num_hidden_layers={LAYERS}");
    let run = harness
        .run("run", &sets)
        .with(&[layers])
        .with(&harness.nvme());
    run.train();
    // A block has query and output, key and value for half of the heads, three MLP matrices, two norms; the
    // head has one norm.
    let (hidden, inner, vocab) = (32, 64, 256);
    let block = 2 * hidden * hidden + 2 * hidden * hidden / 2 + 3 * hidden * inner + 2 * hidden;
    let mut units = vec![block; LAYERS as usize];
    units.extend([vocab * hidden, hidden + vocab * hidden]);
    let params: u64 = units.iter().sum();
    let padded = |bytes_per_elem: u64| -> u64 {
        units
            .iter()
            .flat_map(|&elems| {
                let full = elems / TILE_ELEMS;
                (0..full).map(|_| TILE_ELEMS).chain([elems % TILE_ELEMS])
            })
            .map(|elems| (elems * bytes_per_elem).next_multiple_of(BLOCK_BYTES))
            .sum()
    };
    let (weights, states) = (padded(WEIGHT_BYTES), padded(STATE_BYTES));
    let out_bytes = weights + states;
    assert!(
        (12 * params..13 * params).contains(&out_bytes),
        "mostly full tiles"
    );

    let metrics = run.metrics();
    let steady = &metrics[2..];
    let sum = |key: &str| -> f64 { steady.iter().map(|line| line[key].as_f64().unwrap()).sum() };
    for line in steady {
        // On a busy machine, the last transfers of a step may end in the next one.
        let written_bytes = line["device_written_bytes"].as_u64().unwrap();
        assert!(written_bytes.abs_diff(out_bytes) <= STAGING_BYTES, "{line}");
        // Tiles in staging at the end of forward and of the step are not read again.
        let (read_bytes, most) = (
            line["device_read_bytes"].as_u64().unwrap(),
            out_bytes + weights,
        );
        let least = most - 2 * STAGING_BYTES;
        assert!(
            12 * params <= least && (least..=most + STAGING_BYTES).contains(&read_bytes),
            "{line}"
        );
        // Staging and a gradient for every parameter are held at the same time.
        let host_bytes = line["host_bytes"].as_u64().unwrap();
        assert!(host_bytes > STAGING_BYTES / 2 + 2 * params, "{line}");
        assert!(line["bound_s"].as_f64().unwrap() > 0.0, "{line}");
    }
    let all_bytes = (steady.len() as u64 * out_bytes) as f64;
    let difference = (sum("device_written_bytes") - all_bytes).abs();
    assert!(difference <= STAGING_BYTES as f64, "{steady:?}");
    let most_read_bytes = all_bytes + (steady.len() as u64 * weights + STAGING_BYTES) as f64;
    assert!(sum("device_read_bytes") <= most_read_bytes, "{steady:?}");
    // The drive may be faster than when its rates were measured, but not by much.
    assert!(sum("bound_s") < 2.0 * sum("step_s"), "{steady:?}");
}

#[test]
fn in_host_memory_a_step_moves_nothing_and_takes_as_long_as_its_computation() {
    let harness = Harness::new();
    let run = harness.run("run", &[]);
    run.train();
    for line in run.metrics() {
        let [step_s, bound_s] = ["step_s", "bound_s"].map(|key| line[key].as_f64().unwrap());
        assert!(0.0 < bound_s && bound_s <= step_s, "{line}");
        assert_eq!(line["device_read_bytes"], 0);
        assert_eq!(line["device_written_bytes"], 0);
        assert!(line["host_bytes"].as_u64().unwrap() > 0);
    }
}
