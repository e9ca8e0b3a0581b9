//! `offloadd serve`: starts the daemon from its settings, and stops it in order.
//!
//! ```text
//!   settings ─▶ lock devices ─▶ recover ─▶ sockets ─▶ owner thread ─▶ calls ─▶ READY
//!   SIGHUP ─▶ reload the settings (in a private daemon: the parent has ended)
//!   SIGTERM, SIGINT ─▶ refuse calls ─▶ I/O in flight ends ─▶ remove sockets ─▶ exit 0
//!   SIGTERM with a service manager ─▶ the same, and the manager keeps the sessions for the next daemon
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offload_api::ids::Epoch;
use offload_api::ring::Reached;
use offload_support::progress::{Audience, Progress, Unit};
use offload_support::units::ApproxBytes;
use offloadd::arena::{LockPolicy, lock_outlook};
use offloadd::blocks::BlockError;
use offloadd::config::Config;
use offloadd::core::{Core, Viewer};
use offloadd::device::{Device, DeviceBlocks};
use offloadd::doctor::{Roots, huge_pages};
use offloadd::driver::{
    self, DriverError, DriverHandle, InheritedSession, InheritedSessions, Parts, Running,
};
use offloadd::handover::inherited::{self, Inherited};
use offloadd::handover::{self, Found, HandedOver, SESSIONS_MAX};
use offloadd::memory;
use offloadd::metrics::Endurance;
use offloadd::queue::DeviceLimits;
use offloadd::retry;
use offloadd::server::page::Page;
use offloadd::server::{self, About};
use offloadd::store::StoreError;
use offloadd::store::catalog::Phase;
use offloadd::store::metadata_device::{self, MetadataMove};
use offloadd::store::recover::{self, RecoveredStore};
use offloadd::store_devices::StoreDevices;
use rustix::process::Pid;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::log;
use super::reload::{self, Served};
use super::service_manager::{
    feed_watchdog, forget_kept, has_manager, keep, report_progress, say_ready, say_reloading,
    say_status, say_stopping,
};
use super::{follow_parent, raise_descriptor_limit, ratings, wear_counts, whole};

