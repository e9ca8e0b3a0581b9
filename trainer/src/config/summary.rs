//! The first lines of a run's plan: optimizer, learning rate and precision.

use std::fmt;

use super::{LrSchedule, OverflowPolicy, RunSettings, Warmup};

impl RunSettings {
    /// Formats the optimizer, its learning rate over the steps, and the precision, each on one line.
    pub fn summary(&self) -> [String; 3] {
        let optimizer = &self.optimizer;
        let [first, second] = optimizer.betas;
        [
            format!(
                "optimizer AdamW, lr {}, betas {first} and {second}, eps {:e}, weight decay {}",
                Rate(optimizer.lr),
                optimizer.eps,
                optimizer.weight_decay
            ),
            format!("schedule  {}", schedule(&self.lr)),
            format!(
                "precision {}{}",
                self.dtype.name(),
                match self.overflow {
                    OverflowPolicy::Scaled { .. } | OverflowPolicy::Scales(_) => ", scaled losses",
                    OverflowPolicy::Stops | OverflowPolicy::Skips => "",
                }
            ),
        ]
    }
}

/// Learning rate in the usual notation, as 5e-5 or 0.
struct Rate(f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0"),
            rate => write!(f, "{rate:e}"),
        }
    }
}

fn schedule(schedule: &LrSchedule) -> String {
    match schedule {
        LrSchedule::Constant { lr } => format!("constant, {} at every step", Rate(*lr)),
        LrSchedule::Linear { lr, total_steps } => format!(
            "linear, from {} down to 0 over {total_steps} steps, no warm-up",
            Rate(*lr)
        ),
        LrSchedule::RangeTest(test) => format!(
            "LRRangeTest, from {} up by {} of it every {} steps",
            Rate(test.min_lr),
            test.step_rate,
            test.step_size
        ),
        LrSchedule::OneCycle(cycle) => format!(
            "OneCycle, from {} to {} in {} steps and back in {}",
            Rate(cycle.min_lr),
            Rate(cycle.max_lr),
            cycle.first_steps,
            cycle.second_steps
        ),
        LrSchedule::Warmup(warmup) => format!("WarmupLR, {}, then level", rise(warmup)),
        LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        } => format!(
            "WarmupDecayLR, {}, then linearly down to {} at step {total_steps}",
            rise(warmup),
            Rate(warmup.min_lr)
        ),
        LrSchedule::WarmupCosine {
            warmup,
            total_steps,
            min_ratio,
        } => format!(
            "WarmupCosineLR, {}, then by a cosine down to {} at step {total_steps}",
            rise(warmup),
            Rate(warmup.max_lr * min_ratio)
        ),
    }
}

fn rise(warmup: &Warmup) -> String {
    format!(
        "from {} up to {} in {} steps",
        Rate(warmup.min_lr),
        Rate(warmup.max_lr),
        warmup.steps
    )
}
