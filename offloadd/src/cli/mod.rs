//! What each command does, from its arguments to its output.

pub(crate) mod check_config;
mod connection;
pub(crate) mod device;
pub(crate) mod discard_unreadable;
pub(crate) mod doctor;
pub(crate) mod documents;
pub(crate) mod drop;
mod findings;
pub(crate) mod format;
pub(crate) mod inspect;
mod log;
mod reload;
pub(crate) mod serve;
mod service_manager;
mod store_access;
pub(crate) mod supervise;
pub(crate) mod top;
pub(crate) mod verify;

pub(crate) use store_access::At;

use anyhow::{Context, Result, bail};
use offload_support::console;
use offloadd::config::Config;
use offloadd::device::{Device, DeviceBlocks, DeviceError};
use offloadd::metrics::{Ratings, WearCount};
use offloadd::store::recover::RecoveredStore;
use offloadd::store::wear::Wear;
use offloadd::store_devices::StoreDevices;
use rustix::process::{Pid, Resource, Rlimit, Signal};

/// Opens and locks all devices of the settings' store, and tells of those that the settings lack.
fn open_all(config: &Config) -> Result<Vec<Device>, DeviceError> {
    let opened = StoreDevices::open(&config.devices)?;
    for unlisted in &opened.unlisted {
        eprintln!("offloadd: device {unlisted}");
    }
    if let Some(line) = opened.line_to_write() {
        eprintln!("offloadd: write into the settings: {line}");
    }
    Ok(opened.devices)
}

/// How far each device of the store is worn, in the store's order.
fn worn(store: &RecoveredStore, devices: &[Device]) -> Vec<WearCount> {
    let worn = store.devices.iter().map(|device| WearCount {
        path: device.path.clone(),
        number: device.superblock.number,
        before: Wear::read(
            &mut DeviceBlocks(devices),
            device.position,
            store.id,
            device.superblock.number,
        ),
    });
    worn.collect()
}

/// What the settings say that drives may take.
fn ratings(config: &Config) -> Ratings {
    let paths = config.devices.iter().map(|path| path.display().to_string());
    Ratings {
        listed: paths.zip(config.rated_bytes.iter().copied()).collect(),
        others: config.rated_bytes_others,
    }
}

/// Seven descriptors a session, and one a device: the usual soft limit of 1024 would be reached first.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Then opening refuses by name, later.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

/// Asks the kernel for a signal when the parent ends, and finds out who it is. `None`: it has ended already.
fn follow_parent() -> Result<Option<Pid>> {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(Signal::HUP))
        .context("asking for a signal when the parent process ends")?;
    if rustix::process::getppid() != parent {
        bail!("the parent process ended while this one started");
    }
    Ok(parent)
}

/// Prints `text`, and ends the program when nobody reads it any more (`offloadd top --json | head -1`).
fn print(text: &str) -> Result<()> {
    console::out(format_args!("{text}"));
    let written = console::finish();
    if console::is_closed() {
        std::process::exit(0);
    }
    Ok(written?)
}

/// An error and what lies beneath it, each once: many name their cause themselves, for those who print nothing else.
pub(crate) fn whole(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for one in error.chain().map(ToString::to_string) {
        if said.is_empty() {
            said = one;
        } else if !said.contains(&one) {
            said += ": ";
            said += &one;
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("opening it: {source}")]
    struct NamesItsCause {
        source: std::io::Error,
    }

    #[test]
    fn what_an_error_says_itself_is_not_said_again() {
        let source = std::io::Error::from_raw_os_error(libc::EINVAL);
        let once = format!("device 1: opening it: {source}");
        let error = Err::<(), _>(NamesItsCause { source }).context("device 1");
        assert_eq!(whole(&error.unwrap_err()), once);
        let plain = anyhow::anyhow!("no room").context("the store");
        assert_eq!(whole(&plain), "the store: no room");
    }
}
