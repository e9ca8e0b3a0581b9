//! The list of the daemon's numbers. A number's line here names its field in messages, its key in JSON, and its metric on the page
//! for Prometheus: [`super::message`], [`super::text`] and `offloadd top --json` go through the list and know no number by name.

use std::time::Duration;

use offload_api::proto;
use prometheus_client::metrics::MetricType;

use super::{DeviceView, JobView, Snapshot};
use crate::core::{CommitState, UserState};

/// What has numbers: the daemon, a device, a user or a job.
pub trait SampleOwner {
    /// Message that carries them.
    type Message: Default;
}

impl SampleOwner for Snapshot {
    type Message = proto::MetricsReply;
}

impl SampleOwner for DeviceView {
    type Message = proto::DeviceMetrics;
}

impl SampleOwner for UserState {
    type Message = proto::UserMetrics;
}

impl SampleOwner for JobView {
    type Message = proto::JobMetrics;
}

/// A number of a `T`.
pub struct Sample<T: SampleOwner> {
    /// Name in JSON.
    pub key: &'static str,
    /// Returns the number.
    pub value: fn(&T) -> Value,
    /// Field of the message; `None` for a number that follows from other parts of the message.
    pub(super) field: Option<MessageField<T>>,
    /// Whether `offloadd top --json` prints it.
    pub in_json: bool,
    /// Metric for Prometheus.
    pub(super) metric: Option<Metric>,
}

/// Copies a number between a `T` and the field of its message.
pub(super) struct MessageField<T: SampleOwner> {
    pub(super) write: fn(&T, &mut T::Message),
    pub(super) read: fn(&mut T, &T::Message),
}

/// A number, with the unit that decides how it is printed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A count, bytes, or a weight; absent if it is unknown.
    Count(Option<u64>),
    /// Whether something is so.
    Flag(bool),
    /// A time.
    Time(Duration),
}

/// A metric on the page for Prometheus.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metric {
    pub(super) kind: MetricType,
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) unit: Option<MetricUnit>,
}

/// Unit at the end of a metric's name.
#[derive(Clone, Copy, Debug)]
pub(super) enum MetricUnit {
    Bytes,
    Seconds,
}

impl Value {
    /// Value in the units of Prometheus: times in seconds.
    pub(super) fn to_f64(self) -> Option<f64> {
        match self {
            Self::Count(count) => count.map(|count| count as f64),
            Self::Flag(is_set) => Some(f64::from(u8::from(is_set))),
            Self::Time(time) => Some(time.as_secs_f64()),
        }
    }
}

/// A number's type here, and the type `P` of its field in the message.
trait Number<P>: Copy {
    fn to_value(self) -> Value;
    fn to_field(self) -> P;
    fn from_field(field: P) -> Self;
}

macro_rules! number {
    ($type:ty, $number:ident => $value:expr) => {
        impl Number<$type> for $type {
            fn to_value(self) -> Value {
                let $number = self;
                $value
            }

            fn to_field(self) -> $type {
                self
            }

            fn from_field(field: $type) -> Self {
                field
            }
        }
    };
}

number!(u64, count => Value::Count(Some(count)));
number!(u32, count => Value::Count(Some(count.into())));
number!(Option<u64>, count => Value::Count(count));
number!(bool, is_set => Value::Flag(is_set));

/// In nanoseconds.
impl Number<u64> for Duration {
    fn to_value(self) -> Value {
        Value::Time(self)
    }

    fn to_field(self) -> u64 {
        self.as_nanos() as u64
    }

    fn from_field(field: u64) -> Self {
        Self::from_nanos(field)
    }
}

/// A number in a field of its own, here and in the message. Its key in JSON is the message's name for it.
macro_rules! carried {
    ($of:ty, $($path:ident).+ => $field:ident) => {
        Sample::<$of> {
            key: stringify!($field),
            value: |of: &$of| of.$($path).+.to_value(),
            field: Some(MessageField {
                write: |of: &$of, message| message.$field = of.$($path).+.to_field(),
                read: |of: &mut $of, message| of.$($path).+ = Number::from_field(message.$field),
            }),
            in_json: true,
            metric: None,
        }
    };
}

/// A number that follows from other parts of the message.
const fn derived<T: SampleOwner>(key: &'static str, value: fn(&T) -> Value) -> Sample<T> {
    Sample {
        key,
        value,
        field: None,
        in_json: true,
        metric: None,
    }
}

