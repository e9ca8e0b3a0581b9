//! Tests of the meaning of configuration files. Errors that this finds: a misspelled key is taken for a
//! default; one of two contradicting keys wins silently; a DeepSpeed file means something else here.

mod deepspeed_files;
mod deepspeed_formulas;
mod files;
mod optimizers;
mod public;
mod public_files;
mod schedules;

use std::path::Path;

use serde_json::{Value, json};
use training_settings::source::apply;

use super::*;

/// Checks a small valid run with `changes` (dotted path, value) applied to it.
fn run_with(changes: &[(&str, Value)]) -> Result<RunSettings, SettingsError> {
    run_of(Some(1), changes)
}

/// Like [`run_with`], for `ranks` processes.
fn run_of(ranks: Option<u32>, changes: &[(&str, Value)]) -> Result<RunSettings, SettingsError> {
    let mut tree = json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "model": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4
        },
        "data": {"files": ["text"]},
        "train": {"steps": 100, "seq_len": 32}
    });
    for (path, value) in changes {
        apply(&mut tree, &format!("{path}=0")).unwrap();
        *tree
            .pointer_mut(&format!("/{}", path.replace('.', "/")))
            .unwrap() = value.clone();
    }
    check(tree, "test", ranks)
}

fn read_file(path: &Path) -> Result<RunSettings, SettingsError> {
    let source = Source {
        run: Some(path.into()),
        ..Source::default()
    };
    read(&source, None)
}

/// Returns the error message for `changes`.
fn refused(changes: &[(&str, Value)]) -> String {
    run_with(changes).expect_err("must be refused").to_string()
}

#[test]
fn a_short_run_file_gets_defaults() {
    let run = run_with(&[]).unwrap();
    assert_eq!(
        run.batch,
        Batch {
            micro_batch: 2,
            micro_batches: 1,
            seq_len: 32,
            sequence_ranks: 1,
        }
    );
    assert_eq!(run.gradient_clipping, 1.0);
    assert_eq!(run.model.kv_heads, 4);
    assert_eq!(
        (run.train.stop_after, run.offload.commit_every),
        (100, None)
    );
    assert_eq!(run.train.run_dir, Path::new("runs/test"));
    assert!(!run.placement.has_store());
}

#[test]
fn cpu_checkpointing_of_deepspeed_sets_offload_activations_unless_that_is_given() {
    let of = |changes: &[(&str, Value)]| run_with(changes).unwrap().offload.activations;
    let theirs = |asked: bool| ("activation_checkpointing.cpu_checkpointing", json!(asked));
    assert_eq!(of(&[theirs(true)]), ActivationsChoice::Cpu);
    assert_eq!(of(&[theirs(false)]), ActivationsChoice::Auto);
    let ours = ("offload.activations", json!("gpu"));
    assert_eq!(of(&[theirs(true), ours]), ActivationsChoice::Gpu);
}

#[test]
fn any_two_batch_sizes_give_the_third() {
    let batch = |changes: &[(&str, Value)]| {
        run_with(changes).map(|run| (run.batch.micro_batch, run.batch.micro_batches))
    };
    assert_eq!(batch(&[("train_batch_size", json!(8))]).unwrap(), (2, 4));
    assert_eq!(
        batch(&[("gradient_accumulation_steps", json!(3))]).unwrap(),
        (2, 3)
    );
    let without_micro = [
        ("train_micro_batch_size_per_gpu", json!(null)),
        ("train_batch_size", json!(8)),
    ];
    assert_eq!(batch(&without_micro).unwrap(), (8, 1));
    let text = refused(&[
        ("train_batch_size", json!(9)),
        ("gradient_accumulation_steps", json!(4)),
    ]);
    assert!(
        text.contains("train_batch_size: 9 contradicts") && text.contains("2 * 4 = 8"),
        "{text}"
    );
    assert!(
        refused(&[("train_batch_size", json!(9))])
            .contains("not a multiple of train_micro_batch_size_per_gpu = 2")
    );
    assert!(
        refused(&[("train_micro_batch_size_per_gpu", json!(null))])
            .contains("train_micro_batch_size_per_gpu is missing")
    );
    assert!(refused(&[("train_micro_batch_size_per_gpu", json!(0))]).contains("must be 1 to"));
}

