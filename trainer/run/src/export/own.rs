//! Remembers the directory to which a run exported its weights when it was complete: a run that is extended then exports again.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ExportError;
use training_state::run::resolved;

const NAME: &str = "exported.json";

/// Export of a complete run.
#[derive(Debug, Serialize, Deserialize)]
pub struct OwnExport {
    out: PathBuf,
    /// Step at which the run was complete.
    step: u64,
}

impl OwnExport {
    /// Reads what the run in `run_dir` exported last.
    pub fn read(run_dir: &Path) -> Option<Self> {
        let text = fs::read(run_dir.join(NAME)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    pub fn is_at(&self, out: &Path) -> bool {
        self.out == resolved(out)
    }

    /// Renames the export of an earlier step at `out`, if the run in `run_dir` made it.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn set_aside(run_dir: &Path, out: &Path, step: u64) -> Result<(), ExportError> {
        let own = Self::read(run_dir).filter(|own| own.is_at(out) && own.step < step);
        let Some(own) = own.filter(|_| out.symlink_metadata().is_ok()) else {
            return Ok(());
        };
        let name = out.file_name().unwrap_or_default().to_string_lossy();
        let aside = out.with_file_name(format!("{name}-step-{}", own.step));
        if aside.symlink_metadata().is_ok() {
            return Err(ExportError::Exists { out: aside });
        }
        fs::rename(out, aside).map_err(ExportError::io("rename", out))
    }

    /// Remembers that the run in `run_dir` exports to `out`, before it does.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(run_dir: &Path, out: &Path, step: u64) -> Result<(), ExportError> {
        let path = run_dir.join(NAME);
        let own = Self {
            out: resolved(out),
            step,
        };
        let text = serde_json::to_vec(&own).expect("plain data");
        fs::write(&path, text).map_err(ExportError::io("write", &path))
    }
}
