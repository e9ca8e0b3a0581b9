//! Resolves the model from a `config.json`, from keys in the configuration file, or from both.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{value, word};
use crate::config::toml::ModelToml;
use crate::config::{FirstWeights, Remarks, SettingsError};
use crate::model::{BYTE_VOCAB_SIZE, Dropout, Dtype, HfModel, ModelConfig, Positions, parse};
use crate::run_record::RunRecord;
use crate::weights::{self, Element};
use offload_support::paths::RelativeTo;
use training_state::run::{Difference, ModelFiles, differences, resolved};

/// Size limit of a `config.json`, which usually has some kilobytes; a larger file is something else.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Page that shows how to train with longer sequences.
const LONGER: &str = "docs/training.md#longer-sequences";

pub(super) struct ResolvedModel {
    pub(super) config: ModelConfig,
    /// Directory named by `model.path`.
    pub(super) dir: Option<PathBuf>,
    pub(super) first_weights: FirstWeights,
    pub(super) dropout: Dropout,
    /// Type of the checkpoint's weights, if a directory determines it.
    pub(super) stored: Option<Dtype>,
    /// Longest sequence whose positions the first weights know; `None` if they know none, or a run has trained them.
    covered_len: Option<usize>,
}

pub(super) fn model(
    given: &ModelToml,
    seq_len: u64,
    said: &mut Remarks,
) -> Result<ResolvedModel, SettingsError> {
    let notes = &mut said.notes;
    let resolved = match &given.from {
        None => described(given, seq_len, notes)?,
        Some(from) if from.join("run.json").exists() => of_run(from, given, seq_len, notes)?,
        Some(from) if !from.exists() => {
            return Err(value(
                "model.from",
                format!(
                    "{} does not exist: name a run's directory (`trainer runs` lists them), or a model directory",
                    from.display()
                ),
            ));
        }
        Some(from) if given.path.is_none() => {
            let path = Some(from.clone());
            let given = ModelToml {
                path,
                ..given.clone()
            };
            described(&given, seq_len, notes)?
        }
        Some(from) => of_dir(from, given, seq_len, notes)?,
    };
    let most = resolved.config.max_position_embeddings;
    if seq_len > most as u64 {
        return Err(value(
            "train.seq_len",
            format!(
                "{seq_len} is more than model.max_position_embeddings = {most}: use a lower one, or raise that key ({LONGER})"
            ),
        ));
    }
    let Some(covered) = resolved.covered_len else {
        return Ok(resolved);
    };
    let learned = resolved.config.architecture.form().positions == Positions::Learned;
    if learned && covered != most {
        return Err(value(
            "model.n_positions",
            format!(
                "{most}: the weights have learned {covered} positions, and positions cannot be added or left out. Leave out the key, or set model.init = \"random\""
            ),
        ));
    }
    if seq_len > covered as u64 {
        said.warnings.push(format!(
            "train.seq_len = {seq_len}, but the first weights know {covered} positions: those beyond were never trained, and \
             model.rope_scaling does not bring them into that range ({LONGER})"
        ));
    }
    Ok(resolved)
}

/// Describes the model from its directory, from keys, or from both.
fn described(
    given: &ModelToml,
    seq_len: u64,
    notes: &mut Vec<String>,
) -> Result<ResolvedModel, SettingsError> {
    let mut inline = inline_keys(given);
    let mut stored = None;
    let (file, dir) = match &given.path {
        Some(path) => {
            let (file, dir) = read(path)?;
            stored = named_dtype(&file).or_else(|| stored_dtype(&dir));
            (Some(file), Some(dir))
        }
        None if inline.is_empty() => {
            return Err(SettingsError::Missing {
                key: "model",
                message: "set model.path to a Hugging Face model directory, or describe the model with its keys",
            });
        }
        None => {
            inline.entry("vocab_size").or_insert(BYTE_VOCAB_SIZE.into());
            if !inline.contains_key("n_positions") {
                inline
                    .entry("max_position_embeddings")
                    .or_insert(seq_len.max(2048).into());
            }
            (None, None)
        }
    };
    // The model's own checks use Hugging Face's names; all of these keys are in `[model]` or in its file.
    let key = if file.is_some() {
        "model.path"
    } else {
        "model"
    };
    let HfModel {
        config,
        dropout,
        covered_len,
        notes: more,
    } = HfModel::read(file, inline).map_err(|error| value(key, error.to_string()))?;
    notes.extend(more);
    let first_weights = first_weights(given, dir.as_deref(), notes)?;
    Ok(ResolvedModel {
        config,
        dir,
        covered_len: covered_len.filter(|_| first_weights == FirstWeights::Files),
        first_weights,
        dropout,
        stored,
    })
}

