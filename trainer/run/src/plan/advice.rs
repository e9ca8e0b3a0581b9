//! Finds a change of settings with which a run fits.
//!
//! Each candidate is planned as a run of its own. Candidates that train on the same samples in each step are
//! preferred. Among these, the shortest step wins; of equal steps, the candidate closest to the present
//! settings.

use super::outlook::Span;
use super::places::Place;
use super::{Hardware, Plan, Problem, ProblemKind};
use crate::computation::ActivationCheckpointing;
use crate::config::{ResidentFraction, RunSettings, Stage, Tier};

/// A step must be shorter by this fraction to prefer a candidate that is further from the present settings.
const GAIN_MIN: f64 = 0.02;

/// Shortest sequence tried; if that does not fit, the reason is another.
const SEQ_LEN_MIN: usize = 128;

/// Candidate: changed settings of the run.
struct Change {
    /// Settings to change, as text.
    words: Vec<String>,
    settings: RunSettings,
}

/// Returns what to change so that a run with `problem` fits; `None` if no candidate does.
pub(super) fn what_fits(
    problem: &Problem,
    settings: &RunSettings,
    hardware: &Hardware,
) -> Option<String> {
    if !matches!(
        problem.kind,
        ProblemKind::HostMemory | ProblemKind::GpuMemory
    ) {
        return None;
    }
    let plan = |change: &Change| {
        let plan = Plan::unadvised(&change.settings, hardware.clone()).ok()?;
        plan.problems().is_empty().then_some(plan.bound.s)
    };
    let mut best: Option<(Change, f64)> = None;
    for place in farther(settings) {
        // The largest micro-batch that fits; smaller ones are not faster.
        let fits = splits(place).find_map(|change| Some((plan(&change)?, change)));
        if let Some((s, change)) = fits
            && best
                .as_ref()
                .is_none_or(|(_, least)| s < least * (1.0 - GAIN_MIN))
        {
            best = Some((change, s));
        }
    }
    let best = best.or_else(|| {
        let mut less = fewer(settings);
        less.find_map(|change| plan(&change).map(|s| (change, s)))
    });
    best.map(|(change, s)| {
        format!(
            "set {}: the run then fits, with steps of at least {}",
            change.words.join(" and "),
            Span(s)
        )
    })
}

/// Candidates: the run with activation checkpointing chosen to fit, then with its state further from the GPU.
fn farther(settings: &RunSettings) -> impl Iterator<Item = Change> {
    let rank = |tier: Tier| match tier {
        Tier::None => 0,
        Tier::Cpu => 1,
        Tier::Nvme => 2,
    };
    let now = settings.placement.clone();
    let as_it_is = Change {
        words: Vec::new(),
        settings: settings.clone(),
    };
    let farther = Place::ALL.into_iter().filter_map(move |place| {
        let [param, optimizer] = place.tiers();
        let nearer = rank(param) < rank(now.param) || rank(optimizer) < rank(now.optimizer);
        let same = (param, optimizer) == (now.param, now.optimizer);
        let shares = now.resident_fraction != ResidentFraction::Auto && now.has_store();
        let divided = now.stage != Stage::Parameters;
        // State on drives is only tried together with as much in host memory as fits; the plan chooses
        // fraction and staging.
        // State in host memory stays in GPU memory as far as it fits, without being told.
        // With drives GPU memory is left to others, unless it is asked for.
        let never = matches!(place, Place::Drives | Place::Host | Place::DrivesHostAndGpu);
        if nearer || never || (same && !shares && !divided) {
            return None;
        }
        let mut words = Vec::new();
        if divided {
            words.push("zero_optimization.stage = 3".into());
        }
        for (key, tier, before) in [
            ("offload_param", param, now.param),
            ("offload_optimizer", optimizer, now.optimizer),
        ] {
            if tier != before {
                let path = match tier {
                    Tier::Nvme => " with an nvme_path",
                    Tier::None | Tier::Cpu => "",
                };
                let word = tier.word();
                words.push(format!("zero_optimization.{key}.device = \"{word}\"{path}"));
            }
        }
        let changed = place.apply_to(settings);
        if place == Place::DrivesAndHost && now.resident_fraction != ResidentFraction::Auto {
            words.push("offload.resident_fraction = \"auto\"".into());
        }
        if settings.offload.staging_bytes.is_some() && changed.placement.has_store() {
            words.push("offload.staging_bytes = \"auto\"".into());
        }
        (!words.is_empty()).then_some(Change {
            words,
            settings: changed,
        })
    });
    let given = !matches!(
        settings.train.activation_checkpointing,
        None | Some(ActivationCheckpointing::Full)
    );
    let keeping_less = given.then(|| {
        let mut settings = settings.clone();
        settings.train.activation_checkpointing = None;
        Change {
            words: vec!["train.activation_checkpointing = \"auto\"".into()],
            settings,
        }
    });
    std::iter::once(as_it_is).chain(keeping_less).chain(farther)
}

