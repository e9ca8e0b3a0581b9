//! Values that are more than data: functions, namespaces, loops and iterators.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Value;
use crate::ast;
use crate::render::Scope;
use crate::value::Map;

pub(crate) enum Object {
    Namespace(Mutex<Map>),
    /// An iterator, which gives its items once.
    Iterator(Mutex<Vec<Value>>),
    Loop(Loop),
    Macro(Arc<ast::Macro>, Weak<Scope>),
    /// A method and the value that it belongs to.
    Method(Value, String),
    /// A global function.
    Function(&'static str),
    Cycler(Vec<Value>, AtomicUsize),
    /// A separator, and whether it was used before.
    Joiner(Value, Mutex<bool>),
}

/// The variable `loop`.
pub(crate) struct Loop {
    /// Items so far. Those with a condition are tested only when they are needed, because the body may change what it refers to.
    pub(crate) items: Mutex<Vec<Value>>,
    pub(crate) rest: Mutex<std::vec::IntoIter<Value>>,
    pub(crate) index: AtomicUsize,
    pub(crate) depth: usize,
    pub(crate) changed: Mutex<Option<Vec<Value>>>,
    /// The statement and the scope around it.
    pub(crate) statement: Arc<ast::For>,
    pub(crate) scope: Weak<Scope>,
}

/// Locks, also after a panic of another holder, which left the data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Object {
    pub(crate) fn iterator(items: Vec<Value>) -> Value {
        Value::Object(Arc::new(Self::Iterator(Mutex::new(items))))
    }

    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Namespace(_) => "Namespace",
            Self::Iterator(_) => "generator",
            Self::Loop(_) => "LoopContext",
            Self::Macro(..) => "Macro",
            Self::Method(..) => "builtin_function_or_method",
            Self::Function(_) => "function",
            Self::Cycler(..) => "Cycler",
            Self::Joiner(..) => "Joiner",
        }
    }

    pub(crate) fn repr(&self) -> String {
        match self {
            Self::Macro(found, _) => format!("<Macro '{}'>", found.name),
            other => format!("<{} object>", other.type_name()),
        }
    }

    pub(crate) fn is_iterable(&self) -> bool {
        matches!(self, Self::Iterator(_) | Self::Loop(_))
    }

    pub(crate) fn is_callable(&self) -> bool {
        !matches!(
            self,
            Self::Namespace(_) | Self::Iterator(_) | Self::Cycler(..)
        )
    }

    /// Returns the items that are left.
    pub(crate) fn take_items(&self) -> Vec<Value> {
        match self {
            Self::Iterator(items) => std::mem::take(&mut lock(items)),
            _ => Vec::new(),
        }
    }

    /// Returns an attribute, if there is one of that name.
    pub(crate) fn attribute(&self, name: &str) -> Option<Value> {
        match self {
            Self::Namespace(values) => lock(values).get(name).cloned(),
            Self::Loop(found) => found.attribute(name),
            Self::Macro(found, _) => match name {
                "name" => Some(found.name.as_str().into()),
                "arguments" => Some(Value::tuple(
                    found
                        .params
                        .iter()
                        .map(|(name, _)| name.as_str().into())
                        .collect(),
                )),
                _ => None,
            },
            Self::Cycler(items, at) if name == "current" => items.get(at.load(Relaxed)).cloned(),
            _ => None,
        }
    }

    /// Returns whether there is a method of this name.
    pub(crate) fn has_method(&self, name: &str) -> bool {
        match self {
            Self::Loop(_) => matches!(name, "cycle" | "changed"),
            Self::Cycler(..) => matches!(name, "next" | "reset"),
            _ => false,
        }
    }
}

impl Loop {
    /// Returns how many items `attribute` needs.
    pub(crate) fn needs(&self, attribute: &str) -> usize {
        match attribute {
            "last" | "nextitem" => self.index.load(Relaxed) + 2,
            "length" | "revindex" | "revindex0" => usize::MAX,
            _ => 0,
        }
    }

    /// Returns an attribute, once the items that it needs are there.
    fn attribute(&self, name: &str) -> Option<Value> {
        let items = lock(&self.items);
        let (index, length) = (self.index.load(Relaxed), items.len());
        let beside = |at: Option<usize>, word: &str| {
            let found = at.and_then(|at| items.get(at)).cloned();
            found.unwrap_or_else(|| Value::undefined(format!("there is no {word} item")))
        };
        Some(match name {
            "index" => (index + 1).into(),
            "index0" => index.into(),
            "revindex" => (length - index).into(),
            "revindex0" => (length - index - 1).into(),
            "first" => (index == 0).into(),
            "last" => (index + 1 == length).into(),
            "length" => length.into(),
            "depth" => (self.depth + 1).into(),
            "depth0" => self.depth.into(),
            "previtem" => beside(index.checked_sub(1), "previous"),
            "nextitem" => beside(Some(index + 1), "next"),
            _ => return None,
        })
    }
}
