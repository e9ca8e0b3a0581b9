//! Line charts over the number of drives, as plain SVG.

use std::fmt::Write;

const PANEL_WIDTH: f64 = 300.0;
const PANEL_HEIGHT: f64 = 220.0;
const MARGIN: f64 = 56.0;

/// Height of the title and the panels' names; description lines come between them.
const HEAD: f64 = 46.0;
const LINE_HEIGHT: f64 = 18.0;

/// Average width of a letter.
const LETTER_WIDTH: f64 = 6.2;
const LEGEND_WIDTH: f64 = 180.0;

/// The legend must fit.
const WIDTH_MIN: f64 = 760.0;

/// A line of a chart.
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) colour: &'static str,
    pub(crate) dashes: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws a title, description lines, one chart per panel, and a legend.
pub(crate) fn svg(title: &str, about: &[String], panels: &[(&str, Vec<Line>)]) -> String {
    let width = panels.len() as f64 * (PANEL_WIDTH + MARGIN) + MARGIN;
    let letters = about.iter().map(|line| line.chars().count()).max();
    let about_width = letters.unwrap_or(0) as f64 * LETTER_WIDTH + 2.0 * MARGIN;
    let width = width.max(WIDTH_MIN).max(about_width.ceil());
    let head = HEAD + LINE_HEIGHT * about.len() as f64;
    let height = head + PANEL_HEIGHT + 2.0 * MARGIN;
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
        r#"<text x="{MARGIN}" y="24" font-size="15">{}</text>"#,
        escaped(title)
    ));
    for (index, line) in about.iter().enumerate() {
        let y = 42.0 + LINE_HEIGHT * index as f64;
        put(format!(
            r#"<text x="{MARGIN}" y="{y}">{}</text>"#,
            escaped(line)
        ));
    }
    for (index, (name, lines)) in panels.iter().enumerate() {
        let left = MARGIN + index as f64 * (PANEL_WIDTH + MARGIN);
        put(panel(name, lines, left, head));
    }
    let lines = panels.first().map_or(&[][..], |(_, lines)| lines);
    for (index, line) in lines.iter().enumerate() {
        let (x, y) = (MARGIN + index as f64 * LEGEND_WIDTH, height - 18.0);
        put(format!(
            r#"<line x1="{x}" y1="{y}" x2="{}" y2="{y}" stroke="{}" stroke-width="2" stroke-dasharray="{}"/><text x="{}" y="{}">{}</text>"#,
            x + 28.0,
            line.colour,
            line.dashes,
            x + 34.0,
            y + 4.0,
            escaped(line.name)
        ));
    }
    put("</svg>".into());
    out
}

fn panel(name: &str, lines: &[Line], left: f64, head: f64) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let drives_max = points().map(|point| point.0).fold(1.0, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max).max(1e-3) * 1.08;
    let x = |drives: f64| left + PANEL_WIDTH * drives / drives_max;
    let y = |rate: f64| head + PANEL_HEIGHT * (1.0 - rate / top);
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        r##"<text x="{}" y="{}" font-size="13">{name}</text><path d="M{left} {head} V{} H{}" fill="none" stroke="#222"/>"##,
        left + 8.0,
        head - 4.0,
        head + PANEL_HEIGHT,
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
            head + PANEL_HEIGHT + 18.0
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

/// Formats with two or three significant digits.
fn short(rate: f64) -> String {
    match rate {
        rate if rate >= 10.0 => format!("{rate:.0}"),
        rate if rate >= 1.0 => format!("{rate:.1}"),
        rate if rate >= 0.1 => format!("{rate:.2}"),
        rate => format!("{rate:.4}"),
    }
}

/// Escapes text for HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_a_picture_stand_above_its_panels_and_fit() {
        let panels = || {
            let line = Line {
                name: "one",
                colour: "#000",
                dashes: "",
                points: vec![(1.0, 2.0)],
            };
            [("read", vec![line])]
        };
        let height = |about: &[String]| -> f64 {
            let svg = svg("title", about, &panels());
            let (_, rest) = svg.split_once(" height=\"").unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        };
        let lines = ["first", "second & third"].map(str::to_owned);
        assert_eq!(height(&lines) - height(&lines[..1]), LINE_HEIGHT);
        let drawn = svg("title", &lines, &panels());
        assert!(drawn.contains("second &amp; third"), "{drawn}");
        // The panel begins below the description lines.
        let top = HEAD + 2.0 * LINE_HEIGHT;
        assert!(
            drawn.contains(&format!(r#"d="M{MARGIN} {top} V"#)),
            "{drawn}"
        );
        let long = svg("title", &["x".repeat(300)], &panels());
        assert!(long.contains(&format!(
            r#"width="{}""#,
            300.0 * LETTER_WIDTH + 2.0 * MARGIN
        )));
    }
}
