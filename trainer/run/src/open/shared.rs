//! Notes about directories that the configuration names and a shared daemon does not use.

use std::path::{Path, PathBuf};

use training_state::run::resolved;

/// Returns a note for each of `paths` that is neither one of the `devices` nor a directory that holds one. A
/// DeepSpeed configuration always names directories, which only a private daemon uses.
pub(super) fn elsewhere(paths: &[PathBuf], devices: &[&Path]) -> Vec<String> {
    let holds_one = |path: &PathBuf| {
        let dir = resolved(path);
        devices
            .iter()
            .any(|device| resolved(device).starts_with(&dir))
    };
    let outside = paths.iter().filter(|path| !holds_one(path));
    let names = devices.iter().map(|device| device.display().to_string());
    let names = names.collect::<Vec<_>>().join(", ");
    outside
        .map(|path| {
            format!(
                "nvme_path: {} has no effect: the state is on the devices of the daemon behind offload.socket, {names}",
                path.display()
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_device_of_the_shared_store_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("drive.tiles");
        std::fs::write(&device, "").unwrap();
        assert!(elsewhere(&[dir.path().into()], &[&device]).is_empty());
        assert!(elsewhere(&[], &[&device]).is_empty());
        let other = tempfile::tempdir().unwrap();
        let notes = elsewhere(&[other.path().into(), dir.path().into()], &[&device]);
        assert_eq!(notes.len(), 1);
        assert!(
            notes[0].contains("has no effect") && notes[0].contains("drive.tiles"),
            "{notes:?}"
        );
    }
}