impl<T: SampleOwner> Sample<T> {
    const fn gauge(self, name: &'static str, help: &'static str) -> Self {
        self.with_metric(MetricType::Gauge, name, help, None)
    }

    const fn gauge_in(self, unit: MetricUnit, name: &'static str, help: &'static str) -> Self {
        self.with_metric(MetricType::Gauge, name, help, Some(unit))
    }

    const fn counter(self, name: &'static str, help: &'static str) -> Self {
        self.with_metric(MetricType::Counter, name, help, None)
    }

    const fn counter_in(self, unit: MetricUnit, name: &'static str, help: &'static str) -> Self {
        self.with_metric(MetricType::Counter, name, help, Some(unit))
    }

    const fn with_metric(
        mut self,
        kind: MetricType,
        name: &'static str,
        help: &'static str,
        unit: Option<MetricUnit>,
    ) -> Self {
        self.metric = Some(Metric {
            kind,
            name,
            help,
            unit,
        });
        self
    }

    /// Leaves the number out of the JSON, which has it in another form or not at all.
    const fn not_in_json(mut self) -> Self {
        self.in_json = false;
        self
    }
}

/// Numbers of the whole daemon.
pub static DAEMON: &[Sample<Snapshot>] = &[
    carried!(Snapshot, uptime => uptime_ns).not_in_json().gauge_in(
        MetricUnit::Seconds,
        "offloadd_uptime",
        "Time since the daemon started, when its counters began at 0",
    ),
    carried!(Snapshot, arena_used_bytes => arena_used_bytes).gauge_in(
        MetricUnit::Bytes,
        "offloadd_arena_used",
        "Host memory in use by all sessions",
    ),
    carried!(Snapshot, arena_bytes_max => arena_bytes_max).gauge_in(
        MetricUnit::Bytes,
        "offloadd_arena_max",
        "Limit of the host memory of all sessions together",
    ),
    carried!(Snapshot, session_count => session_count)
        .gauge("offloadd_sessions", "Open sessions, one per process"),
    derived("read_only", |s: &Snapshot| Value::Flag(s.read_only.is_some()))
        .not_in_json()
        .gauge(
            "offloadd_read_only",
            "1 if a device failed a write while the daemon started: the store is read-only until a restart",
        ),
    carried!(Snapshot, rebalance_bytes_per_s_max => rebalance_bytes_per_s_max),
];

/// Numbers of each device.
pub static DEVICE: &[Sample<DeviceView>] = &[
    carried!(DeviceView, queue_depth => queue_depth).gauge(
        "offloadd_device_queue_depth",
        "Operations on the device and in the daemon's queue for it",
    ),
    carried!(DeviceView, queue_depth_max => queue_depth_max).gauge(
        "offloadd_device_queue_depth_max",
        "Maximum of the queue depth since the daemon started",
    ),
    carried!(DeviceView, busy => busy_ns).not_in_json().counter_in(
        MetricUnit::Seconds,
        "offloadd_device_busy",
        "Time with at least one operation on the device",
    ),
    carried!(DeviceView, slow => slow).gauge(
        "offloadd_device_slow",
        "1 while the device is much slower than its measured rates",
    ),
    carried!(DeviceView, damaged_count => damaged_count).counter(
        "offloadd_device_tiles_damaged",
        "Tiles whose checksum did not match when they were read",
    ),
    derived("data_bytes", |d: &DeviceView| {
        Value::Count(Some(d.state.data_bytes))
    }).gauge_in(
        MetricUnit::Bytes,
        "offloadd_device_data",
        "Space for tiles on the device",
    ),
    derived("free_bytes", |d: &DeviceView| {
        Value::Count(Some(d.state.free_bytes))
    }).gauge_in(
        MetricUnit::Bytes,
        "offloadd_device_free",
        "Space for tiles that no job has reserved",
    ),
    derived("left_bytes", |d: &DeviceView| {
        Value::Count(Some(d.state.status.left_bytes))
    })
    .gauge_in(
        MetricUnit::Bytes,
        "offloadd_device_to_move",
        "Bytes still to be moved to the device after it was added, or from it while it is drained",
    ),
    derived("stuck", |d: &DeviceView| {
        Value::Flag(d.state.status.is_stuck())
    })
    .not_in_json()
    .gauge(
        "offloadd_device_stuck",
        "1 while tiles that should move to or from the device do not; offloadd top shows the reason",
    ),
    derived("trouble", |d: &DeviceView| Value::Flag(d.trouble.is_some()))
        .not_in_json()
        .gauge(
            "offloadd_device_trouble",
            "1 while the device hangs or its file is deleted; offloadd top shows the reason",
        ),
    derived("waits_for_start", |d: &DeviceView| {
        Value::Flag(d.state.status.waits_for_start)
    })
    .gauge(
        "offloadd_device_waits_for_start",
        "1 while a drained device holds only what moves at the next start of offloadd",
    ),
    derived("measured_read_bytes_per_s", |d: &DeviceView| {
        Value::Count(Some(d.state.read_bytes_per_s))
    })
    .gauge(
        "offloadd_device_measured_read_bytes_per_second",
        "Read rate measured by format or calibrate; 0 if unknown",
    ),
    derived("measured_write_bytes_per_s", |d: &DeviceView| {
        Value::Count(Some(d.state.write_bytes_per_s))
    })
    .gauge(
        "offloadd_device_measured_written_bytes_per_second",
        "Write rate measured by format or calibrate; 0 if unknown",
    ),
];