#[test]
fn ranks_share_the_batch() {
    let batch = |ranks, changes: &[(&str, Value)]| {
        run_of(ranks, changes).map(|run| (run.batch.micro_batches, run.ranks, run.step_samples()))
    };
    let train = |number: u64| [("train_batch_size", json!(number))];
    assert_eq!(batch(Some(4), &train(16)).unwrap(), (2, 4, 16));
    assert_eq!(batch(Some(3), &[]).unwrap(), (1, 3, 6));
    let text = batch(Some(3), &train(16)).unwrap_err().to_string();
    assert!(
        text.contains("16 is not a multiple of train_micro_batch_size_per_gpu = 2 * 3 ranks"),
        "{text}"
    );
    let all = [
        ("train_batch_size", json!(16)),
        ("gradient_accumulation_steps", json!(2)),
    ];
    assert_eq!(batch(Some(4), &all).unwrap(), (2, 4, 16));
    let text = batch(Some(2), &all).unwrap_err().to_string();
    assert!(text.contains("= 2 * 2 * 2 ranks = 8"), "{text}");
    // Without a number of ranks, it follows from the batch sizes.
    assert_eq!(batch(None, &all).unwrap(), (2, 4, 16));
    assert_eq!(batch(None, &train(16)).unwrap(), (8, 1, 16));
    let micro = [
        ("train_micro_batch_size_per_gpu", json!(null)),
        ("train_batch_size", json!(8)),
    ];
    assert_eq!(run_of(Some(4), &micro).unwrap().batch.micro_batch, 2);
    // Ranks that divide each sequence count once.
    let divided = |number: u64| {
        [
            ("train_batch_size", json!(number)),
            ("train.sequence_parallel", json!(2)),
        ]
    };
    assert_eq!(batch(Some(4), &divided(16)).unwrap(), (4, 4, 16));
    assert_eq!(batch(Some(2), &divided(16)).unwrap(), (8, 2, 16));
    assert_eq!(batch(None, &divided(16)).unwrap(), (8, 2, 16));
    let as_in_deepspeed = [
        ("train_batch_size", json!(16)),
        ("sequence_parallel_size", json!(2)),
    ];
    assert_eq!(batch(Some(4), &as_in_deepspeed).unwrap(), (4, 4, 16));
    let run = run_of(Some(4), &divided(16)).unwrap();
    assert_eq!((run.sequence_groups(), run.step_tokens()), (2, 16 * 32));
    assert_eq!(
        (run.batch.own_seq_len(), run.batch.micro_batch_tokens()),
        (16, 32)
    );
    let text = batch(Some(6), &divided(16)).unwrap_err().to_string();
    assert!(text.contains("= 2 * 3 groups of 2 ranks"), "{text}");
}