/// Interval at which a private daemon checks that its parent is alive, in addition to the kernel's signal.
const PARENT_CHECK: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Path, private: bool) -> Result<()> {
    let given = match private {
        true => {
            inherited::close_all()
                .context("closing descriptors inherited from the parent process")?;
            inherited::Inherited::new()
        }
        false => inherited::take(),
    };
    let parent = private.then(follow_parent).transpose()?.flatten();
    let _last_lines = log::to_stderr();
    abort_on_panic();
    raise_descriptor_limit();
    let file = config;
    let config = Config::read(file)?;
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
    // Lock the devices before reading: the previous daemon may still be writing.
    let opened = StoreDevices::open(&config.devices)?;
    for unlisted in &opened.unlisted {
        tracing::warn!("device {unlisted}");
    }
    let to_write = opened.line_to_write();
    let StoreDevices { devices, .. } = opened;
    if private {
        devices.iter().try_for_each(Device::check_ours_alone)?;
    }
    for device in devices.iter().filter(|device| device.has_holes()) {
        tracing::warn!(
            "device {} has holes, so writes fail when the file system is full; if it was copied, copy it again with `cp \
             --sparse=never`",
            device.path()
        );
    }
    let (mut store, unwritable) = recover_store(&devices, handover::has_sessions(&given))?;
    // After recovery, which fails if a device is missing: the line would lack that device.
    if let Some(line) = to_write {
        tracing::warn!("add to {}: {line}", file.display());
    }
    // Inherited sessions may have reserved space that the store does not know of.
    if unwritable.is_none() && !handover::has_sessions(&given) {
        let what = "moving the store's catalog and records";
        let mut work = Progress::new(what, Unit::Bytes, Audience::Service(report_progress));
        let moved = metadata_device::settle_watched(
            &mut DeviceBlocks(&devices),
            &mut store,
            &mut |done, total| {
                work.set(done, total);
            },
        );
        drop(work);
        match moved? {
            MetadataMove::NotDue => {}
            MetadataMove::Moved { from, to } => {
                tracing::info!("moved the store's catalog and records from {from} to {to}");
            }
            MetadataMove::Failed(why) => {
                tracing::warn!("cannot move the store's catalog and records: {why}");
            }
        }
    }
    let endurance = Endurance::new(store.id, ratings(&config), wear_counts(&store, &devices));
    for note in &store.notes {
        tracing::warn!("{note}");
    }
    let device_count = devices.len() - store.foreign_devices.len();
    for foreign_device in &store.foreign_devices {
        tracing::warn!("device {foreign_device}");
    }
    let files: Vec<_> = (store.devices.iter())
        .map(|device| devices[device.position].file().clone())
        .collect();
    let device_limits: Vec<_> = (store.devices.iter())
        .zip(&files)
        .map(|(device, file)| DeviceLimits::of(file, &device.superblock.rates()))
        .collect();
    for (device, limits) in store.devices.iter().zip(&device_limits) {
        let [reads, writes] = limits.window_bytes.map(ApproxBytes);
        tracing::info!(
            "device {}: I/O in pieces of {}, at most {reads} of reads and {writes} of writes in flight",
            device.path,
            ApproxBytes(limits.piece_bytes.into()),
        );
    }
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
    let store_id = store.id;
    let mut core = Core::new(store, draw_epoch()?, config.limits());
    // Sessions can be claimed only once, so everything that can fail precedes that: sockets here, the engine in `start`.
    let page = (config.metrics_listen.as_ref())
        .map(|address| runtime.block_on(Page::bind(address)))
        .transpose()?;
    let listener = {
        let _guard = runtime.enter();
        server::bind(&config.socket)?
    };
    let sockets = Sockets {
        place: server::Place::of(&config.socket),
        listener,
        page,
    };
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
        endurance,
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
    let metrics = (config.metrics_listen.as_ref())
        .map_or_else(String::new, |address| format!(", metrics at {address}"));
    let limited =
        (running.read_only.as_ref()).map_or_else(String::new, |why| format!(", read-only: {why}"));
    let ready = format!(
        "READY offloadd {} at {}: {} devices, engine {} ({}), arenas up to {}{metrics}{limited}",
        env!("CARGO_PKG_VERSION"),
        config.socket.display(),
        device_count,
        running.engine,
        running.engine_reason,
        ApproxBytes(config.arena_bytes_max),
    );
    let started = Started {
        file: file.to_owned(),
        config: config.clone(),
        serving: match &running.read_only {
            None => format!("serving at {}", config.socket.display()),
            Some(why) => format!("serving read-only at {}: {why}", config.socket.display()),
        },
    };
    let serving = serve(sockets, running, about, parent, started, signals, &ready);
    let result = runtime.block_on(serving);
    // A device may still be being measured to be added. Do not wait: the add can be repeated.
    runtime.shutdown_background();
    result
}

/// Recovers and repairs the store. If a device fails a write of the repair, returns its error too, and the store is served
/// read-only. With sessions to adopt, that is an error instead: the next start may be able to adopt them.
fn recover_store(
    devices: &[Device],
    sessions_wait: bool,
) -> Result<(RecoveredStore, Option<BlockError>)> {
    say_status("recovering the store");
    let mut work = Progress::new(
        "recovering the store",
        Unit::Jobs,
        Audience::Service(report_progress),
    );
    let mut read = || {
        recover::read_watched(&mut DeviceBlocks(devices), &mut |done, total| {
            work.set(done, total);
        })
    };
    let mut store = read()?;
    let mut is_fresh = true;
    let waits = if sessions_wait {
        &[][..]
    } else {
        &retry::WAITS
    };
    let repaired = retry::retry(waits.iter().copied(), || {
        // After a failed flush, the state on the devices is unknown: read it again.
        if !std::mem::replace(&mut is_fresh, false) {
            store = read()?;
        }
        recover::repair(&mut DeviceBlocks(devices), &mut store).map_err(StoreError::from)
    });
    match repaired {
        Ok(()) => Ok((store, None)),
        Err(error) if sessions_wait => Err(error).context(
            "repairing the store; the sessions of the previous daemon remain for the next start",
        ),
        Err(StoreError::Device(error)) => Ok((store, Some(error))),
        Err(error) => Err(error.into()),
    }
}

