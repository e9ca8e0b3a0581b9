//! Reads the fields of a settings struct with their doc comments from its source.
//!
//! The doc comment of a setting gives its meaning and, in a paragraph of its own, `Default: ... Example: ...`, each a value in backticks or, for a
//! default, words.

/// One field of a settings struct.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: String,
    /// Type as written in Rust, without `Option`.
    pub kind: String,
    pub meaning: String,
    pub default: String,
    pub example: String,
}

/// Returns the fields of `struct NAME` in `source`, in order.
///
/// # Panics
/// If there is no such struct, or a field's doc comment lacks its meaning, default or example.
pub fn settings(source: &str, name: &str) -> Vec<Setting> {
    let head = format!("struct {name} {{\n");
    let (_, rest) = source
        .split_once(&head)
        .unwrap_or_else(|| panic!("there is no struct {name}"));
    let (body, _) = rest.split_once("\n}").expect("a struct ends");
    let mut found = Vec::new();
    let mut doc: Vec<&str> = Vec::new();
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            doc.push(text.trim());
        } else if let Some((field, kind)) = line
            .strip_suffix(',')
            .and_then(|line| line.split_once(": "))
            && !line.starts_with('#')
        {
            // Tables have settings of their own.
            if kind.contains("Toml") {
                doc.clear();
                continue;
            }
            found.push(setting(
                field.trim_start_matches("pub "),
                kind,
                &doc.join("\n"),
            ));
            doc.clear();
        }
    }
    found
}

fn setting(name: &str, kind: &str, doc: &str) -> Setting {
    let lacks = |what: &str| panic!("{name}: its doc comment has no {what}: {doc}");
    let (meaning, rest) = doc
        .split_once("\n\nDefault: ")
        .unwrap_or_else(|| lacks("`Default:`"));
    let (default, example) = rest
        .split_once("Example: ")
        .unwrap_or_else(|| lacks("`Example:`"));
    let one_line = |text: &str| {
        text.replace('\n', " ")
            .trim()
            .trim_end_matches('.')
            .to_owned()
    };
    let option = kind
        .strip_prefix("Option<")
        .and_then(|kind| kind.strip_suffix('>'));
    if meaning.is_empty() {
        lacks("meaning");
    }
    Setting {
        name: name.into(),
        kind: option.unwrap_or(kind).into(),
        meaning: meaning.replace("\n\n", "<br>").replace('\n', " "),
        default: one_line(default),
        example: one_line(example).trim_matches('`').into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_with_its_doc_comment() {
        let source = "/// A.\nstruct Other {\n    x: u8,\n}\nstruct A {\n    /// How\n    /// much.\n    ///\n    /// Default: none. Example: `\"1GiB\"`.\n    #[serde(default)]\n    much: Option<Size>,\n}\n";
        let expected = Setting {
            name: "much".into(),
            kind: "Size".into(),
            meaning: "How much.".into(),
            default: "none".into(),
            example: "\"1GiB\"".into(),
        };
        assert_eq!(settings(source, "A"), [expected]);
    }

    #[test]
    #[should_panic(expected = "x: its doc comment has no `Default:`")]
    fn a_field_without_its_default_is_a_fault() {
        settings("struct Other {\n    x: u8,\n}\n", "Other");
    }
}
