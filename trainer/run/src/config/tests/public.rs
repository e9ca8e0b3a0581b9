//! Reads configurations with the structure of public files, and checks the settings that result or the reason
//! for a refusal. Errors that this finds: a file that trains elsewhere is refused, or trains differently
//! here.
//!
//! Sources are named by repository and path, as of August 2026.

use super::public_files::{all, auto_adamw, both_precisions, files, sizes, stage_3, with};
use super::*;

/// Directory with a run and a model whose config.json says that the checkpoint is in bf16.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "bfloat16"
        });
        std::fs::create_dir(dir.path().join("model")).unwrap();
        std::fs::write(dir.path().join("model/config.json"), config.to_string()).unwrap();
        Self(dir)
    }

    fn read(&self, name: &str, text: &str) -> Result<RunSettings, String> {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        self.source(&path)
    }

    fn source(&self, path: &std::path::Path) -> Result<RunSettings, String> {
        let model = self.0.path().join("model");
        let sets = [
            &format!("model.path={}", model.display()),
            "model.init=random",
            "data.files=[\"text\"]",
            "train.steps=1000",
            "train.seq_len=32",
        ];
        let source = Source {
            run: None,
            deepspeed: Some(path.into()),
            sets: sets.map(str::to_owned).to_vec(),
        };
        read(&source, None).map_err(|error| error.to_string())
    }

    fn told(&self, name: &str, text: &str) -> Result<String, String> {
        self.read(name, text).map(|run| told(&run))
    }
}

/// Summarizes the settings under test in one line.
fn told(run: &RunSettings) -> String {
    let tiers = [run.placement.param, run.placement.optimizer].map(Tier::word);
    let schedule = match &run.lr {
        LrSchedule::Constant { .. } => "constant",
        LrSchedule::Linear { .. } => "linear",
        LrSchedule::Cosine { .. } => "cosine",
        LrSchedule::Warmup(_) => "WarmupLR",
        LrSchedule::WarmupDecay { .. } => "WarmupDecayLR",
        other => panic!("{other:?}"),
    };
    format!(
        "{} stage {} {}/{} lr {:e} {schedule} decay {} clip {}",
        run.dtype.name(),
        run.placement.stage.number(),
        tiers[0],
        tiers[1],
        run.optimizer.lr,
        run.optimizer.weight_decay,
        run.gradient_clipping,
    )
}

#[test]
fn public_deepspeed_files_train_as_elsewhere_or_are_refused_with_the_reason() {
    let bench = Bench::new();
    let files = files();
    assert!(files.len() > 30);
    for (source, shape, expected) in &files {
        let found = bench.told("ds.json", &shape.to_string());
        match expected {
            Ok(line) => assert_eq!(found.as_deref(), Ok(*line), "{source}"),
            Err(part) => {
                let text = found.expect_err(source);
                assert!(text.contains(part), "{source}: {text}");
            }
        }
    }
}

#[test]
fn an_accelerate_configuration_is_refused_with_what_to_name_instead() {
    let bench = Bench::new();
    let yaml = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n";
    for name in ["accelerate.yaml", "other.yml"] {
        let text = bench.told(name, yaml).unwrap_err();
        assert!(
            text.contains(name) && text.contains("the file that deepspeed_config_file names"),
            "{text}"
        );
    }
}

