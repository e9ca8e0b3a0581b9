//! Interprets a JSON object or table row as a text, a prompt with its completion, a conversation, or token ids.
//!
//! ```text
//!   token_ids    {"input_ids", "labels"}                           messages    {"messages": [{"role", "content"}...], "tools"}
//!   completion   {"prompt", "completion"}, texts or messages       sharegpt    {"conversations": [{"from", "value"}...], "system"}
//!   text         {"text"}                                          alpaca      {"instruction", "input", "output", "system", "history"}
//! ```
//!
//! Formats with instructions become conversations, which the chat template turns into text.

use std::fmt;

use chat_template::{Map, Value};

use crate::config::RecordFormat;

/// Document, which is tokenized as a unit.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) enum Document {
    /// Bytes of a file, not necessarily UTF-8.
    Bytes(Vec<u8>),
    Text(String),
    Completion {
        prompt: String,
        completion: String,
    },
    Chat(Chat),
    /// Token ids. Labels, if present, determine which ids count as targets.
    Ids {
        ids: Vec<u32>,
        counts: Option<Vec<bool>>,
    },
}

/// A conversation for the tokenizer's template. Keys keep their order, because templates print them.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct Chat {
    pub(in crate::data) messages: Vec<Value>,
    /// Whether each message may count in a loss on completions, if it is the assistant's.
    pub(in crate::data) counts: Vec<bool>,
    pub(in crate::data) tools: Option<Value>,
}

/// Kinds of documents that cannot be mixed. A text file counts as a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum DocumentKind {
    Text,
    Completion,
    Chat,
    Ids,
}

impl fmt::Display for DocumentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "a text",
            Self::Completion => "a prompt with its completion",
            Self::Chat => "a conversation",
            Self::Ids => "token ids",
        })
    }
}

/// Columns that are read.
pub(super) const COLUMNS: [&str; 16] = [
    "input_ids",
    "labels",
    "attention_mask",
    "messages",
    "tools",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "context",
    "output",
    "response",
    "system",
    "history",
    "text",
];

/// Columns of which one is in every record, in order of precedence, and the format that it stands for.
const RECOGNIZED: [(&str, RecordFormat); 7] = [
    ("input_ids", RecordFormat::TokenIds),
    ("messages", RecordFormat::Messages),
    ("conversations", RecordFormat::Sharegpt),
    ("prompt", RecordFormat::Completion),
    ("completion", RecordFormat::Completion),
    ("instruction", RecordFormat::Alpaca),
    ("text", RecordFormat::Text),
];

/// Names of a question and its answer in other data.
const PAIRS: [(&str, &str); 5] = [
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("source", "target"),
];

/// Answer to data with a preferred and a rejected answer.
const PREFERENCES: &str = ": preferences need DPO, which TRL has (docs/pytorch.md offloads its models); to train on the preferred answers alone, rename \"chosen\" to \"completion\"";

/// PyTorch's label for a token that does not count.
const IGNORED_LABEL: i64 = -100;

/// Fields of a record.
struct Fields<'a> {
    record: &'a Value,
    format: RecordFormat,
}

