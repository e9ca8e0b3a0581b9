//! Hands a session its four descriptors over the second unix socket (SOCK_SEQPACKET: a message arrives whole or not at all).
//!
//! ```text
//!   process                                             offloadd
//!   connect ──────────────────────────────────────────▶ accept        (SO_PEERCRED names the uid)
//!   Hello { magic, protocol version, token } 32 bytes ─▶ read_hello
//!   receive ◀─ Answer { magic, version, fault } + words ─ send: + SCM_RIGHTS { arena, ring, 2 doorbells }
//!      │                                                  refuse: the fault and its words, no descriptors
//!      └──── the socket stays open on both sides: its hang-up says that the other side is gone ────
//! ```
//!
//! Promises: no call waits longer than its timeout. A message of another form, length or version is refused with the reason.
//! Descriptors beyond the four are closed.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::PROTOCOL_VERSION;
use crate::fault::{Fault, FaultKind};
use crate::ids::SessionToken;

const MAGIC: [u8; 8] = *b"OFFLHAND";

/// Longer messages of refusals are cut.
const WORDS_BYTES_MAX: usize = 1024;

/// Connections to a socket of the daemon that may wait to be accepted; the kernel's limit (`net.core.somaxconn`) is usually the same. When they
/// are as many, connects fail with EAGAIN or wait.
pub const BACKLOG: i32 = 4096;

/// First message, sent by the process.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Hello {
    magic: [u8; 8],
    protocol_version: u32,
    reserved: u32,
    token: [u8; 16],
}

/// Fixed part of the answer; the message of a refusal follows it.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Answer {
    magic: [u8; 8],
    protocol_version: u32,
    /// 0, or a [`FaultKind`] as a number.
    fault: u32,
}

const _: () = assert!(size_of::<Hello>() == 32 && size_of::<Answer>() == 16);

/// Descriptors that a process receives.
#[derive(Debug)]
pub struct ReceivedDescriptors {
    /// The arena's memory file, sealed against resizing.
    pub arena: OwnedFd,
    /// The memory file of [`crate::ring`], sealed against resizing.
    pub ring: OwnedFd,
    /// Eventfd to which the process adds 1 after it submitted entries. The daemon never empties it.
    pub submission_doorbell: OwnedFd,
    /// Reading end of a pipe, readable after the daemon completed operations; one read empties it. An eventfd would not do:
    /// whoever holds one decides whether writes to it block, and no process may block the daemon.
    pub completion_doorbell: OwnedFd,
    /// Socket to keep open as long as the session lives. It hangs up when the daemon ends or evicts the session.
    pub life_line: OwnedFd,
}

/// Descriptors that the daemon sends, in the order of [`ReceivedDescriptors`].
#[derive(Clone, Copy, Debug)]
pub struct OfferedDescriptors<'fd> {
    /// The arena's memory file.
    pub arena: BorrowedFd<'fd>,
    /// The memory file of the rings.
    pub ring: BorrowedFd<'fd>,
    /// Eventfd that the process signals.
    pub submission_doorbell: BorrowedFd<'fd>,
    /// Reading end of the pipe that the daemon signals.
    pub completion_doorbell: BorrowedFd<'fd>,
}

/// Why no descriptors came.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// The socket cannot be reached.
    #[error(
        "descriptor socket {path}: {action}: {source}; is offloadd running, and may this user open the socket?"
    )]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Step that failed.
        action: &'static str,
        /// Errno of the step.
        source: io::Error,
    },
    /// The daemon refused.
    #[error(transparent)]
    Refused(#[from] Fault),
    /// No answer came in time.
    #[error("descriptor socket {path}: no answer within {} ms: the daemon hangs or is overloaded", waited.as_millis())]
    Timeout {
        /// Path of the socket.
        path: PathBuf,
        /// Time waited.
        waited: Duration,
    },
    /// The daemon hung up.
    #[error(
        "descriptor socket {path}: offloadd hung up without an answer: it is stopping, or another offloadd takes its place"
    )]
    HungUp {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The answer is malformed.
    #[error("descriptor socket {path}: {what}: another program seems to listen there")]
    Malformed {
        /// Path of the socket.
        path: PathBuf,
        /// Defect of the answer.
        what: String,
    },
}

impl From<HandoffError> for Fault {
    fn from(error: HandoffError) -> Self {
        let kind = match &error {
            HandoffError::Refused(fault) => return fault.clone(),
            HandoffError::Socket { .. }
            | HandoffError::Timeout { .. }
            | HandoffError::HungUp { .. } => FaultKind::Stopping,
            HandoffError::Malformed { .. } => FaultKind::Protocol,
        };
        Self::new(kind, error.to_string())
    }
}