/// Numbers of each user.
pub static USER: &[Sample<UserState>] = &[
    carried!(UserState, weight => weight).gauge(
        "offloadd_user_weight",
        "Weight of the user's bandwidth relative to other users",
    ),
    carried!(UserState, host_bytes => host_bytes).gauge_in(
        MetricUnit::Bytes,
        "offloadd_user_host",
        "Host memory of the user's sessions",
    ),
    carried!(UserState, host_bytes_max => host_bytes_max).gauge_in(
        MetricUnit::Bytes,
        "offloadd_user_host_max",
        "Quota of the host memory of the user's sessions; absent without one",
    ),
    carried!(UserState, device_bytes => device_bytes).gauge_in(
        MetricUnit::Bytes,
        "offloadd_user_reserved",
        "Space that the user's jobs and sessions have reserved on all devices",
    ),
    carried!(UserState, device_bytes_max => device_bytes_max).gauge_in(
        MetricUnit::Bytes,
        "offloadd_user_reserved_max",
        "Quota of the space that the user's jobs reserve on all devices; absent without one",
    ),
    carried!(UserState, session_count => session_count)
        .gauge("offloadd_user_sessions", "Open sessions of the user"),
    carried!(UserState, sessions_max => sessions_max)
        .gauge("offloadd_user_sessions_max", "Quota of the user's sessions"),
    carried!(UserState, job_count => job_count).gauge(
        "offloadd_user_jobs",
        "Jobs of the user in the store, open or not",
    ),
    carried!(UserState, jobs_max => jobs_max).gauge(
        "offloadd_user_jobs_max",
        "Quota of the user's jobs in the store",
    ),
];

