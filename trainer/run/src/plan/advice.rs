//! Finds a change of settings with which a run fits.
//!
//! Each candidate is planned as a run of its own. Candidates that train on the same samples in each step are
//! preferred. Among these, the shortest step wins; of equal steps, the candidate closest to the present
//! settings.

use offload_support::units::ApproxBytes;

use super::outlook::Span;
use super::places::Place;
use super::{Hardware, Plan, ProblemKind};
use crate::computation::ActivationCheckpointing;
use crate::config::{
    ActivationsChoice, Fraction, GradientsChoice, OptimizerDevice, ResidentFraction, RunSettings,
    Stage, Tier,
};

/// A step must be shorter by this fraction to prefer a candidate that is further from the present settings.
const GAIN_MIN: f64 = 0.02;

/// Shortest sequence tried; if that does not fit, the reason is another.
const SEQ_LEN_MIN: usize = 128;

/// Settings that are changed, and their values in a run file.
type Words = Vec<(&'static str, String)>;

/// Candidate: changed settings of the run.
#[derive(Clone)]
struct Change {
    words: Words,
    settings: RunSettings,
}

/// What to change so that a run fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// Keys and their values in a run file, TOML.
    pub changes: Vec<(&'static str, String)>,
    step_s: f64,
    /// Space on drives, if the run had no state there.
    new_device_bytes: u64,
}

impl Advice {
    /// The changes as a sentence.
    fn sentence(&self) -> String {
        let drives = match self.new_device_bytes {
            0 => String::new(),
            bytes => format!("{} on drives and ", ApproxBytes(bytes)),
        };
        // Each device has a path of its own.
        let path = match (self.changes.iter()).any(|(_, value)| value == "\"nvme\"") {
            true => ", with an nvme_path",
            false => "",
        };
        format!(
            "set {}{path}: the run then fits, with {drives}steps of at least {}",
            text(&self.changes),
            Span(self.step_s)
        )
    }
}

/// Formats changes: `key = value and key = value`.
fn text(words: &Words) -> String {
    let words = words.iter().map(|(key, value)| format!("{key} = {value}"));
    words.collect::<Vec<_>>().join(" and ")
}

impl Plan {
    /// Adds what to change to problems of memory.
    pub(super) fn advise(&mut self, settings: &RunSettings) {
        if !self.lacks_memory() {
            return;
        }
        let mut search = Search::new(self);
        let found = search.any(settings);
        let divides = match self.ranks > self.sequence_ranks {
            true => ". A higher train.sequence_parallel divides each sequence among more ranks",
            false => "",
        };
        for problem in &mut self.problems {
            let (least, memory) = match problem.kind {
                ProblemKind::GpuMemory => (&search.least_gpu, "GPU memory"),
                ProblemKind::HostMemory => (&search.least_host, "host memory"),
                _ => continue,
            };
            problem.change = match (&found, least) {
                (Some(advice), _) => advice.sentence(),
                (None, Some((bytes, words))) => format!(
                    "no other place of the state, smaller micro-batch or shorter sequence makes the run fit; the least that one of them takes is {} of {memory}, with {}{divides}",
                    ApproxBytes(*bytes),
                    text(words)
                ),
                (None, None) => continue,
            };
        }
        self.advice = found;
    }

    /// Like [`Plan::advise`], with changes that leave the state where it is and the samples of a step as they are.
    pub(super) fn advise_here(&mut self, settings: &RunSettings) {
        if !self.lacks_memory() {
            return;
        }
        let advice = Search::new(self).shortest(here(settings).into_iter());
        let sentence = advice.map(|advice| advice.sentence());
        for problem in self.problems.iter_mut().filter(|one| one.kind.is_memory()) {
            problem.change = sentence.clone().unwrap_or_default();
        }
    }

    fn lacks_memory(&self) -> bool {
        self.problems.iter().any(|problem| problem.kind.is_memory())
    }
}

/// Plans candidates.
struct Search {
    hardware: Hardware,
    /// Problems that no candidate changes, which are reported beside the advice.
    others: Vec<ProblemKind>,
    has_store: bool,
    /// The candidate that takes the least GPU memory.
    least_gpu: Option<(u64, Words)>,
    /// The candidate that takes the least host memory, for all processes of the node.
    least_host: Option<(u64, Words)>,
}

impl Search {
    fn new(plan: &Plan) -> Self {
        let kinds = plan.problems.iter().map(|problem| problem.kind);
        let stays = |kind: &ProblemKind| {
            matches!(
                kind,
                ProblemKind::NoGpu | ProblemKind::Update | ProblemKind::Settings
            )
        };
        Self {
            hardware: plan.hardware.clone(),
            others: kinds.filter(stays).collect(),
            has_store: plan.has_store(),
            least_gpu: None,
            least_host: None,
        }
    }

    /// Returns the best candidate of the first kind that has one: with the samples of the step as they are, then with everything that
    /// a plan can choose left to it, then with fewer samples or shorter ones.
    fn any(&mut self, settings: &RunSettings) -> Option<Advice> {
        let as_it_is = Change {
            words: Words::new(),
            settings: settings.clone(),
        };
        let near = here(settings).into_iter().chain(farther(&as_it_is));
        if let Some(advice) = self.shortest(near) {
            return Some(advice);
        }
        let free = released(settings);
        let mut places = vec![free.clone()];
        places.extend(farther(&free));
        if !free.words.is_empty()
            && let Some(advice) = self.shortest(places.iter().cloned())
        {
            return Some(advice);
        }
        places.iter().find_map(|place| {
            let mut lists = fewer(place).into_iter();
            lists.find_map(|less| self.first_that_fits(less))
        })
    }

    /// Returns the change with the shortest step, with the largest micro-batch that fits; smaller ones are not faster.
    fn shortest(&mut self, changes: impl Iterator<Item = Change>) -> Option<Advice> {
        let mut best: Option<Advice> = None;
        for change in changes {
            if let Some(advice) = self.first_that_fits(splits(&change))
                && best
                    .as_ref()
                    .is_none_or(|best| advice.step_s < best.step_s * (1.0 - GAIN_MIN))
            {
                best = Some(advice);
            }
        }
        best
    }

    /// Returns the first of `changes` that fits, each of which takes less than the one before: a plan takes up to a second, so few are made.
    fn first_that_fits(&mut self, changes: Vec<Change>) -> Option<Advice> {
        let (mut first, mut found) = (0, self.plan(changes.last()?)?);
        let mut last = changes.len() - 1;
        while first < last {
            let middle = first + (last - first) / 2;
            match self.plan(&changes[middle]) {
                Some(advice) => (last, found) = (middle, advice),
                None => first = middle + 1,
            }
        }
        Some(found)
    }

    /// Plans `change`; returns it if it fits. The run as it is, does not.
    fn plan(&mut self, change: &Change) -> Option<Advice> {
        if change.words.is_empty() {
            return None;
        }
        let plan = Plan::unadvised(&change.settings, self.hardware.clone()).ok()?;
        let host_bytes = plan.node_host_bytes();
        for (least, bytes) in [
            (&mut self.least_gpu, plan.gpu_bytes()),
            (&mut self.least_host, host_bytes),
        ] {
            let less = least.as_ref().is_none_or(|(least, _)| bytes < *least);
            if less {
                *least = Some((bytes, change.words.clone()));
            }
        }
        let mut kinds = plan.problems.iter().map(|problem| problem.kind);
        kinds
            .all(|kind| self.others.contains(&kind))
            .then(|| Advice {
                changes: change.words.clone(),
                step_s: plan.bound.s,
                new_device_bytes: match self.has_store {
                    true => 0,
                    false => plan.device_bytes(),
                },
            })
    }
}

impl ProblemKind {
    fn is_memory(self) -> bool {
        matches!(self, Self::HostMemory | Self::GpuMemory)
    }
}

/// Candidates: the run as it is, then with each setting left to the plan that it can choose.
fn here(settings: &RunSettings) -> Vec<Change> {
    let as_it_is = Change {
        words: Words::new(),
        settings: settings.clone(),
    };
    let single = releases(settings).into_iter().map(|release| Change {
        words: vec![release.word()],
        settings: release.apply_to(settings.clone()),
    });
    std::iter::once(as_it_is).chain(single).collect()
}

/// The run with every setting left to the plan that it can choose.
fn released(settings: &RunSettings) -> Change {
    let releases = releases(settings);
    Change {
        words: releases.iter().map(|release| release.word()).collect(),
        settings: releases.iter().fold(settings.clone(), |settings, release| {
            release.apply_to(settings)
        }),
    }
}

/// A setting that costs memory and can be left to the plan.
struct Release {
    key: &'static str,
    is_set: fn(&RunSettings) -> bool,
    release: fn(&mut RunSettings),
}

impl Release {
    fn word(&self) -> (&'static str, String) {
        (self.key, "\"auto\"".to_owned())
    }

    fn apply_to(&self, mut settings: RunSettings) -> RunSettings {
        (self.release)(&mut settings);
        settings
    }
}

/// Settings that a plan chooses if they are "auto".
static RELEASES: [Release; 8] = [
    Release {
        key: "train.activation_checkpointing",
        is_set: |settings| {
            let given = settings.train.activation_checkpointing;
            !matches!(given, None | Some(ActivationCheckpointing::Full))
        },
        release: |settings| settings.train.activation_checkpointing = None,
    },
    Release {
        key: "train.micro_batch_group",
        is_set: |settings| {
            settings
                .train
                .micro_batch_group
                .is_some_and(|size| size > 1)
        },
        release: |settings| settings.train.micro_batch_group = None,
    },
    Release {
        key: "offload.activations",
        is_set: |settings| settings.offload.activations != ActivationsChoice::Auto,
        release: |settings| settings.offload.activations = ActivationsChoice::Auto,
    },
    Release {
        key: "offload.gradients",
        is_set: |settings| {
            settings.offload.gradients == GradientsChoice::Cpu && settings.placement.has_store()
        },
        release: |settings| settings.offload.gradients = GradientsChoice::Auto,
    },
    Release {
        key: "offload.staging_bytes",
        is_set: |settings| {
            settings.offload.staging_bytes.is_some() && settings.placement.has_store()
        },
        release: |settings| settings.offload.staging_bytes = None,
    },
    Release {
        key: "offload.optimizer_device",
        is_set: |settings| {
            let device = settings.offload.optimizer_device;
            matches!(device, OptimizerDevice::Gpu | OptimizerDevice::Shared)
        },
        release: |settings| settings.offload.optimizer_device = OptimizerDevice::Auto,
    },
    Release {
        key: "offload.resident_fraction",
        is_set: |settings| {
            is_part(settings.placement.resident_fraction) && settings.placement.has_store()
        },
        release: |settings| settings.placement.resident_fraction = ResidentFraction::Auto,
    },
    Release {
        key: "offload.gpu_resident_fraction",
        is_set: |settings| is_part(settings.placement.gpu_resident_fraction),
        release: |settings| settings.placement.gpu_resident_fraction = ResidentFraction::Auto,
    },
];

/// Those that the run sets.
fn releases(settings: &RunSettings) -> Vec<&'static Release> {
    RELEASES
        .iter()
        .filter(|release| (release.is_set)(settings))
        .collect()
}

