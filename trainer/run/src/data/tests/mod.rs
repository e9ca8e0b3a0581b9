//! Tests with texts whose every token is known. Errors that they find: wrong contents of a window, wrong
//! validation tokens, wrong tokens in the loss, a cache used after its source or its bytes changed, two
//! trainers tokenizing at once.

mod cached;
mod inputs;
mod told;

use std::path::{Path, PathBuf};

use super::show::{Marks, show};
use super::*;
use crate::config::{DataFile, DataSettings, Fraction, LossOn, OnBadRecord};

fn entry(path: &Path) -> DataFile {
    DataFile::new(path.into())
}

/// Data in its own directory.
struct Harness {
    dir: tempfile::TempDir,
    settings: DataSettings,
    seq_len: usize,
    evaluates: bool,
    vocab_size: u64,
    said: std::cell::RefCell<Vec<String>>,
}

impl Harness {
    /// Makes data from one file.
    fn new(name: &str, content: impl AsRef<[u8]>, seq_len: usize) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        std::fs::write(&path, content).expect("written");
        Self {
            dir,
            settings: DataSettings {
                files: vec![entry(&path)],
                eval_files: Vec::new(),
                validation_fraction: Fraction::new(0.0).expect("a share"),
                tokenizer: None,
                chat_template: None,
                packing: Some(Packing::Concatenate),
                cross_document_attention: true,
                loss_on: LossOn::All,
                shuffle: true,
                on_bad_record: OnBadRecord::Error,
                cache: None,
            },
            seq_len,
            evaluates: false,
            vocab_size: 256,
            said: Default::default(),
        }
    }

    fn holding_out(mut self, share: f64) -> Self {
        self.settings.validation_fraction = Fraction::new(share).expect("a share");
        self.evaluates = share > 0.0;
        self
    }

    fn with(mut self, change: impl FnOnce(&mut DataSettings)) -> Self {
        change(&mut self.settings);
        self
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("run/tokens")
    }

    fn corpus(&self) -> Result<Corpus, DataError> {
        let frame = Frame {
            model_dir: None,
            vocab_size: self.vocab_size,
            seq_len: self.seq_len,
            evaluates: self.evaluates,
        };
        Corpus::find(&self.settings, &frame)
    }

    fn open(&self) -> Result<Data, DataError> {
        let corpus = self.corpus()?;
        let mut say = |line| self.said.borrow_mut().push(line);
        corpus.prepare_in(&self.cache(), true, 2, &mut say)?;
        Data::open(&corpus, &self.cache(), 7)
    }

    fn refused(&self) -> String {
        match self.open() {
            Err(error) => error.to_string(),
            Ok(data) => panic!("it was taken: {}", data.describe()),
        }
    }

    fn token_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.cache()).expect("the cache's directory");
        entries
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/data")
        .join(name)
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i % 251) as u8).collect()
}

/// Returns each window's inputs as text, and its targets with a dot for those that do not count.
fn texts(windows: &Windows, seq_len: usize) -> Vec<(String, String)> {
    let text = |ids: &[i64]| -> String {
        let letter = |id: &i64| match *id {
            IGNORED => '.',
            0 => '_',
            id => char::from(id as u8),
        };
        ids.iter().map(letter).collect()
    };
    let rows = windows.inputs.chunks(seq_len);
    rows.zip(windows.targets.chunks(seq_len))
        .map(|(inputs, targets)| (text(inputs), text(targets)))
        .collect()
}

fn all_windows(data: &Data, seq_len: usize) -> Vec<(String, String)> {
    let windows = data.samples(0, data.windows() as usize).unwrap();
    let mut found = texts(&windows, seq_len);
    found.sort();
    found
}

#[test]
fn targets_are_inputs_shifted_by_one() {
    let data = Harness::new("text", bytes(100), 9).open().unwrap();
    let windows = data.samples(3, 4).unwrap();
    assert_eq!(windows.inputs.len(), 4 * 9);
    for row in 0..4 {
        assert_eq!(
            windows.inputs[row * 9 + 1..row * 9 + 9],
            windows.targets[row * 9..row * 9 + 8]
        );
    }
}

