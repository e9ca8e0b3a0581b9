//! Reads the special tokens and the chat template beside a `tokenizer.json`.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::data::DataError;
use training_state::fingerprint::Fingerprint;

/// Size limit of these files, which have some kilobytes; chat templates may have a hundred.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Texts of the special tokens under the names that templates use, and the template.
#[derive(Debug, Default)]
pub(super) struct Special {
    /// `bos_token`, `eos_token` and others.
    pub(super) tokens: BTreeMap<String, String>,
    pub(super) eos: Option<String>,
    /// Id of the end-of-document token, if no file gives its text.
    pub(super) eos_id: Option<u32>,
    pub(super) template: Option<String>,
    /// Template for conversations with tools, if it is another one.
    pub(super) template_with_tools: Option<String>,
}

impl Special {
    /// Reads the files in `dir` as transformers does: `tokenizer_config.json` takes precedence over the older
    /// `special_tokens_map.json`; the end-of-document token may also come from the model's own files;
    /// `chat_template.jinja` takes precedence over a template in a JSON file.
    pub(super) fn read(dir: &Path, key: &'static str) -> Result<Self, DataError> {
        let config = object(dir, "tokenizer_config.json", key)?;
        let map = object(dir, "special_tokens_map.json", key)?;
        let mut found = Self::default();
        for (name, value) in map.into_iter().chain(config.clone()) {
            if let (true, Some(token)) = (name.ends_with("_token"), token(&value)) {
                found.tokens.insert(name, token);
            }
        }
        found.eos = found.tokens.get("eos_token").cloned();
        for file in ["generation_config.json", "config.json"] {
            if found.eos.is_none() && found.eos_id.is_none() {
                let ids = object(dir, file, key)?;
                found.eos_id = ids.get("eos_token_id").and_then(id);
            }
        }
        found.template = jinja(&dir.join("chat_template.jinja"), key)?;
        found.template_with_tools =
            jinja(&dir.join("additional_chat_templates/tool_use.jinja"), key)?;
        if let (None, Some(given)) = (&found.template, config.get("chat_template")) {
            found.template = template(given, "default");
            found.template_with_tools = template(given, "tool_use").filter(|_| given.is_array());
        }
        Ok(found)
    }

    pub(super) fn fingerprint(&self) -> u64 {
        Fingerprint::compute(&serde_json::to_vec(&self.tokens).expect("plain data"))
    }
}

/// Text of a token, given as a string or as an object that contains it.
fn token(value: &Value) -> Option<String> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    text.map(str::to_owned)
}

/// Token id, given as a number or as the first of a list.
fn id(value: &Value) -> Option<u32> {
    let first = value.as_array().and_then(|ids| ids.first());
    u32::try_from(first.unwrap_or(value).as_u64()?).ok()
}

/// Reads a template, if the file exists.
fn jinja(path: &Path, key: &'static str) -> Result<Option<String>, DataError> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_bounded(path, key, FILE_BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| DataError::Setting {
        key,
        message: format!("{} is not UTF-8 text", path.display()),
    })?;
    Ok(Some(text))
}

/// Chat template, given alone or as `name` among named ones.
fn template(value: &Value, name: &str) -> Option<String> {
    if let Some(text) = value.as_str() {
        return Some(text.to_owned());
    }
    let mut all = value.as_array()?.iter();
    let named = all.find(|named| named["name"] == name)?;
    named["template"].as_str().map(str::to_owned)
}

/// Reads the object in a JSON file; an empty one if the file does not exist.
fn object(dir: &Path, name: &str, key: &'static str) -> Result<Map<String, Value>, DataError> {
    let path = dir.join(name);
    if !path.exists() {
        return Ok(Map::new());
    }
    let bytes = read_bounded(&path, key, FILE_BYTES_MAX)?;
    let wrong = |message: String| DataError::Setting {
        key,
        message: format!("{}: {message}", path.display()),
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(table)) => Ok(table),
        Ok(_) => Err(wrong("is not an object".into())),
        Err(error) => Err(wrong(format!("is not JSON: {error}"))),
    }
}

/// Reads a file of at most `bytes_max` bytes.
pub(super) fn read_bounded(
    path: &Path,
    key: &'static str,
    bytes_max: u64,
) -> Result<Vec<u8>, DataError> {
    let failed = DataError::reading(key, path);
    let wrong = |message: String| DataError::Setting {
        key,
        message: format!("{}: {message}", path.display()),
    };
    // Reading a pipe could block for ever.
    if !std::fs::metadata(path).map_err(&failed)?.is_file() {
        return Err(wrong("is not a file".into()));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(&failed)?;
    file.take(bytes_max + 1)
        .read_to_end(&mut bytes)
        .map_err(&failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(wrong(format!("has more than {bytes_max} bytes")));
    }
    Ok(bytes)
}
