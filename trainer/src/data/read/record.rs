//! What a line of JSON or a row of a table is: a text, a prompt and its completion, or a conversation.

use std::fmt;

use minijinja::Value;
use minijinja::value::ValueKind;

/// What is tokenized as one.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) enum Document {
    /// Bytes of a file, UTF-8 or not.
    Bytes(Vec<u8>),
    /// `{"text"}`
    Text(String),
    /// `{"prompt", "completion"}`
    Completion { prompt: String, completion: String },
    /// `{"messages": [{"role", "content"}...]}`, and `"tools"` where there are some, for the tokenizer's template. Keys stay in
    /// their order: templates write them out.
    Chat {
        messages: Vec<Value>,
        tools: Option<Value>,
    },
}

/// The kinds of documents that do not mix. A file of text is a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum Kind {
    Text,
    Completion,
    Chat,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "a text",
            Self::Completion => "a prompt with its completion",
            Self::Chat => "a conversation",
        })
    }
}

/// Columns that are read, in the order in which they say what a record is.
pub(super) const COLUMNS: [&str; 5] = ["messages", "tools", "prompt", "completion", "text"];

impl Document {
    pub(in crate::data) fn kind(&self) -> Kind {
        match self {
            Self::Bytes(_) | Self::Text(_) => Kind::Text,
            Self::Completion { .. } => Kind::Completion,
            Self::Chat { .. } => Kind::Chat,
        }
    }

    /// From the fields of a record. Other fields than ours are the person's own.
    pub(super) fn of(record: &Value) -> Result<Self, String> {
        if record.kind() != ValueKind::Map {
            return Err("is no object: expected {\"text\": ...} or the like".into());
        }
        let field = |name| {
            let value = record.get_attr(name).unwrap_or_default();
            (!value.is_undefined()).then_some(value)
        };
        if let Some(messages) = field("messages") {
            return Ok(Self::Chat {
                messages: conversation(&messages)?,
                tools: field("tools").filter(|tools| !tools.is_none()),
            });
        }
        match (field("prompt"), field("completion")) {
            (Some(prompt), Some(completion)) => {
                return Ok(Self::Completion {
                    prompt: text("prompt", &prompt)?,
                    completion: text("completion", &completion)?,
                });
            }
            (Some(_), None) => return Err("has \"prompt\" but no \"completion\"".into()),
            (None, Some(_)) => return Err("has \"completion\" but no \"prompt\"".into()),
            (None, None) => {}
        }
        match field("text") {
            Some(value) => Ok(Self::Text(text("text", &value)?)),
            None => {
                let names: Vec<Value> = record.try_iter().into_iter().flatten().collect();
                Err(no_columns(names.iter().filter_map(Value::as_str)))
            }
        }
    }
}

/// What is missing from a record that has these fields.
pub(super) fn no_columns<'a>(found: impl Iterator<Item = &'a str>) -> String {
    let found: Vec<String> = found.take(20).map(|name| format!("\"{name}\"")).collect();
    let found = if found.is_empty() {
        "no field".into()
    } else {
        found.join(", ")
    };
    format!("has {found}, but neither \"text\" nor \"prompt\" and \"completion\" nor \"messages\"")
}

fn text(name: &str, value: &Value) -> Result<String, String> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, ValueKind::Seq) => Err(format!(
            "\"{name}\" is a list: conversations go into one field \"messages\""
        )),
        (None, kind) => Err(format!("\"{name}\" is {}, not text", word(kind))),
    }
}

fn conversation(messages: &Value) -> Result<Vec<Value>, String> {
    if messages.kind() != ValueKind::Seq {
        return Err(format!(
            "\"messages\" is {}, not a list of {{\"role\", \"content\"}}",
            word(messages.kind())
        ));
    }
    let messages: Vec<Value> = messages.try_iter().into_iter().flatten().collect();
    if messages.is_empty() {
        return Err("\"messages\" is empty".into());
    }
    for (index, message) in messages.iter().enumerate() {
        let number = index + 1;
        let field = |name| message.get_attr(name).unwrap_or_default();
        if field("role").as_str().is_none() {
            return Err(format!("message {number} has no \"role\""));
        }
        // A call of a tool has no content.
        if field("content").is_undefined() && field("tool_calls").is_undefined() {
            return Err(format!("message {number} has no \"content\""));
        }
    }
    Ok(messages)
}

fn word(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::None => "null",
        ValueKind::Bool => "true or false",
        ValueKind::Number => "a number",
        ValueKind::String => "text",
        ValueKind::Seq => "a list",
        _ => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<Document, String> {
        Document::of(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn fields_say_what_a_record_is() {
        let kind = |json| of(json).map(|document| document.kind());
        assert_eq!(kind(r#"{"text": "a", "id": 3}"#), Ok(Kind::Text));
        assert_eq!(
            kind(r#"{"prompt": "a", "completion": "b", "text": "c"}"#),
            Ok(Kind::Completion)
        );
        let chat = r#"{"messages": [{"role": "user", "content": "a"}], "tools": null}"#;
        assert_eq!(kind(chat), Ok(Kind::Chat));
        assert!(matches!(of(chat), Ok(Document::Chat { tools: None, .. })));
    }

    #[test]
    fn what_is_no_record_says_what_it_has() {
        for (json, part) in [
            ("{}", "has no field"),
            (r#"{"a": 1, "b": 2}"#, r#"has "a", "b", but neither "text""#),
            (r#"{"text": 3}"#, r#""text" is a number, not text"#),
            (r#"{"text": null}"#, r#""text" is null"#),
            (r#"{"prompt": "a"}"#, r#"no "completion""#),
            (r#"{"completion": "a"}"#, r#"no "prompt""#),
            (
                r#"{"prompt": [], "completion": []}"#,
                r#"one field "messages""#,
            ),
            (r#"{"messages": []}"#, r#""messages" is empty"#),
            (r#"{"messages": {}}"#, r#""messages" is an object"#),
            (r#"{"messages": [3]}"#, r#"message 1 has no "role""#),
            (
                r#"{"messages": [{"role": "user"}]}"#,
                r#"message 1 has no "content""#,
            ),
        ] {
            let message = of(json).unwrap_err();
            assert!(message.contains(part), "{json}: {message}");
        }
    }
}
