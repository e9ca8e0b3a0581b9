//! JSON as Python's `json.dumps` writes it, with the defaults of transformers: not only ASCII, and no escapes for HTML.

use std::fmt::Write;

use crate::args::{Arguments, truth};
use crate::value::SeqKind;
use crate::{Error, Value, python};

/// The filter `tojson`.
pub(crate) fn tojson(value: &Value, args: Arguments) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort_keys] = args.bind("tojson", names)?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(Value::Str(indent)) => Some(indent.to_string()),
        Some(indent) => {
            let width = crate::args::int(Some(indent), 0)?;
            Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(1000)))
        }
    };
    let (item, key) = match separators.filter(|separators| !separators.is_none()) {
        Some(separators) => match &python::items(&separators)?[..] {
            [Value::Str(item), Value::Str(key)] => (item.to_string(), key.to_string()),
            _ => return Err(Error::new("tojson: separators must be two texts")),
        },
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let mut writer = Writer {
        ascii: truth(ascii),
        sort_keys: truth(sort_keys),
        indent,
        item,
        key,
        out: String::new(),
    };
    writer.write(value, 0)?;
    Ok(writer.out.into())
}

struct Writer {
    ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
    out: String,
}

impl Writer {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value {
            Value::Str(text) => self.text(text),
            Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
                self.items(('[', ']'), seq.items.iter(), depth, |writer, item| {
                    writer.write(item, depth + 1)
                })?;
            }
            Value::Map(map) => {
                let mut pairs: Vec<(&Value, &Value)> = map.iter().collect();
                if self.sort_keys {
                    let keys = pairs.iter().map(|(key, _)| (*key).clone()).collect();
                    let order = crate::filters::sorted(keys)?;
                    pairs = order.iter().map(|at| pairs[*at]).collect();
                }
                self.items(
                    ('{', '}'),
                    pairs.into_iter(),
                    depth,
                    |writer, (key, value)| {
                        let key = match key {
                            Value::Str(text) => text.to_string(),
                            key => scalar(key).ok_or_else(|| {
                                Error::new(format!(
                                    "keys must be str, int, float, bool or None, not {}",
                                    python::type_name(key)
                                ))
                            })?,
                        };
                        writer.text(&key);
                        writer.out += &writer.key.clone();
                        writer.write(value, depth + 1)
                    },
                )?;
            }
            value => match scalar(value) {
                Some(text) => self.out += &text,
                None => {
                    return Err(Error::new(format!(
                        "Object of type {} is not JSON serializable",
                        python::type_name(value)
                    )));
                }
            },
        }
        Ok(())
    }

    fn items<T>(
        &mut self,
        (open, close): (char, char),
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        write: impl Fn(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let is_empty = items.len() == 0;
        self.out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                self.out += &self.item.clone();
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !is_empty {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out += &indent.repeat(depth);
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out += "\\\"",
                '\\' => self.out += "\\\\",
                '\n' => self.out += "\\n",
                '\r' => self.out += "\\r",
                '\t' => self.out += "\\t",
                '\x08' => self.out += "\\b",
                '\x0c' => self.out += "\\f",
                c if c < ' ' || self.ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        write!(self.out, "\\u{unit:04x}")
                            .expect("a text takes all that is written");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn scalar(value: &Value) -> Option<String> {
    Some(match value {
        Value::None => "null".into(),
        Value::Bool(true) => "true".into(),
        Value::Bool(false) => "false".into(),
        Value::Int(number) => number.to_string(),
        Value::Float(number) if number.is_nan() => "NaN".into(),
        Value::Float(number) if number.is_infinite() => if *number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into(),
        Value::Float(number) => python::float(*number),
        _ => return None,
    })
}
