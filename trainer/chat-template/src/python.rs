//! Operators and texts of values, as in Python.

use std::cmp::Ordering;
use std::fmt::Write;

use crate::value::{Seq, SeqKind};
use crate::{Error, Value};

/// Longest text or list that an operator makes.
const LENGTH_MAX: usize = 1 << 28;

/// Name of the value's type in Python.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Undefined(_) => "Undefined",
        Value::None => "NoneType",
        Value::Bool(_) => "bool",
        Value::Int(_) => "int",
        Value::Float(_) => "float",
        Value::Str(_) => "str",
        Value::Seq(seq) => match seq.kind {
            SeqKind::List => "list",
            SeqKind::Tuple => "tuple",
            SeqKind::Range => "range",
            SeqKind::Items => "dict_items",
            SeqKind::Keys => "dict_keys",
            SeqKind::Values => "dict_values",
        },
        Value::Map(_) => "dict",
        Value::Object(object) => object.type_name(),
    }
}

pub(crate) fn is_true(value: &Value) -> bool {
    match value {
        Value::Undefined(_) | Value::None => false,
        Value::Bool(value) => *value,
        Value::Int(number) => *number != 0,
        Value::Float(number) => *number != 0.0,
        Value::Str(text) => !text.is_empty(),
        Value::Seq(seq) => !seq.items.is_empty(),
        Value::Map(map) => !map.is_empty(),
        Value::Object(_) => true,
    }
}

/// Returns the number that a number or a boolean is.
pub(crate) fn as_f64(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(value) => Some(f64::from(u8::from(*value))),
        Value::Int(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}

/// Returns the integer that an integer or a boolean is.
pub(crate) fn as_int(value: &Value) -> Option<i128> {
    match value {
        Value::Bool(value) => Some(i128::from(*value)),
        Value::Int(number) => Some(*number),
        _ => None,
    }
}

pub(crate) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(a), Value::Str(b)) => a == b,
        (Value::Seq(a), Value::Seq(b)) => a.kind == b.kind && a.items == b.items,
        (Value::Map(a), Value::Map(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, value)| b.get_value(key).is_some_and(|other| equal(value, other)))
        }
        (Value::Object(a), Value::Object(b)) => std::sync::Arc::ptr_eq(a, b),
        _ => match (as_int(a), as_int(b)) {
            (Some(a), Some(b)) => a == b,
            _ => matches!((as_f64(a), as_f64(b)), (Some(a), Some(b)) if a == b),
        },
    }
}

/// Compares two values for an operator.
///
/// # Errors
/// Their types have no order. `None` for a number that is not one.
pub(crate) fn compare(a: &Value, b: &Value, op: &str) -> Result<Option<Ordering>, Error> {
    match (a, b) {
        (Value::Str(a), Value::Str(b)) => return Ok(Some(a.cmp(b))),
        (Value::Seq(a), Value::Seq(b)) if a.kind == b.kind && is_plain(a) => {
            let mut pairs = a.items.iter().zip(&b.items);
            return match pairs.find(|(a, b)| !equal(a, b)) {
                Some((a, b)) => compare(a, b, op),
                None => Ok(Some(a.items.len().cmp(&b.items.len()))),
            };
        }
        _ => {}
    }
    if let (Some(a), Some(b)) = (as_int(a), as_int(b)) {
        return Ok(Some(a.cmp(&b)));
    }
    match (as_f64(a), as_f64(b)) {
        (Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
        _ => Err(undefined_of(&[a, b]).unwrap_or_else(|| {
            Error::new(format!(
                "'{op}' not supported between instances of '{}' and '{}'",
                type_name(a),
                type_name(b)
            ))
        })),
    }
}

fn is_plain(seq: &Seq) -> bool {
    matches!(seq.kind, SeqKind::List | SeqKind::Tuple)
}

/// Returns the error of the first undefined value.
fn undefined_of(values: &[&Value]) -> Option<Error> {
    values.iter().find_map(|value| match value {
        Value::Undefined(message) => Some(Error::new(&**message)),
        _ => None,
    })
}

/// Returns whether `container` has `value`.
pub(crate) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    match container {
        Value::Str(text) => match value {
            Value::Str(part) => Ok(text.contains(&**part)),
            other => Err(Error::new(format!(
                "'in <string>' requires string as left operand, not {}",
                type_name(other)
            ))),
        },
        Value::Map(map) => match crate::value::Key::new(value.clone()) {
            Some(_) => Ok(map.get_value(value).is_some()),
            None => Err(Error::new(format!(
                "unhashable type: '{}'",
                type_name(value)
            ))),
        },
        other => Ok(items(other)
            .map_err(|_| {
                Error::new(format!(
                    "argument of type '{}' is not iterable",
                    type_name(other)
                ))
            })?
            .iter()
            .any(|item| equal(item, value))),
    }
}

