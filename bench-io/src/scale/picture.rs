//! The picture: for each load a panel with GB/s over the number of drives. SVG by hand, so that it opens anywhere.

use std::fmt::Write;

use super::{Load, Row, ScaleReport};
use crate::words::Bytes;

const PANEL_WIDTH: f64 = 300.0;
const PANEL_HEIGHT: f64 = 220.0;
const MARGIN: f64 = 56.0;
const HEAD: f64 = 64.0;

/// A line of a panel: its name, colour, dashes, and points.
struct Line {
    name: &'static str,
    colour: &'static str,
    dashes: &'static str,
    points: Vec<(f64, f64)>,
}

/// The whole picture, of the block size that was measured last.
pub(crate) fn svg(report: &ScaleReport) -> String {
    let bs = report.rows.last().map_or(0, |row| row.bs);
    let of = |load: Load| -> Vec<&Row> {
        let rows = report.rows.iter();
        let paced = report.pace.is_some();
        rows.filter(|row| row.bs == bs && row.load == load && row.paced == paced)
            .collect()
    };
    let width = 3.0 * (PANEL_WIDTH + MARGIN) + MARGIN;
    let height = HEAD + PANEL_HEIGHT + 2.0 * MARGIN;
    let mut out = String::new();
    let mut put = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    put(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#222">"##
    ));
    put(format!(
        r##"<rect width="{width}" height="{height}" fill="#fff"/>"##
    ));
    put(format!(
        r#"<text x="{MARGIN}" y="24" font-size="15">GB/s over drives, operations of {}</text>"#,
        Bytes(u64::from(bs))
    ));
    put(format!(
        r#"<text x="{MARGIN}" y="42">{}</text>"#,
        escaped(&report.machine.to_string())
    ));
    for (index, load) in Load::ALL.into_iter().enumerate() {
        let left = MARGIN + index as f64 * (PANEL_WIDTH + MARGIN);
        put(panel(load.word(), &lines(&of(load)), left));
    }
    for (index, line) in lines(&of(Load::Read)).iter().enumerate() {
        let (x, y) = (MARGIN + index as f64 * 150.0, height - 18.0);
        put(format!(
            r#"<line x1="{x}" y1="{y}" x2="{}" y2="{y}" stroke="{}" stroke-width="2" stroke-dasharray="{}"/><text x="{}" y="{}">{}</text>"#,
            x + 28.0,
            line.colour,
            line.dashes,
            x + 34.0,
            y + 4.0,
            line.name
        ));
    }
    put("</svg>".into());
    out
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

fn panel(name: &str, lines: &[Line], left: f64) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let drives_max = points().map(|point| point.0).fold(1.0, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max).max(1e-3) * 1.08;
    let x = |drives: f64| left + PANEL_WIDTH * drives / drives_max;
    let y = |rate: f64| HEAD + PANEL_HEIGHT * (1.0 - rate / top);
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = write!(
        out,
        r##"<text x="{}" y="{}" font-size="13">{name}</text><path d="M{left} {HEAD} V{} H{}" fill="none" stroke="#222"/>"##,
        left + 8.0,
        HEAD + 4.0,
        HEAD + PANEL_HEIGHT,
        left + PANEL_WIDTH
    );
    for quarter in 1..=4 {
        let rate = top * f64::from(quarter) / 4.0;
        let _ = write!(
            out,
            r##"<path d="M{left} {y} h{PANEL_WIDTH}" stroke="#eee"/><text x="{}" y="{}" text-anchor="end">{}</text>"##,
            left - 6.0,
            y(rate) + 4.0,
            short(rate),
            y = y(rate),
        );
    }
    for drives in 1..=drives_max as u32 {
        let _ = write!(
            out,
            r#"<text x="{}" y="{}" text-anchor="middle">{drives}</text>"#,
            x(f64::from(drives)),
            HEAD + PANEL_HEIGHT + 18.0
        );
    }
    for line in lines {
        let path: Vec<String> = line
            .points
            .iter()
            .map(|&(drives, rate)| format!("{:.1},{:.1}", x(drives), y(rate)))
            .collect();
        let _ = write!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{}" stroke-width="2" stroke-dasharray="{}"/>"#,
            path.join(" "),
            line.colour,
            line.dashes
        );
        for point in path {
            let (x, y) = point.split_once(',').expect("written above");
            let _ = write!(
                out,
                r#"<circle cx="{x}" cy="{y}" r="3" fill="{}"/>"#,
                line.colour
            );
        }
    }
    out
}

/// Three figures.
fn short(rate: f64) -> String {
    match rate {
        rate if rate >= 10.0 => format!("{rate:.0}"),
        rate if rate >= 1.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}

/// As text of HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
