//! The gRPC service: checks each message, passes the call to the owner thread, and turns the answer into a reply.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceNumber, Generation, TileIndex};
use offload_api::proto;
use offload_api::{BLOB_BYTES_MAX, PROTOCOL_VERSION};
use tokio::sync::Mutex;
use tokio_stream::Iter;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::checked::{define, invalid, open, token};
use super::job_record;
use super::scrub::{RATE_MIN, Scrubs, Wish};
use crate::arena::LockOutlook;
use crate::core::{Call, DeviceState, Peer, Reply, TileDamage, Viewer};
use crate::device_admission::{self, AdmittedDevice};
use crate::driver::DriverHandle;
use crate::engine::EngineChoice;
use crate::store::definition::JobName;
use crate::store::superblock::StoreId;

/// Facts about the daemon that the core does not know.
#[derive(Clone, Debug)]
pub struct About {
    /// Engine: "uring", "aio" or "psync".
    pub engine: &'static str,
    pub engine_reason: String,
    /// Whether memory can be locked.
    pub lock: LockOutlook,
    /// Socket from which processes fetch descriptors.
    pub descriptor_socket: PathBuf,
    pub store: StoreId,
    /// `sessions_max` of the settings.
    pub sessions_max: u32,
    /// `scrub_bytes_per_s_max` of the settings.
    pub scrub_bytes_per_s_max: u64,
}

type Part = Result<proto::JobRecord, Status>;

#[derive(Debug)]
pub(super) struct Service {
    pub(super) driver: DriverHandle,
    pub(super) about: About,
    pub(super) scrubs: Scrubs,
    /// Lets one device at a time be added.
    pub(super) adding: Mutex<()>,
}

impl Service {
    async fn ask(&self, peer: Peer, call: Call) -> Result<Reply, Fault> {
        let answer = self.driver.call(peer, call)?;
        answer.await.unwrap_or_else(|_| Err(ended_unanswered()))
    }
}

/// Handles a call: checks the message, asks the owner thread, builds the reply.
macro_rules! call {
    ($self:ident, $request:ident, $check:expr, $pattern:pat => $message:expr) => {{
        let peer = peer_of(&$request)?;
        let call = $check($request.into_inner())?;
        match $self.ask(peer, call).await? {
            $pattern => Ok(Response::new($message)),
            other => unreachable!("the core answered another call: {other:?}"),
        }
    }};
}

#[tonic::async_trait]
impl proto::offload_server::Offload for Service {
    async fn describe(
        &self,
        request: Request<proto::DescribeRequest>,
    ) -> Result<Response<proto::DescribeReply>, Status> {
        let about = &self.about;
        let viewer = viewer(peer_of(&request)?);
        call!(self, request, |_| Ok::<_, Fault>(Call::Describe), Reply::Describe(reply) =>
        proto::DescribeReply {
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").into(),
            epoch: reply.epoch.0,
            engine: about.engine.into(),
            engine_reason: about.engine_reason.clone(),
            devices: devices(viewer, reply.devices),
            arena_free_bytes: reply.arena_free_bytes,
            memory_locked: about.lock.can_lock,
            memory_note: about.lock.note.clone(),
            device_free_bytes: reply.device_free_bytes,
            session_free_count: reply.session_free_count,
        })
    }

    async fn open_session(
        &self,
        request: Request<proto::OpenSessionRequest>,
    ) -> Result<Response<proto::OpenSessionReply>, Status> {
        let viewer = viewer(peer_of(&request)?);
        call!(self, request, open, Reply::Open(reply) => proto::OpenSessionReply {
            token: reply.token.0.to_vec(),
            epoch: reply.epoch.0,
            descriptor_socket: self.about.descriptor_socket.display().to_string(),
            arena_bytes: reply.arena_bytes,
            ring_entries: reply.ring_entries,
            iodepth: reply.iodepth,
            block_bytes: reply.block_bytes,
            devices: devices(viewer, reply.devices),
        })
    }

    type DescribeJobStream = Iter<Box<dyn Iterator<Item = Part> + Send>>;

