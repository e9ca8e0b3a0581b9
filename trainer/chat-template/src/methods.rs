//! Methods of texts, lists and mappings.

use crate::args::{Arguments, int, required, text, truth};
use crate::lexer::is_space;
use crate::object::Object;
use crate::value::SeqKind;
use crate::{Error, Value, format, python};

const TEXT: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

/// Methods of texts without arguments.
const NO_ARGUMENTS: [&str; 18] = [
    "capitalize",
    "casefold",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "lower",
    "swapcase",
    "title",
    "upper",
];

/// Returns whether values of this type have the method.
pub(crate) fn exists(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) => TEXT.contains(&name),
        Value::Seq(seq) => match seq.kind {
            SeqKind::List => matches!(name, "copy" | "count" | "index"),
            SeqKind::Tuple | SeqKind::Range => matches!(name, "count" | "index"),
            _ => false,
        },
        Value::Map(_) => matches!(name, "copy" | "get" | "items" | "keys" | "values"),
        Value::Object(object) => object.has_method(name),
        _ => false,
    }
}

/// Returns whether it is a method that would change the value, which the sandbox forbids.
pub(crate) fn modifies(value: &Value, name: &str) -> bool {
    match value {
        Value::Seq(seq) if seq.kind == SeqKind::List => matches!(
            name,
            "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort"
        ),
        Value::Map(_) => matches!(name, "clear" | "pop" | "popitem" | "setdefault" | "update"),
        _ => false,
    }
}

pub(crate) fn call(value: &Value, name: &str, args: Arguments) -> Result<Value, Error> {
    match value {
        Value::Str(text) => of_text(text, name, args),
        Value::Seq(seq) => of_list(value, &seq.items, name, args),
        Value::Object(object) => {
            let object: &Object = object;
            crate::functions::call_method(object, name, args)
        }
        map => of_map(map, name, args),
    }
}

fn of_map(value: &Value, name: &str, args: Arguments) -> Result<Value, Error> {
    let map = value.as_map().expect("only mappings are left");
    if name == "get" {
        let [key, default] = args.bind("get", ["key", "default"])?;
        let key = required(key, "get", "key")?;
        crate::expressions::key_of(key.clone())?;
        return Ok(map.get_value(&key).cloned().or(default).unwrap_or_default());
    }
    let [] = args.bind(name, [])?;
    let pairs = map.iter();
    Ok(match name {
        "items" => Value::seq(
            SeqKind::Items,
            pairs
                .map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()]))
                .collect(),
        ),
        "keys" => Value::seq(SeqKind::Keys, pairs.map(|(key, _)| key.clone()).collect()),
        "values" => Value::seq(
            SeqKind::Values,
            pairs.map(|(_, value)| value.clone()).collect(),
        ),
        _ => value.clone(),
    })
}

fn of_list(value: &Value, items: &[Value], name: &str, args: Arguments) -> Result<Value, Error> {
    if name == "copy" {
        return Ok(value.clone());
    }
    let [wanted] = args.bind(name, ["value"])?;
    let wanted = required(wanted, name, "value")?;
    if name == "count" {
        return Ok(items.iter().filter(|item| **item == wanted).count().into());
    }
    match items.iter().position(|item| *item == wanted) {
        Some(at) => Ok(at.into()),
        None => Err(Error::new(format!(
            "{} is not in list",
            python::repr(&wanted)
        ))),
    }
}

fn of_text(own: &str, name: &str, args: Arguments) -> Result<Value, Error> {
    match name {
        _ if NO_ARGUMENTS.contains(&name) => {
            let [] = args.bind(name, [])?;
            Ok(without_arguments(own, name))
        }
        "split" | "rsplit" | "splitlines" | "startswith" | "endswith" | "removeprefix"
        | "removesuffix" | "replace" | "find" | "rfind" | "index" | "rindex" | "count"
        | "partition" | "rpartition" => parts(own, name, args),
        _ => formed(own, name, args),
    }
}

/// Methods without arguments.
fn without_arguments(own: &str, name: &str) -> Value {
    let letters = |holds: fn(char) -> bool| !own.is_empty() && own.chars().all(holds);
    match name {
        "lower" => own.to_lowercase().into(),
        "casefold" => own.to_lowercase().replace('ß', "ss").into(),
        "upper" => own.to_uppercase().into(),
        "capitalize" => capitalized(own).into(),
        "title" => titled(own, |c| !c.is_alphabetic()).into(),
        "swapcase" => {
            let swapped: String = own
                .chars()
                .map(|c| match c.is_uppercase() {
                    true => c.to_lowercase().to_string(),
                    false => c.to_uppercase().to_string(),
                })
                .collect();
            swapped.into()
        }
        "isalpha" => letters(char::is_alphabetic).into(),
        "isalnum" => letters(char::is_alphanumeric).into(),
        "isascii" => own.is_ascii().into(),
        "isdigit" | "isdecimal" | "isnumeric" => letters(char::is_numeric).into(),
        "isspace" => letters(is_space).into(),
        "isprintable" => (python::repr(&own.replace(['\\', '\''], "").into()).len()
            == own.replace(['\\', '\''], "").len() + 2)
            .into(),
        "isidentifier" => {
            let starts = own.starts_with(|c: char| c.is_alphabetic() || c == '_');
            (starts && own.chars().all(|c| c.is_alphanumeric() || c == '_')).into()
        }
        "islower" => is_lower(own).into(),
        "isupper" => is_upper(own).into(),
        "istitle" => (own.chars().any(char::is_alphabetic)
            && titled(own, |c| !c.is_alphabetic()) == own)
            .into(),
        _ => unreachable!("the names are known"),
    }
}