#[test]
fn an_epoch_has_every_window_once_and_the_next_one_another_order() {
    let data = Harness::new("text", bytes(1000), 9).open().unwrap();
    let windows = data.windows();
    assert_eq!(windows, 111);
    let starts = |first: u64| -> Vec<i64> {
        (0..windows)
            .map(|i| data.samples(first + i, 1).unwrap().inputs[0])
            .collect()
    };
    let (mut one, mut two) = (starts(0), starts(windows));
    assert_ne!(one, two);
    one.sort_unstable();
    two.sort_unstable();
    assert_eq!(one, two);
    one.dedup();
    assert_eq!(
        one.len() as u64,
        windows,
        "each window starts with a byte of its own here"
    );
}

#[test]
fn validation_text_is_never_trained_on() {
    let harness = Harness::new("text", bytes(240), 9).holding_out(0.25);
    let data = harness.open().unwrap();
    assert_eq!((data.windows(), data.holdout_windows()), (19, 6));
    let trained = (0..data.windows())
        .flat_map(|i| data.samples(i, 1).unwrap().targets)
        .max();
    let held = (0..data.holdout_windows())
        .flat_map(|w| data.holdout(w, 1).unwrap().inputs)
        .min();
    assert!(trained < held);
    assert_eq!(data.holdout(6, 1).unwrap(), data.holdout(0, 1).unwrap());
}

#[test]
fn whole_documents_are_reserved_for_validation_if_there_are_several() {
    let lines: Vec<String> = ('a'..='j')
        .map(|c| format!("{{\"text\": \"{}\"}}", c.to_string().repeat(8)))
        .collect();
    let data = Harness::new("a.jsonl", lines.join("\n"), 8)
        .holding_out(0.2)
        .open()
        .unwrap();
    let held = texts(&data.holdout(0, 2).unwrap(), 8).concat_inputs();
    assert_eq!(held.trim_end(), "eeeeeeee\njjjjjjj");
    let trained = all_windows(&data, 8).concat_inputs();
    assert!(!trained.contains(['e', 'j']), "{trained}");
    assert!(trained.contains("aaaa") && trained.contains('i'));
}

/// Documents between bars; a dot stands for a target that does not count.
fn with_documents(data: &Data, seq_len: usize) -> Vec<String> {
    let mut found: Vec<String> = (0..data.windows())
        .map(|sample| {
            let windows = data.samples(sample, 1).unwrap();
            let (inputs, targets) = texts(&windows, seq_len).remove(0);
            let mut text = String::new();
            for (at, letter) in inputs.chars().enumerate() {
                if windows.documents.contains(&at) {
                    text.push('|');
                }
                text.push(letter);
            }
            format!("{text} {targets}")
        })
        .collect();
    found.sort();
    found
}

#[test]
fn windows_say_where_documents_begin_unless_attention_crosses_them() {
    let lines = ["aaa", "bbbbbb", "c", "ddddddddddddddd"];
    let lines = lines.map(|word| format!("{{\"text\": \"{word}\"}}"));
    let of = |packing, cross| {
        let data = Harness::new("a.jsonl", lines.join("\n"), 9)
            .with(|settings| settings.packing = Some(packing))
            .with(|settings| settings.cross_document_attention = cross)
            .open()
            .unwrap();
        (with_documents(&data, 9), data.describe())
    };
    let (concatenated, _) = of(Packing::Concatenate, false);
    // The first token of a document is not a target: nothing of its document precedes it.
    assert_eq!(
        concatenated,
        [
            "aaa\n|bbbbb aa\n.bbbbb",
            "b\n|c\n|ddddd \n.\n.ddddd",
            "ddddddddd ddddddddd"
        ]
    );
    let (whole, said) = of(Packing::Documents, false);
    assert_eq!(
        whole,
        [
            "aaa\n|c\n|___ aa\n.\n....",
            "bbbbbb\n|__ bbbbb\n...",
            "dddddd\n|__ ddddd\n...",
            "ddddddddd ddddddddd",
        ]
    );
    assert!(
        said.contains("1 document longer than a window (cut)"),
        "{said}"
    );
    let (crossed, _) = of(Packing::Concatenate, true);
    assert_eq!(
        crossed,
        [
            "aaa\nbbbbb aa\nbbbbbb",
            "b\nc\nddddd \nc\ndddddd",
            "ddddddddd ddddddddd"
        ]
    );
    // In a micro-batch, starts are counted over all rows.
    let data = Harness::new("a.jsonl", lines.join("\n"), 9)
        .with(|settings| settings.cross_document_attention = false)
        .with(|settings| settings.shuffle = false)
        .open()
        .unwrap();
    assert_eq!(data.samples(0, 3).unwrap().documents, [4, 11, 13]);
}

