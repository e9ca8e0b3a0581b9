//! Converts a [`Snapshot`] to a message and back, so that `offloadd top` has the same values as the daemon.

use std::time::Duration;

use offload_api::BLOCK_BYTES;
use offload_api::proto;

use super::{Counts, DeviceView, DeviceWear, JobView, Latencies, Snapshot, Traffic};
use crate::core::{CommitState, DeviceState, DeviceStatus, JobState};
use crate::quota::Weights;
use crate::store::catalog::Phase;
use crate::store::definition::JobName;

impl From<Snapshot> for proto::MetricsReply {
    fn from(snapshot: Snapshot) -> Self {
        Self {
            uptime_ns: snapshot.uptime.as_nanos() as u64,
            arena_used_bytes: snapshot.arena_used_bytes,
            arena_bytes_max: snapshot.arena_bytes_max,
            session_count: snapshot.session_count,
            rebalance_bytes_per_s_max: snapshot.rebalance_bytes_per_s_max,
            read_only: snapshot.read_only,
            devices: snapshot.devices.into_iter().map(Into::into).collect(),
            jobs: snapshot.jobs.into_iter().map(Into::into).collect(),
        }
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
        let Counts {
            read,
            written,
            flushed,
        } = view.counts;
        Self {
            device: Some(view.state.into()),
            read: Some(read.into()),
            written: Some(written.into()),
            flushed: Some(flushed.into()),
            queue_depth: view.queue_depth,
            queue_depth_max: view.queue_depth_max,
            busy_ns: view.busy.as_nanos() as u64,
            slow: view.slow,
            trouble: view.trouble,
            worn_bytes: view.worn_bytes,
            rated_bytes: view.rated_bytes,
            damaged_count: view.damaged_count,
        }
    }
}

impl From<JobView> for proto::JobMetrics {
    fn from(view: JobView) -> Self {
        let state = view.state;
        let (commit, ranks_called, ranks) = match state.commit {
            CommitState::None => (proto::CommitState::None, 0, 0),
            CommitState::Gathering {
                ranks_called,
                ranks,
            } => (proto::CommitState::Gathering, ranks_called, ranks),
            CommitState::Writing => (proto::CommitState::Writing, 0, 0),
        };
        Self {
            uid: state.uid,
            job: state.job.as_str().into(),
            reserved_bytes: state.reserved_bytes,
            session_count: state.session_count,
            arena_bytes: state.arena_bytes,
            slot_count: state.slot_count,
            slot_used_count: state.slot_used_count,
            user_weight: state.weights.user,
            weight: state.weights.job,
            reading_count: state.reading_count,
            writing_count: state.writing_count,
            commit: commit as i32,
            commit_ranks_called: ranks_called,
            commit_ranks: ranks,
            newest_generation: state.newest_generation,
            working_generation: state.working_generation,
            poisoned: state.poisoned,
            read: Some(view.counts.read.into()),
            written: Some(view.counts.written.into()),
            commits: Some(view.commits.into()),
            commit_failed_count: view.commit_failed_count,
            worn_bytes: view.worn_bytes,
            worn: view.worn.into_iter().map(Into::into).collect(),
            damaged_count: view.damaged_count,
            job_id: state.job_id,
        }
    }
}

impl From<DeviceWear> for proto::DeviceWear {
    fn from(DeviceWear { number, bytes }: DeviceWear) -> Self {
        Self { number, bytes }
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
        let devices = message.devices.into_iter().map(TryInto::try_into);
        let jobs = message.jobs.into_iter().map(TryInto::try_into);
        Ok(Self {
            uptime: Duration::from_nanos(message.uptime_ns),
            arena_used_bytes: message.arena_used_bytes,
            arena_bytes_max: message.arena_bytes_max,
            session_count: message.session_count,
            rebalance_bytes_per_s_max: message.rebalance_bytes_per_s_max,
            read_only: message.read_only,
            devices: devices.collect::<Result<_, _>>()?,
            jobs: jobs.collect::<Result<_, _>>()?,
        })
    }
}

impl TryFrom<proto::DeviceMetrics> for DeviceView {
    type Error = Misunderstood;

