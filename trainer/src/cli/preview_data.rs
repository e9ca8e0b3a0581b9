//! `trainer preview-data`: prints the first samples of a run.

use offload_support::{console, outln};
use training_run::config::RunSettings;
use training_run::data::show::{Marks, show};
use training_run::data::{Corpus, Frame};
use training_run::open::check_drives;

pub(crate) const EXAMPLES: &str = "Examples:
  trainer preview-data RUN.toml                                   # three samples; tokens outside the loss are dim
  trainer preview-data RUN.toml --samples 20 | less               # tokens in the loss stand between \u{27E6} and \u{27E7}
  trainer preview-data RUN.toml --set data.loss_on=completions";

/// Tokenizes the data into the cache that the run will use, and prints the first samples.
pub(crate) fn preview(settings: &RunSettings, samples: u64) -> anyhow::Result<()> {
    check_drives(settings)?;
    let corpus = Corpus::find(&settings.data, &Frame::from_settings(settings))?;
    outln!("{}", corpus.describe());
    corpus.prepare(settings, &mut |note| outln!("{note}"))?;
    let data = corpus.open(settings)?;
    outln!("{}", data.describe());
    for warning in data.warnings() {
        outln!("warning: {warning}");
    }
    outln!("");
    let marks = if console::in_colour(&std::io::stdout()) {
        Marks::Colours
    } else {
        Marks::Brackets
    };
    let text = show(&corpus, &data, samples.min(data.windows()), marks)?;
    console::out(format_args!("{text}"));
    Ok(())
}
