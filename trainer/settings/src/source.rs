//! Combines the sources of settings: the run's configuration file, a DeepSpeed file below it, and the command
//! line above both.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::deepspeed::{self, DeepSpeedFile};
use crate::error::SettingsError;
use crate::reader::{Reader, Remarks, WrittenFor};
use crate::{files, json, keys};

/// Configuration files of a run, and the values that replace theirs.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// TOML, or JSON when its name ends in .json.
    pub run: Option<PathBuf>,
    /// DeepSpeed configuration, unchanged. The run's own file may name it too.
    pub deepspeed: Option<PathBuf>,
    /// Items of the form `key=value`.
    pub sets: Vec<String>,
}

/// All settings in one tree, with the DeepSpeed part of it.
pub struct Tree {
    pub tree: Value,
    deepspeed: Option<DeepSpeedFile>,
}

impl Source {
    /// Returns the stem of the run file's name, or of the DeepSpeed file's if there is no run file.
    pub fn name(&self) -> String {
        let file = self.run.as_deref().or(self.deepspeed.as_deref());
        file.and_then(Path::file_stem)
            .map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Reads the files and combines them.
    ///
    /// # Errors
    /// A file cannot be read; two files contradict each other; a `--set` has no key or no value.
    pub fn tree(&self) -> Result<Tree, SettingsError> {
        let mut tree = match &self.run {
            Some(path) => parse(path, "the run file")?,
            None => Value::Object(Map::new()),
        };
        let deepspeed = self.deepspeed_path(&mut tree)?;
        let deepspeed = deepspeed.map(|path| deepspeed::read(&path)).transpose()?;
        if let Some(file) = &deepspeed {
            let run = self.run.as_deref().unwrap_or(&file.path);
            let mut faults = Vec::new();
            lay_under(
                &mut tree,
                &file.tree,
                "",
                (run, file.path.as_path()),
                &mut faults,
            );
            SettingsError::all(faults)?;
        }
        apply_overrides(&mut tree, &self.sets)?;
        if tree.get("deepspeed").is_some() {
            return Err(SettingsError::Value {
                key: "deepspeed",
                message: "--set cannot name the file, because it comes before the settings that replace its own: use --deepspeed FILE".into(),
            });
        }
        Ok(Tree { tree, deepspeed })
    }

    /// Returns the DeepSpeed file named on the command line or in the run file.
    fn deepspeed_path(&self, tree: &mut Value) -> Result<Option<PathBuf>, SettingsError> {
        let named = tree
            .as_object_mut()
            .and_then(|tree| tree.remove("deepspeed"));
        let named = match named {
            None | Some(Value::Null) => None,
            Some(Value::String(path)) => Some(PathBuf::from(path)),
            Some(other) => {
                return Err(SettingsError::Type {
                    key: "deepspeed".into(),
                    message: format!("{other}: expected the path of a JSON or YAML file"),
                });
            }
        };
        match (&self.deepspeed, named) {
            (Some(given), Some(named)) if *given != named => Err(SettingsError::Value {
                key: "deepspeed",
                message: format!(
                    "the run file names {}, --deepspeed names {}: leave one of them out",
                    named.display(),
                    given.display()
                ),
            }),
            (given, named) => Ok(given.clone().or(named)),
        }
    }
}

impl Tree {
    /// Returns whose defaults apply, and says what the DeepSpeed file has without effect.
    pub fn written_for(&self, said: &mut Remarks) -> WrittenFor {
        let Some(file) = &self.deepspeed else {
            return WrittenFor::Us;
        };
        let shown = file.path.display().to_string();
        deepspeed::note_ignored(&file.ignored, &shown, Reader::Trainer, said);
        match file.for_trainer {
            true => WrittenFor::Trainer,
            false => WrittenFor::DeepSpeed,
        }
    }