/// Returns what iterating over a value gives.
pub(crate) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match value {
        Value::Undefined(_) => Ok(Vec::new()),
        Value::Str(text) => Ok(text.chars().map(|c| c.to_string().into()).collect()),
        Value::Seq(seq) => Ok(seq.items.clone()),
        Value::Map(map) => Ok(map.iter().map(|(key, _)| key.clone()).collect()),
        Value::Object(object) if object.is_iterable() => Ok(object.take_items()),
        other => Err(Error::new(format!(
            "'{}' object is not iterable",
            type_name(other)
        ))),
    }
}

/// Length of a value.
pub(crate) fn length(value: &Value) -> Result<usize, Error> {
    match value {
        Value::Undefined(_) => Ok(0),
        Value::Str(text) => Ok(text.chars().count()),
        Value::Seq(seq) => Ok(seq.items.len()),
        Value::Map(map) => Ok(map.len()),
        other => Err(Error::new(format!(
            "object of type '{}' has no len()",
            type_name(other)
        ))),
    }
}

/// Applies an arithmetic operator.
pub(crate) fn arithmetic(op: &'static str, a: &Value, b: &Value) -> Result<Value, Error> {
    let long = || {
        Error::new(format!(
            "'{op}' makes a value of more than {LENGTH_MAX} elements"
        ))
    };
    match (op, a, b) {
        ("%", Value::Str(format), value) => {
            return crate::format::percent(format, value).map(Value::from);
        }
        ("+", Value::Str(a), Value::Str(b)) => {
            if a.len() + b.len() > LENGTH_MAX {
                return Err(long());
            }
            return Ok([&**a, &**b].concat().into());
        }
        ("+", Value::Seq(a), Value::Seq(b)) if a.kind == b.kind && is_plain(a) => {
            if a.items.len() + b.items.len() > LENGTH_MAX {
                return Err(long());
            }
            return Ok(Value::seq(a.kind, [&a.items[..], &b.items].concat()));
        }
        ("*", Value::Str(text), times) | ("*", times, Value::Str(text))
            if as_int(times).is_some() =>
        {
            let times = usize::try_from(as_int(times).unwrap_or(0)).unwrap_or(0);
            return match text.len().checked_mul(times) {
                Some(bytes) if bytes <= LENGTH_MAX => Ok(text.repeat(times).into()),
                _ => Err(long()),
            };
        }
        ("*", Value::Seq(seq), times) | ("*", times, Value::Seq(seq))
            if as_int(times).is_some() && is_plain(seq) =>
        {
            let times = usize::try_from(as_int(times).unwrap_or(0)).unwrap_or(0);
            return match seq.items.len().checked_mul(times) {
                Some(length) if length <= LENGTH_MAX => {
                    let repeated = std::iter::repeat_n(&seq.items, times).flatten();
                    Ok(Value::seq(seq.kind, repeated.cloned().collect()))
                }
                _ => Err(long()),
            };
        }
        _ => {}
    }
    if let (Some(a), Some(b)) = (as_int(a), as_int(b))
        && op != "/"
        && !(op == "**" && b < 0)
    {
        return whole(op, a, b);
    }
    let (Some(x), Some(y)) = (as_f64(a), as_f64(b)) else {
        return Err(undefined_of(&[a, b]).unwrap_or_else(|| not_supported(op, a, b)));
    };
    let by_zero = || Error::new("division by zero");
    Ok(Value::Float(match op {
        "+" => x + y,
        "-" => x - y,
        "*" => x * y,
        "**" => x.powf(y),
        _ if y == 0.0 => return Err(by_zero()),
        "/" => x / y,
        "//" => ((x - modulo(x, y)) / y).round(),
        _ => modulo(x, y),
    }))
}

