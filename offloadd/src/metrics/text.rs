//! A [`Snapshot`] as OpenMetrics text for Prometheus: the numbers of [`samples`], histograms, and what has labels of its own.
//! `configs/grafana.json` draws these metrics.
//!
//! Leaves out jobs without a session that moved nothing since the start, because a store may hold a thousand jobs.

use std::fmt;
use std::iter;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::samples::{self, MetricUnit, Sample, SampleOwner};
use super::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use crate::core::UserState;

/// Value of the HTTP header `Content-Type`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Encodes a snapshot as OpenMetrics text.
pub fn text(snapshot: Snapshot) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsPage(snapshot)));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a String takes everything");
    text
}

#[derive(Debug)]
struct MetricsPage(Snapshot);

type Labels = Vec<(&'static str, String)>;

/// Samples of a metric: labels and value.
type LabeledValues<V> = Vec<(Labels, V)>;

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

impl Collector for MetricsPage {
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
        page.samples(samples::DAEMON, iter::once(snapshot), |_| Labels::new())?;
        page.devices(&snapshot.devices)?;
        let jobs: Vec<_> = snapshot.jobs.iter().filter(|job| is_shown(job)).collect();
        let uid = |user: &UserState| vec![("uid", user.uid.to_string())];
        page.samples(samples::USER, snapshot.users.iter(), uid)?;
        page.jobs(&jobs)
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
        self.samples(samples::DEVICE, devices.iter(), labels)?;
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
        self.samples(samples::JOB, each, job_labels)
    }

    /// One line of each metric for each item that has the number.
    fn samples<'i, T: SampleOwner + 'i>(
        &mut self,
        samples: &[Sample<T>],
        items: impl Iterator<Item = &'i T> + Clone,
        labels: impl Fn(&T) -> Labels,
    ) -> fmt::Result {
        for sample in samples {
            let Some(metric) = sample.metric else {
                continue;
            };
            let unit = metric.unit.map(|unit| match unit {
                MetricUnit::Bytes => Unit::Bytes,
                MetricUnit::Seconds => Unit::Seconds,
            });
            let lines = items
                .clone()
                .filter_map(|item| Some((labels(item), (sample.value)(item).to_f64()?)));
            let lines = lines.collect();
            self.numbers(metric.name, metric.help, unit.as_ref(), metric.kind, lines)?;
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
        let bytes = |direction: fn(&Counts) -> &Traffic| -> LabeledValues<f64> {
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
        let lines = |value: fn(&Traffic) -> u64| -> LabeledValues<f64> {
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
        lines: LabeledValues<f64>,
    ) -> fmt::Result {
        self.numbers(name, help, unit, MetricType::Counter, lines)
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        lines: LabeledValues<f64>,
    ) -> fmt::Result {
        self.numbers(name, help, unit, MetricType::Gauge, lines)
    }

    fn numbers(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        lines: LabeledValues<f64>,
    ) -> fmt::Result {
        self.each(name, help, unit, kind, lines, |metric, value| match kind {
            MetricType::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
            _ => metric.encode_gauge(&value),
        })
    }

    fn histogram(
        &mut self,
        name: &str,
        help: &str,
        lines: LabeledValues<&Latencies>,
    ) -> fmt::Result {
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
        lines: LabeledValues<V>,
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
