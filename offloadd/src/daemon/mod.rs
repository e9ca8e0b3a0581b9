//! The daemon, put together from its settings: how it starts, serves and stops.
//!
//! ```text
//!   settings ─▶ lock devices ─▶ recover ─▶ sockets ─▶ owner thread ─▶ calls ─▶ READY
//!      [`opening`] ──────────────────┘                  [`adopting`]: sessions of the previous daemon
//!   SIGHUP, SIGTERM, SIGINT ─▶ [`serving`]
//! ```

mod adopting;
mod opening;
mod reload;
mod service_manager;
mod serving;

use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result, bail};
use offload_api::ids::Epoch;
use offload_support::units::{ApproxBytes, CountOf};
use rustix::process::Pid;
use tokio::runtime::Runtime;

use crate::arena::{LockOutlook, LockPolicy, lock_outlook};
use crate::config::Config;
use crate::core::Core;
use crate::device::Device;
use crate::doctor::{Roots, huge_pages};
use crate::driver::{self, Parts, Running};
use crate::handover::inherited::InheritedDescriptors;
use crate::handover::{self, SESSIONS_MAX};
use crate::queue::DeviceLimits;
use crate::server::page::Page;
use crate::server::{self, About};
use crate::store::recover::RecoveredStore;
use adopting::adopt;
use offload_support::memory;
use opening::OpenedStore;
use service_manager::{forget_kept, has_manager};
use serving::{Signals, StartSettings, serve};

/// Runs the daemon with the settings at `file` until it is stopped. `parent`: of a private daemon, which ends with it. `given`:
/// descriptors from the service manager.
///
/// # Errors
/// The daemon cannot start, or cannot continue.
pub fn run(
    file: &Path,
    private: bool,
    parent: Option<Pid>,
    given: InheritedDescriptors,
) -> Result<()> {
    let config = Config::read(file)?;
    let (policy, lock) = check_memory(&config)?;
    let sessions_wait = handover::has_sessions(&given);
    let OpenedStore {
        devices,
        store,
        unwritable,
    } = opening::open(&config, file, private, sessions_wait)?;
    let (store_id, device_count) = (store.id, devices.len() - store.foreign_devices.len());
    let (files, device_limits): (Vec<_>, Vec<_>) =
        (device_limits(&store, &devices)).into_iter().unzip();
    let descriptor_socket = config.descriptor_socket();
    server::prepare_dir(&config.socket, private)?;
    server::clear_socket(&config.socket)?;
    server::clear_socket(&descriptor_socket)?;
    // The sockets must be accessible to user and group only from the moment they exist.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o117));

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the threads that answer calls")?;
    // Before the sockets exist and sessions are adopted: an early signal must stop the daemon in order.
    let signals = {
        let _guard = runtime.enter();
        Signals::listen()?
    };
    let mut core = Core::new(store, draw_epoch()?, config.limits());
    // Sessions can be claimed only once, so everything that can fail precedes that: sockets here, the engine in `start`.
    let sockets = Sockets::bind(&config, &runtime)?;
    warn_about_sessions_max(&config);
    let (inherited, given) = adopt(&mut core, given);
    let epoch = core.epoch();
    let running = driver::start(Parts {
        core,
        opened: devices,
        unwritable,
        devices: files,
        device_limits,
        engine: config.engine,
        limits: config.limits(),
        quotas: config.quotas.clone(),
        epoch,
        policy,
        descriptor_socket: descriptor_socket.clone(),
        inherited,
    })?;
    // The service manager's copies would keep a life line open after its session ends.
    forget_kept(&given);
    let about = About {
        engine: running.engine,
        engine_reason: running.engine_reason.clone(),
        lock,
        descriptor_socket,
        store: store_id,
        sessions_max: config.sessions_max,
        scrub_bytes_per_s_max: config.scrub_bytes_per_s_max,
    };
    let ready = ready_line(&config, device_count, &running);
    let started = StartSettings {
        file: file.to_owned(),
        serving: match &running.read_only {
            None => format!("serving at {}", config.socket.display()),
            Some(why) => format!("serving read-only at {}: {why}", config.socket.display()),
        },
        served: config.clone(),
        config,
    };
    let serving = serve(sockets, running, about, parent, started, signals, &ready);
    let result = runtime.block_on(serving);
    // A device may still be being measured to be added. Do not wait: the add can be repeated.
    runtime.shutdown_background();
    result
}

