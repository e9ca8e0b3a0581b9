//! `trainer plan` reports before a run what the run will report and do, and changes nothing.
//!
//! Errors that these tests find: a plan creates a directory or a store, or needs one; it promises other bytes
//! than are moved; it accepts a run that training refuses, or succeeds for a run that it refuses.

use serde_json::Value;

use crate::harness::{Harness, Run, fail, finish, spawn, succeed};

/// Output of `trainer plan --json` with `args`, and whether it succeeded.
pub(crate) fn plan(run: &Run, args: &[&str]) -> (Value, bool) {
    let mut command = run.command("plan");
    command.arg("--json").args(args);
    let output = finish(spawn(command));
    let report = serde_json::from_slice(&output.stdout).expect("JSON");
    (report, output.status.success())
}

#[test]
fn init_writes_a_run_file_that_fits_this_machine_and_trains() {
    let harness = Harness::new();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/llama");
    let file = harness.path("run.toml");
    let text = harness.path("text");
    let init = || {
        let mut command = harness.run("any", &[]).program();
        command
            .arg("init")
            .arg(model)
            .arg(&text)
            .arg("--out")
            .arg(&file);
        command
    };
    succeed(init());
    let written = std::fs::read_to_string(&file).unwrap();
    for part in [
        "# memory    host ",
        "bottleneck: ",
        "epochs = 3 # passes",
        model,
    ] {
        assert!(written.contains(part), "{part} in {written}");
    }
    // Libraries of GPUs matter only to those who have one.
    assert!(!written.contains("libamdhip64"), "{written}");
    // A text has no prompts that could be left out of the loss.
    assert!(!written.contains("loss_on"), "{written}");
    let mut train = harness.run("any", &[]).program();
    train.arg("train").arg(&file);
    for set in ["train.seq_len=16", "train.steps=1", "train.threads=1"] {
        train.arg("--set").arg(set);
    }
    let run_dir = format!("train.run_dir={}", harness.path("runs/init").display());
    train.arg("--set").arg(run_dir);
    let said = succeed(train);
    assert!(said.contains("started with the weights in "), "{said}");
    let again = fail(init());
    assert!(again.contains("run.toml already exists"), "{again}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), written);
    // A number of steps replaces the passes.
    std::fs::remove_file(&file).unwrap();
    let mut of_steps = init();
    of_steps.arg("--set").arg("train.steps=5");
    succeed(of_steps);
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(
        written.contains("steps = 5\n") && !written.contains("epochs ="),
        "{written}"
    );
}

#[test]
fn init_leaves_prompts_out_of_the_loss_and_takes_small_steps_of_short_data() {
    let harness = Harness::new();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/llama");
    let data = harness.path("answers.jsonl");
    let line = "{\"prompt\": \"How far is it?\", \"completion\": \" Two days on foot.\"}\n";
    std::fs::write(&data, line.repeat(20)).unwrap();
    let file = harness.path("answers.toml");
    let mut command = harness.run("any", &[]).program();
    command
        .arg("init")
        .arg(model)
        .arg(&data)
        .arg("--out")
        .arg(&file);
    succeed(command);
    let written = std::fs::read_to_string(&file).unwrap();
    // Twenty windows of 64 bytes.
    for part in [
        "\nloss_on = \"completions\" #",
        "train_micro_batch_size_per_gpu = 2 #",
        "of about 10 steps each",
    ] {
        assert!(written.contains(part), "{part} in {written}");
    }
}

#[test]
fn a_plan_changes_nothing_and_needs_neither_text_nor_drive() {
    let harness = Harness::new();
    let dir = harness.path("nowhere").display().to_string();
    let run = harness
        .run("run", &["data.files=[\"missing\"]"])
        .with(&["param", "optimizer"].map(|what| {
            format!("zero_optimization.offload_{what}={{device = \"nvme\", nvme_path = \"{dir}\"}}")
        }));
    let text = succeed(run.command("plan"));
    for part in [
        "model ", "host ", "GPU ", "devices ", "a step ", "bound ", "terms ", "chosen ",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(
        text.contains(&format!("warning: nvme_path: {dir} does not exist here")),
        "{text}"
    );
    assert!(!run.dir.exists() && harness.store_files().is_empty());
}

#[test]
fn init_does_not_put_random_weights_in_the_place_of_weights_that_it_cannot_read() {
    let harness = Harness::new();
    let model = harness.path("model");
    std::fs::create_dir(&model).unwrap();
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/hf/llama/config.json"
    );
    std::fs::copy(config, model.join("config.json")).unwrap();
    let init = |out: &str| {
        let mut command = harness.run("any", &[]).program();
        let (text, out) = (harness.path("text"), harness.path(out));
        command.arg("init").arg(&model).arg(text).arg("--out");
        command.arg(out);
        command
    };
    let said = succeed(init("random.toml"));
    assert!(said.contains("starts with random ones"), "{said}");
    std::fs::write(model.join("pytorch_model.bin"), "x").unwrap();
    let text = fail(init("other.toml"));
    assert!(
        text.contains("has weights in pytorch_model.bin but no safetensors"),
        "{text}"
    );
    assert!(!harness.path("other.toml").exists());
}

#[test]
fn init_says_for_each_place_why_nothing_fits_and_of_none_that_it_would() {
    let harness = Harness::new();
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/hf/llama/config.json"
    );
    let config = std::fs::read_to_string(config).unwrap();
    let mut model: Value = serde_json::from_str(&config).unwrap();
    // 275 G parameters.
    model["vocab_size"] = (1 << 22).into();
    model["hidden_size"] = (1 << 15).into();
    let path = harness.path("large.json");
    std::fs::write(&path, model.to_string()).unwrap();
    // One sequence, so that one micro-batch is tried.
    let text = harness.path("short");
    std::fs::write(&text, "one line\n").unwrap();
    let mut init = harness.run("any", &[]).program();
    init.arg("init").arg(&path).arg(text);
    let said = fail({
        init.args(["--set", "data.tokenizer=bytes", "--out", "large.toml"]);
        init
    });
    for part in [
        "of 64 tokens in a step fits this machine:\n",
        "\n  host memory: the run needs ",
        "\n  drives: the state takes ",
    ] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    assert!(!said.contains("the run then fits"), "{said}");
}

