//! Checks of whole files of settings, as scripts give them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use training_state::learning_rate::LrSchedule;

use super::*;

fn read(tree: Value) -> Result<PackageSettings, String> {
    check(tree, "ds.json", 1).map_err(|error| error.to_string())
}

#[test]
fn deepspeeds_switches_of_masters_and_moments_are_read_and_contradict_no_key() {
    let of = |bf16: Value, own: Value| {
        let found = read(json!({"bf16": bf16, "offloadd": own}))?;
        Ok::<_, String>([found.master, found.moments])
    };
    let on = json!({"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true});
    let off = json!({"bf16_master_weights_and_grads": false, "bf16_optimizer_states": false});
    assert_eq!(of(json!({}), json!({})).unwrap(), ["fp32", "fp32"]);
    assert_eq!(of(off.clone(), json!({})).unwrap(), ["fp32", "fp32"]);
    assert_eq!(of(on.clone(), json!({})).unwrap(), ["bf16", "bf16"]);
    let same = json!({"master": "bf16", "moments": "bf16"});
    assert_eq!(of(on.clone(), same.clone()).unwrap(), ["bf16", "bf16"]);
    // They count in a run in bf16 alone, and moments need masters, as there.
    let states = "bf16_optimizer_states";
    for (bf16, part) in [
        (
            json!({"enabled": true, states: true}),
            "needs bf16_master_weights_and_grads",
        ),
        (
            json!({"enabled": false, "bf16_master_weights_and_grads": true}),
            "bf16.enabled is not",
        ),
        (
            json!({"enabled": "auto", "bf16_master_weights_and_grads": true, states: true}),
            "bf16.enabled is not",
        ),
    ] {
        let text = of(bf16, json!({})).unwrap_err();
        assert!(text.contains(part), "{text}");
    }
    let text = of(on.clone(), json!({"moments": "8bit"})).unwrap_err();
    assert!(
        text.contains("\"8bit\" contradicts bf16.bf16_optimizer_states"),
        "{text}"
    );
    for (bf16, own) in [(on, json!({"master": "fp32"})), (off, same)] {
        let text = of(bf16, own).unwrap_err();
        let part = "contradicts bf16.bf16_master_weights_and_grads: leave one of them out";
        assert!(
            text.contains("offloadd.master") && text.contains(part),
            "{text}"
        );
    }
}

#[test]
fn what_deepspeed_accepts_is_accepted_and_told() {
    let text = r#"{ // as DeepSpeed reads it
        "_comment": "mine", "my.note": 1, "comms_config": {"verbose": true}, "compile": {"deepcompile": true},
        "amd_specific": {"a": {"b": 1}}, "bfloat16": {"enabled": true}, "zero_optimization": true, "steps_per_print": Infinity,
        "train_batch_size": 8e0, "gradient_clippping": 1, "wandb": {"enabled": false}, "optimizer": null,
    }"#;
    let found = check(
        parse_text(text, Path::new("ds.json")).unwrap(),
        "ds.json",
        2,
    )
    .unwrap();
    assert_eq!(found.precision, Some("bfloat16"));
    assert_eq!(
        (found.train_batch_size, found.micro_batch),
        (Some(8), Some(4))
    );
    assert_eq!((found.gradient_clipping, found.device), (None, Tier::None));
    assert_eq!(found.without_effect, ["compile", "amd_specific"]);
    assert!(found.optimizer.is_none() && found.steps_per_print > Some(1 << 60));
    let said = found.said.join("\n");
    for part in [
        "warning: gradient_clippping in ds.json has no effect: DeepSpeed does not know it; did you mean `gradient_clipping`?",
        "_comment",
        "my.note",
        "comms_config",
        "nor has it in DeepSpeed",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn everything_wrong_is_told_at_once() {
    let told = read(json!({
        "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "pipeline": {"stages": 2},
        "zero_optimization": {"stage": 7, "overlap_com": true, "zero_quantized_weights": true},
        "optimizer": {"type": "Adagrad"}, "scheduler": {"type": "WarmupDecayLR"}, "bf16": {"enabled": "yes"},
        "offloadd": {"moments": "fp8", "comit_every": 2, "update_threads": 0, "mlp_chunks": 0, "loss_chunks": 0, "resident_fraction": "auto"}, "offload": {},
    }));
    let told = told.unwrap_err();
    for part in [
        "15 settings are wrong\n",
        "offloadd.resident_fraction: \"auto\": the package does not choose it",
        "train_batch_size: 7 is not a multiple",
        "pipeline is not supported: leave it out: all ranks",
        "zero_optimization.stage: 7: must be 0 to 3",
        "unknown key `zero_optimization.overlap_com`; did you mean `zero_optimization.overlap_comm`?",
        "zero_optimization.zero_quantized_weights is not supported",
        "optimizer.type: \"Adagrad\" is not supported: use \"AdamW\", \"Adam\" or \"Lion\"",
        "scheduler.params.total_num_steps is missing",
        "bf16.enabled: expected true",
        "offloadd.moments: \"fp8\": use \"fp32\", \"bf16\" or \"8bit\"",
        "unknown key `offloadd.comit_every`; did you mean `offloadd.commit_every`?",
        "offloadd.update_threads: 0: must be at least 1",
        "offloadd.mlp_chunks: 0: must be at least 1",
        "offloadd.loss_chunks: 0: must be at least 1",
        "unknown key `offload`; did you mean `offloadd`?",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn inputs_of_blocks_wait_where_a_key_says() {
    let of = |own: Value, theirs: Value| {
        read(json!({"offloadd": own, "activation_checkpointing": {"cpu_checkpointing": theirs}}))
            .map(|found| found.activations)
    };
    assert_eq!(of(json!({}), json!(null)).unwrap(), "gpu");
    assert_eq!(of(json!({}), json!(true)).unwrap(), "cpu");
    assert_eq!(
        of(json!({"activations": "gpu"}), json!(true)).unwrap(),
        "gpu"
    );
    assert_eq!(
        of(json!({"activations": "cpu"}), json!(false)).unwrap(),
        "cpu"
    );
    let area = json!({"activations": "nvme", "activations_bytes": "3GiB"});
    assert_eq!(of(area.clone(), json!(true)).unwrap(), "nvme");
    let found = read(json!({"offloadd": area})).unwrap();
    assert_eq!(found.activations_bytes, 3 << 30);
    let refused = of(json!({"activations": "disk"}), json!(null)).unwrap_err();
    let words = "offloadd.activations: \"disk\": use \"gpu\", \"cpu\" or \"nvme\"";
    assert!(refused.contains(words), "{refused}");
}

#[test]
fn the_whole_state_is_in_one_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    };
    let (a, b) = (path("a"), path("b"));
    let zero = |param: Value, optimizer: Value| {
        let tables = json!({"offload_param": param, "offload_optimizer": optimizer});
        read(json!({"zero_optimization": tables})).map(|found| (found.device, found.nvme))
    };
    let nvme = |path: &Path| json!({"device": "nvme", "nvme_path": path});
    let cpu = || json!({"device": "cpu"});
    assert_eq!(zero(cpu(), json!({})).unwrap().0, Tier::Cpu);
    assert_eq!(
        zero(cpu(), nvme(&a)).unwrap(),
        (Tier::Nvme, vec![a.clone()])
    );
    assert_eq!(zero(nvme(&a), nvme(&b)).unwrap().1, [a.clone(), b.clone()]);
    assert_eq!(
        zero(nvme(&a), json!({"device": "cpu", "nvme_path": b}))
            .unwrap()
            .1,
        std::slice::from_ref(&a)
    );
    assert_eq!(
        zero(json!({"device": "nvme"}), json!({"nvme_path": [b, b]}))
            .unwrap()
            .1,
        std::slice::from_ref(&b)
    );
    assert!(
        zero(json!({"device": "nvme"}), cpu())
            .unwrap_err()
            .contains("nvme_path is missing")
    );
    assert!(
        zero(nvme(Path::new("/nowhere/x")), cpu())
            .unwrap_err()
            .contains("is not a directory")
    );
    let stays = |zero: Value, ranks: u32| {
        let tree = json!({"zero_optimization": zero});
        check(tree, "ds.json", ranks).unwrap().parameters_stay
    };
    for (zero, ranks, expected) in [
        (json!({"stage": 3}), 2, true),
        (json!({"stage": 2, "offload_optimizer": cpu()}), 2, true),
        (json!({"stage": 3, "offload_optimizer": nvme(&a)}), 1, true),
        (json!({"stage": 3, "offload_optimizer": cpu()}), 2, false),
        (json!({"stage": 3, "offload_param": cpu()}), 1, false),
    ] {
        assert_eq!(stays(zero.clone(), ranks), expected, "{zero} {ranks}");
    }
    let behind_socket = json!({"zero_optimization": {"offload_param": {"device": "nvme"}}, "offloadd": {"socket": "/run/x"}});
    assert_eq!(read(behind_socket).unwrap().nvme, Vec::<PathBuf>::new());
}

#[test]
fn ranks_of_one_sequence_count_once_in_a_batch() {
    let tree = json!({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2});
    let found = check(tree.clone(), "ds.json", 4).unwrap();
    assert_eq!(
        (found.sequence_parallel_size, found.train_batch_size),
        (2, Some(8))
    );
    assert_eq!(found.micro_batches, Some(2));
    let error = check(tree, "ds.json", 3).unwrap_err().to_string();
    assert!(error.contains("divide the number of ranks (3)"), "{error}");
}

#[test]
fn a_schedule_has_the_optimizers_rate_unless_it_has_its_own() {
    let scheduler = read(
        json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "last_batch_iteration": -1}}}),
    );
    let scheduler = scheduler.unwrap().scheduler.unwrap();
    let Ok(LrSchedule::Warmup(warmup)) = schedule_of(&scheduler, 0.5) else {
        panic!("a warm-up")
    };
    assert_eq!((warmup.max_lr, warmup.steps), (0.5, 4));
    let linear = json!({"scheduler": {"type": "linear", "params": {"total_num_steps": 10, "warmup_ratio": 0.2}}});
    let linear = read(linear).unwrap().scheduler.unwrap();
    assert_eq!(
        schedule_of(&linear, 1.0).unwrap(),
        LrSchedule::Linear {
            lr: 1.0,
            warmup_steps: 2,
            total_steps: 10
        }
    );
}

#[test]
fn a_weight_decay_that_is_left_out_is_that_of_the_optimizer_deepspeed_would_take() {
    for (kind, params, decay) in [
        ("AdamW", json!({}), 0.0),
        ("AdamW", json!({"torch_adam": false}), 0.0),
        ("AdamW", json!({"torch_adam": true}), 0.01),
        ("adam", json!({"torch_adam": true}), 0.01),
        (
            "Adam",
            json!({"torch_adam": true, "adam_w_mode": false}),
            0.0,
        ),
        ("AdamW", json!({"torch_adam": true, "weight_decay": 0}), 0.0),
        (
            "AdamW",
            json!({"torch_adam": true, "weight_decay": 0.3}),
            0.3,
        ),
        ("Lion", json!({"torch_adam": true}), 0.0),
    ] {
        let found = read(json!({"optimizer": {"type": kind, "params": params}})).unwrap();
        let optimizer = found.optimizer.unwrap();
        assert_eq!(optimizer.weight_decay, decay, "{kind} {params}");
    }
}
