//! What a run trains with, in the lines of its plan that come first: the optimizer, the learning rate, the precision.

use super::settings::dtype_name;
use super::{LrSchedule, Overflow, RunSettings, Warmup};

impl RunSettings {
    /// The optimizer, its learning rate over the steps, and the precision, a line each.
    pub fn summary(&self) -> [String; 3] {
        let optimizer = &self.optimizer;
        let [first, second] = optimizer.betas;
        [
            format!(
                "optimizer AdamW, lr {:e}, betas {first} and {second}, eps {:e}, weight decay {}",
                optimizer.lr, optimizer.eps, optimizer.weight_decay
            ),
            format!("schedule  {}", schedule(&self.lr)),
            format!(
                "precision {}{}",
                dtype_name(self.dtype),
                match self.overflow {
                    Overflow::Scaled { .. } | Overflow::Scales(_) => ", losses scaled",
                    Overflow::Stops | Overflow::Skips => "",
                }
            ),
        ]
    }
}

fn schedule(schedule: &LrSchedule) -> String {
    match schedule {
        LrSchedule::Constant { lr } => format!("constant, {lr:e} at every step"),
        LrSchedule::Linear { lr, total_steps } => {
            format!("linear, from {lr:e} down to 0 over {total_steps} steps, no warm-up")
        }
        LrSchedule::RangeTest(test) => format!(
            "LRRangeTest, from {:e} up by {} of it every {} steps",
            test.min_lr, test.step_rate, test.step_size
        ),
        LrSchedule::OneCycle(cycle) => format!(
            "OneCycle, from {:e} to {:e} in {} steps and back in {}",
            cycle.min_lr, cycle.max_lr, cycle.first_steps, cycle.second_steps
        ),
        LrSchedule::Warmup(warmup) => format!("WarmupLR, {}, then level", rise(warmup)),
        LrSchedule::WarmupDecay {
            warmup,
            total_steps,
        } => format!(
            "WarmupDecayLR, {}, then linearly down to {:e} at step {total_steps}",
            rise(warmup),
            warmup.min_lr
        ),
        LrSchedule::WarmupCosine {
            warmup,
            total_steps,
            min_ratio,
        } => format!(
            "WarmupCosineLR, {}, then by a cosine down to {:e} at step {total_steps}",
            rise(warmup),
            warmup.max_lr * min_ratio
        ),
    }
}

fn rise(warmup: &Warmup) -> String {
    format!(
        "from {:e} up to {:e} in {} steps",
        warmup.min_lr, warmup.max_lr, warmup.steps
    )
}
