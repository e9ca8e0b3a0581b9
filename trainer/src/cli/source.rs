//! Arguments for a run's settings, common to all commands that read them.

use std::path::{Path, PathBuf};

use clap::Args;
use training_run::config::{RunSettings, SettingsError, Source};

/// Configuration files of a run, and settings that replace theirs.
#[derive(Args)]
pub struct SourceArgs {
    /// The run file: TOML, or JSON if its name ends in .json. Optional with --deepspeed if --set supplies the
    /// other settings.
    #[arg(value_name = "RUN.toml", required_unless_present = "deepspeed")]
    file: Option<PathBuf>,
    /// DeepSpeed configuration (JSON); the run file completes it.
    #[arg(long, value_name = "ds_config.json")]
    deepspeed: Option<PathBuf>,
    /// Replace a setting of the files. The value is TOML; other text is a string, unless it begins with [, {,
    /// " or '.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl SourceArgs {
    pub(crate) fn settings(&self, ranks: Option<u32>) -> anyhow::Result<RunSettings> {
        read(&self.file, &self.deepspeed, &self.sets, ranks)
    }

    /// Like [`SourceArgs::settings`], with the paths that were given to options as values of these keys.
    pub(crate) fn settings_with(
        &self,
        paths: [(&str, Option<&Path>); 2],
        ranks: Option<u32>,
    ) -> anyhow::Result<RunSettings> {
        let mut sets = self.sets.clone();
        for (key, path) in paths {
            let path = path.map(|path| toml::Value::String(path.to_string_lossy().into_owned()));
            sets.extend(path.map(|path| format!("{key}={path}")));
        }
        read(&self.file, &self.deepspeed, &sets, ranks)
    }
}

/// Reads a run's settings; errors include the file's name.
pub(crate) fn read(
    run: &Option<PathBuf>,
    deepspeed: &Option<PathBuf>,
    sets: &[String],
    ranks: Option<u32>,
) -> anyhow::Result<RunSettings> {
    let source = Source {
        run: run.clone(),
        deepspeed: deepspeed.clone(),
        sets: sets.to_vec(),
    };
    training_run::config::read(&source, ranks).map_err(|error| match (run, error) {
        // These name their file.
        (_, error @ (SettingsError::Read { .. } | SettingsError::Syntax { .. })) => error.into(),
        (Some(file), error) => anyhow::anyhow!("{}: {error}", file.display()),
        (None, error) => error.into(),
    })
}