/// Type that a `config.json` names in PyTorch's spelling; the current key takes precedence over the old one.
fn named_dtype(file: &Map<String, Value>) -> Option<Dtype> {
    let name = file.get("dtype").or_else(|| file.get("torch_dtype"))?;
    match name.as_str()?.trim_start_matches("torch.") {
        "bfloat16" => Some(Dtype::Bf16),
        "float16" | "half" => Some(Dtype::Fp16),
        "float32" | "float" => Some(Dtype::Fp32),
        _ => None,
    }
}

/// Type of the weights in `dir`.
fn stored_dtype(dir: &Path) -> Option<Dtype> {
    weights::stored_element(dir).map(|element| match element {
        Element::Fp32 => Dtype::Fp32,
        Element::Bf16 => Dtype::Bf16,
        Element::Fp16 => Dtype::Fp16,
    })
}

/// Describes the model of the run in `from`, whose weights a run starts with. Other descriptions must agree
/// with it.
fn of_run(
    from: &Path,
    given: &ModelToml,
    seq_len: u64,
    notes: &mut Vec<String>,
) -> Result<ResolvedModel, SettingsError> {
    let wrong = |message: String| value("model.from", message);
    if given.init.as_deref().is_some_and(|init| init != "auto") {
        return Err(wrong(
            "contradicts model.init: leave one of them out".into(),
        ));
    }
    let config = RunRecord::read(from)
        .map_err(|error| wrong(error.to_string()))?
        .model;
    let first_weights = FirstWeights::Run(resolved(from));
    if given.path.is_none() && inline_keys(given).is_empty() {
        let files = ModelFiles::in_run_dir(from);
        let file = files.config();
        let stored = file.as_ref().and_then(named_dtype);
        let own = file.map(|file| HfModel::read(Some(file), Map::new()));
        return Ok(ResolvedModel {
            config,
            dir: files.dir().is_dir().then(|| files.dir().to_owned()),
            first_weights,
            dropout: own
                .and_then(Result::ok)
                .map_or(Dropout::NONE, |own| own.dropout),
            stored,
            covered_len: None,
        });
    }
    let here = without_weights(given, seq_len, notes)?;
    match difference(&config, &here.config) {
        None => Ok(ResolvedModel {
            first_weights,
            ..here
        }),
        Some(Difference { what, was, now }) => Err(wrong(format!(
            "the run in {} has another model: {what} is {was} there and {now} here. Leave out the model's keys to use that run's model",
            from.display()
        ))),
    }
}

