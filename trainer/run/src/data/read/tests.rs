//! Reads tables written by pyarrow (`tests/fixtures/data/make.py`), and damaged tables.

use std::path::Path;

use super::*;
use crate::config::DataFile;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/data")
        .join(name)
}

fn entry(path: &Path) -> DataFile {
    DataFile::new(path.into())
}

fn read(path: &Path) -> Result<Vec<Document>, DataError> {
    let found = find(&[entry(path)], "data.files")?;
    let (mut kind, mut documents, mut bytes) = (None, Vec::new(), 0);
    let reading = Reading {
        key: "data.files",
        any_bytes: false,
        bad: &mut |place, message| Err(DataError::Record { place, message }),
    };
    super::documents(&found.sources[0], reading, &mut kind, &mut |piece| {
        documents.push(piece.document);
        bytes += piece.bytes;
        Ok(())
    })?;
    assert!(bytes <= found.sources[0].bytes);
    Ok(documents)
}

#[test]
fn tables_give_their_rows_in_order() {
    let texts = read(&fixture("texts.parquet")).unwrap();
    assert_eq!(texts.len(), 20);
    for (index, text) in texts.iter().enumerate() {
        assert!(
            matches!(text, Document::Text(text) if text.starts_with(&format!("row {index}: "))),
            "{text:?}"
        );
    }
    for name in ["pairs.parquet", "lz4.parquet", "brotli.parquet"] {
        let pairs = read(&fixture(name)).unwrap();
        assert_eq!(pairs.len(), 30);
        let expected = Document::Completion {
            prompt: "17 + 17 = ".into(),
            completion: "34".into(),
        };
        assert_eq!(pairs[17], expected);
    }
}

#[test]
fn conversations_in_a_table_equal_those_in_lines() {
    let chats = read(&fixture("chats.parquet")).unwrap();
    assert_eq!(chats.len(), 6);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    let line = r#"{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the river"}]}"#;
    std::fs::write(&path, line).unwrap();
    let (
        Document::Chat(Chat { messages, .. }),
        Document::Chat(Chat {
            messages: lines, ..
        }),
    ) = (&chats[2], &read(&path).unwrap()[0])
    else {
        panic!("conversations")
    };
    let content = |message: &chat_template::Value| message.get("content").unwrap().clone();
    assert_eq!(messages.len(), 2);
    for (row, line) in messages.iter().zip(lines) {
        assert_eq!(content(row), content(line));
    }
}

/// Texts of the messages of each conversation.
fn texts(documents: Vec<Document>) -> Vec<Vec<String>> {
    let chats = documents.into_iter().map(|document| match document {
        Document::Chat(chat) => chat.messages,
        other => panic!("{other:?}"),
    });
    let content = |message: &chat_template::Value| message.get("content").unwrap().to_string();
    chats
        .map(|messages| messages.iter().map(content).collect())
        .collect()
}

/// Files that `datasets` and pandas wrote of the same rows.
#[test]
fn every_kind_of_file_gives_the_same_instructions() {
    let expected = [
        ["Name the old clock.", "It has \"no\" name, I think."],
        ["Add the numbers.\n1\n2", "3"],
        ["Grüße, bitte\na,b\tc", "none 🦀"],
    ];
    for name in [
        "alpaca.json",
        "alpaca_lines.json",
        "alpaca.csv",
        "alpaca.tsv",
        "alpaca.parquet",
        "alpaca.arrow",
    ] {
        assert_eq!(texts(read(&fixture(name)).unwrap()), expected, "{name}");
    }
}

#[test]
fn a_saved_data_set_stands_for_its_training_split() {
    let found = find(&[entry(&fixture("saved"))], "data.files").unwrap();
    assert_eq!((found.sources.len(), found.passed_over), (1, 3));
    let told = read(&fixture("saved")).unwrap();
    let expected = [
        ["Name the old clock.", "It has \"no\" name, I think."],
        ["Add the numbers.", "3"],
    ];
    assert_eq!(texts(told), expected);
    let other = read(&fixture("saved/test")).unwrap();
    assert_eq!(texts(other), [["Grüße, bitte", "none 🦀"]]);
}