#[test]
fn sequences_that_ranks_cannot_divide_are_refused_with_numbers_that_can() {
    let heads = |heads: u64, kv_heads: u64| {
        vec![
            ("model.num_attention_heads", json!(heads)),
            ("model.num_key_value_heads", json!(kv_heads)),
        ]
    };
    let none = || heads(4, 4);
    for (count, ranks, changes, expected) in [
        (
            0,
            Some(4),
            none(),
            Some("train.sequence_parallel: 0: must be 1 to 4096"),
        ),
        (1, Some(3), none(), None),
        (2, Some(4), none(), None),
        (4, Some(4), none(), None),
        (
            2,
            Some(1),
            none(),
            Some(
                "2: the run has 1 rank, which is no multiple of it: start a multiple of 2 (`trainer launch --nproc 2`)",
            ),
        ),
        (
            2,
            Some(3),
            none(),
            Some("2: the run has 3 ranks, which is no multiple of it"),
        ),
        (
            3,
            None,
            none(),
            Some(
                "3: each rank has the same number of tokens, and train.seq_len = 32 is no multiple of 3; these numbers can: 2, 4",
            ),
        ),
        (
            8,
            Some(8),
            none(),
            Some("model.num_attention_heads = 4 is no multiple of 8; these numbers can: 2, 4"),
        ),
        (8, Some(24), heads(4, 4), Some("these numbers can: 2, 4")),
        // Ranks of 2 that are no multiple of 4.
        (8, Some(8), heads(2, 1), Some("these numbers can: 2")),
        // Several ranks have the same key head.
        (4, Some(4), heads(8, 2), None),
        (8, Some(8), heads(8, 1), None),
        (
            4,
            Some(4),
            [heads(12, 6), vec![("model.head_dim", json!(16))]].concat(),
            Some(
                "model.num_key_value_heads = 6 is neither a multiple nor a divisor of 4; these numbers can: 2",
            ),
        ),
        (
            2,
            Some(2),
            [heads(3, 3), vec![("model.head_dim", json!(16))]].concat(),
            Some("no number of ranks can divide it"),
        ),
        // Two and four can divide it, but not three.
        (
            3,
            Some(3),
            none(),
            Some(
                "these numbers can, with a multiple of as many ranks (`trainer launch --nproc N`): 2, 4",
            ),
        ),
        (
            2,
            Some(2),
            [none(), vec![("model.attention_dropout", json!(0.1))]].concat(),
            Some("2: dropout is decided for whole sequences"),
        ),
        (
            1,
            Some(2),
            [none(), vec![("model.attention_dropout", json!(0.1))]].concat(),
            None,
        ),
    ] {
        let changes = [&[("train.sequence_parallel", json!(count))], &changes[..]].concat();
        let found = run_of(ranks, &changes).map(|run| run.batch.sequence_ranks);
        match (found, expected) {
            (Ok(found), None) => assert_eq!(u64::from(found), count),
            (Err(error), Some(expected)) => {
                let text = error.to_string();
                assert!(text.contains(expected), "{changes:?}: {text}");
            }
            (found, expected) => panic!("{changes:?}: {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn threads_of_all_ranks_fit_the_machine() {
    let threads = |ranks| run_of(Some(ranks), &[]).unwrap().train.threads;
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads(1), cores);
    assert_eq!(threads(2), (cores / 2).max(1));
    assert_eq!(threads(4096), 1);
}

#[test]
fn devices_and_stages_that_contradict_are_refused() {
    const PARAM: &str = "zero_optimization.offload_param.device";
    const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
    const PARAM_PATH: &str = "zero_optimization.offload_param.nvme_path";
    let nvme = json!("nvme");
    assert!(
        refused(&[(PARAM, nvme.clone())])
            .contains("\"none\" is not possible with parameters on nvme")
    );
    assert!(
        refused(&[(OPTIMIZER, nvme.clone())]).contains("offload_optimizer.nvme_path is missing")
    );
    assert!(
        refused(&[(PARAM, json!("disk"))]).contains("\"disk\": use \"none\", \"cpu\" or \"nvme\"")
    );
    assert!(refused(&[("offload.socket", json!("/s"))]).contains("this run keeps nothing on nvme"));
    assert!(
        refused(&[("offload.resident_fraction", json!(0.5))]).contains("in host memory already")
    );
    let with_socket = [(OPTIMIZER, nvme.clone()), ("offload.socket", json!("/s"))];
    let run = run_with(&with_socket).unwrap();
    assert_eq!(
        run.placement.resident_fraction,
        ResidentFraction::Fixed(Fraction::NONE)
    );
    let both = [
        (OPTIMIZER, nvme.clone()),
        (PARAM, nvme),
        (PARAM_PATH, json!(["/a", "/b"])),
        ("zero_optimization.offload_optimizer.nvme_path", json!("/a")),
        ("offload.resident_fraction", json!(0.25)),
    ];
    let run = run_with(&both).unwrap();
    assert_eq!(run.placement.nvme_paths, [Path::new("/a"), Path::new("/b")]);
    let quarter = Fraction::new(0.25).unwrap();
    assert_eq!(
        run.placement.resident_fraction,
        ResidentFraction::Fixed(quarter)
    );
}

#[test]
fn stages_and_devices_combine_as_in_deepspeed() {
    const STAGE: &str = "zero_optimization.stage";
    const PARAM: &str = "zero_optimization.offload_param.device";
    const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
    let stage_of = |changes: &[(&str, serde_json::Value)]| {
        run_with(changes).map(|run| run.placement.stage.number())
    };
    assert_eq!(stage_of(&[]).unwrap(), 3, "left out");
    for stage in [0, 1, 2, 3] {
        assert_eq!(stage_of(&[(STAGE, json!(stage))]).unwrap(), stage);
    }
    for stage in [1, 2, 3] {
        let with_cpu = [(STAGE, json!(stage)), (OPTIMIZER, json!("cpu"))];
        assert_eq!(stage_of(&with_cpu).unwrap(), stage);
    }
    let says = |stage: u64, key: &'static str, device: &str, words: &str| {
        let text = refused(&[(STAGE, json!(stage)), (key, json!(device))]);
        assert!(
            text.contains("zero_optimization.stage: ") && text.contains(words),
            "{text}"
        );
    };
    says(0, OPTIMIZER, "cpu", "set stage 1, 2 or 3");
    for stage in [1, 2] {
        says(
            stage,
            PARAM,
            "cpu",
            "offload_param.device \"cpu\" needs stage 3",
        );
        let silent = "DeepSpeed accepts it and silently uses host memory";
        says(stage, OPTIMIZER, "nvme", silent);
    }
    assert!(refused(&[(STAGE, json!(4))]).contains("4: there are stages 0 to 3"));
}

#[test]
fn values_out_of_range_name_their_key() {
    for (key, value, part) in [
        (
            "train.stop_after",
            json!(101),
            "train.stop_after: 101: must be 1 to 100",
        ),
        (
            "model.max_position_embeddings",
            json!(16),
            "train.seq_len: 32 is more than model.max_position_embeddings = 16",
        ),
        ("train.eval_every", json!(5), "set data.validation_fraction"),
        (
            "data.validation_fraction",
            json!(1.5),
            "data.validation_fraction: 1.5: must be 0 to 1",
        ),
        ("data.files", json!([]), "data.files is missing"),
        (
            "gradient_clipping",
            json!(-1.0),
            "gradient_clipping: -1: must not be negative",
        ),
        (
            "optimizer.type",
            json!("Lamb"),
            "optimizer.type: \"Lamb\" is not supported",
        ),
        (
            "optimizer.params.betas",
            json!([0.9, 1.0]),
            "optimizer.params.betas",
        ),
        (
            "optimizer.params.lr",
            json!("1e-5"),
            "optimizer.params.lr: expected a number, got \"1e-5\": leave out the quotes",
        ),
        (
            "scheduler.type",
            json!("cosine_with_min_lr"),
            "use \"WarmupCosineLR\" with scheduler.params.cos_min_ratio, or one of linear, cosine, constant,",
        ),
        (
            "scheduler.type",
            json!("StepLR"),
            "scheduler.type: \"StepLR\" is not supported: use one of linear, cosine, constant, LRRangeTest, OneCycle,",
        ),
        (
            "offload.tile_elems",
            json!(5000),
            "offload.tile_elems: 5000: must be a multiple of 4096",
        ),
        (
            "offload.staging_bytes",
            json!("64 tiles"),
            "offload.staging_bytes: expected a number of bytes",
        ),
        (
            "offload.iodepth",
            json!(1),
            "offload.iodepth: 1: must be 2 to 1024",
        ),
        (
            "model.num_attention_heads",
            json!(5),
            "hidden_size = 64 is not a multiple of num_attention_heads = 5",
        ),
        (
            "data.loss_on",
            json!("answers"),
            "data.loss_on: \"answers\": use \"all\" or \"completions\"",
        ),
        (
            "data.packing",
            json!("tight"),
            "data.packing: \"tight\": use \"concatenate\" or \"documents\"",
        ),
        (
            "train.seed",
            json!("x"),
            "train.seed: expected a whole number, got \"x\"",
        ),
        (
            "optimizer.params.lr",
            json!("fast"),
            "optimizer.params.lr: expected a number, got \"fast\"",
        ),
    ] {
        let mut changes = vec![(key, value)];
        if key.starts_with("scheduler") {
            changes.push(("scheduler.params.warmup_num_steps", json!(10)));
        }
        let text = refused(&changes);
        assert!(text.contains(part), "{key}: {text}");
    }
}

#[test]
fn auto_means_the_default_and_is_shown() {
    let run = run_with(&[
        ("gradient_clipping", json!("auto")),
        ("optimizer.params.betas", json!("auto")),
    ])
    .unwrap();
    assert_eq!(
        (run.gradient_clipping, run.optimizer.betas),
        (1.0, [0.9, 0.999])
    );
    assert_eq!(
        run.notes
            .iter()
            .filter(|note| note.contains("\"auto\""))
            .count(),
        2
    );
}

#[test]
fn keys_that_the_plan_chooses_may_be_left_out_or_auto() {
    let base = [
        ("zero_optimization.offload_optimizer.device", json!("nvme")),
        ("offload.socket", json!("/s")),
    ];
    let with = |changes: &[(&str, Value)]| run_with(&[&base[..], changes].concat()).unwrap();
    let keys =
        ["staging_bytes", "commit_every", "optimizer_device"].map(|key| format!("offload.{key}"));
    let auto: Vec<(&str, Value)> = keys.iter().map(|key| (&**key, json!("auto"))).collect();
    for run in [with(&[]), with(&auto)] {
        assert_eq!(run.offload.commit_every, None);
        assert_eq!(run.offload.staging_bytes, None);
        assert_eq!(run.offload.optimizer_device, OptimizerDevice::Auto);
        assert_eq!(run.train.device, DeviceChoice::Auto);
        assert_eq!(run.notes, [""; 0]);
    }
    let share = |changes: &[(&str, Value)]| with(changes).placement.resident_fraction;
    let elsewhere = run_with(&[("offload.gradients", json!("nvme"))]).unwrap_err();
    assert!(
        elsewhere
            .to_string()
            .contains("this run keeps nothing else on nvme"),
        "{elsewhere}"
    );
    assert_eq!(
        share(&[("offload.resident_fraction", json!("auto"))]),
        ResidentFraction::Auto
    );
    // A memory budget makes the fraction "auto" unless one is given.
    let budget = ("offload.host_memory_bytes", json!("64GiB"));
    assert_eq!(share(std::slice::from_ref(&budget)), ResidentFraction::Auto);
    assert_eq!(
        share(&[budget, ("offload.resident_fraction", json!(0))]),
        ResidentFraction::Fixed(Fraction::NONE)
    );
    for key in ["train.device", "train.activation_checkpointing"] {
        assert_eq!(with(&[(key, json!("auto"))]).notes, [""; 0]);
    }
}

/// Settings of an entry take precedence over those of all files, and are shown as they are written.
#[test]
fn entries_of_data_files_may_have_settings_of_their_own() {
    let alpaca = json!({"path": "b", "weight": 0.5, "format": "alpaca"});
    let settings = run_with(&[
        ("data.files", json!(["a", alpaca])),
        ("data.max_samples", json!(7)),
        ("data.eval_files", json!(["c"])),
        ("data.format", json!("messages")),
    ])
    .unwrap();
    let [first, second] = &settings.data.files[..] else {
        panic!("two entries")
    };
    let of = |file: &DataFile| (file.format, file.weight, file.max_samples);
    assert_eq!(of(first), (Some(RecordFormat::Messages), 1.0, Some(7)));
    assert_eq!(of(second), (Some(RecordFormat::Alpaca), 0.5, Some(7)));
    assert_eq!(settings.data.eval_files[0].max_samples, None);
    assert_eq!(
        serde_json::to_value(second).unwrap(),
        json!({"path": "b", "weight": 0.5, "max_samples": 7, "format": "alpaca"})
    );
    let plain = DataFile::new("a".into());
    assert_eq!(serde_json::to_value(plain).unwrap(), json!("a"));
    for (key, value, part) in [
        (
            "data.format",
            json!("chatml"),
            "data.format: \"chatml\": use \"text\", \"completion\", \"messages\", \"sharegpt\", \"alpaca\" or \"token_ids\"",
        ),
        (
            "data.files",
            json!([{"path": "a", "weight": 0}]),
            "data.files: a: its weight is 0: use a number above 0, at most 1000",
        ),
        (
            "data.files",
            json!([{"path": "a", "max_samples": 0}]),
            "data.files: a: its max_samples is 0",
        ),
        (
            "data.files",
            json!([{"path": "a", "wieght": 2}]),
            "data.files: expected a list of paths, or of tables with path, weight, max_samples and format",
        ),
    ] {
        let text = refused(&[(key, value)]);
        assert!(text.contains(part), "{text}");
    }
}
