//! Muon's arithmetic on whole matrices, and on momenta in a GPU's memory.

use kernels::gpu::DeviceBuffer;
use kernels::muon::MomentumStep;
use kernels_torch::{NewtonSchulz, device_view};
use tch::Kind;

use super::{ComputeError, Engine, UnitWeights};

impl Engine {
    /// Replaces each matrix of the block `unit`, which `flat` has, by its direction. On a GPU the work is enqueued on the default stream.
    ///
    /// # Errors
    /// Out of memory.
    pub fn make_orthogonal(
        &self,
        unit: usize,
        flat: &UnitWeights,
        iteration: &NewtonSchulz,
    ) -> Result<(), ComputeError> {
        let params = self.units()[unit].params.iter();
        for param in params.filter(|param| param.member.is_block_matrix()) {
            let mut matrix = flat.param(param, false)?;
            let direction = iteration.orthogonal(&matrix)?;
            matrix.f_copy_(&direction)?;
        }
        Ok(())
    }

    /// Does what [`MomentumStep::apply`] does, with the same bits, on `elems` numbers in a GPU's memory. Momentum and gradients begin at these
    /// elements of their buffers. The work is enqueued on the default stream.
    ///
    /// # Errors
    /// Out of memory.
    pub fn step_momentum(
        &self,
        step: &MomentumStep,
        (momentum, momentum_at): (&DeviceBuffer, usize),
        (grads, grads_at): (&DeviceBuffer, usize),
        elems: usize,
    ) -> Result<(), ComputeError> {
        let shape = [elems as i64];
        let mut momentum = device_view(momentum, Kind::Float, momentum_at, &shape)?;
        let mut grads = device_view(grads, self.kind(), grads_at, &shape)?;
        let scaled = (grads.f_to_kind(Kind::Float)?).f_mul_scalar(f64::from(step.grad_scale))?;
        let _ = momentum.f_lerp_(&scaled, 1.0 - step.decay)?;
        if step.nesterov {
            grads.f_copy_(&scaled.f_lerp(&momentum, step.decay)?)?;
        } else {
            grads.f_copy_(&momentum)?;
        }
        Ok(())
    }
}
