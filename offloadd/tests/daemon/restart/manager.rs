//! A service manager for tests that keeps descriptors like systemd: what a daemon stores with it goes to the next daemon.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use offload_api::proto;
use offloadd::handover::inherited;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::Signal;

use super::LONG;
use crate::common::{Control, Daemon, Session, Store, eventually};

pub(super) type StoredDescriptors = Vec<(String, OwnedFd)>;

/// Keeps descriptors by systemd's rules.
pub(super) struct Manager {
    pub(super) store: Store,
    socket: UnixDatagram,
}

impl Manager {
    pub(super) fn new(store: Store) -> Self {
        let socket = UnixDatagram::bind(store.dir.path().join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { store, socket }
    }

    /// Starts a daemon with `kept`, and drops the descriptors that the daemon removes from the store.
    pub(super) fn start(&self, kept: &mut StoredDescriptors) -> Daemon {
        self.start_as(self.store.serve_command(), kept)
    }

    /// Starts `command` as [`Self::start`] does.
    pub(super) fn start_as(&self, mut command: Command, kept: &mut StoredDescriptors) -> Daemon {
        command.env("NOTIFY_SOCKET", self.store.dir.path().join("notify"));
        let _numbers = inherited::pass(&mut command, kept).unwrap();
        std::thread::scope(|scope| {
            let started = scope.spawn(|| Daemon::start(command, self.store.socket()));
            while !started.is_finished() {
                self.receive(kept);
                std::thread::sleep(Duration::from_millis(1));
            }
            self.receive(kept);
            started.join().unwrap()
        })
    }

    /// Like [`Self::start_as`], for a daemon that does not start to serve. Returns its log.
    pub(super) fn start_in_vain(
        &self,
        mut command: Command,
        kept: &mut StoredDescriptors,
    ) -> String {
        command.env("NOTIFY_SOCKET", self.store.dir.path().join("notify"));
        let _numbers = inherited::pass(&mut command, kept).unwrap();
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut ended = None;
        eventually("it gives up", LONG, || {
            self.receive(kept);
            ended = child.try_wait().unwrap();
            ended.is_some()
        });
        self.receive(kept);
        assert!(ended.is_some_and(|status| !status.success()));
        let mut log = String::new();
        let mut stderr = child.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        log
    }

    /// Applies the daemon's messages since the last call to `kept`.
    fn receive(&self, kept: &mut StoredDescriptors) {
        loop {
            let mut bytes = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let Ok(message) = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags)
            else {
                return;
            };
            let mut fds = Vec::new();
            for item in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = item {
                    fds.extend(rights);
                }
            }
            let words = String::from_utf8_lossy(&bytes[..message.bytes]).into_owned();
            let says = |word| words.lines().any(|line| line == word);
            let name = words.lines().find_map(|l| l.strip_prefix("FDNAME="));
            if says("FDSTORE=1") {
                assert!(says("FDPOLL=0") && fds.len() == 1, "{words}");
                kept.push((name.unwrap().to_owned(), fds.pop().unwrap()));
            } else if says("FDSTOREREMOVE=1") {
                kept.retain(|(kept, _)| kept != name.unwrap());
            }
        }
    }

    /// Ends `daemon` in order. Returns the descriptors that it stored, and its log.
    pub(super) fn stop(&self, mut daemon: Daemon) -> (StoredDescriptors, String) {
        daemon.signal(Signal::TERM);
        let mut kept = Vec::new();
        eventually("it ends", LONG, || {
            self.receive(&mut kept);
            daemon.child.try_wait().unwrap().is_some()
        });
        self.receive(&mut kept);
        assert_eq!(daemon.wait(LONG), Some(0));
        let mut log = String::new();
        let mut stderr = daemon.child.stderr.take().unwrap();
        stderr.read_to_string(&mut log).unwrap();
        (kept, log)
    }

    /// Starts the next daemon with the descriptors of this one.
    pub(super) fn restart(&self, daemon: Daemon) -> Daemon {
        let (mut kept, _) = self.stop(daemon);
        let daemon = self.start(&mut kept);
        assert!(kept.is_empty(), "what it has taken is kept no longer");
        daemon
    }

    /// Returns the log of a daemon that is started with `kept` and ended again.
    pub(super) fn log_with(&self, mut kept: StoredDescriptors) -> String {
        let daemon = self.start(&mut kept);
        assert!(kept.is_empty(), "what was refused is kept no longer");
        self.stop(daemon).1
    }
}

pub(super) fn reattach(control: &mut Control, session: &Session) -> proto::ReattachReply {
    let token = session.token.clone();
    control.reattach(proto::ReattachRequest { token }).unwrap()
}
