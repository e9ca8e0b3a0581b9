//! The descriptor socket: a connection shows its session's token within a time limit, gets the session's descriptors once, and becomes
//! its life line. Connections that have not shown a token are limited per user, so that one user cannot keep out another.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff;
use offload_support::units::ApproxBytes;
use rustix::event::epoll::{self, EventFlags};

use super::Driver;
use super::lifecycle::ATTACH_WAIT;
use super::process;
use super::session::{DriverSession, SessionState};
use super::session_memory::SessionMemory;
use super::source::Source;
use crate::core::Event;
use crate::io::SessionId;

/// How long a connection may wait before it shows its token.
const HELLO_WAIT: Duration = Duration::from_secs(2);

/// Limit of a user's connections without a token: all ranks of a node may connect at once.
const HELLOS_A_USER: usize = 64;

/// Limit of all users' connections without a token: 16 users at their limit keep another user waiting.
const HELLOS_MAX: usize = 16 * HELLOS_A_USER;

/// Connections accepted before rings and devices have their turn.
const ACCEPTS_A_TURN: usize = 64;

/// When to retry after a connection could not be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A connection to the descriptor socket that has not shown its token.
#[derive(Debug)]
pub(super) struct Hello {
    socket: OwnedFd,
    uid: u32,
    /// Pidfd, opened when the connection was accepted, because a pid may be reused later.
    process: Option<OwnedFd>,
    pub(super) deadline: Instant,
}

impl Driver {
    /// Accepts waiting connections, a limited number per turn, up to the limits above.
    pub(super) fn accept(&mut self) {
        let now = Instant::now();
        if self.accept_at.is_none_or(|at| at > now) {
            return;
        }
        for _ in 0..ACCEPTS_A_TURN {
            self.accept_at = Some(now + ACCEPT_AGAIN);
            if self.hellos.len() >= HELLOS_MAX || self.stop_deadline.is_some() {
                return;
            }
            let (socket, peer) = match handoff::accept(&self.listener) {
                Ok(Some(connection)) => connection,
                Ok(None) => {
                    self.accept_at = None;
                    return;
                }
                Err(error) => {
                    // Usually out of file descriptors.
                    tracing::error!(%error, "cannot accept on the descriptor socket");
                    return;
                }
            };
            let uid = peer.uid.as_raw();
            let mine = || self.hellos.iter().filter(|(_, hello)| hello.uid == uid);
            // A client sends its token at once, so the oldest connection without one is closed first.
            if mine().count() >= HELLOS_A_USER
                && let Some((&oldest, _)) = mine().min_by_key(|(key, _)| **key)
            {
                let hello = self.hellos.remove(&oldest).expect("just seen");
                let _ = epoll::delete(&self.epoll, &hello.socket);
                let what = format!(
                    "uid {uid} has {HELLOS_A_USER} newer connections to the descriptor socket that have not shown a token"
                );
                let fault = Fault::new(FaultKind::TooMany, what);
                tracing::warn!(uid, %fault, "refused descriptors");
                handoff::refuse(&hello.socket, &fault);
            }
            let key = self.hellos_made;
            self.hellos_made += 1;
            if let Err(error) = self.watch(&socket, Source::Hello(key), EventFlags::IN) {
                tracing::error!(%error, "cannot watch a connection");
                return;
            }
            // The pid is 0 for a process of another PID namespace.
            let pid = rustix::process::Pid::from_raw(peer.pid.as_raw_pid());
            let hello = Hello {
                process: process::of_peer(&socket, pid),
                socket,
                uid,
                deadline: Instant::now() + HELLO_WAIT,
            };
            self.hellos.insert(key, hello);
        }
        // More connections may wait: continue after rings and devices have had their turn.
        self.accept_at = Some(now);
    }