/// Numbers of each job.
pub static JOB: &[Sample<JobView>] = &[
    carried!(JobView, commit_failed_count => commit_failed_count)
        .counter("offloadd_job_commits_failed", "Commit calls that failed"),
    carried!(JobView, damaged_count => damaged_count).counter(
        "offloadd_job_tiles_damaged",
        "Tiles whose checksum did not match when they were read",
    ),
    carried!(JobView, state.weights.job => weight).gauge(
        "offloadd_job_weight",
        "Weight of the job's bandwidth relative to its user's other jobs",
    ),
    carried!(JobView, state.session_count => session_count)
        .gauge("offloadd_job_sessions", "Open sessions of the job"),
    carried!(JobView, state.arena_bytes => arena_bytes).gauge_in(
        MetricUnit::Bytes,
        "offloadd_job_arena",
        "Host memory of the job's sessions",
    ),
    carried!(JobView, state.reserved_bytes => reserved_bytes).gauge_in(
        MetricUnit::Bytes,
        "offloadd_job_reserved",
        "Space reserved for the job on all devices",
    ),
    carried!(JobView, state.slot_count => slot_count).gauge(
        "offloadd_job_slots",
        "Slots in the arenas of the job's sessions",
    ),
    carried!(JobView, state.slot_used_count => slot_used_count).gauge(
        "offloadd_job_slots_used",
        "Slots that a tile is read into or written from",
    ),
    carried!(JobView, state.reading_count => reading_count)
        .gauge("offloadd_job_tiles_reading", "Tiles being read"),
    carried!(JobView, state.writing_count => writing_count)
        .gauge("offloadd_job_tiles_writing", "Tiles being written"),
    derived("committing", |job: &JobView| {
        Value::Flag(job.state.commit != CommitState::None)
    })
    .not_in_json()
    .gauge("offloadd_job_committing", "1 while a commit is in progress"),
    carried!(JobView, state.newest_generation => newest_generation)
        .gauge("offloadd_job_generation", "Newest durable generation"),
    carried!(JobView, state.poisoned => poisoned).gauge(
        "offloadd_job_poisoned",
        "1 after a failed flush or record until the job resumes, and while the store is read-only",
    ),
    carried!(JobView, state.weights.user => user_weight),
    carried!(JobView, state.working_generation => working_generation),
];

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use offload_api::BLOCK_BYTES;

    use super::*;
    use crate::core::{DeviceState, DeviceStatus, JobState};
    use crate::metrics::latencies::Latencies;
    use crate::metrics::{Counts, Traffic};
    use crate::quota::Weights;
    use crate::store::definition::JobName;

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

    /// A snapshot in which every number is set.
    pub(in crate::metrics) fn whole() -> Snapshot {
        let state = DeviceState {
            path: "/mnt/a".into(),
            block_bytes: BLOCK_BYTES,
            data_bytes: 7,
            free_bytes: 8,
            read_bytes_per_s: 9,
            write_bytes_per_s: 10,
            status: DeviceStatus::settled(0),
        };
        let counts = Counts {
            read: traffic(11),
            written: traffic(12),
            flushed: traffic(13),
        };
        let device = DeviceView {
            queue_depth: 14,
            queue_depth_max: 15,
            busy: Duration::from_nanos(16),
            slow: true,
            trouble: Some("it hangs".into()),
            damaged_count: 36,
            ..DeviceView::new(state, counts)
        };
        let state = JobState {
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
            ..JobState::new(17, JobName::new("tiny").unwrap())
        };
        let counts = Counts {
            read: traffic(29),
            written: traffic(30),
            flushed: Traffic::default(),
        };
        let job = JobView {
            commits: traffic(31).latencies,
            commit_failed_count: 32,
            damaged_count: 37,
            ..JobView::new(state, counts)
        };
        Snapshot {
            uptime: Duration::from_millis(1234),
            arena_used_bytes: 5,
            arena_bytes_max: 6,
            session_count: 2,
            rebalance_bytes_per_s_max: Some(0),
            read_only: Some("a device".into()),
            devices: vec![device],
            users: vec![UserState {
                uid: 17,
                weight: 300,
                host_bytes: 39,
                host_bytes_max: Some(40),
                device_bytes: 41,
                device_bytes_max: Some(42),
                session_count: 43,
                sessions_max: 44,
                job_count: 45,
                jobs_max: 46,
            }],
            jobs: vec![job],
        }
    }

    #[test]
    fn every_number_has_names_of_its_own_and_comes_back_alone() {
        fn check<T: Clone + SampleOwner>(samples: &[Sample<T>], blank: &T, whole: &T) {
            let keys: HashSet<&str> = samples.iter().map(|sample| sample.key).collect();
            assert_eq!(keys.len(), samples.len());
            let metrics: Vec<_> = samples.iter().filter_map(|one| one.metric).collect();
            let names: HashSet<&str> = metrics.iter().map(|metric| metric.name).collect();
            assert_eq!(names.len(), metrics.len());
            for sample in samples {
                let Some(field) = &sample.field else { continue };
                let (mut message, mut back) = (T::Message::default(), blank.clone());
                (field.write)(whole, &mut message);
                (field.read)(&mut back, &message);
                let is = (sample.value)(&back);
                assert_eq!(is, (sample.value)(whole), "{}", sample.key);
                assert_ne!(is, (sample.value)(blank), "{}: not tested", sample.key);
            }
        }
        let whole = whole();
        check(DAEMON, &Snapshot::default(), &whole);
        let (device, job) = (&whole.devices[0], &whole.jobs[0]);
        let blank = DeviceView::new(device.state.clone(), Counts::default());
        check(DEVICE, &blank, device);
        check(USER, &UserState::default(), &whole.users[0]);
        let state = JobState::new(0, job.state.job.clone());
        check(JOB, &JobView::new(state, Counts::default()), job);
    }
}
