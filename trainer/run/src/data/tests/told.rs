//! What a run says about its data before it trains on it. The errors that these tests find: tokens, roles or tools that are
//! silently not learned, whole steps without a token that counts, and bad records that vanish.

use super::*;

/// Makes conversations with a template.
fn chats(template: &str, lines: &[&str], loss_on: LossOn) -> Harness {
    let mut harness = Harness::new("chats.jsonl", lines.join("\n"), 256);
    let path = harness.dir.path().join("own.jinja");
    std::fs::write(&path, template).unwrap();
    harness.vocab_size = 360;
    harness.with(|settings| {
        settings.tokenizer = Some(fixture("qwen"));
        settings.chat_template = Some(path);
        settings.packing = Some(Packing::Documents);
        settings.cross_document_attention = false;
        settings.loss_on = loss_on;
    })
}

/// As GLM's: nothing but the next message ends an answer.
const OPEN: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
const CLOSED: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
const TWO_TURNS: &str = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "no"}]}"#;

#[test]
fn answers_whose_end_is_not_learned_are_told() {
    let marked = OPEN.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}");
    for (template, loss_on, said) in [
        (
            OPEN,
            LossOn::Completions,
            Some("the end of 2 of 2 answers is not learned"),
        ),
        (
            &marked,
            LossOn::Completions,
            Some("the end of 2 of 2 answers is not learned"),
        ),
        // The next message is learned too, except after the last answer.
        (
            OPEN,
            LossOn::All,
            Some("the end of 1 of 1 answer is not learned"),
        ),
        (CLOSED, LossOn::Completions, None),
        (CLOSED, LossOn::All, None),
    ] {
        let warnings = chats(template, &[TWO_TURNS], loss_on)
            .open()
            .unwrap()
            .warnings();
        match said {
            None => assert_eq!(warnings, [""; 0], "{template}"),
            Some(said) => {
                assert_eq!(warnings.len(), 1, "{warnings:?}");
                assert!(warnings[0].starts_with(said), "{warnings:?}");
                assert!(
                    warnings[0].contains("chats.jsonl, line 1: "),
                    "{warnings:?}"
                );
            }
        }
    }
}

#[test]
fn a_call_of_a_tool_is_an_answer_whose_end_may_not_be_learned() {
    let line = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "weather"}}]}, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "so"}]}"#;
    let with_calls = |template: &str| {
        template.replace(
            "{{ m.content }}",
            "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}",
        )
    };
    for (template, said) in [(OPEN, Some("the end of 2 of 2 answers")), (CLOSED, None)] {
        let harness = chats(&with_calls(template), &[line], LossOn::Completions);
        let warnings = harness.open().unwrap().warnings();
        let found = warnings
            .iter()
            .find(|warning| warning.starts_with("the end of"));
        assert_eq!(
            found.map(|found| &found[..said.map_or(0, str::len)]),
            said,
            "{warnings:?}"
        );
    }
}

