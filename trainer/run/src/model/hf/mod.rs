//! Reads a model from Hugging Face's `config.json` and from the same keys in the run's configuration.
//!
//! ```text
//!   config.json ──▶ common names ──┐
//!                                  ├──▶ one table ──▶ sizes and constants, dropout, notes
//!   inline keys ──▶ common names ──┘  (inline keys take precedence)
//! ```
//!
//! A `config.json` is written for another program: keys without effect are ignored, unknown keys are
//! reported, keys that would make it another model are refused. Inline keys are written for this program, so
//! each must be a known key.

mod keys;
mod rope;
mod table;
mod write;

use serde_json::{Map, Value, json};

use self::table::ConfigTable;
pub use self::write::config_json;
use super::architecture::ENCODERS;
use super::{Architecture, Biases, ConfigError, Dropout, Mlp, ModelConfig, Window};

/// Contents of a `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct HfModel {
    pub config: ModelConfig,
    /// Dropout rates in training.
    pub dropout: Dropout,
    /// Longest sequence whose positions the file's weights know: its own `max_position_embeddings`, or more if scaled
    /// positions are among those. `None` without a file.
    pub covered_len: Option<usize>,
    /// Notes about unknown keys of the file and about values changed by inline keys.
    pub notes: Vec<String>,
}

impl HfModel {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// The text cannot be parsed; the architecture or a key is not supported; [`ModelConfig::validate`]
    /// refuses the model.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::read(Some(parse(text)?), Map::new())
    }

    /// Reads a model from a file's keys, if there is a file, and the `inline` keys, which take precedence.
    /// Without a file there is no dropout unless the keys set it; other missing keys have Hugging Face's
    /// defaults.
    ///
    /// # Errors
    /// Same as [`HfModel::from_json`]; an inline key is not a key of this architecture.
    pub fn read(
        file: Option<Map<String, Value>>,
        inline: Map<String, Value>,
    ) -> Result<Self, ConfigError> {
        let from_file = file.is_some();
        let mut notes = Vec::new();
        let architecture = architecture(file.as_ref(), &inline, &mut notes)?;
        let file = file.unwrap_or_default();
        let mut values = common_names(architecture, file)?;
        check_keys(architecture, &mut values, |key| {
            notes.push(format!(
                "{key} of the model's config.json is unknown and not used"
            ));
            Ok(())
        })?;
        let own_len = ConfigTable::new(architecture, values.clone(), from_file)
            .size("max_position_embeddings")?;
        rope::complete(&mut values, own_len);
        let own = ConfigTable::new(architecture, values.clone(), from_file);
        let mut inline = common_names(architecture, inline)?;
        let not_of_this_model = |key: &str| ConfigError::NotOfThisModel {
            key: key.into(),
            architecture: architecture.model_type(),
        };
        // A file may have keys of other architectures; in a run file, they are meant to have an effect.
        let mut keys = inline.keys();
        if let Some(key) = keys.find(|key| keys::of_others(architecture).contains(&key.as_str())) {
            return Err(not_of_this_model(key));
        }
        check_keys(architecture, &mut inline, |key| Err(not_of_this_model(key)))?;
        if changes_layers(&inline, &values) && !inline.contains_key("layer_types") {
            values.remove("layer_types");
        }
        // What a run file says itself, such as that there are no windows, needs no words.
        let windows = ["sliding_window", "max_window_layers"];
        let windows = windows
            .into_iter()
            .filter(|_| !inline.contains_key("use_sliding_window"));
        let window_key = windows.into_iter().find(|key| inline.contains_key(*key));
        for (key, value) in inline {
            let before = values.insert(key.clone(), value.clone());
            if let Some(before) = before.filter(|before| *before != value) {
                notes.push(format!(
                    "model.{key} = {value} replaces {before} from the model's config.json"
                ));
            }
        }
        let table = ConfigTable::new(architecture, values, from_file);
        if let Some(key) = window_key
            && !uses_windows(architecture, &table)?
        {
            return Err(ConfigError::WithoutWindows { key });
        }
        let dropout = dropout(&table)?;
        let config = config(architecture, &table)?;
        dropout.validate()?;
        config.validate()?;
        let covered_len = from_file.then(|| rope::covered_len(own_len, &own, &config));
        Ok(Self {
            covered_len: covered_len.transpose()?,
            config,
            dropout,
            notes,
        })
    }
}

/// Parses a `config.json` into a table.
///
/// # Errors
/// The text is not JSON, or not a table.
pub fn parse(text: &str) -> Result<Map<String, Value>, ConfigError> {
    match serde_json::from_str(text) {
        Ok(Value::Object(table)) => Ok(table),
        Ok(_) => Err(ConfigError::Unreadable(
            "the outermost value is not a table".into(),
        )),
        Err(error) => Err(ConfigError::Unreadable(error.to_string())),
    }
}

