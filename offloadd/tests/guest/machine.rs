//! The virtual machine: two NVMe drives behind root ports of their own, a serial line that the test reads, and QMP to pull a drive out.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::drives::Drives;
use crate::initramfs;

/// Parts of a virtual machine, as found on this host.
pub(crate) struct Parts {
    kernel: PathBuf,
    busybox: PathBuf,
}

impl Parts {
    /// Finds the parts; returns `None` after printing why the test is skipped.
    pub(crate) fn find() -> Option<Self> {
        let name = std::thread::current().name().unwrap_or("a test").to_owned();
        let skip = |why: &str| {
            println!("skipped: {name}: {why}");
            None
        };
        let qemu = Command::new("qemu-system-x86_64").arg("--version").output();
        if !qemu.is_ok_and(|output| output.status.success()) {
            return skip("there is no qemu-system-x86_64");
        }
        let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest/vmlinuz");
        let kernel = std::env::var_os("OFFLOADD_GUEST_KERNEL").map_or(fetched, PathBuf::from);
        if !kernel.exists() {
            return skip("there is no kernel for a guest (target/guest/vmlinuz)");
        }
        let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
        let Some(busybox) = busybox.into_iter().find(|path| path.exists()) else {
            return skip("there is no static busybox");
        };
        Some(Self { kernel, busybox })
    }

    /// Boots the guest, which runs `script`.
    pub(crate) fn boot(&self, dir: &Path, drives: &Drives, script: &str) -> Machine {
        let initrd = dir.join("initrd");
        let bounded =
            format!("(sleep 600; echo the machine took too long; poweroff -f) &\n{script}");
        initramfs::write(&initrd, &self.busybox, &[], &bounded);
        let blocks: Vec<_> = (drives.sockets.iter())
            .map(|socket| {
                format!(
                    "driver=nbd,server.type=unix,server.path={}",
                    socket.display()
                )
            })
            .collect();
        self.start(dir, &blocks, LONG)
    }

    /// Boots the system on the drive `image`, which changes, after copying `files` (name, content) into it.
    pub(crate) fn boot_system(
        &self,
        dir: &Path,
        image: &Path,
        files: &[(&str, Vec<u8>)],
        long: Duration,
    ) -> Machine {
        let script = "mkdir /new\n\
             mount -t ext4 /dev/nvme0n1 /new || { echo no system on the drive; poweroff -f; }\n\
             cp -a /payload/. /bin/writer /new/payload\n\
             mount --move /dev /new/dev\n\
             umount /proc /sys /tmp\n\
             exec switch_root /new /payload/init";
        initramfs::write(&dir.join("initrd"), &self.busybox, files, script);
        let block = format!(
            "driver=raw,file.driver=file,file.filename={},file.cache.direct=off",
            image.display()
        );
        self.start(dir, &[block], long)
    }

    /// Boots `initrd` in `dir`.
    fn start(&self, dir: &Path, blocks: &[String], long: Duration) -> Machine {
        let initrd = dir.join("initrd");
        let monitor = dir.join("monitor");
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args([
                "-machine",
                "q35",
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                "max",
            ])
            .args([
                "-smp", "2", "-m", "1024", "-display", "none", "-serial", "stdio",
            ])
            .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&initrd)
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()));
        for (drive, block) in blocks.iter().enumerate() {
            command
                .args(["-device", &format!("pcie-root-port,id=port{drive},chassis={drive}")])
                .args(["-blockdev"])
                .arg(format!("{block},node-name=node{drive}"))
                .args(["-device"])
                .arg(format!(
                    "nvme,id=drive{drive},bus=port{drive},drive=node{drive},serial=s{drive},write-cache=on"
                ));
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let serial = BufReader::new(child.stdout.take().unwrap());
        // A thread reads the lines, so that the wait for a silent guest has a limit.
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in serial.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Machine {
            child,
            lines,
            monitor,
            started: Instant::now(),
            long,
            printed: Vec::new(),
        }
    }
}

/// A running machine, switched off when dropped.
pub(crate) struct Machine {
    child: Child,
    lines: Receiver<String>,
    monitor: PathBuf,
    started: Instant,
    long: Duration,
    printed: Vec<String>,
}

/// Time limit of a machine: one that takes longer hangs. The machine's own limit comes first, and also applies when the test is killed.
const LONG: Duration = Duration::from_secs(660);

impl Machine {
    /// Returns the next line of the guest, `None` when it is off. Panics when it is still on at its limit.
    pub(crate) fn line(&mut self) -> Option<String> {
        let left = self.long.saturating_sub(self.started.elapsed());
        let line = match self.lines.recv_timeout(left) {
            Ok(line) if !left.is_zero() => line.trim().to_owned(),
            Err(RecvTimeoutError::Disconnected) => return None,
            _ => panic!("on after {:?}, it printed: {:#?}", self.long, self.printed),
        };
        self.printed.push(line.clone());
        Some(line)
    }

    /// Returns all lines so far, to print after a failure.
    pub(crate) fn printed(&self) -> &[String] {
        &self.printed
    }

    /// Pulls a drive out.
    pub(crate) fn pull_out(&self, drive: usize) {
        let mut monitor = UnixStream::connect(&self.monitor).unwrap();
        monitor.set_read_timeout(Some(self.long)).unwrap();
        let mut lines = BufReader::new(monitor.try_clone().unwrap()).lines();
        let mut ask = |command: String| {
            writeln!(monitor, "{command}").unwrap();
            loop {
                let line = lines.next().expect("an answer").unwrap();
                assert!(!line.contains("\"error\""), "{command}: {line}");
                if line.contains("\"return\"") {
                    return;
                }
            }
        };
        ask(r#"{"execute": "qmp_capabilities"}"#.into());
        ask(format!(
            r#"{{"execute": "device_del", "arguments": {{"id": "drive{drive}"}}}}"#
        ));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