#[test]
fn what_a_template_or_the_loss_leaves_out_is_told() {
    let tools = r#""tools": [{"type": "function", "function": {"name": "weather"}}]"#;
    let call = r#"{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]}"#;
    let lines = [
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assitant", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "4", "thinking": "2 and 2"}]}"#,
        &format!(
            r#"{{"messages": [{{"role": "user", "content": "a"}}, {call}, {{"role": "assistant", "content": "b"}}], {tools}}}"#
        ),
    ];
    let harness = chats(CLOSED, &lines, LossOn::Completions);
    let expected = [
        "1 message of the role \"assitant\" is not learned, because only the role \"assistant\" is (",
        "the chat template does not print the tools of 1 of 1 conversation with tools (",
        "the chat template does not print the tool calls of 1 of 1 conversation with tool calls (",
        "the chat template does not print the reasoning of 1 of 1 message with reasoning (",
        "no token counts in the loss in 1 of 3 documents (",
    ];
    let check = |warnings: Vec<String>| {
        for part in expected {
            assert!(
                warnings.iter().any(|warning| warning.starts_with(part)),
                "{part}: {warnings:?}"
            );
        }
        assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
    };
    check(harness.open().unwrap().warnings());
    // A later start reads the tokens only.
    check(harness.open().unwrap().warnings());
    let whole = CLOSED.replace(
        "{{ m.content }}",
        "{{ m.reasoning_content }}{{ m.content }}{{ m.tool_calls }}{{ tools }}",
    );
    let warnings = chats(&whole, &lines[1..], LossOn::Completions)
        .open()
        .unwrap()
        .warnings();
    assert_eq!(warnings, [""; 0]);
    let text = chats(CLOSED, &lines[..1], LossOn::Completions).refused();
    for part in [
        "data.loss_on: no token of the training text counts",
        "role \"assitant\"",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// Questions longer than a window, whose answer is in the last of several.
#[test]
fn windows_without_a_token_that_counts_are_left_out() {
    let line = format!(
        "{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n",
        "q".repeat(220)
    );
    // Concatenated text that fills no window is not used.
    for (packing, windows) in [(Packing::Documents, 3), (Packing::Concatenate, 2)] {
        let harness = Harness::new("a.jsonl", line.repeat(3), 64).with(|settings| {
            settings.packing = Some(packing);
            settings.loss_on = LossOn::Completions;
            settings.shuffle = false;
        });
        let data = harness.open().unwrap();
        assert_eq!(data.windows(), windows, "{packing:?}");
        let told = data.warnings();
        assert!(
            told.iter().any(|line| line
                .contains(" windows without a token that counts in the loss are left out (")),
            "{told:?}"
        );
        let mut answers = 0;
        for sample in 0..windows {
            let window = data.samples(sample, 1).unwrap();
            let counted: Vec<u8> = window
                .targets
                .iter()
                .filter(|id| **id != IGNORED)
                .map(|id| *id as u8)
                .collect();
            assert!(!counted.is_empty(), "{packing:?}, window {sample}");
            answers += counted.iter().filter(|byte| **byte == b'y').count();
        }
        assert_eq!(answers as u64, windows, "{packing:?}: no answer is lost");
    }
    let nothing =
        r#"{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, -100, -100, -100, -100]}"#;
    let text = Harness::new("a.jsonl", nothing, 4).refused();
    assert!(
        text.contains("no token of the training text counts in the loss"),
        "{text}"
    );
}

#[test]
fn documents_that_fill_a_window_keep_their_place_without_shuffling() {
    let row = |id: u32, count: usize| format!("{{\"input_ids\": {:?}}}", vec![id; count]);
    let lines = [
        row(1, 30),
        row(2, 10),
        row(3, 33),
        row(4, 10),
        row(5, 30),
        row(6, 70),
    ];
    let data = Harness::new("a.jsonl", lines.join("\n"), 32)
        .with(|settings| {
            settings.packing = Some(Packing::Documents);
            settings.shuffle = false;
        })
        .open()
        .unwrap();
    let firsts: Vec<i64> = (0..data.windows())
        .map(|window| data.samples(window, 1).unwrap().inputs[0])
        .collect();
    assert_eq!(firsts, [1, 2, 3, 4, 5, 6, 6, 6]);
}

#[test]
fn bad_records_are_refused_or_counted_and_named() {
    let good = r#"{"prompt": "a", "completion": "bcd"}"#;
    let lines = [
        good,
        "{\"prompt\": ",
        r#"{"body": 1}"#,
        good,
        r#"{"text": "x"}"#,
        r#"{"prompt": 3, "completion": ""}"#,
    ];
    let harness = |content: String, name: &str| {
        Harness::new(name, content, 4).with(|settings| {
            settings.packing = Some(Packing::Documents);
            settings.on_bad_record = OnBadRecord::Skip;
        })
    };
    let skipping = harness(lines.join("\n"), "a.jsonl");
    let data = skipping.open().unwrap();
    assert!(
        data.describe().contains(", 2 documents, "),
        "{}",
        data.describe()
    );
    let warnings = data.warnings();
    assert!(
        warnings[0]
            .starts_with("4 records could not be read and are skipped (data.on_bad_record): "),
        "{warnings:?}"
    );
    for part in [
        "line 2: is not JSON",
        "line 3: has \"body\"",
        "line 5: a text after",
        "line 6: \"prompt\" is a number",
    ] {
        assert!(warnings[0].contains(part), "{part}: {warnings:?}");
    }
    let text = skipping
        .with(|settings| settings.on_bad_record = OnBadRecord::Error)
        .refused();
    assert!(text.contains("line 2: is not JSON"), "{text}");
    // A bad first record does not hide the others, and nothing but bad ones is refused.
    let swapped = harness(format!("{}\n{good}", lines[2]), "a.jsonl")
        .open()
        .unwrap();
    assert!(
        swapped.describe().contains(", 1 document, "),
        "{}",
        swapped.describe()
    );
    let text = harness(lines[1..3].join("\n"), "a.jsonl").refused();
    assert!(text.contains("line 1: is not JSON"), "{text}");
    // A conversation that the template refuses.
    let turns = |first: &str| {
        format!(
            r#"{{"messages": [{{"role": "{first}", "content": "a"}}, {{"role": "assistant", "content": "b"}}]}}"#
        )
    };
    let template = CLOSED.to_owned()
        + "{% if messages[0].role != 'user' %}{{ raise_exception('no question') }}{% endif %}";
    let (user, system) = (turns("user"), turns("system"));
    let chats = chats(&template, &[&user, &system, &user], LossOn::Completions);
    let data = chats
        .with(|settings| settings.on_bad_record = OnBadRecord::Skip)
        .open()
        .unwrap();
    assert!(
        data.warnings()[0].contains("line 2: the chat template failed: no question"),
        "{:?}",
        data.warnings()
    );
}

#[test]
fn a_file_of_lines_may_be_an_array() {
    let records = r#"[{"text": "12345678"}, {"text": "abcdefgh"}]"#;
    let data = Harness::new("a.jsonl", records, 17).open().unwrap();
    assert_eq!(all_windows(&data, 17).concat_inputs(), "12345678\nabcdefgh");
}
