//! Tests of runs that do not fit or need missing hardware, and of the advice that they get.

use super::*;
use crate::accelerator::without_torch;

#[test]
fn a_run_that_does_not_fit_is_refused_with_what_to_change() {
    let small_gpu = Overrides {
        gpu_memory_bytes: Some(16 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("none", "none", &[]), &small_gpu);
    assert!(
        text.contains(
            "of GPU memory, but 16.0 GiB is available: set zero_optimization.offload_param.device = \"cpu\" and zero_optimization.offload_optimizer.device = \"cpu\": the run then fits, with steps of at least "
        ),
        "{text}"
    );
    let tiny_gpu = Overrides {
        gpu_memory_bytes: Some(2 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("cpu", "cpu", &[]), &tiny_gpu);
    assert!(
        text.contains("makes the run fit; the least that one of them takes is 2.4 GiB of GPU memory, with train.seq_len = 128 and train_micro_batch_size_per_gpu = 1"),
        "{text}"
    );
    let small_host = Overrides {
        host_memory_bytes: Some(8 * GIB),
        gpu_memory_bytes: Some(5 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("cpu", "cpu", &[]), &small_host);
    assert!(
        text.contains("of host memory, but 8.0 GiB is available: set zero_optimization.offload_optimizer.device = \"nvme\", with an nvme_path: "),
        "{text}"
    );
    let budget = [
        ("offload.host_memory_bytes", json!("2GiB")),
        ("offload.gradients", json!("cpu")),
    ];
    let text = refused(&large("nvme", "nvme", &budget), &h200(1.0));
    assert!(
        text.contains("2.0 GiB is the limit set by offload.host_memory_bytes"),
        "{text}"
    );
}

#[test]
fn a_gpu_that_training_could_not_use_is_refused() {
    let settings = large("cpu", "cpu", &[("train.device", json!("auto"))]);
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    let mut hardware = Hardware::new(&settings, &without, without_torch);
    let why = "there is a GPU (H200), but torch has no GPU support";
    hardware.unusable_gpu = Some(why.to_owned());
    let plan = Plan::new(&settings, hardware).expect("a plan");
    let problem = &plan.problems()[0];
    assert_eq!(
        (problem.kind, problem.what.as_str()),
        (ProblemKind::NoGpu, why)
    );
}

#[test]
fn a_missing_gpu_is_refused() {
    let without = Overrides {
        gpu_memory_bytes: Some(0),
        ..h200(1.0)
    };
    for (key, value, part) in [
        (
            "train.device",
            "gpu",
            "train.device is \"gpu\", but there is no GPU",
        ),
        (
            "offload.optimizer_device",
            "gpu",
            "offload.optimizer_device is \"gpu\", but there is no GPU",
        ),
        (
            "offload.optimizer_device",
            "shared",
            "offload.optimizer_device is \"shared\", but there is no GPU",
        ),
    ] {
        let changes = [(key, json!(value))];
        let text = refused(&large("cpu", "cpu", &changes), &without);
        assert!(text.contains(part), "{text}");
        plan(&large("cpu", "cpu", &changes), &h200(1.0))
            .check()
            .unwrap();
    }
    // With everything in GPU memory, the update must run there.
    let changes = [("offload.optimizer_device", json!("cpu"))];
    let text = refused(&large("none", "none", &changes), &h200(1.0));
    assert!(
        text.contains("the state is in GPU memory: leave it out"),
        "{text}"
    );
}

#[test]
fn advice_names_a_change_with_which_the_run_fits() {
    // The advice keeps the step: the largest micro-batch of the same samples that fits.
    let here = [
        ("train.activation_checkpointing", json!("full")),
        ("offload.activations", json!("gpu")),
    ];
    let mut in_host = large("cpu", "cpu", &here);
    let needs = |micro_batch: usize| {
        let mut split = large("cpu", "cpu", &here);
        (split.batch.micro_batch, split.batch.micro_batches) = (micro_batch, 32 / micro_batch);
        plan(&split, &h200(1.0)).gpu_bytes()
    };
    assert!(needs(8) < needs(16) && needs(16) < needs(32));
    (in_host.batch.micro_batch, in_host.batch.micro_batches) = (32, 1);
    let tight = Overrides {
        gpu_memory_bytes: Some(needs(8)),
        ..h200(1.0)
    };
    let text = refused(&in_host, &tight);
    assert!(
        text.contains("set train_micro_batch_size_per_gpu = 8 and gradient_accumulation_steps = 4: the run then fits"),
        "{text}"
    );

    // The advice moves to a drive what must be there; if no place fits, it reduces the work of a step.
    let small_host = Overrides {
        host_memory_bytes: Some(6 * GIB),
        gpu_memory_bytes: Some(5 * GIB),
        ..h200(1.0)
    };
    let in_host = large("cpu", "cpu", &[]);
    let text = refused(&in_host, &small_host);
    assert!(
        text.contains("offload_optimizer.device = \"nvme\", with an nvme_path: the run then fits, with 31.3 GiB on drives and steps of at least "),
        "{text}"
    );
    let tiny = Overrides {
        gpu_memory_bytes: Some(3 * GIB),
        ..h200(1.0)
    };
    let text = refused(&in_host, &tiny);
    assert!(
        text.contains("set train_micro_batch_size_per_gpu = 1: the run then fits"),
        "{text}"
    );
}

/// Runs with 16 samples in a step, and machines on which they lack memory: devices, other settings, GiB of GPU memory and of host memory.
const LACKING: [(&str, &str, &str, u64, u64); 12] = [
    ("none", "none", "{}", 16, 128),
    ("none", "none", "{}", 8, 12),
    ("none", "none", r#"{"zero_optimization.stage": 2}"#, 8, 12),
    ("cpu", "cpu", "{}", 8, 8),
    ("cpu", "cpu", r#"{"offload.activations": "gpu"}"#, 6, 128),
    (
        "cpu",
        "cpu",
        r#"{"offload.gpu_resident_fraction": 1.0}"#,
        6,
        128,
    ),
    ("cpu", "nvme", r#"{"offload.gradients": "cpu"}"#, 8, 4),
    (
        "nvme",
        "nvme",
        r#"{"offload.staging_bytes": "20GiB"}"#,
        16,
        8,
    ),
    (
        "nvme",
        "nvme",
        r#"{"offload.resident_fraction": 0.9}"#,
        16,
        8,
    ),
    (
        "nvme",
        "nvme",
        r#"{"train.activation_checkpointing": "matmuls", "train.micro_batch_group": 16}"#,
        6,
        8,
    ),
    (
        "nvme",
        "nvme",
        r#"{"train.seq_len": 16384, "model.max_position_embeddings": 16384, "train_micro_batch_size_per_gpu": 1}"#,
        3,
        8,
    ),
    (
        "nvme",
        "nvme",
        r#"{"train.seq_len": 16384, "model.max_position_embeddings": 16384, "model.vocab_size": 131072, "train_micro_batch_size_per_gpu": 1}"#,
        5,
        8,
    ),
];

#[test]
fn advice_that_is_followed_leads_to_a_plan() {
    let mut named = std::collections::BTreeSet::new();
    for (param, optimizer, changes, gpu_gib, host_gib) in LACKING {
        let machine = Overrides {
            gpu_memory_bytes: Some(gpu_gib * GIB),
            host_memory_bytes: Some(host_gib * GIB),
            ..h200(1.0)
        };
        let given: serde_json::Map<String, Value> = serde_json::from_str(changes).unwrap();
        let mut changes: Vec<(&str, Value)> = vec![("offload", json!({}))];
        changes.push(("gradient_accumulation_steps", json!(16)));
        changes.push(("train_micro_batch_size_per_gpu", json!(1)));
        changes.extend(
            given
                .iter()
                .map(|(key, value)| (key.as_str(), value.clone())),
        );
        let before = plan(&large(param, optimizer, &changes), &machine);
        let text = format!("{param}, {optimizer}, {given:?}: {:?}", before.problems);
        let advice = before.advice.unwrap_or_else(|| panic!("no advice: {text}"));
        let says_path = text.contains(", with an nvme_path: the run then fits");
        let needs_path = advice
            .changes
            .iter()
            .any(|(_, value)| value.contains("nvme"));
        assert_eq!(says_path, needs_path, "{text}");
        for (key, value) in &advice.changes {
            let value: toml::Table = format!("value = {value}").parse().unwrap();
            let value: Value = serde_json::to_value(&value["value"]).unwrap();
            // What is so already is no advice.
            let now = changes.iter().rfind(|(path, _)| path == key);
            assert_ne!(now.map(|(_, now)| now), Some(&value), "{text}");
            changes.push((key, value));
            named.insert(*key);
        }
        // Without effect where the device is another.
        for key in [
            "zero_optimization.offload_param.nvme_path",
            "zero_optimization.offload_optimizer.nvme_path",
        ] {
            changes.push((key, json!(["/nvme0"])));
        }
        let after = plan(&large(param, optimizer, &changes), &machine);
        assert!(after.problems.is_empty(), "{text}: {:?}", after.problems);
    }
    let all = [
        "gradient_accumulation_steps",
        "offload.activations",
        "offload.gpu_resident_fraction",
        "offload.gradients",
        "offload.resident_fraction",
        "offload.staging_bytes",
        "train.activation_checkpointing",
        "train.seq_len",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
        "zero_optimization.stage",
    ];
    for key in all {
        assert!(named.contains(key), "{key}: {named:?}");
    }
}

#[test]
fn too_little_staging_is_refused_with_the_key_and_what_is_enough() {
    let with = |bytes: u64| {
        let settings = large("nvme", "nvme", &[("offload.staging_bytes", json!(bytes))]);
        let hardware = Hardware::new(&settings, &h200(1.0), without_torch);
        Plan::new(&settings, hardware).map_err(|error| error.to_string())
    };
    let text = with(1 << 20).expect_err("too little");
    let enough = number_for("offload.staging_bytes", &text).unwrap_or_else(|| panic!("{text}"));
    assert!(text.ends_with(" or more, or \"auto\""), "{text}");
    with(enough as u64).expect("enough");
    with(enough as u64 - 1).expect_err("too little");
}

#[test]
fn advice_keeps_the_state_on_drives_in_host_memory_and_on_the_gpu_if_that_is_faster() {
    let machine = Overrides {
        gpu_memory_bytes: Some(12 * GIB),
        host_memory_bytes: Some(6 * GIB),
        ..h200(1.0)
    };
    let small = [
        ("offload", json!({})),
        ("train_micro_batch_size_per_gpu", json!(1)),
        ("gradient_accumulation_steps", json!(8)),
    ];
    let text = refused(&large("none", "none", &small), &machine);
    for part in [
        "offload_optimizer.device = \"nvme\" and ",
        "offload.resident_fraction = \"auto\" and offload.gpu_resident_fraction = \"auto\", with an nvme_path: the run then fits",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

/// The number that `text` gives for `key`.
fn number_for(key: &str, text: &str) -> Option<usize> {
    let rest = text.split(&format!("{key} = ")).nth(1)?;
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
    digits.parse().ok()
}
