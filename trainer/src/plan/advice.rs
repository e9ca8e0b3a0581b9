//! For a run that does not fit: a change of its settings with which it would.
//!
//! Changes are tried, not reasoned about: each is planned as a run of its own. Those that train on the same samples a step
//! come first, and of them the one with the shortest step is told, the nearest to what was asked where steps are equal.

use super::outlook::Span;
use super::places::Place;
use super::{Hardware, Plan, Problem, ProblemKind};
use crate::compute::ActivationCheckpointing;
use crate::config::{ResidentFraction, RunSettings, Stage, Tier};

/// A step that is shorter by less is no reason for a change that is further from what was asked.
const GAIN_MIN: f64 = 0.02;

/// Sequences are not cut shorter than this: what does not fit then has other reasons.
const SEQ_LEN_MIN: usize = 128;

/// Another form of the run.
struct Change {
    /// What to set.
    words: Vec<String>,
    settings: RunSettings,
}

/// What to change so that a run that has `problem` fits; `None` when nothing that is tried does.
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
        // The largest micro-batch that fits there: a smaller one is not faster.
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

/// The run as it is, then keeping no more than fits, then with its state farther away.
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
        // What is asked of a drive but for what fits: the share and the staging are the plan's to choose then.
        if nearer || place == Place::Drives || (same && !shares && !divided) {
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
        let changed = place.of(settings);
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

/// `change`, then with the same samples a step in smaller and smaller micro-batches.
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

/// The run with fewer samples a step, one at a time, then with shorter sequences.
fn fewer(settings: &RunSettings) -> impl Iterator<Item = Change> {
    let halves = |count: usize| {
        std::iter::successors(Some(count / 2), |count| Some(count / 2))
            .take_while(|&count| count > 0)
    };
    let mut one = settings.clone();
    one.batch.micro_batches *= one.batch.micro_batch;
    one.batch.micro_batch = 1;
    let samples = one.clone();
    // The same samples, and a block's feed-forward half in slices.
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
    let shorter = halves(one.batch.seq_len).take_while(|&len| len >= SEQ_LEN_MIN);
    slices.chain(fewer).chain(shorter.map(move |seq_len| {
        let mut settings = one.clone();
        settings.batch.seq_len = seq_len;
        Change {
            words: vec![format!(
                "train.seq_len = {seq_len} with train_micro_batch_size_per_gpu = 1"
            )],
            settings,
        }
    }))
}
