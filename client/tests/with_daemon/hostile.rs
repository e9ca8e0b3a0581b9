//! Tests with a process that writes arbitrary bytes into its rings, shows another session's token, or sends entries of another incarnation of the
//! daemon: the daemon must not crash, hang or mix up sessions. The process speaks the protocol by hand and writes its memory file with `pwrite`.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::real::*;
use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff::{self, HandoffError, ReceivedDescriptors};
use offload_api::ids::SessionToken;
use offload_api::proto::offload_client::OffloadClient;
use offload_api::proto::{self, OpenSessionReply, OpenSessionRequest};
use offload_api::ring::entry::{Cqe, Sqe, Verb};
use offload_api::ring::{ProcessRings, RingMap};
use offload_client::Daemon;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tonic::transport::{Channel, Endpoint};

/// Offset of the index in the rings' memory file.
const SUBMISSION_TAIL: u64 = 128;
const COMPLETION_HEAD: u64 = 512;

/// A session that uses the protocol directly, without the client's checks.
struct Raw {
    runtime: tokio::runtime::Runtime,
    calls: OffloadClient<Channel>,
    reply: OpenSessionReply,
    fds: ReceivedDescriptors,
    rings: ProcessRings,
}

pub(crate) fn connect(socket: &Path) -> (tokio::runtime::Runtime, OffloadClient<Channel>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
    let channel = runtime.block_on(endpoint.connect()).unwrap();
    (runtime, OffloadClient::new(channel))
}

fn request(job: &str) -> OpenSessionRequest {
    OpenSessionRequest {
        protocol_version: offload_api::PROTOCOL_VERSION,
        job: job.into(),
        rank: 0,
        local_ranks: 1,
        classes: vec![proto::SlotClass {
            slot_bytes: u64::from(TILE_BYTES),
            slot_count: 4,
        }],
        iodepth: 4,
    }
}

fn token(reply: &OpenSessionReply) -> SessionToken {
    SessionToken::from_bytes(&reply.token).unwrap()
}

impl Raw {
    /// Opens a new job, defines its tiles and resumes from nothing.
    fn open(socket: &Path, job: &str) -> Self {
        let (runtime, mut calls) = connect(socket);
        let reply = runtime
            .block_on(calls.open_session(request(job)))
            .unwrap()
            .into_inner();
        let fds =
            handoff::receive(Path::new(&reply.descriptor_socket), token(&reply), LONG).unwrap();
        let rings = ProcessRings::new(RingMap::open(&fds.ring).unwrap());
        let tiles = (0..TILE_COUNT).map(|unit| proto::Tile {
            unit,
            kind: proto::TileKind::State.into(),
            elem_offset: 0,
            tile_bytes: TILE_BYTES,
        });
        let define = proto::DefineTilesRequest {
            token: reply.token.clone(),
            layout: Vec::new(),
            tiles: tiles.collect(),
            durability: proto::Durability::Committed.into(),
            nodes: 1,
        };
        let resume = proto::ResumeRequest {
            token: reply.token.clone(),
            generation: 0,
        };
        runtime.block_on(calls.define_tiles(define)).unwrap();
        runtime.block_on(calls.resume(resume)).unwrap();
        Self {
            runtime,
            calls,
            reply,
            fds,
            rings,
        }
    }

    fn sqe(&self, ticket: u64) -> Sqe {
        Sqe {
            ticket,
            epoch: self.reply.epoch,
            generation: 1,
            tile: 0,
            slot: 0,
            checksum: 0,
            verb: Verb::SwapOut.number(),
            priority: 0,
            reserved: [0; 5],
        }
    }

    fn ring(&self) {
        rustix::io::write(&self.fds.submission_doorbell, &1u64.to_ne_bytes()).unwrap();
    }

