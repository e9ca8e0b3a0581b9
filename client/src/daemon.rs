//! A connection to a daemon without a session: its description and its jobs.

use std::path::Path;
use std::time::Instant;

use offload_api::PROTOCOL_VERSION;
use offload_api::fault::FaultKind;
use offload_api::ids::{Epoch, Generation};
use offload_api::proto;

use crate::control::{BUSY_AGAIN, BUSY_WAIT, Control, LONG_WAIT, SHORT_WAIT};
use crate::session::Attempts;
use crate::types::DeviceInfo;
use crate::{ClientError, convert};

/// A connection to a daemon that speaks this crate's protocol version.
pub struct Daemon {
    pub(crate) control: Control,
    info: DaemonInfo,
}

/// Description of a daemon.
#[derive(Clone, Debug)]
pub struct DaemonInfo {
    /// Incarnation of the daemon.
    pub epoch: Epoch,
    /// Version of the daemon's build.
    pub build: String,
    /// I/O engine, one of [`crate::ENGINES`].
    pub engine: String,
    /// Why the daemon chose this engine.
    pub engine_reason: String,
    /// Devices in the store now.
    pub devices: Vec<DeviceInfo>,
    /// Bytes of host memory that a new session may still take.
    pub arena_free_bytes: u64,
    /// Bytes on all devices that a new job of this user may reserve.
    pub device_free_bytes: u64,
    /// Sessions that this user may still open.
    pub session_free_count: u32,
    /// Whether arenas are locked in memory.
    pub memory_locked: bool,
    /// Cost of unlocked memory and how to lock it; empty when locked.
    pub memory_note: String,
}

/// A job in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSummary {
    /// Name of the job.
    pub job: String,
    /// User the job belongs to.
    pub uid: u32,
    /// Bytes the job reserves on the devices.
    pub reserved_bytes: u64,
    /// Newest committed generation; 0 before the first commit.
    pub newest_generation: Generation,
    /// Whether the job has an open session.
    pub open: bool,
}

impl Daemon {
    /// Connects to the daemon on `socket`.
    ///
    /// # Errors
    /// [`ClientError::Connect`] when nobody listens, [`ClientError::Version`] when another release does, [`ClientError::Busy`] when the
    /// daemon takes no connection.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let began = Instant::now();
        loop {
            let control = Control::connect(socket)?;
            match describe(&control) {
                Ok(info) => return Ok(Self { control, info }),
                // Closed without an answer: the user has too many connections, or the daemon ended, and then the next attempt says so.
                Err(ClientError::DaemonGone { .. }) if began.elapsed() < BUSY_WAIT => {
                    std::thread::sleep(BUSY_AGAIN);
                }
                Err(ClientError::DaemonGone { socket }) => {
                    let waited = began.elapsed();
                    return Err(ClientError::Busy { socket, waited });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Description of the daemon when this connection was made or last asked.
    pub fn info(&self) -> &DaemonInfo {
        &self.info
    }

    /// Asks the daemon for its current description.
    pub fn describe(&mut self) -> Result<&DaemonInfo, ClientError> {
        self.info = describe(&self.control)?;
        Ok(&self.info)
    }

    /// Lists the caller's jobs.
    pub fn jobs(&self) -> Result<Vec<JobSummary>, ClientError> {
        let reply = self
            .control
            .call("ListJobs", SHORT_WAIT, |mut client| async move {
                client.list_jobs(proto::ListJobsRequest {}).await
            })?;
        let jobs = reply.jobs.into_iter().map(|job| JobSummary {
            job: job.job,
            uid: job.uid,
            reserved_bytes: job.reserved_bytes,
            newest_generation: Generation(job.newest_generation),
            open: job.open,
        });
        Ok(jobs.collect())
    }

    /// Deletes a job and returns the bytes freed. Refused while the job has an open session; one that has just ended is waited for.
    pub fn drop_job(&self, job: &str) -> Result<u64, ClientError> {
        let mut attempts = Attempts::begin();
        loop {
            let request = proto::DropJobRequest {
                job: job.into(),
                uid: None,
            };
            let reply = self
                .control
                .call("DropJob", LONG_WAIT, |mut client| async move {
                    client.drop_job(request).await
                });
            match reply {
                Ok(reply) => return Ok(reply.freed_bytes),
                Err(error) if error.fault() == Some(FaultKind::Ending) => {
                    attempts.again_after(error)?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn describe(control: &Control) -> Result<DaemonInfo, ClientError> {
    let reply = control.call("Describe", SHORT_WAIT, |mut client| async move {
        client.describe(proto::DescribeRequest {}).await
    })?;
    if reply.protocol_version != PROTOCOL_VERSION {
        return Err(ClientError::Version {
            ours: PROTOCOL_VERSION,
            theirs: reply.protocol_version,
            build: reply.build,
        });
    }
    let known = reply.devices.into_iter().map(convert::device);
    Ok(DaemonInfo {
        epoch: Epoch(reply.epoch),
        build: reply.build,
        engine: reply.engine,
        engine_reason: reply.engine_reason,
        devices: known.filter(|device| !device.left).collect(),
        arena_free_bytes: reply.arena_free_bytes,
        device_free_bytes: reply.device_free_bytes,
        session_free_count: reply.session_free_count,
        memory_locked: reply.memory_locked,
        memory_note: reply.memory_note,
    })
}