#[test]
fn a_plan_promises_the_bytes_that_a_step_moves() {
    let harness = Harness::new();
    let run = harness
        .run("run", &["offload.commit_every=1"])
        .with(&harness.nvme());
    let (report, fits) = plan(&run, &[]);
    assert!(fits && report["fits"] == true, "{report}");
    assert_eq!(report["hardware"]["read_bytes_per_s"]["source"], "assumed");
    run.train();
    let last = run.metrics().pop().expect("a step");
    // A write counts in the step in which it ends: at a step's end, one may count in the next.
    let steps = run.metrics().into_iter().skip(1);
    let mut written: Vec<u64> = steps
        .map(|step| step["device_written_bytes"].as_u64().expect("a number"))
        .collect();
    written.sort_unstable();
    assert_eq!(
        written[written.len() / 2],
        report["step"]["written_bytes"],
        "{written:?}"
    );
    assert_eq!(last["host_bytes"], report["host"]["process_bytes"]);
    // Later plans use the measurements of the run.
    let (report, _) = plan(&run, &[]);
    for figure in ["read_bytes_per_s", "write_bytes_per_s", "tflops"] {
        assert_eq!(report["hardware"][figure]["source"], "measured", "{figure}");
    }
    let (report, _) = plan(&run, &["--read", "6.2GB/s"]);
    assert_eq!(report["hardware"]["read_bytes_per_s"]["value"], 6.2e9);
}

