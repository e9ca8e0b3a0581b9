//! Filters of jinja2 and transformers.

use std::cmp::Ordering;
use std::collections::HashSet;

use crate::args::{Arguments, int, required, truth};
use crate::expressions::{attribute, item, key_of};
use crate::object::Object;
use crate::value::Key;
use crate::{Error, Value, format, json, methods, predicates, python};

const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];

pub(crate) fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Applies a filter.
pub(crate) fn apply(name: &str, value: Value, args: Arguments) -> Result<Value, Error> {
    match name {
        "string" | "safe" | "upper" | "lower" | "capitalize" | "title" | "trim" | "center"
        | "replace" | "format" | "indent" | "truncate" | "wordcount" | "escape" | "e"
        | "forceescape" | "urlencode" => texts(name, &value, args),
        "int" | "float" | "abs" | "round" => numbers(name, &value, args),
        "join" | "sort" | "min" | "max" | "sum" | "unique" | "groupby" | "dictsort" | "map"
        | "select" | "reject" | "selectattr" | "rejectattr" => by_key(name, &value, args),
        _ => others(name, value, args),
    }
}

/// Filters that make a text.
fn texts(name: &str, value: &Value, args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "string" | "safe" => python::str(value).into(),
        "upper" => python::str(value).to_uppercase().into(),
        "lower" => python::str(value).to_lowercase().into(),
        "capitalize" => methods::capitalized(&python::str(value)).into(),
        "title" => {
            let separates = |c: char| crate::lexer::is_space(c) || "-({[<".contains(c);
            methods::titled(&python::str(value), separates).into()
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"])?;
            let chars = crate::args::text(chars, name)?;
            methods::strip(&python::str(value), chars.as_deref(), "strip").into()
        }
        "center" => {
            let [width] = args.bind(name, ["width"])?;
            methods::pad(&python::str(value), int(width, 80)?, " ", name)?.into()
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let old = python::str(&required(old, name, "old")?);
            let new = python::str(&required(new, name, "new")?);
            let count = int(count.filter(|count| !count.is_none()), -1)?;
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            python::str(value).replacen(&old, &new, count).into()
        }
        "format" => {
            let values = match (args.positional.is_empty(), args.keywords.is_empty()) {
                (false, false) => {
                    return Err(Error::new(
                        "can't handle positional and keyword arguments at the same time",
                    ));
                }
                (true, false) => Value::from_pairs(args.keywords),
                _ => Value::tuple(args.positional),
            };
            format::percent(&python::str(value), &values)?.into()
        }
        "indent" => indent(value, args)?,
        "truncate" => truncate(value, args)?,
        "wordcount" => {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let text = python::str(value);
            let words = text.split(|c| !is_word(c)).filter(|word| !word.is_empty());
            words.count().into()
        }
        "escape" | "e" | "forceescape" => {
            let text = python::str(value)
                .replace('&', "&amp;")
                .replace('<', "&lt;");
            let text = text.replace('>', "&gt;").replace('\'', "&#39;");
            text.replace('"', "&#34;").into()
        }
        "urlencode" => urlencode(value)?.into(),
        _ => return Err(Error::new(format!("no filter named '{name}'"))),
    })
}

/// Filters that make a number.
fn numbers(name: &str, value: &Value, args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "int" => to_int(value, args)?,
        "float" => {
            let [default] = args.bind(name, ["default"])?;
            match to_float(value)? {
                Some(number) => number.into(),
                None => default.unwrap_or(Value::Float(0.0)),
            }
        }
        "abs" => match value {
            Value::Float(number) => number.abs().into(),
            value => match python::as_int(value) {
                Some(number) => number.abs().into(),
                None => return Err(bad(value, "abs()")),
            },
        },
        "round" => round(value, args)?,
        _ => return Err(Error::new(format!("no filter named '{name}'"))),
    })
}