#[test]
fn a_missing_optimizer_scheduler_or_rate_is_a_warning_and_the_plan_shows_the_default() {
    let bench = Bench::new();
    let warned = |shape: Value| {
        let run = bench.read("ds.json", &shape.to_string()).unwrap();
        (run.warnings.join("\n"), run.summary().join("\n"))
    };
    let base = json!({"train_batch_size": 1, "bf16": {"enabled": true}});
    for (norm, clipping) in [
        (
            None,
            "clipping  gradients to a norm of 1 (the default; gradient_clipping changes it)",
        ),
        (
            Some(1.0),
            "clipping  gradients to a norm of 1 (gradient_clipping)",
        ),
        (
            Some(0.5),
            "clipping  gradients to a norm of 0.5 (gradient_clipping)",
        ),
        (Some(0.0), "clipping  none (gradient_clipping = 0)"),
    ] {
        let mut shape = base.clone();
        if let Some(norm) = norm {
            shape["gradient_clipping"] = norm.into();
        }
        let (_, summary) = warned(shape);
        assert!(summary.lines().any(|line| line == clipping), "{summary}");
    }
    let (warnings, summary) = warned(base.clone());
    assert!(
        warnings.contains(
            "no optimizer is set: using AdamW with a learning rate of 5e-5, as Hugging Face's Trainer does"
        ),
        "{warnings}"
    );
    assert!(
        warnings.contains("no scheduler is set: the learning rate decays linearly"),
        "{warnings}"
    );
    assert_eq!(
        summary,
        "optimizer AdamW, lr 5e-5, betas 0.9 and 0.999, eps 1e-8, weight decay 0\n\
         schedule  linear, from 5e-5 down to 0 over 1000 steps, no warm-up\n\
         clipping  gradients to a norm of 1 (the default; gradient_clipping changes it)\nprecision bf16"
    );
    // DeepSpeed alone keeps the rate constant; so does this program, with a warning.
    let named = json!({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}});
    let (warnings, summary) = warned(with(&base, named.clone()));
    assert!(
        warnings.contains("the learning rate stays 1e-4, as in DeepSpeed"),
        "{warnings}"
    );
    assert!(
        summary.contains("schedule  constant, 1e-4 at every step"),
        "{summary}"
    );
    let (warnings, _) = warned(with(&base, json!({"optimizer": {"type": "Adam"}})));
    assert!(
        warnings.contains("optimizer.params.lr is not set: using 1e-3, as PyTorch's Adam"),
        "{warnings}"
    );
    for kind in ["linear", "cosine", "constant"] {
        let all = with(
            &with(&base, named.clone()),
            json!({"scheduler": {"type": kind}}),
        );
        let (warnings, summary) = warned(all);
        assert_eq!(warnings, "");
        assert!(
            summary.contains(&format!("schedule  {kind}, ")),
            "{summary}"
        );
    }
}

/// Contents of a safetensors file with one element of type `dtype`.
fn weights(dtype: &str, bytes: usize) -> Vec<u8> {
    let header =
        format!("{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":[1],\"data_offsets\":[0,{bytes}]}}}}");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(vec![0; bytes]);
    file
}

#[test]
fn auto_precision_is_the_checkpoints_and_a_different_one_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let config = |dtype: &str| {
        let text = format!(
            "{{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 64, \"intermediate_size\": 128, \"num_hidden_layers\": 2, \"num_attention_heads\": 4{dtype}}}"
        );
        std::fs::write(dir.path().join("config.json"), text).unwrap();
    };
    let read = |precision: Value| {
        let tree = json!({
            "train_batch_size": 1, "optimizer": {"params": {"lr": 1e-4}}, "model": {"path": dir.path()},
            "data": {"files": ["text"]}, "train": {"steps": 10, "seq_len": 32}
        });
        let run = check(with(&tree, precision), "test", Some(1)).unwrap();
        (run.dtype.name(), run.warnings.join("\n"))
    };
    let auto = json!({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}});
    // The type in config.json takes precedence; without it, the weights' own type is used.
    for (dtype, bytes, expected) in [("BF16", 2, "bf16"), ("F16", 2, "fp16"), ("F32", 4, "fp32")] {
        config("");
        std::fs::write(dir.path().join("model.safetensors"), weights(dtype, bytes)).unwrap();
        assert_eq!(read(auto.clone()), (expected, String::new()));
    }
    for key in ["torch_dtype", "dtype"] {
        config(&format!(", \"{key}\": \"bfloat16\""));
        assert_eq!(read(auto.clone()).0, "bf16", "{key}");
    }
    let (dtype, warnings) = read(json!({}));
    assert_eq!(dtype, "fp32");
    assert!(
        warnings.contains("the run computes in fp32, but the checkpoint is in bf16"),
        "{warnings}"
    );
    let (_, warnings) = read(json!({"fp16": {"enabled": true}}));
    assert!(
        warnings.contains("the run computes in fp16, but the checkpoint is in bf16"),
        "{warnings}"
    );
    // Who disables it in so many words knows it.
    let (_, warnings) = read(json!({"bf16": {"enabled": false}}));
    assert!(!warnings.contains("the checkpoint is in"), "{warnings}");
    // A type that is disabled is not chosen.
    let (dtype, warnings) = read(json!({"bf16": {"enabled": false}, "fp16": {"enabled": "auto"}}));
    assert_eq!(dtype, "fp32");
    assert!(warnings.contains("the checkpoint is in bf16"), "{warnings}");
    let inline = json!({"model": {"path": null, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}});
    let (dtype, warnings) = read(with(&auto, inline));
    assert_eq!(dtype, "fp32");
    assert!(
        warnings.contains("no checkpoint determines it: using fp32"),
        "{warnings}"
    );
}