impl Fields<'_> {
    /// Returns the value of a field, unless it is absent or null.
    fn find(&self, name: &str) -> Option<Value> {
        field(self.record, name).filter(|value| !value.is_none())
    }

    fn need(&self, name: &str) -> Result<Value, String> {
        field(self.record, name).ok_or_else(|| {
            format!(
                "has no \"{name}\", which the format \"{}\" needs",
                self.format.name()
            )
        })
    }

    /// Returns the text of the first of these fields that is there.
    fn text(&self, names: &[&'static str]) -> Result<Option<String>, String> {
        let found = names.iter().find_map(|name| Some((name, self.find(name)?)));
        found.map(|(name, value)| text(name, &value)).transpose()
    }

    /// Returns `turns`, after the system message of the record, if it has one.
    fn chat(&self, turns: Vec<(Value, bool)>) -> Result<Document, String> {
        let (mut messages, mut counts): (Vec<Value>, Vec<bool>) = turns.into_iter().unzip();
        let begins = messages.first().and_then(|first| field(first, "role"));
        let system = self.text(&["system"])?.filter(|text| !text.is_empty());
        if let Some(system) = system
            && self.format != RecordFormat::Messages
            && begins.as_ref().and_then(Value::as_str) != Some("system")
        {
            messages.insert(0, message("system", &system));
            counts.insert(0, false);
        }
        let tools = match self.find("tools") {
            // Some data has the list as text.
            Some(tools) if tools.as_str().is_some() => {
                let json = tools.as_str().unwrap_or_default();
                match json.trim() {
                    "" => None,
                    json => Some(
                        serde_json::from_str(json)
                            .map_err(|error| format!("\"tools\" is text, but not JSON: {error}"))?,
                    ),
                }
            }
            tools => tools,
        };
        // LLaMA-Factory's data has functions without the table around them that templates expect.
        let tools = match (&tools, self.format) {
            (Some(list), RecordFormat::Sharegpt) if list.as_list().is_some() => {
                let list = list.as_list().unwrap_or_default().iter();
                Some(list.map(wrapped).collect::<Vec<_>>().into())
            }
            _ => tools,
        };
        Ok(Document::Chat(Chat {
            messages,
            counts,
            tools,
        }))
    }
}

/// Returns a tool as OpenAI's API has it.
fn wrapped(tool: &Value) -> Value {
    match (tool.get("function"), tool.get("name")) {
        (None, Some(_)) => Value::from_pairs([
            ("type", Value::from("function")),
            ("function", tool.clone()),
        ]),
        _ => tool.clone(),
    }
}

fn field(record: &Value, name: &str) -> Option<Value> {
    record.get(name).cloned()
}

fn message(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", role.into()), ("content", content.into())])
}

impl Document {
    pub(in crate::data) fn kind(&self) -> DocumentKind {
        match self {
            Self::Bytes(_) | Self::Text(_) => DocumentKind::Text,
            Self::Completion { .. } => DocumentKind::Completion,
            Self::Chat(_) => DocumentKind::Chat,
            Self::Ids { .. } => DocumentKind::Ids,
        }
    }

    /// Returns whether a completion or a message of the assistant that counts is empty. The model would learn to
    /// say nothing.
    pub(in crate::data) fn is_unanswered(&self) -> bool {
        match self {
            Self::Completion { completion, .. } => completion.trim().is_empty(),
            Self::Chat(chat) => chat
                .messages
                .iter()
                .zip(&chat.counts)
                .any(|(message, counts)| {
                    let is = |name: &str, wanted: fn(&str) -> bool| {
                        field(message, name).is_some_and(|value| value.as_str().is_some_and(wanted))
                    };
                    *counts
                        && is("role", |role| role == "assistant")
                        && is("content", |content| content.trim().is_empty())
                        && !has_calls(message)
                }),
            _ => false,
        }
    }

    /// Interprets the fields of a record in the `wanted` format, or in the one that they belong to. Unknown
    /// fields are ignored.
    pub(super) fn parse(
        record: &Value,
        wanted: Option<RecordFormat>,
    ) -> Result<(Self, RecordFormat), String> {
        if record.as_map().is_none() {
            return Err("is not an object: expected, for example, {\"text\": ...}".into());
        }
        let format = match wanted {
            Some(format) => format,
            None => recognized(record)?,
        };
        let fields = Fields { record, format };
        let document = match format {
            RecordFormat::TokenIds => token_ids(
                &fields.need("input_ids")?,
                fields.find("labels"),
                fields.find("attention_mask"),
            ),
            RecordFormat::Messages => {
                fields.chat(turns("messages", &fields.need("messages")?, true)?)
            }
            RecordFormat::Sharegpt => {
                let name = "conversations";
                fields.chat(turns(name, &fields.need(name)?, true)?)
            }
            RecordFormat::Completion => completion(&fields),
            RecordFormat::Alpaca => alpaca(&fields),
            RecordFormat::Text => Ok(Self::Text(text("text", &fields.need("text")?)?)),
        };
        Ok((document?, format))
    }
}

