//! A unit's parameters as tensors, found by their role.

use tch::Tensor;

use super::{ComputeError, UnitWeights};
use training_run::model::{ParamRole, UnitLayout};

/// Parameters of one unit.
pub(super) struct Params<'a> {
    layout: &'a UnitLayout,
    /// Tensors in the order of the layout.
    tensors: Vec<Tensor>,
}

impl<'a> Params<'a> {
    /// Makes tensors that share the memory of `weights`, which must belong to a unit like `layout`; with
    /// `grad` they are leaves of a graph.
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

    /// Returns the parameter with this role, if the unit has it.
    pub(super) fn find(&self, member: ParamRole) -> Option<&Tensor> {
        self.layout.find(member).map(|param| &self.tensors[param])
    }

    /// Returns the parameter with this role, which every such unit has.
    pub(super) fn get(&self, member: ParamRole) -> &Tensor {
        self.find(member)
            .unwrap_or_else(|| panic!("{} has a {member:?}", self.layout.name))
    }

    /// Returns the index of the parameter with this role, if the unit has it.
    pub(super) fn index(&self, member: ParamRole) -> Option<usize> {
        self.layout.find(member)
    }

    /// Returns the indices of parameters whose role is `wanted`.
    pub(super) fn indices(&self, wanted: impl Fn(ParamRole) -> bool) -> Vec<usize> {
        let params = self.layout.params.iter().enumerate();
        params
            .filter(|(_, param)| wanted(param.member))
            .map(|(at, _)| at)
            .collect()
    }

    /// Returns all parameters in the order of the layout.
    pub(super) fn all(&self) -> &[Tensor] {
        &self.tensors
    }
}