/// Remainder with the sign of the divisor.
fn modulo(x: f64, y: f64) -> f64 {
    let rest = x % y;
    if rest != 0.0 && (rest < 0.0) != (y < 0.0) {
        rest + y
    } else {
        rest
    }
}

fn not_supported(op: &str, a: &Value, b: &Value) -> Error {
    if op == "+" && matches!(a, Value::Str(_)) {
        return Error::new(format!(
            "can only concatenate str (not \"{}\") to str",
            type_name(b)
        ));
    }
    Error::new(format!(
        "unsupported operand type(s) for {op}: '{}' and '{}'",
        type_name(a),
        type_name(b)
    ))
}

fn whole(op: &str, a: i128, b: i128) -> Result<Value, Error> {
    let result = match op {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "**" => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        _ if b == 0 => return Err(Error::new("integer division or modulo by zero")),
        // The remainder has the sign of the divisor.
        _ => {
            let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
            let down = i128::from(rest != 0 && (rest < 0) != (b < 0));
            Some(match op {
                "//" => quotient - down,
                _ => rest + down * b,
            })
        }
    };
    match result {
        Some(number) => Ok(Value::Int(number)),
        None => Err(Error::new(format!("{a} {op} {b}: number too large"))),
    }
}

/// Python's `-value` or `+value`.
pub(crate) fn sign(value: &Value, negative: bool) -> Result<Value, Error> {
    let factor = if negative { -1 } else { 1 };
    match value {
        Value::Float(number) => Ok(Value::Float(number * f64::from(factor))),
        value => match as_int(value) {
            Some(number) => Ok(Value::Int(number * i128::from(factor))),
            None => Err(undefined_of(&[value]).unwrap_or_else(|| {
                Error::new(format!(
                    "bad operand type for unary {}: '{}'",
                    if negative { "-" } else { "+" },
                    type_name(value)
                ))
            })),
        },
    }
}

/// Python's `str(value)`.
pub(crate) fn str(value: &Value) -> String {
    match value {
        Value::Str(text) => text.to_string(),
        Value::Undefined(_) => String::new(),
        other => repr(other),
    }
}

/// Python's `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    match value {
        Value::Undefined(_) => "Undefined".into(),
        Value::None => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Int(number) => number.to_string(),
        Value::Float(number) => float(*number),
        Value::Str(text) => quoted(text),
        Value::Seq(seq) => {
            let items: Vec<String> = seq.items.iter().map(repr).collect();
            let items = items.join(", ");
            match seq.kind {
                SeqKind::List => format!("[{items}]"),
                SeqKind::Tuple if seq.items.len() == 1 => format!("({items},)"),
                SeqKind::Tuple => format!("({items})"),
                SeqKind::Range => range(&seq.items),
                _ => format!("{}([{items}])", type_name(value)),
            }
        }
        Value::Map(map) => {
            let pairs: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{}: {}", repr(key), repr(value)))
                .collect();
            format!("{{{}}}", pairs.join(", "))
        }
        Value::Object(object) => object.repr(),
    }
}

fn range(items: &[Value]) -> String {
    let at = |index: usize| items.get(index).and_then(as_int).unwrap_or(0);
    match items.len() {
        0 => "range(0, 0)".into(),
        length => {
            let step = if length > 1 { at(1) - at(0) } else { 1 };
            let end = at(length - 1) + step.signum();
            match step {
                1 => format!("range({}, {end})", at(0)),
                step => format!("range({}, {end}, {step})", at(0)),
            }
        }
    }
}

/// Python's `repr` of a float: the shortest digits that give the same number.
pub(crate) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("it has an exponent");
    let exponent: i32 = exponent.parse().expect("an exponent is a number");
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        return match plain.contains('.') {
            true => plain,
            false => plain + ".0",
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Python's `repr` of a text.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out += "\\\\",
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let written = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
                written.expect("a text takes all that is written");
            }
        }
    }
    out.push(quote);
    out
}

/// Returns whether Python prints a character as it is: not one of Unicode's other and separating characters.
fn is_printable(c: char) -> bool {
    let space = c.is_whitespace() && c != ' ';
    let invisible = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..);
    let noncharacter = u32::from(c) & 0xfffe == 0xfffe || ('\u{fdd0}'..='\u{fdef}').contains(&c);
    !c.is_control() && !space && !invisible && !noncharacter
}
