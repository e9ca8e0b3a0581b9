//! Tests that predicted bytes are those that the trainer moves, that predictions match runs, and that drives make a difference. Training
//! needs a trainer beside bench-io, and rate-limited drives.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::harness::{
    alone, cannot_make_testdrives, drawn, drive, json, program, refused, says_how_it_went,
};

/// Returns the trainer beside bench-io, if it was built; otherwise prints that the test is skipped.
fn trainer() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_bench-io")).with_file_name("trainer");
    let runs = std::process::Command::new(&path).arg("--version").output();
    if runs.is_ok_and(|output| output.status.success()) {
        return Some(path);
    }
    println!(
        "skipped: {}: no trainer at {} that runs; `cargo test` of the workspace builds it",
        std::thread::current().name().unwrap_or("a test"),
        path.display()
    );
    None
}

/// Writes a run of 2.3 M parameters with all state on drives, and its text.
pub(crate) fn run_file(dir: &Path) -> String {
    let text = dir.join("text");
    std::fs::write(
        &text,
        "tiles stream through the processor and back. ".repeat(3000),
    )
    .unwrap();
    let file = dir.join("run.toml");
    let run = format!(
        r#"
train_micro_batch_size_per_gpu = 4
[bf16]
enabled = true
[optimizer]
type = "AdamW"
params = {{ lr = 1e-3 }}
[zero_optimization]
stage = 3
offload_param = {{ device = "nvme", nvme_path = "/nowhere" }}
offload_optimizer = {{ device = "nvme", nvme_path = "/nowhere" }}
[model]
hidden_size = 128
intermediate_size = 352
num_hidden_layers = 12
num_attention_heads = 4
num_key_value_heads = 4
[data]
files = [{text:?}]
[train]
steps = 8
seq_len = 96
seed = 1
run_dir = {:?}
[offload]
tile_elems = 16384
staging_bytes = 8000000
commit_every = 1
"#,
        dir.join("run")
    );
    std::fs::write(&file, run).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn predictions_have_the_designs_bytes_and_shrink_with_drives() {
    let dir = drive();
    let file = run_file(dir.path());
    let report = json(&[
        "training",
        &file,
        "--read=60MB/s",
        "--write=30MB/s",
        "--tflops=0.05",
        "--accumulation=4",
        "--json",
    ]);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(report["settings"]["subject"], file);
    assert_eq!(report["settings"]["tflops"], 0.05);
    assert!(report["program"].as_str().unwrap().starts_with("bench-io "));
    let number = |value: &Value| value.as_f64().unwrap();
    for (index, row) in rows.iter().enumerate() {
        let parameters = number(&row["ours"]["parameters"]);
        let (theirs, ours) = (&row["deepspeed"], &row["ours"]);
        assert_eq!(number(&theirs["read_bytes"]), 32.0 * parameters);
        assert_eq!(number(&theirs["written_bytes"]), 18.0 * parameters);
        // The trainer's step has the same work: four sequences of 96 tokens, four times.
        assert_eq!(number(&ours["micro_batches"]), 4.0);
        assert_eq!(number(&ours["tokens"]), 4.0 * 4.0 * 96.0);
        // In a small model, padding adds some percent to the tiles.
        assert!(
            (1.0..1.12).contains(&(number(&ours["read_bytes"]) / parameters / 14.0)),
            "{row}"
        );
        assert!(
            (1.0..1.12).contains(&(number(&ours["written_bytes"]) / parameters / 12.0)),
            "{row}"
        );
        let rate = |name: &str| number(&row[name]);
        let drives = (index + 1) as f64;
        assert_eq!(
            (rate("read_bytes_per_s"), rate("write_bytes_per_s")),
            (60e6 * drives, 30e6 * drives)
        );
        let moving_s = number(&theirs["read_bytes"]) / (60e6 * drives)
            + number(&theirs["written_bytes"]) / (30e6 * drives);
        let off = number(&theirs["step_s"]) - moving_s - number(&ours["compute_s"]);
        assert!(off.abs() < 1e-6, "{row}");
        assert!(
            number(&ours["step_s"]) >= 0.999 * number(&ours["written_bytes"]) / (30e6 * drives),
            "{row}"
        );
    }
    assert!(
        number(&rows[3]["ours"]["step_s"]) < 0.5 * number(&rows[0]["ours"]["step_s"]),
        "{report}"
    );
}

/// Prints the plan of the trainer beside bench-io as JSON, with the rates and compute of [`predictions_are_those_of_trainer_plan`].
fn trainer_plan(trainer: &Path, subject: &[&str]) -> Value {
    let output = std::process::Command::new(trainer)
        .args(["plan", "--json", "--read=60MB/s", "--write=30MB/s"])
        .args(["--tflops=0.05", "--cores=8", "--host-memory=64GiB"])
        .arg("--gpu-memory=24GiB")
        .args(subject)
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn predictions_are_those_of_trainer_plan() {
    let Some(trainer) = trainer() else {
        return;
    };
    let dir = drive();
    let file = run_file(dir.path());
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/models");
    let model = models.join("GPT-2-XL.json");
    let model = model.to_str().unwrap();
    let predicted = |subject: &[&str]| -> Value {
        let words = ["--read=60MB/s", "--write=30MB/s", "--drives=1"];
        let machine = ["--tflops=0.05", "--cores=8", "--host-memory=64GiB"];
        let all = [&["training", "--json"], subject, &words, &machine];
        let report = json(&[&all.concat()[..], &["--gpu-memory=24GiB"]].concat());
        report["rows"][0]["ours"].clone()
    };
    let (ours, plan) = (predicted(&[&file]), trainer_plan(&trainer, &[&file]));
    let [step, bound] = ["step", "bound"].map(|part| &plan[part]);
    for (found, expected) in [
        ("parameters", &plan["parameters"]),
        ("tokens", &plan["tokens_per_step"]),
        ("read_bytes", &step["read_bytes"]),
        ("written_bytes", &step["written_bytes"]),
        ("step_s", &bound["s"]),
        ("device_bytes", &plan["device_bytes"]),
        ("host_bytes", &plan["host"]["node_bytes"]),
    ] {
        assert_eq!(ours[found].as_f64(), expected.as_f64(), "{found} {plan}");
    }
    assert_eq!(ours["wall"], bound["wall"]);
    let of_model = ["--model", model, "--seq-len=1024", "--micro-batch=2"];
    let (ours, plan) = (predicted(&of_model), trainer_plan(&trainer, &of_model));
    let places = plan["places"].as_array().unwrap();
    let drives = places.iter().find(|place| place["place"] == "drives");
    let drives = drives.unwrap();
    for (found, expected) in [
        ("read_bytes", "step_read_bytes"),
        ("written_bytes", "step_written_bytes"),
        ("step_s", "step_s"),
        ("compute_s", "compute_s"),
        ("device_bytes", "device_bytes"),
        ("host_bytes", "host_bytes"),
    ] {
        assert_eq!(ours[found].as_f64(), drives[expected].as_f64(), "{found}");
    }
}

#[test]
fn another_machines_memory_and_cores_are_planned_for_and_named() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/models");
    let model = models.join("Llama-2-7B.json");
    let words = |cores: u32| {
        let words = ["training", "--drives=1", "--read=60GB/s", "--write=60GB/s"];
        let mut words = words.map(str::to_owned).to_vec();
        words.push(format!("--model={}", model.display()));
        words.extend(["--host-memory=3TiB", "--gpu-memory=0"].map(str::to_owned));
        words.extend([format!("--cores={cores}"), "--tflops=1000".into()]);
        words
    };
    let step_s = |cores: u32| {
        let words = words(cores);
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        words.push("--json");
        let report = json(&words);
        let machine = &report["rows"][0]["ours"]["machine"];
        assert_eq!(machine["host_memory_bytes"], 3u64 << 40, "{report}");
        assert_eq!(machine["cores"], cores);
        assert!(machine["gpu_memory_bytes"].is_null());
        assert_eq!(report["settings"]["host_memory"], 3u64 << 40);
        report["rows"][0]["ours"]["step_s"].as_f64().unwrap()
    };
    // Drives and computing are fast, so the optimizer is the bottleneck.
    let (one, many) = (step_s(1), step_s(64));
    assert!(one > 4.0 * many, "{one} s with one core, {many} s with 64");

    let output = program().args(words(32)).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let printed = "planned for: host memory 3072.0 GiB (given), 32 cores (given), no GPU (given)";
    assert!(text.contains(printed), "{text}");
    let output = program().args(&words(32)[..5]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(" cores (found here), "), "{text}");
}

#[test]
fn a_run_on_rate_limited_drives_takes_about_as_long_as_predicted() {
    if trainer().is_none() || cannot_make_testdrives() {
        return;
    }
    let _alone = alone();
    let dir = drive();
    let file = run_file(dir.path());
    let out = dir.path().join("out");
    let report = json(&[
        "training",
        "--run",
        &file,
        "--read=60MB/s",
        "--write=30MB/s",
        "--drives=2",
        "--steps=6",
        "--json",
        "--out",
        out.to_str().unwrap(),
    ]);
    let row = &report["rows"][0];
    assert_eq!(report["devices"].as_array().unwrap().len(), 2, "{report}");
    for way in ["read", "write"] {
        says_how_it_went(&row["drives_measured"]["figures"], way);
    }
    let number = |value: &Value| value.as_f64().unwrap();
    let (measured, predicted) = (
        number(&row["measured"]["step_s"]),
        number(&row["ours"]["step_s"]),
    );
    // The run is not faster than its drives, and is close to the prediction even on a busy machine.
    let writing_s = number(&row["measured"]["written_bytes"]) / 60e6;
    assert!(measured > 0.9 * writing_s, "{row}");
    // On a busy machine the compute time differs from step to step.
    assert!((0.25..1.5).contains(&(predicted / measured)), "{row}");
    let bytes = number(&row["measured"]["written_bytes"]) / number(&row["ours"]["written_bytes"]);
    assert!((0.9..1.1).contains(&bytes), "{row}");
    let svg = drawn(&out.join("training.json"));
    assert!(svg.contains("ours, measured") && svg.contains("DeepSpeed, predicted"));
}

#[test]
fn what_cannot_be_predicted_is_refused() {
    let dir = drive();
    let file = run_file(dir.path());
    for (args, why) in [
        (vec![], "RUN.toml"),
        (vec![&file[..], "--drives=0"], "--drives 0"),
        (vec![&file[..], "--tflops=0"], "--tflops 0"),
        (
            vec!["--run", &file[..], "--trainer=/no/such/trainer"],
            "no trainer at /no/such/trainer",
        ),
        (vec![&file[..], "--trainer=/no/such/trainer"], "--trainer"),
        (vec!["--run", &file[..], "--steps=2"], "5..="),
        // Options that would have no effect are refused.
        (vec!["--model", &file[..], "--set=a=1"], "--set"),
        (vec!["--model", &file[..], "--steps=5"], "--steps"),
        (vec![&file[..], "--loop-devices=2"], "--loop-devices"),
        (vec![&file[..], "--timeout=3"], "--timeout"),
        (vec![&file[..], "--seq-len=3"], "--seq-len"),
        (vec![&file[..], "--directory=.", "--read=1KB/s"], "--read"),
        (vec![&file[..], "--cores=0"], "1..="),
        (
            vec![&file[..], "--host-memory=much"],
            "does not begin with a number",
        ),
        // A training run uses this machine, so its description is refused.
        (
            vec!["--run", &file[..], "--host-memory=1g"],
            "--host-memory",
        ),
    ] {
        let printed = refused(&[&["training"], &args[..]].concat());
        assert!(printed.contains(why), "{args:?}: {printed}");
    }
    let in_memory = [
        "zero_optimization.offload_param={device = \"cpu\"}",
        "zero_optimization.offload_optimizer={device = \"cpu\"}",
        "offload={}",
    ];
    let mut training = program();
    training.args(["training", &file]);
    for set in in_memory {
        training.args(["--set", set]);
    }
    let output = training.output().unwrap();
    let printed = crate::harness::printed(&output);
    assert!(
        !output.status.success() && printed.contains("keeps no state on drives"),
        "{printed}"
    );
    // Refused before anything is measured.
    let output = program()
        .args(["training", &file, "--out"])
        .arg(Path::new(&file).join("out"))
        .output()
        .unwrap();
    let words = crate::harness::printed(&output);
    assert!(
        !output.status.success() && words.contains("creating "),
        "{words}"
    );
    assert!(output.stdout.is_empty());
    let printed = refused(&["training", "/no/such/run.toml"]);
    assert!(printed.contains("/no/such/run.toml"), "{printed}");
}

#[test]
fn the_picture_says_of_what_it_is() {
    let dir = crate::harness::drive();
    let model = dir.path().join("a<b>");
    std::fs::create_dir(&model).unwrap();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/models");
    std::fs::copy(models.join("Llama-2-7B.json"), model.join("config.json")).unwrap();
    let output = program()
        .current_dir(dir.path())
        .args(["training", "--model=a<b>/config.json", "--accumulation=2"])
        .args(["--host-memory=512GiB", "--cores=32", "--gpu-memory=80GiB"])
        .arg("--out")
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        crate::harness::printed(&output)
    );
    let svg = drawn(&dir.path().join("training.json"));
    for line in [
        "a&lt;b&gt;/config.json: 6738.4 M parameters, 32768 tokens per step in 2 micro-batches",
        "planned for: host memory 512.0 GiB (given), 32 cores",
        "rates: given: 6.20 GB/s read and 3.20 GB/s written per drive",
    ] {
        assert!(svg.contains(line), "{line}: {svg}");
    }
}
