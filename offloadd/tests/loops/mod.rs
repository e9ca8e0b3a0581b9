//! Loop devices: block devices that tests make of a file, where they may (root).

use std::path::Path;
use std::process::Command;

/// A loop device, detached when dropped.
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    /// `None` where there are none, or we may not.
    pub(crate) fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output()
            .ok()?;
        let path = String::from_utf8(output.stdout).unwrap();
        output.status.success().then(|| Self(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}