/// Methods that look for parts of a text.
fn parts(own: &str, name: &str, args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "split" | "rsplit" => {
            let [separator, count] = args.bind(name, ["sep", "maxsplit"])?;
            let count = usize::try_from(int(count, -1)?).unwrap_or(usize::MAX);
            let parts = match text(separator, name)? {
                Some(separator) if separator.is_empty() => {
                    return Err(Error::new("empty separator"));
                }
                Some(separator) if name == "split" => split(own, &separator, count),
                Some(separator) => rsplit(own, &separator, count),
                None => split_words(own, count, name == "rsplit"),
            };
            Value::list(parts.into_iter().map(Value::from).collect())
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"])?;
            let lines = lines(own, truth(keep)).into_iter();
            Value::list(lines.map(Value::from).collect())
        }
        "startswith" | "endswith" => {
            let [part, start, end] = args.bind(name, ["prefix", "start", "end"])?;
            let part = required(part, name, "prefix")?;
            let own: String = within(own, start, end)?.1;
            let one = |part: &Value| match part.as_str() {
                Some(part) if name == "startswith" => Ok(own.starts_with(part)),
                Some(part) => Ok(own.ends_with(part)),
                None => Err(Error::new(format!(
                    "{name} first arg must be str or a tuple of str, not {}",
                    python::type_name(part)
                ))),
            };
            match &part {
                Value::Seq(seq) if seq.kind == SeqKind::Tuple => {
                    let mut found = false;
                    for part in &seq.items {
                        found |= one(part)?;
                    }
                    found.into()
                }
                part => one(part)?.into(),
            }
        }
        "removeprefix" | "removesuffix" => {
            let part = one_text(args, name)?;
            let rest = match name {
                "removeprefix" => own.strip_prefix(&*part),
                _ => own.strip_suffix(&*part),
            };
            rest.unwrap_or(own).into()
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let old = needed(old, name)?;
            let new = needed(new, name)?;
            let count = usize::try_from(int(count, -1)?).unwrap_or(usize::MAX);
            own.replacen(&*old, &new, count).into()
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [part, start, end] = args.bind(name, ["sub", "start", "end"])?;
            let part = needed(part, name)?;
            let (start, own) = within(own, start, end)?;
            if name == "count" {
                return Ok(match part.is_empty() {
                    true => (own.chars().count() + 1).into(),
                    false => own.matches(&*part).count().into(),
                });
            }
            let at = match name.starts_with('r') {
                true => own.rfind(&*part),
                false => own.find(&*part),
            };
            match at {
                Some(at) => (start + own[..at].chars().count()).into(),
                None if name.ends_with("find") => Value::Int(-1),
                None => return Err(Error::new("substring not found")),
            }
        }
        "partition" | "rpartition" => {
            let part = one_text(args, name)?;
            let found = match name {
                "partition" => own.split_once(&*part),
                _ => own.rsplit_once(&*part),
            };
            let parts = match (found, name) {
                (Some((before, after)), _) => [before, &part, after],
                (None, "partition") => [own, "", ""],
                (None, _) => ["", "", own],
            };
            Value::tuple(parts.into_iter().map(Value::from).collect())
        }
        _ => unreachable!("the names are known"),
    })
}

/// Methods that make another text.
fn formed(own: &str, name: &str, args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"])?;
            strip(own, text(chars, name)?.as_deref(), name).into()
        }
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            let items = python::items(&required(items, name, "iterable")?)?;
            let mut texts = Vec::with_capacity(items.len());
            for (at, item) in items.iter().enumerate() {
                texts.push(item.as_str().ok_or_else(|| {
                    Error::new(format!(
                        "sequence item {at}: expected str instance, {} found",
                        python::type_name(item)
                    ))
                })?);
            }
            texts.join(own).into()
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = args.bind(name, ["width", "fillchar"])?;
            let fill = text(fill, name)?.unwrap_or_else(|| " ".into());
            pad(own, int(width, 0)?, &fill, name)?.into()
        }
        "zfill" => {
            let [width] = args.bind(name, ["width"])?;
            let (sign, digits) = match own.starts_with(['+', '-']) {
                true => own.split_at(1),
                false => ("", own),
            };
            let width = int(width, 0)? - sign.len() as i128;
            format!("{sign}{}", pad(digits, width, "0", "rjust")?).into()
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"])?;
            let size = usize::try_from(int(size, 8)?).unwrap_or(0).min(1000);
            let (mut out, mut column) = (String::new(), 0);
            for c in own.chars() {
                match c {
                    '\t' => {
                        let spaces = if size == 0 { 0 } else { size - column % size };
                        out += &" ".repeat(spaces);
                        column += spaces;
                    }
                    c => {
                        out.push(c);
                        column = if matches!(c, '\n' | '\r') {
                            0
                        } else {
                            column + 1
                        };
                    }
                }
            }
            out.into()
        }
        "format_map" => {
            let [map] = args.bind(name, ["mapping"])?;
            let map = map.unwrap_or_default();
            let pairs = map.as_map().map(|map| map.iter()).into_iter().flatten();
            let keywords = pairs
                .map(|(key, value)| (python::str(key), value.clone()))
                .collect();
            let positional = Vec::new();
            format::str_format(
                own,
                &Arguments {
                    positional,
                    keywords,
                },
            )?
            .into()
        }
        _ => format::str_format(own, &args)?.into(),
    })
}

