//! A store in a temporary directory, made by the program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_offloadd"))
}

/// A formatted store of `devices` files, and its settings.
pub(crate) struct Store {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) config: PathBuf,
}

impl Store {
    pub(crate) fn new(devices: usize, engine: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let devices: Vec<_> = (0..devices)
            .map(|i| dir.path().join(format!("device{i}")))
            .collect();
        let output = program()
            .arg("format")
            .args(&devices)
            .args(["--size", "8MiB"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", words(&output));
        let config = dir.path().join("offloadd.toml");
        let store = Self {
            config,
            devices,
            dir,
        };
        store.write_config(&store.socket(), engine);
        store
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("run/offloadd.sock")
    }

    pub(crate) fn write_config(&self, socket: &Path, engine: &str) {
        let text = format!(
            "socket = {socket:?}\ndevices = {:?}\narena_bytes_max = \"64MiB\"\nengine = \"{engine}\"\n",
            self.devices
        );
        std::fs::write(&self.config, text).unwrap();
    }
}

pub(crate) fn words(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}
