//! The package's settings: checked by the same code, and by the same table of keys, as the native trainer's.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use training_settings::{SettingsError, package};

use crate::errors::Error;

/// The JSON file at `path` without comments and trailing commas.
#[pyfunction]
pub(crate) fn read_json(path: PathBuf) -> PyResult<String> {
    let tree = package::read_json(&path).map_err(|error| match error {
        SettingsError::Read { source, .. } => Error::new_err(format!(
            "{} cannot be read: {}",
            path.display(),
            error_text(&source)
        )),
        SettingsError::Syntax { message, .. } => {
            Error::new_err(format!("{} is not JSON: {message}", path.display()))
        }
        other => Error::new_err(other.to_string()),
    })?;
    Ok(tree.to_string())
}

/// The system's words without its number.
fn error_text(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().into()
}

/// Checks DeepSpeed's settings, the JSON text `text`, for a run of `ranks` processes. Returns the settings as JSON and an empty text, or
/// nothing and all that is wrong. `name` is what messages call the file.
#[pyfunction]
pub(crate) fn check_settings(text: &str, name: &str, ranks: u32) -> PyResult<(String, String)> {
    let checked = package::parse_text(text, Path::new(name))
        .and_then(|tree| package::check(tree, name, ranks));
    Ok(match checked {
        Ok(settings) => (
            serde_json::to_string(&settings).expect("plain data"),
            String::new(),
        ),
        Err(error) => (String::new(), error.to_string()),
    })
}

/// The learning rate schedule of the section `scheduler` (JSON) for an optimizer with the rate `lr`, for `learning_rate`.
#[pyfunction]
pub(crate) fn schedule_of(scheduler: &str, lr: f64) -> PyResult<String> {
    let wrong = |error: String| Error::new_err(error);
    let scheduler = serde_json::from_str(scheduler).map_err(|error| wrong(error.to_string()))?;
    let schedule =
        package::schedule_of(&scheduler, lr).map_err(|error| wrong(error.to_string()))?;
    Ok(serde_json::to_string(&schedule).expect("plain data"))
}