/// Describes the model in the directory `from`, with whose weights and tokenizer a run starts. `model.path` must name a model
/// of the same form.
fn of_dir(
    from: &Path,
    given: &ModelToml,
    seq_len: u64,
    notes: &mut Vec<String>,
) -> Result<ResolvedModel, SettingsError> {
    let wrong = |message: String| value("model.from", message);
    let here = without_weights(given, seq_len, &mut Vec::new())?;
    let there = ModelToml {
        path: Some(from.to_owned()),
        ..given.clone()
    };
    let there = described(&there, seq_len, notes)?;
    if let Some(Difference { what, was, now }) = difference(&there.config, &here.config) {
        return Err(wrong(format!(
            "{} has another model than model.path: its {what} is {was}, that of model.path is {now}. Leave out model.path to use the model of that directory",
            from.display()
        )));
    }
    let has_tokenizer = |dir: &Option<PathBuf>| {
        dir.as_ref()
            .is_some_and(|dir| dir.join("tokenizer.json").exists())
    };
    if has_tokenizer(&here.dir) && !has_tokenizer(&there.dir) {
        return Err(wrong(format!(
            "{} has no tokenizer.json, which model.path has: copy it and the files beside it there",
            from.display()
        )));
    }
    notes.push(format!(
        "the weights and the tokenizer of {} (model.from) replace those of model.path",
        from.display()
    ));
    Ok(there)
}

/// Describes the model without looking for its weights.
fn without_weights(
    given: &ModelToml,
    seq_len: u64,
    notes: &mut Vec<String>,
) -> Result<ResolvedModel, SettingsError> {
    let here = ModelToml {
        init: Some("random".into()),
        ..given.clone()
    };
    described(&here, seq_len, notes)
}

/// Returns the first difference between two models.
fn difference(one: &ModelConfig, other: &ModelConfig) -> Option<Difference> {
    let plain = |config: &ModelConfig| serde_json::to_value(config).expect("plain data");
    differences(&plain(one), &plain(other)).into_iter().next()
}

/// Values of `model.init`.
#[derive(Clone, PartialEq)]
enum Init {
    Auto,
    Weights,
    Random,
}

/// Determines the initial weights of a fresh run: those beside the `config.json`, unless the configuration
/// says otherwise.
fn first_weights(
    given: &ModelToml,
    dir: Option<&Path>,
    notes: &mut Vec<String>,
) -> Result<FirstWeights, SettingsError> {
    let init = word(
        "model.init",
        given.init.as_deref(),
        &[
            ("auto", Init::Auto),
            ("weights", Init::Weights),
            ("random", Init::Random),
        ],
    )?;
    match dir {
        _ if init == Init::Random => Ok(FirstWeights::Random),
        // Missing weights are an error only at a start that needs them, not when a run resumes or is planned.
        Some(dir) => {
            notes.extend(weights::look_for(dir).err().map(|error| error.to_string()));
            Ok(FirstWeights::Files)
        }
        None if init == Init::Auto => Ok(FirstWeights::Random),
        None => Err(value(
            "model.init",
            "\"weights\" needs a directory that contains them: set model.path",
        )),
    }
}

/// Returns the keys that were given in the configuration, in the form of a `config.json`.
fn inline_keys(given: &ModelToml) -> Map<String, Value> {
    let Value::Object(mut keys) = serde_json::to_value(given).expect("the settings are plain data")
    else {
        unreachable!("a struct serializes to a table")
    };
    for ours in ["path", "from", "init"] {
        keys.remove(ours);
    }
    if let Some(Value::Object(scaling)) = keys.get_mut("rope_scaling") {
        scaling.retain(|_, value| !value.is_null());
    }
    keys.retain(|_, value| !value.is_null() && value.as_object().is_none_or(|t| !t.is_empty()));
    keys
}

