//! Converts a [`Snapshot`] to a message and back, so that `offloadd top` has the same values as the daemon. The fields of
//! numbers are in [`samples`].

use offload_api::BLOCK_BYTES;
use offload_api::proto;

use super::samples::{self, Sample, SampleOwner};
use super::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use crate::core::{CommitState, DeviceState, DeviceStatus, JobState, UserState};
use crate::store::catalog::Phase;
use crate::store::definition::JobName;

/// Writes the numbers of `of` to its message.
fn write<T: SampleOwner>(samples: &[Sample<T>], of: &T, message: &mut T::Message) {
    for field in samples.iter().filter_map(|sample| sample.field.as_ref()) {
        (field.write)(of, message);
    }
}

/// Sets the numbers of `of` to those of its message.
fn read<T: SampleOwner>(samples: &[Sample<T>], of: &mut T, message: &T::Message) {
    for field in samples.iter().filter_map(|sample| sample.field.as_ref()) {
        (field.read)(of, message);
    }
}

impl From<Snapshot> for proto::MetricsReply {
    fn from(snapshot: Snapshot) -> Self {
        let mut message = Self::default();
        write(samples::DAEMON, &snapshot, &mut message);
        message.read_only = snapshot.read_only;
        message.devices = snapshot.devices.into_iter().map(Into::into).collect();
        message.users = snapshot.users.into_iter().map(Into::into).collect();
        message.jobs = snapshot.jobs.into_iter().map(Into::into).collect();
        message
    }
}

impl From<UserState> for proto::UserMetrics {
    fn from(state: UserState) -> Self {
        let mut message = Self::default();
        write(samples::USER, &state, &mut message);
        message.uid = state.uid;
        message
    }
}

impl From<DeviceState> for proto::Device {
    fn from(state: DeviceState) -> Self {
        Self {
            path: state.path,
            block_bytes: state.block_bytes,
            data_bytes: state.data_bytes,
            free_bytes: state.free_bytes,
            read_bytes_per_s: state.read_bytes_per_s,
            write_bytes_per_s: state.write_bytes_per_s,
            number: state.status.number,
            phase: match state.status.phase {
                None => proto::DevicePhase::Left,
                Some(Phase::Settled) => proto::DevicePhase::Settled,
                Some(Phase::Filling) => proto::DevicePhase::Filling,
                Some(Phase::Draining) => proto::DevicePhase::Draining,
            } as i32,
            left_bytes: state.status.left_bytes,
            stuck: state.status.stuck,
            waits_for_start: state.status.waits_for_start,
        }
    }
}

impl From<DeviceView> for proto::DeviceMetrics {
    fn from(view: DeviceView) -> Self {
        let mut message = Self::default();
        write(samples::DEVICE, &view, &mut message);
        message.device = Some(view.state.into());
        message.read = Some(view.counts.read.into());
        message.written = Some(view.counts.written.into());
        message.flushed = Some(view.counts.flushed.into());
        message.trouble = view.trouble;
        message
    }
}

impl From<JobView> for proto::JobMetrics {
    fn from(view: JobView) -> Self {
        let mut message = Self::default();
        write(samples::JOB, &view, &mut message);
        let (commit, ranks_called, ranks) = match view.state.commit {
            CommitState::None => (proto::CommitState::None, 0, 0),
            CommitState::Gathering {
                ranks_called,
                ranks,
            } => (proto::CommitState::Gathering, ranks_called, ranks),
            CommitState::Writing => (proto::CommitState::Writing, 0, 0),
        };
        message.uid = view.state.uid;
        message.job = view.state.job.as_str().into();
        message.commit = commit as i32;
        message.commit_ranks_called = ranks_called;
        message.commit_ranks = ranks;
        message.read = Some(view.counts.read.into());
        message.written = Some(view.counts.written.into());
        message.commits = Some(view.commits.into());
        message
    }
}

impl From<Traffic> for proto::Traffic {
    fn from(traffic: Traffic) -> Self {
        Self {
            bytes: traffic.bytes,
            failed_count: traffic.failed_count,
            retried_count: traffic.retried_count,
            latencies: Some(traffic.latencies.into()),
        }
    }
}

impl From<Latencies> for proto::Latencies {
    fn from(latencies: Latencies) -> Self {
        let (first_bucket, counts) = latencies.pack();
        Self {
            sum_ns: latencies.sum_ns(),
            first_bucket,
            counts,
        }
    }
}

/// A message of an incompatible daemon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the daemon's answer has {0}; use offloadd of the same build as the daemon")]
pub struct Misunderstood(String);

fn misunderstood(what: impl Into<String>) -> Misunderstood {
    Misunderstood(what.into())
}

impl TryFrom<proto::MetricsReply> for Snapshot {
    type Error = Misunderstood;