#[test]
fn plan_and_train_refuse_the_same_runs() {
    let harness = Harness::new();
    let run = harness.run("run", &["offload.host_memory_bytes=\"1MiB\""]);
    let (report, fits) = plan(&run, &[]);
    assert!(!fits && report["fits"] == false, "{report}");
    assert_eq!(report["problems"][0]["kind"], "host_memory");
    let part = "of host memory, but 1.0 MiB is the limit set by offload.host_memory_bytes: ";
    for verb in ["plan", "train"] {
        let text = fail(run.command(verb));
        assert!(text.contains(part), "{verb}: {text}");
    }
    let large = [
        "hidden_size=32768",
        "intermediate_size=131072",
        "num_attention_heads=256",
    ];
    let large = large.map(|set| format!("model.{set}"));
    let sets = [
        "model.num_hidden_layers=64",
        "train.device=cpu",
        "offload.tile_elems=1048576",
        "offload.staging_bytes=1400000000",
    ];
    let run = harness.run("run", &sets).with(&large).with(&harness.nvme());
    let (report, fits) = plan(&run, &["--host-memory", "64TiB"]);
    assert!(!fits, "{report}");
    assert_eq!(report["problems"][0]["kind"], "device_space");
    let what = report["problems"][0]["what"].as_str().unwrap();
    assert!(
        what.contains("drive has ") && what.contains("the store needs "),
        "{what}"
    );
    // Reported even before memory is counted.
    let run = harness
        .run("run", &["offload.staging_bytes=4096"])
        .with(&harness.nvme());
    let (report, fits) = plan(&run, &[]);
    assert!(!fits && report["fits"] == false, "{report}");
    assert_eq!(report["problems"][0]["kind"], "settings");
    assert!(!run.dir.exists() && harness.store_files().is_empty());
}

#[test]
fn checkpoints_are_planned_with_their_bytes_and_their_cost() {
    let harness = Harness::new();
    let sets = ["train.checkpoint_every=2", "train.checkpoints_kept=2"];
    let run = harness.run("run", &sets).with(&harness.nvme());
    let (before, _) = plan(&run, &[]);
    let (none, _) = plan(&harness.run("none", &[]).with(&harness.nvme()), &[]);
    assert_eq!(none["checkpoints"], serde_json::Value::Null);
    run.train();
    let (after, _) = plan(&run, &[]);
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let bytes = number(&before["checkpoints"]["checkpoint_bytes"]);
    let on_drive = run.dir.join("checkpoints/step-00000004/tiles.0");
    let on_drive = std::fs::metadata(on_drive).unwrap().len() as f64;
    assert!(
        (bytes / on_drive - 1.0).abs() < 0.2,
        "{bytes} planned, {on_drive} found"
    );
    assert_eq!(number(&before["checkpoints"]["kept_bytes"]), 2.0 * bytes);
    assert_eq!(number(&before["checkpoints"]["room_bytes"]), 3.0 * bytes);
    let sources = [&before, &after].map(|plan| &plan["checkpoints"]["write_bytes_per_s"]["source"]);
    assert_eq!(sources, ["assumed", "measured"]);
    let rate = number(&after["checkpoints"]["write_bytes_per_s"]["value"]);
    assert!((number(&after["checkpoints"]["checkpoint_s"]) * rate / bytes - 1.0).abs() < 1e-9);
    assert!((number(&after["checkpoints"]["step_s"]) * 2.0 * rate / bytes - 1.0).abs() < 1e-9);
    // The store and the run directory are on one file system.
    let space = before["space"].as_array().expect("file systems");
    assert_eq!(space.len(), 1, "{space:?}");
    assert_eq!(
        number(&space[0]["checkpoint_bytes"]),
        3.0 * (bytes + f64::from(1 << 20))
    );
    assert!(number(&space[0]["store_bytes"]) >= number(&before["device_bytes"]));
    assert!(number(&space[0]["free_bytes"]) > number(&space[0]["store_bytes"]));
    assert_eq!(after["space"], serde_json::json!([]), "the run is complete");
    let buffers = number(&after["checkpoints"]["buffer_bytes"]);
    let host = |plan: &serde_json::Value| number(&plan["host"]["process_bytes"]);
    assert_eq!(host(&before) - host(&none), buffers);
}

