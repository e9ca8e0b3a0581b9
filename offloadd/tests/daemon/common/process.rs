//! A process's side by hand: calls, a session's memory and rings, one operation at a time.

use std::path::Path;
use std::time::{Duration, Instant};

use offload_api::checksum::checksum;
use offload_api::fault::Fault;
use offload_api::handoff::{self, HandoffError, ReceivedDescriptors};
use offload_api::ids::{Epoch, Generation, SessionToken, SlotIndex, TicketId, TileIndex};
use offload_api::proto::offload_client::OffloadClient;
use offload_api::proto::{self, OpenSessionRequest};
use offload_api::ring::entry::{Cqe, Priority, Request, Verb};
use offload_api::ring::{ProcessRings, RingMap};
use offload_api::{PROTOCOL_VERSION, geometry};
use tonic::transport::{Channel, Endpoint};

/// A connection for calls, one at a time.
pub(crate) struct Control {
    pub(super) runtime: tokio::runtime::Runtime,
    pub(super) client: OffloadClient<Channel>,
}

/// Makes one blocking call.
macro_rules! call {
    ($name:ident, $request:ty, $reply:ty) => {
        pub(crate) fn $name(&mut self, request: $request) -> Result<$reply, Fault> {
            let answer = self.runtime.block_on(async {
                tokio::time::timeout(Duration::from_secs(60), self.client.$name(request))
                    .await
                    .expect("an answer within a minute")
            });
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| Fault::from(&status))
        }
    };
}

impl Control {
    pub(crate) fn connect(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self {
            runtime,
            client: OffloadClient::new(channel),
        }
    }

    call!(describe, proto::DescribeRequest, proto::DescribeReply);
    call!(
        open_session,
        proto::OpenSessionRequest,
        proto::OpenSessionReply
    );
    call!(
        define_tiles,
        proto::DefineTilesRequest,
        proto::DefineTilesReply
    );
    call!(reattach, proto::ReattachRequest, proto::ReattachReply);
    call!(resume, proto::ResumeRequest, proto::ResumeReply);
    call!(commit, proto::CommitRequest, proto::CommitReply);
}

pub(crate) fn open_sized(job: &str, slot_bytes: u64) -> OpenSessionRequest {
    OpenSessionRequest {
        protocol_version: PROTOCOL_VERSION,
        job: job.into(),
        rank: 0,
        local_ranks: 1,
        classes: vec![proto::SlotClass {
            slot_bytes,
            slot_count: 4,
        }],
        iodepth: 4,
    }
}

/// A process's side of one session.
pub(crate) struct Session {
    pub(crate) token: Vec<u8>,
    pub(crate) epoch: Epoch,
    pub(crate) geometry: geometry::Geometry,
    pub(crate) rings: ProcessRings,
    pub(crate) received: ReceivedDescriptors,
}

impl Session {
    /// Attaches to a session whose four slots have this size.
    pub(crate) fn attach_sized(
        reply: &proto::OpenSessionReply,
        slot_bytes: u64,
    ) -> Result<Self, HandoffError> {
        let class = geometry::SlotClass {
            slot_bytes,
            slot_count: 4,
        };
        Self::attach_of(reply, class)
    }

    /// Attaches to a session whose slots are all of `class`.
    pub(crate) fn attach_of(
        reply: &proto::OpenSessionReply,
        class: geometry::SlotClass,
    ) -> Result<Self, HandoffError> {
        let token = SessionToken::from_bytes(&reply.token).unwrap();
        let socket = Path::new(&reply.descriptor_socket);
        let received = handoff::receive(socket, token, Duration::from_secs(60))?;
        Ok(Self {
            token: reply.token.clone(),
            epoch: Epoch(reply.epoch),
            geometry: geometry::Geometry::new(&[class]).unwrap(),
            rings: ProcessRings::new(RingMap::open(&received.ring).unwrap()),
            received,
        })
    }

    /// Defines `count` tiles and resumes from nothing.
    pub(crate) fn begin_sized(&self, control: &mut Control, count: u32, tile_bytes: u32) -> u64 {
        let tiles = (0..count).map(|unit| proto::Tile {
            unit,
            kind: 1,
            elem_offset: 0,
            tile_bytes,
        });
        control
            .define_tiles(proto::DefineTilesRequest {
                token: self.token.clone(),
                layout: b"layout".to_vec(),
                tiles: tiles.collect(),
                durability: 1,
                nodes: 1,
            })
            .unwrap();
        self.resume(control, 0)
    }

    pub(crate) fn resume(&self, control: &mut Control, generation: u64) -> u64 {
        let token = self.token.clone();
        let reply = control.resume(proto::ResumeRequest { token, generation });
        reply.unwrap().working_generation
    }

    pub(crate) fn commit(&self, control: &mut Control, generation: u64, blob: &[u8]) -> u64 {
        let request = proto::CommitRequest {
            token: self.token.clone(),
            generation,
            blob: blob.to_vec(),
        };
        control.commit(request).unwrap().working_generation
    }

    pub(crate) fn submit(&mut self, request: Request) {
        assert!(self.rings.put(&request.to_sqe(self.epoch)).unwrap());
        self.ring();
    }

    pub(crate) fn ring(&self) {
        rustix::io::write(&self.received.submission_doorbell, &1u64.to_ne_bytes()).unwrap();
    }

    /// Returns the next completion; sleeps on the doorbell as a process does.
    pub(crate) fn complete(&mut self) -> Cqe {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(cqe) = self.rings.pop().unwrap() {
                return cqe;
            }
            assert!(Instant::now() < end, "no completion in a minute");
            if readable(&self.received.completion_doorbell, Duration::from_secs(1)) {
                rustix::io::read(&self.received.completion_doorbell, &mut [0u8; 8]).unwrap();
            }
        }
    }

    pub(crate) fn write_slot(&self, offset: u64, bytes: &[u8]) {
        rustix::io::pwrite(&self.received.arena, bytes, offset).unwrap();
    }
}

pub(crate) fn readable(fd: impl std::os::fd::AsFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

/// Waits until `question` returns true.
pub(crate) fn eventually(what: &str, limit: Duration, mut question: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !question() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn swap_out(tile: u32, slot: u32, generation: u64, bytes: &[u8]) -> Request {
    Request {
        ticket: TicketId(u64::from(tile) + 100),
        verb: Verb::SwapOut,
        priority: Priority::Prefetch,
        tile: TileIndex(tile),
        slot: SlotIndex(slot),
        generation: Generation(generation),
        checksum: checksum(bytes),
    }
}

pub(crate) fn swap_in(tile: u32, slot: u32) -> Request {
    Request {
        ticket: TicketId(u64::from(tile) + 200),
        verb: Verb::SwapIn,
        priority: Priority::Prefetch,
        generation: Generation(0),
        checksum: 0,
        tile: TileIndex(tile),
        slot: SlotIndex(slot),
    }
}