/// Candidates: `change`, then the same samples in smaller and smaller micro-batches.
fn splits(change: Change) -> impl Iterator<Item = Change> {
    let batch = change.settings.batch;
    let parts = (0..usize::BITS)
        .map(|power| 1usize << power)
        .take_while(move |parts| {
            batch.micro_batch.is_multiple_of(*parts) && *parts <= batch.micro_batch
        });
    parts.map(move |parts| {
        let mut settings = change.settings.clone();
        let mut words = change.words.clone();
        if parts > 1 {
            settings.batch.micro_batch /= parts;
            settings.batch.micro_batches *= parts;
            words.push(format!(
                "train_micro_batch_size_per_gpu = {} with gradient_accumulation_steps = {}",
                settings.batch.micro_batch, settings.batch.micro_batches
            ));
        }
        Change { words, settings }
    })
}

/// Candidates: fewer samples in a step, one in each micro-batch, then shorter sequences.
fn fewer(settings: &RunSettings) -> impl Iterator<Item = Change> {
    let halves = |count: usize| {
        std::iter::successors(Some(count / 2), |count| Some(count / 2))
            .take_while(|&count| count > 0)
    };
    let mut one = settings.clone();
    one.batch.micro_batches *= one.batch.micro_batch;
    one.batch.micro_batch = 1;
    let samples = one.clone();
    // The same samples with the MLP computed in chunks.
    let whole = one.clone();
    let slices = [2, 4, 8, 16].into_iter().filter_map(move |chunks| {
        let finer = chunks > whole.train.mlp_chunks && chunks <= whole.model.intermediate_size;
        let mut settings = whole.clone();
        settings.train.mlp_chunks = chunks;
        let count = settings.batch.micro_batches;
        finer.then(|| Change {
            words: vec![
                format!("train.mlp_chunks = {chunks}"),
                format!(
                    "train_micro_batch_size_per_gpu = 1 with gradient_accumulation_steps = {count}"
                ),
            ],
            settings,
        })
    });
    let fewer = halves(one.batch.micro_batches).map(move |count| {
        let mut settings = samples.clone();
        settings.batch.micro_batches = count;
        Change {
            words: vec![format!(
                "train_micro_batch_size_per_gpu = 1 with gradient_accumulation_steps = {count}"
            )],
            settings,
        }
    });
    one.batch.micro_batches = 1;
    let sequence_ranks = one.batch.sequence_ranks as usize;
    let shorter = halves(one.batch.seq_len)
        .take_while(move |&len| len >= SEQ_LEN_MIN && len.is_multiple_of(sequence_ranks));
    slices.chain(fewer).chain(shorter.map(move |seq_len| {
        let mut settings = one.clone();
        settings.batch.seq_len = seq_len;
        Change {
            words: vec![format!(
                "train.seq_len = {seq_len} with train_micro_batch_size_per_gpu = 1 and gradient_accumulation_steps = 1"
            )],
            settings,
        }
    }))
}
