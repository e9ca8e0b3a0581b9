//! The commands, one module each.

pub(crate) mod check_config;
mod connection;
pub(crate) mod device;
pub(crate) mod doctor;
mod findings;
pub(crate) mod format;
pub(crate) mod job;
mod log;
mod rate;
pub(crate) mod serve;
mod store_access;
pub(crate) mod supervise;
pub(crate) mod top;
pub(crate) mod verify;

use anyhow::{Context, Result, bail};
use offload_support::console;
use offloadd::config::Config;
use offloadd::device::{Device, DeviceError};
use offloadd::store_devices::StoreDevices;
use rustix::process::{Pid, Resource, Rlimit, Signal};

/// Opens and locks all devices of the settings' store. Prints those that the settings do not list.
fn open_all(config: &Config) -> Result<Vec<Device>> {
    let opened = StoreDevices::open(&config.devices).map_err(|error| match error {
        // Users are not given the store itself.
        DeviceError::NotWritable { path, uid, .. } => anyhow::anyhow!(
            "no daemon runs at {}, and uid {uid} may not read the store's device {}: ask the daemon's administrator to start it, or run this as \
             the owner of the device",
            config.socket.display(),
            path.display()
        ),
        other => other.into(),
    })?;
    for unlisted in &opened.unlisted {
        eprintln!("offloadd: device {unlisted}");
    }
    if let Some(line) = opened.line_to_write() {
        eprintln!("offloadd: add to the settings: {line}");
    }
    Ok(opened.devices)
}

/// Raises the soft limit of file descriptors: a session needs seven, so the usual 1024 would not do for `sessions_max`.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // If this fails, opening a session may fail later, with an error that names the limit.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

/// Asks the kernel for a signal when the parent ends, and returns the parent. `None`: in another PID namespace.
fn follow_parent() -> Result<Option<Pid>> {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(Signal::HUP))
        .context("asking for a signal when the parent process ends")?;
    if rustix::process::getppid() != parent {
        bail!("the parent process ended while this one started");
    }
    Ok(parent)
}

/// Prints to stdout, and exits with success if the reader has closed the pipe, as in `offloadd top --json | head -1`.
fn print(text: &str) -> Result<()> {
    console::out(format_args!("{text}"));
    let written = console::finish();
    if console::is_closed() {
        std::process::exit(0);
    }
    Ok(written?)
}
