//! How the numbers of a unit are stored, and where its parameters lie.

use kernels::adamw::TileFormat;
use kernels::reduce::GradType;
use serde::Deserialize;

/// How a unit's numbers are stored.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) param_bytes: usize,
    pub(crate) update: Option<UpdateFormat>,
}

/// How a trained unit's masters and gradients are stored.
#[derive(Clone, Copy)]
pub(crate) struct UpdateFormat {
    pub(crate) format: TileFormat,
    pub(crate) grads: GradType,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParamPlan {
    /// First element within the unit.
    pub(crate) offset: u64,
    pub(crate) elems: u64,
}
