//! Words about a run: what it will do before it starts, what was opened, why a step changed nothing, and what limited it.

use std::path::Path;

use offload_support::outln;
use swapper::Bound;
use training_run::config::{RunSettings, Tier};
use training_run::data::{Corpus, Data};
use training_run::open::OpenRun;
use training_run::plan::Plan;
use training_run::runs::{SETTINGS_FILE, utc};
use training_state::metrics::StepMetrics;
use training_state::overflow::OverflowState;

/// Says why a step changed nothing and which loss scale is next.
pub(super) fn skipped(metrics: &StepMetrics, next: &OverflowState) -> String {
    let (step, scale) = (metrics.step, next.scale);
    let next = match metrics.loss_scale {
        None => "the weights are unchanged".into(),
        Some(now) if now == scale => {
            format!("the weights are unchanged, the loss scale stays at {scale}")
        }
        Some(now) => {
            format!("the weights are unchanged, the loss scale changes from {now} to {scale}")
        }
    };
    format!("step {step:>5} skipped: its gradients are not finite; {next}")
}

/// Names what limited a step of `step_s` seconds. The rates of the bus and the network are not measured, but `exchange_s`
/// is: the time that computing waited for other ranks.
pub(super) fn bottleneck((exchange_s, step_s): (f64, f64), bound: &Bound, nodes: u32) -> String {
    if exchange_s <= bound.s {
        return bound.wall.word().into();
    }
    let (what, whom) = match nodes {
        1 => ("other ranks", "them"),
        _ => ("network", "other nodes"),
    };
    let waited = 100.0 * exchange_s / step_s;
    format!("{what} (waited {waited:.0} % of the step for {whom})")
}

/// Describes an evaluation after a step.
pub(super) fn evaluated(metrics: &StepMetrics, loss: f64, is_lowest: bool) -> String {
    let lowest = if is_lowest { ", the lowest so far" } else { "" };
    format!(
        "{}  step {}  validation loss {loss:.4}, perplexity {:.2}{lowest}",
        utc(metrics.unix_s as u64),
        metrics.step,
        loss.exp()
    )
}

/// Notes that are printed; `settings.toml` has all.
const NOTES_MAX: usize = 5;

/// Prints what the run will do: the lines that a person checks, or the whole plan and all settings if `verbose`.
/// Returns the lines of `settings.toml`.
pub(super) fn plan(
    settings: &RunSettings,
    plan: &Plan,
    text: Option<(&Corpus, &Data)>,
    verbose: bool,
) -> Vec<String> {
    let model = &settings.model;
    let mut overview = vec![format!(
        "model     {}, {:.2} M parameters, {} layers of {}",
        model.architecture.model_type(),
        plan.params_count as f64 / 1e6,
        model.layers,
        model.hidden_size
    )];
    overview.push(match text {
        Some((corpus, data)) => {
            format!(
                "data      {}; tokenizer: {}",
                data.describe(),
                corpus.describe()
            )
        }
        None => "data      none: the run has no steps".into(),
    });
    overview.extend(settings.summary());
    overview.extend(plan.overview(settings));
    let mut warnings = settings.warnings.clone();
    if let Some((_, data)) = text {
        warnings.extend(data.warnings());
    }
    let mut notes = settings.notes.clone();
    let placement = &settings.placement;
    let tiers = [placement.param, placement.optimizer];
    if !plan.in_gpu.contains(&true) && plan.hardware.gpu.is_some() && tiers.contains(&Tier::None) {
        notes.push(
            "device \"none\" means host memory in this run: tiles are in GPU memory only when both devices are \"none\"".into(),
        );
    }
    let at_risk = plan.loss_warning(settings);
    let plan = plan.to_string();
    let settings_lines = settings.written();
    for line in &overview {
        outln!("{line}");
    }
    if verbose {
        plan.lines().for_each(|line| outln!("{line}"));
        settings_lines.iter().for_each(|line| outln!("  {line}"));
    }
    let notes_shown = if verbose { notes.len() } else { NOTES_MAX };
    for note in notes.iter().take(notes_shown) {
        outln!("note: {note}");
    }
    if notes.len() > notes_shown {
        let more = notes.len() - notes_shown;
        outln!("note: settings.toml in the run directory has {more} more notes");
    }
    warnings.extend(at_risk);
    // Printed last, where they are seen.
    for warning in &warnings {
        outln!("warning: {warning}");
    }
    let remarks = overview.iter().map(String::as_str).chain(plan.lines());
    let remarks = remarks.map(str::to_owned);
    let notes = notes.iter().map(|note| format!("note: {note}"));
    let warnings = (warnings.iter()).map(|warning| format!("warning: {warning}"));
    let remarks = remarks.chain(notes).chain(warnings);
    let remarks = remarks.map(|line| format!("# {}", line.replace('\n', " ")));
    let head =
        "# All settings of the newest start, as a run file. Written by every start and never read.";
    (std::iter::once(head.to_owned()).chain(remarks))
        .chain(settings_lines)
        .collect()
}

/// Writes `settings.toml`. Training does not depend on it.
pub(super) fn keep_report(run_dir: &Path, lines: &[String]) {
    let path = run_dir.join(SETTINGS_FILE);
    let mut text = lines.join("\n");
    text.push('\n');
    if let Err(error) = std::fs::write(&path, text) {
        tracing::warn!(
            "cannot write {}: {error}. Training continues",
            path.display()
        );
    }
}

/// Prints the opened store, with its devices if `verbose`, and the step.
pub(super) fn opened(run: &OpenRun, resumed: bool, verbose: bool) {
    let opened = &run.opened;
    if verbose {
        outln!("engine    {}, iodepth {}", opened.engine, opened.iodepth);
    }
    for device in opened.devices.iter().filter(|_| verbose) {
        let rate = |bytes: u64| {
            if bytes == 0 {
                "unknown".into()
            } else {
                format!("{:.2} GB/s", bytes as f64 / 1e9)
            }
        };
        outln!(
            "device    {}: reads {}, writes {}",
            device.path,
            rate(device.read_bytes_per_s),
            rate(device.write_bytes_per_s)
        );
    }
    for note in opened.notes.iter().filter(|_| verbose) {
        outln!("note: {note}");
    }
    if resumed {
        outln!("resumed at step {}", run.state.step);
    } else {
        outln!("started with {}", run.started_with);
    }
}

#[cfg(test)]
mod tests {
    use swapper::Wall;

    use super::*;

    #[test]
    fn a_step_that_mostly_waited_for_other_ranks_says_so() {
        let bound = Bound {
            s: 1.0,
            wall: Wall::Compute,
            terms: Vec::new(),
        };
        let of = |exchange_s, nodes| bottleneck((exchange_s, 4.0), &bound, nodes);
        assert_eq!(of(0.9, 2), "compute");
        assert_eq!(
            of(2.5, 2),
            "network (waited 62 % of the step for other nodes)"
        );
        assert_eq!(of(2.0, 1), "other ranks (waited 50 % of the step for them)");
    }
}
