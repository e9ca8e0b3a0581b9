//! Tests of a DeepSpeed file combined with the run's own configuration. Errors that this finds: one of two
//! conflicting values wins silently; "auto" hides a value or remains; a whole number written as a float is
//! refused; an error does not name its file.

use std::path::PathBuf;

use super::*;

const RUN: &str = r#"
[model]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
[data]
files = ["text"]
[train]
steps = 100
seq_len = 32
"#;

struct Files(tempfile::TempDir);

impl Files {
    /// Writes a run file (`more` precedes its tables) and a DeepSpeed file.
    fn new(more: &str, deepspeed: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("run.toml"), format!("{more}\n{RUN}")).unwrap();
        std::fs::write(dir.path().join("ds.json"), deepspeed).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, sets: &[&str]) -> Result<RunSettings, String> {
        self.read_as(Some("run.toml"), Some("ds.json"), sets)
    }

    fn read_as(
        &self,
        run: Option<&str>,
        deepspeed: Option<&str>,
        sets: &[&str],
    ) -> Result<RunSettings, String> {
        let source = Source {
            run: run.map(|name| self.path(name)),
            deepspeed: deepspeed.map(|name| self.path(name)),
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
        };
        read(&source, Some(1)).map_err(|error| error.to_string())
    }
}

fn refused(more: &str, deepspeed: &str) -> String {
    Files::new(more, deepspeed).read(&[]).unwrap_err()
}

#[test]
fn a_deepspeed_file_supplies_what_the_run_file_leaves_open() {
    let files = Files::new(
        "gradient_clipping = 0.5",
        r#"{
            // as DeepSpeed reads it
            "train_micro_batch_size_per_gpu": 2e0, "gradient_accumulation_steps": 3.0, "gradient_clipping": 0.5,
            "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "weight_decay": 0}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1e1}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_param": null},
            "steps_per_print": 7, "wandb": null,
        }"#,
    );
    let run = files.read(&[]).unwrap();
    assert_eq!((run.batch.micro_batch, run.batch.micro_batches), (2, 3));
    assert_eq!((run.optimizer.lr, run.gradient_clipping), (2e-4, 0.5));
    assert_eq!((run.placement.stage.number(), run.train.log_every), (2, 7));
    assert!(matches!(run.lr, LrSchedule::Warmup(warmup) if warmup.steps == 10));
    let unused = run
        .notes
        .iter()
        .find(|note| note.contains("reduce_bucket_size"));
    assert!(unused.unwrap().contains("has no effect here"));
    // The command line takes precedence, and the run file may name the DeepSpeed file. --set would come too late.
    let run = files
        .read(&["gradient_clipping=2", "train.log_every=5"])
        .unwrap();
    assert_eq!((run.gradient_clipping, run.train.log_every), (2.0, 5));
    let named = format!("deepspeed={}", files.path("ds.json").display());
    assert!(
        files
            .read_as(Some("run.toml"), None, &[&named])
            .unwrap_err()
            .contains("use --deepspeed FILE")
    );
    let text = std::fs::read_to_string(files.path("run.toml")).unwrap();
    let text = format!("deepspeed = {:?}\n{text}", files.path("ds.json"));
    std::fs::write(files.path("run.toml"), text).unwrap();
    assert_eq!(
        files
            .read_as(Some("run.toml"), None, &[])
            .unwrap()
            .optimizer
            .lr,
        2e-4
    );
    assert_eq!(files.read(&[]).unwrap().optimizer.lr, 2e-4);
    std::fs::write(files.path("other.json"), "{}").unwrap();
    let text = files
        .read_as(Some("run.toml"), Some("other.json"), &[])
        .unwrap_err();
    assert!(text.contains("leave one of them out"), "{text}");
}

