//! Whether the store behind `offload.socket` is the one that a run file's folders name.

use std::path::{Path, PathBuf};

use crate::run::resolved;
use crate::store::StoreError;

/// Each of `paths` must be a folder in which the store has a device, or a device itself.
pub(super) fn check_paths(paths: &[PathBuf], devices: &[&Path]) -> Result<(), StoreError> {
    for path in paths {
        let folder = resolved(path);
        let holds = |device: &&Path| resolved(device).starts_with(&folder);
        if !devices.iter().any(holds) {
            let devices: Vec<String> = devices
                .iter()
                .map(|device| device.display().to_string())
                .collect();
            return Err(StoreError::NotOfTheStore {
                path: path.clone(),
                devices: devices.join(", "),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvme_path_must_be_of_the_shared_store() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("drive.tiles");
        std::fs::write(&device, "").unwrap();
        check_paths(&[folder.path().into()], &[&device]).unwrap();
        check_paths(&[], &[&device]).unwrap();
        let other = tempfile::tempdir().unwrap();
        let text = check_paths(&[other.path().into()], &[&device])
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("is not a folder of the store behind offload.socket")
                && text.contains("drive.tiles"),
            "{text}"
        );
    }
}
