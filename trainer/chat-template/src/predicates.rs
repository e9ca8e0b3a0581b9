//! Tests of values, which stand after `is` and in `select` and its relatives.

use std::sync::Arc;

use crate::args::{Arguments, required};
use crate::expressions::compare;
use crate::value::SeqKind;
use crate::{Error, Value, filters, python};

const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

/// Returns whether the test `name` holds for a value.
pub(crate) fn holds(name: &str, value: &Value, args: Arguments) -> Result<bool, Error> {
    let [argument] = args.bind(name, ["other"])?;
    let other = || required(argument.clone(), name, "other");
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined(_)),
        "undefined" => matches!(value, Value::Undefined(_)),
        "none" => value.is_none(),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Map(_)),
        // What has a length and elements.
        "sequence" => match value {
            Value::Seq(seq) => {
                matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Range)
            }
            other => matches!(other, Value::Str(_) | Value::Map(_) | Value::Undefined(_)),
        },
        "iterable" => match value {
            Value::Object(object) => object.is_iterable(),
            other => matches!(
                other,
                Value::Str(_) | Value::Seq(_) | Value::Map(_) | Value::Undefined(_)
            ),
        },
        "callable" => match value {
            Value::Object(object) => object.is_callable(),
            other => matches!(other, Value::Undefined(_)),
        },
        "escaped" => false,
        "lower" => crate::methods::is_lower(&python::str(value)),
        "upper" => crate::methods::is_upper(&python::str(value)),
        "odd" | "even" => {
            let rest = python::arithmetic("%", value, &Value::Int(2))?;
            python::equal(&rest, &Value::Int(i128::from(name == "odd")))
        }
        "divisibleby" => {
            let rest = python::arithmetic("%", value, &other()?)?;
            python::equal(&rest, &Value::Int(0))
        }
        "sameas" => same(value, &other()?),
        "in" => python::contains(&other()?, value)?,
        "==" | "eq" | "equalto" => compare("==", value, &other()?)?,
        "!=" | "ne" => compare("!=", value, &other()?)?,
        ">" | "gt" | "greaterthan" => compare(">", value, &other()?)?,
        ">=" | "ge" => compare(">=", value, &other()?)?,
        "<" | "lt" | "lessthan" => compare("<", value, &other()?)?,
        "<=" | "le" => compare("<=", value, &other()?)?,
        "filter" => value.as_str().is_some_and(filters::exists),
        "test" => value.as_str().is_some_and(|name| NAMES.contains(&name)),
        _ => return Err(Error::new(format!("no test named '{name}'"))),
    })
}

/// Python's `is`.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Seq(a), Value::Seq(b)) => Arc::ptr_eq(a, b),
        (Value::Map(a), Value::Map(b)) => Arc::ptr_eq(a, b),
        (Value::Float(_), _) => false,
        (a, b) => python::type_name(a) == python::type_name(b) && a == b,
    }
}
