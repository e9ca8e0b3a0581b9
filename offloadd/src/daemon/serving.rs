//! Serves until a signal or the owner thread ends it, reloads settings, and stops in order.
//!
//! ```text
//!   SIGHUP ─▶ reload the settings (in a private daemon: the parent has ended)
//!   SIGTERM, SIGINT ─▶ refuse calls ─▶ I/O in flight ends ─▶ remove sockets ─▶ exit 0
//!   SIGTERM with a service manager ─▶ the same, and the manager keeps the sessions for the next daemon
//! ```

use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result};
use offload_support::units::CountOf;
use rustix::process::Pid;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::Sockets;
use super::reload::{self, ListedDevice};
use super::service_manager::{
    feed_watchdog, has_manager, keep, say_ready, say_reloading, say_status, say_stopping,
};
use crate::config::Config;
use crate::core::{JobState, Viewer};
use crate::driver::{DriverError, DriverHandle, Running};
use crate::error_text::whole;
use crate::handover::HandedOver;
use crate::server::{self, About};
use crate::store::catalog::Phase;

/// Interval at which a private daemon checks that its parent is alive, in addition to the kernel's signal.
const PARENT_CHECK: Duration = Duration::from_secs(1);

/// Signals that stop the daemon or reload its settings.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    quit: Signal,
}

impl Signals {
    pub(super) fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
        })
    }
}

/// Settings at the start, with which a reload compares.
pub(super) struct StartSettings {
    pub(super) file: PathBuf,
    pub(super) config: Config,
    /// Settings that are served now: those at the start, with what reloads have changed.
    pub(super) served: Config,
    /// Status shown by `systemctl status`.
    pub(super) serving: String,
}

impl StartSettings {
    /// Applies changed settings. Invalid settings change nothing; settings that need a restart are logged.
    fn reload(&mut self, owner: &DriverHandle) {
        say_reloading();
        let read = served(owner).and_then(|(served, jobs)| {
            let reload = reload::read(&self.file, &self.config, &served)?;
            let jobs = jobs.iter().map(|job| (job.uid, &job.job));
            for unused in reload.settings.quotas.without_job(jobs) {
                tracing::info!(
                    "{}: [{unused}] applies to no job in the store now",
                    self.file.display()
                );
            }
            Ok(reload)
        });
        let done = match read {
            Err(error) => {
                tracing::error!("the settings stay unchanged: {}", whole(&error));
                "the changed settings are invalid and were not applied".to_owned()
            }
            Ok(reload) => match owner.change(reload.change()) {
                Err(fault) => {
                    let done = format!("the changed settings were not applied: {fault}");
                    tracing::error!("{}: {done}", self.file.display());
                    done
                }
                Ok(()) => {
                    let changes = reload::changes(&self.served, &reload.settings);
                    self.served = reload.settings;
                    let mut done = match changes.is_empty() {
                        true => "no setting was changed".to_owned(),
                        false => format!("changed settings applied: {}", changes.join(", ")),
                    };
                    if reload.refused.is_empty() {
                        tracing::info!("{}: {done}", self.file.display());
                    } else {
                        done += &format!("; not applied: {}", reload.refused.join("; "));
                        tracing::warn!("{}: {done}", self.file.display());
                    }
                    done
                }
            },
        };
        say_ready();
        say_status(&format!("{}; {done}", self.serving));
    }
}

/// Returns the devices and the jobs of the store.
fn served(owner: &DriverHandle) -> Result<(Vec<ListedDevice>, Vec<JobState>)> {
    let asked = "asking which devices are served";
    let snapshot = owner.snapshot(Viewer::All).context(asked)?;
    let snapshot = snapshot.blocking_recv().context(asked)?.context(asked)?;
    let devices = snapshot.devices.iter().map(|view| ListedDevice {
        path: (&view.state.path).into(),
        leaving: view.state.status.phase == Some(Phase::Draining),
    });
    let jobs = snapshot.jobs.iter().map(|view| view.state.clone());
    Ok((devices.collect(), jobs.collect()))
}

/// Runs reloads one after the other on a thread of their own, because checking a device that hangs must not delay SIGTERM.
fn start_reloads(mut started: StartSettings, owner: DriverHandle) -> Result<SyncSender<()>> {
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

pub(super) async fn serve(
    sockets: Sockets,
    running: Running,
    about: About,
    parent: Option<Pid>,
    started: StartSettings,
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
    // While the listener exists: see `SocketPath`.
    drop(place);
    let _ = stop.send(true);
    calls.await.context("the threads that answer calls")??;
    if let Some(page) = page {
        page.await.context("the task of the metrics endpoint")?;
    }
    ended?;
    Ok(())
}

fn give(handed: &HandedOver) {
    let sessions = CountOf(handed.state.sessions.len(), "session");
    match keep(handed) {
        Ok(()) if handed.state.sessions.is_empty() => {}
        Ok(()) => tracing::info!("handed {sessions} over to the next daemon"),
        Err(error) => {
            tracing::warn!(%error, "the service manager does not keep descriptors, so {sessions} will end")
        }
    }
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
