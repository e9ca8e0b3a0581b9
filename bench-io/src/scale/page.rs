//! A self-contained HTML page with the chart and the table.

use std::fmt::Write;

use super::ScaleReport;
use super::picture::svg;
use super::table::{COLUMNS, cells};
use crate::picture::escaped;

const STYLE: &str = "body { font: 14px/1.5 sans-serif; margin: 2em auto; max-width: 75em; color: #222 }
table { border-collapse: collapse } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }
code { background: #f4f4f4; padding: .1em .3em; overflow-wrap: anywhere } .warning { color: #a33 }";

pub(crate) fn html(report: &ScaleReport) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>bench-io scale</title><style>{STYLE}</style></head><body>\n"
    );
    // Writing to a String cannot fail.
    let mut put = |text: String| {
        let _ = writeln!(out, "{text}");
    };
    put(format!(
        "<h1>bench-io scale</h1>\n<p>{}<br>{}: <code>{}</code></p>",
        escaped(&report.about.machine.to_string()),
        escaped(report.about.program),
        escaped(&report.about.command)
    ));
    for warning in &report.about.warnings {
        put(format!(
            "<p class=\"warning\">warning: {}</p>",
            escaped(warning)
        ));
    }
    put(svg(report));
    let row = |tag: &str, cells: &[String]| {
        let cells = cells
            .iter()
            .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        format!("<tr>{}</tr>", cells.collect::<String>())
    };
    put("<table>".into());
    put(row("th", &COLUMNS.map(str::to_owned)));
    for one in &report.rows {
        put(row("td", &cells(one)));
    }
    put("</table>\n<p>Drives:</p><ul>".into());
    for device in &report.about.devices {
        put(format!("<li>{}</li>", escaped(&device.to_string())));
    }
    put(format!(
        "</ul>\n<p>{}</p>",
        escaped(&report.settings_line())
    ));
    if let Some(limit) = report.limit {
        put(format!(
            "<p>Limit set: {:.3} GB/s read and {:.3} GB/s written per drive.</p>",
            limit.read as f64 / 1e9,
            limit.write as f64 / 1e9
        ));
    }
    if let Some(fio) = report.rows.iter().rev().find_map(|row| row.fio.as_ref()) {
        let version = report.fio_version.as_deref().unwrap_or("fio");
        put(format!(
            "<p>{}, last command: <code>{}</code></p>",
            escaped(version),
            escaped(&fio.command)
        ));
    }
    put("</body></html>".into());
    out
}
