//! Checks whether a daemon could serve with given settings. Safe beside a running daemon: takes no lock, changes nothing, and reads only
//! the superblocks of the devices.

use std::path::Path;

use offload_support::memory;
use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::arena::lock_outlook;
use crate::config::{Config, PageAddress};
use crate::device::{Device, DeviceBlocks, DeviceError, Risk, fix_of_permission};
use crate::findings::{Finding, Severity, worst};
use crate::store::{StoreError, recover};
use crate::store_devices::StoreDevices;

/// Checks memory, sockets and devices, in this order.
pub fn check(config: &Config) -> Vec<Finding> {
    let mut findings = vec![memory_fits(config), memory_locks(config)];
    findings.push(socket("socket", &config.socket));
    match &config.metrics_listen {
        Some(PageAddress::Unix(path)) => findings.push(socket("metrics.listen", path)),
        Some(PageAddress::Loopback(address)) => {
            findings.push(Finding::fine("metrics.listen", address.to_string()));
        }
        None => {}
    }
    findings.extend(devices(config));
    findings
}

fn memory_fits(config: &Config) -> Finding {
    let what = "arena_bytes_max";
    let asked = config.arena_bytes_max;
    match (memory::total_bytes(), memory::available_bytes()) {
        (Some(total), _) if total < asked => Finding::problem(
            what,
            format!(
                "{} exceed this machine's memory of {}",
                ApproxBytes(asked),
                ApproxBytes(total)
            ),
            format!("arena_bytes_max = \"{}MiB\"", (total / 4 * 3) >> 20),
        ),
        (_, Some(available)) if available < asked => Finding::hint(
            what,
            format!(
                "{}, but only {} are available now, so sessions may be refused",
                ApproxBytes(asked),
                ApproxBytes(available)
            ),
            format!("arena_bytes_max = \"{}MiB\"", (available / 4 * 3) >> 20),
        ),
        _ => Finding::fine(what, ApproxBytes(asked).to_string()),
    }
}

fn memory_locks(config: &Config) -> Finding {
    let what = "require_locked";
    let outlook = lock_outlook(config.arena_bytes_max);
    let fix = "LimitMEMLOCK=infinity in the unit, or `ulimit -l` and /etc/security/limits.conf";
    match (outlook.can_lock, config.require_locked) {
        (true, _) => Finding::fine(what, "memory can be locked"),
        (false, true) => Finding::problem(what, outlook.note, fix),
        (false, false) => Finding::hint(what, outlook.note, fix),
    }
}

/// Checks whether a socket can be created at `path`, in a directory that exists or can be created.
fn socket(what: &str, path: &Path) -> Finding {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let (place, doing) = match dir.exists() {
        true => (dir, "a socket"),
        false => (dir.parent().unwrap_or(Path::new("/")), "its directory"),
    };
    let is_socket =
        |found: std::fs::Metadata| std::os::unix::fs::FileTypeExt::is_socket(&found.file_type());
    if std::fs::symlink_metadata(path).is_ok_and(|found| !is_socket(found)) {
        return Finding::problem(
            what,
            format!("a file that is not a socket exists at {}", path.display()),
            format!("set another path, or: rm {}", Word(path)),
        );
    }
    match may_write(place) {
        Ok(()) => Finding::fine(what, path.display().to_string()),
        Err(why) => Finding::problem(
            what,
            format!("cannot create {doing} in {}: {why}", place.display()),
            format!(
                "install -d -o {} {}",
                rustix::process::geteuid().as_raw(),
                dir.display()
            ),
        ),
    }
}

fn may_write(dir: &Path) -> Result<(), Errno> {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, dir, access, AtFlags::EACCESS)
}