/// Shows `token` on the socket at `path` and receives the descriptors, on the side of the process.
///
/// # Errors
/// [`HandoffError::Refused`] with the daemon's fault ([`FaultKind::NotFound`] for an unknown or used token,
/// [`FaultKind::Denied`] for another user's, [`FaultKind::Version`]); the other errors when no daemon answered within
/// `timeout`.
pub fn receive(
    path: &Path,
    token: SessionToken,
    timeout: Duration,
) -> Result<ReceivedDescriptors, HandoffError> {
    let failed = |action| {
        move |errno: Errno| HandoffError::Socket {
            path: path.to_owned(),
            action,
            source: errno.into(),
        }
    };
    let address = SocketAddrUnix::new(path).map_err(failed("name it (at most 107 bytes)"))?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed("make a socket"))?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Send,
        Some(timeout),
    )
    .map_err(failed("set a deadline"))?;
    retry_interrupted(|| rustix::net::connect(&socket, &address)).map_err(failed("connect"))?;
    let hello = Hello {
        magic: MAGIC,
        protocol_version: PROTOCOL_VERSION,
        reserved: 0,
        token: token.0,
    };
    let sent =
        retry_interrupted(|| rustix::net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL));
    match sent {
        // A daemon that refuses at once sent its answer before it hung up.
        Err(Errno::PIPE) => {}
        sent => {
            sent.map_err(failed("send the token"))?;
        }
    }

    wait_for_answer(&socket, timeout, path)?;
    let malformed = |what: String| HandoffError::Malformed {
        path: path.to_owned(),
        what,
    };
    let mut bytes = [0u8; size_of::<Answer>() + WORDS_BYTES_MAX];
    let hung_up = || HandoffError::HungUp {
        path: path.to_owned(),
    };
    let (length, flags, fds) = match receive_message(&socket, &mut bytes) {
        Err(Errno::CONNRESET) => return Err(hung_up()),
        received => received.map_err(failed("receive the descriptors"))?,
    };
    if length == 0 {
        return Err(hung_up());
    }
    let (answer, words) = Answer::read_from_prefix(&bytes[..length])
        .map_err(|_| malformed(format!("an answer of {length} bytes")))?;
    if answer.magic != MAGIC || flags.contains(ReturnFlags::TRUNC) {
        return Err(malformed(
            "the answer does not begin like offloadd's".into(),
        ));
    }
    if answer.fault != 0 {
        let kind = FaultKind::from_number(answer.fault).unwrap_or(FaultKind::Protocol);
        return Err(Fault::new(kind, String::from_utf8_lossy(words)).into());
    }
    if answer.protocol_version != PROTOCOL_VERSION {
        return Err(wrong_version(answer.protocol_version, "the daemon").into());
    }
    let count = fds.len();
    let [arena, ring, submission_doorbell, completion_doorbell]: [OwnedFd; 4] = fds
        .try_into()
        .map_err(|_| malformed(format!("{count} descriptors instead of 4")))?;
    Ok(ReceivedDescriptors {
        arena,
        ring,
        submission_doorbell,
        completion_doorbell,
        life_line: socket,
    })
}

fn wait_for_answer(socket: &OwnedFd, timeout: Duration, path: &Path) -> Result<(), HandoffError> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = rustix::event::Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], wait.as_ref()) {
            Ok(0) => {
                return Err(HandoffError::Timeout {
                    path: path.to_owned(),
                    waited: timeout,
                });
            }
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(HandoffError::Socket {
                    path: path.to_owned(),
                    action: "wait for the answer",
                    source: errno.into(),
                });
            }
        }
    }
}

