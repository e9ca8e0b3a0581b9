//! A [`Snapshot`] as OpenMetrics text for Prometheus. `configs/grafana.json` draws these metrics.
//!
//! Leaves out jobs without a session that moved nothing since the start, because a store may hold a thousand jobs.

use std::collections::BTreeMap;
use std::fmt;
use std::iter;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use crate::core::CommitState;

/// Value of the HTTP header `Content-Type`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Encodes a snapshot as OpenMetrics text.
pub fn text(snapshot: Snapshot) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(snapshot)));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a String takes everything");
    text
}

#[derive(Debug)]
struct Page(Snapshot);

type Labels = Vec<(&'static str, String)>;

/// Samples of a metric: labels and value.
type Lines<V> = Vec<(Labels, V)>;

/// Metric with one number for each `T`: a device, a job, or the snapshot itself.
struct Metric<T> {
    kind: MetricType,
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    value: fn(&T) -> f64,
}

const fn gauge<T>(
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    value: fn(&T) -> f64,
) -> Metric<T> {
    Metric {
        kind: MetricType::Gauge,
        name,
        help,
        unit,
        value,
    }
}

const fn counter<T>(
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    value: fn(&T) -> f64,
) -> Metric<T> {
    Metric {
        kind: MetricType::Counter,
        name,
        help,
        unit,
        value,
    }
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

static WHOLE: [Metric<Snapshot>; 5] = [
    gauge(
        "offloadd_uptime",
        "Time since the daemon started, when its counters began at 0",
        Some(Unit::Seconds),
        |s| s.uptime.as_secs_f64(),
    ),
    gauge(
        "offloadd_arena_used",
        "Host memory in use by all sessions",
        Some(Unit::Bytes),
        |s| s.arena_used_bytes as f64,
    ),
    gauge(
        "offloadd_arena_max",
        "Limit of the host memory of all sessions together",
        Some(Unit::Bytes),
        |s| s.arena_bytes_max as f64,
    ),
    gauge(
        "offloadd_sessions",
        "Open sessions, one per process",
        None,
        |s| s.session_count as f64,
    ),
    gauge(
        "offloadd_read_only",
        "1 if a device failed a write while the daemon started: the store is read-only until a restart",
        None,
        |s| flag(s.read_only.is_some()),
    ),
];

static DEVICE: [Metric<DeviceView>; 14] = [
    gauge(
        "offloadd_device_queue_depth",
        "Operations on the device and in the daemon's queue for it",
        None,
        |d| d.queue_depth as f64,
    ),
    gauge(
        "offloadd_device_queue_depth_max",
        "Maximum of the queue depth since the daemon started",
        None,
        |d| d.queue_depth_max as f64,
    ),
    counter(
        "offloadd_device_busy",
        "Time with at least one operation on the device",
        Some(Unit::Seconds),
        |d| d.busy.as_secs_f64(),
    ),
    gauge(
        "offloadd_device_slow",
        "1 while the device is much slower than its measured rates",
        None,
        |d| flag(d.slow),
    ),
    counter(
        "offloadd_device_worn",
        "Bytes written to the device since it was formatted",
        Some(Unit::Bytes),
        |d| d.worn_bytes as f64,
    ),
    counter(
        "offloadd_device_tiles_damaged",
        "Tiles whose checksum did not match when they were read",
        None,
        |d| d.damaged_count as f64,
    ),
    gauge(
        "offloadd_device_data",
        "Space for tiles on the device",
        Some(Unit::Bytes),
        |d| d.state.data_bytes as f64,
    ),
    gauge(
        "offloadd_device_free",
        "Space for tiles that no job has reserved",
        Some(Unit::Bytes),
        |d| d.state.free_bytes as f64,
    ),
    gauge(
        "offloadd_device_to_move",
        "Bytes still to be moved to the device after it was added, or from it while it is drained",
        Some(Unit::Bytes),
        |d| d.state.status.left_bytes as f64,
    ),
    gauge(
        "offloadd_device_stuck",
        "1 while tiles that should move to or from the device do not; offloadd top shows the reason",
        None,
        |d| flag(d.state.status.is_stuck()),
    ),
    gauge(
        "offloadd_device_trouble",
        "1 while the device hangs or its file is deleted; offloadd top shows the reason",
        None,
        |d| flag(d.trouble.is_some()),
    ),
    gauge(
        "offloadd_device_waits_for_start",
        "1 while a drained device holds only what moves at the next start of offloadd",
        None,
        |d| flag(d.state.status.waits_for_start),
    ),
    gauge(
        "offloadd_device_measured_read_bytes_per_second",
        "Read rate measured by format or calibrate; 0 if unknown",
        None,
        |d| d.state.read_bytes_per_s as f64,
    ),
    gauge(
        "offloadd_device_measured_written_bytes_per_second",
        "Write rate measured by format or calibrate; 0 if unknown",
        None,
        |d| d.state.write_bytes_per_s as f64,
    ),
];

static JOB: [Metric<JobView>; 14] = [
    counter(
        "offloadd_job_commits_failed",
        "Commit calls that failed",
        None,
        |job| job.commit_failed_count as f64,
    ),
    counter(
        "offloadd_job_worn",
        "Bytes written by the job since it was defined, including to devices that have left the store",
        Some(Unit::Bytes),
        |job| job.worn_bytes as f64,
    ),
    counter(
        "offloadd_job_tiles_damaged",
        "Tiles whose checksum did not match when they were read",
        None,
        |job| job.damaged_count as f64,
    ),
    gauge(
        "offloadd_job_weight",
        "Weight of the job's bandwidth relative to its user's other jobs",
        None,
        |job| f64::from(job.state.weights.job),
    ),
    gauge(
        "offloadd_job_sessions",
        "Open sessions of the job",
        None,
        |job| job.state.session_count as f64,
    ),
    gauge(
        "offloadd_job_arena",
        "Host memory of the job's sessions",
        Some(Unit::Bytes),
        |job| job.state.arena_bytes as f64,
    ),
    gauge(
        "offloadd_job_reserved",
        "Space reserved for the job on all devices",
        Some(Unit::Bytes),
        |job| job.state.reserved_bytes as f64,
    ),
    gauge(
        "offloadd_job_slots",
        "Slots in the arenas of the job's sessions",
        None,
        |job| job.state.slot_count as f64,
    ),
    gauge(
        "offloadd_job_slots_used",
        "Slots that a tile is read into or written from",
        None,
        |job| job.state.slot_used_count as f64,
    ),
    gauge(
        "offloadd_job_tiles_reading",
        "Tiles being read",
        None,
        |job| job.state.reading_count as f64,
    ),
    gauge(
        "offloadd_job_tiles_writing",
        "Tiles being written",
        None,
        |job| job.state.writing_count as f64,
    ),
    gauge(
        "offloadd_job_committing",
        "1 while a commit is in progress",
        None,
        |job| flag(job.state.commit != CommitState::None),
    ),
    gauge(
        "offloadd_job_generation",
        "Newest durable generation",
        None,
        |job| job.state.newest_generation as f64,
    ),
    gauge(
        "offloadd_job_poisoned",
        "1 after a failed flush or record until the job resumes, and while the store is read-only",
        None,
        |job| flag(job.state.poisoned),
    ),
];

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let snapshot = &self.0;
        let mut page = Encoder(&mut encoder);
        let build = vec![("version", env!("CARGO_PKG_VERSION").into())];
        page.gauge(
            "offloadd_build_info",
            "Version of offloadd",
            None,
            vec![(build, 1.0)],
        )?;
        page.table(&WHOLE, iter::once(snapshot), |_| Labels::new())?;
        page.devices(&snapshot.devices)?;
        let jobs: Vec<_> = snapshot.jobs.iter().filter(|job| is_shown(job)).collect();
        page.users(&jobs)?;
        page.jobs(&jobs)?;
        page.jobs_on(&jobs, &snapshot.devices)
    }
}

