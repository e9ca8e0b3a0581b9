//! Type, default and description of each configuration key, taken from the declarations in `toml/`.
//!
//! `keys! { ... }` declares a table as a struct and keeps the doc comment, default, example and type of every
//! field. Checks, error messages and `trainer config-reference` use this data, so they cannot disagree with
//! the parser.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// One key of a table.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Value without the key: a TOML value, or words. Empty if `what` or DeepSpeed's table says it.
    pub(crate) default: &'static str,
    /// Example value for `docs/trainer-configuration.md`. Empty for DeepSpeed's keys.
    #[cfg(test)]
    pub(crate) example: &'static str,
    /// Whether only the trainer reads it.
    pub(crate) is_trainers: bool,
    /// Lines of the doc comment. Empty for DeepSpeed's keys, which are described in their table.
    pub(crate) what: &'static [&'static str],
}

/// The type of a key.
#[derive(Clone, Copy)]
pub struct Kind {
    /// Name of the type in an error message after "expected".
    pub(crate) words: &'static str,
    /// Returns whether the parser accepts a value of this kind.
    pub(crate) accepts: fn(&Value) -> bool,
    /// The keys of a table.
    pub(crate) fields: Option<&'static [Field]>,
}

/// Type that a key may have.
pub trait KeyType {
    const KIND: Kind;
}

impl Kind {
    /// Kind of a value that is parsed as `T`.
    pub(crate) const fn parsed_as<T: DeserializeOwned>(words: &'static str) -> Self {
        Self {
            words,
            accepts: |value| T::deserialize(value).is_ok(),
            fields: None,
        }
    }

    /// Kind of a table.
    pub(crate) const fn table(fields: &'static [Field]) -> Self {
        Self {
            words: "a table",
            accepts: Value::is_object,
            fields: Some(fields),
        }
    }
}

/// An optional key has the kind of its value.
impl<T: KeyType> KeyType for Option<T> {
    const KIND: Kind = T::KIND;
}

/// Declares the names of types in error messages.
macro_rules! typed {
    ($($type:ty = $words:literal;)*) => { $(
        impl $crate::schema::KeyType for $type {
            const KIND: $crate::schema::Kind = $crate::schema::Kind::parsed_as::<$type>($words);
        }
    )* };
}
pub(crate) use typed;

typed! {
    u64 = "a whole number";
    f64 = "a number";
    bool = "true or false";
    String = "text";
    PathBuf = "a path";
    Vec<PathBuf> = "a list of paths, for example [\"a\", \"b\"]";
    Vec<String> = "a list of texts, for example [\"a\", \"b\"]";
    [f64; 2] = "two numbers, for example [0.9, 0.999]";
    [f64; 3] = "three numbers, for example [3.4445, -4.775, 2.0315]";
}

/// Declares tables of settings: structs whose keys are all optional, and their `Field`s.
macro_rules! keys {
    ($(
        $(#[doc = $about:literal])*
        pub struct $table:ident {
            $(
                $(#[doc = $what:literal])*
                $(#[default($default:literal)])?
                $(#[example($example:literal)])?
                $(#[name($name:literal)])?
                $(#[only($only:ident)])?
                pub $field:ident: $type:ty,
            )*
        }
    )*) => { $(
        $(#[doc = $about])*
        #[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $table {
            $(
                $(#[doc = $what])*
                $(#[serde(rename = $name)])?
                pub $field: $type,
            )*
        }

        impl $crate::schema::KeyType for $table {
            const KIND: $crate::schema::Kind = $crate::schema::Kind::table(&[
                $($crate::schema::Field {
                    name: $crate::schema::first!($($name,)? stringify!($field)),
                    kind: <$type as $crate::schema::KeyType>::KIND,
                    default: $crate::schema::first!($($default,)? ""),
                    is_trainers: $crate::schema::first!($($crate::schema::is_trainers!($only),)? false),
                    #[cfg(test)]
                    example: $crate::schema::first!($($example,)? ""),
                    what: &[$($what),*],
                },)*
            ]);
        }
    )* };
}
pub(crate) use keys;

/// Expands to `true` for the word in `#[only(trainer)]`.
macro_rules! is_trainers {
    (trainer) => {
        true
    };
}
pub(crate) use is_trainers;

/// Expands to the first of one or two arguments.
macro_rules! first {
    ($one:expr) => {
        $one
    };
    ($one:expr, $other:expr) => {
        $one
    };
}
pub(crate) use first;

impl Field {
    /// The doc comment as one line.
    pub(crate) fn what(&self) -> String {
        let lines = self.what.iter().map(|line| line.trim());
        lines.collect::<Vec<_>>().join(" ")
    }
}
