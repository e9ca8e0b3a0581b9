//! `offloadd serve`: from settings to a serving daemon, and its end in order.
//!
//! ```text
//!   settings ─▶ lock devices ─▶ recover ─▶ sockets ─▶ owner thread ─▶ calls ─▶ READY
//!   SIGHUP ─▶ settings read again (of a private daemon: its parent ended)
//!   SIGTERM, SIGINT ─▶ no more calls ─▶ I/O in flight ends ─▶ sockets removed ─▶ exit 0
//!   SIGTERM where a service manager listens: the sessions are given to it, for the daemon that it starts next
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offload_api::ids::Epoch;
use offload_api::ring::Reached;
use offload_support::units::ApproxBytes;
use offloadd::arena::{LockPolicy, lock_outlook};
use offloadd::blocks::BlockError;
use offloadd::config::Config;
use offloadd::core::{Core, Viewer};
use offloadd::device::{Device, DeviceBlocks};
use offloadd::doctor::{Roots, huge_pages};
use offloadd::driver::{self, DriverError, DriverHandle, LeftToUs, Parts, Running, TakenUp};
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
    forget_kept, keep, keep_watchdog_quiet, report_progress, say_ready, say_reloading, say_status,
    say_stopping, somebody_keeps,
};
use super::{follow_parent, raise_descriptor_limit, ratings, whole, worn};
use offload_support::progress::{Audience, Progress, Unit};

/// A private daemon looks this often whether its parent still lives, besides the kernel's signal.
const PARENT_CHECK: Duration = Duration::from_secs(1);

pub(crate) fn run(config: &Path, private: bool) -> Result<()> {
    let given = match private {
        true => {
            inherited::close_all().context("closing what the parent process left open")?;
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
            "`arena_bytes_max` is {}, and there are {} of memory here: leave some for the processes and the system",
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
            "arenas are in small pages, as shmem_enabled is {word}: `offloadd doctor` says how to get huge ones"
        );
    }
    let policy = if config.require_locked {
        LockPolicy::Require
    } else {
        LockPolicy::Try
    };
    // Locked before the first byte is read: a predecessor's last writes may still be under way.
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
            "device {} has holes: its space is not reserved, and a full file system would fail writes. Was it copied? `cp \
             --sparse=never` fills them",
            device.path()
        );
    }
    let (mut store, unwritable) = recover_store(&devices, handover::has_sessions(&given))?;
    // Not where a device is missing: the line would lack it.
    if let Some(line) = to_write {
        tracing::warn!("write into {}: {line}", file.display());
    }
    // Sessions may hold room that the store does not know of.
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
                tracing::info!("the store's catalog and records moved from {from} to {to}");
            }
            MetadataMove::Failed(why) => {
                tracing::warn!("the store's catalog and records stay where they are: {why}");
            }
        }
    }
    let endurance = Endurance::new(store.id, ratings(&config), worn(&store, &devices));
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
            "device {}: tiles move in pieces of {}, at most {reads} of reads and {writes} of writes at a time",
            device.path,
            ApproxBytes(limits.piece_bytes.into()),
        );
    }
    let descriptor_socket = config.descriptor_socket();
    server::prepare_dir(&config.socket, private)?;
    server::clear_socket(&config.socket)?;
    server::clear_socket(&descriptor_socket)?;
    // Both sockets for user and group, from the moment they exist.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o117));

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the threads that answer calls")?;
    // Before the sockets exist, and before sessions are taken up: a signal that comes at once must end us in order.
    let signals = {
        let _guard = runtime.enter();
        Signals::listen()?
    };
    let store_id = store.id;
    let mut core = Core::new(store, draw_epoch()?, config.limits());
    // All that can fail comes before a state is claimed, which can be done once: sockets here, the engine in `start`.
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
    say_sessions_max(&config);
    let (left_to_us, given) = take_up(&mut core, given);
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
        left_to_us,
    })?;
    // The keeper's copies would keep a life line from hanging up when its session ends.
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
    let limited = (running.reading_only.as_ref())
        .map_or_else(String::new, |why| format!(", for reading only: {why}"));
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
        serving: match &running.reading_only {
            None => format!("serving at {}", config.socket.display()),
            Some(why) => format!(
                "serving for reading only at {}: {why}",
                config.socket.display()
            ),
        },
    };
    let serving = serve(sockets, running, about, parent, started, signals, &ready);
    let result = runtime.block_on(serving);
    // Somebody's device may still be measured: nothing waits for it, and it can be brought again.
    runtime.shutdown_background();
    result
}