#[test]
fn conversations_and_completions_stay_whole_by_default() {
    let by_default = |name: &str, content: &str| {
        let harness = Harness::new(name, content, 10).with(|settings| settings.packing = None);
        harness.corpus().unwrap().packing
    };
    assert_eq!(by_default("a.jsonl", PAIRS), Packing::Documents);
    assert_eq!(by_default("a.txt", "plain words"), Packing::Concatenate);
    assert_eq!(
        by_default("a.jsonl", r#"{"text": "a"}"#),
        Packing::Concatenate
    );
}

/// With the settings of `configs/chat.toml`.
#[test]
fn a_hundred_short_conversations_are_enough_to_train_and_evaluate() {
    let line = r#"{"messages": [{"role": "user", "content": "the old clock"}, {"role": "assistant", "content": "waits for a grey cat"}]}"#;
    let mut harness = Harness::new("chats.jsonl", format!("{line}\n").repeat(100), 4096)
        .holding_out(0.02)
        .with(|settings| {
            settings.tokenizer = Some(fixture("qwen"));
            settings.packing = None;
            settings.cross_document_attention = false;
            settings.loss_on = LossOn::Completions;
        });
    harness.vocab_size = 360;
    let data = harness.open().unwrap();
    assert_eq!((data.windows(), data.holdout_windows()), (2, 1));
    let said = data.describe();
    // Padding is not counted.
    assert_eq!(data.tokens(), 5300);
    assert!(
        said.starts_with("1 file (messages), 100 documents, 5300 tokens, "),
        "{said}"
    );
    let held = data.holdout(0, 1).unwrap();
    assert_eq!(
        held.documents.len(),
        2,
        "the second conversation and the padding"
    );
    // More samples than there are windows begin another epoch.
    assert_eq!(data.samples(0, 16).unwrap().inputs.len(), 16 * 4096);
}

#[test]
fn earlier_answers_that_a_template_changes_are_documents_of_their_own() {
    let line = r#"{"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "a!b"}, {"role": "user", "content": "and"}, {"role": "assistant", "content": "c!d"}]}"#;
    let mut harness = Harness::new("a.jsonl", line, 256);
    let template = harness.dir.path().join("late.jinja");
    let source = "{% for m in messages %}{{ m.role[0] + '\\n' }}{{ m.content if loop.last else m.content.split('!')[-1] }};{% endfor %}{% if add_generation_prompt %}{{ 'a\\n' }}{% endif %}";
    std::fs::write(&template, source).unwrap();
    harness = harness.with(|settings| {
        settings.tokenizer = Some(fixture("qwen"));
        settings.chat_template = Some(template);
        settings.packing = Some(Packing::Documents);
        settings.cross_document_attention = false;
        settings.loss_on = LossOn::Completions;
    });
    harness.vocab_size = 360;
    let corpus = harness.corpus().unwrap();
    let data = harness.open().unwrap();
    let said = data.describe();
    assert!(
        said.contains("2 documents") && said.contains("; 1 document for earlier answers, "),
        "{said}"
    );
    let shown = show(&corpus, &data, 1, Marks::Brackets).unwrap();
    let first = "u\nwhy;a\n\u{27E6}a!b;\u{27E7}\n[next document]\n";
    let whole = "u\nwhy;a\nb;u\nand;a\n\u{27E6}c!d;\u{27E7}";
    assert!(shown.contains(&format!("{first}{whole}")), "{shown}");
}

#[test]
fn empty_answers_are_counted() {
    let lines =
        ["", "b", " "].map(|answer| format!(r#"{{"prompt": "a", "completion": "{answer}"}}"#));
    let said = Harness::new("a.jsonl", lines.join("\n"), 4)
        .open()
        .unwrap()
        .describe();
    assert!(
        said.contains("; 2 documents with an empty answer, which the model learns to give"),
        "{said}"
    );
}

#[test]
fn a_file_may_be_used_several_times_or_in_part() {
    let letters = |from: char| -> String {
        let lines = (0..4u8).map(|i| char::from(from as u8 + i).to_string().repeat(3));
        lines
            .map(|word| format!("{{\"text\": \"{word}\"}}\n"))
            .collect()
    };
    let harness = Harness::new("a.jsonl", letters('a'), 4);
    let other = harness.dir.path().join("b.jsonl");
    std::fs::write(&other, letters('e')).unwrap();
    let inputs = |harness: &Harness| {
        let data = harness.open().unwrap();
        let mut found: Vec<String> = all_windows(&data, 4).into_iter().map(|row| row.0).collect();
        found
            .iter_mut()
            .for_each(|text| *text = text.trim_end().into());
        found.join(" ")
    };
    let harness = harness.with(|settings| {
        settings.packing = Some(Packing::Documents);
        settings.files.push(DataFile {
            weight: 0.5,
            ..entry(&other)
        });
        settings.files[0].weight = 2.5;
    });
    // Each of a to d twice and every second a third time; every second of e to h.
    assert_eq!(
        inputs(&harness),
        "aaa aaa bbb bbb bbb ccc ccc ddd ddd ddd fff hhh"
    );
    let limited = harness.with(|settings| {
        settings.files[0] = DataFile {
            max_samples: Some(3),
            ..settings.files[0].clone()
        };
        settings.files[1] = DataFile {
            max_samples: Some(1),
            ..entry(&other)
        };
    });
    assert_eq!(inputs(&limited), "aaa aaa bbb bbb bbb ccc ccc eee");
    // A document is either learned or held out, however often it is used.
    let held = limited.holding_out(0.25);
    let data = held.open().unwrap();
    let of = |windows: Windows| texts(&windows, 4).concat_inputs();
    assert_eq!(
        of(data.holdout(0, data.holdout_windows() as usize).unwrap()),
        "eee\n"
    );
    let trained = of(data.samples(0, data.windows() as usize).unwrap());
    assert!(
        !trained.contains('e') && trained.contains("aaa"),
        "{trained}"
    );
    let text = Harness::new("text", "words ".repeat(20), 4)
        .holding_out(0.2)
        .with(|settings| settings.files[0].weight = 2.0)
        .refused();
    assert!(text.contains("used several times"), "{text}");
}

trait ConcatInputs {
    fn concat_inputs(&self) -> String;
}

impl ConcatInputs for Vec<(String, String)> {
    fn concat_inputs(&self) -> String {
        self.iter().map(|(inputs, _)| inputs.as_str()).collect()
    }
}

#[test]
fn evaluation_may_use_its_own_files() {
    let harness = Harness::new("text", "x".repeat(40), 8);
    let eval = harness.dir.path().join("eval.txt");
    std::fs::write(&eval, "y".repeat(20)).unwrap();
    let mut harness = harness.with(|settings| settings.eval_files = vec![entry(&eval)]);
    harness.evaluates = true;
    let data = harness.open().unwrap();
    assert_eq!((data.windows(), data.holdout_windows()), (4, 2));
    assert_eq!(texts(&data.holdout(0, 1).unwrap(), 8)[0].0, "yyyyyyyy");
    assert_eq!(harness.token_files().len(), 2);
    let before = data.fingerprint();
    std::fs::write(&eval, "z".repeat(20)).unwrap();
    assert_ne!(harness.open().unwrap().fingerprint(), before);
    std::fs::write(&eval, "short").unwrap();
    let text = harness.refused();
    assert!(text.contains("evaluation text has 5 tokens"), "{text}");
}

#[test]
fn a_text_shorter_than_a_window_is_refused_and_leaves_nothing() {
    let harness = Harness::new("text", bytes(9), 9);
    let text = harness.refused();
    assert!(
        text.contains("the training text has 9 tokens")
            && text.contains("train.seq_len = 9 tokens needs 10"),
        "{text}"
    );
    assert!(!harness.dir.path().join("run").exists());
    assert!(Harness::new("text", bytes(10), 9).open().is_ok());
    let text = Harness::new("text", bytes(40), 9)
        .holding_out(0.2)
        .refused();
    assert!(text.contains("the validation text has 8 tokens"), "{text}");
}

const PAIRS: &str = r#"{"prompt": "ask1 ", "completion": "ans1"}
{"prompt": "ask2 ", "completion": "ans2"}
{"prompt": "longer ask3 ", "completion": "answer3"}
"#;

#[test]
fn only_completions_count_if_loss_on_says_so() {
    let harness = Harness::new("a.jsonl", PAIRS, 10);
    let all = all_windows(&harness.open().unwrap(), 10);
    assert!(all.contains(&("ask1 ans1\n".into(), "sk1 ans1\na".into())));
    let harness = harness.with(|settings| settings.loss_on = LossOn::Completions);
    let data = harness.open().unwrap();
    assert!(data.masked());
    let some = all_windows(&data, 10);
    assert!(
        some.contains(&("ask1 ans1\n".into(), "....ans1\n.".into())),
        "{some:?}"
    );
    assert_eq!(some.len() + 1, all.len(), "a window of prompts is left out");
    let texts = Harness::new("text", "no completions", 4)
        .with(|settings| settings.loss_on = LossOn::Completions);
    let text = texts.refused();
    assert!(
        text.contains("data.loss_on: \"completions\" needs data with completions"),
        "{text}"
    );
    // A conversation without an answer.
    let asked = r#"{"messages": [{"role": "user", "content": "the old clock waits"}]}"#;
    let mut harness = Harness::new("a.jsonl", asked, 4).with(|settings| {
        settings.loss_on = LossOn::Completions;
        settings.tokenizer = Some(fixture("qwen"));
    });
    harness.vocab_size = 360;
    let text = harness.refused();
    assert!(
        text.contains("no token of the training text counts in the loss"),
        "{text}"
    );
}

#[test]
fn whole_documents_fill_windows_and_the_rest_does_not_count() {
    let words = ["aaaa", "bbbbbb", "cc", "ddddddddddddddd"];
    let lines = words.map(|word| format!("{{\"text\": \"{word}\"}}"));
    let harness = Harness::new("a.jsonl", lines.join("\n"), 9)
        .with(|settings| settings.packing = Some(Packing::Documents));
    let data = harness.open().unwrap();
    let mut expected = [
        // Each document has its line end: 5 + 3, 7, and 16, of which 10 fill a window and the rest starts
        // with the last of these.
        ("aaaa\ncc\n_", "aaa\n.c\n.."),
        ("bbbbbb\n__", "bbbbb\n..."),
        ("ddddddddd", "ddddddddd"),
        ("dddddd\n__", "ddddd\n..."),
    ]
    .map(|(inputs, targets)| (inputs.to_owned(), targets.to_owned()));
    expected.sort();
    assert_eq!(all_windows(&data, 9), expected);
    // Every transition within a document counts exactly once.
    let counted: usize = expected
        .iter()
        .map(|(_, targets)| targets.chars().filter(|c| *c != '.').count())
        .sum();
    assert_eq!(counted, 4 + 2 + 6 + 15);
}

#[test]
fn packing_loses_no_document_with_any_number_of_open_windows() {
    let mut lines = String::new();
    let mut total = 0;
    for index in 0..2000usize {
        let length = 1 + index * 7919 % 60;
        total += length;
        lines += &format!("{{\"text\": \"{}\"}}\n", "x".repeat(length));
    }
    let harness = Harness::new("a.jsonl", lines, 63)
        .with(|settings| settings.packing = Some(Packing::Documents))
        .holding_out(0.1);
    let data = harness.open().unwrap();
    let count = |windows: &Windows| {
        let targets = windows.targets.iter();
        targets.filter(|target| **target != IGNORED).count()
    };
    let trained = count(&data.samples(0, data.windows() as usize).unwrap());
    let held = count(&data.holdout(0, data.holdout_windows() as usize).unwrap());
    assert_eq!(trained + held, total, "a transition for each letter");
    assert!(held * 8 < total && total < held * 12, "{held} of {total}");
    let positions = (data.windows() + data.holdout_windows()) as usize * 63;
    assert!(positions < total * 115 / 100, "{positions} for {total}");
}
