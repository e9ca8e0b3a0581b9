//! Compares twenty steps in fp32 with a plain PyTorch loop over the same text from the same weights, and ten
//! steps of each architecture with Hugging Face's library from the directory that it saved.
//!
//! Errors that these tests find: a wrong formula that still learns (a bias correction off by one step, decay
//! on norms, clipping by the wrong norm, windows in another order); on a GPU, values kept from forward to
//! backward that change in between. The scripts `fixtures/llama_losses.py` and `fixtures/hf/make.py` share no
//! code with the trainer.

use std::path::{Path, PathBuf};

use kernels::gpu::Gpu;
use serde_json::{Value, json};

use crate::harness::{Harness, Run, all_cases, succeed};

#[test]
fn twenty_steps_match_plain_pytorch() {
    let harness = Harness::new();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let text =
        std::fs::read_to_string(fixtures.join("llama_losses.json")).expect("the fixture is there");
    let fixture: Value = serde_json::from_str(&text).expect("the fixture is JSON");
    let run = &fixture["run"];
    for (name, tied) in [("plain", false), ("tied", true)] {
        let expected = if tied { &fixture["tied"] } else { &fixture };
        let mut model = fixture["config"].clone();
        model["tie_word_embeddings"] = tied.into();
        let dir = harness.path(name);
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
                "steps": run["steps"], "seq_len": run["seq_len"], "seed": run["seed"], "run_dir": dir, "threads": 1
            }
        });
        let trained = harness.run_of_json(name, &settings);
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
                // Gradient norms are more sensitive to rounding than losses.
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

/// Results of Hugging Face's library, and the text that it used.
struct Library {
    fixtures: PathBuf,
    expected: Value,
}

impl Library {
    fn new() -> Self {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let text = std::fs::read_to_string(fixtures.join("hf/losses.json")).expect("it is there");
        Self {
            expected: serde_json::from_str(&text).expect("the fixture is JSON"),
            fixtures,
        }
    }

    /// Makes a run of the model of `name` with the library's settings.
    fn run(&self, harness: &Harness, name: &str, run_name: &str, micro_batch: u64) -> Run {
        let run = &self.expected["run"];
        let settings = json!({
            "train_batch_size": run["batch"],
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": run["gradient_clipping"],
            "optimizer": {"type": "AdamW", "params": {
                "lr": run["lr"], "betas": [run["beta1"], run["beta2"]], "eps": run["eps"],
                "weight_decay": run["weight_decay"]
            }},
            "model": {"path": self.fixtures.join("hf").join(name)},
            "data": {"files": [self.fixtures.join("text.txt")]},
            "train": {
                "steps": run["steps"], "seq_len": run["seq_len"], "seed": run["seed"], "threads": 1,
                "run_dir": harness.path(run_name)
            }
        });
        harness.run_of_json(run_name, &settings)
    }

    /// Compares the losses and gradient norms of a finished run. Returns those of the first step.
    fn compare(&self, run: &Run, name: &str, how: &str) -> [f64; 2] {
        let dir = run.dir.display();
        [("loss", "losses"), ("grad_norm", "grad_norms")].map(|(key, list)| {
            let theirs = self.expected[name][how][list].as_array().expect("a list");
            let ours: Vec<f64> = run.bits(key).into_iter().map(f64::from_bits).collect();
            assert_eq!((ours.len(), theirs.len()), (10, 10));
            for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let off = (ours / theirs.as_f64().expect("a number") - 1.0).abs();
                assert!(
                    off < 2e-5,
                    "{dir}, {key} of step {}: {ours}, the library {theirs}: {off:.1e} apart",
                    step + 1
                );
            }
            ours[0]
        })
    }
}

/// Architectures that a push also trains from a drive, with two micro-batches: LayerNorm and biases; RMSNorm with norms of queries and keys;
/// a tied head.
const ACCUMULATED: [&str; 3] = ["gpt2", "qwen3", "tied_pad"];

#[test]
fn ten_steps_of_each_architecture_match_hugging_face() {
    let (harness, library) = (Harness::new(), Library::new());
    std::thread::scope(|scope| {
        for name in crate::model_dir::ALL {
            let (harness, library) = (&harness, &library);
            let one = move |how: &str, micro_batch: u64, sets: &[String]| {
                let run_name = format!("{name}-{how}");
                let run = library
                    .run(harness, name, &run_name, micro_batch)
                    .with(sets);
                run.train();
                library.compare(&run, name, how);
            };
            scope.spawn(move || {
                one("immediate", 4, &[]);
                if all_cases() || ACCUMULATED.contains(&name) {
                    one("accumulated", 2, &harness.nvme());
                }
            });
        }
    });
}

/// On a GPU, a block may keep values from forward to backward while its weights leave the GPU. `--nocapture`
/// shows the gradient norms.
#[test]
fn ten_steps_on_gpus_match_hugging_face_with_any_offloading_and_checkpointing() {
    let name = "ten_steps_on_gpus_match_hugging_face_with_any_offloading_and_checkpointing";
    let gpus = match Gpu::count() {
        Ok(0) => return println!("skipped: {name}: there is no GPU"),
        Err(error) => return println!("skipped: {name}: {error}"),
        Ok(gpus) => gpus,
    };
    let (harness, library) = (Harness::new(), Library::new());
    let tier = |name: &str| -> Vec<String> {
        let devices = ["param", "optimizer"];
        let set = |what| format!("zero_optimization.offload_{what}.device={name}");
        devices.map(set).to_vec()
    };
    let in_gpu = |fraction| vec![format!("offload.gpu_resident_fraction={fraction}")];
    let of_each = |name: &str| {
        for ranks in [1, 2].into_iter().filter(|&ranks| ranks <= gpus) {
            let mut bits = Vec::new();
            for (place, sets) in [
                ("none", tier("none")),
                ("cpu", [tier("cpu"), in_gpu("0")].concat()),
                ("part", [tier("cpu"), in_gpu("0.5")].concat()),
                ("nvme", [harness.nvme(), in_gpu("0")].concat()),
                ("nvme-part", [harness.nvme(), in_gpu("0.5")].concat()),
            ] {
                for keep in ["full", "attention", "matmuls"] {
                    for away in [false, true] {
                        let inputs = if away { "cpu" } else { "gpu" };
                        let run_name = format!("{name}-{ranks}-{place}-{keep}-{inputs}");
                        let run = library.run(&harness, name, &run_name, 2 / ranks as u64);
                        let run = run.with(&sets).with(&[
                            "train.device=gpu".to_owned(),
                            format!("train.activation_checkpointing={keep}"),
                            format!("offload.activations={inputs}"),
                            // Fingerprints of state are comparable only with equal tile sizes.
                            "offload.tile_elems=4096".to_owned(),
                        ]);
                        match ranks {
                            1 => run.train(),
                            ranks => succeed(run.launch(ranks)),
                        };
                        let [loss, norm] = library.compare(&run, name, "accumulated");
                        println!("{run_name}: step 1: loss {loss:.6}, gradient norm {norm:.6}");
                        bits.push((run.bits("loss"), run.bits("grad_norm"), run.fingerprint()));
                    }
                }
            }
            let same = bits.iter().all(|found| *found == bits[0]);
            assert!(same, "{name}, {ranks} ranks: {bits:?}");
        }
    };
    std::thread::scope(|scope| {
        for name in crate::model_dir::ALL {
            let of_each = &of_each;
            scope.spawn(move || of_each(name));
        }
    });
}