/// Returns the format that the fields of a record belong to.
fn recognized(record: &Value) -> Result<RecordFormat, String> {
    let there = |name: &&str| field(record, name).is_some();
    let found = RECOGNIZED.iter().find(|(name, _)| there(name));
    let Some((_, format)) = found else {
        let names = record.as_map().into_iter().flat_map(Map::iter);
        return Err(no_columns(names.filter_map(|(name, _)| name.as_str())));
    };
    if *format == RecordFormat::TokenIds
        && let Some((other, _)) = RECOGNIZED[1..].iter().find(|(name, _)| there(name))
    {
        return Err(format!(
            "has both \"input_ids\" and \"{other}\": leave one of them out, or set data.format"
        ));
    }
    Ok(*format)
}

/// Reads a prompt and its completion: two texts, or two lists of messages.
fn completion(fields: &Fields<'_>) -> Result<Document, String> {
    let (prompt, completion) = match (
        field(fields.record, "prompt"),
        field(fields.record, "completion"),
    ) {
        (Some(prompt), Some(completion)) => (prompt, completion),
        (Some(_), None) if field(fields.record, "chosen").is_some() => {
            return Err(format!("has \"chosen\" but no \"completion\"{PREFERENCES}"));
        }
        (Some(_), None) => return Err("has \"prompt\" but no \"completion\"".into()),
        (None, _) => return Err("has \"completion\" but no \"prompt\"".into()),
    };
    if prompt.as_list().is_none() || completion.as_list().is_none() {
        return Ok(Document::Completion {
            prompt: text("prompt", &prompt)?,
            completion: text("completion", &completion)?,
        });
    }
    let mut all = turns("prompt", &prompt, false)?;
    all.extend(turns("completion", &completion, true)?);
    fields.chat(all)
}

/// Reads an instruction with its answer, and earlier ones in `history`.
fn alpaca(fields: &Fields<'_>) -> Result<Document, String> {
    let instruction = text("instruction", &fields.need("instruction")?)?;
    let input = fields.text(&["input", "context"])?.unwrap_or_default();
    let Some(output) = fields.text(&["output", "response"])? else {
        return Err("has \"instruction\" but no \"output\"".into());
    };
    let question = match input.is_empty() {
        true => instruction,
        false => format!("{instruction}\n{input}"),
    };
    let mut turns = Vec::new();
    let history = fields.find("history");
    for pair in history.iter().filter_map(Value::as_list).flatten() {
        let Some([asked, said]) = pair.as_list() else {
            return Err("\"history\" has an element that is not a pair of texts".into());
        };
        turns.push((message("user", &text("history", asked)?), false));
        turns.push((message("assistant", &text("history", said)?), true));
    }
    turns.push((message("user", &question), false));
    turns.push((message("assistant", &output), true));
    fields.chat(turns)
}

/// Describes which field a record with the given fields lacks.
pub(super) fn no_columns<'a>(found: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = found.take(20).collect();
    let has = |name: &str| names.contains(&name);
    let hint = if has("chosen") && has("rejected") {
        PREFERENCES
    } else if let Some((prompt, completion)) = PAIRS.iter().find(|(a, b)| has(a) && has(b)) {
        &format!(": rename \"{prompt}\" to \"prompt\" and \"{completion}\" to \"completion\"")
    } else {
        ""
    };
    let found: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
    let found = if found.is_empty() {
        "no field".into()
    } else {
        found.join(", ")
    };
    format!(
        "has {found}, but neither \"text\" nor \"prompt\" and \"completion\" nor \"messages\" nor \"conversations\" nor \"instruction\" and \"output\" nor \"input_ids\"{hint}"
    )
}

