//! `trainer tokens`: what a run is about to learn, as text.

use offload_support::{console, outln};
use trainer::config::RunSettings;
use trainer::data::show::{Marks, show};
use trainer::data::{Corpus, Frame};

pub(crate) const EXAMPLES: &str = "Examples:
  trainer tokens RUN.toml                                  # the first three samples; what does not count in the loss is dim
  trainer tokens RUN.toml --samples 20 | less              # what counts stands between \u{27E6} and \u{27E7}
  trainer tokens RUN.toml --set data.loss_on=completions   # before such a run is begun";

/// Makes the tokens where the run will look for them, and prints the first samples.
pub(crate) fn tokens(settings: &RunSettings, samples: u64) -> anyhow::Result<()> {
    let corpus = Corpus::find(&settings.data, &Frame::of(settings))?;
    outln!("{}", corpus.describe());
    corpus.prepare(settings, &mut |note| outln!("{note}"))?;
    let data = corpus.open(settings)?;
    outln!("{}\n", data.describe());
    let marks = if console::in_colour(&std::io::stdout()) {
        Marks::Colours
    } else {
        Marks::Brackets
    };
    let text = show(&corpus, &data, samples.min(data.windows()), marks)?;
    console::out(format_args!("{text}"));
    Ok(())
}