/// Checks that arenas fit into memory, and how they are locked there.
fn check_memory(config: &Config) -> Result<(LockPolicy, LockOutlook)> {
    if let Some(total_bytes) = memory::total_bytes()
        && total_bytes < config.arena_bytes_max
    {
        bail!(
            "`arena_bytes_max` is {}, but this machine has {} of memory; leave some for processes and the system",
            ApproxBytes(config.arena_bytes_max),
            ApproxBytes(total_bytes)
        );
    }
    let lock = lock_outlook(config.arena_bytes_max);
    if !lock.can_lock {
        if config.require_locked {
            bail!("`require_locked` is set, and {}", lock.note);
        }
        tracing::warn!("{}", lock.note);
    }
    if let Some(word @ ("never" | "deny")) = huge_pages(&Roots::default()).as_deref() {
        tracing::info!(
            "arenas use small pages, because shmem_enabled is {word}; `offloadd doctor` tells how to enable huge pages"
        );
    }
    let policy = if config.require_locked {
        LockPolicy::Require
    } else {
        LockPolicy::Try
    };
    Ok((policy, lock))
}

/// File and limits of each device, in the store's order.
fn device_limits(
    store: &RecoveredStore,
    devices: &[Device],
) -> Vec<(std::sync::Arc<std::fs::File>, DeviceLimits)> {
    let limits = store.devices.iter().map(|device| {
        let file = devices[device.position].file().clone();
        let limits = DeviceLimits::for_device(&file, &device.superblock.rates());
        let [reads, writes] = limits.window_bytes.map(ApproxBytes);
        tracing::info!(
            "device {}: I/O in pieces of {}, at most {reads} of reads and {writes} of writes in flight",
            device.path,
            ApproxBytes(limits.piece_bytes.into()),
        );
        (file, limits)
    });
    limits.collect()
}

/// The line on stdout that says that the daemon serves.
fn ready_line(config: &Config, device_count: usize, running: &Running) -> String {
    let metrics = (config.metrics_listen.as_ref())
        .map_or_else(String::new, |address| format!(", metrics at {address}"));
    let limited =
        (running.read_only.as_ref()).map_or_else(String::new, |why| format!(", read-only: {why}"));
    format!(
        "READY offloadd {} at {}: {}, engine {} ({}), arenas up to {}{metrics}{limited}",
        env!("CARGO_PKG_VERSION"),
        config.socket.display(),
        CountOf(device_count, "device"),
        running.engine,
        running.engine_reason,
        ApproxBytes(config.arena_bytes_max),
    )
}

struct Sockets {
    /// Removes the socket on drop. Drop it before the listener.
    place: server::SocketPath,
    listener: UnixListener,
    page: Option<Page>,
}

impl Sockets {
    fn bind(config: &Config, runtime: &Runtime) -> Result<Self> {
        let page = (config.metrics_listen.as_ref())
            .map(|address| runtime.block_on(Page::bind(address)))
            .transpose()?;
        let listener = server::bind(&config.socket)?;
        Ok(Self {
            place: server::SocketPath::at(&config.socket),
            listener,
            page,
        })
    }
}

/// Warns at the start, so that the limit is known before a restart.
fn warn_about_sessions_max(config: &Config) {
    if has_manager() && config.sessions_max as usize > SESSIONS_MAX {
        tracing::warn!(
            "`sessions_max` is {}, but a restart can hand over only {SESSIONS_MAX} sessions; further ones would end",
            config.sessions_max
        );
    }
}

/// Draws an epoch at random, so that no two incarnations share one. Never 0, the epoch of a blank entry.
fn draw_epoch() -> Result<Epoch> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .context("drawing random bytes for the epoch")?;
    Ok(Epoch(u64::from_le_bytes(random) | 1))
}