/// Filters of lists that look at an attribute of each item, or apply a filter or a test to it.
fn by_key(name: &str, value: &Value, mut args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "join" => {
            let [separator, by] = args.bind(name, ["d", "attribute"])?;
            let separator = separator.as_ref().map(python::str).unwrap_or_default();
            let by = Getter::new(by, false);
            let mut texts = Vec::new();
            for item in python::items(value)? {
                texts.push(python::str(&by.get(&item)?));
            }
            texts.join(&separator).into()
        }
        "dictsort" => dictsort(value, args)?,
        "sort" => {
            let [reverse, case_sensitive, by] =
                args.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let items = python::items(value)?;
            let by = Getters::new(by, !truth(case_sensitive));
            let keys = items
                .iter()
                .map(|item| by.get(item))
                .collect::<Result<_, _>>()?;
            Value::list(in_order(items, keys, truth(reverse))?)
        }
        "min" | "max" => {
            let [case_sensitive, by] = args.bind(name, ["case_sensitive", "attribute"])?;
            let by = Getter::new(by, !truth(case_sensitive));
            let mut best: Option<(Value, Value)> = None;
            for item in python::items(value)? {
                let key = by.get(&item)?;
                let better = match &best {
                    None => true,
                    Some((best, _)) => {
                        let wanted = if name == "min" {
                            Ordering::Less
                        } else {
                            Ordering::Greater
                        };
                        python::compare(&key, best, "<")? == Some(wanted)
                    }
                };
                if better {
                    best = Some((key, item));
                }
            }
            best.map_or_else(
                || Value::undefined("No aggregated item, sequence was empty."),
                |(_, item)| item,
            )
        }
        "sum" => {
            let [by, start] = args.bind(name, ["attribute", "start"])?;
            let by = Getter::new(by, false);
            let mut sum = start.unwrap_or(Value::Int(0));
            for item in python::items(value)? {
                sum = python::arithmetic("+", &sum, &by.get(&item)?)?;
            }
            sum
        }
        "unique" => {
            let [case_sensitive, by] = args.bind(name, ["case_sensitive", "attribute"])?;
            let by = Getter::new(by, !truth(case_sensitive));
            #[expect(clippy::mutable_key_type, reason = "all objects have one hash")]
            let mut seen: HashSet<Key> = HashSet::new();
            let mut kept = Vec::new();
            for item in python::items(value)? {
                if seen.insert(key_of(by.get(&item)?)?) {
                    kept.push(item);
                }
            }
            Object::iterator(kept)
        }
        "groupby" => groupby(value, args)?,
        "map" => map(value, args)?,
        "select" | "reject" => select(value, args, None, name == "select")?,
        "selectattr" | "rejectattr" => {
            if args.positional.is_empty() {
                return Err(Error::new("Missing parameter for attribute name"));
            }
            let by = Getter::new(Some(args.positional.remove(0)), false);
            select(value, args, Some(by), name == "selectattr")?
        }
        _ => return Err(Error::new(format!("no filter named '{name}'"))),
    })
}

/// Filters of lists and of any value.
fn others(name: &str, value: Value, args: Arguments) -> Result<Value, Error> {
    Ok(match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"])?;
            let missing = match &value {
                Value::Undefined(_) => true,
                value => truth(boolean) && !python::is_true(value),
            };
            match missing {
                true => default.unwrap_or_else(|| "".into()),
                false => value,
            }
        }
        "tojson" => json::tojson(&value, args)?,
        "length" | "count" => python::length(&value)?.into(),
        "list" => Value::list(python::items(&value)?),
        "first" => python::items(&value)?
            .into_iter()
            .next()
            .unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")),
        "last" => match &value {
            Value::Object(_) => return Err(bad(&value, "reversed()")),
            value => python::items(value)?
                .pop()
                .unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")),
        },
        "reverse" => match &value {
            Value::Str(text) => text.chars().rev().collect::<String>().into(),
            value => {
                let mut items = python::items(value)?;
                items.reverse();
                Object::iterator(items)
            }
        },
        "items" => match &value {
            Value::Undefined(_) => Object::iterator(Vec::new()),
            Value::Map(_) => {
                let pairs = methods::call(&value, "items", Arguments::default())?;
                Object::iterator(python::items(&pairs)?)
            }
            _ => return Err(Error::new("Can only get item pairs from a mapping.")),
        },
        "batch" | "slice" => parts(name, &value, args)?,
        "attr" => {
            let [name] = args.bind(name, ["name"])?;
            let name = python::str(&required(name, "attr", "name")?);
            match &value {
                // Only attributes, not elements.
                Value::Map(_) if !methods::exists(&value, &name) => {
                    Value::undefined(format!("'dict object' has no attribute '{name}'"))
                }
                value => attribute(value, &name)?,
            }
        }
        _ => return Err(Error::new(format!("no filter named '{name}'"))),
    })
}

fn bad(value: &Value, function: &str) -> Error {
    match value {
        Value::Undefined(message) => Error::new(&**message),
        value => Error::new(format!(
            "bad operand type for {function}: '{}'",
            python::type_name(value)
        )),
    }
}

/// Takes an attribute such as "function.name" of items.
struct Getter {
    parts: Vec<Value>,
    ignore_case: bool,
    default: Option<Value>,
}

