//! Keys of the rotary embedding. Files of transformers 5 have one table, `rope_parameters`; older files have
//! `rope_theta` and `rope_scaling`; some have both.

use serde_json::{Map, Value};

use super::table::{ConfigTable, wrong_type};
use crate::model::{ConfigError, RopeScaling};

const KEYS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
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
        let Value::Object(table) = value else {
            if value.is_null() {
                continue;
            }
            return Err(wrong_type(key, &value, "a table"));
        };
        check_table(key, &table)?;
        scaling.extend(table);
    }
    if let Some(theta) = scaling.remove("rope_theta") {
        values.insert("rope_theta".into(), theta);
    }
    let kind = scaling.remove("type");
    let kind = scaling.remove("rope_type").or(kind);
    let plain = kind.as_ref().is_none_or(|kind| kind == "default");
    if let Some(kind) = kind.filter(|_| !plain) {
        scaling.insert("rope_type".into(), kind);
        values.insert("rope_scaling".into(), Value::Object(scaling));
    } else if plain_given {
        values.insert("rope_scaling".into(), Value::Null);
    }
    Ok(())
}

fn check_table(name: &str, table: &Map<String, Value>) -> Result<(), ConfigError> {
    let refuse = |key: &str, value: &Value, supported: &str| {
        Err(ConfigError::Unsupported {
            key: format!("{name}.{key}"),
            value: value.to_string(),
            supported: supported.into(),
        })
    };
    let kind = table.get("rope_type").or_else(|| table.get("type"));
    match kind.map(|kind| (kind, kind.as_str())) {
        None if name == "rope_scaling" && !table.is_empty() => {
            return refuse(
                "rope_type",
                &Value::Null,
                "use \"default\", \"linear\" or \"llama3\"",
            );
        }
        None | Some((_, Some("default" | "linear" | "llama3"))) => {}
        Some((kind, _)) => {
            return refuse(
                "rope_type",
                kind,
                "only \"default\", \"linear\" and \"llama3\" are",
            );
        }
    }
    for (key, value) in table {
        if key == "partial_rotary_factor" && value.as_f64() == Some(1.0) {
            continue;
        }
        if !KEYS.contains(&key.as_str()) && !value.is_null() {
            return refuse(
                key,
                value,
                "it is a key of an unsupported form of the rotary embedding",
            );
        }
    }
    Ok(())
}

/// Reads `rope_scaling`, which was flattened before.
pub(super) fn scaling(table: &ConfigTable) -> Result<Option<RopeScaling>, ConfigError> {
    let Some(Value::Object(scaling)) = table.get("rope_scaling") else {
        return Ok(None);
    };
    let number = |key: &'static str| match scaling.get(key) {
        None | Some(Value::Null) => Err(ConfigError::Type {
            key: format!("rope_scaling.{key}"),
            value: "nothing".into(),
            expected: "a number",
        }),
        Some(value) => value
            .as_f64()
            .ok_or_else(|| wrong_type(key, value, "a number")),
    };
    let factor = number("factor")?;
    Ok(Some(if scaling["rope_type"] == "linear" {
        RopeScaling::Linear { factor }
    } else {
        let original = match scaling.get("original_max_position_embeddings") {
            // Default of transformers.
            None | Some(Value::Null) => table.number("max_position_embeddings")?,
            Some(_) => number("original_max_position_embeddings")?,
        };
        RopeScaling::Llama3 {
            factor,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original,
        }
    }))
}
