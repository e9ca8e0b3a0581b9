//! Sessions of four slots and tiles of 4 KiB, which most tests use, and the calls that only they need.

use std::time::Duration;

use offload_api::checksum::checksum;
use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff::HandoffError;
use offload_api::ids::SlotIndex;
use offload_api::proto::{self, OpenSessionRequest};

use super::process::{Control, Session, open_sized, readable, swap_in, swap_out};

impl Control {
    call!(
        reserve_scratch,
        proto::ReserveScratchRequest,
        proto::ReserveScratchReply
    );
    call!(
        report_damage,
        proto::ReportDamageRequest,
        proto::ReportDamageReply
    );
    call!(metrics, proto::MetricsRequest, proto::MetricsReply);
    call!(
        close_session,
        proto::CloseSessionRequest,
        proto::CloseSessionReply
    );

    call!(drop_job, proto::DropJobRequest, proto::DropJobReply);
    call!(
        drain_device,
        proto::DrainDeviceRequest,
        proto::DrainDeviceReply
    );

    pub(crate) fn arena_free_bytes(&mut self) -> u64 {
        self.describe(proto::DescribeRequest {})
            .unwrap()
            .arena_free_bytes
    }

    /// Opens a session of `job` with four slots of 4 KiB, and takes its descriptors.
    pub(crate) fn session(&mut self, job: &str) -> Session {
        let mut tries = 0;
        let reply = loop {
            match self.open_session(open(job)) {
                // As clients do: others of this user have not fetched their descriptors yet.
                Err(fault) if fault.kind == FaultKind::Queued && tries < 1000 => tries += 1,
                reply => break reply.unwrap(),
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        Session::attach(&reply).unwrap()
    }
}

impl Control {
    /// Returns the record of a session's job, assembled from its parts.
    pub(crate) fn job(&mut self, token: &[u8]) -> Option<proto::JobRecord> {
        let request = proto::DescribeJobRequest {
            token: token.to_vec(),
        };
        let (runtime, client) = (&self.runtime, &mut self.client);
        let answer = runtime.block_on(async {
            let mut parts = client.describe_job(request).await?.into_inner();
            let mut whole: Option<proto::JobRecord> = None;
            while let Some(part) = parts.message().await? {
                match &mut whole {
                    None => whole = Some(part),
                    Some(whole) => whole.append(part),
                }
            }
            Ok::<_, tonic::Status>(whole)
        });
        answer.unwrap()
    }
}

pub(crate) fn open(job: &str) -> OpenSessionRequest {
    open_sized(job, 4096)
}

impl Session {
    pub(crate) fn attach(reply: &proto::OpenSessionReply) -> Result<Self, HandoffError> {
        Self::attach_sized(reply, 4096)
    }

    /// Defines `count` tiles of 4 KiB and resumes from nothing.
    pub(crate) fn begin(&self, control: &mut Control, count: u32) -> u64 {
        self.begin_sized(control, count, 4096)
    }

    pub(crate) fn read_slot(&self, offset: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        rustix::io::pread(&self.received.arena, &mut bytes[..], offset).unwrap();
        bytes
    }

    /// Whether the daemon closes its end within `limit`.
    pub(crate) fn hung_up(&self, limit: Duration) -> bool {
        readable(&self.received.life_line, limit)
    }
}

/// Writes `fill` to every tile through slot 1 and waits for each.
pub(crate) fn fill_tiles(session: &mut Session, count: u32, generation: u64, fill: u8) {
    let place = session.geometry.slot_place(SlotIndex(1)).unwrap();
    for tile in 0..count {
        let bytes = [fill.wrapping_add(tile as u8); 4096];
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, 1, generation, &bytes));
        let cqe = session.complete();
        assert_eq!(
            (cqe.ticket, cqe.fault),
            (u64::from(tile) + 100, 0),
            "{cqe:?}"
        );
    }
}

pub(crate) fn expect_tiles(session: &mut Session, count: u32, fill: u8) {
    let place = session.geometry.slot_place(SlotIndex(3)).unwrap();
    for tile in 0..count {
        session.write_slot(place.offset, &[0; 4096]);
        session.submit(swap_in(tile, 3));
        let cqe = session.complete();
        assert_eq!((cqe.fault, cqe.moved_bytes), (0, 4096), "{cqe:?}");
        let bytes = session.read_slot(place.offset);
        assert_eq!(bytes, vec![fill.wrapping_add(tile as u8); 4096]);
        assert_eq!(cqe.checksum, checksum(&bytes));
    }
}
