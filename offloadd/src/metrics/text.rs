//! A [`Snapshot`] as Prometheus reads it (OpenMetrics text; [`plain`]: what came before it). `configs/grafana.json` draws these names.
//!
//! Jobs that have no session and moved nothing since the start are left out: a store may hold a thousand.

pub mod plain;

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use crate::core::CommitState;

/// What the text is, for HTTP.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The whole text.
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

/// One line each of a metric: its labels and what it counts.
type Lines<V> = Vec<(Labels, V)>;

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let snapshot = &self.0;
        let mut page = Encoder(&mut encoder);
        let alone = |value| vec![(Labels::new(), value)];
        let build = vec![("version", env!("CARGO_PKG_VERSION").into())];
        page.gauge(
            "offloadd_build_info",
            "Which offloadd this is",
            None,
            vec![(build, 1.0)],
        )?;
        page.gauge(
            "offloadd_uptime",
            "Since the daemon started; everything is counted from there",
            Some(&Unit::Seconds),
            alone(snapshot.uptime.as_secs_f64()),
        )?;
        page.gauge(
            "offloadd_arena_used",
            "Host memory of all sessions",
            Some(&Unit::Bytes),
            alone(snapshot.arena_used_bytes as f64),
        )?;
        page.gauge(
            "offloadd_arena_max",
            "Host memory that sessions may take together",
            Some(&Unit::Bytes),
            alone(snapshot.arena_bytes_max as f64),
        )?;
        page.gauge(
            "offloadd_sessions",
            "Processes that are served",
            None,
            alone(snapshot.session_count as f64),
        )?;
        page.gauge(
            "offloadd_reading_only",
            "1 when a device did not take what the start writes: nothing is written until it starts again",
            None,
            alone(f64::from(u8::from(snapshot.reading_only.is_some()))),
        )?;
        page.devices(&snapshot.devices)?;
        let jobs: Vec<_> = snapshot.jobs.iter().filter(|job| is_shown(job)).collect();
        page.users(&jobs)?;
        page.jobs(&jobs)?;
        page.jobs_on(&jobs, &snapshot.devices)
    }
}

fn is_shown(job: &JobView) -> bool {
    job.state.session_count > 0 || job.counts != Counts::default() || job.commits.count() > 0
}

