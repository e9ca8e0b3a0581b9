//! The Jinja dialect of transformers: extensions that chat templates rely on.
//!
//! `{% generation %}` and `{% endgeneration %}`, with which a template marks the assistant's part, become a
//! filter block that puts marks around it.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

/// Marks for the beginning and the end of the assistant's part: Unicode noncharacters, which do not occur in
/// text.
pub(super) const BEGINS: char = '\u{FDD0}';
pub(super) const ENDS: char = '\u{FDD1}';

/// Instruction limit of a template for one conversation; a template that exceeds it is considered endless.
const FUEL: u64 = 50_000_000;
const NAME: &str = "chat";

/// Compiles a template. Also returns whether it marks the assistant's part.
pub(super) fn environment(source: &str) -> Result<(Environment<'static>, bool), Error> {
    // Python's jinja2 converts every kind of line end to a line feed.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let (source, marks) = with_marks(&source);
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(python_words);
    environment.add_filter("tojson", tojson);
    environment.add_filter("generated", |text: &str| format!("{BEGINS}{text}{ENDS}"));
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment.add_function("strftime_now", strftime_now);
    environment.add_template_owned(NAME, source)?;
    Ok((environment, marks))
}

/// Runs the template.
pub(super) fn render(environment: &Environment<'_>, values: Value) -> Result<String, String> {
    let rendered = environment
        .get_template(NAME)
        .and_then(|template| template.render(values));
    rendered.map_err(|error| match error.detail() {
        // An error raised by the template itself.
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_owned(),
        _ => error.to_string(),
    })
}

/// Replaces generation blocks by filter blocks. Also returns whether there were any.
fn with_marks(source: &str) -> (String, bool) {
    let mut written = String::with_capacity(source.len());
    let mut rest = source;
    let mut marks = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        written += before;
        let Some(length) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (inside, after) = tag.split_at(length);
        let word = inside.trim_matches(['-', '+']).trim();
        let instead = match word {
            "generation" => "filter generated",
            "endgeneration" => "endfilter",
            _ => word,
        };
        if instead == word {
            written += inside;
        } else {
            marks = true;
            written += &inside.replacen(word, instead, 1);
        }
        rest = after;
    }
    written += rest;
    (written, marks)
}

/// Formats values as Python does where it differs from Rust.
fn python_words(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    Ok(out.write_str(word)?)
}

/// Formats the current time like strftime.
fn strftime_now(format: String) -> Result<String, Error> {
    use std::fmt::Write;
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(&format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: \"{format}\" is not a valid time format"),
        )
    })?;
    Ok(text)
}

/// Python's `json.dumps(value, ensure_ascii=False)`: keys in order, a space after commas and colons, no HTML
/// escapes.
/// HTML.
fn tojson(value: &Value, args: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = args.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(indent) => Some(usize::try_from(indent)?),
        None => None,
    };
    let sort_keys: Option<bool> = args.get("sort_keys")?;
    let ensure_ascii: Option<bool> = args.get("ensure_ascii")?;
    if ensure_ascii == Some(true) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson(ensure_ascii=true) is not supported",
        ));
    }
    args.assert_all_used()?;
    let mut text = String::new();
    Json {
        indent,
        sort_keys: sort_keys.unwrap_or(false),
    }
    .write(value, 0, &mut text)?;
    Ok(text)
}

struct Json {
    indent: Option<usize>,
    sort_keys: bool,
}

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&value.to_string()),
            ValueKind::String => {
                let text = value.as_str().unwrap_or_default();
                *out += &serde_json::to_string(text).expect("text is JSON");
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.items(('{', '}'), &keys, depth, out, |key, out| {
                    *out += &serde_json::to_string(&key.to_string()).expect("text is JSON");
                    *out += ": ";
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(('[', ']'), &items, depth, out, |item, out| {
                    self.write(item, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: {kind} cannot be represented in JSON"),
                ));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        (open, close): (char, char),
        items: &[Value],
        depth: usize,
        out: &mut String,
        write: impl Fn(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            match (index, self.indent) {
                (0, _) => {}
                (_, None) => out.push_str(", "),
                (_, Some(_)) => out.push(','),
            }
            line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }
}