/// Whether a fraction is set, and above 0.
fn is_part(fraction: ResidentFraction) -> bool {
    fraction != ResidentFraction::Auto && fraction != ResidentFraction::Fixed(Fraction::NONE)
}

/// Candidates: the run with its state further from the GPU.
fn farther(change: &Change) -> impl Iterator<Item = Change> {
    // State on drives is only tried together with as much in host memory as fits; the plan chooses
    // fraction and staging. State in host memory stays in GPU memory as far as it fits, without being told. State on drives stays there
    // only if it is asked for, because commits write it and others may use that memory: of equal steps, it is not advised.
    let places = [
        Place::Gpu,
        Place::HostAndGpu,
        Place::HostAndDrives,
        Place::DrivesAndHost,
        Place::DrivesHostAndGpu,
    ];
    let change = change.clone();
    places
        .into_iter()
        .filter_map(move |place| farther_at(&change, place))
}

/// The run with its state at `place`; `None` if that is where it is, or nearer to the GPU.
fn farther_at(change: &Change, place: Place) -> Option<Change> {
    let rank = |tier: Tier| match tier {
        Tier::None => 0,
        Tier::Cpu => 1,
        Tier::Nvme => 2,
    };
    let now = &change.settings.placement;
    let [param, optimizer] = place.tiers();
    if rank(param) < rank(now.param) || rank(optimizer) < rank(now.optimizer) {
        return None;
    }
    let mut settings = place.apply_to(&change.settings);
    let there = &mut settings.placement;
    let mut words = Words::new();
    if now.stage != Stage::Parameters {
        words.push(("zero_optimization.stage", "3".to_owned()));
    }
    for (key, tier, before) in [
        ("zero_optimization.offload_param.device", param, now.param),
        (
            "zero_optimization.offload_optimizer.device",
            optimizer,
            now.optimizer,
        ),
    ] {
        if tier != before {
            words.push((key, format!("\"{}\"", tier.word())));
        }
    }
    if there.has_store() && now.resident_fraction == ResidentFraction::Auto {
        there.resident_fraction = ResidentFraction::Auto;
    }
    let fraction = |fraction| match fraction {
        ResidentFraction::Auto => "\"auto\"".to_owned(),
        ResidentFraction::Fixed(_) => "0".to_owned(),
    };
    if there.has_store() && there.resident_fraction != now.resident_fraction {
        words.push((
            "offload.resident_fraction",
            fraction(there.resident_fraction),
        ));
    }
    // What the fraction is if the run file does not set it, or keeps what it sets.
    let implied = match now.gpu_resident_fraction {
        set if is_part(set) => set,
        _ if there.has_store() && !now.has_store() => ResidentFraction::Fixed(Fraction::NONE),
        _ if [now.param, now.optimizer] == [Tier::None; 2] => ResidentFraction::Auto,
        same => same,
    };
    if place != Place::Gpu && there.gpu_resident_fraction != implied {
        words.push((
            "offload.gpu_resident_fraction",
            fraction(there.gpu_resident_fraction),
        ));
    }
    if change.settings.offload.staging_bytes.is_some() && there.has_store() {
        words.push(("offload.staging_bytes", "\"auto\"".to_owned()));
    }
    (!words.is_empty()).then(|| Change {
        words: [change.words.clone(), words].concat(),
        settings,
    })
}