    fn submit(&mut self, sqe: Sqe) -> Cqe {
        assert!(self.rings.put(&sqe).unwrap());
        self.ring();
        let until = Instant::now() + LONG;
        loop {
            if let Some(cqe) = self.rings.pop().unwrap() {
                assert_eq!(cqe.ticket, sqe.ticket);
                return cqe;
            }
            assert!(Instant::now() < until, "no completion for {sqe:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn fault(&mut self, sqe: Sqe) -> Option<FaultKind> {
        FaultKind::from_number(self.submit(sqe).fault)
    }

    /// Whether the daemon hangs up within `limit`.
    fn is_evicted(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).unwrap();
        let mut fds = [PollFd::new(
            &self.fds.life_line,
            PollFlags::IN | PollFlags::RDHUP,
        )];
        poll(&mut fds, Some(&limit)).unwrap() > 0
    }
}

#[test]
fn an_entry_of_another_incarnation_of_the_daemon_is_refused() {
    let place = Place::new();
    let daemon = place.start();
    let mut raw = Raw::open(daemon.socket(), "raw");
    let honest = raw.sqe(1);
    let old = Sqe {
        epoch: honest.epoch ^ 1,
        ..honest
    };
    assert_eq!(raw.fault(old), Some(FaultKind::StaleEpoch));
    assert_eq!(raw.fault(honest), None);
}

#[test]
fn without_epochs_the_old_entry_is_believed() {
    let place = Place::new();
    if !daemon_has_hooks(&place) {
        skip_without_hooks();
        return;
    }
    assert_depends_on(
        "hostile::an_entry_of_another_incarnation_of_the_daemon_is_refused",
        "epoch",
    );
}

#[test]
fn without_the_generation_check_a_write_of_another_generation_is_done() {
    let place = Place::new();
    if !daemon_has_hooks(&place) {
        skip_without_hooks();
        return;
    }
    assert_depends_on(
        "hostile::entries_that_name_what_is_not_there_are_refused_and_change_nothing",
        "generation-check",
    );
}

#[test]
fn entries_that_name_what_is_not_there_are_refused_and_change_nothing() {
    let place = Place::new();
    let daemon = place.start();
    let mut raw = Raw::open(daemon.socket(), "raw");
    let sqe = raw.sqe(9);
    let tile = |tile| Sqe { tile, ..sqe };
    let slot = |slot| Sqe { slot, ..sqe };
    let generation = |generation| Sqe { generation, ..sqe };
    let never = Sqe {
        verb: Verb::SwapIn.number(),
        generation: 0,
        ..sqe
    };
    for (sqe, expected) in [
        (tile(TILE_COUNT), FaultKind::UnknownTile),
        (tile(u32::MAX), FaultKind::UnknownTile),
        (slot(4), FaultKind::UnknownSlot),
        (slot(u32::MAX), FaultKind::UnknownSlot),
        (generation(7), FaultKind::WrongGeneration),
        (generation(0), FaultKind::WrongGeneration),
        (never, FaultKind::NeverWritten),
    ] {
        assert_eq!(raw.fault(sqe), Some(expected), "{sqe:?}");
    }
    assert_eq!(raw.fault(sqe), None);
}

#[test]
fn entries_of_no_known_form_end_the_session() {
    let place = Place::new();
    let daemon = place.start();
    let forms: [fn(Sqe) -> Sqe; 4] = [
        |sqe| Sqe { verb: 0, ..sqe },
        |sqe| Sqe {
            verb: u32::MAX,
            ..sqe
        },
        |sqe| Sqe {
            reserved: [0, 1, 0, 0, 0],
            ..sqe
        },
        // A swap in that names a generation.
        |sqe| Sqe { verb: 1, ..sqe },
    ];
    for (nth, form) in forms.into_iter().enumerate() {
        let mut raw = Raw::open(daemon.socket(), &format!("raw-{nth}"));
        let sqe = form(raw.sqe(1));
        assert!(raw.rings.put(&sqe).unwrap());
        raw.ring();
        assert!(raw.is_evicted(LONG), "{sqe:?}");
    }
}

#[test]
fn more_in_flight_than_granted_is_refused_entry_by_entry() {
    let place = Place::new();
    let daemon = place.start();
    let mut raw = Raw::open(daemon.socket(), "raw");
    let count = u64::from(raw.reply.ring_entries);
    assert!(raw.reply.iodepth == 4 && count >= 4);
    // Fill the ring with entries, with different tiles and slots as far as there are enough.
    for ticket in 0..count {
        let sqe = Sqe {
            tile: ticket as u32 % TILE_COUNT,
            slot: ticket as u32 % 4,
            ..raw.sqe(ticket)
        };
        assert!(raw.rings.put(&sqe).unwrap());
    }
    raw.ring();
    let mut kinds = Vec::new();
    let until = Instant::now() + LONG;
    while (kinds.len() as u64) < count {
        assert!(Instant::now() < until, "{kinds:?}");
        while let Some(cqe) = raw.rings.pop().unwrap() {
            kinds.push(FaultKind::from_number(cqe.fault));
        }
    }
    assert!(kinds.contains(&None), "{kinds:?}");
    assert!(
        kinds.iter().flatten().all(|kind| matches!(
            kind,
            FaultKind::TooMany | FaultKind::SlotBusy | FaultKind::TileBusy
        )),
        "{kinds:?}"
    );
}

#[test]
fn impossible_indices_end_that_session_and_no_other() {
    let place = Place::new();
    let daemon = place.start();
    let mut honest = open_new(daemon.socket());
    for (nth, far) in [1u32, 1000, 1 << 31, u32::MAX - 4096]
        .into_iter()
        .enumerate()
    {
        let seed = u64::from(far);
        let raw = Raw::open(daemon.socket(), &format!("tail-{nth}"));
        let tail = raw.reply.ring_entries + far;
        rustix::io::pwrite(&raw.fds.ring, &tail.to_le_bytes(), SUBMISSION_TAIL).unwrap();
        raw.ring();
        assert!(raw.is_evicted(LONG), "submission tail {tail}");
        write(&mut honest, 0..2, seed);

        let mut raw = Raw::open(daemon.socket(), &format!("head-{nth}"));
        rustix::io::pwrite(&raw.fds.ring, &far.to_le_bytes(), COMPLETION_HEAD).unwrap();
        let sqe = raw.sqe(1);
        assert!(raw.rings.put(&sqe).unwrap());
        raw.ring();
        assert!(raw.is_evicted(LONG), "completion head {far}");
        assert_content(&mut honest, 0..2, seed);
    }
}

#[test]
fn a_process_that_scribbles_into_its_rings_harms_only_itself() {
    let place = Place::new();
    let daemon = place.start();
    let mut honest = open_new(daemon.socket());
    let mut state = 88_172_645_463_325_252_u64;
    for round in 0..8 {
        let raw = Raw::open(daemon.socket(), &format!("scribbler-{round}"));
        let until = Instant::now() + Duration::from_millis(100);
        let bytes = rustix::fs::fstat(&raw.fds.ring).unwrap().st_size as u64;
        while Instant::now() < until {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Sets tails a little ahead of heads now and then, so that the daemon also takes changed entries.
            let (offset, value) = match state % 4 {
                0 => (SUBMISSION_TAIL, (state >> 32) % 8),
                _ => (state % (bytes - 8), state.rotate_left(23)),
            };
            rustix::io::pwrite(&raw.fds.ring, &value.to_le_bytes(), offset).unwrap();
            raw.ring();
        }
        write(&mut honest, 0..3, round);
        assert_content(&mut honest, 0..3, round);
    }
    Daemon::connect(daemon.socket()).unwrap();
}

#[test]
fn a_token_is_good_once_and_for_its_session_alone() {
    let place = Place::new();
    let daemon = place.start();
    let mut raw = Raw::open(daemon.socket(), "raw");
    let path = raw.reply.descriptor_socket.clone();
    for token in [SessionToken([0; 16]), token(&raw.reply)] {
        match handoff::receive(Path::new(&path), token, LONG) {
            Err(HandoffError::Refused(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    let commit = proto::CommitRequest {
        token: vec![1; 16],
        generation: 1,
        blob: Vec::new(),
    };
    let status = raw.runtime.block_on(raw.calls.commit(commit)).unwrap_err();
    assert_eq!(Fault::from(&status).kind, FaultKind::NotFound);
    let sqe = raw.sqe(1);
    assert_eq!(raw.fault(sqe), None);
}

#[test]
fn a_process_of_another_version_is_told_both_numbers() {
    let place = Place::new();
    let daemon = place.start();
    let (runtime, mut calls) = connect(daemon.socket());
    let mut request = request("newer");
    request.protocol_version += 1;
    let status = runtime.block_on(calls.open_session(request)).unwrap_err();
    let fault = Fault::from(&status);
    assert_eq!(fault.kind, FaultKind::Version);
    let ours = offload_api::PROTOCOL_VERSION;
    for number in [ours, ours + 1] {
        assert!(fault.message.contains(&number.to_string()), "{fault}");
    }
}
