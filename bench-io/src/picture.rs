//! Line charts over the number of drives, as plain SVG.

use std::fmt::Write;

const PANEL_WIDTH: f64 = 300.0;
const PANEL_HEIGHT: f64 = 220.0;

/// Beside and below a panel: the axis' numbers and its title.
const MARGIN: f64 = 64.0;

/// Most intervals between the numbers of the vertical axis.
const TICKS_MAX: f64 = 6.0;

/// Shape that marks the points of a line, also in the legend.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    Circle,
    Square,
    Triangle,
    Diamond,
}

impl Mark {
    /// Path around a point.
    fn path(self) -> &'static str {
        match self {
            Self::Circle => "m-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0",
            Self::Square => "m-3.5,-3.5 h7 v7 h-7 z",
            Self::Triangle => "m0,-4.5 l4.5,8 h-9 z",
            Self::Diamond => "m0,-5 l5,5 l-5,5 l-5,-5 z",
        }
    }
}

/// Height of the title and the panels' names; description lines come between them.
const HEAD: f64 = 46.0;
const LINE_HEIGHT: f64 = 18.0;

/// Average width of a letter.
const LETTER_WIDTH: f64 = 6.2;
const LEGEND_WIDTH: f64 = 180.0;
const LEGEND_HEIGHT: f64 = 30.0;

/// The legend must fit.
const WIDTH_MIN: f64 = 760.0;

/// How a series is drawn, wherever it stands in a chart.
#[derive(Clone, Copy)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) colour: &'static str,
    pub(crate) dashes: &'static str,
    pub(crate) mark: Mark,
}

/// A line of a chart.
pub(crate) struct Line {
    pub(crate) series: Series,
    /// Number of drives and value.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws a title, description lines, one chart of `unit` over drives per panel, and a legend.
pub(crate) fn svg(
    title: &str,
    unit: &str,
    about: &[String],
    panels: &[(&str, Vec<Line>)],
) -> String {
    let width = panels.len() as f64 * (PANEL_WIDTH + MARGIN) + MARGIN;
    let letters = about.iter().map(|line| line.chars().count()).max();
    let about_width = letters.unwrap_or(0) as f64 * LETTER_WIDTH + 2.0 * MARGIN;
    let width = width.max(WIDTH_MIN).max(about_width.ceil());
    let head = HEAD + LINE_HEIGHT * about.len() as f64;
    let height = head + PANEL_HEIGHT + MARGIN + LEGEND_HEIGHT;
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
        put(panel(name, unit, lines, left, head));
    }
    let lines = panels.first().map_or(&[][..], |(_, lines)| lines);
    for (index, line) in lines.iter().enumerate() {
        let (x, y) = (MARGIN + index as f64 * LEGEND_WIDTH, height - 18.0);
        put(format!(
            r#"<line x1="{x}" y1="{y}" x2="{}" y2="{y}" stroke="{}" stroke-width="2" stroke-dasharray="{}"/>{}<text x="{}" y="{}">{}</text>"#,
            x + 28.0,
            line.series.colour,
            line.series.dashes,
            marker(line.series, x + 14.0, y),
            x + 34.0,
            y + 4.0,
            escaped(line.series.name)
        ));
    }
    put("</svg>".into());
    out
}

