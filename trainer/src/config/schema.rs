//! Type, default and description of each configuration key, taken from the declarations in `toml.rs`.
//!
//! `keys! { ... }` declares a table as a struct and keeps the doc comment, default, example and type of every
//! field. Checks, error messages and `trainer config-reference` use this data, so they cannot disagree with
//! the parser.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// One key of a table.
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Value without the key: a TOML value, or words. Empty if `what` or DeepSpeed's table says it.
    pub(super) default: &'static str,
    /// Example value for `docs/trainer-configuration.md`. Empty for DeepSpeed's keys.
    #[cfg(test)]
    pub(super) example: &'static str,
    /// Lines of the doc comment. Empty for DeepSpeed's keys, which are described in their table.
    pub(super) what: &'static [&'static str],
}

/// The type of a key.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    /// Name of the type in an error message after "expected".
    pub(super) words: &'static str,
    /// Returns whether the parser accepts a value of this kind.
    pub(super) accepts: fn(&Value) -> bool,
    /// The keys of a table.
    pub(super) fields: Option<&'static [Field]>,
}

/// Type that a key may have.
pub(super) trait Typed {
    const KIND: Kind;
}

impl Kind {
    /// Kind of a value that is parsed as `T`.
    pub(super) const fn of<T: DeserializeOwned>(words: &'static str) -> Self {
        Self {
            words,
            accepts: |value| T::deserialize(value).is_ok(),
            fields: None,
        }
    }

    /// Kind of a table.
    pub(super) const fn table(fields: &'static [Field]) -> Self {
        Self {
            words: "a table",
            accepts: Value::is_object,
            fields: Some(fields),
        }
    }
}

/// An optional key has the kind of its value.
impl<T: Typed> Typed for Option<T> {
    const KIND: Kind = T::KIND;
}

/// Declares the names of types in error messages.
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

/// Expands to the first of one or two arguments.
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
    /// The doc comment as one line.
    pub(super) fn what(&self) -> String {
        let lines = self.what.iter().map(|line| line.trim());
        lines.collect::<Vec<_>>().join(" ")
    }
}