/// The store as its devices have it, mended; or what a device did not take: then it is only read, which is more than
/// nothing. But not to sessions that wait: the next start may take them up.
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
    let mended = retry::retry(waits.iter().copied(), || {
        // Of what was read before a flush that failed nothing is known any more.
        if !std::mem::replace(&mut is_fresh, false) {
            store = read()?;
        }
        recover::repair(&mut DeviceBlocks(devices), &mut store).map_err(StoreError::from)
    });
    match mended {
        Ok(()) => Ok((store, None)),
        Err(error) if sessions_wait => Err(error).context(
            "making the store ready; the sessions of the daemon before are left to the next start",
        ),
        Err(StoreError::Device(error)) => Ok((store, Some(error))),
        Err(error) => Err(error.into()),
    }
}

/// What ends the daemon or makes it look at its settings.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        // Ends a process that has no handler for it: with one, a write beyond a limit of file sizes (`ulimit -f`) fails with
        // EFBIG instead. The handler stays when this value goes.
        drop(signal(SignalKind::from_raw(libc::SIGXFSZ))?);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
        })
    }
}

/// Where people and processes come to ask.
struct Sockets {
    /// Removes the socket at the end, before the listener goes.
    place: server::Place,
    listener: UnixListener,
    page: Option<Page>,
}

/// What a reload compares with.
struct Started {
    file: PathBuf,
    config: Config,
    /// What `systemctl status` shows while it does nothing else.
    serving: String,
}

impl Started {
    /// Settings that are wrong, or changed where nothing can change, are told and leave everything as it was.
    fn reload(&self, owner: &DriverHandle) {
        say_reloading();
        let read = served(owner).and_then(|served| reload::read(&self.file, &self.config, &served));
        let done = match read {
            Err(error) => {
                tracing::error!("the settings stay as they were: {}", whole(&error));
                "the changed settings are wrong and were not taken up".to_owned()
            }
            Ok(reload) => {
                for refused in &reload.refused {
                    tracing::warn!("{}: {refused}", self.file.display());
                }
                match owner.change(reload.change) {
                    Err(fault) => format!("the changed settings were not taken up: {fault}"),
                    Ok(()) if reload.refused.is_empty() => "changed settings taken up".to_owned(),
                    Ok(()) => format!("settings taken up but for: {}", reload.refused.join(", ")),
                }
            }
        };
        tracing::info!("{done}");
        say_ready();
        say_status(&format!("{}; {done}", self.serving));
    }
}

/// The store's devices at this moment.
fn served(owner: &DriverHandle) -> Result<Vec<Served>> {
    let asked = "asking which devices are served";
    let snapshot = owner.look(Viewer::All).context(asked)?;
    let snapshot = snapshot.blocking_recv().context(asked)?.context(asked)?;
    let devices = snapshot.devices.iter().map(|view| Served {
        path: (&view.state.path).into(),
        leaving: view.state.status.phase == Some(Phase::Draining),
    });
    Ok(devices.collect())
}

