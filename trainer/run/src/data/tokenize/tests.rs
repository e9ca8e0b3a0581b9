//! Compares tokens of texts and chats, and the assistant's part, with those of transformers
//! (`tests/fixtures/data/make.py`). Files that are not a tokenizer, or that of another model, are refused.

use std::path::PathBuf;

use chat_template::Value as Chat;
use serde_json::Value;

use super::*;
use crate::data::read::Chat as Conversation;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/data")
}

fn expected() -> Value {
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn open(dir: &Path, template: Option<&Path>, vocab_size: u64) -> Result<Tokenizer, DataError> {
    Tokenizer::open(&TokenizerSettings {
        tokenizer: None,
        template,
        model_dir: Some(dir),
        vocab_size,
        ids: false,
    })
}

fn numbers(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().unwrap().iter();
    numbers
        .map(|number| number.as_u64().unwrap() as u32)
        .collect()
}

const ALL: Encoding = Encoding {
    loss_on: LossOn::All,
    vocab_size: 512,
};
const COMPLETIONS: Encoding = Encoding {
    loss_on: LossOn::Completions,
    vocab_size: 512,
};

/// Splits elements into ids and flags, 1 for those that count.
fn split(elements: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let ids = elements.iter().map(|element| element & !NOT_COUNTED);
    let counts = elements.iter().map(|e| u32::from(e & NOT_COUNTED == 0));
    (ids.collect(), counts.collect())
}

/// Returns the only document that an encoding made.
fn only(found: Result<EncodedDocuments, String>) -> Vec<u32> {
    let mut found = found.unwrap().documents;
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn conversation(chat: &Value) -> Document {
    chat_of(&chat["messages"].to_string())
}

fn chat_of(json: &str) -> Document {
    let messages: Vec<Chat> = serde_json::from_str(json).unwrap();
    Document::Chat(Conversation {
        counts: vec![true; messages.len()],
        messages,
        tools: None,
    })
}

#[test]
fn texts_have_the_tokens_of_transformers() {
    let expected = expected();
    for (name, eos) in [("qwen", 2), ("llama", 2), ("gpt2", 0)] {
        let tokenizer = open(&fixtures().join(name), None, 512).unwrap();
        for case in expected[name]["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let document = Document::Text(text.into());
            let found = only(tokenizer.encode(&document, None, true, ALL));
            let mut ids = numbers(&case["ids"]);
            if ids.last() != Some(&eos) {
                ids.push(eos);
            }
            assert_eq!(found, ids, "{name}: {text:?}");
        }
    }
}

#[test]
fn chats_have_the_tokens_of_transformers() {
    let expected = expected();
    for name in ["qwen", "llama"] {
        let tokenizer = open(&fixtures().join(name), None, 512).unwrap();
        tokenizer.check(DocumentKind::Chat, COMPLETIONS).unwrap();
        for chat in expected[name]["chats"].as_array().unwrap() {
            let document = conversation(chat);
            let all = only(tokenizer.encode(&document, None, true, ALL));
            assert_eq!(all, numbers(&chat["ids"]), "{name}");
            let some = only(tokenizer.encode(&document, None, true, COMPLETIONS));
            let (ids, said) = split(&some);
            assert_eq!((ids, said), (all, numbers(&chat["said"])), "{name}");
        }
    }
}

#[test]
fn generation_marks_of_an_own_template_determine_what_counts() {
    let marked = fixtures().join("marked.jinja");
    let tokenizer = open(&fixtures().join("qwen"), Some(&marked), 512).unwrap();
    let plain = open(&fixtures().join("qwen"), None, 512).unwrap();
    assert_ne!(tokenizer.fingerprint(), plain.fingerprint());
    for chat in expected()["qwen"]["chats"].as_array().unwrap() {
        let some = tokenizer.encode(&conversation(chat), None, true, COMPLETIONS);
        let (ids, said) = split(&only(some));
        assert_eq!(ids, numbers(&chat["marked_ids"]));
        assert_eq!(said, numbers(&chat["marked_said"]));
    }
}

/// A template that changes earlier answers gives each its own text; one that only ends the conversation does not.
#[test]
fn every_answer_counts_as_a_template_would_generate_it() {
    let dir = tempfile::tempdir().unwrap();
    let encode = |name: &str| {
        let case = &expected()["apart"][name];
        let template = dir.path().join(name);
        std::fs::write(&template, case["template"].as_str().unwrap()).unwrap();
        let tokenizer = open(&fixtures().join("qwen"), Some(&template), 512).unwrap();
        let found = tokenizer.encode(&conversation(case), None, true, COMPLETIONS);
        let found: Vec<_> = found
            .unwrap()
            .documents
            .iter()
            .map(|ids| split(ids))
            .collect();
        let turns = case["turns"].as_array().unwrap().iter();
        let turns = turns.map(|turn| (numbers(&turn["ids"]), numbers(&turn["said"])));
        (found, turns.collect::<Vec<_>>())
    };
    let (found, turns) = encode("reasoned");
    assert_eq!(found, turns);
    let (found, turns) = encode("ended");
    let [(ids, said)] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(*ids, turns[1].0);
    // The token that ends the first conversation is not in the second.
    let (first_ids, first_said) = &turns[0];
    let open = first_ids.len() - 1;
    assert_eq!(ids[..open], first_ids[..open]);
    assert_eq!(said[..open], first_said[..open]);
    assert_eq!(said[open..], turns[1].1[open..]);
}

#[test]
fn tools_are_written_as_python_writes_them() {
    let expected = expected();
    let special = special::Special::read(&fixtures().join("qwen"), "data.tokenizer").unwrap();
    let source = special.template.clone().unwrap();
    let template = chat::Template::new(&source, None, &special).unwrap();
    // Parsed from the text, like a line of a file, so that keys keep their order.
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    let whole: Chat = serde_json::from_str(&text).unwrap();
    let tools = whole.get("tools").unwrap().clone();
    for case in expected["qwen"]["chats"].as_array().unwrap() {
        let Document::Chat(Conversation { messages, .. }) = conversation(case) else {
            unreachable!()
        };
        let found = template.text(&messages, Some(&tools)).unwrap();
        assert_eq!(found.text, case["with_tools"].as_str().unwrap());
    }
}

#[test]
fn an_error_raised_by_a_template_is_reported() {
    let tokenizer = open(&fixtures().join("llama"), None, 512).unwrap();
    let twice = r#"[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]"#;
    let document = chat_of(twice);
    let message = tokenizer.encode(&document, None, true, ALL).err().unwrap();
    assert!(
        message.contains("the chat template failed: two turns of the user in a row"),
        "{message}"
    );
}

#[test]
fn a_completion_counts_from_the_token_that_holds_its_first_byte() {
    let tokenizer = open(&fixtures().join("llama"), None, 512).unwrap();
    for (prompt, completion) in [
        ("count the", " river"),
        ("the ri", "ver waits"),
        ("", "all"),
    ] {
        let document = Document::Completion {
            prompt: prompt.into(),
            completion: completion.into(),
        };
        let whole = Document::Text(format!("{prompt}{completion}"));
        let found = only(tokenizer.encode(&document, None, true, COMPLETIONS));
        let (ids, counts) = split(&found);
        assert_eq!(ids, only(tokenizer.encode(&whole, None, true, ALL)));
        assert_eq!(only(tokenizer.encode(&document, None, true, ALL)), ids);
        assert_eq!((counts[0], counts[ids.len() - 1]), (0, 1), "bos and eos");
        // Tokens that count are at the end, and cover at least the completion.
        let first = counts.iter().position(|count| *count == 1).unwrap();
        assert!(counts[first..].iter().all(|count| *count == 1));
        let decode = |ids: &[u32]| tokenizer.decode(ids).replace("</s>", "");
        let said = decode(&ids[first..]);
        assert!(
            said.trim().ends_with(completion.trim()),
            "{said} of {completion}"
        );
        let rest = decode(&ids[first + 1..]);
        assert!(rest.len() < completion.len(), "{rest} of {completion}");
    }
}

#[test]
fn pieces_of_a_text_share_one_beginning_and_one_end() {
    let tokenizer = open(&fixtures().join("llama"), None, 512).unwrap();
    let piece = |text: &str, after, ends| {
        let document = Document::Text(text.into());
        only(tokenizer.encode(&document, after, ends, ALL))
    };
    let (first, last) = (
        piece("one\n", None, false),
        piece("two", Some("one\n"), true),
    );
    assert_eq!((first[0], last[0] == 1), (1, false));
    assert_eq!((first.contains(&2), last.last()), (false, Some(&2)));
}

/// Tokenizes words of many scripts, all kinds of spaces and line ends, and special tokens, in pieces of some
/// hundred bytes.
#[test]
fn tokens_of_pieces_are_those_of_the_whole_text() {
    const PARTS: [&str; 24] = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        " \n  ",
        "\t",
        "\u{3000}",
        "the old clock",
        " waits",
        "for",
        " 1234567",
        "89 12",
        "it's ",
        "we'll,",
        ").\n",
        "}\n",
        " {",
        "Grüße aus Köln",
        "東京。\n",
        "大阪 ",
        "की ",
        "🦀",
        "<|im_end|>\n",
    ];
    let mut state = 1u64;
    let mut random = |end: usize| {
        state = crate::model::init::splitmix64(state);
        (state >> 33) as usize % end
    };
    let dropped = |name: &str| {
        // Metaspace, which newer files use instead of Llama 2's normalizer; and a space before each text, as
        // in RoBERTa.
        let json = std::fs::read(fixtures().join(name).join("tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_slice(&json).unwrap();
        if name == "llama" {
            json["normalizer"] = Value::Null;
            json["pre_tokenizer"] = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
        } else {
            json["pre_tokenizer"]["add_prefix_space"] = true.into();
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        open(dir.path(), None, 512).unwrap()
    };
    let mut tokenizers: Vec<Tokenizer> = ["qwen", "llama", "gpt2"]
        .map(|name| open(&fixtures().join(name), None, 512).unwrap())
        .into();
    tokenizers.extend(["llama", "gpt2"].map(dropped));
    for round in 0..40 {
        let parts: Vec<&str> = (0..300).map(|_| PARTS[random(PARTS.len())]).collect();
        let text = parts.concat();
        let piece_bytes = 400 + random(400);
        for tokenizer in &tokenizers {
            let Tokenizer::HuggingFace(found) = tokenizer else {
                unreachable!()
            };
            let whole = found.ids(&text, "", usize::MAX).unwrap();
            let pieces = found.ids(&text, "", piece_bytes).unwrap();
            assert_eq!(
                pieces,
                whole,
                "{round}: {} in {piece_bytes}",
                found.describe()
            );
        }
    }
}

/// The text is cut in unfavorable places: line ends are far away, and every character has three bytes.
#[test]
fn a_long_record_is_tokenized_in_pieces_that_lose_nothing() {
    let tokenizer = open(&fixtures().join("qwen"), None, 512).unwrap();
    let text = "東京".repeat(crate::data::read::PIECE_BYTES / 4) + "\nend";
    let document = Document::Text(text.clone());
    let ids = only(tokenizer.encode(&document, None, true, ALL));
    assert_eq!(tokenizer.decode(&ids), text + "<|im_end|>");
    let document = Document::Completion {
        prompt: "x".repeat(17 << 20),
        completion: "y".into(),
    };
    let message = tokenizer.encode(&document, None, true, COMPLETIONS);
    assert!(message.err().unwrap().contains("has 17 MB"));
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let dir = fixtures().join("qwen");
    let error = open(&dir, None, 300).err().unwrap().to_string();
    for part in [
        "model.path: ",
        "qwen/tokenizer.json has 360 tokens",
        "vocab_size is 300",
        "tokenizer of another model",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(open(&dir, None, 360).is_ok());
}

#[test]
fn tokens_of_a_named_template_that_a_tokenizer_lacks_are_warned_of() {
    let dir = fixtures().join("qwen");
    let lacking = |name: &str| {
        let tokenizer = open(&dir, Some(Path::new(name)), 360).unwrap();
        let warning = tokenizer.warning().unwrap_or_default();
        let lacking = warning.split_once(" lacks ").map(|(_, rest)| rest);
        let (lacking, _) = lacking.and_then(|rest| rest.split_once(", "))?;
        Some(lacking.to_owned())
    };
    assert_eq!(lacking("chatml"), None);
    assert_eq!(
        lacking("phi3").as_deref(),
        Some("<|assistant|> and <|end|> and <|system|> and <|user|>")
    );
}

#[test]
fn an_invalid_tokenizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let refused = || {
        let error = open(dir.path(), None, 512).err();
        error.expect("it was taken").to_string()
    };
    // Without a tokenizer, bytes are tokens, and the vocabulary must be large enough.
    assert!(matches!(open(dir.path(), None, 256), Ok(Tokenizer::Bytes)));
    let error = open(dir.path(), None, 255).err().unwrap().to_string();
    assert!(
        error.contains("must be at least 256, because bytes are tokens"),
        "{error}"
    );
    std::fs::write(at("tokenizer.model"), "sentences").unwrap();
    assert!(refused().contains("tokenizer.model but no tokenizer.json"));
    for content in ["", "{", "{}", "[1]", "\u{1}"] {
        std::fs::write(at("tokenizer.json"), content).unwrap();
        assert!(refused().contains("is not a tokenizer"), "{}", refused());
    }
    let good = std::fs::read(fixtures().join("gpt2/tokenizer.json")).unwrap();
    std::fs::write(at("tokenizer.json"), &good).unwrap();
    open(dir.path(), None, 512).unwrap();
    for (config, part) in [
        ("{", "tokenizer_config.json: is not JSON"),
        ("3", "tokenizer_config.json: is not an object"),
        (r#"{"eos_token": "<none>"}"#, "eos_token \"<none>\""),
        (r#"{"chat_template": "{% if %}"}"#, "the chat template of"),
    ] {
        std::fs::write(at("tokenizer_config.json"), config).unwrap();
        assert!(refused().contains(part), "{}", refused());
    }
}

#[test]
fn the_end_of_document_token_is_found_where_models_name_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::copy(fixtures().join("gpt2/tokenizer.json"), at("tokenizer.json")).unwrap();
    let ends = || {
        let tokenizer = open(dir.path(), None, 512).unwrap();
        let document = Document::Text("a".into());
        let ids = only(tokenizer.encode(&document, None, true, ALL));
        (ids.len() > 1).then(|| ids[ids.len() - 1])
    };
    assert_eq!(ends(), None);
    assert!(
        open(dir.path(), None, 512)
            .unwrap()
            .describe()
            .contains("no token ends")
    );
    std::fs::write(at("config.json"), r#"{"eos_token_id": 5}"#).unwrap();
    assert_eq!(ends(), Some(5));
    std::fs::write(at("generation_config.json"), r#"{"eos_token_id": [7, 8]}"#).unwrap();
    assert_eq!(ends(), Some(7));
    let token = r#"{"eos_token": {"content": "<|endoftext|>", "special": true}}"#;
    std::fs::write(at("tokenizer_config.json"), token).unwrap();
    assert_eq!(ends(), Some(0));
}

#[test]
fn conversations_need_a_template() {
    let tokenizer = open(&fixtures().join("gpt2"), None, 512).unwrap();
    let error = tokenizer
        .check(DocumentKind::Chat, ALL)
        .unwrap_err()
        .to_string();
    assert!(error.contains("need a chat template"), "{error}");
    assert!(
        tokenizer
            .check(DocumentKind::Completion, COMPLETIONS)
            .is_ok()
    );
}

/// One template with all features of published ones: namespaces, macros, slices, Python string methods,
/// filters.
#[test]
fn templates_may_use_what_published_ones_use() {
    let expected = expected();
    let special = special::Special::read(&fixtures().join("qwen"), "data.tokenizer").unwrap();
    let source = std::fs::read_to_string(fixtures().join("features.jinja")).unwrap();
    let template = chat::Template::new(&source, None, &special).unwrap();
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    let whole: Chat = serde_json::from_str(&text).unwrap();
    let tools = whole.get("tools").unwrap().clone();
    for case in expected["features"].as_array().unwrap() {
        let Document::Chat(Conversation { messages, .. }) = conversation(case) else {
            unreachable!()
        };
        let found = template.text(&messages, Some(&tools)).unwrap();
        assert_eq!(found.text, case["text"].as_str().unwrap());
        let ready = template.render(&messages, None, true).unwrap();
        assert_eq!(ready, case["ready"].as_str().unwrap());
    }
}