/// Returns the length and the flags of the message in `bytes`, and its descriptors.
fn receive_message(
    socket: &OwnedFd,
    bytes: &mut [u8],
) -> Result<(usize, ReturnFlags, Vec<OwnedFd>), Errno> {
    // Room for more than four, so that a fifth is noticed and closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut receive_once = || {
        retry_interrupted(|| {
            rustix::net::recvmsg(
                socket,
                &mut [IoSliceMut::new(bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
        })
    };
    // A daemon that hangs up without reading the token resets the connection. The kernel reports that first and once; the
    // answer sent before still waits behind it.
    let message = match receive_once() {
        Err(Errno::CONNRESET) => receive_once(),
        result => result,
    }?;
    let mut fds = Vec::with_capacity(4);
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    Ok((message.bytes, message.flags, fds))
}

/// Listens at `path`, which must not exist, on the side of the daemon. The socket and its connections do not block.
///
/// # Errors
/// The system's errors; `InvalidInput` for a path over 107 bytes.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Returns the next connection and its user; `None` when nobody waits.
///
/// # Errors
/// The system's errors, usually too many open files.
pub fn accept(listener: impl AsFd) -> io::Result<Option<(OwnedFd, rustix::net::UCred)>> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => {
            let peer = rustix::net::sockopt::socket_peercred(&socket)?;
            Ok(Some((socket, peer)))
        }
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the token that a connection shows; `None` when it has not sent one yet. Never waits.
///
/// # Errors
/// [`FaultKind::Version`] with both versions, [`FaultKind::Protocol`] for a malformed message or a hang-up.
pub fn read_hello(socket: impl AsFd) -> Result<Option<SessionToken>, Fault> {
    let protocol = |what: String| Fault::new(FaultKind::Protocol, what);
    // One byte more than a hello, so that a longer message is noticed.
    let mut bytes = [0u8; size_of::<Hello>() + 1];
    let length = match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((length, _)) => length,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => {
            return Err(protocol(format!(
                "reading the token: {}",
                io::Error::from(errno)
            )));
        }
    };
    if length == 0 {
        return Err(protocol("hung up without showing a token".into()));
    }
    let hello = Hello::read_from_bytes(&bytes[..length]).map_err(|_| {
        protocol(format!(
            "a first message of {length} bytes instead of {}",
            size_of::<Hello>()
        ))
    })?;
    if hello.magic != MAGIC {
        return Err(protocol(
            "the first message has the wrong magic number".into(),
        ));
    }
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(wrong_version(hello.protocol_version, "the process"));
    }
    if hello.reserved != 0 {
        return Err(protocol("a reserved field of the hello is not zero".into()));
    }
    Ok(Some(SessionToken(hello.token)))
}

/// Sends the descriptors. Never waits: a socket that is too full for its first answer is an error.
///
/// # Errors
/// The system's errors.
pub fn send(socket: impl AsFd, offered: OfferedDescriptors<'_>) -> io::Result<()> {
    let fds = [
        offered.arena,
        offered.ring,
        offered.submission_doorbell,
        offered.completion_doorbell,
    ];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(
        control.push(SendAncillaryMessage::ScmRights(&fds)),
        "the buffer is made for four descriptors"
    );
    let answer = Answer {
        magic: MAGIC,
        protocol_version: PROTOCOL_VERSION,
        fault: 0,
    };
    send_whole(socket, answer.as_bytes(), &mut control)
}

/// Sends a refusal, if possible: a peer that does not listen is closed anyway.
pub fn refuse(socket: impl AsFd, fault: &Fault) {
    let answer = Answer {
        magic: MAGIC,
        protocol_version: PROTOCOL_VERSION,
        fault: fault.kind as u32,
    };
    let mut bytes = answer.as_bytes().to_vec();
    let words = fault.message.as_bytes();
    bytes.extend_from_slice(&words[..words.len().min(WORDS_BYTES_MAX)]);
    let _ = send_whole(socket, &bytes, &mut SendAncillaryBuffer::default());
}

fn send_whole(
    socket: impl AsFd,
    bytes: &[u8],
    control: &mut SendAncillaryBuffer<'_, '_, '_>,
) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    retry_interrupted(|| {
        rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], control, flags)
    })?;
    Ok(())
}

fn wrong_version(theirs: u32, who: &str) -> Fault {
    Fault::new(
        FaultKind::Version,
        format!(
            "{who} speaks protocol version {theirs}, this side {PROTOCOL_VERSION}: install offloadd and trainer from one release"
        ),
    )
}

