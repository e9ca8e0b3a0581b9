//! How the learning rate goes over the steps, checked: DeepSpeed's schedulers with DeepSpeed's names. `learning_rate.rs` has the
//! formulas.

use serde::Serialize;

/// A schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    /// The optimizer's, always.
    Constant { lr: f64 },
    /// From the optimizer's straight down to 0 after `total_steps`: Hugging Face's "linear" without a warm-up.
    Linear { lr: f64, total_steps: u64 },
    /// Ever up, to find the rate at which training diverges.
    RangeTest(RangeTest),
    /// Up and down once, the momentum the other way, then perhaps further down.
    OneCycle(OneCycle),
    /// Up, then level.
    Warmup(Warmup),
    /// Up, then straight down to `min_lr` at `total_steps`.
    WarmupDecay { warmup: Warmup, total_steps: u64 },
    /// Up, then half a cosine down to `min_ratio` of the maximum at `total_steps`.
    WarmupCosine {
        warmup: Warmup,
        total_steps: u64,
        min_ratio: f64,
    },
}

/// The rise from `min_lr` to `max_lr` in `steps` steps (at least two), straight or with the logarithm of the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Warmup {
    pub min_lr: f64,
    pub max_lr: f64,
    pub steps: u64,
    pub logarithmic: bool,
}

/// LRRangeTest: `min_lr`, and `step_rate` of it more every `step_size` steps, at once or spread over them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RangeTest {
    pub min_lr: f64,
    pub step_size: u64,
    pub step_rate: f64,
    pub staircase: bool,
}

/// OneCycle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OneCycle {
    pub min_lr: f64,
    pub max_lr: f64,
    /// Steps up.
    pub first_steps: u64,
    /// Steps down.
    pub second_steps: u64,
    /// Stairs of each half; 0: no stairs.
    pub first_stairs: u64,
    pub second_stairs: u64,
    /// After the cycle: steps in which the rate's divisor grows by `decay_lr_rate`, and the momentum's factor by its own; 0: neither.
    pub decay_steps: u64,
    pub decay_lr_rate: f64,
    /// `None`: the optimizer's momentum stays.
    pub momentum: Option<MomentumCycle>,
}

/// The momentum's way in a cycle: down from `max` while the rate goes up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MomentumCycle {
    pub min: f64,
    pub max: f64,
    pub decay_rate: f64,
}
