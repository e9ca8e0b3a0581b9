//! Keys of the rotary embedding. Files of transformers 5 have one table, `rope_parameters`; older files have
//! `rope_theta` and `rope_scaling`; some have both.

use serde_json::{Map, Value};

use super::PACKAGE;
use super::table::{ConfigTable, wrong_type};
use crate::model::{ConfigError, ModelConfig, RopeScaling, Yarn};

const KINDS: &[&str] = &["default", "linear", "dynamic", "llama3", "yarn"];

/// Length of sequences that the model was first trained with.
const ORIGINAL: &str = "original_max_position_embeddings";

const KEYS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    ORIGINAL,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    // Says how the weights were made.
    "finetuned",
];

/// Converts `rope_parameters` to the older keys: `rope_theta`, and `rope_scaling` with the rest, `null`
/// without scaling.
pub(super) fn flatten(values: &mut Map<String, Value>) -> Result<(), ConfigError> {
    let mut scaling = Map::new();
    let mut plain_given = false;
    // If both tables exist, the older one takes precedence, as in transformers.
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(value) = values.remove(key) else {
            continue;
        };
        plain_given = true;
        let Value::Object(mut table) = value else {
            if value.is_null() {
                continue;
            }
            return Err(wrong_type(key, &value, "a table"));
        };
        check_table(key, &table)?;
        // By whichever name the older table calls its kind, it takes precedence.
        if let Some(kind) = table.remove("type") {
            table.entry("rope_type").or_insert(kind);
        }
        scaling.extend(table);
    }
    if let Some(theta) = scaling.remove("rope_theta") {
        values.insert("rope_theta".into(), theta);
    }
    let kind = scaling.remove("rope_type");
    let plain = kind.as_ref().is_none_or(|kind| kind == "default");
    // Beside the tables it takes precedence over the one in them, as in transformers.
    if kind.as_ref().is_some_and(has_original)
        && let Some(original) = values.remove(ORIGINAL).filter(|value| !value.is_null())
    {
        scaling.insert(ORIGINAL.into(), original);
    }
    if let Some(kind) = kind.filter(|_| !plain) {
        scaling.insert("rope_type".into(), kind);
        values.insert("rope_scaling".into(), Value::Object(scaling));
    } else if plain_given {
        values.insert("rope_scaling".into(), Value::Null);
    }
    Ok(())
}

/// Whether a scaling begins with the length that the model was first trained with.
fn has_original(kind: &Value) -> bool {
    kind == "llama3" || kind == "yarn"
}

/// Gives the scaling in a file, after [`flatten`], the original length that transformers takes if there is none: the file's
/// `max_position_embeddings`, which inline keys may raise. Inline keys must have the original length.
pub(super) fn complete(values: &mut Map<String, Value>, own_len: usize) {
    if let Some(Value::Object(scaling)) = values.get_mut("rope_scaling")
        && has_original(&scaling["rope_type"])
        && scaling.get(ORIGINAL).is_none_or(Value::is_null)
    {
        scaling.insert(ORIGINAL.into(), own_len.into());
    }
}

fn check_table(name: &str, table: &Map<String, Value>) -> Result<(), ConfigError> {
    let refuse = |key: &str, value: &Value, supported: String| {
        Err(ConfigError::Unsupported {
            key: format!("{name}.{key}"),
            value: value.to_string(),
            supported,
        })
    };
    let kinds = KINDS.iter().map(|kind| format!("\"{kind}\""));
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let kind = table.get("rope_type").or_else(|| table.get("type"));
    match kind {
        None if name == "rope_scaling" && !table.is_empty() => {
            return refuse("rope_type", &Value::Null, format!("use one of {kinds}"));
        }
        None => {}
        Some(kind) if KINDS.iter().any(|known| kind == known) => {}
        Some(kind) if kind == "longrope" => {
            let why = "its frequencies depend on the longest position of each batch";
            return refuse("rope_type", kind, format!("{why}; {PACKAGE}"));
        }
        Some(kind) => return refuse("rope_type", kind, format!("use one of {kinds}")),
    }
    for (key, value) in table {
        if key == "partial_rotary_factor" && value.as_f64() == Some(1.0) {
            continue;
        }
        if !KEYS.contains(&key.as_str()) && !value.is_null() {
            return refuse(
                key,
                value,
                "it is a key of an unsupported form of the rotary embedding".into(),
            );
        }
    }
    Ok(())
}

