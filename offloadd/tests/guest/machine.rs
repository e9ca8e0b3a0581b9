//! The machine: two NVMe drives behind root ports of their own, a serial line that we read, QMP to pull a drive out.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::drives::Drives;
use crate::initramfs;

/// What a machine is made of, if this one has it.
pub(crate) struct Parts {
    kernel: PathBuf,
    busybox: PathBuf,
}

impl Parts {
    /// `None`: the test is skipped, and why was said.
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

    /// Boots; `script` runs in the guest.
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

    /// Boots the system on the drive `image`, which changes, with `files` (name, content) laid into it.
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
        // A thread reads, so that a guest that says nothing any more is not waited for beyond its limit.
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
            said: Vec::new(),
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
    said: Vec<String>,
}

/// A machine that takes longer has hung: its own limit, which holds should the test be killed, comes first.
const LONG: Duration = Duration::from_secs(660);

impl Machine {
    /// The next line that the guest says; `None` when it is off. Panics when it is still on at its limit.
    pub(crate) fn line(&mut self) -> Option<String> {
        let left = self.long.saturating_sub(self.started.elapsed());
        let line = match self.lines.recv_timeout(left) {
            Ok(line) if !left.is_zero() => line.trim().to_owned(),
            Err(RecvTimeoutError::Disconnected) => return None,
            _ => panic!("on after {:?}, it said: {:#?}", self.long, self.said),
        };
        self.said.push(line.clone());
        Some(line)
    }

    /// All it said, to show in a failure.
    pub(crate) fn said(&self) -> &[String] {
        &self.said
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
