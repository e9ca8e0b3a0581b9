//! Reads files of settings.

use std::path::Path;

use crate::error::SettingsError;

/// Returns the text of the file at `path`, which holds `what`.
pub(crate) fn read_text(path: &Path, what: &'static str) -> Result<String, SettingsError> {
    std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
        what,
        path: path.into(),
        source,
    })
}
