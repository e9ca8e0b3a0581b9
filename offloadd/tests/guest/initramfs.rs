//! Builds the guest's initial file system: busybox, the daemon, this program as its client, the libraries they need, a script.

use std::path::{Path, PathBuf};
use std::process::Command;

/// An archive that the kernel unpacks (cpio, "newc").
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    count: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.count += 1;
        let fields = [
            self.count,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn dir(&mut self, name: &str) {
        self.add(name, 0o040_755, &[]);
    }

    fn program(&mut self, name: &str, content: &[u8]) {
        self.add(name, 0o100_755, content);
    }
}

/// Writes an archive with the files `more` (name, content) that runs `script` in busybox's shell and then switches the machine off.
pub(crate) fn write(to: &Path, busybox: &Path, more: &[(&str, Vec<u8>)], script: &str) {
    let mut archive = Archive::default();
    for dir in [
        "bin", "dev", "proc", "sys", "tmp", "run", "lib", "lib64", "payload",
    ] {
        archive.dir(dir);
    }
    archive.dir("lib/x86_64-linux-gnu");
    archive.program("bin/busybox", &std::fs::read(busybox).unwrap());
    let daemon = PathBuf::from(env!("CARGO_BIN_EXE_offloadd"));
    let writer = std::env::current_exe().unwrap();
    for (name, program) in [("bin/offloadd", &daemon), ("bin/writer", &writer)] {
        archive.program(name, &stripped(program, &to.with_extension("stripped")));
    }
    for library in libraries(&daemon) {
        let content = std::fs::read(&library).unwrap();
        archive.program(library.to_str().unwrap().trim_start_matches('/'), &content);
    }
    for (name, content) in more {
        archive.program(name, content);
    }
    let init = format!(
        "#!/bin/busybox sh\n\
         /bin/busybox mount -t proc proc /proc\n\
         /bin/busybox mount -t sysfs sys /sys\n\
         /bin/busybox mount -t devtmpfs dev /dev\n\
         /bin/busybox mount -t tmpfs tmp /tmp\n\
         export PATH=/bin\n\
         /bin/busybox --install -s /bin\n\
         ip link set lo up\n\
         {script}\n\
         /bin/busybox poweroff -f\n"
    );
    archive.program("init", init.as_bytes());
    archive.add("TRAILER!!!", 0, &[]);
    std::fs::write(to, &archive.bytes).unwrap();
}

/// Returns the daemon without debug information, written into `dir`.
pub(crate) fn stripped_daemon(dir: &Path) -> PathBuf {
    let to = dir.join("offloadd");
    let daemon = Path::new(env!("CARGO_BIN_EXE_offloadd"));
    stripped(daemon, &to);
    to
}

/// Returns the program without debug information: the guest then unpacks a tenth of the bytes.
fn stripped(program: &Path, scratch: &Path) -> Vec<u8> {
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(scratch).arg(program);
    let stripped = strip.status().is_ok_and(|status| status.success());
    if !stripped {
        std::fs::copy(program, scratch).unwrap();
    }
    std::fs::read(scratch).unwrap()
}

fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace();
    words
        .filter(|w| w.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}
