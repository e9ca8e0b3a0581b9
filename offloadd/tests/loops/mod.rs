//! Loop devices: block devices that tests make from a file, if they may (root).

use std::path::Path;
use std::process::Command;

/// A loop device, detached when dropped.
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    /// Returns `None` if there are no loop devices, or if this user may not use them.
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
