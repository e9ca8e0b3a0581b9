//! The chart of a scaling report: one panel per load with GB/s over the number of drives.

use super::{Load, Row, ScaleReport};
use crate::picture::{self, Line, Mark, Series};
use crate::units::Bytes;

const LIMIT: Series = Series {
    name: "limit set",
    colour: "#999",
    dashes: "2 3",
    mark: Mark::Circle,
};
const FIO: Series = Series {
    name: "fio",
    colour: "#d95f02",
    dashes: "7 4",
    mark: Mark::Square,
};
const OFFLOADD: Series = Series {
    name: "through offloadd",
    colour: "#1b6ca8",
    dashes: "",
    mark: Mark::Triangle,
};
const ONE_THREAD: Series = Series {
    name: "one thread",
    colour: "#7a7a7a",
    dashes: "1 4",
    mark: Mark::Diamond,
};

/// A measurement as it is drawn, in bytes a second.
pub(crate) struct Drawn {
    pub(crate) drives: f64,
    pub(crate) load: Load,
    pub(crate) limit: Option<f64>,
    pub(crate) fio: Option<f64>,
    pub(crate) offloadd: f64,
    pub(crate) one_thread: Option<f64>,
}

impl From<&Row> for Drawn {
    fn from(row: &Row) -> Self {
        Self {
            drives: row.drives as f64,
            load: row.load,
            limit: row.limit(),
            fio: row.fio_bytes_per_s(),
            offloadd: row.daemon_bytes_per_s(),
            one_thread: row.one_thread_bytes_per_s,
        }
    }
}

/// Draws the block size that was measured last.
pub(crate) fn svg(report: &ScaleReport) -> String {
    let bs = report.rows.last().map_or(0, |row| row.bs);
    let rows = report.rows.iter();
    let rows = rows.filter(|row| row.bs == bs && !row.unlimited);
    let mut about = vec![report.about.machine.to_string()];
    about.extend(report.limit_line());
    about.push(report.settings_line());
    draw(bs, &about, &rows.map(Drawn::from).collect::<Vec<_>>())
}

/// Draws measurements with operations of `bs` bytes.
pub(crate) fn draw(bs: u32, about: &[String], rows: &[Drawn]) -> String {
    let title = format!(
        "Throughput over drives, operations of {}",
        Bytes(u64::from(bs))
    );
    let panels = Load::ALL.map(|load| (load.word(), lines(rows, load)));
    picture::svg(&title, "GB/s", about, &panels)
}

fn lines(rows: &[Drawn], load: Load) -> Vec<Line> {
    let line = |series, value: &dyn Fn(&Drawn) -> Option<f64>| {
        let rows = rows.iter().filter(|row| row.load == load);
        let points = rows.filter_map(|row| Some((row.drives, value(row)? / 1e9)));
        Line {
            series,
            points: points.collect(),
        }
    };
    let all = [
        line(LIMIT, &|row| row.limit),
        line(FIO, &|row| row.fio),
        line(OFFLOADD, &|row| Some(row.offloadd)),
        line(ONE_THREAD, &|row| row.one_thread),
    ];
    all.into_iter()
        .filter(|line| !line.points.is_empty())
        .collect()
}