    fn try_from(message: proto::DeviceMetrics) -> Result<Self, Misunderstood> {
        let device = (message.device).ok_or_else(|| misunderstood("a device without a name"))?;
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
        Ok(Self {
            state: DeviceState {
                status,
                path: device.path,
                block_bytes: BLOCK_BYTES,
                data_bytes: device.data_bytes,
                free_bytes: device.free_bytes,
                read_bytes_per_s: device.read_bytes_per_s,
                write_bytes_per_s: device.write_bytes_per_s,
            },
            counts: Counts {
                read: traffic(message.read)?,
                written: traffic(message.written)?,
                flushed: traffic(message.flushed)?,
            },
            queue_depth: message.queue_depth,
            queue_depth_max: message.queue_depth_max,
            busy: Duration::from_nanos(message.busy_ns),
            slow: message.slow,
            trouble: message.trouble,
            worn_bytes: message.worn_bytes,
            rated_bytes: message.rated_bytes,
            damaged_count: message.damaged_count,
        })
    }
}

impl TryFrom<proto::JobMetrics> for JobView {
    type Error = Misunderstood;

    fn try_from(message: proto::JobMetrics) -> Result<Self, Misunderstood> {
        let commit = match message.commit() {
            proto::CommitState::None => CommitState::None,
            proto::CommitState::Gathering => CommitState::Gathering {
                ranks_called: message.commit_ranks_called,
                ranks: message.commit_ranks,
            },
            proto::CommitState::Writing => CommitState::Writing,
        };
        Ok(Self {
            state: JobState {
                uid: message.uid,
                job: JobName::new(message.job)
                    .map_err(|fault| misunderstood(format!("a job's name ({fault})")))?,
                job_id: message.job_id,
                reserved_bytes: message.reserved_bytes,
                session_count: message.session_count,
                arena_bytes: message.arena_bytes,
                slot_count: message.slot_count,
                slot_used_count: message.slot_used_count,
                weights: Weights {
                    user: message.user_weight,
                    job: message.weight,
                },
                reading_count: message.reading_count,
                writing_count: message.writing_count,
                commit,
                newest_generation: message.newest_generation,
                working_generation: message.working_generation,
                poisoned: message.poisoned,
            },
            counts: Counts {
                read: traffic(message.read)?,
                written: traffic(message.written)?,
                flushed: Traffic::default(),
            },
            commits: latencies(message.commits)?,
            commit_failed_count: message.commit_failed_count,
            worn_bytes: message.worn_bytes,
            worn: (message.worn.into_iter())
                .map(|proto::DeviceWear { number, bytes }| DeviceWear { number, bytes })
                .collect(),
            damaged_count: message.damaged_count,
        })
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
    use super::*;

    fn traffic(seed: u64) -> Traffic {
        let mut latencies = Latencies::default();
        latencies.record(seed * 1_000_003);
        latencies.record(seed * 70_001);
        Traffic {
            bytes: seed,
            failed_count: seed + 1,
            retried_count: seed + 2,
            latencies,
        }
    }

    fn whole() -> Snapshot {
        Snapshot {
            uptime: Duration::from_millis(1234),
            arena_used_bytes: 5,
            arena_bytes_max: 6,
            session_count: 2,
            rebalance_bytes_per_s_max: Some(0),
            read_only: Some("a device".into()),
            devices: vec![DeviceView {
                state: DeviceState {
                    path: "/mnt/a".into(),
                    block_bytes: BLOCK_BYTES,
                    data_bytes: 7,
                    free_bytes: 8,
                    read_bytes_per_s: 9,
                    write_bytes_per_s: 10,
                    status: DeviceStatus::settled(0),
                },
                counts: Counts {
                    read: traffic(11),
                    written: traffic(12),
                    flushed: traffic(13),
                },
                queue_depth: 14,
                queue_depth_max: 15,
                busy: Duration::from_nanos(16),
                slow: true,
                trouble: Some("it hangs".into()),
                worn_bytes: 33,
                rated_bytes: Some(0),
                damaged_count: 36,
            }],
            jobs: vec![JobView {
                state: JobState {
                    uid: 17,
                    job: JobName::new("tiny").unwrap(),
                    job_id: Some(35),
                    reserved_bytes: 18,
                    session_count: 19,
                    arena_bytes: 20,
                    slot_count: 21,
                    slot_used_count: 22,
                    weights: Weights { user: 300, job: 38 },
                    reading_count: 23,
                    writing_count: 24,
                    commit: CommitState::Gathering {
                        ranks_called: 25,
                        ranks: 26,
                    },
                    newest_generation: 27,
                    working_generation: 28,
                    poisoned: true,
                },
                counts: Counts {
                    read: traffic(29),
                    written: traffic(30),
                    flushed: Traffic::default(),
                },
                commits: traffic(31).latencies,
                commit_failed_count: 32,
                worn_bytes: 34,
                worn: vec![DeviceWear {
                    number: 39,
                    bytes: 40,
                }],
                damaged_count: 37,
            }],
        }
    }

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