/// Repeats an interrupted call, a limited number of times.
fn retry_interrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..100 {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
    Err(Errno::INTR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    const TOKEN: SessionToken = SessionToken([7; 16]);
    const LONG: Duration = Duration::from_secs(5);

    /// A listener at a fresh path, and what `daemon` does with the first connection, while a process calls `receive`.
    fn meet(
        name: &str,
        timeout: Duration,
        daemon: impl FnOnce(OwnedFd) + Send + 'static,
    ) -> Result<ReceivedDescriptors, HandoffError> {
        let path = std::env::temp_dir().join(format!("handoff-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = listen(&path).unwrap();
        let thread = std::thread::spawn(move || {
            wait_readable(&listener);
            let (socket, peer) = accept(&listener).unwrap().unwrap();
            assert_eq!(peer.uid, rustix::process::getuid());
            wait_readable(&socket);
            daemon(socket);
        });
        let received = receive(&path, TOKEN, timeout);
        let _ = std::fs::remove_file(&path);
        thread.join().unwrap();
        received
    }

    fn wait_readable(fd: impl AsFd) {
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let limit = rustix::event::Timespec::try_from(LONG).unwrap();
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1));
    }

    #[test]
    fn four_descriptors_arrive_in_order_and_the_life_line_hangs_up() {
        let received = meet("order", LONG, |socket| {
            assert_eq!(read_hello(&socket), Ok(Some(TOKEN)));
            assert_eq!(read_hello(&socket), Ok(None));
            let [arena, ring] = ["arena", "ring"].map(|name| {
                let fd = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
                rustix::io::write(&fd, name.as_bytes()).unwrap();
                fd
            });
            let [up, down] = [3, 4].map(|n| eventfd(n, EventfdFlags::CLOEXEC).unwrap());
            let offered = OfferedDescriptors {
                arena: arena.as_fd(),
                ring: ring.as_fd(),
                submission_doorbell: up.as_fd(),
                completion_doorbell: down.as_fd(),
            };
            send(&socket, offered).unwrap();
        })
        .unwrap();
        let mut bytes = [0; 8];
        assert_eq!(
            rustix::io::pread(&received.arena, &mut bytes, 0).unwrap(),
            5
        );
        assert_eq!(&bytes[..5], b"arena");
        assert_eq!(rustix::io::pread(&received.ring, &mut bytes, 0).unwrap(), 4);
        for (doorbell, count) in [
            (&received.submission_doorbell, 3u64),
            (&received.completion_doorbell, 4),
        ] {
            assert_eq!(rustix::io::read(doorbell, &mut bytes).unwrap(), 8);
            assert_eq!(u64::from_ne_bytes(bytes), count);
        }
        // The daemon's end is closed by now.
        wait_readable(&received.life_line);
        let end = rustix::net::recv(&received.life_line, &mut bytes, RecvFlags::empty());
        assert_eq!(end.unwrap().0, 0);
    }

    #[test]
    fn a_refusal_arrives_as_the_fault_it_was() {
        let fault = Fault::new(
            FaultKind::Denied,
            "the session belongs to uid 7, not to uid 8",
        );
        let sent = fault.clone();
        let error = meet("refused", LONG, move |socket| refuse(&socket, &sent)).unwrap_err();
        assert_eq!(Fault::from(error), fault);
    }

    #[test]
    fn fewer_descriptors_a_silent_daemon_and_a_hang_up_are_errors() {
        let error = meet("few", LONG, |socket| {
            let answer = Answer {
                magic: MAGIC,
                protocol_version: PROTOCOL_VERSION,
                fault: 0,
            };
            let control = &mut SendAncillaryBuffer::default();
            send_whole(&socket, answer.as_bytes(), control).unwrap();
        });
        assert!(
            matches!(error, Err(HandoffError::Malformed { what, .. }) if what.contains("0 descriptors"))
        );
        let error = meet("hangup", LONG, drop);
        assert!(matches!(error, Err(HandoffError::HungUp { .. })));
        let error = meet("silent", Duration::from_millis(50), |socket| {
            std::thread::sleep(Duration::from_millis(300));
            drop(socket);
        });
        assert!(matches!(error, Err(HandoffError::Timeout { .. })));
    }

    #[test]
    fn a_hello_of_another_version_or_form_is_refused_by_name() {
        let hello = Hello {
            magic: MAGIC,
            protocol_version: PROTOCOL_VERSION,
            reserved: 0,
            token: TOKEN.0,
        };
        let answer = |bytes: &[u8]| {
            let (a, b) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            rustix::net::send(&a, bytes, SendFlags::empty()).unwrap();
            read_hello(&b)
        };
        assert_eq!(answer(hello.as_bytes()), Ok(Some(TOKEN)));
        let other = Hello {
            protocol_version: 99,
            ..hello
        };
        let fault = answer(other.as_bytes()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Version);
        assert!(
            fault.message.contains("99") && fault.message.contains(&PROTOCOL_VERSION.to_string()),
            "{fault}"
        );
        let hostile = [
            &hello.as_bytes()[..31],
            &[hello.as_bytes(), &[0]].concat(),
            &[0; 32],
            Hello {
                reserved: 1,
                ..hello
            }
            .as_bytes(),
            b"GET / HTTP/1.1\r\n\r\n",
        ]
        .map(|bytes| answer(bytes).unwrap_err().kind);
        assert_eq!(hostile, [FaultKind::Protocol; 5]);
    }
}
