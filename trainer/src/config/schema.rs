//! What each key of a run file is: its type, its default and what it is for, taken from the declarations in `toml.rs`.
//!
//! `keys! { ... }` declares a table as a struct, and keeps the doc comment, the default, an example and the type of every field. The check of a
//! file, the errors about types and `trainer config-reference` read this, so none of them can disagree with what is parsed.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// One key of a table.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What holds without the key: a TOML value, or words. Empty where `what` or DeepSpeed's table says it.
    pub(super) default: &'static str,
    /// A value as a run file has it, for `docs/trainer-configuration.md`. Empty for DeepSpeed's keys.
    #[cfg(test)]
    pub(super) example: &'static str,
    /// The first sentence or more of its doc comment, a line each. Empty for DeepSpeed's keys, whose table has it.
    pub(super) what: &'static [&'static str],
}

/// The type of a key.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// As a person calls it, after "expected".
    pub(super) words: &'static str,
    /// Whether the parser takes a value for it.
    pub(super) accepts: fn(&Value) -> bool,
    /// The keys of a table.
    pub(super) fields: Option<&'static [Field]>,
}

/// A type that a key may have.
pub(super) trait Typed {
    const KIND: Kind;
}

impl Kind {
    /// Of a value that is parsed as `T`.
    pub(super) const fn of<T: DeserializeOwned>(words: &'static str) -> Self {
        Self {
            words,
            accepts: |value| T::deserialize(value).is_ok(),
            fields: None,
        }
    }

    /// Of a table.
    pub(super) const fn table(fields: &'static [Field]) -> Self {
        Self {
            words: "a table",
            accepts: Value::is_object,
            fields: Some(fields),
        }
    }
}

/// A key that may be left out.
impl<T: Typed> Typed for Option<T> {
    const KIND: Kind = T::KIND;
}

/// Declares which words name a type.
macro_rules! typed {
    ($($type:ty = $words:literal;)*) => { $(
        impl $crate::config::schema::Typed for $type {
            const KIND: $crate::config::schema::Kind = $crate::config::schema::Kind::of::<$type>($words);
        }
    )* };
}
pub(super) use typed;

typed! {
    u64 = "a whole number";
    f64 = "a number";
    bool = "true or false";
    String = "text";
    PathBuf = "a path";
    Vec<PathBuf> = "a list of paths, for example [\"a\", \"b\"]";
    Vec<String> = "a list of texts, for example [\"a\", \"b\"]";
    [f64; 2] = "two numbers, for example [0.9, 0.999]";
}

/// Declares tables of settings: structs in which every key may be left out, and their `Field`s.
macro_rules! keys {
    ($(
        $(#[doc = $about:literal])*
        pub struct $table:ident {
            $(
                $(#[doc = $what:literal])*
                $(#[default($default:literal)])?
                $(#[example($example:literal)])?
                $(#[name($name:literal)])?
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

        impl $crate::config::schema::Typed for $table {
            const KIND: $crate::config::schema::Kind = $crate::config::schema::Kind::table(&[
                $($crate::config::schema::Field {
                    name: $crate::config::schema::first!($($name,)? stringify!($field)),
                    kind: <$type as $crate::config::schema::Typed>::KIND,
                    default: $crate::config::schema::first!($($default,)? ""),
                    #[cfg(test)]
                    example: $crate::config::schema::first!($($example,)? ""),
                    what: &[$($what),*],
                },)*
            ]);
        }
    )* };
}
pub(super) use keys;

/// The first of one or two.
macro_rules! first {
    ($one:expr) => {
        $one
    };
    ($one:expr, $other:expr) => {
        $one
    };
}
pub(super) use first;

impl Field {
    /// Its doc comment as one line.
    pub(super) fn what(&self) -> String {
        let lines = self.what.iter().map(|line| line.trim());
        lines.collect::<Vec<_>>().join(" ")
    }
}
