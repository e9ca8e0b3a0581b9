//! Parses JSON as DeepSpeed does: accepts comments, trailing commas and Python's `Infinity`, refuses duplicate keys.

use std::fmt;

use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Parses `text`.
///
/// # Errors
/// The message has the line and column in `text`.
pub(crate) fn parse(text: &str) -> Result<Value, String> {
    let plain = without_trimmings(text);
    serde_json::from_str::<Strict>(&plain)
        .map(|Strict(value)| value)
        .map_err(|error| error.to_string())
}

/// What follows the first letter of Python's word for it.
const INFINITY: &str = "nfinity";

/// The text that stands for an infinite number in a tree.
pub(crate) const INFINITE: &str = "inf";

/// Replaces comments (`//`, `#`, `/* */`) and commas before a closing bracket by spaces, so that line and
/// column numbers stay the same.
fn without_trimmings(text: &str) -> String {
    let mut plain: Vec<char> = Vec::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    // Position of the last comma that ended an entry and was followed by white space only; last character that
    // is not white space.
    let (mut comma, mut last) = (None, ' ');
    while let Some(next) = rest.next() {
        let is_line = next == '#' || (next == '/' && rest.peek() == Some(&'/'));
        if is_line {
            plain.push(' ');
            while let Some(skipped) = rest.next_if(|next| *next != '\n') {
                plain.extend(std::iter::repeat_n(' ', skipped.len_utf8()));
            }
        } else if next == '/' && rest.peek() == Some(&'*') {
            plain.push(' ');
            let mut before = ' ';
            for skipped in rest.by_ref() {
                plain.push(if skipped == '\n' { '\n' } else { ' ' });
                if before == '*' && skipped == '/' {
                    break;
                }
                before = skipped;
            }
        } else if next == 'I' && rest.clone().take(INFINITY.len()).eq(INFINITY.chars()) {
            // As text: JSON's numbers are finite. A key that may be infinite accepts it.
            rest.nth(INFINITY.len() - 1);
            plain.extend(format!("\"{INFINITE}\"   ").chars());
            (comma, last) = (None, '"');
        } else {
            match next {
                ',' => comma = (!matches!(last, '[' | '{' | ',')).then_some(plain.len()),
                '}' | ']' => {
                    if let Some(comma) = comma.take() {
                        plain[comma] = ' ';
                    }
                }
                next if next.is_whitespace() => {}
                _ => comma = None,
            }
            plain.push(next);
            if !next.is_whitespace() {
                last = next;
            }
            if next == '"' {
                let mut escaped = false;
                for inside in rest.by_ref() {
                    plain.push(inside);
                    match inside {
                        '"' if !escaped => break,
                        inside => escaped = inside == '\\' && !escaped,
                    }
                }
            }
        }
    }
    plain.into_iter().collect()
}

/// JSON value in which no object has duplicate keys.
struct Strict(Value);

impl<'de> de::Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut table = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if table.contains_key(&key) {
                return Err(de::Error::custom(format!("duplicate key \"{key}\"")));
            }
            let Strict(value) = entries.next_value()?;
            table.insert(key, value);
        }
        Ok(table.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn comments_and_trailing_commas_are_accepted() {
        let text = "{ // the stage\n\"stage\": 3, # three\n/* and\nmore */ \"path\": \"/a//b#c,]\", \"list\": [1, 2, ],\n}";
        let expected = json!({"stage": 3, "path": "/a//b#c,]", "list": [1, 2]});
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(
            parse(r#"["a\"//,]", "\\", 1e9, -1, null, true,]"#).unwrap()[0],
            "a\"//,]"
        );
        let lines = "{\"every\": Infinity,\n\"x\": \"Infinity\", }";
        assert_eq!(
            parse(lines).unwrap(),
            json!({"every": INFINITE, "x": "Infinity"})
        );
    }

    #[test]
    fn a_syntax_error_is_reported_with_its_line() {
        let wrong = |text: &str, part: &str| {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        wrong(
            "{\n\"a\": 1, // one\n\"a\": 2}",
            "duplicate key \"a\" at line 3",
        );
        wrong("{/* never closed", "line 1");
        wrong("[1,, 2]", "line 1 column 4");
        wrong("[,]", "line 1");
        wrong("{\"a\": \"open", "line 1");
        wrong("", "line 1");
        wrong(&"[".repeat(100_000), "recursion limit");
    }
}