    /// Adds the DeepSpeed file's path to an error about a key from that file.
    pub fn blame(&self, error: SettingsError) -> SettingsError {
        let Some(file) = &self.deepspeed else {
            return error;
        };
        if let SettingsError::Several(faults) = error {
            let faults = faults.into_iter().map(|fault| self.blame(fault));
            return SettingsError::Several(faults.collect());
        }
        let key = error.key().unwrap_or_default();
        let pointer = format!("/{}", key.replace('.', "/"));
        if file.tree.pointer(&pointer).is_none() {
            return error;
        }
        SettingsError::InFile {
            path: file.path.clone(),
            error: Box::new(error),
        }
    }
}

fn parse(path: &Path, what: &'static str) -> Result<Value, SettingsError> {
    let text = files::read_text(path, what)?;
    let syntax = |format, message: String| SettingsError::Syntax {
        path: path.into(),
        format,
        message,
    };
    let extension = path.extension().and_then(OsStr::to_str);
    if let Some("yml" | "yaml") = extension {
        let message = "this is YAML: `trainer init MODEL DATA` writes a run file";
        return Err(syntax("TOML", message.into()));
    }
    let is_json = extension == Some("json");
    let tree: Value = if is_json {
        json::parse(&text).map_err(|message| syntax("JSON", message))?
    } else {
        let tree = ::toml::from_str(&text).map_err(|error| syntax("TOML", error.to_string()))?;
        // TOML has no null: nan and inf become null here, and would count as left out.
        if let Some(key) = first_null(&tree, String::new()) {
            return Err(SettingsError::Type {
                key,
                message: "nan and inf are not accepted: write a number, or leave the key out"
                    .into(),
            });
        }
        tree
    };
    if tree.is_object() {
        Ok(tree)
    } else {
        let message = "the outermost value must be an object";
        Err(syntax("JSON", message.into()))
    }
}

/// Returns the path of the first key below `key` whose value is null.
fn first_null(tree: &Value, key: String) -> Option<String> {
    match tree {
        Value::Null => Some(key),
        Value::Array(items) => items.iter().find_map(|item| first_null(item, key.clone())),
        Value::Object(table) => table
            .iter()
            .find_map(|(name, value)| first_null(value, keys::join(&key, name))),
        _ => None,
    }
}

/// Applies `sets`, each `key=value`, to a tree of settings. `train.steps` also replaces `train.epochs`, and the reverse: a run
/// has one of them.
///
/// # Errors
/// The first one without a key or a value.
pub fn apply_overrides(tree: &mut Value, sets: &[String]) -> Result<(), SettingsError> {
    let is_set = |name: &str| {
        let mut keys = sets.iter().filter_map(|set| set.split('=').next());
        keys.any(|key| key.trim().strip_prefix("train.") == Some(name))
    };
    for (name, other) in [("steps", "epochs"), ("epochs", "steps")] {
        if is_set(name)
            && !is_set(other)
            && let Some(Value::Object(train)) = tree.get_mut("train")
        {
            train.remove(other);
        }
    }
    sets.iter().try_for_each(|set| apply(tree, set))
}

/// Adds to `tree`, which comes from the first of `files`, what `below`, from the second, has in addition. A
/// value replaces "auto".
fn lay_under(
    tree: &mut Value,
    below: &Value,
    prefix: &str,
    files: (&Path, &Path),
    faults: &mut Vec<SettingsError>,
) {
    let (Some(table), Some(below)) = (tree.as_object_mut(), below.as_object()) else {
        return;
    };
    for (name, under) in below {
        let path = keys::join(prefix, name);
        let Some(over) = table.get_mut(name) else {
            table.insert(name.clone(), under.clone());
            continue;
        };
        let is_auto = |value: &Value| value.is_null() || value.as_str() == Some("auto");
        if over.is_object() && under.is_object() {
            lay_under(over, under, &path, files, faults);
        } else if is_auto(over) {
            *over = under.clone();
        } else if !is_auto(under) && !same(over, under) {
            let (run, deepspeed) = files;
            faults.push(SettingsError::Contradiction {
                key: path,
                run: run.into(),
                over: over.to_string(),
                deepspeed: deepspeed.into(),
                under: under.to_string(),
            });
        }
    }
}

/// Returns whether two values mean the same, as 1000, 1000.0 and 1e3 do.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (a, b) => a == b,
    }
}

/// Applies one `a.b=value` to the tree. The value is TOML. Other text is a string, so that paths and sizes
/// need no quotes, unless it starts like a list, a table or a quoted string: then it is a syntax error.
pub fn apply(tree: &mut Value, set: &str) -> Result<(), SettingsError> {
    let wrong = || SettingsError::Set { text: set.into() };
    let (path, text) = set.split_once('=').ok_or_else(wrong)?;
    let (path, text) = (path.trim(), text.trim());
    if path.is_empty() || path.split('.').any(str::is_empty) || text.is_empty() {
        return Err(wrong());
    }
    let value = match ::toml::from_str::<Map<String, Value>>(&format!("value = {text}")) {
        Ok(mut table) if table.len() == 1 => match table.remove("value") {
            // nan and inf, which no key accepts; the error message shows them as text.
            None | Some(Value::Null) => Value::String(text.into()),
            Some(value) => value,
        },
        Err(error) if text.starts_with(['[', '{', '"', '\'']) => {
            return Err(SettingsError::SetSyntax {
                key: path.into(),
                value: text.into(),
                message: error.message().into(),
            });
        }
        Ok(_) | Err(_) => Value::String(text.into()),
    };
    let mut place = tree;
    for key in path.split('.') {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        place = place
            .as_object_mut()
            .expect("replaced by a table above")
            .entry(key)
            .or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}
