//! Global functions of templates, as transformers and jinja2 provide them.

use std::fmt::Write;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::args::{Arguments, int, required};
use crate::expressions::key_of;
use crate::object::{Object, lock};
use crate::value::{Map, SeqKind};
use crate::{Error, Value, python};

const NAMES: [&str; 7] = [
    "range",
    "dict",
    "namespace",
    "raise_exception",
    "strftime_now",
    "cycler",
    "joiner",
];

/// Longest range, as in jinja2's sandbox.
const RANGE_MAX: i128 = 100_000;

/// Returns the global function of this name.
pub(crate) fn global(name: &str) -> Option<Value> {
    let name = NAMES.into_iter().find(|known| *known == name)?;
    Some(Value::Object(Arc::new(Object::Function(name))))
}

pub(crate) fn call(name: &str, args: Arguments) -> Result<Value, Error> {
    match name {
        "range" => range(args),
        "dict" => Ok(Value::Map(Arc::new(dict("dict", args)?))),
        "namespace" => {
            let values = dict("namespace", args)?;
            for (name, _) in values.iter() {
                check_attribute(name.as_str().unwrap_or_default())?;
            }
            Ok(object(Object::Namespace(Mutex::new(values))))
        }
        "raise_exception" => {
            let [message] = args.bind(name, ["message"])?;
            Err(Error::raised(python::str(&required(
                message, name, "message",
            )?)))
        }
        "strftime_now" => {
            let [format] = args.bind(name, ["format"])?;
            strftime_now(&python::str(&required(format, name, "format")?))
        }
        "cycler" if args.positional.is_empty() => {
            Err(Error::new("at least one item has to be provided"))
        }
        "cycler" => Ok(object(Object::Cycler(args.positional, AtomicUsize::new(0)))),
        _ => {
            let [separator] = args.bind(name, ["sep"])?;
            let separator = separator.unwrap_or_else(|| ", ".into());
            Ok(object(Object::Joiner(separator, Mutex::new(false))))
        }
    }
}

/// Calls an object that is a function too.
pub(crate) fn call_object(callee: &Object) -> Result<Value, Error> {
    match callee {
        Object::Joiner(separator, used) => Ok(match std::mem::replace(&mut *lock(used), true) {
            true => separator.clone(),
            false => "".into(),
        }),
        other => Err(Error::new(format!(
            "'{}' object is not callable",
            other.type_name()
        ))),
    }
}

/// Calls a method of a loop or a cycler.
pub(crate) fn call_method(callee: &Object, name: &str, args: Arguments) -> Result<Value, Error> {
    let next = |items: &[Value], at: usize| match items.len() {
        0 => Err(Error::new("no items for cycling given")),
        length => Ok(items[at % length].clone()),
    };
    match (callee, name) {
        (Object::Loop(state), "cycle") => next(&args.positional, state.index.load(Relaxed)),
        (Object::Loop(state), _) => {
            let mut before = lock(&state.changed);
            let changed = before.as_ref() != Some(&args.positional);
            *before = Some(args.positional);
            Ok(changed.into())
        }
        (Object::Cycler(items, at), "next") => {
            let found = next(items, at.load(Relaxed));
            at.store((at.load(Relaxed) + 1) % items.len().max(1), Relaxed);
            found
        }
        (Object::Cycler(_, at), _) => {
            at.store(0, Relaxed);
            Ok(Value::None)
        }
        _ => unreachable!("other objects have no methods"),
    }
}

/// Refuses attributes of a namespace that transformers refuses.
pub(crate) fn check_attribute(name: &str) -> Result<(), Error> {
    match name.starts_with('_') {
        true => Err(Error::new(format!(
            "chat templates cannot store underscore-prefixed attributes on a namespace, but got '{name}'"
        ))),
        false => Ok(()),
    }
}

fn object(object: Object) -> Value {
    Value::Object(Arc::new(object))
}

fn range(args: Arguments) -> Result<Value, Error> {
    let [first, second, step] = args.bind("range", ["start", "stop", "step"])?;
    let first = int(Some(required(first, "range", "stop")?), 0)?;
    let (start, end) = match second {
        None => (0, first),
        Some(second) => (first, int(Some(second), 0)?),
    };
    let step = int(step, 1)?;
    if step == 0 {
        return Err(Error::new("range() arg 3 must not be zero"));
    }
    let distance = if step > 0 { end - start } else { start - end };
    let length = (distance.max(0) + step.abs() - 1) / step.abs();
    if length > RANGE_MAX {
        return Err(Error::new(format!(
            "range too big: at most {RANGE_MAX} numbers"
        )));
    }
    let items = (0..length)
        .map(|at| Value::Int(start + at * step))
        .collect();
    Ok(Value::seq(SeqKind::Range, items))
}

/// Python's `dict(...)`.
fn dict(name: &str, args: Arguments) -> Result<Map, Error> {
    let mut map = match args.positional.as_slice() {
        [] => Map::default(),
        [Value::Map(map)] => (**map).clone(),
        [pairs] => {
            let mut map = Map::default();
            for pair in python::items(pairs)? {
                match &python::items(&pair)?[..] {
                    [key, value] => map.0.insert(key_of(key.clone())?, value.clone()),
                    _ => {
                        return Err(Error::new(
                            "dictionary update sequence element must have length 2",
                        ));
                    }
                };
            }
            map
        }
        _ => return Err(Error::new(format!("{name} expected at most 1 argument"))),
    };
    for (key, value) in args.keywords {
        map.insert(&key, value);
    }
    Ok(map)
}

/// Formats the current time like strftime.
fn strftime_now(format: &str) -> Result<Value, Error> {
    let mut text = String::new();
    let now = chrono::Local::now().naive_local();
    match write!(text, "{}", now.format(format)) {
        Ok(()) => Ok(text.into()),
        Err(_) => Err(Error::new(format!(
            "strftime_now: \"{format}\" is not a valid time format"
        ))),
    }
}