#[test]
fn a_missing_gpu_is_refused_before_anything_is_created() {
    let harness = Harness::new();
    let run = harness.run("run", &["train.device=gpu"]);
    let (report, _) = plan(&run, &[]);
    if report["gpu"].is_object() {
        println!("skipped: a_missing_gpu_is_refused_before_anything_is_created: there is one");
        return;
    }
    let text = run.refused();
    assert!(
        text.contains("train.device is \"gpu\", but there is no GPU: "),
        "{text}"
    );
    assert!(!run.dir.exists());
    // Another machine may have one.
    let (_, fits) = plan(&run, &["--gpu-memory", "24GiB"]);
    assert!(fits);
}

/// A `trainer plan` command that needs no configuration.
fn ask(args: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(crate::harness::trainer());
    command.arg("plan").args(args);
    command.stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped());
    command
}

#[test]
fn a_configuration_alone_is_enough_for_a_plan() {
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/models");
    let model = format!("{configs}/Llama-2-7B.json");
    let machine = [
        "--gpus",
        "2",
        "--gpu-memory",
        "24GiB",
        "--tflops",
        "80",
        "--host-memory",
        "128GiB",
        "--drives",
        "2x6.2GB/s:3.2GB/s",
        "--micro-batch",
        "1",
        "--accumulation",
        "4",
        "--tokens",
        "1G",
        "--tbw",
        "1200TB",
        "--cores",
        "16",
    ];
    let with = |more: &[&str]| {
        let mut args = vec!["--model", model.as_str()];
        args.extend(machine);
        args.extend(more);
        ask(&args)
    };
    let text = succeed(with(&[]));
    for part in [
        "6.74 G parameters, 16384 tokens in a step, 2 processes",
        "GPU of 24.0 GiB",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let report: Value = serde_json::from_str(&succeed(with(&["--json"]))).expect("JSON");
    let places = report["places"].as_array().expect("places");
    let place = |name: &str| {
        let found = places.iter().find(|place| place["place"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {report}"))
    };
    // 14 bytes a parameter on two GPUs exceed 24 GiB each; the table has the places that fit.
    assert_eq!(place("gpu")["fits"], false);
    let refused = place("gpu")["refused"][0].as_str().unwrap();
    assert!(
        refused.ends_with(" of GPU memory, but 24.0 GiB is available"),
        "{refused}"
    );
    assert_eq!(report["fits"], true);
    assert_eq!(place("drives")["fits"], true);
    // 12 bytes a parameter twice, and 1 G tokens in steps of 16,384.
    let device_bytes = place("drives")["device_bytes"].as_f64().unwrap();
    assert!(
        (device_bytes / (24.0 * 6.74e9) - 1.0).abs() < 0.01,
        "{device_bytes}"
    );
    assert_eq!(
        place("drives")["outlook"]["steps"],
        1_000_000_000u64.div_ceil(16384)
    );
    assert!(place("drives")["outlook"]["rating_s"].as_f64().unwrap() > 0.0);

    // A script can test whether any place fits, with --json too.
    let tiny = [
        "--model",
        model.as_str(),
        "--gpu-memory",
        "1GiB",
        "--host-memory",
        "2GiB",
    ];
    for more in [&[][..], &["--json"]] {
        let text = fail(ask(&[&tiny[..], more].concat()));
        assert!(
            text.contains("the run fits in none of these places: ")
                && text.contains("the least that one of them takes is "),
            "{text}"
        );
    }

    let text = fail(ask(&["--model", "/nonexistent/config.json"]));
    assert!(
        text.contains("cannot read the model's configuration /nonexistent/config.json"),
        "{text}"
    );
    // A model with fewer positions than sequences have by default is planned with all it has.
    let short = format!("{configs}/GPT-2-XL.json");
    let text = succeed(ask(&["--model", &short, "--host-memory", "1TiB"]));
    assert!(text.contains(", 1024 tokens in a step, "), "{text}");
    let text = fail(ask(&["--model", &model, "--seq-len", "8192"]));
    assert!(
        text.contains("more than the model's max_position_embeddings = 4096"),
        "{text}"
    );
    let text = fail(ask(&["--model", &model, "--set", "offload.gradint=1"]));
    assert!(text.contains("unknown key `offload.gradint"), "{text}");
}