    fn try_from(message: proto::MetricsReply) -> Result<Self, Misunderstood> {
        let mut snapshot = Self::default();
        read(samples::DAEMON, &mut snapshot, &message);
        snapshot.read_only = message.read_only;
        let devices = message.devices.into_iter().map(TryInto::try_into);
        snapshot.devices = devices.collect::<Result<_, _>>()?;
        snapshot.users = message.users.iter().map(UserState::from).collect();
        let jobs = message.jobs.into_iter().map(TryInto::try_into);
        snapshot.jobs = jobs.collect::<Result<_, _>>()?;
        Ok(snapshot)
    }
}

impl From<&proto::UserMetrics> for UserState {
    fn from(message: &proto::UserMetrics) -> Self {
        let mut state = Self {
            uid: message.uid,
            ..Self::default()
        };
        read(samples::USER, &mut state, message);
        state
    }
}

impl TryFrom<proto::DeviceMetrics> for DeviceView {
    type Error = Misunderstood;

    fn try_from(mut message: proto::DeviceMetrics) -> Result<Self, Misunderstood> {
        let device =
            (message.device.take()).ok_or_else(|| misunderstood("a device without a name"))?;
        let status = DeviceStatus {
            number: device.number,
            phase: match device.phase() {
                proto::DevicePhase::Left => None,
                proto::DevicePhase::Settled => Some(Phase::Settled),
                proto::DevicePhase::Filling => Some(Phase::Filling),
                proto::DevicePhase::Draining => Some(Phase::Draining),
            },
            left_bytes: device.left_bytes,
            stuck: device.stuck,
            waits_for_start: device.waits_for_start,
        };
        let state = DeviceState {
            status,
            path: device.path,
            block_bytes: BLOCK_BYTES,
            data_bytes: device.data_bytes,
            free_bytes: device.free_bytes,
            read_bytes_per_s: device.read_bytes_per_s,
            write_bytes_per_s: device.write_bytes_per_s,
        };
        let counts = Counts {
            read: traffic(message.read.take())?,
            written: traffic(message.written.take())?,
            flushed: traffic(message.flushed.take())?,
        };
        let mut view = Self::new(state, counts);
        read(samples::DEVICE, &mut view, &message);
        view.trouble = message.trouble;
        Ok(view)
    }
}

impl TryFrom<proto::JobMetrics> for JobView {
    type Error = Misunderstood;

    fn try_from(mut message: proto::JobMetrics) -> Result<Self, Misunderstood> {
        let commit = match message.commit() {
            proto::CommitState::None => CommitState::None,
            proto::CommitState::Gathering => CommitState::Gathering {
                ranks_called: message.commit_ranks_called,
                ranks: message.commit_ranks,
            },
            proto::CommitState::Writing => CommitState::Writing,
        };
        let name = JobName::new(std::mem::take(&mut message.job))
            .map_err(|fault| misunderstood(format!("a job's name ({fault})")))?;
        let state = JobState {
            commit,
            ..JobState::new(message.uid, name)
        };
        let counts = Counts {
            read: traffic(message.read.take())?,
            written: traffic(message.written.take())?,
            flushed: Traffic::default(),
        };
        let mut view = Self::new(state, counts);
        read(samples::JOB, &mut view, &message);
        view.commits = latencies(message.commits)?;
        Ok(view)
    }
}

fn traffic(message: Option<proto::Traffic>) -> Result<Traffic, Misunderstood> {
    let message = message.unwrap_or_default();
    Ok(Traffic {
        bytes: message.bytes,
        failed_count: message.failed_count,
        retried_count: message.retried_count,
        latencies: latencies(message.latencies)?,
    })
}

fn latencies(message: Option<proto::Latencies>) -> Result<Latencies, Misunderstood> {
    let message = message.unwrap_or_default();
    Latencies::unpack(message.first_bucket, &message.counts, message.sum_ns)
        .ok_or_else(|| misunderstood("latencies in other buckets"))
}

#[cfg(test)]
mod tests {
    use super::super::samples::tests::whole;
    use super::*;

    #[test]
    fn a_snapshot_comes_back_as_it_was() {
        let message = proto::MetricsReply::from(whole());
        assert_eq!(Snapshot::try_from(message), Ok(whole()));
    }

    #[test]
    fn what_another_build_says_is_refused_and_not_guessed() {
        let refused = |change: fn(&mut proto::MetricsReply)| {
            let mut message = proto::MetricsReply::from(whole());
            change(&mut message);
            Snapshot::try_from(message).unwrap_err().to_string()
        };
        let message = refused(|m| m.devices[0].device = None);
        assert!(message.contains("same build"), "{message}");
        refused(|m| m.jobs[0].job = "../x".into());
        refused(|m| m.jobs[0].commits.as_mut().unwrap().first_bucket = 1 << 20);
    }
}