fn marker(series: Series, x: f64, y: f64) -> String {
    let (shape, colour) = (series.mark.path(), series.colour);
    format!(r#"<path d="M{x:.1},{y:.1} {shape}" fill="{colour}"/>"#)
}

/// Distance of numbers on an axis up to `top`: 1, 2 or 5 times a power of ten.
fn tick_step(top: f64) -> f64 {
    let power = 10f64.powf((top / TICKS_MAX).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps
        .into_iter()
        .find(|step| top / step <= TICKS_MAX)
        .unwrap_or(10.0 * power)
}

fn panel(name: &str, unit: &str, lines: &[Line], left: f64, head: f64) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let drives_max = points().map(|point| point.0).fold(1.0, f64::max);
    let highest = points().map(|point| point.1).fold(0.0, f64::max).max(1e-3);
    let step = tick_step(highest);
    let ticks = (highest / step).ceil() as u32;
    let top = f64::from(ticks) * step;
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
    let middle = head + PANEL_HEIGHT / 2.0;
    let _ = write!(
        out,
        r#"<text x="{}" y="{}" text-anchor="middle">drives</text><text transform="translate({},{middle}) rotate(-90)" text-anchor="middle">{}</text>"#,
        left + PANEL_WIDTH / 2.0,
        head + PANEL_HEIGHT + 36.0,
        left - 42.0,
        escaped(unit)
    );
    for tick in 0..=ticks {
        let rate = f64::from(tick) * step;
        let _ = write!(
            out,
            r##"<path d="M{left} {y} h{PANEL_WIDTH}" stroke="#eee"/><text x="{}" y="{}" text-anchor="end">{}</text>"##,
            left - 6.0,
            y(rate) + 4.0,
            short(rate, step),
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
            line.series.colour,
            line.series.dashes
        );
        for &(drives, rate) in &line.points {
            out += &marker(line.series, x(drives), y(rate));
        }
    }
    out
}

/// A multiple of `step` with its decimals.
fn short(rate: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    format!("{rate:.decimals$}")
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

    fn series(name: &'static str, mark: Mark) -> Series {
        Series {
            name,
            colour: "#000",
            dashes: "",
            mark,
        }
    }

    #[test]
    fn lines_about_a_picture_stand_above_its_panels_and_fit() {
        let panels = || {
            let line = Line {
                series: series("one", Mark::Circle),
                points: vec![(1.0, 2.0)],
            };
            [("read", vec![line])]
        };
        let height = |about: &[String]| -> f64 {
            let svg = svg("title", "GB/s", about, &panels());
            let (_, rest) = svg.split_once(" height=\"").unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        };
        let lines = ["first", "second & third"].map(str::to_owned);
        assert_eq!(height(&lines) - height(&lines[..1]), LINE_HEIGHT);
        let drawn = svg("title", "GB/s", &lines, &panels());
        assert!(drawn.contains("second &amp; third"), "{drawn}");
        // The panel begins below the description lines.
        let top = HEAD + 2.0 * LINE_HEIGHT;
        assert!(
            drawn.contains(&format!(r#"d="M{MARGIN} {top} V"#)),
            "{drawn}"
        );
        let long = svg("title", "GB/s", &["x".repeat(300)], &panels());
        assert!(long.contains(&format!(
            r#"width="{}""#,
            300.0 * LETTER_WIDTH + 2.0 * MARGIN
        )));
    }

    #[test]
    fn an_axis_has_few_round_numbers_and_reaches_the_highest_point() {
        for (top, step) in [
            (1.0, 0.2),
            (3.1, 1.0),
            (6.0, 1.0),
            (6.1, 2.0),
            (24.0, 5.0),
            (26.0, 5.0),
            (448.0, 100.0),
            (0.003, 0.0005),
        ] {
            assert!(
                (tick_step(top) / step - 1.0).abs() < 1e-9,
                "{top}: {}",
                tick_step(top)
            );
        }
        assert_eq!(
            [short(0.0005, 0.0005), short(25.0, 5.0), short(0.4, 0.2)],
            ["0.0005", "25", "0.4"]
        );
        let line = |name, mark| Line {
            series: series(name, mark),
            points: vec![(1.0, 12.4), (2.0, 24.6)],
        };
        let drawn = svg(
            "title",
            "GB/s",
            &[],
            &[(
                "read",
                vec![line("one", Mark::Square), line("other", Mark::Diamond)],
            )],
        );
        for part in [">25</text>", ">0</text>", ">GB/s</text>", ">drives</text>"] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        assert!(!drawn.contains(">30</text>"), "{drawn}");
        // Two points and the legend; the mark belongs to the series, not to its position.
        for (mark, marks) in [(Mark::Square, 3), (Mark::Diamond, 3), (Mark::Circle, 0)] {
            assert_eq!(drawn.matches(mark.path()).count(), marks, "{mark:?}");
        }
    }
}
