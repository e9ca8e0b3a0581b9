//! Tests with texts whose every token is known. Errors that they find: wrong contents of a window, wrong
//! validation tokens, wrong tokens in the loss, a cache used after its source or its bytes changed, two
//! trainers tokenizing at once.

use std::path::{Path, PathBuf};

use super::*;
use crate::config::{DataSettings, Fraction, LossOn};

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
                files: vec![path],
                eval_files: Vec::new(),
                validation_fraction: Fraction::new(0.0).expect("a share"),
                tokenizer: None,
                chat_template: None,
                packing: Packing::Concatenate,
                loss_on: LossOn::All,
                shuffle: true,
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
        .join("tests/fixtures/data")
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
    let mut harness = harness.with(|settings| settings.eval_files = vec![eval.clone()]);
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
    assert_eq!(some.len(), all.len());
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
    assert!(text.contains("none of the"), "{text}");
}

#[test]
fn whole_documents_fill_windows_and_the_rest_does_not_count() {
    let words = ["aaaa", "bbbbbb", "cc", "ddddddddddddddd"];
    let lines = words.map(|word| format!("{{\"text\": \"{word}\"}}"));
    let harness = Harness::new("a.jsonl", lines.join("\n"), 9)
        .with(|settings| settings.packing = Packing::Documents);
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
        .with(|settings| settings.packing = Packing::Documents)
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

#[test]
fn tokens_are_made_once_and_recreated_when_a_file_changes() {
    let harness = Harness::new("text", bytes(1000), 9);
    let first = harness.open().unwrap();
    let files = harness.token_files();
    assert_eq!(files.len(), 1);
    let made = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    let second = harness.open().unwrap();
    assert_eq!(second.samples(5, 3).unwrap(), first.samples(5, 3).unwrap());
    let now = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    assert_eq!(now, made);
    std::fs::write(&harness.settings.files[0], bytes(2000)).unwrap();
    let third = harness.open().unwrap();
    assert_eq!(third.tokens(), 2000);
    assert_ne!(third.fingerprint(), first.fingerprint());
    assert_eq!(harness.token_files().len(), 1, "the old one went");
    // Data that is already open still reads the old file.
    assert_eq!(second.samples(5, 3).unwrap(), first.samples(5, 3).unwrap());
    assert!(harness.said.borrow().is_empty());
}

#[test]
fn a_damaged_cache_is_detected_reported_and_recreated() {
    let harness = Harness::new("text", bytes(200_000), 9);
    let good = harness.open().unwrap();
    let path = harness.token_files().remove(0);
    let whole = std::fs::read(&path).unwrap();
    let last = whole.len() - 1;
    for at in [0, 9, 40, 127, 4096, 4096 + 70_000, 4096 + 199_999, last] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(&path, &damaged).unwrap();
        let again = harness
            .open()
            .unwrap_or_else(|error| panic!("byte {at}: {error}"));
        assert_eq!(again.samples(0, 99).unwrap(), good.samples(0, 99).unwrap());
        let said = harness.said.borrow_mut().pop();
        let said = said.unwrap_or_else(|| panic!("no note about byte {at}"));
        assert!(
            said.contains("are damaged at byte") && said.contains("will be recreated"),
            "{said}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), whole, "byte {at}");
    }
    for length in [0, 100, 4096, 100_000, last] {
        std::fs::write(&path, &whole[..length]).unwrap();
        harness
            .open()
            .unwrap_or_else(|error| panic!("{length} bytes: {error}"));
        assert!(harness.said.borrow_mut().pop().is_some(), "{length} bytes");
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn damage_after_the_start_is_an_error() {
    use std::os::unix::fs::FileExt;
    let harness = Harness::new("text", bytes(200_000), 9);
    let data = harness.open().unwrap();
    let path = harness.token_files().remove(0);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[255], 4096 + 150_000).unwrap();
    let failed = (0..data.windows()).find_map(|sample| data.samples(sample, 1).err());
    let text = failed.expect("one of the windows lies there").to_string();
    assert!(text.contains("damaged at byte 135168"), "{text}");
    assert!(text.contains("Start the run again"), "{text}");
}

#[test]
fn one_process_tokenizes_while_the_others_wait() {
    let harness = Harness::new("text", bytes(300_000), 9);
    let (settings, cache) = (harness.settings.clone(), harness.cache());
    let all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let frame = Frame {
                        model_dir: None,
                        vocab_size: 256,
                        seq_len: 9,
                        evaluates: false,
                    };
                    let corpus = Corpus::find(&settings, &frame).unwrap();
                    corpus.prepare_in(&cache, false, 1, &mut |_| {}).unwrap();
                    Data::open(&corpus, &cache, 7).unwrap().fingerprint()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(all.iter().all(|print| *print == all[0]));
    assert_eq!(harness.token_files().len(), 1, "no partial file is left");
}

fn refused_lines(content: &[u8], parts: &[&str]) {
    let text = Harness::new("data.jsonl", content, 4).refused();
    for part in parts {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn an_invalid_line_is_reported_with_its_number() {
    let good = "{\"text\": \"words enough\"}\n";
    let after = |broken: &str| format!("{good}\n{good}{broken}\n{good}");
    let named = "data.jsonl, line 4: ";
    for (broken, part) in [
        (
            "{\"text\": \"open",
            "is not JSON: EOF while parsing a string",
        ),
        ("{\"text\": 1}", "\"text\" is a number"),
        (
            "{'text': 'x'}",
            "is not JSON: key must be a string at column 2",
        ),
        ("[1, 2]", "is not an object"),
        ("{\"body\": \"x\"}", "has \"body\", but neither \"text\""),
        (
            "{\"prompt\": \"a\", \"completion\": \"b\"}",
            "a prompt with its completion after a text",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
            "a conversation after a text",
        ),
    ] {
        refused_lines(after(broken).as_bytes(), &[named, part]);
    }
    let mut bytes = after("X").into_bytes();
    let at = bytes.iter().position(|byte| *byte == b'X').unwrap();
    bytes[at] = 0xFF;
    refused_lines(&bytes, &[named, "not UTF-8 from byte 1 of the line"]);
    refused_lines(b"\n \n", &["the training text has 0 tokens"]);
    let conversation = b"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}";
    refused_lines(
        conversation,
        &["data.tokenizer: conversations need a tokenizer"],
    );
    let deep = format!("{{\"text\": {}", "[".repeat(100_000));
    refused_lines(deep.as_bytes(), &["line 1: is not JSON: recursion limit"]);
}

#[test]
fn a_file_may_begin_with_a_byte_order_mark_and_end_without_a_line_end() {
    let content = "\u{FEFF}{\"text\": \"12345678\"}\r\n{\"text\": \"abcdefgh\"}";
    let data = Harness::new("a.jsonl", content, 17).open().unwrap();
    assert_eq!(all_windows(&data, 17).concat_inputs(), "12345678\nabcdefgh");
}

#[test]
fn a_tokenizer_must_be_there() {
    let harness = Harness::new("text", bytes(100), 9);
    let missing = Path::new("no/such/tokenizer");
    let text = harness
        .with(|settings| settings.tokenizer = Some(missing.into()))
        .refused();
    assert!(
        text.contains("data.tokenizer: cannot read no/such/tokenizer"),
        "{text}"
    );
}

fn ids(windows: &Windows) -> (Vec<i64>, Vec<i64>) {
    (windows.inputs.clone(), windows.targets.clone())
}

#[test]
fn token_ids_are_used_unchanged() {
    let numbers: Vec<u32> = (0..40).map(|i| 70_000 - 1000 * i).collect();
    let mut npy = b"\x93NUMPY\x01\x00\x46\x00".to_vec();
    npy.extend(
        format!(
            "{:<69}\n",
            "{'descr': '<i8', 'fortran_order': False, 'shape': (40,), }"
        )
        .bytes(),
    );
    npy.extend(numbers.iter().flat_map(|id| i64::from(*id).to_le_bytes()));
    let u32s: Vec<u8> = numbers.iter().flat_map(|id| id.to_le_bytes()).collect();
    let line = format!("{{\"input_ids\": {numbers:?}}}");
    let inputs: Vec<i64> = numbers[..39].iter().map(|id| i64::from(*id)).collect();
    for (name, content) in [
        ("a.u32", u32s.clone()),
        ("a.npy", npy),
        ("a.jsonl", line.into_bytes()),
    ] {
        let mut harness = Harness::new(name, content, 39);
        harness.vocab_size = 70_001;
        let data = harness.open().unwrap();
        assert_eq!((data.tokens(), data.windows()), (40, 1), "{name}");
        assert_eq!(data.samples(0, 1).unwrap().inputs, inputs, "{name}");
        harness.vocab_size = 70_000;
        let text = harness.refused();
        assert!(
            text.contains("has token id 70000, but the model's vocab_size is 70000"),
            "{name}: {text}"
        );
    }
    // Two bytes each, some with the highest bit set; longer than a piece.
    let long: Vec<u16> = (0..200_000u32).map(|i| (i * 7 % 65_521) as u16).collect();
    let bytes: Vec<u8> = long.iter().flat_map(|id| id.to_le_bytes()).collect();
    let mut harness = Harness::new("a.u16", &bytes, 1000).with(|settings| settings.shuffle = false);
    harness.vocab_size = 65_536;
    let data = harness.open().unwrap();
    assert_eq!(data.tokens(), 200_000);
    for window in [0, 131, 198] {
        let found = data.samples(window, 1).unwrap().inputs;
        let first = 1000 * window as usize;
        let expected: Vec<i64> = long[first..first + 1000]
            .iter()
            .map(|id| i64::from(*id))
            .collect();
        assert_eq!(found, expected, "window {window}");
    }
    let held = Harness::new("a.u16", &bytes, 1000).holding_out(0.25);
    let held = Harness {
        vocab_size: 65_536,
        ..held
    };
    assert_eq!(held.open().unwrap().holdout_windows(), 49);
    let odd = Harness::new("a.u16", &bytes[..2001], 10);
    assert!(
        odd.refused()
            .contains("contains 2001 bytes of ids, which is not a multiple of 2 bytes")
    );
    let negative = Harness::new("a.u32", (-1i32).to_le_bytes(), 10);
    assert!(negative.refused().contains("has token id 4294967295"));
}

#[test]
fn labels_say_which_token_ids_count() {
    let lines = "{\"input_ids\": [300, 301, 302], \"labels\": [-100, 301, -100]}\n{\"input_ids\": [7, 8]}\n";
    let mut harness = Harness::new("a.jsonl", lines, 4);
    harness.vocab_size = 400;
    let data = harness.open().unwrap();
    assert!(data.masked());
    let window = data.samples(0, 1).unwrap();
    assert_eq!(
        ids(&window),
        (vec![300, 301, 302, 7], vec![301, IGNORED, 7, 8])
    );
    let harness = harness.with(|settings| settings.loss_on = LossOn::Completions);
    let text = harness.refused();
    assert!(text.contains("line 2: has no \"labels\""), "{text}");
    let mixed = lines.to_owned() + "{\"text\": \"words\"}\n";
    let mut harness = Harness::new("a.jsonl", mixed, 4);
    harness.vocab_size = 400;
    assert!(harness.refused().contains("a text after token ids"));
}

#[test]
fn windows_keep_the_order_of_the_files_without_shuffling() {
    let in_order = |settings: &mut DataSettings| settings.shuffle = false;
    let data = Harness::new("text", bytes(1000), 9)
        .with(in_order)
        .open()
        .unwrap();
    for sample in [0, 1, 110, 111, 250] {
        let first = data.samples(sample, 1).unwrap().inputs[0];
        assert_eq!(first, (sample % 111 * 9 % 251) as i64, "sample {sample}");
    }
    // Without an order to keep, short documents would fill the space behind long ones.
    let mut lines = String::new();
    for index in 0..200usize {
        let letter = char::from(b'a' + (index % 26) as u8);
        let text = letter.to_string().repeat(1 + index * 7919 % 40);
        lines += &format!("{{\"text\": \"{text}\"}}\n");
    }
    let packed = |shuffle: bool| {
        let data = Harness::new("a.jsonl", &lines, 63)
            .with(|settings| settings.packing = Packing::Documents)
            .with(|settings| settings.shuffle = shuffle)
            .open()
            .unwrap();
        let windows = texts(&data.samples(0, data.windows() as usize).unwrap(), 63);
        let letters = windows.concat_inputs().replace(['_', '\n'], "");
        let mut letters: Vec<char> = letters.chars().collect();
        letters.dedup();
        letters.into_iter().collect::<String>()
    };
    let expected: String = (0..200)
        .map(|index| char::from(b'a' + (index % 26) as u8))
        .collect();
    assert_eq!(packed(false), expected);
    assert_ne!(packed(true), expected);
}

#[test]
fn a_byte_order_mark_is_skipped_in_every_kind_of_file() {
    let inputs = |name: &str, content: &str| {
        let data = Harness::new(name, content, 8).open().unwrap();
        data.samples(0, 1).unwrap().inputs
    };
    let expected = inputs("a.txt", "12345678\n");
    assert_eq!(inputs("a.txt", "\u{FEFF}12345678\n"), expected);
    assert_eq!(
        inputs("a.jsonl", "\u{FEFF}{\"text\": \"12345678\"}\n"),
        expected
    );
}

#[test]
fn a_training_file_cannot_be_an_evaluation_file() {
    let harness = Harness::new("text", bytes(100), 9);
    let own = harness.settings.files.clone();
    let text = harness.with(|settings| settings.eval_files = own).refused();
    assert!(
        text.contains("data.eval_files: ") && text.contains("is also in data.files"),
        "{text}"
    );
}