/// Reads token ids in the format of Hugging Face's tools. Labels are at the positions of their own ids; the
/// model shifts them by one.
fn token_ids(ids: &Value, labels: Option<Value>, mask: Option<Value>) -> Result<Document, String> {
    let whole = |name: &str, value: &Value| -> Result<Vec<i64>, String> {
        let Some(numbers) = value.as_list() else {
            return Err(format!("\"{name}\" is {}, not a list", value.kind()));
        };
        let numbers: Option<Vec<i64>> = numbers.iter().map(Value::as_i64).collect();
        numbers.ok_or_else(|| format!("\"{name}\" has an element that is not a whole number"))
    };
    let ids = whole("input_ids", ids)?;
    let beside = |name: &str, value: Option<Value>| match value.filter(|value| !value.is_none()) {
        None => Ok(None),
        Some(value) => match whole(name, &value)? {
            numbers if numbers.len() == ids.len() => Ok(Some(numbers)),
            numbers => Err(format!(
                "\"{name}\" has {} elements, but \"input_ids\" has {}",
                numbers.len(),
                ids.len()
            )),
        },
    };
    let (labels, mask) = (beside("labels", labels)?, beside("attention_mask", mask)?);
    if mask.is_some_and(|mask| mask.iter().any(|&seen| seen != 1)) {
        return Err("\"attention_mask\" masks some tokens: provide records without padding".into());
    }
    let counts = labels.map(|labels| {
        let pairs = labels.iter().zip(&ids).enumerate();
        let counts = pairs.map(|(at, (label, id))| match *label {
            IGNORED_LABEL => Ok(false),
            label if label == *id => Ok(true),
            label => Err(format!(
                "label {at} is {label}, but \"input_ids\" has {id} there: a label must be the token itself or {IGNORED_LABEL}"
            )),
        });
        counts.collect::<Result<Vec<bool>, String>>()
    });
    let numbers = ids.iter().map(|&id| {
        u32::try_from(id).map_err(|_| format!("\"input_ids\" has {id}, which is not a token id"))
    });
    Ok(Document::Ids {
        ids: numbers.collect::<Result<_, _>>()?,
        counts: counts.transpose()?,
    })
}

fn text(name: &str, value: &Value) -> Result<String, String> {
    match (value.as_str(), value.as_list()) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(_)) => Err(format!(
            "\"{name}\" is a list: put conversations into a field \"messages\", or make both \"prompt\" and \"completion\" lists of messages"
        )),
        (None, None) => Err(format!("\"{name}\" is {}, not text", value.kind())),
    }
}

/// Reads the messages in field `name`, with whether they may count in a loss on completions. A message may have
/// "weight": 0 or "train": false so that it does not.
fn turns(name: &str, value: &Value, counts: bool) -> Result<Vec<(Value, bool)>, String> {
    let Some(messages) = value.as_list() else {
        return Err(format!(
            "\"{name}\" is {}, not a list of {{\"role\", \"content\"}}",
            value.kind()
        ));
    };
    if messages.is_empty() {
        return Err(format!("\"{name}\" is empty"));
    }
    let each = messages.iter().enumerate().map(|(index, said)| {
        let number = index + 1;
        let is_out = said.get("weight") == Some(&Value::from(0u64))
            || said.get("train") == Some(&Value::from(false));
        Ok((turn(said, number)?, counts && !is_out))
    });
    each.collect()
}