fn needed(value: Option<Value>, name: &str) -> Result<String, Error> {
    text(value, name)?.ok_or_else(|| Error::new(format!("{name}() argument must be str")))
}

fn one_text(args: Arguments, name: &str) -> Result<String, Error> {
    let [part] = args.bind(name, ["part"])?;
    needed(part, name)
}

/// Returns the part of a text between two positions, and where it starts.
fn within(own: &str, start: Option<Value>, end: Option<Value>) -> Result<(usize, String), Error> {
    let length = own.chars().count() as i128;
    let place = |value: Option<Value>, default| -> Result<usize, Error> {
        let at = int(value.filter(|value| !value.is_none()), default)?;
        let at = if at < 0 { at + length } else { at };
        Ok(at.clamp(0, length) as usize)
    };
    let (start, end) = (place(start, 0)?, place(end, length)?);
    let part = own.chars().skip(start).take(end.saturating_sub(start));
    Ok((start, part.collect()))
}

pub(crate) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

pub(crate) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

pub(crate) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        None => String::new(),
        Some(first) => first
            .to_uppercase()
            .chain(chars.as_str().to_lowercase().chars())
            .collect(),
    }
}

/// Makes the first letter after each character that `separates` a capital, and others small.
pub(crate) fn titled(text: &str, separates: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        match begins {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        begins = separates(c);
    }
    out
}

pub(crate) fn strip<'t>(text: &'t str, chars: Option<&str>, name: &str) -> &'t str {
    let is_out = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = match name {
        "rstrip" => text,
        _ => text.trim_start_matches(is_out),
    };
    match name {
        "lstrip" => text,
        _ => text.trim_end_matches(is_out),
    }
}

fn split<'t>(text: &'t str, separator: &str, count: usize) -> Vec<&'t str> {
    text.splitn(count.saturating_add(1), separator).collect()
}

fn rsplit<'t>(text: &'t str, separator: &str, count: usize) -> Vec<&'t str> {
    let mut parts: Vec<&str> = text.rsplitn(count.saturating_add(1), separator).collect();
    parts.reverse();
    parts
}

/// Splits at white space, `count` times at most, from the end if `reverse`.
fn split_words(text: &str, count: usize, reverse: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = strip(text, None, if reverse { "rstrip" } else { "lstrip" });
    while !rest.is_empty() {
        let cut = match (parts.len() == count, reverse) {
            (true, _) => None,
            (false, false) => rest.split_once(is_space),
            (false, true) => rest
                .rsplit_once(is_space)
                .map(|(before, word)| (word, before)),
        };
        match cut {
            Some((word, others)) => {
                parts.push(word);
                rest = strip(others, None, if reverse { "rstrip" } else { "lstrip" });
            }
            None => {
                // Only the side that is not split keeps its white space.
                parts.push(strip(
                    rest,
                    None,
                    match (parts.len() == count, reverse) {
                        (true, false) => "lstrip",
                        (true, true) => "rstrip",
                        (false, _) => "strip",
                    },
                ));
                rest = "";
            }
        }
    }
    if reverse {
        parts.reverse();
    }
    parts
}

/// Python's `splitlines`.
pub(crate) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(is_end) else {
            lines.push(rest);
            break;
        };
        let bytes = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..if keep_ends { at + bytes } else { at }]);
        rest = &rest[at + bytes..];
    }
    lines
}

/// Pads a text, as `center`, `ljust` or `rjust` do.
pub(crate) fn pad(text: &str, width: i128, fill: &str, name: &str) -> Result<String, Error> {
    if width > 100_000 {
        return Err(Error::new(format!("{name}({width}): too wide")));
    }
    let missing = usize::try_from(width - text.chars().count() as i128).unwrap_or(0);
    let width = usize::try_from(width).unwrap_or(0);
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // The odd one of the spaces goes left if the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    Ok([&fill.repeat(left), text, &fill.repeat(missing - left)].concat())
}