    async fn describe_job(
        &self,
        request: Request<proto::DescribeJobRequest>,
    ) -> Result<Response<Self::DescribeJobStream>, Status> {
        let check = |message: proto::DescribeJobRequest| {
            Ok::<_, Fault>(Call::DescribeJob {
                token: token(&message.token)?,
            })
        };
        call!(self, request, check, Reply::DescribeJob(record) => {
            let parts = record.into_iter().flat_map(|record| job_record::parts(*record));
            tokio_stream::iter(Box::new(parts.map(Ok)) as Box<dyn Iterator<Item = Part> + Send>)
        })
    }

    async fn define_tiles(
        &self,
        request: Request<proto::DefineTilesRequest>,
    ) -> Result<Response<proto::DefineTilesReply>, Status> {
        call!(self, request, define, Reply::Define { reserved_bytes } =>
            proto::DefineTilesReply { reserved_bytes })
    }

    async fn reserve_scratch(
        &self,
        request: Request<proto::ReserveScratchRequest>,
    ) -> Result<Response<proto::ReserveScratchReply>, Status> {
        let check = |message: proto::ReserveScratchRequest| {
            Ok::<_, Fault>(Call::ReserveScratch {
                token: token(&message.token)?,
                tile_bytes: message.tile_bytes,
            })
        };
        call!(self, request, check, Reply::ReserveScratch { reserved_bytes } =>
            proto::ReserveScratchReply { reserved_bytes })
    }