#[test]
fn what_deepspeed_ignores_is_named_and_what_it_refuses_is_refused() {
    let bench = Bench::new();
    let shape = json!({
        "train_batch_size": 1, "_comment": "mine", "comms_config": {"verbose": false}, "gradient_cliping": 0.5, "learning_rate": 1e-4,
        "aio": {"speed": 1}, "bfloat16": {"enabled": true}, "zero_optimization": true
    });
    let run = bench.read("ds.json", &shape.to_string()).unwrap();
    assert_eq!(
        told(&run),
        "bf16 stage 1 none/none lr 5e-5 linear decay 0 clip 1"
    );
    let noted = |part: &str| run.notes.iter().any(|note| note.contains(part));
    assert!(
        noted("_comment") && noted("comms_config"),
        "{:?}",
        run.notes
    );
    let warned = |part: &str| run.warnings.iter().any(|warning| warning.contains(part));
    assert!(
        warned("did you mean `gradient_clipping`?"),
        "{:?}",
        run.warnings
    );
    assert!(
        warned("did you mean `optimizer.params.lr`?"),
        "{:?}",
        run.warnings
    );
    for strict in ["zero_optimization", "bf16", "fp16", "comms_logger"] {
        let shape = json!({"train_batch_size": 1, strict: {"speed": 1}});
        let text = bench.read("ds.json", &shape.to_string()).unwrap_err();
        assert!(
            text.contains(&format!("unknown key `{strict}.speed`")),
            "{text}"
        );
    }
}

#[test]
fn all_faults_are_reported_at_once_and_keys_without_effect_in_one_line() {
    let bench = Bench::new();
    let shape = json!({
        "train_batch_size": "many", "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Lamb", "params": {"betas": [0.9, 2.0]}}, "wandb": {"enabled": true},
        "zero_optimization": {"stage": 9, "speed": 1}, "fp16": {"enabled": true, "hysteresis": 0}
    });
    let text = bench.read("ds.json", &shape.to_string()).unwrap_err();
    for part in [
        "7 settings are wrong",
        "ds.json: train_batch_size: expected a whole number, got \"many\"",
        "ds.json: optimizer.type: \"Lamb\" is not supported",
        "ds.json: optimizer.params.betas: each must be",
        "ds.json: wandb is DeepSpeed's but not supported here",
        "ds.json: zero_optimization.stage: 9",
        "ds.json: unknown key `zero_optimization.speed`",
        "ds.json: fp16.hysteresis: 0: must be at least 1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let shape = all(&[sizes(), stage_3(), both_precisions(), auto_adamw()]);
    let run = bench.read("ds.json", &shape.to_string()).unwrap();
    let about = run.notes.iter().filter(|note| note.contains("no effect"));
    let about: Vec<&String> = about.collect();
    assert_eq!(about.len(), 1, "{about:?}");
    assert!(
        about[0].starts_with("9 keys have no effect here"),
        "{about:?}"
    );
}
