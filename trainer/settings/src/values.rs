//! Checked values of settings: what a resolved DeepSpeed file says.

use kernels::adamw::{Moments, UpdateRule};
use serde::{Deserialize, Serialize};

/// What Muon does with the matrices of blocks. All other parameters are updated by AdamW.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MuonSettings {
    /// Learning rate of all other parameters; the schedule scales it like the one of matrices.
    pub adam_lr: f64,
    /// Decay of the momentum.
    pub momentum: f64,
    pub nesterov: bool,
    pub ns_steps: u64,
    pub ns_coefficients: [f64; 3],
    pub adjust_lr_fn: AdjustLr,
}

/// What the learning rate of a matrix is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// The root of rows over columns, and at least 1.
    Original,
    /// 0.2 times the root of the larger of rows and columns.
    MatchRmsAdamw,
}

impl AdjustLr {
    pub fn word(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::MatchRmsAdamw => "match_rms_adamw",
        }
    }

    /// The factor for a matrix of this size.
    pub fn factor(self, rows: usize, columns: usize) -> f64 {
        match self {
            Self::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * (rows.max(columns) as f64).sqrt(),
        }
    }
}

/// An optimizer with decoupled weight decay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OptimizerSettings {
    #[serde(rename = "type")]
    pub kind: OptimizerKind,
    /// With Muon that of matrices.
    pub lr: f64,
    pub betas: [f64; 2],
    /// Not used by Lion.
    pub eps: f64,
    pub weight_decay: f64,
    pub decay: Decaying,
    /// Parameters with a learning rate or weight decay of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroupSettings>,
    #[serde(skip_serializing_if = "MomentsType::is_fp32")]
    pub moments: MomentsType,
    #[serde(skip_serializing_if = "MasterType::is_fp32")]
    pub master: MasterType,
    /// `Some` for Muon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon: Option<MuonSettings>,
}

/// Optimizer of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerKind {
    #[default]
    AdamW,
    Lion,
    /// Muon for the matrices of blocks, AdamW for all other parameters.
    Muon,
}

impl OptimizerKind {
    pub fn word(self) -> &'static str {
        match self {
            Self::AdamW => "AdamW",
            Self::Lion => "Lion",
            Self::Muon => "Muon",
        }
    }
}

impl From<OptimizerKind> for UpdateRule {
    fn from(kind: OptimizerKind) -> Self {
        match kind {
            OptimizerKind::AdamW => Self::AdamW,
            OptimizerKind::Lion => Self::Lion,
            OptimizerKind::Muon => Self::Muon,
        }
    }
}

/// Number format of the optimizer's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MomentsType {
    Fp32,
    /// Rounded stochastically.
    Bf16,
    /// Codes in blocks of 256 elements, as bitsandbytes has them.
    #[serde(rename = "8bit")]
    EightBit,
}

impl MomentsType {
    pub fn is_fp32(&self) -> bool {
        *self == Self::Fp32
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::EightBit => "8bit",
        }
    }
}

/// Number format of the masters of bf16 parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MasterType {
    Fp32,
    /// The parameter itself, rounded stochastically.
    Bf16,
}

impl MasterType {
    pub fn is_fp32(&self) -> bool {
        *self == Self::Fp32
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<MomentsType> for Moments {
    fn from(moments: MomentsType) -> Self {
        match moments {
            MomentsType::Fp32 => Self::Fp32,
            MomentsType::Bf16 => Self::Bf16,
            MomentsType::EightBit => Self::EightBit,
        }
    }
}

impl OptimizerSettings {
    /// Returns the first group that a parameter of this name belongs to.
    pub fn group_of(&self, name: &str) -> Option<&ParamGroupSettings> {
        self.groups.iter().find(|group| group.includes(name))
    }
}

/// A group of parameters with settings of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParamGroupSettings {
    /// Texts, one of which is in the name of each parameter of the group.
    pub params: Vec<String>,
    /// Replaces the optimizer's learning rate; the schedule scales it in the same way.
    pub lr: Option<f64>,
    /// Weight decay of all parameters of the group; `None` if [`Decaying`] decides.
    pub weight_decay: Option<f64>,
}

impl ParamGroupSettings {
    pub fn includes(&self, name: &str) -> bool {
        self.params.iter().any(|text| name.contains(text))
    }
}

/// Parameters to which weight decay applies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decaying {
    /// Matrices and the embedding; neither norms nor biases.
    Matrices,
    /// All parameters, as with a PyTorch optimizer that has a single parameter group.
    All,
    /// All parameters whose name in a checkpoint contains none of these texts.
    AllBut(Vec<String>),
}

impl Decaying {
    /// Returns whether a parameter of this name decays.
    pub fn includes(&self, name: &str, is_matrix: bool) -> bool {
        match self {
            Self::Matrices => is_matrix,
            Self::All => true,
            Self::AllBut(patterns) => !patterns.iter().any(|text| name.contains(text)),
        }
    }
}

/// Where parameters or optimizer state are kept between uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Memory of the processor or GPU that computes.
    None,
    /// Host memory.
    Cpu,
    /// NVMe devices of the store.
    Nvme,
}

impl Tier {
    /// The tier's name in DeepSpeed's configuration.
    pub fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme => "nvme",
        }
    }
}

/// Number from 0 to 1 inclusive.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
pub struct Fraction(f64);

impl Fraction {
    pub const NONE: Self = Self(0.0);
    pub const ALL: Self = Self(1.0);

    /// Returns `None` unless `0 <= fraction <= 1`.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    pub fn get(self) -> f64 {
        self.0
    }
}