    async fn resume(
        &self,
        request: Request<proto::ResumeRequest>,
    ) -> Result<Response<proto::ResumeReply>, Status> {
        let check = |message: proto::ResumeRequest| {
            Ok::<_, Fault>(Call::Resume {
                token: token(&message.token)?,
                generation: Generation(message.generation),
            })
        };
        call!(self, request, check, Reply::Resume { working_generation } =>
            proto::ResumeReply { working_generation: working_generation.0 })
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::CommitReply>, Status> {
        let check = |message: proto::CommitRequest| {
            if message.blob.len() > BLOB_BYTES_MAX {
                return Err(invalid(format!(
                    "blob of {} bytes exceeds the limit of {BLOB_BYTES_MAX}",
                    message.blob.len()
                )));
            }
            Ok(Call::Commit {
                token: token(&message.token)?,
                generation: Generation(message.generation),
                blob: message.blob,
            })
        };
        call!(self, request, check,
        Reply::Commit { generation, confirmed, working_generation } => proto::CommitReply {
            generation: generation.0,
            confirmed,
            working_generation: working_generation.0,
        })
    }

    async fn confirm(
        &self,
        request: Request<proto::ConfirmRequest>,
    ) -> Result<Response<proto::ConfirmReply>, Status> {
        let check = |message: proto::ConfirmRequest| {
            Ok::<_, Fault>(Call::Confirm {
                token: token(&message.token)?,
                generation: Generation(message.generation),
            })
        };
        call!(self, request, check, Reply::Confirm => proto::ConfirmReply {})
    }

    async fn reattach(
        &self,
        request: Request<proto::ReattachRequest>,
    ) -> Result<Response<proto::ReattachReply>, Status> {
        let check = |message: proto::ReattachRequest| {
            Ok::<_, Fault>(Call::Reattach {
                token: token(&message.token)?,
            })
        };
        call!(self, request, check,
        Reply::Reattach { epoch, working, confirmed, scratch_count, unusable } => proto::ReattachReply {
            epoch: epoch.0,
            working_generation: working.map_or(0, |working| working.0),
            confirmed,
            scratch_count,
            unusable: unusable.map(|Fault { kind, message }| proto::Fault { kind: kind as u32, message }),
        })
    }

    async fn close_session(
        &self,
        request: Request<proto::CloseSessionRequest>,
    ) -> Result<Response<proto::CloseSessionReply>, Status> {
        let check = |message: proto::CloseSessionRequest| {
            Ok::<_, Fault>(Call::Close {
                token: token(&message.token)?,
            })
        };
        call!(self, request, check, Reply::Close => proto::CloseSessionReply {})
    }

    async fn list_jobs(
        &self,
        request: Request<proto::ListJobsRequest>,
    ) -> Result<Response<proto::ListJobsReply>, Status> {
        call!(self, request, |_| Ok::<_, Fault>(Call::ListJobs), Reply::ListJobs(jobs) => {
            let jobs = jobs.into_iter().map(|job| proto::JobSummary {
                job: job.job.as_str().into(),
                uid: job.uid,
                reserved_bytes: job.reserved_bytes,
                newest_generation: job.newest_generation.0,
                open: job.open,
            });
            proto::ListJobsReply { jobs: jobs.collect() }
        })
    }

    async fn drop_job(
        &self,
        request: Request<proto::DropJobRequest>,
    ) -> Result<Response<proto::DropJobReply>, Status> {
        let peer = peer_of(&request)?;
        let check = |message: proto::DropJobRequest| {
            let uid = message.uid.unwrap_or(peer.uid);
            check_owner(peer, uid)?;
            Ok::<_, Fault>(Call::DropJob {
                uid,
                job: JobName::new(message.job)?,
            })
        };
        call!(self, request, check, Reply::DropJob { freed_bytes } =>
            proto::DropJobReply { freed_bytes })
    }

    async fn discard_unreadable(
        &self,
        request: Request<proto::DiscardUnreadableRequest>,
    ) -> Result<Response<proto::DiscardUnreadableReply>, Status> {
        let peer = peer_of(&request)?;
        let check = |message: proto::DiscardUnreadableRequest| {
            let uid = message.uid.unwrap_or(peer.uid);
            check_owner(peer, uid)?;
            Ok::<_, Fault>(Call::DiscardUnreadable {
                uid,
                job: JobName::new(message.job)?,
            })
        };
        call!(self, request, check, Reply::DiscardUnreadable { newest_generation } =>
            proto::DiscardUnreadableReply { newest_generation: newest_generation.0 })
    }

    async fn report_damage(
        &self,
        request: Request<proto::ReportDamageRequest>,
    ) -> Result<Response<proto::ReportDamageReply>, Status> {
        let peer = peer_of(&request)?;
        let message = request.into_inner();
        let damage = TileDamage {
            device: DeviceNumber(message.device),
            offset: message.offset,
            tile: TileIndex(message.tile),
            generation: Generation(message.generation),
            expected: message.expected,
            found: message.found,
        };
        let token = token(&message.token)?;
        match self.ask(peer, Call::ReportDamage { token, damage }).await? {
            Reply::ReportDamage { uid, job, damage } => {
                self.driver.damaged(true, uid, job, damage)?;
            }
            other => unreachable!("the core answered another call: {other:?}"),
        }
        Ok(Response::new(proto::ReportDamageReply {}))
    }

    async fn add_device(
        &self,
        request: Request<proto::AddDeviceRequest>,
    ) -> Result<Response<proto::AddDeviceReply>, Status> {
        let peer = peer_of(&request)?;
        may_administer(peer)?;
        let reply = self.add(peer, request.into_inner()).await?;
        Ok(Response::new(reply))
    }

    async fn drain_device(
        &self,
        request: Request<proto::DrainDeviceRequest>,
    ) -> Result<Response<proto::DrainDeviceReply>, Status> {
        may_administer(peer_of(&request)?)?;
        let check = |message: proto::DrainDeviceRequest| {
            Ok::<_, Fault>(Call::DrainDevice {
                path: message.path,
                rebalance_bytes_per_s_max: checked_rate(message.rebalance_bytes_per_s_max)?,
            })
        };
        call!(self, request, check, Reply::DrainDevice { left_bytes } =>
            proto::DrainDeviceReply { left_bytes })
    }

    async fn limit_moves(
        &self,
        request: Request<proto::LimitMovesRequest>,
    ) -> Result<Response<proto::LimitMovesReply>, Status> {
        may_administer(peer_of(&request)?)?;
        let check = |message: proto::LimitMovesRequest| {
            checked_rate(Some(message.bytes_per_s_max))?;
            let bytes_per_s_max = message.bytes_per_s_max;
            Ok::<_, Fault>(Call::LimitMoves { bytes_per_s_max })
        };
        call!(self, request, check, Reply::LimitMoves => proto::LimitMovesReply {})
    }

    async fn metrics(
        &self,
        request: Request<proto::MetricsRequest>,
    ) -> Result<Response<proto::MetricsReply>, Status> {
        let viewer = viewer(peer_of(&request)?);
        let answer = self.driver.snapshot(viewer)?;
        let snapshot = answer.await.map_err(|_| ended_unanswered())??;
        let mut reply = proto::MetricsReply::from(Arc::unwrap_or_clone(snapshot));
        for device in reply.devices.iter_mut().filter_map(|d| d.device.as_mut()) {
            hide_names(viewer, device);
        }
        Ok(Response::new(reply))
    }

    async fn inspect(
        &self,
        request: Request<proto::InspectRequest>,
    ) -> Result<Response<proto::InspectReply>, Status> {
        let viewer = viewer(peer_of(&request)?);
        let answer = self.driver.contents(viewer)?;
        let jobs = answer.await.map_err(|_| ended_unanswered())?;
        Ok(Response::new(proto::InspectReply {
            jobs: jobs.iter().map(proto::JobContent::from).collect(),
        }))
    }

    type ScrubStream = ReceiverStream<Result<proto::ScrubReply, Status>>;

    async fn scrub(
        &self,
        request: Request<proto::ScrubRequest>,
    ) -> Result<Response<Self::ScrubStream>, Status> {
        let peer = peer_of(&request)?;
        let proto::ScrubRequest { bytes_per_s, job } = request.into_inner();
        if bytes_per_s < RATE_MIN {
            let what = format!("{bytes_per_s} bytes per second is less than {RATE_MIN}");
            return Err(invalid(what).into());
        }
        let wish = Wish {
            uid: peer.uid,
            viewer: viewer(peer),
            job: (!job.is_empty()).then_some(job),
            bytes_per_s,
        };
        let answers = self.scrubs.start(self.driver.clone(), wish)?;
        Ok(Response::new(ReceiverStream::new(answers)))
    }
}

impl Service {
    /// Adds a device. Creating and measuring it takes seconds, so a thread that may block does it.
    async fn add(
        &self,
        peer: Peer,
        request: proto::AddDeviceRequest,
    ) -> Result<proto::AddDeviceReply, Fault> {
        // Two adds of one path would each find the other's device, and two measurements would slow down each other.
        let _turn = self.adding.lock().await;
        let proto::AddDeviceRequest {
            path,
            file_bytes,
            force,
            rebalance_bytes_per_s_max,
        } = request;
        let rebalance_bytes_per_s_max = checked_rate(rebalance_bytes_per_s_max)?;
        let path = PathBuf::from(path);
        if let Reply::Describe(described) = self.ask(peer, Call::Describe).await? {
            let devices = described.devices.into_iter();
            let of_store = devices.filter(|device| device.status.phase.is_some());
            refuse_known(&path, of_store.collect()).await?;
        }
        // Before anything on the device is overwritten.
        let read_only = self.driver.read_only()?;
        if let Some(why) = read_only.await.map_err(|_| ended_unanswered())? {
            return Err(why);
        }
        let (store, engine) = (self.about.store, self.about.engine);
        let engine = EngineChoice::from_name(engine).unwrap_or_default();
        let named = path.clone();
        let device_admission = tokio::task::spawn_blocking(move || {
            device_admission::prepare(&named, file_bytes, force, store, engine)
        });
        let device_admission = device_admission.await.map_err(|_| ended_unanswered())?;
        let AdmittedDevice {
            device,
            mut new,
            moved,
            made,
        } = device_admission.map_err(|error| invalid(error.to_string()))?;
        new.rebalance_bytes_per_s_max = rebalance_bytes_per_s_max;
        let (data_bytes, rates) = (new.data_bytes, new.rates);
        let answer = self
            .driver
            .add_device(peer, device.file().clone(), new, moved);
        let added = match answer {
            Ok(answer) => answer.await.unwrap_or_else(|_| Err(ended_unanswered())),
            Err(fault) => Err(fault),
        };
        match added {
            Ok(Reply::AddDevice { number }) => Ok(proto::AddDeviceReply {
                number,
                data_bytes,
                read_bytes_per_s: rates.read_bytes_per_s,
                write_bytes_per_s: rates.write_bytes_per_s,
            }),
            Ok(other) => unreachable!("the core answered another call: {other:?}"),
            // With any other fault, the catalog may already list the device.
            Err(fault) if made && fault.kind == FaultKind::TooMany => {
                let _ = std::fs::remove_file(path);
                Err(fault)
            }
            Err(fault) => Err(fault),
        }
    }
}

/// Refuses a path that leads to one of `devices`, which are the store's.
async fn refuse_known(path: &Path, devices: Vec<DeviceState>) -> Result<(), Fault> {
    let asked = path.to_owned();
    // Blocking: the path may lead to a drive that hangs.
    let known = tokio::task::spawn_blocking(move || {
        let mut devices = devices.into_iter();
        devices.find(|device| device_admission::is_known(&asked, device))
    });
    match known.await.map_err(|_| ended_unanswered())? {
        Some(known) => Err(invalid(device_admission::known_as(path, &known))),
        None => Ok(()),
    }
}

/// Refuses rates with which moving would take years.
fn checked_rate(bytes_per_s: Option<u64>) -> Result<Option<u64>, Fault> {
    match bytes_per_s {
        Some(rate) if rate < RATE_MIN => Err(invalid(format!(
            "rate limit of {rate} bytes per second is less than {RATE_MIN}"
        ))),
        rate => Ok(rate),
    }
}

fn may_administer(peer: Peer) -> Result<(), Fault> {
    if viewer(peer) == Viewer::All {
        return Ok(());
    }
    let what = format!(
        "uid {} may not change devices: only root and the user who runs offloadd may",
        peer.uid
    );
    Err(Fault::new(FaultKind::Denied, what))
}

/// Answer to a call that the owner thread left unanswered when it ended.
pub(super) fn ended_unanswered() -> Fault {
    let what = "offloadd stopped before it answered; everything committed is safe";
    Fault::new(FaultKind::Stopping, what)
}

/// Converts devices, without what `viewer` may not see.
fn devices(viewer: Viewer, states: Vec<DeviceState>) -> Vec<proto::Device> {
    let seen = |state| {
        let mut device = proto::Device::from(state);
        hide_names(viewer, &mut device);
        device
    };
    states.into_iter().map(seen).collect()
}

/// Replaces a reason that names other users' jobs.
fn hide_names(viewer: Viewer, device: &mut proto::Device) {
    if let (Viewer::Uid(_), Some(stuck)) = (viewer, &mut device.stuck) {
        *stuck = "some of its tiles cannot be moved; the administrator sees which".into();
    }
}

/// Root and the daemon's user see everything, others their own jobs.
fn viewer(peer: Peer) -> Viewer {
    let runs_it = peer.uid == rustix::process::geteuid().as_raw();
    match peer.uid == 0 || runs_it {
        true => Viewer::All,
        false => Viewer::Uid(peer.uid),
    }
}

/// Checks that the caller may change a job of `uid`: its owner, root and the daemon's user may.
fn check_owner(peer: Peer, uid: u32) -> Result<(), Fault> {
    if uid != peer.uid && viewer(peer) != Viewer::All {
        let what = format!(
            "uid {} may not change this job: it belongs to uid {uid}",
            peer.uid
        );
        return Err(Fault::new(FaultKind::Denied, what));
    }
    Ok(())
}

/// Returns the caller, as reported by the kernel when the connection was accepted.
fn peer_of<T>(request: &Request<T>) -> Result<Peer, Fault> {
    request.extensions().get::<Peer>().copied().ok_or_else(|| {
        let what = "unknown user; call over the daemon's unix socket";
        Fault::new(FaultKind::Denied, what)
    })
}