/// One reload after the other, beside everything else: looking at a device that hangs must not keep SIGTERM waiting.
fn start_reloads(started: Started, owner: DriverHandle) -> Result<SyncSender<()>> {
    // One that waits reads what is there when its turn comes: more say nothing new.
    let (ask, asked) = sync_channel(1);
    std::thread::Builder::new()
        .name("reload".into())
        .spawn(move || {
            while asked.recv().is_ok() {
                started.reload(&owner);
            }
        })
        .context("starting the thread that reads changed settings")?;
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
    tokio::spawn(keep_watchdog_quiet(handle.clone()));
    let mut owner = tokio::task::spawn_blocking(move || match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    });

    let told = say(ready);
    // Who started another one may have closed its end since.
    if parent.is_some() {
        told.context("the parent process no longer listens")?;
    }
    say_ready();
    say_status(&started.serving);

    let reloads = start_reloads(started, handle.clone())?;
    let mut parent_check = tokio::time::interval(PARENT_CHECK);
    let ended: Result<Option<HandedOver>, DriverError> = loop {
        let why = tokio::select! {
            // A terminal or systemd signals a whole group. The parent has a step to finish first, and ends us then.
            _ = terminate.recv() => match parent {
                Some(_) => continue,
                None => "SIGTERM",
            },
            _ = interrupt.recv() => match parent {
                Some(_) => continue,
                None => "SIGINT",
            },
            _ = quit.recv() => "SIGQUIT",
            // The kernel's word that the thread of our parent that started us has ended; perhaps not all of it.
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
        let handing = why == "SIGTERM" && parent.is_none() && somebody_keeps();
        tracing::info!(why, handing, "offloadd stops");
        say_stopping();
        if handing {
            handle.stop_for_the_next();
        } else {
            handle.stop();
        }
        // Whoever cannot wait for the end of a handover says so.
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
    // While its listener is there: see `Place`.
    drop(place);
    let _ = stop.send(true);
    calls.await.context("the threads that answer calls")??;
    if let Some(page) = page {
        page.await.context("the threads that answer Prometheus")?;
    }
    ended?;
    Ok(())
}

/// The sessions of the daemon before that go on, and the names of all that came with this process.
fn take_up(core: &mut Core, given: Inherited) -> (Option<LeftToUs>, Vec<String>) {
    let names: Vec<String> = given.iter().map(|(name, _)| name.clone()).collect();
    let mut found = match Found::among(given) {
        Ok(None) => return (None, names),
        Ok(Some(found)) => found,
        Err(refused) => {
            tracing::warn!(%refused, "what a daemon before handed over is not taken up: its sessions end");
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
                "what a daemon before handed over is not taken up: its sessions end"
            );
            return (None, names);
        }
    };
    for why in left_out {
        tracing::warn!("a daemon before handed over a job whose sessions end: {why}");
    }
    if adopted.is_empty() {
        return (None, names);
    }
    tracing::info!("{} sessions of the daemon before go on", adopted.len());
    let taken_up = adopted.into_iter().map(|adopted| {
        let session = &state.sessions[adopted.index];
        TakenUp {
            descriptors: descriptors[adopted.index].take().expect("asked for"),
            reached: Reached {
                submission_head: session.submission_head,
                completion_tail: session.completion_tail,
            },
            adopted,
        }
    });
    let left_to_us = LeftToUs {
        claim: found.claim,
        sessions: taken_up.collect(),
    };
    (Some(left_to_us), names)
}

/// Better heard now than at a restart.
fn say_sessions_max(config: &Config) {
    if somebody_keeps() && config.sessions_max as usize > SESSIONS_MAX {
        tracing::warn!(
            "`sessions_max` is {}: a restart ends those beyond {SESSIONS_MAX}, as more descriptors cannot be kept",
            config.sessions_max
        );
    }
}

fn give(handed: &HandedOver) {
    let count = handed.state.sessions.len();
    match keep(handed) {
        Ok(()) if count == 0 => {}
        Ok(()) => tracing::info!("{count} sessions wait for the next daemon"),
        Err(error) => {
            tracing::warn!(%error, "the service manager keeps no descriptors: {count} sessions end")
        }
    }
}

/// On standard output.
fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// A broken invariant in any thread ends the daemon: half of one would keep processes waiting for ever.
fn abort_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}

/// So that no two lives of a daemon share one. Never 0, which a blank entry has.
fn draw_epoch() -> Result<Epoch> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .context("random bytes for the epoch")?;
    Ok(Epoch(u64::from_le_bytes(random) | 1))
}
