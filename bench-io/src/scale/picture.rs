//! The chart of a scaling report: one panel per load with GB/s over the number of drives.

use super::{Load, Row, ScaleReport};
use crate::picture::{self, Line};
use crate::units::Bytes;

/// Draws the block size that was measured last.
pub(crate) fn svg(report: &ScaleReport) -> String {
    let bs = report.rows.last().map_or(0, |row| row.bs);
    let of = |load: Load| -> Vec<&Row> {
        let rows = report.rows.iter();
        rows.filter(|row| row.bs == bs && row.load == load && !row.unlimited)
            .collect()
    };
    let title = format!(
        "Throughput over drives, operations of {}",
        Bytes(u64::from(bs))
    );
    let panels = Load::ALL.map(|load| (load.word(), lines(&of(load))));
    let mut about = vec![report.about.machine.to_string()];
    about.extend(report.limit_line());
    about.push(report.settings_line());
    picture::svg(&title, "GB/s", &about, &panels)
}

fn lines(rows: &[&Row]) -> Vec<Line> {
    let line = |name, colour, dashes, value: &dyn Fn(&Row) -> Option<f64>| Line {
        name,
        colour,
        dashes,
        points: rows
            .iter()
            .filter_map(|row| Some((row.drives as f64, value(row)? / 1e9)))
            .collect(),
    };
    let all = [
        line("limit set", "#999", "2 3", &|row| row.limit()),
        line("fio", "#d95f02", "7 4", &|row| row.fio_bytes_per_s()),
        line("through offloadd", "#1b6ca8", "", &|row| {
            Some(row.daemon_bytes_per_s())
        }),
        line("one thread", "#7a7a7a", "1 4", &|row| {
            row.one_thread_bytes_per_s
        }),
    ];
    all.into_iter()
        .filter(|line| !line.points.is_empty())
        .collect()
}
