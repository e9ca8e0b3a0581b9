//! Sends arbitrary frames of the handshake, with any number of descriptors: to the daemon as a process's first message, and to a process as the
//! daemon's answer.

#![no_main]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use offloadd::api::handoff;
use offloadd::api::ids::SessionToken;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Answers each process with the next bytes.
struct Answerer {
    path: PathBuf,
    answers: SyncSender<Vec<u8>>,
}

fn answerer() -> &'static Answerer {
    static ANSWERER: OnceLock<Answerer> = OnceLock::new();
    ANSWERER.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("handshake-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = handoff::listen(&path).expect("a socket");
        let (answers, next) = sync_channel::<Vec<u8>>(1);
        std::thread::spawn(move || {
            while let Ok(bytes) = next.recv() {
                let socket = loop {
                    if let Ok(Some((socket, _))) = handoff::accept(&listener) {
                        break socket;
                    }
                    std::thread::yield_now();
                };
                answer(&socket, &bytes);
            }
        });
        Answerer { path, answers }
    })
}

/// Answers with `bytes`. The first byte is the number of descriptors to send along.
fn answer(socket: &OwnedFd, bytes: &[u8]) {
    let Some((count, bytes)) = bytes.split_first() else {
        return;
    };
    let fds: Vec<BorrowedFd> = vec![socket.as_fd(); usize::from(count % 8)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    // A process that has hung up gets no answer.
    let _ = rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    );
}

fuzz_target!(|bytes: &[u8]| {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("sockets");
    if rustix::net::send(&theirs, bytes, SendFlags::NOSIGNAL).is_ok()
        && let Ok(Some(SessionToken(token))) = handoff::read_hello(&ours)
    {
        assert_eq!(&bytes[16..], token, "the token that was sent");
    }
    let answerer = answerer();
    answerer.answers.send(bytes.to_vec()).expect("it answers");
    match handoff::receive(
        &answerer.path,
        SessionToken([7; 16]),
        Duration::from_secs(10),
    ) {
        Ok(received) => assert!(bytes[0] % 8 >= 4, "{received:?} of fewer descriptors"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
