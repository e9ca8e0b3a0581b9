//! A fake daemon that keeps tiles in memory and misbehaves as a test tells it, for cases that a real daemon rarely produces.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotClass};
use offload_api::handoff::{self, OfferedDescriptors};
use offload_api::ids::{Epoch, SessionToken, SlotIndex};
use offload_api::proto::offload_server::{Offload, OffloadServer};
use offload_api::proto::{self, *};
use offload_api::ring::entry::{Cqe, Sqe};
use offload_api::ring::{DaemonRings, RingMap};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use tonic::{Request, Response, Status};

pub(crate) const EPOCH: u64 = 0xfeed;
pub(crate) const IODEPTH: u32 = 4;
pub(crate) const DEVICE: &str = "/mnt/fake/tiles";
/// A device that was added after sessions opened.
pub(crate) const LATER_DEVICE: &str = "/mnt/later/tiles";

/// Ways in which the fake differs from a real daemon.
#[derive(Clone, Copy, Default)]
pub(crate) struct Manners {
    /// Protocol version to report instead of the real one.
    pub(crate) version: Option<u32>,
    /// Whether the arena's file can be truncated under the client.
    pub(crate) unsealed_arena: bool,
    /// Whether it describes itself when a session opens, and never again.
    pub(crate) described_once: bool,
    /// Whether it refuses to describe itself once: the first time after the session opened.
    pub(crate) description_refused: bool,
    /// Whether commits are never answered.
    pub(crate) silent_commit: bool,
    /// Whether the answer to the first commit is lost in a restart; `Some(true)`: after the commit was made.
    pub(crate) lost_commit: Option<bool>,
    /// Changes or swallows each completion; gets the correct one.
    pub(crate) answer: Option<fn(Sqe, Cqe) -> Option<Cqe>>,
    /// Bit of the slot's first byte to flip after the work and before the completion.
    pub(crate) flip: u8,
    /// Whether only the first read is flipped.
    pub(crate) flip_once: bool,
    /// Whether it hangs up at the first submission.
    pub(crate) hang_up: bool,
    /// Completion index that it writes at the first submission.
    pub(crate) tail: Option<u32>,
}

pub(crate) struct FakeDaemon {
    pub(crate) socket: PathBuf,
    pub(crate) submissions: Receiver<Sqe>,
    /// Number of calls that asked for its description.
    pub(crate) describe_calls: Arc<AtomicU64>,
    _dir: tempfile::TempDir,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    calls: Option<JoinHandle<()>>,
}

impl FakeDaemon {
    pub(crate) fn start(manners: Manners) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let fds_path = dir.path().join("s.fds");
        let listener = handoff::listen(&fds_path).unwrap();
        let (opened, open) = channel();
        let (seen, submissions) = channel();
        std::thread::spawn(move || serve_session(&listener, &open, &seen, manners));
        let describe_calls = Arc::new(AtomicU64::new(0));
        let service = Service {
            manners,
            fds_path,
            opened: Mutex::new(opened),
            describe_calls: describe_calls.clone(),
            commit_calls: AtomicU64::new(0),
            drop_calls: AtomicU64::new(0),
            committed: AtomicU64::new(0),
        };
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (ready, is_ready) = channel();
        let path = socket.clone();
        let calls = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::bind(path).unwrap();
                ready.send(()).unwrap();
                let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
                let serving = tonic::transport::Server::builder()
                    .add_service(OffloadServer::new(service))
                    .serve_with_incoming(incoming);
                tokio::select! {
                    result = serving => result.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        is_ready.recv().unwrap();
        Self {
            socket,
            submissions,
            describe_calls,
            _dir: dir,
            stop: Some(stop),
            calls: Some(calls),
        }
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.calls.take().unwrap().join().unwrap();
    }
}