#[test]
fn a_deepspeed_file_and_settings_of_the_command_line_are_enough() {
    let files = Files::new("", r#"{"train_batch_size": 4}"#);
    let sets = [
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "data.files=[\"text\"]",
        "train.steps=10",
        "train.seq_len=32",
    ];
    let run = files.read_as(None, Some("ds.json"), &sets).unwrap();
    assert_eq!(run.train.run_dir, PathBuf::from("runs/ds"));
    // All missing settings are reported at once.
    let text = files.read_as(None, Some("ds.json"), &[]).unwrap_err();
    assert!(text.starts_with("4 settings are wrong\n"), "{text}");
    for missing in ["train.steps", "train.seq_len", "model", "data.files"] {
        assert!(
            text.contains(&format!("\n  {missing} is missing: ")),
            "{text}"
        );
    }
}

#[test]
fn conflicting_values_in_two_files_are_refused_and_both_are_named() {
    let text = refused(
        "train_batch_size = 8",
        r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}"#,
    );
    for part in [
        "train_batch_size is 8 in ",
        "run.toml",
        "and 16 in ",
        "ds.json: leave it out",
        "\"auto\"",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let text = refused(
        "[optimizer.params]\nbetas = [0.9, 0.95]",
        r#"{"optimizer": {"params": {"betas": [0.9, 0.999]}}}"#,
    );
    assert!(
        text.contains("optimizer.params.betas is [0.9,0.95] in "),
        "{text}"
    );
    let text = refused(
        "[zero_optimization]\nstage = 3",
        r#"{"zero_optimization": true}"#,
    );
    assert!(
        text.contains("zero_optimization.stage is 3 in ") && text.contains(" and 1 in "),
        "{text}"
    );
}

#[test]
fn auto_is_replaced_by_the_run_file_or_by_hugging_faces_choice() {
    let deepspeed = r#"{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    }"#;
    let files = Files::new(
        "train_micro_batch_size_per_gpu = 2\n[optimizer.params]\nlr = 0.01",
        deepspeed,
    );
    let run = files.read(&["bf16.enabled=true"]).unwrap();
    assert_eq!((run.batch.micro_batch, run.batch.micro_batches), (2, 1));
    assert_eq!(
        (run.optimizer.lr, run.dtype),
        (0.01, crate::model::Dtype::Bf16)
    );
    let shown = |key: &str, run: &RunSettings| {
        let note = format!("{key} is \"auto\"");
        run.notes.iter().any(|found| found.starts_with(&note))
    };
    assert!(!shown("optimizer.params.lr", &run) && shown("optimizer.params.weight_decay", &run));
    let run = Files::new("", deepspeed).read(&[]).unwrap();
    assert_eq!((run.batch.micro_batch, run.optimizer.lr), (8, 5e-5));
    assert_eq!(run.dtype, crate::model::Dtype::Fp32);
    for key in [
        "train_batch_size",
        "gradient_clipping",
        "optimizer.params.lr",
    ] {
        assert!(shown(key, &run), "{key}: {:?}", run.notes);
    }
}

#[test]
fn an_error_in_the_deepspeed_file_names_it() {
    for (deepspeed, part) in [
        (
            r#"{"zero_optimization": {"stag": 1}}"#,
            "ds.json: unknown key `zero_optimization.stag`; did you mean `zero_optimization.stage`?",
        ),
        (
            r#"{"optimizer": {"type": "Lamb"}}"#,
            "ds.json: optimizer.type: \"Lamb\" is not supported",
        ),
        (
            r#"{"optimizer": {"params": {"lr": "fast"}}}"#,
            "ds.json: optimizer.params.lr: expected a number, got \"fast\"",
        ),
        (
            r#"{"wandb": {"enabled": true}}"#,
            "ds.json: wandb is DeepSpeed's but not supported here",
        ),
        (
            r#"{"train_batch_size": 2.5}"#,
            "ds.json: train_batch_size: expected a whole number, got 2.5",
        ),
        (
            r#"{"train_batch_size": -1}"#,
            "ds.json: train_batch_size: expected a whole number, got -1",
        ),
        (
            r#"{"aio": {"queue_depth": 0}}"#,
            "ds.json: aio.queue_depth: 0: must be 2 to",
        ),
        (
            r#"{"steps_per_print": 0}"#,
            "ds.json: steps_per_print: 0: must be at least 1",
        ),
        ("{\n\"a\": 1\n\"b\": 2}", "ds.json is not valid JSON: "),
        (r#"{"fp16": {}, "fp16": {}}"#, "duplicate key \"fp16\""),
        (
            "[]",
            "ds.json is not valid JSON: the outermost value must be an object",
        ),
    ] {
        let text = refused("train_micro_batch_size_per_gpu = 1", deepspeed);
        assert!(text.contains(part), "{text}");
    }
    let text = Files::new("", "{}")
        .read_as(Some("run.toml"), Some("no.json"), &[])
        .unwrap_err();
    assert!(
        text.contains("cannot read the DeepSpeed configuration") && text.contains("no.json"),
        "{text}"
    );
    let text = refused("deepspeed = 5", "{}");
    assert!(text.contains("deepspeed: 5: expected the path"), "{text}");
    // An error in the run file does not name the DeepSpeed file.
    let text = refused("gradient_clipping = -1", r#"{"train_batch_size": 1}"#);
    assert!(text.starts_with("gradient_clipping: -1"), "{text}");
}

#[test]
fn operations_in_flight_are_aios_queue_depth() {
    let depth = |more: &str, deepspeed: &str| {
        let more = format!("train_batch_size = 1\n{more}");
        Files::new(&more, deepspeed)
            .read(&[])
            .map(|run| run.offload.iodepth)
    };
    const AT_TOP: &str = r#"{"aio": {"queue_depth": 8, "block_size": 1048576}}"#;
    const IN_ZERO: &str =
        r#"{"zero_optimization": {"aio": {"queue_depth": 16, "thread_count": 1}}}"#;
    assert_eq!(depth("", "{}").unwrap(), 64);
    assert_eq!(depth("", AT_TOP).unwrap(), 8);
    assert_eq!(depth("", IN_ZERO).unwrap(), 16);
    assert_eq!(depth("offload.iodepth = 8", AT_TOP).unwrap(), 8);
    let text = depth("offload.iodepth = 9", AT_TOP).unwrap_err();
    assert!(
        text.contains("aio.queue_depth: 8 contradicts offload.iodepth = 9"),
        "{text}"
    );
}

#[test]
fn precision_is_bf16_or_fp16_with_a_valid_loss_scale() {
    let overflow = |deepspeed: &str| {
        let read = Files::new("train_batch_size = 1", deepspeed).read(&[]);
        read.map(|run| run.overflow)
    };
    assert_eq!(overflow("{}").unwrap(), OverflowPolicy::Stops);
    let dynamic = DynamicScale {
        initial: 65536.0,
        window: 1000,
        hysteresis: 2,
        consecutive_hysteresis: false,
        min: 1.0,
    };
    let fp16 = |rest: &str| overflow(&format!(r#"{{"fp16": {{"enabled": true{rest}}}}}"#));
    assert_eq!(fp16("").unwrap(), OverflowPolicy::Scales(dynamic));
    assert_eq!(
        fp16(r#", "loss_scale": 0, "auto_cast": false"#).unwrap(),
        OverflowPolicy::Scales(dynamic)
    );
    let fixed = OverflowPolicy::Scaled { scale: 128.0 };
    assert_eq!(
        fp16(r#", "loss_scale": 128, "loss_scale_window": 0"#).unwrap(),
        fixed
    );
    for (rest, part) in [
        (
            r#", "loss_scale": -1"#,
            "ds.json: fp16.loss_scale: -1: must be 0",
        ),
        (
            r#", "initial_scale_power": 33"#,
            "fp16.initial_scale_power: 33: must be 0 to 32",
        ),
        (
            r#", "loss_scale_window": 0"#,
            "fp16.loss_scale_window: 0: must be at least 1",
        ),
        (
            r#", "hysteresis": 0"#,
            "fp16.hysteresis: 0: must be at least 1",
        ),
        (
            r#", "min_loss_scale": 0"#,
            "fp16.min_loss_scale: 0: must be above 0",
        ),
        (
            r#", "initial_scale_power": 1, "min_loss_scale": 4"#,
            "4 is more than the first scale, 2^1 = 2",
        ),
        (
            r#", "fp16_master_weights_and_grads": true"#,
            "the master is kept in fp32",
        ),
        (
            r#"}, "bf16": {"enabled": true"#,
            "fp16.enabled: bf16.enabled is true too",
        ),
    ] {
        let text = fp16(rest).unwrap_err();
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn monitors_write_to_output_path_or_into_the_run_directory() {
    let reports = |deepspeed: &str| {
        let read = Files::new("train_batch_size = 1", deepspeed).read(&[]);
        read.map(|run| run.reports)
    };
    assert_eq!(reports("{}").unwrap(), Reports::default());
    let both = reports(
        r#"{"tensorboard": {"enabled": true, "output_path": "out", "job_name": "job"},
            "csv_monitor": {"enabled": true, "output_path": ""}, "wall_clock_breakdown": true}"#,
    );
    let expected = Reports {
        wall_clock_breakdown: true,
        tensorboard: Some("out/job".into()),
        csv: Some("runs/run/csv_monitor/DeepSpeedJobName".into()),
    };
    assert_eq!(both.unwrap(), expected);
    for job in ["", "..", "a/b", "/etc"] {
        let text = format!(r#"{{"csv_monitor": {{"enabled": true, "job_name": "{job}"}}}}"#);
        let text = reports(&text).unwrap_err();
        assert!(text.contains("ds.json: csv_monitor.job_name: "), "{text}");
    }
}
