//! Sends arbitrary bytes to the daemon's sockets. What could go wrong: the daemon panics, hangs, keeps a descriptor or memory for each message, or no
//! longer serves others. The input is drawn from a seed that a failure prints: bytes that are no message at all, and almost valid messages with a
//! good token.

use std::io::{IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, BufMut};
use offload_api::PROTOCOL_VERSION;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use test_hooks::random::SimRandom;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;

use crate::common::{Daemon, Session, Store, eventually, expect_tiles, fill_tiles, open};

const SOON: Duration = Duration::from_secs(60);

/// Messages on the wire.
#[derive(Clone, Copy, Default)]
struct Wire;

impl Codec for Wire {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Wire {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Wire {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut item = vec![0; from.remaining()];
        from.copy_to_slice(&mut item);
        Ok(Some(item))
    }
}

/// Makes something like a protobuf message: any number and form of fields, mostly correct lengths, and sometimes a token.
fn message(random: &mut SimRandom, token: &[u8], depth: usize) -> Vec<u8> {
    let mut message = Vec::new();
    for _ in 0..random.below(6) {
        let field = 1 + random.below(8) as u8;
        let form = [0, 0, 2, 2, 2, 1, 5, 3][random.below(8)];
        message.push(field << 3 | form);
        match form {
            0 => {
                let number = random.number() >> [0, 32, 56, 63][random.below(4)];
                varint(number, &mut message);
            }
            1 => message.extend(random.number().to_le_bytes()),
            5 => message.extend(&random.number().to_le_bytes()[..4]),
            2 => {
                let inner = match random.below(4) {
                    0 => token.to_vec(),
                    1 if depth < 3 => self::message(random, token, depth + 1),
                    2 => b"job".to_vec(),
                    _ => noise(random, 40),
                };
                let lie = if random.one_in(8) {
                    random.number() >> 40
                } else {
                    0
                };
                varint(inner.len() as u64 + lie, &mut message);
                message.extend(inner);
            }
            _ => {}
        }
    }
    message
}

fn varint(mut number: u64, into: &mut Vec<u8>) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

fn noise(random: &mut SimRandom, below: usize) -> Vec<u8> {
    let count = random.below(below);
    (0..count).map(|_| random.number() as u8).collect()
}

const CALLS: [&str; 16] = [
    "Describe",
    "OpenSession",
    "DescribeJob",
    "DefineTiles",
    "ReserveScratch",
    "Resume",
    "Commit",
    "Confirm",
    "CloseSession",
    "ListJobs",
    "DropJob",
    "ReportDamage",
    "Metrics",
    "LimitMoves",
    "Inspect",
    "NoSuchCall",
];

fn descriptor_count(daemon: &Daemon) -> usize {
    let dir = PathBuf::from(format!("/proc/{}/fd", daemon.child.id()));
    std::fs::read_dir(dir).unwrap().count()
}

/// Asserts that another process's session works with its own bytes: before, during and after.
fn others_are_well(daemon: &Daemon, name: &str) {
    let mut control = daemon.control();
    let mut session = control.session(name);
    let working = session.begin(&mut control, 2);
    fill_tiles(&mut session, 2, working, 7);
    expect_tiles(&mut session, 2, 7);
    session.commit(&mut control, working, b"");
}

/// Asserts that the daemon ends in order, with as many descriptors and as much free memory as before.
fn leaves_no_trace(daemon: &mut Daemon, descriptors: usize, free_bytes: u64) {
    let mut control = daemon.control();
    eventually("memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    drop(control);
    eventually("descriptors are closed", SOON, || {
        descriptor_count(daemon) <= descriptors
    });
    assert!(daemon.child.try_wait().unwrap().is_none(), "it has ended");
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn any_message_to_any_call_is_answered_and_harms_nobody() {
    let store = Store::new(1, "auto");
    let mut daemon = store.serve();
    others_are_well(&daemon, "before");
    let free_bytes = daemon.control().arena_free_bytes();
    let descriptors = descriptor_count(&daemon);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let endpoint = Endpoint::from_shared(format!("unix:{}", daemon.socket.display())).unwrap();
    let channel = runtime.block_on(endpoint.connect()).unwrap();
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..60 {
        let mut random = SimRandom::new(seed);
        let mut control = daemon.control();
        let reply = control.open_session(open("hostile")).unwrap();
        for call in CALLS {
            let path = PathAndQuery::try_from(format!("/offload.v1.Offload/{call}")).unwrap();
            let message = match random.one_in(4) {
                true => noise(&mut random, 200),
                false => message(&mut random, &reply.token, 0),
            };
            let mut client = tonic::client::Grpc::new(channel.clone());
            let answer = runtime.block_on(async {
                client.ready().await.unwrap();
                let answer = client.unary(tonic::Request::new(message), path, Wire);
                tokio::time::timeout(Duration::from_secs(60), answer).await
            });
            match answer.unwrap_or_else(|_| panic!("seed {seed}: {call} is never answered")) {
                Ok(_) => taken += 1,
                Err(_) => refused += 1,
            }
        }
        let token = reply.token.clone();
        let _ = control.close_session(offload_api::proto::CloseSessionRequest { token });
        if seed % 20 == 0 {
            others_are_well(&daemon, &format!("other-{seed}"));
        }
    }
    assert!(
        taken > 50 && refused > 200,
        "{taken} taken, {refused} refused"
    );
    drop(channel);
    drop(runtime);
    leaves_no_trace(&mut daemon, descriptors, free_bytes);
}

/// Sends one message with descriptors to the descriptor socket, and hangs up.
fn knock(path: &Path, message: &[u8]) {
    let flags = SocketFlags::CLOEXEC;
    let family = AddressFamily::UNIX;
    let socket = rustix::net::socket_with(family, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let sent = [file.as_fd(), file.as_fd(), file.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
    // The daemon may have hung up already.
    let _ = rustix::net::sendmsg(
        &socket,
        &[IoSlice::new(message)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

/// Sends bytes to the socket for calls.
fn call(path: &Path, bytes: &[u8], random: &mut SimRandom) {
    let mut stream = UnixStream::connect(path).unwrap();
    let _ = stream.write_all(bytes);
    if random.one_in(3) {
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.set_read_timeout(Some(Duration::from_millis(5)));
        let _ = stream.read(&mut [0; 64]);
    }
}

#[test]
fn any_bytes_and_descriptors_on_any_socket_leave_no_trace() {
    let store = Store::new(1, "auto");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let reply = control.open_session(open("waits")).unwrap();
    let descriptor_socket = PathBuf::from(&reply.descriptor_socket);
    let _waits = Session::attach(&reply).unwrap();
    others_are_well(&daemon, "before");
    let free_bytes = control.arena_free_bytes();
    let descriptors = descriptor_count(&daemon);
    let mut random = SimRandom::new(5);
    for round in 0..150 {
        let start: &[u8] = match random.below(3) {
            0 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            1 => b"POST /offload.v1.Offload/Describe HTTP/1.1\r\n",
            _ => b"",
        };
        let bytes = [start, &noise(&mut random, 200)].concat();
        call(&daemon.socket, &bytes, &mut random);
        // With the length and the start of a hello, or not.
        let mut hello = noise(&mut random, 60);
        if random.one_in(2) {
            hello.resize(32, 0);
            hello[..8].copy_from_slice(b"OFFLHAND");
            hello[8] = PROTOCOL_VERSION as u8;
            hello[9..16].fill(0);
        }
        knock(&descriptor_socket, &hello);
        if round % 50 == 0 {
            others_are_well(&daemon, &format!("other-{round}"));
        }
    }
    assert_eq!(control.arena_free_bytes(), free_bytes);
    eventually("descriptors are closed", Duration::from_secs(60), || {
        descriptor_count(&daemon) <= descriptors
    });
    drop(control);
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
}
