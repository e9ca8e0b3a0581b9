//! The first lines of a run's plan: optimizer, learning rate, gradient clipping and precision.

use offload_support::units::CountOf;

use super::{
    LrSchedule, MasterType, MomentsType, MuonSettings, OptimizerKind, OverflowPolicy,
    ParamGroupSettings, Rate, RunSettings, Warmup,
};

impl RunSettings {
    /// Formats the optimizer, its learning rate over the steps, gradient clipping and the precision, each on
    /// one line.
    pub fn summary(&self) -> [String; 4] {
        let optimizer = &self.optimizer;
        let [first, second] = optimizer.betas;
        [
            format!(
                "optimizer {}, lr {}, {}betas {first} and {second}, {}weight decay {}{}{}{}",
                optimizer.kind.word(),
                Rate(optimizer.lr),
                optimizer.muon.as_ref().map_or(String::new(), matrices),
                match optimizer.kind {
                    OptimizerKind::AdamW | OptimizerKind::Muon => {
                        format!("eps {}, ", Rate(optimizer.eps))
                    }
                    OptimizerKind::Lion => String::new(),
                },
                optimizer.weight_decay,
                match optimizer.moments {
                    MomentsType::Fp32 => "",
                    MomentsType::Bf16 => ", moments in bf16",
                    MomentsType::EightBit => ", moments in 8 bits",
                },
                match optimizer.master {
                    MasterType::Fp32 => "",
                    MasterType::Bf16 => ", masters in bf16",
                },
                groups(&optimizer.groups)
            ),
            format!("schedule  {}", summary_of_schedule(&self.lr)),
            format!("clipping  {}", self.clipping()),
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

    fn clipping(&self) -> String {
        match self.gradient_clipping {
            0.0 => "none (gradient_clipping = 0)".into(),
            norm if self.gradient_clipping_is_default => {
                format!("gradients to a norm of {norm} (the default; gradient_clipping changes it)")
            }
            norm => format!("gradients to a norm of {norm} (gradient_clipping)"),
        }
    }
}

/// Describes what Muon does with matrices, and the beginning of what AdamW does with the rest.
fn matrices(muon: &MuonSettings) -> String {
    format!(
        "momentum {}{}, {} steps, rates as \"{}\"; the rest by AdamW, lr {}, ",
        muon.momentum,
        if muon.nesterov { " (Nesterov)" } else { "" },
        muon.ns_steps,
        muon.adjust_lr_fn.word(),
        Rate(muon.adam_lr),
    )
}

/// Formats groups of parameters after the settings of the others.
fn groups(groups: &[ParamGroupSettings]) -> String {
    let of = |group: &ParamGroupSettings| {
        let lr = group.lr.map(|lr| format!("lr {}", Rate(lr)));
        let decay = group
            .weight_decay
            .map(|decay| format!("weight decay {decay}"));
        let own: Vec<String> = lr.into_iter().chain(decay).collect();
        format!("; {}: {}", group.params.join(", "), own.join(", "))
    };
    groups.iter().map(of).collect()
}

/// Describes the learning rates of a run.
pub(crate) fn summary_of_schedule(schedule: &LrSchedule) -> String {
    match schedule {
        LrSchedule::Constant {
            lr,
            warmup_steps: 0,
        } => format!("constant, {} at every step", Rate(*lr)),
        LrSchedule::Constant { lr, warmup_steps } => {
            format!(
                "constant, up to {} in {}, then level",
                Rate(*lr),
                CountOf(*warmup_steps, "step")
            )
        }
        LrSchedule::Linear {
            lr,
            warmup_steps,
            total_steps,
        } => format!("linear, {}", to_zero(*lr, *warmup_steps, *total_steps)),
        LrSchedule::Cosine {
            lr,
            warmup_steps,
            total_steps,
        } => format!("cosine, {}", to_zero(*lr, *warmup_steps, *total_steps)),
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

/// Describes Hugging Face's schedules that fall to 0.
fn to_zero(lr: f64, warmup_steps: u64, total_steps: u64) -> String {
    let lr = Rate(lr);
    match warmup_steps {
        0 => {
            let total = CountOf(total_steps, "step");
            format!("from {lr} down to 0 over {total}, no warm-up")
        }
        _ => {
            let warmup = CountOf(warmup_steps, "step");
            format!("up to {lr} in {warmup}, then down to 0 at step {total_steps}")
        }
    }
}

fn rise(warmup: &Warmup) -> String {
    format!(
        "from {} up to {} in {}",
        Rate(warmup.min_lr),
        Rate(warmup.max_lr),
        CountOf(warmup.steps, "step")
    )
}
