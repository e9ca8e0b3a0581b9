//! Runs the statements of a template.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::args::Arguments;
use crate::ast::{Body, Expr, For, Macro, Node, Statement, Target};
use crate::object::{Loop, Object, lock};
use crate::{Error, Map, RenderedText, Value, python};

/// Statements and expressions of one rendering; a template that needs more is taken for endless.
const STEPS_MAX: u64 = if cfg!(test) { 10_000 } else { 20_000_000 };
/// Calls of macros and recursive loops within each other.
const CALLS_MAX: usize = 60;
/// Longest text, in bytes.
const TEXT_MAX: usize = 1 << 28;
/// Levels of lists and mappings that a namespace may keep; recursive functions walk over them.
const LEVELS_MAX: usize = 100;

/// Variables of a block, and those around it.
pub(crate) struct Scope {
    variables: Mutex<HashMap<String, Value>>,
    parent: Option<Arc<Scope>>,
}

impl Scope {
    pub(crate) fn inside(parent: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            variables: Mutex::default(),
            parent: Some(parent.clone()),
        })
    }

    pub(crate) fn find(&self, name: &str) -> Option<Value> {
        let found = lock(&self.variables).get(name).cloned();
        found.or_else(|| self.parent.as_ref()?.find(name))
    }

    pub(crate) fn set(&self, name: &str, value: Value) {
        lock(&self.variables).insert(name.to_owned(), value);
    }
}

/// Text that is written.
#[derive(Default)]
pub(crate) struct Output {
    text: String,
    generated: Vec<Range<usize>>,
    /// Whether the text becomes a value, so that its place in the result is unknown.
    is_value: bool,
    generating: bool,
}

impl Output {
    fn for_value() -> Self {
        Self {
            is_value: true,
            ..Self::default()
        }
    }

    fn write(&mut self, text: &str) -> Result<(), Error> {
        if self.text.len() + text.len() > TEXT_MAX {
            return Err(Error::new(format!(
                "the template writes more than {TEXT_MAX} bytes"
            )));
        }
        self.text += text;
        Ok(())
    }
}

/// How a statement ends.
#[derive(Clone, Copy, PartialEq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// A rendering.
pub(crate) struct Renderer {
    root: Arc<Scope>,
    steps: Cell<u64>,
    calls: Cell<usize>,
}

pub(crate) fn render(body: &Body, values: &Map) -> Result<RenderedText, Error> {
    let root = Arc::new(Scope {
        variables: Mutex::default(),
        parent: None,
    });
    for (name, value) in values.iter() {
        root.set(name.as_str().unwrap_or_default(), value.clone());
    }
    let renderer = Renderer {
        root: root.clone(),
        steps: Cell::new(0),
        calls: Cell::new(0),
    };
    let mut output = Output::default();
    renderer.body(body, &root, &mut output)?;
    Ok(RenderedText {
        text: output.text,
        generated: output.generated,
    })
}

impl Renderer {
    /// Counts a step.
    pub(crate) fn step(&self) -> Result<(), Error> {
        let steps = self.steps.get() + 1;
        self.steps.set(steps);
        match steps > STEPS_MAX {
            true => Err(Error::new(format!(
                "the template does not end within {STEPS_MAX} steps"
            ))),
            false => Ok(()),
        }
    }