/// Signals that stop the daemon or reload its settings.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        // Without a handler, a write beyond `ulimit -f` kills the process; with one, it fails with EFBIG. The handler stays
        // installed when this value is dropped.
        drop(signal(SignalKind::from_raw(libc::SIGXFSZ))?);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
        })
    }
}

struct Sockets {
    /// Removes the socket on drop. Drop it before the listener.
    place: server::Place,
    listener: UnixListener,
    page: Option<Page>,
}

/// Settings at the start, with which a reload compares.
struct Started {
    file: PathBuf,
    config: Config,
    /// Status shown by `systemctl status`.
    serving: String,
}

impl Started {
    /// Applies changed settings. Invalid settings change nothing; settings that need a restart are logged.
    fn reload(&self, owner: &DriverHandle) {
        say_reloading();
        let read = served(owner).and_then(|served| reload::read(&self.file, &self.config, &served));
        let done = match read {
            Err(error) => {
                tracing::error!("the settings stay unchanged: {}", whole(&error));
                "the changed settings are invalid and were not applied".to_owned()
            }
            Ok(reload) => {
                for refused in &reload.refused {
                    tracing::warn!("{}: {refused}", self.file.display());
                }
                match owner.change(reload.change) {
                    Err(fault) => format!("the changed settings were not applied: {fault}"),
                    Ok(()) if reload.refused.is_empty() => "changed settings applied".to_owned(),
                    Ok(()) => format!(
                        "changed settings applied, except: {}",
                        reload.refused.join("; ")
                    ),
                }
            }
        };
        tracing::info!("{done}");
        say_ready();
        say_status(&format!("{}; {done}", self.serving));
    }
}

fn served(owner: &DriverHandle) -> Result<Vec<Served>> {
    let asked = "asking which devices are served";
    let snapshot = owner.snapshot(Viewer::All).context(asked)?;
    let snapshot = snapshot.blocking_recv().context(asked)?.context(asked)?;
    let devices = snapshot.devices.iter().map(|view| Served {
        path: (&view.state.path).into(),
        leaving: view.state.status.phase == Some(Phase::Draining),
    });
    Ok(devices.collect())
}

/// Runs reloads one after the other on a thread of their own, because checking a device that hangs must not delay SIGTERM.
fn start_reloads(started: Started, owner: DriverHandle) -> Result<SyncSender<()>> {
    // One waiting request is enough: it reads the file when its turn comes.
    let (ask, asked) = sync_channel(1);
    std::thread::Builder::new()
        .name("reload".into())
        .spawn(move || {
            while asked.recv().is_ok() {
                started.reload(&owner);
            }
        })
        .context("starting the thread that reloads settings")?;
    Ok(ask)
}

async fn serve(
    sockets: Sockets,
    running: Running,
    about: About,
    parent: Option<Pid>,
    started: Started,
    signals: Signals,
    ready: &str,
) -> Result<()> {
    let Running { handle, thread, .. } = running;
    let Signals {
        mut terminate,
        mut interrupt,
        mut hang_up,
        mut quit,
    } = signals;
    let Sockets {
        place,
        listener,
        page,
    } = sockets;
    let (stop, stopped) = watch::channel(false);
    let page = page.map(|page| tokio::spawn(page.serve(handle.clone(), stopped.clone())));
    let calls = tokio::spawn(server::serve(listener, handle.clone(), about, stopped));
    tokio::spawn(feed_watchdog(handle.clone()));
    let mut owner = tokio::task::spawn_blocking(move || match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    });

    let told = say(ready);
    // Only a private daemon needs its reader; a service may have closed stdout.
    if parent.is_some() {
        told.context("printing READY: the parent process has closed the pipe")?;
    }
    say_ready();
    say_status(&started.serving);

    let reloads = start_reloads(started, handle.clone())?;
    let mut parent_check = tokio::time::interval(PARENT_CHECK);
    let ended: Result<Option<HandedOver>, DriverError> = loop {
        let why = tokio::select! {
            // A terminal or systemd signals the whole process group. The parent finishes its step and then sends SIGQUIT.
            _ = terminate.recv() => match parent {
                Some(_) => continue,
                None => "SIGTERM",
            },
            _ = interrupt.recv() => match parent {
                Some(_) => continue,
                None => "SIGINT",
            },
            _ = quit.recv() => "SIGQUIT",
            // The kernel sends this when the parent's thread that started the daemon ends; its process may live on.
            _ = hang_up.recv() => match parent {
                Some(parent) if rustix::process::getppid() == Some(parent) => continue,
                Some(_) => "its parent process ended",
                None => {
                    let _ = reloads.try_send(());
                    continue;
                }
            },
            _ = parent_check.tick() => match parent {
                Some(parent) if rustix::process::getppid() != Some(parent) => {
                    "its parent process ended"
                }
                _ => continue,
            },
            result = &mut owner => break result.context("the owner thread")?,
        };
        let handing = why == "SIGTERM" && parent.is_none() && has_manager();
        tracing::info!(why, handing_over = handing, "offloadd stops");
        say_stopping();
        if handing {
            handle.hand_over_and_stop();
        } else {
            handle.stop();
        }
        // A second signal stops without the hand-over.
        break tokio::select! {
            result = &mut owner => result.context("the owner thread")?,
            _ = async { tokio::select! { _ = interrupt.recv() => {}, _ = quit.recv() => {} } } => {
                handle.stop();
                (&mut owner).await.context("the owner thread")?
            }
        };
    };
    if let Ok(Some(handed)) = &ended {
        give(handed);
    }
    // While the listener exists: see `Place`.
    drop(place);
    let _ = stop.send(true);
    calls.await.context("the threads that answer calls")??;
    if let Some(page) = page {
        page.await.context("the task of the metrics endpoint")?;
    }
    ended?;
    Ok(())
}

