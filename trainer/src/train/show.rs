//! Prints what a run will do before it starts, what was opened, and why a step changed nothing.

use crate::config::{RunSettings, Tier};
use crate::data::Corpus;
use crate::open::OpenRun;
use crate::plan::Plan;
use offload_support::outln;
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

/// Prints the plan before training begins.
pub(super) fn plan(settings: &RunSettings, plan: &Plan, corpus: Option<&Corpus>) {
    outln!("settings");
    for line in settings.lines() {
        outln!("  {line}");
    }
    for note in &settings.notes {
        outln!("note: {note}");
    }
    let placement = &settings.placement;
    let tiers = [placement.param, placement.optimizer];
    if plan.hardware.gpu.is_none() && tiers != [Tier::Nvme; 2] {
        outln!(
            "note: training runs on the processor: devices \"none\" and \"cpu\" are both host memory"
        );
    } else if !plan.lives_in_gpu && tiers.contains(&Tier::None) {
        outln!(
            "note: device \"none\" means host memory in this run: tiles are in GPU memory only when both devices are \"none\""
        );
    }
    outln!("plan");
    for line in settings.summary() {
        outln!("  {line}");
    }
    for line in plan.to_string().lines() {
        outln!("  {line}");
    }
    match corpus {
        Some(corpus) => outln!("  tokenizer {}", corpus.describe()),
        None => outln!("  data      none: the run has no steps"),
    }
    // Printed last, where they are seen.
    for warning in &settings.warnings {
        outln!("warning: {warning}");
    }
}

/// Prints the opened store, its devices and the step.
pub(super) fn opened(run: &OpenRun, resumed: bool) {
    let opened = &run.opened;
    outln!("  engine    {}, iodepth {}", opened.engine, opened.iodepth);
    for device in &opened.devices {
        let rate = |bytes: u64| {
            if bytes == 0 {
                "unknown".into()
            } else {
                format!("{:.2} GB/s", bytes as f64 / 1e9)
            }
        };
        outln!(
            "  device    {}: reads {}, writes {}",
            device.path,
            rate(device.read_bytes_per_s),
            rate(device.write_bytes_per_s)
        );
    }
    for note in &opened.notes {
        outln!("note: {note}");
    }
    if resumed {
        outln!("resumed at step {}", run.state.step);
    } else {
        outln!("started with {}", run.started_with);
    }
}
