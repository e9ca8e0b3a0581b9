//! Values of a `config.json` under the common names, with Hugging Face's defaults.

use serde_json::{Map, Value};

use super::keys;
use crate::model::{Architecture, ConfigError};

/// Keys with their values and defaults.
pub(super) struct ConfigTable {
    architecture: Architecture,
    values: Map<String, Value>,
    defaults: Vec<(&'static str, Value)>,
    /// Whether the values include a file's.
    pub(super) from_file: bool,
}

impl ConfigTable {
    pub(super) fn new(
        architecture: Architecture,
        values: Map<String, Value>,
        from_file: bool,
    ) -> Self {
        Self {
            architecture,
            values,
            defaults: keys::read(architecture),
            from_file,
        }
    }

    /// Returns whether the key was given, even as `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Returns the given value, even `null`, otherwise the default; `None` if the architecture does not have
    /// the key.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).or_else(|| {
            let mut defaults = self.defaults.iter();
            defaults
                .find(|(known, _)| *known == key)
                .map(|(_, value)| value)
        })
    }

    fn given(&self, key: &str) -> Option<&Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.given(key) else {
            return Ok(None);
        };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.map(Some)
            .ok_or_else(|| wrong_type(key, value, "a whole number"))
    }

    pub(super) fn size(&self, key: &'static str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or(self.missing(key))
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.given(key) else {
            return Ok(None);
        };
        let number = value.as_f64();
        number
            .map(Some)
            .ok_or_else(|| wrong_type(key, value, "a number"))
    }

    pub(super) fn number(&self, key: &'static str) -> Result<f64, ConfigError> {
        self.optional_number(key)?.ok_or(self.missing(key))
    }

    /// Returns a boolean value; false if the architecture does not have the key.
    pub(super) fn flag(&self, key: &str) -> Result<bool, ConfigError> {
        let Some(value) = self.given(key) else {
            return Ok(false);
        };
        value
            .as_bool()
            .ok_or_else(|| wrong_type(key, value, "true or false"))
    }

    fn missing(&self, key: &'static str) -> ConfigError {
        ConfigError::Missing {
            key,
            architecture: self.architecture.model_type(),
        }
    }
}

pub(super) fn wrong_type(key: &str, value: &Value, expected: &'static str) -> ConfigError {
    ConfigError::Type {
        key: key.into(),
        value: value.to_string(),
        expected,
    }
}
