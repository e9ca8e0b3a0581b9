//! Evaluates expressions.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::args::Arguments;
use crate::ast::{Args, Expr, Filter};
use crate::object::Object;
use crate::render::{Renderer, Scope};
use crate::value::{Key, Map, SeqKind};
use crate::{Error, Value, filters, functions, methods, predicates, python};

impl Renderer {
    pub(crate) fn eval(&self, expr: &Expr, scope: &Arc<Scope>) -> Result<Value, Error> {
        self.step()?;
        let all = |exprs: &[Expr]| -> Result<Vec<Value>, Error> {
            exprs.iter().map(|expr| self.eval(expr, scope)).collect()
        };
        Ok(match expr {
            Expr::Const(value) => value.clone(),
            Expr::Name(name) => match scope.find(name) {
                Some(value) => value,
                None => functions::global(name)
                    .unwrap_or_else(|| Value::undefined(format!("'{name}' is undefined"))),
            },
            Expr::Tuple(items) => Value::tuple(all(items)?),
            Expr::List(items) => Value::list(all(items)?),
            Expr::Dict(pairs) => {
                let mut map = Map::default();
                for (key, value) in pairs {
                    let key = key_of(self.eval(key, scope)?)?;
                    map.0.insert(key, self.eval(value, scope)?);
                }
                Value::Map(Arc::new(map))
            }
            Expr::Attr(value, name) => {
                let value = self.eval(value, scope)?;
                self.look_ahead(&value, name)?;
                attribute(&value, name)?
            }
            Expr::Item(value, index) => {
                let value = self.eval(value, scope)?;
                let index = self.eval(index, scope)?;
                self.look_ahead(&value, index.as_str().unwrap_or_default())?;
                item(&value, &index)?
            }
            Expr::Slice(value, parts) => {
                let value = self.eval(value, scope)?;
                slice(&value, self.bounds(parts, scope)?)?
            }
            Expr::Call(callee, args) => {
                let callee = self.eval(callee, scope)?;
                self.call(&callee, self.arguments(args, scope)?)?
            }
            Expr::Filter(value, filter) => {
                let value = self.eval(value, scope)?;
                self.filter(filter, value, scope)?
            }
            Expr::Test(value, test, negated) => {
                let value = self.eval(value, scope)?;
                let args = self.arguments(&test.args, scope)?;
                (predicates::holds(&test.name, &value, args)? != *negated).into()
            }
            Expr::Neg(value) => python::sign(&self.eval(value, scope)?, true)?,
            Expr::Pos(value) => python::sign(&self.eval(value, scope)?, false)?,
            Expr::Not(value) => (!python::is_true(&self.eval(value, scope)?)).into(),
            Expr::And(left, right) => match self.eval(left, scope)? {
                left if python::is_true(&left) => self.eval(right, scope)?,
                left => left,
            },
            Expr::Or(left, right) => match self.eval(left, scope)? {
                left if python::is_true(&left) => left,
                _ => self.eval(right, scope)?,
            },
            Expr::Binary(op, left, right) => {
                let left = self.eval(left, scope)?;
                python::arithmetic(op, &left, &self.eval(right, scope)?)?
            }
            Expr::Concat(parts) => {
                let texts: Vec<String> = all(parts)?.iter().map(python::str).collect();
                texts.concat().into()
            }
            Expr::Compare(first, others) => {
                let mut left = self.eval(first, scope)?;
                let mut result = Value::from(true);
                for (op, right) in others {
                    let right = self.eval(right, scope)?;
                    result = compare(op, &left, &right)?.into();
                    if !python::is_true(&result) {
                        break;
                    }
                    left = right;
                }
                result
            }
            Expr::If(condition, value, otherwise) => {
                match (python::is_true(&self.eval(condition, scope)?), otherwise) {
                    (true, _) => self.eval(value, scope)?,
                    (false, Some(otherwise)) => self.eval(otherwise, scope)?,
                    (false, None) => Value::undefined(
                        "the inline if-expression evaluated to false and no else section was defined.",
                    ),
                }
            }
        })
    }