/// Writes metrics one after the other.
struct Encoder<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Encoder<'_, '_> {
    fn devices(&mut self, devices: &[DeviceView]) -> fmt::Result {
        let labels = |device: &DeviceView| vec![("device", device.state.path.clone())];
        self.counts("device", devices, labels, |device| &device.counts)?;
        let lines = |value: fn(&DeviceView) -> f64| -> Lines<f64> {
            devices.iter().map(|d| (labels(d), value(d))).collect()
        };
        let bytes = Some(&Unit::Bytes);
        self.gauge(
            "offloadd_device_queue_depth",
            "Operations the device has, and those that wait in the daemon until it has room",
            None,
            lines(|d| d.queue_depth as f64),
        )?;
        self.gauge(
            "offloadd_device_queue_depth_max",
            "Most there ever were of them",
            None,
            lines(|d| d.queue_depth_max as f64),
        )?;
        self.counter(
            "offloadd_device_busy",
            "Time in which there was something to read or write",
            Some(&Unit::Seconds),
            lines(|d| d.busy.as_secs_f64()),
        )?;
        self.gauge(
            "offloadd_device_slow",
            "1 while it is much slower than format measured it",
            None,
            lines(|d| f64::from(u8::from(d.slow))),
        )?;
        self.counter(
            "offloadd_device_worn",
            "Ever written to it since it was formatted",
            bytes,
            lines(|d| d.worn_bytes as f64),
        )?;
        let rated = devices
            .iter()
            .filter_map(|d| Some((labels(d), d.rated_bytes? as f64)));
        self.gauge(
            "offloadd_device_rated_written",
            "What it is rated for, where the settings say",
            bytes,
            rated.collect(),
        )?;
        self.counter(
            "offloadd_device_tiles_damaged",
            "Tiles that were read and were not what was written",
            None,
            lines(|d| d.damaged_count as f64),
        )?;
        self.gauge(
            "offloadd_device_data",
            "Of the store",
            bytes,
            lines(|d| d.state.data_bytes as f64),
        )?;
        self.gauge(
            "offloadd_device_free",
            "That no job holds",
            bytes,
            lines(|d| d.state.free_bytes as f64),
        )?;
        self.gauge(
            "offloadd_device_to_move",
            "Of tiles that are still to come to a device that was added, or to leave one that is drained",
            bytes,
            lines(|d| d.state.status.left_bytes as f64),
        )?;
        let phases = devices.iter().flat_map(|d| {
            ["settled", "filling", "draining"].map(|phase| {
                let mut labels = labels(d);
                labels.push(("phase", phase.into()));
                let is_in = d.state.status.phase_name() == phase;
                (labels, f64::from(u8::from(is_in)))
            })
        });
        self.gauge(
            "offloadd_device_phase",
            "1 of the phase it is in: settled, filling since it came or was measured again, draining",
            None,
            phases.collect(),
        )?;
        self.gauge(
            "offloadd_device_stuck",
            "1 while what is to come to it or to leave it does not move: offloadd top says why",
            None,
            lines(|d| f64::from(u8::from(d.state.status.is_stuck()))),
        )?;
        self.gauge(
            "offloadd_device_trouble",
            "1 while it hangs or its file is deleted: offloadd top says why",
            None,
            lines(|d| f64::from(u8::from(d.trouble.is_some()))),
        )?;
        self.gauge(
            "offloadd_device_unlisted",
            "1 while it is of the store and the list `devices` of the settings lacks it",
            None,
            lines(|d| f64::from(u8::from(d.unlisted))),
        )?;
        self.gauge(
            "offloadd_device_waits_for_start",
            "1 while it is drained but for what leaves it when offloadd is started next",
            None,
            lines(|d| f64::from(u8::from(d.state.status.waits_for_start))),
        )?;
        self.gauge(
            "offloadd_device_measured_read_bytes_per_second",
            "Measured at format, 0 = unknown",
            None,
            lines(|d| d.state.read_bytes_per_s as f64),
        )?;
        self.gauge(
            "offloadd_device_measured_written_bytes_per_second",
            "Measured at format, 0 = unknown",
            None,
            lines(|d| d.state.write_bytes_per_s as f64),
        )
    }

    /// Whose jobs these are.
    fn users(&mut self, jobs: &[&JobView]) -> fmt::Result {
        let shares = jobs
            .iter()
            .map(|job| (job.state.uid, job.state.shares.user));
        let shares: BTreeMap<u32, u32> = shares.collect();
        let lines = shares.into_iter();
        let lines = lines.map(|(uid, share)| (vec![("uid", uid.to_string())], f64::from(share)));
        self.gauge(
            "offloadd_user_share",
            "Its part of what a drive moves, beside other users",
            None,
            lines.collect(),
        )
    }

    fn jobs(&mut self, jobs: &[&JobView]) -> fmt::Result {
        let labels = |job: &&JobView| {
            let state = &job.state;
            vec![
                ("job_name", state.job.as_str().to_owned()),
                ("uid", state.uid.to_string()),
            ]
        };
        self.counts("job", jobs, labels, |job| &job.counts)?;
        let lines = |value: fn(&JobView) -> f64| -> Lines<f64> {
            jobs.iter().map(|job| (labels(job), value(job))).collect()
        };
        self.histogram(
            "offloadd_job_commit",
            "From the last rank's call until a generation was durable",
            jobs.iter().map(|job| (labels(job), &job.commits)).collect(),
        )?;
        self.counter(
            "offloadd_job_commits_failed",
            "Calls to commit that were answered with a fault",
            None,
            lines(|job| job.commit_failed_count as f64),
        )?;
        self.counter(
            "offloadd_job_worn",
            "Written by it since it was defined, to devices that left the store too",
            Some(&Unit::Bytes),
            lines(|job| job.worn_bytes as f64),
        )?;
        self.counter(
            "offloadd_job_tiles_damaged",
            "Tiles that were read and were not what was written",
            None,
            lines(|job| job.damaged_count as f64),
        )?;
        self.gauge(
            "offloadd_job_share",
            "Its part of its user's, beside his other jobs",
            None,
            lines(|job| f64::from(job.state.shares.job)),
        )?;
        self.gauge(
            "offloadd_job_sessions",
            "Processes",
            None,
            lines(|job| job.state.session_count as f64),
        )?;
        self.gauge(
            "offloadd_job_arena",
            "Host memory of its sessions",
            Some(&Unit::Bytes),
            lines(|job| job.state.arena_bytes as f64),
        )?;
        self.gauge(
            "offloadd_job_reserved",
            "Over all devices",
            Some(&Unit::Bytes),
            lines(|job| job.state.reserved_bytes as f64),
        )?;
        self.gauge(
            "offloadd_job_slots",
            "Slots of its arenas",
            None,
            lines(|job| job.state.slot_count as f64),
        )?;
        self.gauge(
            "offloadd_job_slots_used",
            "Slots that a tile is read into or written from",
            None,
            lines(|job| job.state.slot_used_count as f64),
        )?;
        self.gauge(
            "offloadd_job_tiles_reading",
            "Tiles on their way in",
            None,
            lines(|job| job.state.reading_count as f64),
        )?;
        self.gauge(
            "offloadd_job_tiles_writing",
            "Tiles on their way out",
            None,
            lines(|job| job.state.writing_count as f64),
        )?;
        self.gauge(
            "offloadd_job_committing",
            "1 while ranks wait for a generation to become durable",
            None,
            lines(|job| f64::from(u8::from(job.state.commit != CommitState::None))),
        )?;
        self.gauge(
            "offloadd_job_generation",
            "The newest that is durable",
            None,
            lines(|job| job.state.newest_generation as f64),
        )?;
        self.gauge(
            "offloadd_job_poisoned",
            "1 after a failed flush or record, until it resumes, and while nothing at all is written",
            None,
            lines(|job| f64::from(u8::from(job.state.poisoned))),
        )
    }

