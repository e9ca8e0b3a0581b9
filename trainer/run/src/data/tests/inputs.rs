//! Kinds of files: lines, token ids, tokenizers, and refusals.

use super::*;

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
            .with(|settings| settings.packing = Some(Packing::Documents))
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