    pub(super) fn hello(&mut self, key: u64) {
        let Some(hello) = self.hellos.get(&key) else {
            return;
        };
        let token = match handoff::read_hello(&hello.socket) {
            Ok(None) => return,
            Ok(Some(token)) => Ok(token),
            Err(fault) => Err(fault),
        };
        let hello = self.hellos.remove(&key).expect("just seen");
        let _ = epoll::delete(&self.epoll, &hello.socket);
        let attached = token.and_then(|token| {
            let found = self.sessions.iter().find(|(_, s)| s.token == token);
            let (id, session) = found.ok_or_else(|| {
                let what = format!(
                    "no session has this token: the token is wrong, its session has ended, or the descriptors were fetched more than {} s \
                     after the session was opened",
                    ATTACH_WAIT.as_secs()
                );
                Fault::new(FaultKind::NotFound, what)
            })?;
            if session.peer.uid != hello.uid {
                let what = format!(
                    "the session belongs to uid {}, you are uid {}",
                    session.peer.uid, hello.uid
                );
                return Err(Fault::new(FaultKind::Denied, what));
            }
            let SessionState::Offered { made, .. } = &session.state else {
                let what =
                    "the session's descriptors have already been handed out, or do not exist yet";
                return Err(Fault::new(FaultKind::Busy, what));
            };
            handoff::send(&hello.socket, DriverSession::offered(made)).map_err(|error| {
                let what = format!("handing out descriptors: {error}");
                Fault::new(FaultKind::Protocol, what)
            })?;
            Ok(*id)
        });
        match attached {
            Ok(id) => self.attach(id, hello),
            Err(fault) => {
                tracing::warn!(uid = hello.uid, %fault, "refused descriptors");
                handoff::refuse(&hello.socket, &fault);
            }
        }
    }

    fn attach(&mut self, id: SessionId, hello: Hello) {
        let session = self.sessions.get_mut(&id).expect("just seen");
        let SessionState::Offered { made, .. } =
            std::mem::replace(&mut session.state, SessionState::Dropped)
        else {
            unreachable!("just seen");
        };
        tracing::info!(
            parent: &session.span,
            uid = session.peer.uid,
            pid = session.peer.pid,
            host_memory = %ApproxBytes(made.arena.bytes() as u64),
            "session begins"
        );
        self.events.push_back(Event::Attached { session: id });
        self.begin(id, made, hello.socket, hello.process);
    }

    /// Starts to serve a session whose process has the descriptors.
    pub(super) fn begin(
        &mut self,
        id: SessionId,
        made: Box<SessionMemory>,
        life_line: OwnedFd,
        process: Option<OwnedFd>,
    ) {
        // Edge-triggered: each write to the doorbell is an event, and the eventfd need not be read.
        let edge = EventFlags::IN | EventFlags::ET;
        let doorbell = self.watch(&made.submission_doorbell, Source::Doorbell(id), edge);
        let line = self.watch(&life_line, Source::LifeLine(id), EventFlags::IN);
        let watched = doorbell.and(line).and_then(|()| match &process {
            Some(process) => self.watch(process, Source::LifeLine(id), EventFlags::IN),
            None => Ok(()),
        });
        let session = self.sessions.get_mut(&id).expect("just seen");
        session.state = SessionState::Attached {
            made,
            life_line,
            process,
        };
        if let Err(error) = watched {
            self.gone(id, &error.to_string());
            return;
        }
        // Entries may have been submitted before the doorbell was watched.
        self.busy.push_back(id);
    }

    /// Closes connections and sessions whose time limit has passed.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        let epoll = &self.epoll;
        self.hellos.retain(|_, hello| {
            let keep = hello.deadline > now;
            if !keep {
                let _ = epoll::delete(epoll, &hello.socket);
            }
            keep
        });
        let late: Vec<_> = self
            .sessions
            .iter()
            .filter(|(_, s)| matches!(s.state, SessionState::Offered { deadline, .. } if deadline <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.gone(id, "its process did not fetch the descriptors");
        }
    }
}
