//! The chart of a training report: TFLOPS over the number of drives.

use crate::picture::{self, Line, Mark, Series};

const OURS: &str = "#1b6ca8";
const DEEPSPEED: &str = "#d95f02";
const PREDICTED: &str = "7 4";

/// Results for one number of drives, in TFLOPS.
#[derive(Default)]
pub(crate) struct Drawn {
    pub(crate) drives: f64,
    pub(crate) predicted: Option<f64>,
    pub(crate) measured: Option<f64>,
    pub(crate) deepspeed_predicted: Option<f64>,
    pub(crate) deepspeed_measured: Option<f64>,
}

/// Draws the results, with a line for each kind that there is.
pub(crate) fn draw(about: &[String], rows: &[Drawn]) -> String {
    let line = |name, colour, dashes, mark, value: fn(&Drawn) -> Option<f64>| {
        let points = rows
            .iter()
            .filter_map(|row| Some((row.drives, value(row)?)));
        Line {
            series: Series {
                name,
                colour,
                dashes,
                mark,
            },
            points: points.collect(),
        }
    };
    let lines = [
        line("ours, predicted", OURS, PREDICTED, Mark::Circle, |row| {
            row.predicted
        }),
        line("ours, measured", OURS, "", Mark::Triangle, |row| {
            row.measured
        }),
        line(
            "DeepSpeed, predicted",
            DEEPSPEED,
            PREDICTED,
            Mark::Square,
            |row| row.deepspeed_predicted,
        ),
        line("DeepSpeed, measured", DEEPSPEED, "", Mark::Diamond, |row| {
            row.deepspeed_measured
        }),
    ];
    let lines = lines.into_iter().filter(|line| !line.points.is_empty());
    picture::svg(
        "Training throughput over drives",
        "TFLOPS",
        about,
        &[("training", lines.collect())],
    )
}