fn job_labels(job: &JobView) -> Labels {
    let state = &job.state;
    vec![
        ("job_name", state.job.as_str().to_owned()),
        ("uid", state.uid.to_string()),
    ]
}

fn is_shown(job: &JobView) -> bool {
    job.state.session_count > 0 || job.counts != Counts::default() || job.commits.count() > 0
}

struct Encoder<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Encoder<'_, '_> {
    fn devices(&mut self, devices: &[DeviceView]) -> fmt::Result {
        let labels = |device: &DeviceView| vec![("device", device.state.path.clone())];
        self.counts("device", devices.iter(), labels, |device| &device.counts)?;
        self.table(&DEVICE, devices.iter(), labels)?;
        let rated = devices
            .iter()
            .filter_map(|d| Some((labels(d), d.rated_bytes? as f64)));
        self.gauge(
            "offloadd_device_rated_written",
            "Rated endurance (rated_tbw in the settings)",
            Some(&Unit::Bytes),
            rated.collect(),
        )?;
        let phases = devices.iter().flat_map(|d| {
            ["settled", "filling", "draining"].map(|phase| {
                let mut labels = labels(d);
                labels.push(("phase", phase.into()));
                (labels, flag(d.state.status.phase_name() == phase))
            })
        });
        self.gauge(
            "offloadd_device_phase",
            "1 for the current phase: settled, filling (added or calibrated, tiles move to it), draining",
            None,
            phases.collect(),
        )
    }

    fn users(&mut self, jobs: &[&JobView]) -> fmt::Result {
        let weights = jobs
            .iter()
            .map(|job| (job.state.uid, job.state.weights.user));
        let weights: BTreeMap<u32, u32> = weights.collect();
        let lines = weights.into_iter();
        let lines = lines.map(|(uid, weight)| (vec![("uid", uid.to_string())], f64::from(weight)));
        self.gauge(
            "offloadd_user_weight",
            "Weight of the user's bandwidth relative to other users",
            None,
            lines.collect(),
        )
    }

    fn jobs(&mut self, jobs: &[&JobView]) -> fmt::Result {
        let each = jobs.iter().copied();
        self.counts("job", each.clone(), job_labels, |job| &job.counts)?;
        self.histogram(
            "offloadd_job_commit",
            "Time from the last rank's commit call until the generation was durable",
            (each.clone())
                .map(|job| (job_labels(job), &job.commits))
                .collect(),
        )?;
        self.table(&JOB, each, job_labels)
    }