fn missing(key: &str) -> ConfigError {
    ConfigError::Type {
        key: format!("rope_scaling.{key}"),
        value: "nothing".into(),
        expected: "a number",
    }
}

/// Reads `rope_scaling`, which was flattened before.
pub(super) fn scaling(table: &ConfigTable) -> Result<Option<RopeScaling>, ConfigError> {
    let Some(Value::Object(scaling)) = table.get("rope_scaling") else {
        return Ok(None);
    };
    let read = Scaling(scaling);
    Ok(Some(match scaling["rope_type"].as_str() {
        Some("linear") => RopeScaling::Linear {
            factor: read.number("factor")?,
        },
        Some("dynamic") => RopeScaling::Dynamic {
            factor: read.number("factor")?,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: read.number("factor")?,
            low_freq_factor: read.number("low_freq_factor")?,
            high_freq_factor: read.number("high_freq_factor")?,
            original_max_position_embeddings: read.number(ORIGINAL)?,
        },
        Some("yarn") => {
            let original = read.number(ORIGINAL)?;
            let factor = match scaling.get("factor") {
                Some(Value::Null) => table.number("max_position_embeddings")? / original,
                _ => read.number("factor")?,
            };
            RopeScaling::Yarn(read.yarn(factor, original)?)
        }
        _ => unreachable!("the type was checked"),
    }))
}

/// Longest sequence whose positions the weights of a file with the keys `own` know, of which `own_len` without the scaling of
/// `config`.
pub(super) fn covered_len(
    own_len: usize,
    own: &ConfigTable,
    config: &ModelConfig,
) -> Result<usize, ConfigError> {
    let before = match scaling(own)? {
        // The file's length is the scaled one.
        Some(RopeScaling::Linear { factor }) => own_len as f64 / factor,
        _ => own_len as f64,
    };
    let scaled = config
        .rope_scaling
        .map_or(0.0, |scaling| scaling.covered_len(before));
    Ok(own_len.max(scaled.round() as usize))
}

/// The table `rope_scaling`.
struct Scaling<'a>(&'a Map<String, Value>);

impl Scaling<'_> {
    fn optional(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.0.get(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let wrong = || wrong_type(&format!("rope_scaling.{key}"), value, "a number");
        value.as_f64().map(Some).ok_or_else(wrong)
    }

    fn number(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional(key)?.ok_or_else(|| missing(key))
    }

    /// Reads the other constants of YaRN. Transformers takes zeros of these for missing ones.
    fn yarn(&self, factor: f64, original: f64) -> Result<Yarn, ConfigError> {
        let unless_zero = |key| {
            let number = self.optional(key)?;
            Ok::<_, ConfigError>(number.filter(|number| *number != 0.0))
        };
        Ok(Yarn {
            factor,
            original_max_position_embeddings: original,
            attention_factor: self.optional("attention_factor")?,
            beta_fast: unless_zero("beta_fast")?.unwrap_or(32.0),
            beta_slow: unless_zero("beta_slow")?.unwrap_or(1.0),
            mscale: unless_zero("mscale")?,
            mscale_all_dim: unless_zero("mscale_all_dim")?,
            truncate: match self.0.get("truncate") {
                None => true,
                Some(Value::Null) => false,
                Some(value) => value
                    .as_bool()
                    .ok_or_else(|| wrong_type("rope_scaling.truncate", value, "true or false"))?,
            },
        })
    }
}
