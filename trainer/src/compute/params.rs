//! A unit's parameters as tensors, found by what they are.

use tch::Tensor;

use super::{ComputeError, UnitWeights};
use crate::model::{ParamRole, UnitLayout};

/// The parameters of one unit.
pub(super) struct Params<'a> {
    layout: &'a UnitLayout,
    /// In the order of the layout.
    tensors: Vec<Tensor>,
}

impl<'a> Params<'a> {
    /// Tensors that share the memory of `weights`, which are of a unit like `layout`; leaves of a graph with `grad`.
    pub(super) fn new(
        layout: &'a UnitLayout,
        weights: &UnitWeights,
        grad: bool,
    ) -> Result<Self, ComputeError> {
        assert_eq!(
            weights.elems(),
            layout.elems,
            "the weights belong to a unit like {}",
            layout.name
        );
        let tensors = layout.params.iter().map(|param| weights.param(param, grad));
        Ok(Params {
            layout,
            tensors: tensors.collect::<Result<_, _>>()?,
        })
    }

    /// The parameter that is `member`, if the unit has it.
    pub(super) fn find(&self, member: ParamRole) -> Option<&Tensor> {
        self.layout.find(member).map(|param| &self.tensors[param])
    }

    /// The parameter that is `member`, which every such unit has.
    pub(super) fn get(&self, member: ParamRole) -> &Tensor {
        self.find(member)
            .unwrap_or_else(|| panic!("{} has a {member:?}", self.layout.name))
    }

    /// The number of the parameter that is `member`, if the unit has it.
    pub(super) fn index(&self, member: ParamRole) -> Option<usize> {
        self.layout.find(member)
    }

    /// The numbers of those that are `wanted`.
    pub(super) fn indices(&self, wanted: impl Fn(ParamRole) -> bool) -> Vec<usize> {
        let params = self.layout.params.iter().enumerate();
        params
            .filter(|(_, param)| wanted(param.member))
            .map(|(at, _)| at)
            .collect()
    }

    /// All of them, in the order of the layout.
    pub(super) fn all(&self) -> &[Tensor] {
        &self.tensors
    }
}
