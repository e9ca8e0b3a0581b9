//! Interprets a JSON line or table row as a text, a prompt with its completion, a conversation, or token ids.

use std::fmt;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Document, which is tokenized as a unit.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) enum Document {
    /// Bytes of a file, not necessarily UTF-8.
    Bytes(Vec<u8>),
    /// `{"text"}`
    Text(String),
    /// `{"prompt", "completion"}`
    Completion { prompt: String, completion: String },
    /// `{"messages": [{"role", "content"}...]}`, and optionally `"tools"`, for the tokenizer's template. Keys
    /// keep their order, because templates print them.
    Chat {
        messages: Vec<Value>,
        tools: Option<Value>,
    },
    /// Token ids of a file, or `{"input_ids", "labels"}`. Labels, if present, determine which ids count as targets.
    Ids {
        ids: Vec<u32>,
        counts: Option<Vec<bool>>,
    },
}

/// Kinds of documents that cannot be mixed. A text file counts as a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum Kind {
    Text,
    Completion,
    Chat,
    Ids,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "a text",
            Self::Completion => "a prompt with its completion",
            Self::Chat => "a conversation",
            Self::Ids => "token ids",
        })
    }
}

/// Columns that are read, in order of precedence for the kind of a record.
pub(super) const COLUMNS: [&str; 8] = [
    "input_ids",
    "labels",
    "attention_mask",
    "messages",
    "tools",
    "prompt",
    "completion",
    "text",
];

/// PyTorch's label for a token that does not count.
const IGNORED_LABEL: i64 = -100;

impl Document {
    pub(in crate::data) fn kind(&self) -> Kind {
        match self {
            Self::Bytes(_) | Self::Text(_) => Kind::Text,
            Self::Completion { .. } => Kind::Completion,
            Self::Chat { .. } => Kind::Chat,
            Self::Ids { .. } => Kind::Ids,
        }
    }

    /// Interprets the fields of a record. Unknown fields are ignored.
    pub(super) fn of(record: &Value) -> Result<Self, String> {
        if record.kind() != ValueKind::Map {
            return Err("is not an object: expected, for example, {\"text\": ...}".into());
        }
        let field = |name| {
            let value = record.get_attr(name).unwrap_or_default();
            (!value.is_undefined()).then_some(value)
        };
        if let Some(ids) = field("input_ids") {
            let text = ["messages", "prompt", "completion", "text"];
            if let Some(other) = text.iter().find(|name| field(name).is_some()) {
                return Err(format!(
                    "has both \"input_ids\" and \"{other}\": leave one of them out"
                ));
            }
            return token_ids(&ids, field("labels"), field("attention_mask"));
        }
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

/// Describes which field a record with the given fields lacks.
pub(super) fn no_columns<'a>(found: impl Iterator<Item = &'a str>) -> String {
    let found: Vec<String> = found.take(20).map(|name| format!("\"{name}\"")).collect();
    let found = if found.is_empty() {
        "no field".into()
    } else {
        found.join(", ")
    };
    format!(
        "has {found}, but neither \"text\" nor \"prompt\" and \"completion\" nor \"messages\" nor \"input_ids\""
    )
}

/// Reads token ids in the format of Hugging Face's tools. Labels are at the positions of their own ids; the
/// model shifts them by one.
fn token_ids(ids: &Value, labels: Option<Value>, mask: Option<Value>) -> Result<Document, String> {
    let whole = |name: &str, value: &Value| -> Result<Vec<i64>, String> {
        if value.kind() != ValueKind::Seq {
            return Err(format!("\"{name}\" is {}, not a list", word(value.kind())));
        }
        let numbers = value.try_iter().into_iter().flatten();
        let numbers = numbers.map(|number| match number.kind() {
            ValueKind::Number => i64::try_from(number).ok(),
            _ => None,
        });
        let numbers: Option<Vec<i64>> = numbers.collect();
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
    match (value.as_str(), value.kind()) {
        (Some(text), _) => Ok(text.to_owned()),
        (None, ValueKind::Seq) => Err(format!(
            "\"{name}\" is a list: put conversations into a field \"messages\""
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
        // A message that calls a tool has no content.
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
    fn fields_determine_the_kind_of_a_record() {
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
    fn token_ids_may_have_labels() {
        let ids = |counts: Option<&[bool]>| Document::Ids {
            ids: vec![5, 6, 7],
            counts: counts.map(<[bool]>::to_vec),
        };
        let found = of(r#"{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}"#);
        assert_eq!(found, Ok(ids(None)));
        let found = of(r#"{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}"#);
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
            let message = of(json).unwrap_err();
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
                r#"{"prompt": [], "completion": []}"#,
                r#"a field "messages""#,
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