impl Getter {
    fn new(by: Option<Value>, ignore_case: bool) -> Self {
        let part = |part: &str| match part.parse::<i128>() {
            Ok(index) if part.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(index),
            _ => part.into(),
        };
        let parts = match by {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Str(path)) => path.split('.').map(part).collect(),
            Some(index) => vec![index],
        };
        Self {
            parts,
            ignore_case,
            default: None,
        }
    }

    fn get(&self, value: &Value) -> Result<Value, Error> {
        let mut found = value.clone();
        for part in &self.parts {
            found = item(&found, part)?;
            if let (Value::Undefined(_), Some(default)) = (&found, &self.default) {
                found = default.clone();
            }
        }
        Ok(match (&found, self.ignore_case) {
            (Value::Str(text), true) => text.to_lowercase().into(),
            _ => found,
        })
    }
}

/// Takes several attributes, such as "age,name".
struct Getters(Vec<Getter>);

impl Getters {
    fn new(by: Option<Value>, ignore_case: bool) -> Self {
        let one = |by| Getter::new(by, ignore_case);
        Self(match by {
            Some(Value::Str(list)) if list.contains(',') => {
                list.split(',').map(|by| one(Some(by.into()))).collect()
            }
            by => vec![one(by)],
        })
    }

    fn get(&self, value: &Value) -> Result<Value, Error> {
        let keys: Vec<Value> = self
            .0
            .iter()
            .map(|by| by.get(value))
            .collect::<Result<_, _>>()?;
        Ok(Value::list(keys))
    }
}

/// Returns the positions of `keys` in ascending order.
pub(crate) fn sorted(keys: Vec<Value>) -> Result<Vec<usize>, Error> {
    let mut failed = None;
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|a, b| match python::compare(&keys[*a], &keys[*b], "<") {
        Ok(order) => order.unwrap_or(Ordering::Equal),
        Err(error) => {
            failed.get_or_insert(error);
            Ordering::Equal
        }
    });
    match failed {
        None => Ok(order),
        Some(error) => Err(error),
    }
}

/// Sorts items by their keys. Equal ones keep their order, also in reverse.
fn in_order(items: Vec<Value>, keys: Vec<Value>, reverse: bool) -> Result<Vec<Value>, Error> {
    if !reverse {
        return Ok(sorted(keys)?
            .into_iter()
            .map(|at| items[at].clone())
            .collect());
    }
    let last = items.len().saturating_sub(1);
    let mut order = sorted(keys.into_iter().rev().collect())?;
    order.reverse();
    Ok(order
        .into_iter()
        .map(|at| items[last - at].clone())
        .collect())
}

fn dictsort(value: &Value, args: Arguments) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] =
        args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let at = match by.as_ref().map(python::str).as_deref() {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(_) => {
            return Err(Error::new(
                "You can only sort by either \"key\" or \"value\"",
            ));
        }
    };
    let pairs = match value {
        Value::Map(_) => python::items(&methods::call(value, "items", Arguments::default())?)?,
        other => return Err(bad(other, "dictsort")),
    };
    let by = Getter::new(Some(Value::Int(at)), !truth(case_sensitive));
    let keys = pairs
        .iter()
        .map(|pair| by.get(pair))
        .collect::<Result<_, _>>()?;
    Ok(Value::list(in_order(pairs, keys, truth(reverse))?))
}

fn groupby(value: &Value, args: Arguments) -> Result<Value, Error> {
    let names = ["attribute", "default", "case_sensitive"];
    let [by, default, case_sensitive] = args.bind("groupby", names)?;
    let by = Some(required(by, "groupby", "attribute")?);
    let getter = |ignore_case| Getter {
        default: default.clone(),
        ..Getter::new(by.clone(), ignore_case)
    };
    let ignore_case = !truth(case_sensitive);
    let (by, shown) = (getter(ignore_case), getter(false));
    let items = python::items(value)?;
    let keys = items
        .iter()
        .map(|item| by.get(item))
        .collect::<Result<Vec<_>, _>>()?;
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for at in sorted(keys.clone())? {
        match groups.last_mut() {
            Some((key, _, members)) if *key == keys[at] => members.push(items[at].clone()),
            _ => groups.push((
                keys[at].clone(),
                shown.get(&items[at])?,
                vec![items[at].clone()],
            )),
        }
    }
    let groups = groups
        .into_iter()
        .map(|(_, shown, members)| Value::tuple(vec![shown, Value::list(members)]));
    Ok(Value::list(groups.collect()))
}

