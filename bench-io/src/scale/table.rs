//! The report: a Markdown table, then how it was measured.

use std::fmt;

use super::{Range, Row, ScaleReport};
use crate::report::WayReport;
use crate::units::Bytes;
use offload_support::units::ApproxRate;

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}")?;
        for row in &self.rows {
            writeln!(f, "| {} |", cells(row).join(" | "))?;
        }
        if let Some(fio) = self.rows.iter().rev().find_map(|row| row.fio.as_ref()) {
            writeln!(f, "\nfio's last command: `{}`", fio.command)?;
        }
        if let Some(limit) = self.limit_line() {
            writeln!(f, "{limit}")?;
        }
        let fio = self.fio_version.as_deref().unwrap_or("no fio found");
        writeln!(f, "{fio}; {}", self.settings_line())?;
        write!(f, "{}", self.about)
    }
}

impl ScaleReport {
    /// The rate limit of each drive.
    pub(super) fn limit_line(&self) -> Option<String> {
        let limit = self.limit?;
        let (read, write) = (
            ApproxRate(limit.read as f64),
            ApproxRate(limit.write as f64),
        );
        Some(format!(
            "limit set: {read} read and {write} written per drive"
        ))
    }

    /// The settings in one line.
    pub(super) fn settings_line(&self) -> String {
        let settings = &self.about.settings;
        let engine = self.rows.first().map_or("", |row| &row.daemon.engine);
        let mut line = format!(
            "direct, size {} and fio's iodepth {} per file and direction, ioengine {} (chosen: {engine}), {:.1} s per measurement",
            Bytes(settings.size),
            settings.fio_iodepth,
            settings.ioengine,
            settings.runtime_s
        );
        if settings.rounds > 1 {
            line += &format!(", the median of {} rounds", settings.rounds);
        }
        line
    }
}

const HEAD: &str = "\
| drives | bs | in flight | | through offloadd | of the limit | p50, p99, p99.9, max | fio | offloadd/fio | one thread | CPU s/GB: offloadd, bench-io, fio |
|---|---|---|---|---|---|---|---|---|---|---|";

/// Cells of a row of the table.
fn cells(row: &Row) -> [String; 11] {
    let nothing = String::new;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let ours = row.daemon_bytes_per_s();
    let range = |range: Option<&Range>| {
        range.map_or_else(nothing, |range| {
            format!(" ({} to {})", ApproxRate(range.min), ApproxRate(range.max))
        })
    };
    let rounds = row.rounds.as_ref();
    let rates = |read: f64, write: f64| match (read > 0.0, write > 0.0) {
        (true, true) => format!("{} + {}", ApproxRate(read), ApproxRate(write)),
        (true, false) => ApproxRate(read).to_string(),
        _ => ApproxRate(write).to_string(),
    };
    let of = |way: &Option<WayReport>| way.as_ref().map_or(0.0, |way| way.bytes_per_s);
    let bytes = ours * row.daemon.seconds / 1e9;
    let cpu = &row.daemon.cpu;
    let fio_cpu = row
        .fio
        .as_ref()
        .map_or_else(|| "-".into(), |fio| format!("{:.3}", fio.cpu_s_per_gb));
    [
        match row.unlimited {
            true => format!("{} unlimited", row.drives),
            false => row.drives.to_string(),
        },
        Bytes(u64::from(row.bs)).to_string(),
        row.iodepth.to_string(),
        row.load.word().into(),
        rates(of(&row.daemon.read), of(&row.daemon.write))
            + &range(rounds.map(|rounds| &rounds.daemon)),
        row.limit()
            .map_or_else(nothing, |limit| percent(ours / limit)),
        row.daemon
            .ways()
            .map(|(_, way)| way.latencies())
            .collect::<Vec<_>>()
            .join(" + "),
        row.fio.as_ref().map_or_else(nothing, |fio| {
            rates(fio.read.bytes_per_s, fio.write.bytes_per_s)
                + &range(rounds.and_then(|rounds| rounds.fio.as_ref()))
        }),
        row.fio_bytes_per_s()
            .map_or_else(nothing, |fio| percent(ours / fio)),
        row.one_thread_bytes_per_s
            .map_or_else(nothing, |rate| ApproxRate(rate).to_string()),
        format!(
            "{:.3}, {:.3}, {fio_cpu}",
            cpu.daemon_s.unwrap_or(0.0) / bytes,
            cpu.bench_io_s / bytes
        ),
    ]
}