    fn jobs_on(&mut self, jobs: &[&JobView], devices: &[DeviceView]) -> fmt::Result {
        let path = |number| {
            let mut devices = devices.iter();
            let found = devices.find(|device| device.state.status.number == number);
            found.map(|device| device.state.path.clone())
        };
        let lines = jobs.iter().flat_map(|job| {
            job.worn.iter().filter_map(|worn| {
                let mut labels = job_labels(job);
                labels.push(("device", path(worn.number)?));
                Some((labels, worn.bytes as f64))
            })
        });
        self.counter(
            "offloadd_job_device_worn",
            "Bytes written by the job to the device since the job was defined",
            Some(&Unit::Bytes),
            lines.collect(),
        )
    }

    /// One line of each metric for each item.
    fn table<'i, T: 'i>(
        &mut self,
        metrics: &[Metric<T>],
        items: impl Iterator<Item = &'i T> + Clone,
        labels: impl Fn(&T) -> Labels,
    ) -> fmt::Result {
        for metric in metrics {
            let lines = items
                .clone()
                .map(|item| (labels(item), (metric.value)(item)));
            self.numbers(
                metric.name,
                metric.help,
                metric.unit.as_ref(),
                metric.kind,
                lines.collect(),
            )?;
        }
        Ok(())
    }

    /// Metrics that devices and jobs have in common.
    fn counts<'i, T: 'i>(
        &mut self,
        of: &str,
        counted: impl Iterator<Item = &'i T> + Clone,
        labels: impl Fn(&T) -> Labels,
        counts: impl Fn(&T) -> &Counts,
    ) -> fmt::Result {
        let bytes = |direction: fn(&Counts) -> &Traffic| -> Lines<f64> {
            let lines = counted.clone();
            lines
                .map(|one| (labels(one), direction(counts(one)).bytes as f64))
                .collect()
        };
        let unit = Some(&Unit::Bytes);
        self.counter(
            &format!("offloadd_{of}_read"),
            "Bytes read",
            unit,
            bytes(|c| &c.read),
        )?;
        self.counter(
            &format!("offloadd_{of}_written"),
            "Bytes written",
            unit,
            bytes(|c| &c.written),
        )?;
        let ops: Vec<(Labels, &Traffic)> = (counted.clone())
            .flat_map(|one| {
                let Counts {
                    read,
                    written,
                    flushed,
                } = counts(one);
                let ops = [("read", read), ("write", written), ("flush", flushed)];
                // A flush covers the writes of all jobs on a device.
                let ops = ops
                    .into_iter()
                    .filter(|(op, _)| of == "device" || *op != "flush");
                ops.map(|(op, traffic)| {
                    let mut labels = labels(one);
                    labels.push(("op", op.into()));
                    (labels, traffic)
                })
                .collect::<Vec<_>>()
            })
            .collect();
        let lines = |value: fn(&Traffic) -> u64| -> Lines<f64> {
            let lines = ops.iter();
            lines
                .map(|(labels, traffic)| (labels.clone(), value(traffic) as f64))
                .collect()
        };
        self.counter(
            &format!("offloadd_{of}_operations_failed"),
            "Operations that ended with an error or a short transfer",
            None,
            lines(|traffic| traffic.failed_count),
        )?;
        self.counter(
            &format!("offloadd_{of}_operations_retried"),
            "Times an operation was retried after the kernel returned it unfinished",
            None,
            lines(|traffic| traffic.retried_count),
        )?;
        self.histogram(
            &format!("offloadd_{of}_operation"),
            "Time from handing the first piece to the device until the last piece has ended",
            ops.iter()
                .map(|(labels, traffic)| (labels.clone(), &traffic.latencies))
                .collect(),
        )
    }

    fn counter(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        lines: Lines<f64>,
    ) -> fmt::Result {
        self.numbers(name, help, unit, MetricType::Counter, lines)
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        lines: Lines<f64>,
    ) -> fmt::Result {
        self.numbers(name, help, unit, MetricType::Gauge, lines)
    }

    fn numbers(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        lines: Lines<f64>,
    ) -> fmt::Result {
        self.each(name, help, unit, kind, lines, |metric, value| match kind {
            MetricType::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
            _ => metric.encode_gauge(&value),
        })
    }

    fn histogram(&mut self, name: &str, help: &str, lines: Lines<&Latencies>) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        self.each(
            name,
            help,
            unit,
            MetricType::Histogram,
            lines,
            |metric, latencies| {
                let sum_s = latencies.sum_ns() as f64 / 1e9;
                let octaves = latencies.octaves();
                metric.encode_histogram::<NoLabelSet>(sum_s, latencies.count(), &octaves, None)
            },
        )
    }

    fn each<V>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        lines: Lines<V>,
        encode: impl Fn(&mut MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in lines {
            if labels.is_empty() {
                encode(&mut metric, value)?;
            } else {
                encode(&mut metric.encode_family(&labels)?, value)?;
            }
        }
        Ok(())
    }
}
