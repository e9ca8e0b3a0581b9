//! Errors in the training data that these tests find: prompts are learned although only answers should be;
//! accumulation or ranks weigh tokens differently; a resumed run reads other windows; damaged tokens are
//! used. The data is conversations with unpredictable questions, and runs that divide the same samples
//! differently are compared.

use std::path::{Path, PathBuf};

use crate::harness::{Harness, Run, succeed};
use crate::random::Random;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/data")
        .join(name)
}

/// Makes conversations with random questions; each answer has one to forty words and depends only on the
/// question's first letter.
fn chats(count: u64) -> String {
    let mut random = Random::from_seed(1);
    let mut lines = String::new();
    for _ in 0..count {
        let letters = (0..12).map(|_| char::from(b'a' + random.below(26) as u8));
        let question: String = letters.collect();
        let answer = "the river ".repeat(1 + (random.below(4) * 4) as usize);
        lines += &format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{question}\"}}, {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        );
    }
    lines
}

/// Makes a run on chats with a tokenizer of 360 tokens.
pub(crate) fn chat_run(harness: &Harness, name: &str, sets: &[&str]) -> Run {
    let chats_path = harness.path("chats.jsonl");
    // Rewriting the file would change its identity, which is determined without reading it.
    if !chats_path.exists() {
        std::fs::write(&chats_path, chats(400)).expect("the chats are written");
    }
    let files = format!("data.files=[\"{}\"]", chats_path.display());
    let tokenizer = format!("data.tokenizer=\"{}\"", fixture("qwen").display());
    harness
        .run(name, sets)
        .with(&[files, tokenizer, "model.vocab_size=360".into()])
}

fn losses(run: &Run) -> Vec<f64> {
    let lines = run.metrics();
    let losses = lines.iter().map(|line| line["loss"].as_f64());
    losses.map(|loss| loss.expect("a loss")).collect()
}

#[test]
fn only_answers_are_learned_if_loss_on_says_so() {
    let harness = Harness::new();
    let sets = [
        "train.steps=40",
        "train.seq_len=64",
        "train_micro_batch_size_per_gpu=4",
        "optimizer.params.lr=2e-2",
        "data.validation_fraction=0.1",
        "train.eval_every=40",
    ];
    let answers = chat_run(&harness, "answers", &sets).with(&["data.loss_on=completions"]);
    let said = answers.train();
    assert!(said.contains("a text ends with <|im_end|>"), "{said}");
    assert!(
        said.contains("400 documents") && said.contains("of them count in the loss"),
        "{said}"
    );
    let learned = losses(&answers);
    assert!(learned[0] > 5.0, "{learned:?}");
    assert!(learned[39] < 0.6, "{learned:?}");
    let held_out = answers.metrics()[39]["eval_loss"].as_f64().unwrap();
    assert!(held_out < 0.6, "{held_out}");
    let all = chat_run(&harness, "all", &sets);
    all.train();
    let all = losses(&all);
    assert!(
        all[39] > 2.0 * learned[39],
        "questions cannot be learned: {all:?}"
    );
}

/// Trains on whole documents whose answers differ in length, so that micro-batches have very different
/// numbers of counted tokens.
#[test]
fn tokens_weigh_the_same_in_any_division_into_micro_batches_and_ranks() {
    let harness = Harness::new();
    let sets = [
        "train.steps=6",
        "train.seq_len=48",
        "train_batch_size=4",
        "data.loss_on=completions",
        "data.packing=documents",
    ];
    let whole = chat_run(&harness, "whole", &sets).with(&["train_micro_batch_size_per_gpu=4"]);
    whole.train();
    let parts = chat_run(&harness, "parts", &sets).with(&["train_micro_batch_size_per_gpu=1"]);
    parts.train();
    let ranks = chat_run(&harness, "ranks", &sets).with(&["train_micro_batch_size_per_gpu=1"]);
    succeed(ranks.launch(2));
    let expected = losses(&whole);
    let norms = |run: &Run| -> Vec<f64> {
        let lines = run.metrics();
        lines
            .iter()
            .map(|line| line["grad_norm"].as_f64().unwrap())
            .collect()
    };
    for (name, run) in [("parts", &parts), ("ranks", &ranks)] {
        let pairs = losses(run).into_iter().zip(&expected);
        let norms = norms(run).into_iter().zip(norms(&whole));
        for (step, ((loss, other), (norm, other_norm))) in pairs.zip(norms).enumerate() {
            assert!(
                (loss / other - 1.0).abs() < 1e-5,
                "{name}, step {step}: {loss}, {other}"
            );
            assert!(
                (norm / other_norm - 1.0).abs() < 1e-4,
                "{name}, step {step}: {norm}, {other_norm}"
            );
        }
    }
}