fn map(value: &Value, mut args: Arguments) -> Result<Value, Error> {
    let items = python::items(value)?;
    let mapped: Result<Vec<Value>, Error> = if args.positional.is_empty() {
        let Some(by) = args.remove_keyword("attribute") else {
            return Err(Error::new("map requires a filter argument"));
        };
        let default = args.remove_keyword("default");
        let [] = args.bind("map", [])?;
        let by = Getter {
            default,
            ..Getter::new(Some(by), false)
        };
        items.iter().map(|item| by.get(item)).collect()
    } else {
        let filter = python::str(&args.positional.remove(0));
        items
            .into_iter()
            .map(|item| apply(&filter, item, args.clone()))
            .collect()
    };
    Ok(Object::iterator(mapped?))
}

fn select(
    value: &Value,
    mut args: Arguments,
    by: Option<Getter>,
    wanted: bool,
) -> Result<Value, Error> {
    let test = match args.positional.is_empty() {
        true => None,
        false => Some(python::str(&args.positional.remove(0))),
    };
    let mut kept = Vec::new();
    for item in python::items(value)? {
        let tested = match &by {
            Some(by) => by.get(&item)?,
            None => item.clone(),
        };
        let holds = match &test {
            Some(test) => predicates::holds(test, &tested, args.clone())?,
            None => python::is_true(&tested),
        };
        if holds == wanted {
            kept.push(item);
        }
    }
    Ok(Object::iterator(kept))
}

/// The filters `batch` and `slice`.
fn parts(name: &str, value: &Value, args: Arguments) -> Result<Value, Error> {
    let [count, fill] = args.bind(name, ["count", "fill_with"])?;
    let count = int(Some(required(count, name, "count")?), 0)?;
    let count = match usize::try_from(count) {
        Ok(count @ 1..=100_000) => count,
        _ => return Err(Error::new(format!("{name}({count}): expected 1 to 100000"))),
    };
    let fill = fill.filter(|fill| !fill.is_none());
    let items = python::items(value)?;
    let mut lists: Vec<Vec<Value>> = match name {
        "batch" => items.chunks(count).map(<[Value]>::to_vec).collect(),
        _ => {
            let (each, more) = (items.len() / count, items.len() % count);
            let mut rest = &items[..];
            (0..count)
                .map(|at| {
                    let (part, others) = rest.split_at(each + usize::from(at < more));
                    rest = others;
                    part.to_vec()
                })
                .collect()
        }
    };
    if let Some(fill) = fill {
        match name {
            "batch" => {
                if let Some(last) = lists.last_mut() {
                    last.resize(count, fill);
                }
            }
            _ => {
                let more = items.len() % count;
                lists[more..]
                    .iter_mut()
                    .for_each(|list| list.push(fill.clone()));
            }
        }
    }
    Ok(Object::iterator(
        lists.into_iter().map(Value::list).collect(),
    ))
}

fn indent(value: &Value, args: Arguments) -> Result<Value, Error> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let (first, blank) = (truth(first), truth(blank));
    let indent = match width {
        Some(Value::Str(text)) => text.to_string(),
        width => " ".repeat(usize::try_from(int(width, 4)?).unwrap_or(0).min(10_000)),
    };
    let text = match value {
        Value::Str(text) => format!("{text}\n"),
        other => {
            return Err(python::arithmetic("+", other, &"\n".into())
                .err()
                .unwrap_or_else(|| bad(other, "indent")));
        }
    };
    let mut out = String::new();
    for (at, line) in methods::lines(&text, false).into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        if if at > 0 {
            blank || !line.is_empty()
        } else {
            first
        } {
            out += &indent;
        }
        out += line;
    }
    Ok(out.into())
}

fn truncate(value: &Value, args: Arguments) -> Result<Value, Error> {
    let names = ["length", "killwords", "end", "leeway"];
    let [length, killwords, end, leeway] = args.bind("truncate", names)?;
    let text: Vec<char> = python::str(value).chars().collect();
    let end = end.as_ref().map_or_else(|| "...".into(), python::str);
    let leeway = int(leeway.filter(|leeway| !leeway.is_none()), 5)?;
    let length = int(length, 255)?;
    let kept = length - end.chars().count() as i128;
    if kept < 0 || leeway < 0 {
        return Err(Error::new(format!(
            "expected length >= {}, got {length}",
            end.len()
        )));
    }
    if text.len() as i128 <= length + leeway {
        return Ok(text.into_iter().collect::<String>().into());
    }
    let cut: String = text.into_iter().take(kept as usize).collect();
    let cut = match truth(killwords) {
        true => &cut[..],
        false => cut.rsplit_once(' ').map_or(&cut[..], |(before, _)| before),
    };
    Ok(format!("{cut}{end}").into())
}

