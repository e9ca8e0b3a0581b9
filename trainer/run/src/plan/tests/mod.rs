//! Tests of whole plans for a Llama of 1.345 G parameters. Errors that they find: memory is counted twice or
//! not at all, a choice does not fit the memory it was made for, a run that cannot work is accepted.

mod attention;
mod choices;
mod counts;
mod gpu_units;
mod groups;
mod matmuls;
mod neighbours;
mod nodes;
mod refusals;
mod sequence;

use crate::accelerator::without_torch;
use serde_json::{Value, json};

use super::hardware::products_tflops;
use super::*;
use crate::config::{RunSettings, check};
use crate::model::HfModel;
use training_state::plan::choose::STAGING_BYTES_ASSUMED;

const GIB: u64 = 1 << 30;

/// Settings with 1.345 G parameters, 16k tokens in a step, bf16.
fn large(param: &str, optimizer: &str, changes: &[(&str, Value)]) -> RunSettings {
    let mut tree = json!({
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": true},
        "zero_optimization": {
            "offload_param": {"device": param},
            "offload_optimizer": {"device": optimizer},
        },
        "model": {
            "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
            "num_hidden_layers": 24, "num_attention_heads": 16
        },
        "data": {"files": ["text"]},
        "train": {"steps": 100, "seq_len": 2048, "run_dir": "/nonexistent/run"},
        // Tests of what stays in GPU memory set their own.
        "offload": {"gpu_resident_fraction": 0}
    });
    for (key, place) in [(param, "offload_param"), (optimizer, "offload_optimizer")] {
        if key == "nvme" {
            tree["zero_optimization"][place]["nvme_path"] = json!(["/nvme0"]);
        }
    }
    for (path, value) in changes {
        let mut place = &mut tree;
        for key in path.split('.') {
            place = &mut place[key];
        }
        *place = value.clone();
    }
    let ranks = ranks_of(&mut tree);
    check(tree, "test", ranks).expect("settings")
}

/// Number of processes of the run, from a key that only these tests have.
fn ranks_of(tree: &mut Value) -> Option<u32> {
    let ranks = tree["train"].as_object_mut()?.remove("ranks")?;
    Some(ranks.as_u64()? as u32)
}

/// Machine with one H200 and `drives` drives of 6.2 and 3.2 GB/s.
fn h200(drives: f64) -> Overrides {
    Overrides {
        host_memory_bytes: Some(128 * GIB),
        gpu_memory_bytes: Some(139 * GIB),
        read_bytes_per_s: Some(drives * 6.2e9),
        write_bytes_per_s: Some(drives * 3.2e9),
        cores: Some(16),
        tflops: Some(305.0),
        ..Overrides::default()
    }
}

fn plan(settings: &RunSettings, machine: &Overrides) -> Plan {
    Plan::new(settings, Hardware::new(settings, machine, without_torch)).expect("a plan")
}

/// One H200 of which a plan knows the name, and so its rates.
fn known_h200(settings: &RunSettings, no_cudnn: Option<&str>) -> Hardware {
    let machine = Overrides {
        tflops: None,
        ..h200(1.0)
    };
    let mut hardware = Hardware::new(settings, &machine, without_torch);
    let gpu = hardware.gpu.as_mut().expect("a GPU");
    gpu.name = "NVIDIA H200".to_owned();
    gpu.no_cudnn = no_cudnn.map(str::to_owned);
    hardware.products_tflops = products_tflops(hardware.gpu.as_ref(), 16.0);
    hardware.tflops.value = hardware.products_tflops;
    hardware
}

/// Returns the messages of all problems.
fn refused(settings: &RunSettings, machine: &Overrides) -> String {
    let plan = plan(settings, machine);
    assert!(plan.check().is_err(), "must be refused");
    let problems: Vec<String> = plan.problems().iter().map(ToString::to_string).collect();
    problems.join("\n")
}

fn tflops(plan: &Plan) -> f64 {
    plan.report().bound.tflops
}
