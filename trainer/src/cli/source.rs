//! Where a run's settings come from, as arguments of every command that reads a run.

use std::path::{Path, PathBuf};

use clap::Args;
use trainer::config::{RunSettings, Source};

/// The files of a run, and what is laid over them.
#[derive(Args)]
pub(crate) struct SourceArgs {
    /// The run file: TOML, or JSON when its name ends in .json. With --deepspeed it may be left out, and --set say the rest.
    #[arg(value_name = "RUN.toml", required_unless_present = "deepspeed")]
    file: Option<PathBuf>,
    /// A file for DeepSpeed (JSON) or an Accelerate configuration (YAML), as it is; the run file says what it leaves open.
    #[arg(long, value_name = "ds_config.json")]
    deepspeed: Option<PathBuf>,
    /// Replace a setting of the files; the value is TOML. What is not TOML is text, unless it begins with [, {, " or '.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl SourceArgs {
    pub(crate) fn settings(&self, ranks: Option<u32>) -> anyhow::Result<RunSettings> {
        read(&self.file, &self.deepspeed, &self.sets, ranks)
    }

    /// The same, started with the weights in `from`, if that names a directory.
    pub(crate) fn settings_from(
        &self,
        from: Option<&Path>,
        ranks: Option<u32>,
    ) -> anyhow::Result<RunSettings> {
        let mut sets = self.sets.clone();
        if let Some(from) = from {
            let path = toml::Value::String(from.to_string_lossy().into_owned());
            sets.push(format!("model.from={path}"));
        }
        read(&self.file, &self.deepspeed, &sets, ranks)
    }
}

/// The settings of a run; what is wrong is said with the file's name.
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
    trainer::config::read(&source, ranks).map_err(|error| match run {
        Some(file) => anyhow::anyhow!("{}: {error}", file.display()),
        None => error.into(),
    })
}