#[test]
fn a_fault_is_reported_with_its_file_and_line_or_record() {
    let dir = tempfile::tempdir().unwrap();
    for (name, content, part) in [
        (
            "a.json",
            "[{\"text\": \"a\"}, {\"text\": 3}]",
            "a.json, record 2: \"text\" is a number",
        ),
        (
            "a.json",
            "[{\"text\": \"a\"}, {\"text\"]",
            "a.json, record 2: is not JSON: expected `:` at line 1 column 24",
        ),
        (
            "a.json",
            "[{\"text\": \"a\"}] x",
            "is not JSON: trailing characters",
        ),
        (
            "a.json",
            "{\n \"data\": []\n}",
            "one object on several lines",
        ),
        (
            "a.json",
            "{\"text\": \"a\"}\n{\"text\": 3}",
            "a.json, line 2: \"text\" is a number",
        ),
        (
            "a.csv",
            "text,id\na,1\nb",
            "a.csv, line 3: has 1 fields, but the first line names 2",
        ),
        (
            "a.csv",
            "words,id\na,1\n",
            "a.csv, line 1: has \"words\", \"id\", but neither",
        ),
        (
            "a.csv",
            "messages\nhello\n",
            "a.csv, line 2: \"messages\" is not JSON",
        ),
        ("a.arrow", "no table", "a.arrow is damaged"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let text = read(&path).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
    let path = dir.path().join("b.csv");
    std::fs::write(&path, b"text\n\xFF\n").unwrap();
    let text = read(&path).unwrap_err().to_string();
    assert!(text.contains("b.csv, line 2: is not UTF-8"), "{text}");
}

#[test]
fn a_table_without_known_columns_is_reported_with_its_columns() {
    let text = read(&fixture("columns.parquet")).unwrap_err().to_string();
    assert!(
        text.contains("columns.parquet: has \"body\", \"label\", but neither"),
        "{text}"
    );
}

/// Any damage of a table results in an error or in other text, never in a panic.
#[test]
fn a_damaged_table_is_an_error_and_never_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let whole = std::fs::read(fixture("chats.parquet")).unwrap();
    for length in [1, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let text = read(&path).unwrap_err().to_string();
        assert!(text.contains("a.parquet is damaged"), "{text}");
    }
    std::fs::write(&path, b"this is no table at all").unwrap();
    assert!(read(&path).is_err());
    let mut refused = 0;
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        std::fs::write(&path, &damaged).unwrap();
        refused += usize::from(read(&path).is_err());
    }
    assert!(refused > whole.len() / 3, "{refused} of {}", whole.len());
}

#[test]
fn records_compressed_with_gzip_equal_those_that_are_not() {
    use std::io::Write;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let pack = |text: &str| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        packed.finish().unwrap()
    };
    for (name, head, row, tail) in [
        ("a.jsonl", "", "{\"text\": \"one two\"}\n", ""),
        (
            "a.json",
            "[{\"text\": \"first\"}",
            ",\n{\"text\": \"one two\"}",
            "]",
        ),
        ("lines.json", "", "{\"text\": \"one two\"}\n", ""),
        ("a.csv", "text,n\n", "one two,1\n", ""),
        ("a.tsv", "n\ttext\n", "1\tone two\n", ""),
        ("a.txt", "", "one two\n", ""),
    ] {
        let text = [head, &row.repeat(3000), tail].concat();
        std::fs::write(at(name), &text).unwrap();
        let packed = at(&format!("{name}.GZ"));
        // Two members, as `cat` of two files gives.
        let (start, end) = text.split_at(text.len() / 2);
        std::fs::write(&packed, [pack(start), pack(end)].concat()).unwrap();
        let expected = read(&at(name)).unwrap();
        assert!(!expected.is_empty());
        assert_eq!(read(&packed).unwrap(), expected, "{name}");
        let whole = std::fs::read(&packed).unwrap();
        for (broken, part) in [
            (&whole[..whole.len() - 20], "deflate"),
            (text.as_bytes(), "gzip"),
        ] {
            std::fs::write(&packed, broken).unwrap();
            let error = read(&packed).unwrap_err().to_string();
            assert!(error.contains(&packed.display().to_string()), "{error}");
            assert!(error.contains(part), "{error}");
        }
        std::fs::remove_file(packed).unwrap();
    }
}