/// Reads message `number`, with the keys that transformers gives to templates.
fn turn(said: &Value, number: usize) -> Result<Value, String> {
    let mut said = without_null(said);
    let mut called = role_of(&said) == Some("function_call");
    if let Some(from) = said.get("from").filter(|_| said.get("role").is_none()) {
        let Some(content) = said.get("value") else {
            return Err(format!("message {number} has no \"value\""));
        };
        called = from.as_str() == Some("function_call");
        let role = role(from.as_str().unwrap_or_default())
            .ok_or_else(|| format!("message {number} is from \"{from}\": expected \"human\", \"gpt\", \"system\", \"tool\", \"function_call\" or \"observation\""))?;
        said = [
            ("role", role.into()),
            ("content", text("value", content)?.into()),
        ]
        .into_iter()
        .collect();
    }
    if role_of(&said).is_none() {
        return Err(format!("message {number} has no \"role\""));
    }
    if role_of(&said) == Some("observation") {
        said.insert("role", "tool".into());
    }
    with_text(&mut said, number)?;
    if called {
        said = call_of(&said)
            .map_err(|message| format!("message {number} is a function_call {message}"))?;
    }
    with_reasoning(&mut said);
    Ok(Value::from(said))
}

/// Returns a message without the keys whose value is null, as transformers does: `datasets` writes them for keys that only other
/// messages have, and OpenAI for the content of a tool call.
fn without_null(said: &Value) -> Map {
    let pairs = said.as_map().into_iter().flat_map(Map::iter);
    let pairs = pairs.filter(|(_, value)| !value.is_none());
    pairs
        .filter_map(|(key, value)| Some((key.as_str()?, value.clone())))
        .collect()
}

fn role_of(said: &Map) -> Option<&str> {
    said.get("role")?.as_str()
}

/// Names under which a message has its reasoning; templates read the first one, and those of gpt-oss the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Gives the reasoning to templates under the names that they read, in the order of keys that transformers makes.
fn with_reasoning(said: &mut Map) {
    let Some(reasoning) = REASONING.iter().find_map(|name| said.get(name)).cloned() else {
        return;
    };
    let mut all: Map = [("thinking", reasoning.clone())].into_iter().collect();
    for (key, value) in said.iter() {
        all.insert(key.as_str().unwrap_or_default(), value.clone());
    }
    all.insert("reasoning_content", reasoning);
    *said = all;
}

/// Puts the texts of its parts in place of a content that is a list of parts. Templates of models without images take text
/// only.
fn with_text(said: &mut Map, number: usize) -> Result<(), String> {
    let parts = match said.get("content") {
        Some(content) => content.as_list(),
        // A message that calls a tool has no content.
        None if said.get("tool_calls").is_none() => {
            return Err(format!("message {number} has no \"content\""));
        }
        None => None,
    };
    let Some(parts) = parts else { return Ok(()) };
    let texts: Result<String, String> = parts
        .iter()
        .map(|part| match field(part, "text") {
            Some(text) => self::text("text", &text),
            None => Err(format!(
                "message {number} has a part of type \"{}\" in its \"content\": the trainer reads text only",
                field(part, "type").unwrap_or_default()
            )),
        })
        .collect();
    said.insert("content", texts?.into());
    Ok(())
}

/// Returns the message that calls the functions which LLaMA-Factory's data has as JSON in the content, perhaps after
/// reasoning.
fn call_of(said: &Map) -> Result<Map, String> {
    let content = said
        .get("content")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let (thought, json) = match content.split_once("</think>") {
        Some((thought, json)) => (format!("{}</think>", thought.trim_start()), json),
        None => (String::new(), content),
    };
    let calls: Value =
        serde_json::from_str(json).map_err(|error| format!("whose text is not JSON: {error}"))?;
    let calls = match calls.as_list() {
        Some(calls) => calls.to_vec(),
        None => vec![calls],
    };
    let calls = calls
        .into_iter()
        .map(|call| match (call.get("name"), call.get("arguments")) {
            (Some(_), Some(_)) => Ok(Value::from_pairs([
                ("type", Value::from("function")),
                ("function", call),
            ])),
            _ => Err("without \"name\" and \"arguments\"".to_owned()),
        });
    let mut message = said.clone();
    message.insert("role", "assistant".into());
    message.insert("content", thought.into());
    message.insert("tool_calls", calls.collect::<Result<Vec<_>, _>>()?.into());
    Ok(message)
}

