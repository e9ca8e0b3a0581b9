//! The child process: started by a thread that outlives its caller's, ended in order or by force.

use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::failed;
use crate::ClientError;

/// Time from SIGQUIT to SIGKILL, in which I/O in flight ends unless a device hangs.
const STOP_WAIT: Duration = Duration::from_secs(5);

/// Owner of the child. It has a thread of its own, because a child that asks to die with its parent dies with the *thread* that
/// started it, and the caller's thread may be short-lived.
#[derive(Debug)]
pub(super) struct Keeper {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<Option<ExitStatus>>>,
}

impl Keeper {
    pub(super) fn start(
        mut command: Command,
        program: &Path,
    ) -> Result<(Self, u32, ChildStdout), ClientError> {
        let (stop, stopped) = mpsc::channel();
        let (sender, started) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("offloadd-keeper".into())
            .spawn(move || {
                let mut child = match command.spawn() {
                    Ok(child) => child,
                    Err(error) => {
                        let _ = sender.send(Err(error));
                        return None;
                    }
                };
                let stdout = child.stdout.take().expect("asked for a pipe");
                let _ = sender.send(Ok((child.id(), stdout)));
                // Returns when the sender is dropped.
                let _ = stopped.recv();
                end(&mut child)
            })
            .map_err(|e| failed(format!("cannot start a thread: {e}")))?;
        let keeper = Self {
            stop: Some(stop),
            thread: Some(thread),
        };
        let (pid, stdout) = started
            .recv()
            .expect("the thread answers once")
            .map_err(|e| failed(format!("cannot start {}: {e}", program.display())))?;
        Ok((keeper, pid, stdout))
    }

    /// Ends the child and returns its exit status, the first time it is called.
    pub(super) fn stop(&mut self) -> Option<ExitStatus> {
        drop(self.stop.take());
        self.thread.take()?.join().ok().flatten()
    }
}

pub(super) fn end(child: &mut Child) -> Option<ExitStatus> {
    if let Ok(Some(status)) = child.try_wait() {
        return Some(status);
    }
    let pid = rustix::process::Pid::from_child(child);
    // The child was not waited for, so its number is not reused. A private daemon leaves SIGTERM and SIGINT to its owner.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::QUIT);
    if let Some(status) = wait(child, STOP_WAIT) {
        return Some(status);
    }
    let _ = child.kill();
    child.wait().ok()
}

/// Waits with a limit, which std cannot, by asking every few milliseconds.
pub(super) fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            _ => return None,
        }
    }
}