/// Checks each device, and if all are in order, whether they form one store.
fn devices(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut opened = Vec::new();
    for path in &config.devices {
        let what = format!("device {}", path.display());
        match Device::open_readonly(path) {
            Ok(device) => {
                findings.extend(writable(&what, path, &device));
                opened.push(device);
            }
            Err(error) => {
                let message = error.to_string();
                let message = message.trim_start_matches(&format!("{what}: "));
                findings.push(Finding::problem(what, message, fix_of(&error, path)));
            }
        }
    }
    if worst(&findings) == Severity::Problem {
        return findings;
    }
    // A device that cannot be opened is reported as missing below.
    let opened = match StoreDevices::open_readonly(opened.clone()) {
        Ok(all) => {
            let line = all.line_to_write().unwrap_or_default();
            for (one, device) in all.unlisted.iter().zip(&all.devices[opened.len()..]) {
                let path = Path::new(one.path());
                findings.push(Finding::hint("devices", one.to_string(), &line));
                findings.extend(writable(
                    &format!("device {}", path.display()),
                    path,
                    device,
                ));
            }
            all.devices
        }
        Err(_) => opened,
    };
    let of_store = match recover::identify(&mut DeviceBlocks(&opened)) {
        Ok((devices, foreign_devices)) => {
            findings.extend(foreign_devices.iter().map(|foreign_device| {
                let fix = "devices = [only those of the store]";
                Finding::hint("devices", foreign_device.to_string(), fix)
            }));
            let (count, store) = (devices.len(), devices[0].superblock.store);
            Finding::fine("devices", format!("all {count} of store {store}"))
        }
        Err(error) => {
            let fix = match error {
                StoreError::NoStore { .. } => {
                    "devices = [all devices of one store]; `offloadd format --config FILE --size SIZE` creates one"
                }
                // Do not suggest to format: the device contains other data.
                _ => "devices = [all devices of one store]",
            };
            Finding::problem("devices", error.to_string(), fix)
        }
    };
    findings.push(of_store);
    findings
}

/// Whether this process may write to the device, and what is wrong with one that it may write to.
fn writable(what: &str, path: &Path, device: &Device) -> Vec<Finding> {
    let access = Access::READ_OK | Access::WRITE_OK;
    let problem = match accessat(CWD, path, access, AtFlags::EACCESS) {
        Ok(()) => {
            let risks = device.risks().into_iter();
            let hints: Vec<_> = risks
                .map(|Risk { what: why, fix }| Finding::hint(what, why, fix))
                .collect();
            return match hints.is_empty() {
                true => vec![Finding::fine(what, ApproxBytes(device.bytes()).to_string())],
                false => hints,
            };
        }
        Err(Errno::ROFS) => Finding::problem(
            what,
            "its file system is read-only for this process; the service may write only to the paths named in its unit",
            read_write_paths(path),
        ),
        Err(errno) => {
            let uid = rustix::process::geteuid();
            let why = format!("uid {uid} may not read and write it: {errno}");
            Finding::problem(what, why, owned(path))
        }
    };
    vec![problem]
}

fn fix_of(error: &DeviceError, path: &Path) -> String {
    match error {
        DeviceError::Missing { .. } => {
            "mount its drive, or run `offloadd format --config FILE --size SIZE`".into()
        }
        DeviceError::NotWritable { fix, .. } => fix.clone(),
        DeviceError::ReadOnly { .. } => read_write_paths(path),
        DeviceError::WrongType { .. } => "devices = [regular files or block devices]".into(),
        DeviceError::NoDirect { .. } => "use a file on ext4 or XFS, or a block device".into(),
        _ => "read the kernel's log: `dmesg`".into(),
    }
}

/// Where administrators change the service's unit.
const DROP_INS: &str = "/etc/systemd/system/offloadd.service.d";

fn read_write_paths(path: &Path) -> String {
    // The same file as in docs/administration.md and offloadd.service.
    format!(
        "if this is the service: mkdir -p {DROP_INS} && printf '[Service]\\nReadWritePaths=-{}\\n' >> {DROP_INS}/store.conf && systemctl \
         daemon-reload; otherwise mount the file system writable",
        path.parent().unwrap_or(path).display()
    )
}

fn owned(path: &Path) -> String {
    fix_of_permission(path, rustix::process::geteuid().as_raw())
}