    fn body(&self, body: &[Node], scope: &Arc<Scope>, out: &mut Output) -> Result<Flow, Error> {
        for node in body {
            let flow = self.statement(&node.statement, scope, out);
            let flow = flow.map_err(|error| error.at(node.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Renders a body to a value.
    fn text_of(&self, body: &[Node], scope: &Arc<Scope>) -> Result<String, Error> {
        let mut out = Output::for_value();
        self.body(body, scope, &mut out)?;
        Ok(out.text)
    }

    fn statement(
        &self,
        statement: &Statement,
        scope: &Arc<Scope>,
        out: &mut Output,
    ) -> Result<Flow, Error> {
        self.step()?;
        match statement {
            Statement::Text(text) => out.write(text)?,
            Statement::Print(printed) => {
                let value = self.eval(printed, scope)?;
                match &value {
                    Value::Str(text) => out.write(text)?,
                    value => out.write(&python::str(value))?,
                }
            }
            Statement::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if python::is_true(&self.eval(condition, scope)?) {
                        return self.body(body, scope, out);
                    }
                }
                return self.body(otherwise, scope, out);
            }
            Statement::For(statement) => {
                let items = python::items(&self.eval(&statement.items, scope)?)?;
                self.for_loop(statement, items, scope, 0, out)?;
            }
            Statement::Set(target, value) => {
                let value = self.eval(value, scope)?;
                self.assign(target, value, scope, scope)?;
            }
            Statement::SetBlock(target, filters, body) => {
                let text = self.text_of(body, &Scope::inside(scope))?;
                let mut value = Value::from(text);
                for filter in filters {
                    value = self.filter(filter, value, scope)?;
                }
                self.assign(target, value, scope, scope)?;
            }
            Statement::With(values, body) => {
                let inner = Scope::inside(scope);
                for (target, value) in values {
                    let value = self.eval(value, scope)?;
                    self.assign(target, value, &inner, scope)?;
                }
                return self.body(body, &inner, out);
            }
            Statement::Macro(found) => {
                let object = Object::Macro(found.clone(), Arc::downgrade(scope));
                scope.set(&found.name, Value::Object(Arc::new(object)));
            }
            Statement::Call(call, caller) => {
                let Expr::Call(callee, args) = call else {
                    unreachable!("the parser makes sure of a call")
                };
                let callee = self.eval(callee, scope)?;
                let mut args = self.arguments(args, scope)?;
                let caller = Object::Macro(caller.clone(), Arc::downgrade(scope));
                let caller = Value::Object(Arc::new(caller));
                args.keywords.push(("caller".into(), caller));
                out.write(&python::str(&self.call(&callee, args)?))?;
            }
            Statement::FilterBlock(filters, body) => {
                let mut value = Value::from(self.text_of(body, &Scope::inside(scope))?);
                for filter in filters {
                    value = self.filter(filter, value, scope)?;
                }
                out.write(&python::str(&value))?;
            }
            Statement::Generation(body) => {
                if out.is_value || out.generating {
                    return Err(Error::new(
                        "a generation block inside of a macro or of another block whose text becomes a value has no known place: write it outside",
                    ));
                }
                let start = out.text.len();
                out.generating = true;
                let ended = self.body(body, &Scope::inside(scope), out);
                out.generating = false;
                ended?;
                out.generated.push(start..out.text.len());
            }
            Statement::Block(body) => {
                self.body(body, &Scope::inside(&self.root), out)?;
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn for_loop(
        &self,
        statement: &Arc<For>,
        items: Vec<Value>,
        scope: &Arc<Scope>,
        depth: usize,
        out: &mut Output,
    ) -> Result<(), Error> {
        let object = Arc::new(Object::Loop(Loop {
            items: Mutex::default(),
            rest: Mutex::new(items.into_iter()),
            index: AtomicUsize::new(0),
            depth,
            changed: Mutex::default(),
            statement: statement.clone(),
            scope: Arc::downgrade(scope),
        }));
        let Object::Loop(state) = &*object else {
            unreachable!("it is a loop")
        };
        for index in 0.. {
            self.pull(state, index + 1)?;
            let Some(item) = lock(&state.items).get(index).cloned() else {
                if index == 0 {
                    self.body(&statement.otherwise, &Scope::inside(scope), out)?;
                }
                break;
            };
            self.step()?;
            state.index.store(index, Relaxed);
            let inner = Scope::inside(scope);
            self.assign(&statement.target, item, &inner, scope)?;
            inner.set("loop", Value::Object(object.clone()));
            if self.body(&statement.body, &inner, out)? == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Makes sure that a loop has `count` items, if there are so many.
    pub(crate) fn pull(&self, state: &Loop, count: usize) -> Result<(), Error> {
        while lock(&state.items).len() < count {
            let Some(item) = lock(&state.rest).next() else {
                break;
            };
            if let Some(test) = &state.statement.test {
                let scope = state.scope.upgrade().ok_or_else(gone)?;
                let inner = Scope::inside(&scope);
                self.assign(&state.statement.target, item.clone(), &inner, &scope)?;
                if !python::is_true(&self.eval(test, &inner)?) {
                    continue;
                }
            }
            lock(&state.items).push(item);
        }
        Ok(())
    }

    /// Assigns to names in `scope`. Namespaces are looked up in `outer`.
    fn assign(
        &self,
        target: &Target,
        value: Value,
        scope: &Arc<Scope>,
        outer: &Arc<Scope>,
    ) -> Result<(), Error> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Attr(name, attribute) => match outer.find(name) {
                Some(Value::Object(object)) if matches!(&*object, Object::Namespace(_)) => {
                    let Object::Namespace(values) = &*object else {
                        unreachable!("it was matched")
                    };
                    if levels(&value, LEVELS_MAX) == 0 {
                        return Err(Error::new(format!(
                            "a value of more than {LEVELS_MAX} levels in a namespace"
                        )));
                    }
                    crate::functions::check_attribute(attribute)?;
                    lock(values).insert(attribute, value);
                }
                None => return Err(Error::new(format!("'{name}' is undefined"))),
                Some(_) => {
                    return Err(Error::new(
                        "cannot assign attribute on non-namespace object",
                    ));
                }
            },
            Target::Tuple(targets) => {
                let items = match value {
                    Value::Undefined(message) => return Err(Error::new(&*message)),
                    value => python::items(&value).map_err(|_| {
                        Error::new(format!(
                            "cannot unpack non-iterable {} object",
                            python::type_name(&value)
                        ))
                    })?,
                };
                if items.len() != targets.len() {
                    return Err(Error::new(format!(
                        "{} values to unpack, but {} names",
                        items.len(),
                        targets.len()
                    )));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope, outer)?;
                }
            }
        }
        Ok(())
    }

    /// Runs `call` one level deeper.
    fn deeper<T>(&self, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let calls = self.calls.get();
        if calls == CALLS_MAX {
            return Err(Error::new(format!(
                "macros call each other more than {CALLS_MAX} deep"
            )));
        }
        self.calls.set(calls + 1);
        let result = call();
        self.calls.set(calls);
        result
    }

    /// Runs a recursive loop again, with other items.
    pub(crate) fn recurse(&self, state: &Loop, items: &Value) -> Result<Value, Error> {
        if !state.statement.recursive {
            return Err(Error::new(
                "the loop must have the 'recursive' marker to be called recursively",
            ));
        }
        let scope = state.scope.upgrade().ok_or_else(gone)?;
        let items = python::items(items)?;
        let mut out = Output::for_value();
        self.deeper(|| self.for_loop(&state.statement, items, &scope, state.depth + 1, &mut out))?;
        Ok(out.text.into())
    }

    /// Calls a macro that was defined in `scope`.
    pub(crate) fn call_macro(
        &self,
        found: &Macro,
        scope: &std::sync::Weak<Scope>,
        mut args: Arguments,
    ) -> Result<Value, Error> {
        let scope = Scope::inside(&scope.upgrade().ok_or_else(gone)?);
        let name = &found.name;
        let rest = args
            .positional
            .split_off(args.positional.len().min(found.params.len()));
        let mut given = args.positional.into_iter();
        for (param, default) in &found.params {
            let keyword = args
                .keywords
                .iter()
                .position(|(keyword, _)| keyword == param);
            let value = match (given.next(), keyword) {
                (Some(value), _) => value,
                (None, Some(at)) => args.keywords.remove(at).1,
                (None, None) => match default {
                    Some(default) => self.eval(default, &scope)?,
                    None => Value::undefined(format!("parameter '{param}' was not provided")),
                },
            };
            scope.set(param, value);
        }
        if found.caller {
            let at = (args.keywords.iter()).position(|(keyword, _)| keyword == "caller");
            let caller = match at {
                Some(at) => args.keywords.remove(at).1,
                None => Value::undefined("No caller defined"),
            };
            scope.set("caller", caller);
        }
        if found.kwargs {
            scope.set("kwargs", Value::from_pairs(args.keywords));
        } else if let Some((keyword, _)) = args.keywords.first() {
            return Err(Error::new(format!(
                "macro '{name}' takes no keyword argument '{keyword}'"
            )));
        }
        if found.varargs {
            scope.set("varargs", Value::tuple(rest));
        } else if !rest.is_empty() {
            return Err(Error::new(format!(
                "macro '{name}' takes not more than {} argument(s)",
                found.params.len()
            )));
        }
        self.deeper(|| self.text_of(&found.body, &scope))
            .map(Value::from)
    }
}

fn gone() -> Error {
    Error::new("a macro was called outside of the block that defines it")
}

/// Levels that are left of `left` below a value.
fn levels(value: &Value, left: usize) -> usize {
    let inside = |values: &mut dyn Iterator<Item = &Value>| {
        let Some(left) = left.checked_sub(1) else {
            return 0;
        };
        values
            .map(|value| levels(value, left))
            .min()
            .unwrap_or(left)
    };
    match value {
        Value::Seq(seq) => inside(&mut seq.items.iter()),
        Value::Map(map) => inside(&mut map.iter().map(|(_, value)| value)),
        _ => left,
    }
}

#[cfg(test)]
mod tests {
    use crate::{Map, Template};

    #[test]
    fn an_endless_template_ends_with_an_error() {
        let nested = "{% for a in [[]] %}".repeat(99) + &"{% endfor %}".repeat(99);
        for (source, part) in [
            (
                "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
                "does not end",
            ),
            (
                "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
                "call each other",
            ),
            ("{{ 'x' * 999999999 }}", "makes a value of more than"),
            (
                "{% set n = namespace(x=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% endfor %}",
                "levels",
            ),
            (
                &format!("{nested}{{{{ {}1{} }}}}", "(".repeat(200), ")".repeat(200)),
                "nested more than",
            ),
        ] {
            let rendered =
                Template::parse(source).and_then(|template| template.render(&Map::default()));
            let message = rendered.unwrap_err().to_string();
            assert!(message.contains(part), "{source}: {message}");
        }
    }
}