/// Words for a batch other than that of `before`.
fn batch_words(before: &RunSettings, after: &RunSettings) -> Words {
    let counts = [before, after].map(|settings| {
        let batch = &settings.batch;
        [batch.seq_len, batch.micro_batch, batch.micro_batches]
    });
    let keys = [
        "train.seq_len",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ];
    let changed = (0..keys.len()).filter(|&key| counts[0][key] != counts[1][key]);
    changed
        .map(|key| (keys[key], counts[1][key].to_string()))
        .collect()
}

/// Candidates: `change`, then the same samples in smaller and smaller micro-batches.
fn splits(change: &Change) -> Vec<Change> {
    let micro_batch = change.settings.batch.micro_batch;
    let parts = (0..usize::BITS).map(|power| 1usize << power);
    let parts =
        parts.take_while(|parts| micro_batch.is_multiple_of(*parts) && *parts <= micro_batch);
    let split = |parts| {
        let mut settings = change.settings.clone();
        settings.batch.micro_batch /= parts;
        settings.batch.micro_batches *= parts;
        let batch = batch_words(&change.settings, &settings);
        Change {
            words: [change.words.clone(), batch].concat(),
            settings,
        }
    };
    parts.map(split).collect()
}

/// Lists of candidates with one sample in each micro-batch: the same samples with the MLP computed in chunks, then fewer samples in a
/// step, then shorter ones.
fn fewer(change: &Change) -> [Vec<Change>; 3] {
    let halves = |count: usize, least: usize| {
        let next = move |count: &usize| Some(count / 2);
        std::iter::successors(Some(count / 2), next).take_while(move |&count| count >= least)
    };
    let changed = |settings: RunSettings, more: Words| Change {
        words: [
            change.words.clone(),
            more,
            batch_words(&change.settings, &settings),
        ]
        .concat(),
        settings,
    };
    let mut one = change.settings.clone();
    one.batch.micro_batches *= one.batch.micro_batch;
    one.batch.micro_batch = 1;
    let finer = [2, 4, 8, 16]
        .into_iter()
        .filter(|chunks| *chunks > one.train.mlp_chunks && *chunks <= one.model.intermediate_size);
    let slices = finer.map(|chunks| {
        let mut settings = one.clone();
        settings.train.mlp_chunks = chunks;
        changed(settings, vec![("train.mlp_chunks", chunks.to_string())])
    });
    let fewer = halves(one.batch.micro_batches, 1).map(|count| {
        let mut settings = one.clone();
        settings.batch.micro_batches = count;
        changed(settings, Words::new())
    });
    let sequence_ranks = one.batch.sequence_ranks as usize;
    let shorter = halves(one.batch.seq_len, SEQ_LEN_MIN)
        .take_while(|len| len.is_multiple_of(sequence_ranks))
        .map(|seq_len| {
            let mut settings = one.clone();
            settings.batch.micro_batches = 1;
            settings.batch.seq_len = seq_len;
            changed(settings, Words::new())
        });
    [slices.collect(), fewer.collect(), shorter.collect()]
}