/// Determines the architecture from `model_type`. A file without it must name the model's class; inline keys
/// alone describe a Llama.
fn architecture(
    file: Option<&Map<String, Value>>,
    inline: &Map<String, Value>,
    notes: &mut Vec<String>,
) -> Result<Architecture, ConfigError> {
    let in_file = file.and_then(|file| file.get("model_type"));
    let Some(given) = inline.get("model_type").or(in_file) else {
        return match file {
            None => Ok(Architecture::default()),
            Some(file) => by_class(file.get("architectures"), notes),
        };
    };
    let supported = || {
        let all = Architecture::ALL.iter().map(|a| a.model_type());
        all.collect::<Vec<_>>().join(", ")
    };
    let name = given.as_str().unwrap_or_default();
    Architecture::named(name).ok_or_else(|| ConfigError::Unsupported {
        key: "model_type".into(),
        value: given.to_string(),
        supported: if ENCODERS.contains(&name) {
            format!(
                "encoder models are not supported yet; supported decoders: {}",
                supported()
            )
        } else {
            format!("supported: {}; {PACKAGE}", supported())
        },
    })
}

/// Returns the architecture if `architectures` names exactly one known class.
fn by_class(
    architectures: Option<&Value>,
    notes: &mut Vec<String>,
) -> Result<Architecture, ConfigError> {
    let all = Architecture::ALL.iter();
    let mut named = all.filter(|known| architectures == Some(&json!([known.class()])));
    let Some(&found) = named.next_back() else {
        return Err(ConfigError::NoModelType {
            architectures: architectures.unwrap_or(&Value::Null).to_string(),
        });
    };
    notes.push(format!(
        "the model's config.json has no model_type: using \"{}\", because architectures names {}",
        found.model_type(),
        found.class()
    ));
    Ok(found)
}

/// Converts keys to the names that all architectures share, and those of positions to Llama's.
fn common_names(
    architecture: Architecture,
    mut values: Map<String, Value>,
) -> Result<Map<String, Value>, ConfigError> {
    for (theirs, common) in keys::aliases(architecture) {
        if let Some(value) = values.remove(*theirs) {
            values.insert((*common).into(), value);
        }
    }
    if values.contains_key("rope_parameters") || values.contains_key("rope_scaling") {
        rope::flatten(&mut values)?;
    }
    Ok(values)
}

/// What trains models of other forms.
const PACKAGE: &str = "the Python package offloadd trains other PyTorch models (docs/pytorch.md)";

/// Removes keys without effect and refuses those that would make it another model; calls `unknown` for other
/// keys.
fn check_keys(
    architecture: Architecture,
    values: &mut Map<String, Value>,
    mut unknown: impl FnMut(&str) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    let read = keys::read(architecture);
    let fixed = keys::fixed(architecture);
    for key in values.keys().cloned().collect::<Vec<_>>() {
        if read.iter().any(|(known, _)| *known == key) {
            continue;
        }
        let value = values.remove(&key).expect("a key of the table");
        if let Some((_, neutral, supported)) = fixed.iter().find(|(known, ..)| *known == key) {
            if !value.is_null() && !neutral.contains(&value) {
                return Err(ConfigError::Unsupported {
                    key,
                    value: value.to_string(),
                    supported: format!("{supported}; {PACKAGE}"),
                });
            }
        } else if !keys::WITHOUT_EFFECT.contains(&key.as_str())
            && !keys::of_others(architecture).contains(&key.as_str())
        {
            unknown(&key)?;
        }
    }
    Ok(())
}

fn dropout(table: &ConfigTable) -> Result<Dropout, ConfigError> {
    let share = |key| {
        Ok(if table.from_file || table.has(key) {
            table.optional_number(key)?.unwrap_or(0.0)
        } else {
            0.0
        })
    };
    Ok(Dropout {
        embedding: share("embd_pdrop")?,
        residual: share("resid_pdrop")?,
        attention: share("attention_dropout")?,
    })
}

fn config(architecture: Architecture, table: &ConfigTable) -> Result<ModelConfig, ConfigError> {
    let form = architecture.form();
    let (hidden_size, heads) = (
        table.size("hidden_size")?,
        table.size("num_attention_heads")?,
    );
    let layers = table.size("num_hidden_layers")?;
    let intermediate_size = match table.optional_size("intermediate_size")? {
        // GPT-2's default.
        None if form.mlp == Mlp::Gelu => hidden_size.saturating_mul(4),
        None => table.size("intermediate_size")?,
        Some(size) => size,
    };
    let attention_bias = table.flag("attention_bias")?;
    let mlp_bias = table.flag("mlp_bias")?;
    Ok(ModelConfig {
        architecture,
        vocab_size: table.size("vocab_size")?,
        hidden_size,
        intermediate_size,
        layers,
        heads,
        kv_heads: table.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim: table.optional_size("head_dim")?,
        rope_theta: table.optional_number("rope_theta")?.unwrap_or(10000.0),
        rope_scaling: rope::scaling(table)?,
        norm_eps: table.number("rms_norm_eps")?,
        tied: table.flag("tie_word_embeddings")?,
        initializer_range: table.number("initializer_range")?,
        max_position_embeddings: table.size("max_position_embeddings")?,
        biases: Biases {
            qkv: form.biases.qkv || attention_bias,
            out: form.biases.out || attention_bias,
            mlp: form.biases.mlp || mlp_bias,
        },
        sliding_window: window(architecture, layers, table)?,
        pad_token_id: untrained(architecture, table)?,
    })
}