    /// Returns start, end and step of a slice.
    fn bounds(
        &self,
        parts: &[Option<Box<Expr>>; 3],
        scope: &Arc<Scope>,
    ) -> Result<[Option<i128>; 3], Error> {
        let mut bounds = [None; 3];
        for (bound, part) in bounds.iter_mut().zip(parts) {
            let Some(part) = part else { continue };
            *bound = match self.eval(part, scope)? {
                Value::None => None,
                number => Some(
                    python::as_int(&number)
                        .ok_or_else(|| Error::new("slice indices must be integers or None"))?,
                ),
            };
        }
        Ok(bounds)
    }

    /// Finds the items that an attribute of a loop needs.
    fn look_ahead(&self, value: &Value, attribute: &str) -> Result<(), Error> {
        match value {
            Value::Object(object) => match &**object {
                Object::Loop(state) => self.pull(state, state.needs(attribute)),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    pub(crate) fn arguments(&self, args: &Args, scope: &Arc<Scope>) -> Result<Arguments, Error> {
        let mut found = Arguments::default();
        for value in &args.positional {
            found.positional.push(self.eval(value, scope)?);
        }
        for (name, value) in &args.keywords {
            found
                .keywords
                .push((name.clone(), self.eval(value, scope)?));
        }
        if let Some(star) = &args.star {
            found
                .positional
                .extend(python::items(&self.eval(star, scope)?)?);
        }
        if let Some(more) = &args.double_star {
            let more = self.eval(more, scope)?;
            let Some(map) = more.as_map() else {
                return Err(Error::new("argument after ** must be a mapping"));
            };
            let pairs = map
                .iter()
                .map(|(key, value)| (python::str(key), value.clone()));
            found.keywords.extend(pairs);
        }
        Ok(found)
    }

    pub(crate) fn filter(
        &self,
        filter: &Filter,
        value: Value,
        scope: &Arc<Scope>,
    ) -> Result<Value, Error> {
        let args = self.arguments(&filter.args, scope)?;
        filters::apply(&filter.name, value, args)
    }

    pub(crate) fn call(&self, callee: &Value, args: Arguments) -> Result<Value, Error> {
        let object = match callee {
            Value::Undefined(message) => return Err(Error::new(&**message)),
            Value::Object(object) => object,
            other => {
                return Err(Error::new(format!(
                    "'{}' object is not callable",
                    python::type_name(other)
                )));
            }
        };
        match &**object {
            Object::Macro(found, defined_in) => self.call_macro(found, defined_in, args),
            Object::Method(value, name) => methods::call(value, name, args),
            Object::Function(name) => functions::call(name, args),
            Object::Loop(state) => {
                let [items] = args.bind("loop", ["iterable"])?;
                self.recurse(state, &items.unwrap_or_default())
            }
            other => functions::call_object(other),
        }
    }
}

pub(crate) fn key_of(value: Value) -> Result<Key, Error> {
    let name = python::type_name(&value);
    Key::new(value).ok_or_else(|| Error::new(format!("unhashable type: '{name}'")))
}

pub(crate) fn compare(op: &str, left: &Value, right: &Value) -> Result<bool, Error> {
    let order = || python::compare(left, right, op);
    Ok(match op {
        "==" => python::equal(left, right),
        "!=" => !python::equal(left, right),
        "in" => python::contains(right, left)?,
        "not in" => !python::contains(right, left)?,
        "<" => order()? == Some(Ordering::Less),
        ">" => order()? == Some(Ordering::Greater),
        "<=" => matches!(order()?, Some(Ordering::Less | Ordering::Equal)),
        _ => matches!(order()?, Some(Ordering::Greater | Ordering::Equal)),
    })
}

/// What jinja2 says about the type of a value.
fn described(value: &Value) -> String {
    match value {
        Value::None => "None".into(),
        other => format!("{} object", python::type_name(other)),
    }
}

/// Returns `value.name`: a method or another attribute, or else the element with this key.
pub(crate) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if let Value::Undefined(message) = value {
        return Err(Error::new(&**message));
    }
    if let Some(found) = own_attribute(value, name) {
        return Ok(found);
    }
    Ok(value.get(name).cloned().unwrap_or_else(|| {
        Value::undefined(format!("'{}' has no attribute '{name}'", described(value)))
    }))
}

fn own_attribute(value: &Value, name: &str) -> Option<Value> {
    if let Value::Object(object) = value
        && let Some(found) = object.attribute(name)
    {
        return Some(found);
    }
    if methods::exists(value, name) {
        let method = Object::Method(value.clone(), name.to_owned());
        return Some(Value::Object(Arc::new(method)));
    }
    methods::modifies(value, name).then(|| {
        Value::undefined(format!(
            "access to attribute '{name}' of '{}' object is unsafe.",
            python::type_name(value)
        ))
    })
}

/// Returns `value[index]`: an element, or else a method or another attribute of this name.
pub(crate) fn item(value: &Value, index: &Value) -> Result<Value, Error> {
    let at = |length: usize| {
        let index = python::as_int(index)?;
        let index = if index < 0 {
            index + length as i128
        } else {
            index
        };
        usize::try_from(index).ok()
    };
    let found = match value {
        Value::Undefined(message) => return Err(Error::new(&**message)),
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Range) => {
            at(seq.items.len()).and_then(|at| seq.items.get(at).cloned())
        }
        Value::Str(text) if python::as_int(index).is_some() => {
            let at = at(text.chars().count());
            at.and_then(|at| text.chars().nth(at))
                .map(|c| c.to_string().into())
        }
        Value::Map(map) => map.get_value(index).cloned(),
        _ => None,
    };
    let found = found.or_else(|| own_attribute(value, index.as_str()?));
    Ok(found.unwrap_or_else(|| {
        Value::undefined(match index {
            Value::Str(name) => format!("'{}' has no attribute '{name}'", described(value)),
            index => format!(
                "{} has no element {}",
                described(value),
                python::repr(index)
            ),
        })
    }))
}

fn slice(value: &Value, [start, end, step]: [Option<i128>; 3]) -> Result<Value, Error> {
    let length = match value {
        Value::Undefined(message) => return Err(Error::new(&**message)),
        Value::Str(_) => python::length(value)?,
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Range) => {
            seq.items.len()
        }
        other => {
            return Err(Error::new(format!(
                "'{}' object is not subscriptable with a slice",
                python::type_name(other)
            )));
        }
    } as i128;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new("slice step cannot be zero"));
    }
    let (lowest, highest) = if step > 0 {
        (0, length)
    } else {
        (-1, length - 1)
    };
    let bound = |given: Option<i128>, default: i128| match given {
        None => default,
        Some(at) if at < 0 => (at.saturating_add(length)).clamp(lowest, highest),
        Some(at) => at.clamp(lowest, highest),
    };
    let (start, end) = match step > 0 {
        true => (bound(start, lowest), bound(end, highest)),
        false => (bound(start, highest), bound(end, lowest)),
    };
    let mut at = start;
    let indices = std::iter::from_fn(|| {
        let more = if step > 0 { at < end } else { at > end };
        let found = more.then_some(at as usize)?;
        at = at.saturating_add(step);
        Some(found)
    });
    Ok(match value {
        Value::Str(text) => {
            let chars: Vec<char> = text.chars().collect();
            let picked: String = indices.map(|at| chars[at]).collect();
            picked.into()
        }
        Value::Seq(seq) => {
            let picked = indices.map(|at| seq.items[at].clone()).collect();
            Value::seq(seq.kind, picked)
        }
        _ => unreachable!("other values were refused"),
    })
}