/// Serves one session, from the handoff to its end.
fn serve_session(
    listener: &OwnedFd,
    open: &Receiver<Arc<Geometry>>,
    seen: &Sender<Sqe>,
    manners: Manners,
) {
    let Ok(geometry) = open.recv() else { return };
    let memory =
        |name| memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let (arena, ring) = (memory("arena"), memory("ring"));
    rustix::fs::ftruncate(&arena, geometry.arena_bytes()).unwrap();
    if !manners.unsealed_arena {
        rustix::fs::fcntl_add_seals(&arena, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    }
    let mut rings = DaemonRings::new(RingMap::create(&ring, IODEPTH, Epoch(EPOCH)).unwrap());
    let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (submission, completion) = (bell(), bell());
    let line = accept(listener);
    handoff::send(
        &line,
        OfferedDescriptors {
            arena: arena.as_fd(),
            ring: ring.as_fd(),
            submission_doorbell: submission.as_fd(),
            completion_doorbell: completion.as_fd(),
        },
    )
    .unwrap();
    let mut tiles: HashMap<u32, (Vec<u8>, u32, u64)> = HashMap::new();
    let mut read_count = 0;
    loop {
        let mut fds = [
            PollFd::new(&submission, PollFlags::IN),
            PollFd::new(&line, PollFlags::IN | PollFlags::RDHUP),
        ];
        poll(&mut fds, None).unwrap();
        if !fds[1].revents().is_empty() {
            return;
        }
        let _ = rustix::io::read(&submission, &mut [0; 8]);
        while let Some(sqe) = rings.pop().unwrap() {
            let _ = seen.send(sqe);
            if manners.hang_up {
                return;
            }
            if let Some(tail) = manners.tail {
                rustix::io::pwrite(&ring, &tail.to_le_bytes(), 384).unwrap();
                ring_bell(&completion);
                continue;
            }
            let place = geometry.slot_place(SlotIndex(sqe.slot)).unwrap();
            let mut cqe = Cqe {
                ticket: sqe.ticket,
                fault: 0,
                errno: 0,
                device: 0,
                checksum: 0,
                offset: 4096 * u64::from(sqe.tile),
                generation: 0,
                asked_bytes: place.bytes as u32,
                moved_bytes: place.bytes as u32,
                device_ns: 1000,
                reserved: 0,
            };
            if sqe.verb == 2 {
                let mut bytes = vec![0; place.bytes as usize];
                rustix::io::pread(&arena, &mut bytes, place.offset).unwrap();
                tiles.insert(sqe.tile, (bytes, sqe.checksum, sqe.generation));
            } else if let Some((bytes, checksum, generation)) = tiles.get(&sqe.tile) {
                let mut bytes = bytes.clone();
                if !(manners.flip_once && read_count > 0) {
                    bytes[0] ^= manners.flip;
                }
                read_count += 1;
                rustix::io::pwrite(&arena, &bytes, place.offset).unwrap();
                (cqe.checksum, cqe.generation) = (*checksum, *generation);
            }
            let told = manners.answer.map_or(Some(cqe), |answer| answer(sqe, cqe));
            if let Some(cqe) = told {
                rings.put(&cqe).unwrap();
                ring_bell(&completion);
            }
        }
    }
}

fn ring_bell(bell: &OwnedFd) {
    rustix::io::write(bell, &1u64.to_ne_bytes()).unwrap();
}

fn accept(listener: &OwnedFd) -> OwnedFd {
    let readable = |fd: &OwnedFd| {
        poll(&mut [PollFd::new(fd, PollFlags::IN)], None).unwrap();
    };
    readable(listener);
    let (line, _) = handoff::accept(listener).unwrap().unwrap();
    readable(&line);
    assert_eq!(
        handoff::read_hello(&line).unwrap(),
        Some(SessionToken([5; 16]))
    );
    line
}

struct Service {
    manners: Manners,
    fds_path: PathBuf,
    opened: Mutex<Sender<Arc<Geometry>>>,
    describe_calls: Arc<AtomicU64>,
    commit_calls: AtomicU64,
    drop_calls: AtomicU64,
    committed: AtomicU64,
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Offload for Service {
    async fn describe(&self, _: Request<DescribeRequest>) -> Answer<DescribeReply> {
        let before = self.describe_calls.fetch_add(1, Ordering::Relaxed);
        if self.manners.described_once && before > 0 {
            std::future::pending::<()>().await;
        }
        if self.manners.description_refused && before == 1 {
            return Err(Fault::new(FaultKind::Busy, "not now").into());
        }
        let device = |number, path: &str, phase: proto::DevicePhase| proto::Device {
            number,
            path: path.into(),
            phase: phase.into(),
            ..Default::default()
        };
        Ok(Response::new(DescribeReply {
            devices: vec![
                device(0, DEVICE, proto::DevicePhase::Settled),
                device(7, LATER_DEVICE, proto::DevicePhase::Settled),
                device(8, "/mnt/left/tiles", proto::DevicePhase::Left),
            ],
            protocol_version: self
                .manners
                .version
                .unwrap_or(offload_api::PROTOCOL_VERSION),
            build: "0.0.0-fake".into(),
            epoch: EPOCH,
            ..Default::default()
        }))
    }

    async fn open_session(&self, request: Request<OpenSessionRequest>) -> Answer<OpenSessionReply> {
        let classes: Vec<_> = request
            .get_ref()
            .classes
            .iter()
            .map(|c| SlotClass {
                slot_bytes: c.slot_bytes,
                slot_count: c.slot_count,
            })
            .collect();
        let geometry = Arc::new(Geometry::new(&classes).unwrap());
        self.opened.lock().unwrap().send(geometry.clone()).unwrap();
        Ok(Response::new(OpenSessionReply {
            token: vec![5; 16],
            epoch: EPOCH,
            descriptor_socket: self.fds_path.to_str().unwrap().into(),
            arena_bytes: geometry.arena_bytes(),
            ring_entries: IODEPTH,
            iodepth: IODEPTH,
            block_bytes: 4096,
            devices: vec![proto::Device {
                path: DEVICE.into(),
                ..Default::default()
            }],
        }))
    }

    type DescribeJobStream = tokio_stream::Empty<Result<JobRecord, Status>>;

    async fn describe_job(
        &self,
        _: Request<DescribeJobRequest>,
    ) -> Answer<Self::DescribeJobStream> {
        Ok(Response::new(tokio_stream::empty()))
    }

    async fn define_tiles(&self, _: Request<DefineTilesRequest>) -> Answer<DefineTilesReply> {
        Ok(Response::new(DefineTilesReply::default()))
    }

    async fn reserve_scratch(
        &self,
        request: Request<ReserveScratchRequest>,
    ) -> Answer<ReserveScratchReply> {
        let bytes = request.get_ref().tile_bytes.iter().map(|&b| u64::from(b));
        Ok(Response::new(ReserveScratchReply {
            reserved_bytes: bytes.sum(),
        }))
    }

    async fn resume(&self, request: Request<ResumeRequest>) -> Answer<ResumeReply> {
        Ok(Response::new(ResumeReply {
            working_generation: request.get_ref().generation + 1,
        }))
    }

    async fn commit(&self, request: Request<CommitRequest>) -> Answer<CommitReply> {
        if self.manners.silent_commit {
            std::future::pending::<()>().await;
        }
        let generation = request.get_ref().generation;
        let first = self.commit_calls.fetch_add(1, Ordering::Relaxed) == 0;
        let lost = self.manners.lost_commit.filter(|_| first);
        if lost != Some(false) && self.committed.swap(generation, Ordering::Relaxed) == generation {
            return Err(Fault::new(FaultKind::WrongGeneration, "it was made already").into());
        }
        if lost.is_some() {
            return Err(
                Fault::new(FaultKind::Stopping, "offloadd stopped before it answered").into(),
            );
        }
        Ok(Response::new(CommitReply {
            generation,
            confirmed: true,
            working_generation: generation + 1,
        }))
    }

    async fn confirm(&self, _: Request<ConfirmRequest>) -> Answer<ConfirmReply> {
        Ok(Response::new(ConfirmReply {}))
    }

    async fn reattach(&self, _: Request<ReattachRequest>) -> Answer<ReattachReply> {
        Ok(Response::new(ReattachReply {
            epoch: EPOCH,
            working_generation: self.committed.load(Ordering::Relaxed) + 1,
            confirmed: true,
            scratch_count: 0,
            unusable: None,
        }))
    }

    async fn close_session(&self, _: Request<CloseSessionRequest>) -> Answer<CloseSessionReply> {
        Ok(Response::new(CloseSessionReply {}))
    }

    async fn list_jobs(&self, _: Request<ListJobsRequest>) -> Answer<ListJobsReply> {
        Err(Status::unimplemented("the fake keeps no jobs"))
    }

    async fn drop_job(&self, _: Request<DropJobRequest>) -> Answer<DropJobReply> {
        let fault = match self.drop_calls.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Fault::new(FaultKind::Ending, "its last operations are still ending"),
            _ => Fault::new(FaultKind::NotFound, "the fake keeps no jobs"),
        };
        Err(fault.into())
    }

    async fn discard_unreadable(
        &self,
        _: Request<DiscardUnreadableRequest>,
    ) -> Answer<DiscardUnreadableReply> {
        Err(Status::unimplemented("the fake keeps no records"))
    }

    async fn report_damage(&self, _: Request<ReportDamageRequest>) -> Answer<ReportDamageReply> {
        Err(Status::unimplemented("the fake hears nothing"))
    }

    async fn add_device(&self, _: Request<AddDeviceRequest>) -> Answer<AddDeviceReply> {
        Err(Status::unimplemented("the fake has no devices"))
    }

    async fn drain_device(&self, _: Request<DrainDeviceRequest>) -> Answer<DrainDeviceReply> {
        Err(Status::unimplemented("the fake has no devices"))
    }

    async fn limit_moves(&self, _: Request<LimitMovesRequest>) -> Answer<LimitMovesReply> {
        Err(Status::unimplemented("the fake has no devices"))
    }

    async fn metrics(&self, _: Request<MetricsRequest>) -> Answer<MetricsReply> {
        let device = proto::DeviceMetrics {
            device: Some(proto::Device {
                path: DEVICE.into(),
                ..Default::default()
            }),
            trouble: Some("a flush has not ended for 11 s".into()),
            ..proto::DeviceMetrics::default()
        };
        Ok(Response::new(MetricsReply {
            devices: vec![device],
            ..MetricsReply::default()
        }))
    }

    async fn inspect(&self, _: Request<InspectRequest>) -> Answer<InspectReply> {
        Err(Status::unimplemented("the fake holds nothing"))
    }

    type ScrubStream = tokio_stream::Empty<Result<ScrubReply, Status>>;

    async fn scrub(&self, _: Request<ScrubRequest>) -> Answer<Self::ScrubStream> {
        Err(Status::unimplemented("the fake holds nothing"))
    }
}