/// Adopts the sessions of the previous daemon. Returns them and the names of all descriptors that this process inherited.
fn adopt(core: &mut Core, given: Inherited) -> (Option<InheritedSessions>, Vec<String>) {
    let names: Vec<String> = given.iter().map(|(name, _)| name.clone()).collect();
    let mut found = match Found::among(given) {
        Ok(None) => return (None, names),
        Ok(Some(found)) => found,
        Err(refused) => {
            tracing::warn!(%refused, "cannot adopt the sessions of the previous daemon; they end");
            return (None, names);
        }
    };
    if found.state.sessions.is_empty() {
        return (None, names);
    }
    let numbers = found.state.sessions.iter().map(|session| session.number);
    let mut descriptors: Vec<_> = (numbers.collect::<Vec<_>>().into_iter())
        .map(|number| found.descriptors(number))
        .collect();
    let state = found.state;
    let (adopted, left_out) = match core.adopt(&state, |index| descriptors[index].is_some()) {
        Ok(adopted) => adopted,
        Err(why) => {
            tracing::warn!(
                why,
                "cannot adopt the sessions of the previous daemon; they end"
            );
            return (None, names);
        }
    };
    for why in left_out {
        tracing::warn!(
            "the previous daemon handed over sessions that cannot be adopted; they end: {why}"
        );
    }
    if adopted.is_empty() {
        return (None, names);
    }
    tracing::info!("adopted {} sessions of the previous daemon", adopted.len());
    let sessions = adopted.into_iter().map(|adopted| {
        let session = &state.sessions[adopted.index];
        InheritedSession {
            descriptors: descriptors[adopted.index].take().expect("asked for"),
            reached: Reached {
                submission_head: session.submission_head,
                completion_tail: session.completion_tail,
            },
            adopted,
        }
    });
    let inherited = InheritedSessions {
        claim: found.claim,
        sessions: sessions.collect(),
    };
    (Some(inherited), names)
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

fn give(handed: &HandedOver) {
    let count = handed.state.sessions.len();
    match keep(handed) {
        Ok(()) if count == 0 => {}
        Ok(()) => tracing::info!("handed {count} sessions over to the next daemon"),
        Err(error) => {
            tracing::warn!(%error, "the service manager does not keep descriptors, so {count} sessions end")
        }
    }
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Makes a panic in any thread end the daemon: with a thread missing, processes would wait for ever.
fn abort_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}

/// Draws an epoch at random, so that no two incarnations share one. Never 0, the epoch of a blank entry.
fn draw_epoch() -> Result<Epoch> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .context("drawing random bytes for the epoch")?;
    Ok(Epoch(u64::from_le_bytes(random) | 1))
}
