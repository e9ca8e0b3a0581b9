//! Values of templates and records, which behave as Python's.
//!
//! Lists, tuples and mappings do not change once they exist, as in the sandbox in which transformers runs templates; only the
//! attributes of a namespace do. They are shared, so that a copy costs little.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use indexmap::{Equivalent, IndexMap};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::object::Object;

/// A value.
#[derive(Clone, Default)]
#[expect(private_interfaces, reason = "only templates make and use functions")]
pub enum Value {
    /// The result of a name, key or attribute that is not there. Has the error that most uses of it raise.
    Undefined(Arc<str>),
    #[default]
    None,
    Bool(bool),
    /// Python's integers have no limit; larger ones than this are refused.
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    #[doc(hidden)]
    Seq(Arc<Seq>),
    Map(Arc<Map>),
    Object(Arc<Object>),
}

/// What a sequence is in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeqKind {
    List,
    Tuple,
    Range,
    /// `dict.items()`, `dict.keys()` and `dict.values()`, which have no index.
    Items,
    Keys,
    Values,
}

/// A sequence.
#[derive(Clone)]
pub struct Seq {
    pub(crate) kind: SeqKind,
    pub(crate) items: Vec<Value>,
}

/// A mapping that keeps the order of its keys.
#[derive(Clone, Default)]
pub struct Map(pub(crate) IndexMap<Key, Value>);

/// Key of a mapping: a value that Python can hash.
#[derive(Clone)]
pub(crate) struct Key(Value);

/// Key that is text, for lookups.
struct Text<'a>(&'a str);

impl Key {
    /// Returns `None` if the value cannot be a key.
    pub(crate) fn new(value: Value) -> Option<Self> {
        is_hashable(&value).then_some(Self(value))
    }
}

fn is_hashable(value: &Value) -> bool {
    match value {
        Value::Map(_) => false,
        Value::Seq(seq) => seq.kind == SeqKind::Tuple && seq.items.iter().all(is_hashable),
        _ => true,
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Str(text) => Text(text).hash(state),
            Value::Seq(seq) => {
                for item in &seq.items {
                    Key(item.clone()).hash(state);
                }
            }
            // Equal numbers are equal keys: 1, 1.0 and true.
            value => match crate::python::as_f64(value) {
                Some(number) => (number + 0.0).to_bits().hash(state),
                None => 0u8.hash(state),
            },
        }
    }
}

impl Hash for Text<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Equivalent<Key> for Text<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(&key.0, Value::Str(text) if **text == *self.0)
    }
}

impl Map {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(&Text(key))
    }

    pub(crate) fn get_value(&self, key: &Value) -> Option<&Value> {
        match key {
            Value::Str(text) => self.get(text),
            key => self.0.get(&Key::new(key.clone())?),
        }
    }

    /// Sets a key, which keeps its place if it is there already.
    pub fn insert(&mut self, key: &str, value: Value) {
        self.0.insert(Key(key.into()), value);
    }

    /// Returns keys and values in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Value, &Value)> {
        self.0.iter().map(|(key, value)| (&key.0, value))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<K: AsRef<str>> FromIterator<(K, Value)> for Map {
    fn from_iter<I: IntoIterator<Item = (K, Value)>>(pairs: I) -> Self {
        let pairs = pairs.into_iter();
        Self(
            pairs
                .map(|(key, value)| (Key(key.as_ref().into()), value))
                .collect(),
        )
    }
}

impl Value {
    /// Returns an undefined value whose uses fail with this message.
    pub(crate) fn undefined(message: impl Into<Arc<str>>) -> Self {
        Self::Undefined(message.into())
    }

    pub(crate) fn seq(kind: SeqKind, items: Vec<Self>) -> Self {
        Self::Seq(Arc::new(Seq { kind, items }))
    }

    pub(crate) fn list(items: Vec<Self>) -> Self {
        Self::seq(SeqKind::List, items)
    }

    pub(crate) fn tuple(items: Vec<Self>) -> Self {
        Self::seq(SeqKind::Tuple, items)
    }

    /// Makes a mapping.
    pub fn from_pairs<K: AsRef<str>>(pairs: impl IntoIterator<Item = (K, Self)>) -> Self {
        Self::Map(Arc::new(pairs.into_iter().collect()))
    }

    /// Returns the value of a key that is text, if this is a mapping.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.as_map()?.get(key)
    }

    pub fn as_map(&self) -> Option<&Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }

    pub fn as_list(&self) -> Option<&[Self]> {
        match self {
            Self::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
                Some(&seq.items)
            }
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns an integer; `None` for a boolean.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(number) => i64::try_from(*number).ok(),
            _ => None,
        }
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Names the kind of value as JSON does.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined",
            Self::None => "null",
            Self::Bool(_) => "true or false",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Str(_) => "text",
            Self::Seq(_) => "a list",
            Self::Map(_) => "an object",
            Self::Object(_) => "a function",
        }
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        crate::python::equal(self, other)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::python::str(self))
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::python::repr(self))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Str(text.into())
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<i128> for Value {
    fn from(number: i128) -> Self {
        Self::Int(number)
    }
}

macro_rules! from_integers {
    ($($integer:ty),*) => {
        $(impl From<$integer> for Value {
            fn from(number: $integer) -> Self {
                Self::Int(number.into())
            }
        })*
    };
}

from_integers!(i8, i16, i32, i64, u8, u16, u32, u64);

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::Float(number.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Int(number as i128)
    }
}

impl From<Map> for Value {
    fn from(map: Map) -> Self {
        Self::Map(Arc::new(map))
    }
}

impl From<Vec<Value>> for Value {
    fn from(items: Vec<Value>) -> Self {
        Self::list(items)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Json)
    }
}

/// Makes a value of JSON.
struct Json;

impl<'de> Visitor<'de> for Json {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = elements.next_element()? {
            items.push(item);
        }
        Ok(Value::list(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::default();
        while let Some((key, value)) = entries.next_entry::<String, Value>()? {
            map.insert(&key, value);
        }
        Ok(Value::Map(Arc::new(map)))
    }
}
