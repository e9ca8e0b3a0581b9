//! The report: Markdown tables that fit a terminal of 120 columns, then how it was measured.

use std::fmt;

use super::{Range, Row, ScaleReport};
use crate::figures::WayReport;
use crate::units::Bytes;
use offload_support::units::ApproxRate;

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells: Vec<_> = self
            .rows
            .iter()
            .map(|row| (own_cells(row), cells(row)))
            .collect();
        for (table, columns) in TABLES.iter().enumerate() {
            if table > 0 {
                writeln!(f)?;
            }
            let row =
                |(own, cells): &(Vec<String>, [Vec<String>; 3])| [&own[..], &cells[table]].concat();
            let rows: Vec<Vec<String>> = cells.iter().map(row).collect();
            write_table(f, &[&ROW[..], columns].concat(), &rows)?;
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
    /// How it was measured, in a few lines.
    pub(crate) fn description(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.limit_line().into_iter().collect();
        lines.push(self.settings_line());
        lines
    }

    /// The rate limit of each drive.
    fn limit_line(&self) -> Option<String> {
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
    fn settings_line(&self) -> String {
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

/// Columns that tell rows apart, in each table.
const ROW: [&str; 4] = ["drives", "bs", "in flight", ""];

/// Further columns of each table: throughput in GB/s, latencies, and what the throughput costs and how it varies.
const TABLES: [&[&str]; 3] = [
    &[
        "offloadd, GB/s",
        "of limit",
        "fio, GB/s",
        "offloadd/fio",
        "one thread",
    ],
    &["p50, p99, p99.9, max, in ms"],
    &[
        "CPU s/GB: offloadd, bench-io, fio",
        "rounds, GB/s: offloadd, fio",
    ],
];

/// Writes a Markdown table whose columns are aligned, so that it can be read in a terminal too.
fn write_table(f: &mut fmt::Formatter<'_>, head: &[&str], rows: &[Vec<String>]) -> fmt::Result {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0).max(head[column].len())
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(f, "| {} |", padded.collect::<Vec<_>>().join(" | "))
    };
    line(&mut head.iter().copied())?;
    let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    line(&mut rules.iter().map(String::as_str))?;
    rows.iter()
        .try_for_each(|row| line(&mut row.iter().map(String::as_str)))
}

/// Cells of [`ROW`].
fn own_cells(row: &Row) -> Vec<String> {
    vec![
        match row.unlimited {
            true => format!("{} unlimited", row.drives),
            false => row.drives.to_string(),
        },
        Bytes(u64::from(row.bs)).to_string(),
        row.iodepth.to_string(),
        row.load.word().into(),
    ]
}

/// Cells of [`TABLES`].
fn cells(row: &Row) -> [Vec<String>; 3] {
    let nothing = String::new;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let gb = |rate: f64| format!("{:.3}", rate / 1e9);
    let ours = row.daemon_bytes_per_s();
    let range = |range: &Range| format!("{} to {}", gb(range.min), gb(range.max));
    let rates = |read: f64, write: f64| match (read > 0.0, write > 0.0) {
        (true, true) => format!("{} + {}", gb(read), gb(write)),
        (true, false) => gb(read),
        _ => gb(write),
    };
    let of = |way: &Option<WayReport>| way.as_ref().map_or(0.0, |way| way.bytes_per_s);
    let bytes = ours * row.daemon.seconds / 1e9;
    let cpu = &row.daemon.cpu;
    let fio_cpu =
        (row.fio.as_ref()).map_or_else(|| "-".into(), |fio| format!("{:.3}", fio.cpu_s_per_gb));
    let throughput = vec![
        rates(of(&row.daemon.read), of(&row.daemon.write)),
        row.limit()
            .map_or_else(nothing, |limit| percent(ours / limit)),
        row.fio.as_ref().map_or_else(nothing, |fio| {
            rates(fio.read.bytes_per_s, fio.write.bytes_per_s)
        }),
        row.fio_bytes_per_s()
            .map_or_else(nothing, |fio| percent(ours / fio)),
        row.one_thread_bytes_per_s.map_or_else(nothing, gb),
    ];
    let latencies = row.daemon.ways().map(|(_, way)| way.latencies());
    let latencies = vec![latencies.collect::<Vec<_>>().join(" + ")];
    let cost = vec![
        format!(
            "{:.3}, {:.3}, {fio_cpu}",
            cpu.daemon_s.unwrap_or(0.0) / bytes,
            cpu.bench_io_s / bytes
        ),
        row.rounds.as_ref().map_or_else(nothing, |rounds| {
            let fio = rounds.fio.as_ref().map(range);
            let both = [Some(range(&rounds.daemon)), fio];
            both.into_iter().flatten().collect::<Vec<_>>().join(", ")
        }),
    ];
    [throughput, latencies, cost]
}