/// Python's `int(value)`; `None` if it refuses the value.
fn to_int(value: &Value, args: Arguments) -> Result<Value, Error> {
    let [default, base] = args.bind("int", ["default", "base"])?;
    let base = u32::try_from(int(base, 10)?)
        .ok()
        .filter(|base| (2..=36).contains(base));
    let default = default.unwrap_or(Value::Int(0));
    let truncated = |number: f64| match number.is_finite() && number.abs() < 1e38 {
        true => Some(Value::Int(number.trunc() as i128)),
        false => None,
    };
    Ok(match value {
        Value::Undefined(message) => return Err(Error::new(&**message)),
        Value::Float(number) => truncated(*number).unwrap_or(default),
        Value::Str(text) => {
            let base = base.ok_or_else(|| Error::new("int() base must be >= 2 and <= 36"))?;
            let plain = methods::strip(text, None, "strip").replace('_', "");
            let lower = plain.to_lowercase();
            let digits = match base {
                16 => lower.strip_prefix("0x"),
                8 => lower.strip_prefix("0o"),
                2 => lower.strip_prefix("0b"),
                _ => None,
            };
            match i128::from_str_radix(digits.unwrap_or(&plain), base) {
                Ok(number) => Value::Int(number),
                Err(_) => to_float(value)?.and_then(truncated).unwrap_or(default),
            }
        }
        value => python::as_int(value).map_or(default, Value::Int),
    })
}

/// Python's `float(value)`; `None` if it refuses the value.
fn to_float(value: &Value) -> Result<Option<f64>, Error> {
    Ok(match value {
        Value::Undefined(message) => return Err(Error::new(&**message)),
        Value::Str(text) => methods::strip(text, None, "strip")
            .replace('_', "")
            .parse()
            .ok(),
        value => python::as_f64(value),
    })
}

fn round(value: &Value, args: Arguments) -> Result<Value, Error> {
    let [precision, method] = args.bind("round", ["precision", "method"])?;
    let precision = i32::try_from(int(precision, 0)?)
        .unwrap_or(0)
        .clamp(-300, 300);
    let method = method.as_ref().map_or_else(|| "common".into(), python::str);
    let scale = 10f64.powi(precision);
    let number = python::as_f64(value).ok_or_else(|| bad(value, "round()"))?;
    Ok(match (method.as_str(), python::as_int(value)) {
        ("common", Some(number)) if precision >= 0 => Value::Int(number),
        ("common", Some(whole)) => {
            let unit = 10i128
                .checked_pow(precision.unsigned_abs())
                .unwrap_or(i128::MAX);
            let down = whole.div_euclid(unit) * unit;
            let rest = whole - down;
            let up = rest * 2 > unit || rest * 2 == unit && (down / unit) % 2 != 0;
            Value::Int(if up { down + unit } else { down })
        }
        ("common", None) if precision >= 0 => {
            let text = format!("{number:.places$}", places = precision as usize);
            Value::Float(text.parse().unwrap_or(number))
        }
        ("common", None) => Value::Float((number * scale).round_ties_even() / scale),
        // Python's math.ceil and math.floor give integers, which a division makes floats.
        ("ceil", _) => Value::Float((number * scale).ceil() / scale),
        ("floor", _) => Value::Float((number * scale).floor() / scale),
        _ => return Err(Error::new("method must be common, ceil or floor")),
    })
}

fn urlencode(value: &Value) -> Result<String, Error> {
    let quote = |text: &str, in_query: bool| -> String {
        let each = text.bytes().map(|byte| match byte {
            b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'_' | b'.' | b'-' | b'~' => {
                char::from(byte).to_string()
            }
            b'/' if !in_query => "/".into(),
            b' ' if in_query => "+".into(),
            byte => format!("%{byte:02X}"),
        });
        each.collect()
    };
    let pairs = match value {
        Value::Map(_) => methods::call(value, "items", Arguments::default())?,
        Value::Seq(_) => value.clone(),
        other => return Ok(quote(&python::str(other), false)),
    };
    let mut parts = Vec::new();
    for pair in python::items(&pairs)? {
        match &python::items(&pair)?[..] {
            [key, value] => parts.push(format!(
                "{}={}",
                quote(&python::str(key), true),
                quote(&python::str(value), true)
            )),
            _ => return Err(Error::new("urlencode needs pairs")),
        }
    }
    Ok(parts.join("&"))
}
