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
        text.contains("lower train_micro_batch_size_per_gpu"),
        "{text}"
    );
    let small_host = Overrides {
        host_memory_bytes: Some(8 * GIB),
        ..h200(1.0)
    };
    let text = refused(&large("cpu", "cpu", &[]), &small_host);
    assert!(
        text.contains("of host memory, but 8.0 GiB is available: set zero_optimization.offload_param.device = \"nvme\" with"),
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
        text.contains("set train_micro_batch_size_per_gpu = 8 with gradient_accumulation_steps = 4: the run then fits"),
        "{text}"
    );

    // The advice moves to a drive what must be there; if no place fits, it reduces the work of a step.
    let small_host = Overrides {
        host_memory_bytes: Some(6 * GIB),
        ..h200(1.0)
    };
    let in_host = large("cpu", "cpu", &[]);
    let text = refused(&in_host, &small_host);
    assert!(
        text.contains("offload_optimizer.device = \"nvme\" with an nvme_path: the run then fits"),
        "{text}"
    );
    let tiny = Overrides {
        gpu_memory_bytes: Some(3 * GIB),
        ..h200(1.0)
    };
    let text = refused(&in_host, &tiny);
    assert!(
        text.contains("set train_micro_batch_size_per_gpu = 1 with gradient_accumulation_steps = "),
        "{text}"
    );
}

/// The number that `text` gives for `key`.
fn number_for(key: &str, text: &str) -> Option<usize> {
    let rest = text.split(&format!("{key} = ")).nth(1)?;
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[test]
fn advice_that_is_followed_leads_to_a_plan() {
    let small = Overrides {
        gpu_memory_bytes: Some(16 * GIB),
        host_memory_bytes: Some(8 * GIB),
        ..h200(1.0)
    };
    let changes = [
        ("offload.tile_elems", json!(4 << 20)),
        ("model.vocab_size", json!(1 << 18)),
        ("model.max_position_embeddings", json!(1 << 16)),
    ];
    let mut named = Vec::new();
    for (seq_len, micro_batch, micro_batches) in [(65536, 4, 8), (65536, 8, 1), (8192, 8, 2)] {
        let mut settings = large("nvme", "nvme", &changes);
        let batch = &mut settings.batch;
        (batch.seq_len, batch.micro_batch) = (seq_len, micro_batch);
        batch.micro_batches = micro_batches;
        let text = plan(&settings, &small).problems[0].change.clone();
        assert!(text.contains("the run then fits"), "{text}");
        let batch = &mut settings.batch;
        for (key, value) in [
            ("train.seq_len", &mut batch.seq_len),
            ("train_micro_batch_size_per_gpu", &mut batch.micro_batch),
            ("gradient_accumulation_steps", &mut batch.micro_batches),
            ("train.mlp_chunks", &mut settings.train.mlp_chunks),
        ] {
            if let Some(number) = number_for(key, &text) {
                *value = number;
                named.push(key);
            }
        }
        let problems = plan(&settings, &small).problems;
        assert!(problems.is_empty(), "{text}: {problems:?}");
    }
    let others = named.iter().any(|key| *key != "train.seq_len");
    assert!(others && named.contains(&"train.seq_len"), "{named:?}");
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
