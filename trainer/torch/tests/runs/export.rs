//! An export is complete or not there at all, and an error says what prevents it.
//!
//! Errors that these tests find: the weights of another step are exported; the tokenizer is missing; a number
//! that the type cannot represent becomes infinite silently; an existing directory is overwritten; the run is
//! read during training. An export that is killed: points.rs.

use crate::data::{chat_run, fixture as data_fixture};
use crate::harness::{Harness, Run, finish, spawn, until};
use crate::model_dir::{
    FILE, copy, export, export_refused, fixture, moving_run, still_run, tensors,
};

#[test]
fn a_run_that_cannot_be_exported_is_refused_with_the_reason() {
    let harness = Harness::new();
    let run = moving_run(&harness, "run", &fixture("llama"));
    let out = harness.path("out");
    let text = export_refused(&run, &out, &[]);
    assert!(
        text.contains("there is no run in ") && text.contains("run.json"),
        "{text}"
    );
    run.train();
    std::fs::create_dir(&out).unwrap();
    let text = export_refused(&run, &out, &[]);
    assert!(text.contains("out already exists"), "{text}");
    std::fs::remove_dir(&out).unwrap();
    std::fs::remove_dir_all(run.dir.join("checkpoints")).unwrap();
    let text = export_refused(&run, &out, &[]);
    assert!(text.contains("ended without a checkpoint"), "{text}");
    let record = run.dir.join("run.json");
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, text.replace("fp32", "fp7")).unwrap();
    let text = export_refused(&run, &out, &[]);
    assert!(text.contains("its number type is fp7"), "{text}");
    std::fs::write(&record, "{").unwrap();
    assert!(export_refused(&run, &out, &[]).contains("run.json is damaged"));
    assert!(!out.exists());
}

#[test]
fn an_export_without_the_runs_store_names_the_missing_file() {
    let harness = Harness::new();
    let run = moving_run(&harness, "run", &fixture("llama")).with(&harness.nvme());
    run.train();
    let [file] = harness.store_files().try_into().expect("one store file");
    let moved = harness.path("moved.tiles");
    std::fs::rename(&file, &moved).unwrap();
    let out = harness.path("out");
    let text = export_refused(&run, &out, &[]);
    let says = format!(
        "keeps its state in {}, which does not exist",
        file.display()
    );
    assert!(text.contains(&says), "{text}");
    std::fs::rename(&moved, &file).unwrap();
    export(&run, &out, &[]);
}

#[test]
fn a_number_beyond_fp16_is_named_and_refused() {
    let harness = Harness::new();
    let dir = copy(&harness, "llama", "model");
    let mut bytes = std::fs::read(dir.join(FILE)).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&70000.0f32.to_le_bytes());
    std::fs::write(dir.join(FILE), &bytes).unwrap();
    let name = {
        let header = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let end = |view: &safetensors::tensor::TensorView| view.data().as_ptr_range().end;
        let last = header
            .tensors()
            .into_iter()
            .max_by_key(|(_, view)| end(view));
        last.unwrap().0
    };
    let run = still_run(&harness, "run", &dir);
    run.train();
    let out = harness.path("out");
    let text = export_refused(&run, &out, &["--dtype", "fp16"]);
    let expected = format!(
        "tensor {name} contains 70000, which fp16 cannot represent: export with --dtype bf16 or fp32"
    );
    assert!(text.contains(&expected), "{text}");
    assert!(!out.exists());
    export(&run, &out, &["--dtype", "bf16"]);
}

#[test]
fn a_run_is_not_exported_while_it_trains() {
    let harness = Harness::new();
    let run = moving_run(&harness, "run", &fixture("llama")).with(&["train.steps=100000"]);
    let metrics = run.dir.join("metrics.jsonl");
    let mut child = until(spawn(run.command("train")), "it made a step", || {
        std::fs::read_to_string(&metrics).is_ok_and(|lines| lines.ends_with('\n'))
    });
    let text = export_refused(&run, &harness.path("out"), &[]);
    child.kill().expect("killed");
    drop(finish(child));
    assert!(
        text.contains("only in the memory of the running trainer"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_is_exported_as_it_was() {
    let harness = Harness::new();
    let run = moving_run(&harness, "run", &fixture("llama")).with(&harness.nvme());
    let run = run.with(&["train.checkpoint_every=1"]);
    run.train();
    let short = moving_run(&harness, "short", &fixture("llama")).with(&["train.steps=1"]);
    short.train();
    let exported = |run: &Run, name: &str, more: &[&str]| {
        export(run, &harness.path(name), more);
        tensors(&harness.path(name))
    };
    let first = exported(&run, "first", &["--checkpoint", "1"]);
    assert!(first == exported(&short, "short-out", &[]));
    assert!(first != exported(&run, "newest", &[]));
    let text = export_refused(&run, &harness.path("none"), &["--checkpoint", "7"]);
    assert!(text.contains("7"), "{text}");
}

#[test]
fn an_export_has_the_tokenizer_that_the_run_had() {
    let harness = Harness::new();
    let run = chat_run(&harness, "run", &["train.steps=1"]);
    run.train();
    let out = harness.path("out");
    export(&run, &out, &[]);
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let theirs = std::fs::read(data_fixture("qwen").join(file)).unwrap();
        assert!(std::fs::read(out.join(file)).unwrap() == theirs, "{file}");
    }
}

#[test]
fn an_export_writes_conversations_as_the_run_did() {
    let harness = Harness::new();
    let exported = |name: &str, more: &[&str]| {
        chat_run(&harness, "run", more).train();
        let out = harness.path(name);
        export(&chat_run(&harness, "run", more), &out, &[]);
        let read = |file: &str| std::fs::read_to_string(out.join(file)).expect("a file");
        let generation: serde_json::Value =
            serde_json::from_str(&read("generation_config.json")).expect("JSON");
        (
            read("chat_template.jinja"),
            generation["eos_token_id"].clone(),
        )
    };
    // The tokenizer's <|im_end|>, which ends an answer, is token 2.
    let named = ["data.chat_template=\"chatml\"", "train.stop_after=1"];
    let (template, ends) = exported("named", &named);
    assert!(template.contains("<|im_start|>"), "{template}");
    assert_eq!(ends, serde_json::json!([2]));
    // A file of one's own, on resume.
    let own = harness.path("own.jinja");
    let text = "{% for message in messages %}{{ message.role + ': ' + message.content + '<|endoftext|>' }}{% endfor %}";
    std::fs::write(&own, text).expect("a template");
    let own = format!("data.chat_template=\"{}\"", own.display());
    let (template, ends) = exported("own", &[&own, "train.stop_after=2"]);
    assert_eq!(template, text);
    assert_eq!(ends, serde_json::json!([2, 0]));
    // The tokenizer's own again.
    let run = chat_run(&harness, "run", &["train.stop_after=3"]);
    run.train();
    let out = harness.path("tokenizer's");
    export(&run, &out, &[]);
    let theirs = data_fixture("qwen").join("chat_template.jinja");
    let theirs = std::fs::read_to_string(theirs).expect("a template");
    assert_eq!(
        std::fs::read_to_string(out.join("chat_template.jinja")).expect("a template"),
        theirs
    );
    assert!(!out.join("generation_config.json").exists());
}
