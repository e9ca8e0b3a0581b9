//! The momentum of Muon, on the CPU: the mean of gradients, and what is to be made orthogonal, element by element.
//!
//! ```text
//!   momentum  = lerp(momentum, g, 1 - decay)
//!   direction = orthogonal(lerp(g, momentum, decay))        (with `nesterov`, otherwise of the momentum)
//! ```
//!
//! With the operations of `torch.optim.Muon` and their roundings, since a matrix is made orthogonal in bf16, where a last bit may become a larger one. A
//! parameter of a bf16 model reads 4 + 2 bytes and writes as many.

use crate::cast::view_mut;
use crate::instruction_set::InstructionSet;
use crate::number;
use crate::reduce::GradType;

/// The scalars of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentumStep {
    /// Decay of the momentum, 0 to 1.
    pub decay: f64,
    /// Whether the gradient is mixed into what is made orthogonal.
    pub nesterov: bool,
    /// Factor of each gradient: the inverse of the loss scale, times the clip factor.
    pub grad_scale: f32,
}

impl MomentumStep {
    /// Updates `momentum` by gradients of `grad_type`, and replaces these by what is to be made orthogonal.
    ///
    /// Panics if the lengths differ, a slice is not aligned to its numbers, or the gradients are fp16, whose range is too small for a momentum.
    pub fn apply(&self, momentum: &mut [f32], grad_type: GradType, grads: &mut [u8]) {
        match grad_type {
            GradType::Bf16 => {
                let grads = view_mut::<u16>(grads);
                self.each(momentum, grads, number::from_bf16, number::to_bf16);
            }
            GradType::Fp32 => self.each(momentum, view_mut::<f32>(grads), |x| x, |x| x),
            GradType::Fp16 => panic!("a momentum in fp16"),
        }
    }

    fn each<T: Copy>(
        &self,
        momentum: &mut [f32],
        grads: &mut [T],
        widen: impl Fn(T) -> f32,
        narrow: impl Fn(f32) -> T,
    ) {
        assert_eq!(grads.len(), momentum.len(), "one gradient for each element");
        #[cfg(target_arch = "x86_64")]
        if InstructionSet::Avx2.available() {
            // SAFETY: the machine has these instructions.
            #[allow(unsafe_code)]
            unsafe {
                self.each_avx2(momentum, grads, widen, narrow);
            }
            return;
        }
        self.each_scalar(momentum, grads, widen, narrow);
    }

    /// Where `mul_add` is an instruction.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn each_avx2<T: Copy>(
        &self,
        momentum: &mut [f32],
        grads: &mut [T],
        widen: impl Fn(T) -> f32,
        narrow: impl Fn(f32) -> T,
    ) {
        self.each_scalar(momentum, grads, widen, narrow);
    }

    #[inline(always)]
    fn each_scalar<T: Copy>(
        &self,
        momentum: &mut [f32],
        grads: &mut [T],
        widen: impl Fn(T) -> f32,
        narrow: impl Fn(f32) -> T,
    ) {
        let to_grad = Lerp::new((1.0 - self.decay) as f32);
        let to_momentum = Lerp::new(self.decay as f32);
        for (momentum, one) in momentum.iter_mut().zip(grads) {
            let grad = widen(*one) * self.grad_scale;
            *momentum = to_grad.between(*momentum, grad);
            *one = narrow(match self.nesterov {
                true => to_momentum.between(grad, *momentum),
                false => *momentum,
            });
        }
    }
}

/// torch's `lerp`: from the nearer end, which the other one then equals exactly.
#[derive(Clone, Copy)]
struct Lerp {
    from_start: bool,
    factor: f32,
}

impl Lerp {
    fn new(weight: f32) -> Self {
        let from_start = weight.abs() < 0.5;
        Self {
            from_start,
            factor: if from_start { weight } else { weight - 1.0 },
        }
    }

    #[inline(always)]
    fn between(self, start: f32, end: f32) -> f32 {
        let base = if self.from_start { start } else { end };
        self.factor.mul_add(end - start, base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are aligned to numbers of any type.
    #[repr(align(4))]
    struct Aligned([u8; 4]);

    /// Steps a momentum of `old` by a gradient. Returns it and what is to be made orthogonal.
    fn stepped(step: MomentumStep, grad_type: GradType, old: f32, grad: f32) -> [f32; 2] {
        let mut momentum = [old];
        let mut one = Aligned([0; 4]);
        let bytes = &mut one.0[..grad_type.elem_bytes()];
        crate::reduce::store_grad(grad_type, &[grad], bytes);
        step.apply(&mut momentum, grad_type, bytes);
        let out = match grad_type {
            GradType::Fp32 => f32::from_le_bytes(one.0),
            _ => number::from_bf16(u16::from_le_bytes([one.0[0], one.0[1]])),
        };
        [momentum[0], out]
    }

    #[test]
    fn a_momentum_is_the_mean_of_scaled_gradients_and_nesterov_looks_one_further() {
        for (nesterov, expected) in [(true, [3.0, 4.0]), (false, [3.0, 3.0])] {
            let step = MomentumStep {
                decay: 0.5,
                nesterov,
                grad_scale: 2.0,
            };
            for grad_type in [GradType::Fp32, GradType::Bf16] {
                assert_eq!(stepped(step, grad_type, 1.0, 2.5), expected);
            }
        }
    }

    #[test]
    fn what_is_made_orthogonal_is_rounded_and_the_momentum_is_not() {
        let step = MomentumStep {
            decay: 0.75,
            nesterov: false,
            grad_scale: 1.0,
        };
        let grad = 1.0 + 1.0 / 128.0;
        let [momentum, out] = stepped(step, GradType::Bf16, 1.0, grad);
        assert_eq!((momentum, out), (1.0 + 1.0 / 512.0, 1.0));
    }
}