#[test]
fn a_resumed_run_reads_the_same_windows_without_tokenizing_again() {
    let harness = Harness::new();
    let sets = [
        "data.packing=documents",
        "data.loss_on=completions",
        "train.seq_len=32",
    ];
    let whole = chat_run(&harness, "whole", &sets);
    whole.train();
    let parts =
        |stop: &str| chat_run(&harness, "parts", &sets).with(&[format!("train.stop_after={stop}")]);
    parts("3").train();
    let tokens = || {
        let entries = std::fs::read_dir(harness.path("runs/parts/tokens")).unwrap();
        let files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    };
    let made = std::fs::metadata(tokens()).unwrap().modified().unwrap();
    parts("4").train();
    assert_eq!(
        std::fs::metadata(tokens()).unwrap().modified().unwrap(),
        made
    );
    // The next start detects and reports damage.
    let mut bytes = std::fs::read(tokens()).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(tokens(), bytes).unwrap();
    let said = parts("6").train();
    assert!(said.contains("are damaged at byte 4096"), "{said}");
    assert!(said.contains("resumed at step 4"), "{said}");
    assert!(
        !said.contains("note: the data was"),
        "the tokens have not changed: {said}"
    );
    let run = parts("6");
    assert_eq!(run.bits("loss"), whole.bits("loss"));
}

#[test]
fn unusable_data_is_refused_and_leaves_nothing() {
    let harness = Harness::new();
    let lines = harness.path("broken.jsonl");
    std::fs::write(&lines, "{\"text\": \"good\"}\n{\"text\": broken}\n").unwrap();
    let files = format!("data.files=[\"{}\"]", lines.display());
    let broken = harness.run("broken", &[&files]);
    let text = broken.refused();
    assert!(text.contains("broken.jsonl, line 2: is not JSON"), "{text}");
    assert!(!broken.dir.exists());
    let other = chat_run(&harness, "other", &["train.seq_len=32"]).with(&["model.vocab_size=300"]);
    let text = other.refused();
    assert!(
        text.contains("this is the tokenizer of another model"),
        "{text}"
    );
    assert!(!other.dir.exists());
}

#[test]
fn preview_data_shows_what_counts_in_the_loss() {
    let harness = Harness::new();
    let sets = [
        "data.packing=documents",
        "data.loss_on=completions",
        "train.seq_len=128",
    ];
    let run = chat_run(&harness, "run", &sets);
    let said = succeed(run.command("preview-data"));
    assert!(said.contains("400 documents"), "{said}");
    let sample = said.split("sample 0: 128 tokens, ").nth(1);
    let sample = sample.expect("a sample");
    let marked = sample.split('\u{27E6}').nth(1).expect("an answer");
    let marked = marked.split('\u{27E7}').next().expect("its end");
    assert!(
        marked.starts_with("the river") && marked.contains("<|im_end|>"),
        "{sample}"
    );
    assert!(sample.contains("user\n"), "{sample}");
    assert!(run.dir.join("tokens").exists());
}

#[test]
fn answers_alone_count_in_fp16_too() {
    let harness = Harness::new();
    let sets = [
        "train.steps=12",
        "train.seq_len=64",
        "train_micro_batch_size_per_gpu=2",
        "gradient_accumulation_steps=2",
        "data.loss_on=completions",
    ];
    let [wide, narrow] = ["fp32", "fp16"].map(|name| {
        let fp16 = format!("fp16.enabled={}", name == "fp16");
        let run =
            chat_run(&harness, name, &sets).with(&[fp16, "fp16.initial_scale_power=8".into()]);
        run.train();
        losses(&run)
    });
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert!((wide / narrow - 1.0).abs() < 0.01, "{wide}, {narrow}");
    }
    assert!(wide[11] < wide[0] - 0.5, "{wide:?}");
}

/// A text as bytes, as token ids and as records of them gives the same tokens and therefore the same run,
/// without a tokenizer.
#[test]
fn token_ids_train_like_the_text_that_they_encode() {
    let harness = Harness::new();
    let text = std::fs::read(harness.path("text")).unwrap();
    let ids: Vec<u8> = text
        .iter()
        .flat_map(|byte| u16::from(*byte).to_le_bytes())
        .collect();
    std::fs::write(harness.path("ids.u16"), ids).unwrap();
    let numbers: Vec<u32> = text.iter().map(|byte| u32::from(*byte)).collect();
    std::fs::write(
        harness.path("ids.jsonl"),
        format!("{{\"input_ids\": {numbers:?}}}\n"),
    )
    .unwrap();
    let of = |file: &str| {
        let files = format!("data.files=[\"{}\"]", harness.path(file).display());
        let run = harness.run(
            &file.replace('.', "-"),
            &["data.shuffle=false", "train.steps=3"],
        );
        let run = run.with(&[files]);
        let said = run.train();
        assert_eq!(
            file != "text",
            said.contains("token ids from the data"),
            "{said}"
        );
        (run.bits("loss"), run)
    };
    let (expected, run) = of("text");
    assert_eq!(of("ids.u16").0, expected);
    assert_eq!(of("ids.jsonl").0, expected);
    let shuffled = run.with(&["data.shuffle=true"]);
    let mut again = shuffled.command("train");
    again.arg("--fresh");
    succeed(again);
    assert_ne!(shuffled.bits("loss"), expected);
}
