//! Twenty steps in fp32 are those of a plain PyTorch loop over the same text from the same weights; ten steps of each
//! architecture those of Hugging Face's library, from the directory it saved.
//!
//! What could go wrong: a wrong formula that still learns (a bias correction off by one step, decay on norms, a clip by the
//! wrong norm, windows in another order). `fixtures/llama_losses.py` shares no code with the trainer, nor does
//! `fixtures/hf/make.py`.

use serde_json::{Value, json};

use crate::lab::Lab;

#[test]
fn twenty_steps_are_those_of_plain_pytorch() {
    let lab = Lab::new();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let text =
        std::fs::read_to_string(fixtures.join("llama_losses.json")).expect("the fixture is there");
    let fixture: Value = serde_json::from_str(&text).expect("the fixture is JSON");
    let run = &fixture["run"];
    for (name, tied) in [("plain", false), ("tied", true)] {
        let expected = if tied { &fixture["tied"] } else { &fixture };
        let mut model = fixture["config"].clone();
        model["tie_word_embeddings"] = tied.into();
        let folder = lab.path(name);
        let settings = json!({
            "train_batch_size": run["batch"],
            "gradient_clipping": run["gradient_clipping"],
            "optimizer": {"type": "AdamW", "params": {
                "lr": run["max_lr"], "betas": [run["beta1"], run["beta2"]], "eps": run["eps"],
                "weight_decay": run["weight_decay"]
            }},
            "scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_num_steps": run["warmup_steps"], "warmup_type": "linear", "total_num_steps": run["total_steps"]
            }},
            "model": model,
            "data": {"files": [fixtures.join("text.txt")]},
            "train": {
                "steps": run["steps"], "seq_len": run["seq_len"], "seed": run["seed"], "run_folder": folder, "threads": 1
            }
        });
        let trained = lab.run_of_json(name, &settings);
        trained.train();
        for (key, list) in [("loss", "losses"), ("grad_norm", "grad_norms")] {
            let theirs: Vec<f64> = expected[list]
                .as_array()
                .expect("a list")
                .iter()
                .map(|number| number.as_f64().unwrap())
                .collect();
            assert_eq!(theirs.len(), 20);
            let ours: Vec<f64> = trained.bits(key).into_iter().map(f64::from_bits).collect();
            for (step, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let off = (ours - theirs).abs() / theirs;
                // Norms of gradients feel a rounding more than losses do.
                let most = if key == "loss" { 1e-3 } else { 1e-2 };
                assert!(
                    off < most,
                    "{name}, {key} of step {}: {ours}, PyTorch {theirs}",
                    step + 1
                );
            }
            assert_eq!(ours.len(), theirs.len());
        }
    }
}

#[test]
fn ten_steps_of_each_architecture_are_hugging_faces() {
    let lab = Lab::new();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let text = std::fs::read_to_string(fixtures.join("hf/losses.json")).expect("it is there");
    let fixture: Value = serde_json::from_str(&text).expect("the fixture is JSON");
    let run = &fixture["run"];
    let one = |name: &str, how: &str, micro_batch: u64, sets: &[String]| {
        let full_name = format!("{name}-{how}");
        let settings = json!({
            "train_batch_size": run["batch"],
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": run["gradient_clipping"],
            "optimizer": {"type": "AdamW", "params": {
                "lr": run["lr"], "betas": [run["beta1"], run["beta2"]], "eps": run["eps"],
                "weight_decay": run["weight_decay"]
            }},
            "model": {"path": fixtures.join("hf").join(name)},
            "data": {"files": [fixtures.join("text.txt")]},
            "train": {
                "steps": run["steps"], "seq_len": run["seq_len"], "seed": run["seed"], "threads": 1,
                "run_folder": lab.path(&full_name)
            }
        });
        let trained = lab.run_of_json(&full_name, &settings).with(sets);
        trained.train();
        for (key, list) in [("loss", "losses"), ("grad_norm", "grad_norms")] {
            let theirs = fixture[name][how][list].as_array().expect("a list");
            let ours = trained.bits(key).into_iter().map(f64::from_bits);
            assert_eq!((ours.len(), theirs.len()), (10, 10));
            for (step, (ours, theirs)) in ours.zip(theirs).enumerate() {
                let off = (ours / theirs.as_f64().expect("a number") - 1.0).abs();
                assert!(
                    off < 2e-5,
                    "{full_name}, {key} of step {}: {ours}, the library {theirs}: {off:.1e} apart",
                    step + 1
                );
            }
        }
    };
    std::thread::scope(|scope| {
        for name in crate::model_folder::ALL {
            let (one, nvme) = (&one, lab.nvme());
            scope.spawn(move || {
                one(name, "at_once", 4, &[]);
                one(name, "accumulated", 2, &nvme);
            });
        }
    });
}