    /// Which job wears which device out.
    fn jobs_on(&mut self, jobs: &[&JobView], devices: &[DeviceView]) -> fmt::Result {
        let path = |number| {
            let mut devices = devices.iter();
            let found = devices.find(|device| device.state.status.number == number);
            found.map(|device| device.state.path.clone())
        };
        let lines = jobs.iter().flat_map(|job| {
            job.worn.iter().filter_map(|worn| {
                let labels = vec![
                    ("job_name", job.state.job.as_str().to_owned()),
                    ("uid", job.state.uid.to_string()),
                    ("device", path(worn.number)?),
                ];
                Some((labels, worn.bytes as f64))
            })
        });
        self.counter(
            "offloadd_job_device_worn",
            "Ever written by it to a device since it was defined",
            Some(&Unit::Bytes),
            lines.collect(),
        )
    }

    /// What devices and jobs count alike.
    fn counts<T>(
        &mut self,
        of: &str,
        counted: &[T],
        labels: impl Fn(&T) -> Labels,
        counts: impl Fn(&T) -> &Counts,
    ) -> fmt::Result {
        let bytes = |direction: fn(&Counts) -> &Traffic| -> Lines<f64> {
            let lines = counted.iter();
            lines
                .map(|one| (labels(one), direction(counts(one)).bytes as f64))
                .collect()
        };
        let unit = Some(&Unit::Bytes);
        self.counter(
            &format!("offloadd_{of}_read"),
            "Read",
            unit,
            bytes(|c| &c.read),
        )?;
        self.counter(
            &format!("offloadd_{of}_written"),
            "Written",
            unit,
            bytes(|c| &c.written),
        )?;
        let ops: Vec<(Labels, &Traffic)> = (counted.iter())
            .flat_map(|one| {
                let Counts {
                    read,
                    written,
                    flushed,
                } = counts(one);
                let ops = [("read", read), ("write", written), ("flush", flushed)];
                // A job flushes nothing that is its alone.
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
            "Errors and short transfers",
            None,
            lines(|traffic| traffic.failed_count),
        )?;
        self.counter(
            &format!("offloadd_{of}_operations_retried"),
            "Times the kernel put an operation back and it was tried again",
            None,
            lines(|traffic| traffic.retried_count),
        )?;
        self.histogram(
            &format!("offloadd_{of}_operation"),
            "From when its first piece goes to the device until its last one has ended",
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
        self.each(
            name,
            help,
            unit,
            MetricType::Counter,
            lines,
            |metric, value| metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        )
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        lines: Lines<f64>,
    ) -> fmt::Result {
        self.each(
            name,
            help,
            unit,
            MetricType::Gauge,
            lines,
            |metric, value| metric.encode_gauge(&value),
        )
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