/// Reads the keys of a directory's `config.json`, or of the file itself. Returns them with the directory.
fn read(path: &Path) -> Result<(Map<String, Value>, PathBuf), SettingsError> {
    let wrong = |message: String| value("model.path", message);
    let file_path = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_path_buf()
    };
    let shown = file_path.display();
    if !path.exists() {
        return Err(wrong(format!(
            "{}{} does not exist: set a directory with a config.json (the trainer downloads nothing; use `hf download NAME --local-dir {}`)",
            path.display(),
            RelativeTo::not_found(path),
            path.display()
        )));
    }
    let unreadable = |error: std::io::Error| wrong(format!("cannot read {shown}: {error}"));
    let file = File::open(&file_path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(wrong(format!("{shown} is not a file")));
    }
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(wrong(format!(
            "{shown} has more than {CONFIG_BYTES_MAX} bytes, so it is not a config.json"
        )));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong(format!("{shown} is not UTF-8 text")))?;
    let keys = parse(&text).map_err(|error| wrong(format!("{shown}: {error}")))?;
    let dir = match file_path.parent() {
        Some(dir) if dir != Path::new("") => dir.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((keys, dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT2: &str =
        r#"{"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4}"#;

    fn resolve(given: &ModelToml) -> Result<(ResolvedModel, Vec<String>), String> {
        let mut said = Remarks::default();
        let found = model(given, 64, &mut said).map_err(|error| error.to_string())?;
        assert_eq!(said.warnings, [""; 0]);
        Ok((found, said.notes))
    }

    fn at(path: &Path) -> ModelToml {
        ModelToml {
            path: Some(path.into()),
            ..ModelToml::default()
        }
    }

    #[test]
    fn a_directory_or_its_config_json_is_a_model() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, GPT2).unwrap();
        for path in [dir.path(), &file] {
            let (found, notes) = resolve(&at(path)).unwrap();
            assert_eq!(found.dir.as_deref(), Some(dir.path()));
            assert_eq!((found.config.layers, found.config.vocab_size), (2, 300));
            assert_eq!(found.dropout.residual, 0.1);
            assert_eq!(found.first_weights, FirstWeights::Files);
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].contains("no weights in ") && notes[0].contains("model.init"));
        }
        let (found, notes) = resolve(&ModelToml {
            resid_pdrop: Some(0.0),
            n_layer: Some(1),
            ..at(dir.path())
        })
        .unwrap();
        assert_eq!((found.config.layers, found.dropout.residual), (1, 0.0));
        assert_eq!(notes.len(), 2, "{notes:?}");
    }

    #[test]
    fn sequences_longer_than_the_weights_know_have_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let file = r#"{"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 32}"#;
        std::fs::write(dir.path().join("config.json"), file).unwrap();
        let yarn = |factor| crate::config::toml::RopeScalingToml {
            rope_type: Some("yarn".into()),
            factor: Some(factor),
            original_max_position_embeddings: Some(32),
            ..Default::default()
        };
        let raised = ModelToml {
            max_position_embeddings: Some(64),
            ..at(dir.path())
        };
        let scaled = |factor| ModelToml {
            rope_scaling: yarn(factor),
            ..raised.clone()
        };
        let random = ModelToml {
            init: Some("random".into()),
            ..raised.clone()
        };
        for (given, known) in [
            (raised.clone(), Some(32)),
            (scaled(1.5), Some(48)),
            (scaled(2.0), None),
            (random, None),
        ] {
            let mut said = Remarks::default();
            let found = model(&given, 64, &mut said).expect("a model");
            assert_eq!(found.config.max_position_embeddings, 64);
            let warning = |known| {
                format!("train.seq_len = 64, but the first weights know {known} positions: ")
            };
            match known.map(warning) {
                None => assert_eq!(said.warnings, [""; 0]),
                Some(start) => assert!(said.warnings[0].starts_with(&start), "{said:?}"),
            }
        }
        let text = resolve(&at(dir.path())).err().unwrap();
        assert!(
            text.contains("64 is more than model.max_position_embeddings = 32: use a lower one, or raise that key"),
            "{text}"
        );
        std::fs::write(dir.path().join("config.json"), GPT2).unwrap();
        let learned = |init: Option<&str>| ModelToml {
            init: init.map(str::to_owned),
            n_positions: Some(2048),
            ..at(dir.path())
        };
        let text = resolve(&learned(None)).err().unwrap();
        assert!(
            text.contains("model.n_positions: 2048: the weights have learned 1024 positions"),
            "{text}"
        );
        resolve(&learned(Some("random"))).unwrap();
    }

    #[test]
    fn initial_weights_are_those_of_the_directory_unless_configured_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), GPT2).unwrap();
        let with = |init: Option<&str>| {
            let given = ModelToml {
                init: init.map(str::to_owned),
                ..at(dir.path())
            };
            resolve(&given).map(|(found, _)| found.first_weights)
        };
        for init in [None, Some("weights")] {
            assert_eq!(with(init).unwrap(), FirstWeights::Files);
        }
        assert_eq!(with(Some("random")).unwrap(), FirstWeights::Random);
        assert!(
            with(Some("none"))
                .unwrap_err()
                .contains("use \"auto\", \"weights\" or \"random\"")
        );
        let inline = ModelToml {
            init: Some("weights".into()),
            hidden_size: Some(64),
            intermediate_size: Some(64),
            num_hidden_layers: Some(1),
            num_attention_heads: Some(4),
            ..ModelToml::default()
        };
        assert!(resolve(&inline).err().unwrap().contains("set model.path"));
    }

    #[test]
    fn the_weights_of_another_directory_may_replace_those_of_the_models() {
        let [path, from] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for dir in [&path, &from] {
            std::fs::write(dir.path().join("config.json"), GPT2).unwrap();
        }
        let given = ModelToml {
            from: Some(from.path().into()),
            ..at(path.path())
        };
        let (found, notes) = resolve(&given).unwrap();
        assert_eq!(found.dir.as_deref(), Some(from.path()));
        assert_eq!(found.first_weights, FirstWeights::Files);
        assert!(
            notes
                .iter()
                .any(|note| note.contains("replace those of model.path")),
            "{notes:?}"
        );
        std::fs::write(path.path().join("tokenizer.json"), "{}").unwrap();
        let text = resolve(&given).err().unwrap();
        assert!(
            text.contains("has no tokenizer.json, which model.path has"),
            "{text}"
        );
        let larger = GPT2.replace("\"n_layer\": 2", "\"n_layer\": 3");
        std::fs::write(from.path().join("config.json"), larger).unwrap();
        let text = resolve(&given).err().unwrap();
        assert!(
            text.contains("num_hidden_layers is 3, that of model.path is 2"),
            "{text}"
        );
    }

    #[test]
    fn a_path_that_is_not_a_model_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        let refused = |path: &Path| match resolve(&at(path)) {
            Err(text) => text,
            Ok(_) => panic!("{} was taken", path.display()),
        };
        let text = refused(Path::new("no/such-model"));
        assert!(
            ["no/such-model", "does not exist", "downloads nothing"]
                .iter()
                .all(|part| text.contains(part)),
            "{text}"
        );
        let text = refused(dir.path());
        assert!(
            text.contains("cannot read") && text.contains("config.json"),
            "{text}"
        );
        for (content, what) in [
            (&b"{"[..], "cannot be read"),
            (b"[1]", "not a table"),
            (b"\xFF\xFE", "UTF-8"),
            (
                br#"{"model_type": "t5"}"#,
                "encoder models are not supported yet",
            ),
        ] {
            std::fs::write(&file, content).unwrap();
            let text = refused(&file);
            assert!(
                text.starts_with("model.path: ") && text.contains(what),
                "{text}"
            );
        }
        std::fs::write(&file, vec![b' '; CONFIG_BYTES_MAX as usize + 1]).unwrap();
        assert!(refused(&file).contains("so it is not a config.json"));
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        assert!(refused(&dir.path().join("config.json")).contains("config.json"));
    }

    #[test]
    fn an_inline_key_of_another_architecture_is_refused() {
        let text = resolve(&ModelToml {
            hidden_size: Some(64),
            intermediate_size: Some(64),
            num_hidden_layers: Some(1),
            num_attention_heads: Some(4),
            embd_pdrop: Some(0.1),
            ..ModelToml::default()
        })
        .err()
        .unwrap();
        assert!(
            text.contains("embd_pdrop is not a key of llama models"),
            "{text}"
        );
    }
}
