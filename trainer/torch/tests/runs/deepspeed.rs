//! Trains with DeepSpeed configurations.
//!
//! Errors that these tests find: a common configuration is refused because of an irrelevant key, or because
//! of 1e9 for a whole number; a value is not applied to the run; a key without effect is not reported; a
//! monitor lacks a step, or has it twice.

use serde_json::json;
use test_hooks::kill_point::Point;

use crate::harness::{Harness, Run, succeed};
use crate::points::killed;

fn fixture(name: &str) -> String {
    format!(
        "{}/../tests/fixtures/deepspeed/{name}",
        env!("CARGO_MANIFEST_DIR")
    )
}

/// Makes a tiny run of `steps` steps with the DeepSpeed configuration `deepspeed`.
fn run(harness: &Harness, name: &str, deepspeed: &str, steps: u64) -> Run {
    let settings = json!({
        "deepspeed": deepspeed,
        "train_micro_batch_size_per_gpu": 2,
        "model": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2
        },
        "data": {"files": [harness.path("text")]},
        "train": {
            "steps": steps, "seq_len": 16, "seed": 7, "threads": 1, "run_dir": harness.path(&format!("runs/{name}"))
        },
        "offload": {"tile_elems": 4096, "staging_bytes": 100_000}
    });
    harness.run_of_json(name, &settings)
}

#[test]
fn hugging_faces_zero_infinity_example_trains() {
    let harness = Harness::new();
    let drive = |what: &str| {
        let drive = harness.path("drive");
        format!(
            "zero_optimization.offload_{what}.nvme_path={}",
            drive.display()
        )
    };
    let run = run(&harness, "infinity", &fixture("zero_infinity.json"), 3);
    let run = run.with(&[drive("param"), drive("optimizer")]);
    let said = run.train();
    assert_eq!(run.metrics().len(), 3);
    assert_eq!(harness.store_files().len(), 1);
    // A start prints the first notes only.
    assert!(said.contains(" keys have no effect here ("), "{said}");
    let said = run.settings();
    for part in [
        "zero_optimization.offload_param.device = \"nvme\"",
        "train_micro_batch_size_per_gpu = 2",
        "offload.iodepth = 32",
        "note: optimizer.params.lr is \"auto\": 5e-5, Hugging Face's learning_rate",
        "note: scheduler.params.warmup_max_lr is \"auto\": optimizer.params.lr",
        " keys have no effect here (docs/coming-from-deepspeed.md says why): ",
        "zero_optimization.aio.block_size, ",
        "zero_optimization.sub_group_size",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}

#[test]
fn a_launcher_accepts_a_deepspeed_file_and_counts_its_ranks() {
    let harness = Harness::new();
    let file = harness.path("ds.json");
    std::fs::write(
        &file,
        r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2}}"#,
    )
    .unwrap();
    let run = run(&harness, "ranks", file.to_str().unwrap(), 2);
    succeed(run.launch(2));
    let settings = run.settings();
    for line in [
        "gradient_accumulation_steps = 2",
        "zero_optimization.stage = 2",
    ] {
        assert!(settings.lines().any(|found| found == line), "{settings}");
    }
    std::fs::write(&file, r#"{"train_batch_size": 9}"#).unwrap();
    let text = crate::harness::fail(run.launch(2));
    assert!(
        text.contains("ds.json: train_batch_size: 9 is not a multiple of train_micro_batch_size_per_gpu = 2 * 2 ranks"),
        "{text}"
    );
}

#[test]
fn monitors_and_times_are_reported_and_truncated_on_resume() {
    let harness = Harness::new();
    let file = harness.path("ds.json");
    let deepspeed = json!({
        "tensorboard": {"enabled": true, "output_path": harness.path("tb"), "job_name": "job"},
        "csv_monitor": {"enabled": true},
        "wall_clock_breakdown": true,
        "steps_per_print": 1
    });
    std::fs::write(&file, deepspeed.to_string()).unwrap();
    let run = |until: &str| run(&harness, "told", file.to_str().unwrap(), 4).with(&[until]);
    let said = run("train.stop_after=2").train();
    assert!(said.contains("  time (step 2)  forward "), "{said}");
    let csv = harness.path("runs/told/csv_monitor/DeepSpeedJobName");
    let loss = || std::fs::read_to_string(csv.join("Train_Samples_train_loss.csv")).unwrap();
    let of = |steps: u64, run: &Run| {
        let metrics = run.metrics();
        let rows = (1..=steps).zip(&metrics);
        let rows = rows.map(|(step, line)| format!("{},{}\r\n", step * 2, line["loss"]));
        rows.fold("step,train_loss\r\n".to_owned(), |text, row| text + &row)
    };
    assert_eq!(loss(), of(2, &run("train.stop_after=2")));
    // A step that was reported but not saved.
    std::fs::write(
        csv.join("Train_Samples_train_loss.csv"),
        loss() + "6,0.5\r\n",
    )
    .unwrap();
    run("train.stop_after=4").train();
    assert_eq!(loss(), of(4, &run("train.stop_after=4")));
    for name in [
        "lr",
        "grad_norm",
        "elapsed_time_ms_forward",
        "elapsed_time_ms_backward",
        "elapsed_time_ms_step",
    ] {
        let text = std::fs::read_to_string(csv.join(format!("Train_Samples_{name}.csv"))).unwrap();
        assert_eq!(text.lines().count(), 5, "{name}: {text}");
    }
    let events = std::fs::read_dir(harness.path("tb/job")).unwrap();
    assert_eq!(events.count(), 2, "one file for each start");
}

#[test]
fn monitors_have_the_step_of_a_kill_between_its_commit_and_its_line_once() {
    let harness = Harness::new();
    // Commits come before evaluations only, and the kill after the second one.
    let sets = [
        "csv_monitor.enabled=true",
        "offload.commit_every=0",
        "data.validation_fraction=0.1",
        "train.eval_every=1",
    ];
    let file = harness.path("ds.json");
    std::fs::write(&file, "{}").unwrap();
    let run = run(&harness, "told", file.to_str().unwrap(), 4);
    let run = run.with(&harness.nvme()).with(&sets);
    assert!(killed(run.command("train"), Point::Telling, 2));
    assert_eq!(run.steps_written(), 1);
    let csv = run.dir.join("csv_monitor/DeepSpeedJobName");
    let read = |name: &str| std::fs::read_to_string(csv.join(name)).unwrap();
    // A kill may also come after some of the monitors' files.
    let loss = "Train_Samples_train_loss.csv";
    std::fs::write(csv.join(loss), read(loss) + "4,0.5\r\n").unwrap();
    assert!(run.train().contains("resumed at step 2"));
    for (name, key) in [(loss, "loss"), ("Eval_Samples_eval_loss.csv", "eval_loss")] {
        let rows = (run.metrics().iter().enumerate())
            .map(|(before, line)| format!("{},{}\r\n", 2 * (before + 1), line[key]))
            .collect::<String>();
        let text = read(name);
        assert_eq!(text.split_once("\r\n").unwrap().1, rows, "{name}");
    }
}