fn has_calls(message: &Value) -> bool {
    let calls = message.get("tool_calls");
    calls.is_some_and(|calls| calls.as_list().is_none_or(|calls| !calls.is_empty()))
}

/// Role of a speaker in the words of ShareGPT's and LLaMA-Factory's data.
fn role(from: &str) -> Option<&'static str> {
    Some(match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" | "function_call" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function_response" => "tool",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Document, String> {
        let found = Document::parse(&serde_json::from_str(json).unwrap(), None);
        found.map(|(document, _)| document)
    }

    /// Speakers and words of a conversation; a star for those that do not count.
    fn said(document: Result<Document, String>) -> Vec<String> {
        let Ok(Document::Chat(chat)) = document else {
            panic!("not a conversation: {document:?}");
        };
        let pairs = chat.messages.iter().zip(&chat.counts);
        pairs
            .map(|(message, counts)| {
                let field = |name| message.get(name).unwrap().to_string();
                let star = if *counts { "" } else { "*" };
                format!("{}: {}{star}", field("role"), field("content"))
            })
            .collect()
    }

    #[test]
    fn instructions_become_conversations() {
        let alpaca =
            parse(r#"{"instruction": "Add.", "input": "1 2", "output": "3", "text": "x"}"#);
        assert_eq!(said(alpaca), ["user: Add.\n1 2*", "assistant: 3"]);
        let dolly = parse(r#"{"instruction": "Say", "context": "", "response": "hi"}"#);
        assert_eq!(said(dolly), ["user: Say*", "assistant: hi"]);
        let longer =
            r#"{"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}"#;
        let expected = [
            "system: s*",
            "user: a*",
            "assistant: b",
            "user: c*",
            "assistant: d",
        ];
        assert_eq!(said(parse(longer)), expected);
        let sharegpt = r#"{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
        assert_eq!(
            said(parse(sharegpt)),
            ["system: s", "user: q", "assistant: a"]
        );
        let with_system = r#"{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
        assert_eq!(
            said(parse(with_system)),
            ["system: s*", "user: q", "assistant: a"]
        );
        let trl = r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w"}], "completion": [{"role": "assistant", "content": "a"}]}"#;
        assert_eq!(
            said(parse(trl)),
            ["user: q*", "assistant: w*", "assistant: a"]
        );
        let weighted = r#"{"messages": [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}, {"role": "assistant", "content": "c", "train": false}]}"#;
        assert_eq!(
            said(parse(weighted)),
            ["assistant: a*", "assistant: b", "assistant: c*"]
        );
    }

    #[test]
    fn a_named_format_takes_its_own_fields() {
        let json = r#"{"instruction": "a", "output": "b", "text": "c"}"#;
        let value = serde_json::from_str(json).unwrap();
        let (found, format) = Document::parse(&value, Some(RecordFormat::Text)).unwrap();
        assert_eq!(
            (found, format),
            (Document::Text("c".into()), RecordFormat::Text)
        );
        let error = Document::parse(&value, Some(RecordFormat::Messages)).unwrap_err();
        assert_eq!(
            error,
            "has no \"messages\", which the format \"messages\" needs"
        );
    }

    #[test]
    fn fields_determine_the_kind_of_a_record() {
        let kind = |json| parse(json).map(|document| document.kind());
        assert_eq!(kind(r#"{"text": "a", "id": 3}"#), Ok(DocumentKind::Text));
        assert_eq!(
            kind(r#"{"prompt": "a", "completion": "b", "text": "c"}"#),
            Ok(DocumentKind::Completion)
        );
        let chat = r#"{"messages": [{"role": "user", "content": "a"}], "tools": null}"#;
        assert_eq!(kind(chat), Ok(DocumentKind::Chat));
        assert!(matches!(
            parse(chat),
            Ok(Document::Chat(Chat { tools: None, .. }))
        ));
    }

    #[test]
    fn parts_of_a_message_are_joined_and_its_other_fields_kept() {
        let parts = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"}]}"#;
        let whole = r#"{"messages": [{"role": "user", "content": "ab", "name": "n"}]}"#;
        assert_eq!(parse(parts), parse(whole));
    }

    /// As transformers gives messages to templates.
    #[test]
    fn keys_with_null_are_dropped_and_reasoning_has_the_names_that_templates_read() {
        let messages = |json: &str| match parse(json) {
            Ok(Document::Chat(chat)) => format!("{:?}", chat.messages),
            other => panic!("{other:?}"),
        };
        let call = r#"{"messages": [{"role": "assistant", "content": null, "name": null, "tool_calls": [{"id": null}]}]}"#;
        assert_eq!(
            messages(call),
            "[{'role': 'assistant', 'tool_calls': [{'id': None}]}]"
        );
        for name in ["reasoning_content", "reasoning", "thinking"] {
            let json = format!(
                r#"{{"messages": [{{"role": "assistant", "{name}": "w", "content": "4"}}]}}"#
            );
            let value = messages(&json);
            for part in [
                "'thinking': 'w'",
                "'reasoning_content': 'w'",
                "'content': '4'",
            ] {
                assert!(value.contains(part), "{value}");
            }
            assert_eq!(
                value.contains("'reasoning':"),
                name == "reasoning",
                "{value}"
            );
        }
        let both = r#"{"messages": [{"role": "assistant", "content": "4", "thinking": "t", "reasoning_content": "r", "reasoning": null}]}"#;
        assert_eq!(
            messages(both),
            "[{'thinking': 't', 'role': 'assistant', 'content': '4', 'reasoning_content': 'r'}]"
        );
    }

    #[test]
    fn calls_and_observations_of_llama_factory_are_tool_calls_and_answers() {
        let call = r#"{\"name\": \"add\", \"arguments\": {\"a\": 1}}"#;
        let turns = |call: &str| {
            format!(
                r#"{{"conversations": [{{"from": "human", "value": "q"}}, {{"from": "function_call", "value": "{call}"}}, {{"from": "observation", "value": "2"}}, {{"from": "gpt", "value": "a"}}], "tools": "[{{\"name\": \"add\"}}]"}}"#
            )
        };
        let expected = "{'role': 'assistant', 'content': 'WHY', 'tool_calls': [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]}";
        for (value, why) in [
            (call.to_owned(), ""),
            (format!("[{call}]"), ""),
            (format!("<think>w</think> {call}"), "<think>w</think>"),
        ] {
            let Ok(Document::Chat(chat)) = parse(&turns(&value)) else {
                panic!("{:?}", parse(&turns(&value)));
            };
            assert_eq!(
                format!("{:?}", chat.messages[1]),
                expected.replace("WHY", why)
            );
            assert_eq!(
                format!("{:?}", chat.messages[2]),
                "{'role': 'tool', 'content': '2'}"
            );
            let tools = chat.tools.unwrap();
            assert_eq!(
                format!("{tools:?}"),
                "[{'type': 'function', 'function': {'name': 'add'}}]"
            );
        }
        let named = r#"{"messages": [{"role": "function_call", "content": "{\"name\": \"f\", \"arguments\": {}}"}, {"role": "observation", "content": "2"}]}"#;
        assert_eq!(said(parse(named)), ["assistant: ", "tool: 2"]);
        for (value, part) in [
            (
                "add(1)",
                "message 2 is a function_call whose text is not JSON",
            ),
            ("[1]", "without \"name\" and \"arguments\""),
        ] {
            let message = parse(&turns(value)).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn an_empty_answer_is_noticed() {
        let is = |json| parse(json).unwrap().is_unanswered();
        assert!(is(r#"{"prompt": "a", "completion": " "}"#));
        assert!(is(r#"{"instruction": "a", "output": ""}"#));
        assert!(is(
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}"#
        ));
        for json in [
            r#"{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]}"#,
            r#"{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}"#,
            r#"{"messages": [{"role": "assistant", "content": "", "weight": 0}]}"#,
            r#"{"text": ""}"#,
        ] {
            assert!(!is(json), "{json}");
        }
    }

    #[test]
    fn token_ids_may_have_labels() {
        let ids = |counts: Option<&[bool]>| Document::Ids {
            ids: vec![5, 6, 7],
            counts: counts.map(<[bool]>::to_vec),
        };
        let found = parse(r#"{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}"#);
        assert_eq!(found, Ok(ids(None)));
        let found = parse(r#"{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}"#);
        assert_eq!(found, Ok(ids(Some(&[false, true, false]))));
        for (json, part) in [
            (
                r#"{"input_ids": 3}"#,
                r#""input_ids" is a number, not a list"#,
            ),
            (r#"{"input_ids": [1, "a"]}"#, "not a whole number"),
            (r#"{"input_ids": [1.5]}"#, "not a whole number"),
            (r#"{"input_ids": [-1]}"#, "has -1, which is not a token id"),
            (
                r#"{"input_ids": [1], "labels": [1, 2]}"#,
                r#""labels" has 2 elements"#,
            ),
            (r#"{"input_ids": [1], "labels": [2]}"#, "label 0 is 2"),
            (
                r#"{"input_ids": [1], "attention_mask": [0]}"#,
                "without padding",
            ),
            (
                r#"{"input_ids": [1], "text": "a"}"#,
                r#"has both "input_ids" and "text""#,
            ),
        ] {
            let message = parse(json).unwrap_err();
            assert!(message.contains(part), "{json}: {message}");
        }
    }

    #[test]
    fn an_unknown_record_is_reported_with_its_fields() {
        for (json, part) in [
            ("{}", "has no field"),
            (r#"{"a": 1, "b": 2}"#, r#"has "a", "b", but neither "text""#),
            (r#"{"text": 3}"#, r#""text" is a number, not text"#),
            (r#"{"text": null}"#, r#""text" is null"#),
            (r#"{"prompt": "a"}"#, r#"no "completion""#),
            (r#"{"completion": "a"}"#, r#"no "prompt""#),
            (
                r#"{"prompt": [], "completion": "a"}"#,
                r#"a field "messages""#,
            ),
            (r#"{"instruction": "a"}"#, r#"no "output""#),
            (
                r#"{"conversations": [{"from": "x", "value": "a"}]}"#,
                r#"is from "x""#,
            ),
            (
                r#"{"conversations": [{"from": "gpt"}]}"#,
                r#"message 1 has no "value""#,
            ),
            (r#"{"messages": []}"#, r#""messages" is empty"#),
            (r#"{"messages": {}}"#, r#""messages" is an object"#),
            (r#"{"messages": [3]}"#, r#"message 1 has no "role""#),
            (
                r#"{"messages": [{"role": "user"}]}"#,
                r#"message 1 has no "content""#,
            ),
            (
                r#"{"messages": [{"role": "user", "content": null, "tool_calls": null}]}"#,
                r#"message 1 has no "content""#,
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}"#,
                r#"message 1 has a part of type "image" in its "content": the trainer reads text only"#,
            ),
            (
                r#"{"question": "a", "answer": "b"}"#,
                r#"rename "question" to "prompt" and "answer" to "completion""#,
            ),
            (
                r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#,
                "preferences need DPO",
            ),
        ] {
            let message = parse(json).unwrap_err();
            assert!(message.contains(part), "{json}: {message}");
        }
    }
}
