//! Figures of one load on one target: rates, latencies, processor time and the drives' own counts.

use std::fmt;

use offload_support::units::ApproxRate;
use serde::Serialize;

use crate::load::{Outcome, Tally};
use crate::units::{Iops, Micros, decimals};

/// One direction of a measurement.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WayReport {
    pub(crate) bytes: u64,
    pub(crate) ops: u64,
    pub(crate) bytes_per_s: f64,
    pub(crate) ops_per_s: f64,
    pub(crate) latency_ns_min: u64,
    pub(crate) latency_ns_mean: f64,
    /// Standard deviation.
    pub(crate) latency_ns_stdev: f64,
    pub(crate) latency_ns_p50: u64,
    pub(crate) latency_ns_p99: u64,
    pub(crate) latency_ns_p999: u64,
    pub(crate) latency_ns_max: u64,
}

/// Processor time during a measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct CpuReport {
    /// This process: submission and checksums.
    pub(crate) bench_io_s: f64,
    /// The daemon; `None` without one.
    pub(crate) daemon_s: Option<f64>,
    /// Both together, per 10^9 bytes.
    pub(crate) s_per_gb: f64,
    /// Fraction of the whole machine's time that was idle.
    pub(crate) idle_share: Option<f64>,
}

/// Bytes that the drives moved during the measurement for all processes, as the kernel counts them.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct DrivesReport {
    pub(crate) read_bytes_per_s: f64,
    pub(crate) write_bytes_per_s: f64,
}

/// Figures of one load on one target.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) seconds: f64,
    pub(crate) read: Option<WayReport>,
    pub(crate) write: Option<WayReport>,
    pub(crate) cpu: CpuReport,
    /// `None` if no drive reports it.
    pub(crate) drives: Option<DrivesReport>,
    /// Name of the engine, and why it was chosen.
    pub(crate) engine: String,
}

/// Processor time and drive traffic between two moments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meanwhile {
    pub(crate) bench_io_s: f64,
    pub(crate) daemon_s: Option<f64>,
    pub(crate) idle_share: Option<f64>,
    pub(crate) drives_bytes: Option<[u64; 2]>,
}

impl Figures {
    pub(crate) fn new(
        outcome: &Outcome,
        block_bytes: u32,
        meanwhile: Meanwhile,
        engine: String,
    ) -> Self {
        let [read, write] = [0, 1]
            .map(|way: usize| WayReport::new(&outcome.ways[way], block_bytes, outcome.seconds));
        let bytes: u64 = [&read, &write]
            .into_iter()
            .flatten()
            .map(|way| way.bytes)
            .sum();
        let used_s = meanwhile.bench_io_s + meanwhile.daemon_s.unwrap_or(0.0);
        Self {
            seconds: outcome.seconds,
            read,
            write,
            cpu: CpuReport {
                bench_io_s: meanwhile.bench_io_s,
                daemon_s: meanwhile.daemon_s,
                s_per_gb: used_s / (bytes as f64 / 1e9),
                idle_share: meanwhile.idle_share,
            },
            drives: meanwhile.drives_bytes.map(|[read, written]| DrivesReport {
                read_bytes_per_s: read as f64 / outcome.seconds,
                write_bytes_per_s: written as f64 / outcome.seconds,
            }),
            engine,
        }
    }

    /// Both directions.
    pub(crate) fn ways(&self) -> impl Iterator<Item = (&'static str, &WayReport)> {
        let both = [("read", &self.read), ("write", &self.write)];
        both.into_iter()
            .filter_map(|(word, way)| Some((word, way.as_ref()?)))
    }
}

impl WayReport {
    /// `None` if nothing was moved in this direction.
    pub(crate) fn new(tally: &Tally, block_bytes: u32, seconds: f64) -> Option<Self> {
        if tally.ops == 0 {
            return None;
        }
        let bytes = tally.ops * u64::from(block_bytes);
        let latency = &tally.latency_ns;
        Some(Self {
            bytes,
            ops: tally.ops,
            bytes_per_s: bytes as f64 / seconds,
            ops_per_s: tally.ops as f64 / seconds,
            latency_ns_min: latency.min(),
            latency_ns_mean: latency.mean(),
            latency_ns_stdev: latency.stdev(),
            latency_ns_p50: latency.value_at_quantile(0.5),
            latency_ns_p99: latency.value_at_quantile(0.99),
            latency_ns_p999: latency.value_at_quantile(0.999),
            latency_ns_max: latency.max(),
        })
    }

    /// p50, p99, p99.9 and maximum in ms, each with three digits, for a cell of a table.
    pub(crate) fn latencies(&self) -> String {
        let all = [
            self.latency_ns_p50,
            self.latency_ns_p99,
            self.latency_ns_p999,
            self.latency_ns_max,
        ];
        let text = |ns: u64| {
            let ms = ns as f64 / 1e6;
            let decimals = if ms < 0.9995 { 3 } else { decimals(ms) };
            format!("{ms:.decimals$}")
        };
        all.map(text).join(", ")
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (word, way) in self.ways() {
            writeln!(
                f,
                "{word:5}  {:>11}  {:>6} IOPS   latency min {}, mean {}, stdev {}; p50 {}, p99 {}, p99.9 {}, max {}",
                ApproxRate(way.bytes_per_s).to_string(),
                Iops(way.ops_per_s).to_string(),
                Micros(way.latency_ns_min),
                Micros(way.latency_ns_mean as u64),
                Micros(way.latency_ns_stdev as u64),
                Micros(way.latency_ns_p50),
                Micros(way.latency_ns_p99),
                Micros(way.latency_ns_p999),
                Micros(way.latency_ns_max)
            )?;
        }
        if let Some(drives) = &self.drives {
            writeln!(
                f,
                "drives {} read and {} written in the same seconds, by all processes",
                ApproxRate(drives.read_bytes_per_s),
                ApproxRate(drives.write_bytes_per_s)
            )?;
        }
        let cpu = &self.cpu;
        write!(
            f,
            "cpu    {:.3} s per GB: bench-io {:.2} s",
            cpu.s_per_gb, cpu.bench_io_s
        )?;
        if let Some(daemon_s) = cpu.daemon_s {
            write!(f, ", offloadd {daemon_s:.2} s")?;
        }
        if let Some(share) = cpu.idle_share {
            write!(f, "; machine {:.0} % idle", 100.0 * share)?;
        }
        writeln!(f)
    }
}