/// Returns the token whose row of the embedding transformers does not train. GPT-2 has none. A negative number counts
/// from the end of the table.
fn untrained(
    architecture: Architecture,
    table: &ConfigTable,
) -> Result<Option<usize>, ConfigError> {
    let given = table.get("pad_token_id").filter(|id| !id.is_null());
    let Some(given) = given.filter(|_| architecture != Architecture::Gpt2) else {
        return Ok(None);
    };
    let vocab_size = table.size("vocab_size")?;
    let id = given
        .as_i64()
        .map(|id| if id < 0 { id + vocab_size as i64 } else { id });
    let id = id.and_then(|id| usize::try_from(id).ok());
    match id.filter(|id| *id < vocab_size) {
        Some(id) => Ok(Some(id)),
        None => Err(ConfigError::Unsupported {
            key: "pad_token_id".into(),
            value: given.to_string(),
            supported: format!("it must be a token below vocab_size = {vocab_size}, or null"),
        }),
    }
}

/// Whether keys of a run file change which layers there are, or which of them have a window: then `layer_types` of the model's file no longer holds.
fn changes_layers(inline: &Map<String, Value>, file: &Map<String, Value>) -> bool {
    let changes = |key| (inline.get(key)).is_some_and(|value| file.get(key) != Some(value));
    let is_off =
        |table: &Map<String, Value>| table.get("sliding_window").is_none_or(Value::is_null);
    let layers = [
        "num_hidden_layers",
        "use_sliding_window",
        "max_window_layers",
    ];
    let switches = inline.contains_key("sliding_window") && is_off(inline) != is_off(file);
    layers.into_iter().any(changes) || switches
}

/// Whether `sliding_window` has an effect.
fn uses_windows(architecture: Architecture, table: &ConfigTable) -> Result<bool, ConfigError> {
    match architecture {
        Architecture::Gpt2 | Architecture::Llama => Ok(false),
        Architecture::Mistral => Ok(true),
        Architecture::Qwen2 | Architecture::Qwen3 => table.flag("use_sliding_window"),
    }
}

fn window(
    architecture: Architecture,
    layers: usize,
    table: &ConfigTable,
) -> Result<Option<Window>, ConfigError> {
    let tokens = match uses_windows(architecture, table)? {
        true => table.optional_size("sliding_window")?,
        false => None,
    };
    let first_layer = match (architecture, tokens) {
        (Architecture::Qwen2 | Architecture::Qwen3, Some(_)) => {
            first_windowed_layer(layers, table)?
        }
        // All layers are of one kind, whatever the file says.
        (_, tokens) => {
            let kind = match tokens {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            let is_kind = |types: &Value| {
                let types = types.as_array();
                types.is_some_and(|types| types.iter().all(|found| *found == kind))
            };
            let types = table.get("layer_types").filter(|types| !types.is_null());
            if let Some(types) = types.filter(|types| !is_kind(types)) {
                return Err(ConfigError::Unsupported {
                    key: "layer_types".into(),
                    value: types.to_string(),
                    supported: format!(
                        "with these settings transformers computes {layers} layers of \"{kind}\" in a {} model; {PACKAGE}",
                        architecture.model_type()
                    ),
                });
            }
            0
        }
    };
    let Some(tokens) = tokens else {
        return Ok(None);
    };
    Ok((first_layer < layers).then_some(Window {
        tokens,
        first_layer,
    }))
}

/// Returns the first layer with a sliding window in Qwen models: from `max_window_layers`, or from
/// `layer_types`, in which these layers must be the last ones.
fn first_windowed_layer(layers: usize, table: &ConfigTable) -> Result<usize, ConfigError> {
    let Some(types) = table.get("layer_types").filter(|types| !types.is_null()) else {
        return Ok(table
            .optional_size("max_window_layers")?
            .unwrap_or(0)
            .min(layers));
    };
    let full = types.as_array().map_or(0, |types| {
        let full = types.iter().take_while(|kind| **kind == "full_attention");
        full.count()
    });
    let expected: Vec<&str> = (0..layers)
        .map(|layer| {
            if layer < full {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    if *types != json!(expected) {
        return Err(ConfigError::Unsupported {
            key: "layer_types".into(),
            value: types.to_string(),
            supported: format!(
                "it must name {layers} layers, those with full attention before those with a sliding window; {PACKAGE}"
            ),
        });
    }
    Ok(full)
}

#[cfg(test)]
mod tests;
