//! The loop over the planes of a chunk, which vector versions share. One of the files that may use `unsafe`.
#![allow(unsafe_code)]

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Prefetches the cache line 1 KiB after this block, because the processor's own prefetch restarts at each page of each
/// plane. On the 16-core Xeon of an H200 host 1 to 2 KiB gave 10 to 20 % with one to four threads, 5 to 10 % with 16;
/// 256 bytes gave nothing.
#[inline(always)]
pub(super) fn prefetch_after<T>(block: &T) {
    const DISTANCE_BYTES: usize = 1024;
    let address = std::ptr::from_ref(block).wrapping_byte_add(DISTANCE_BYTES);
    // SAFETY: a prefetch has no visible effect and never faults, even beyond the end of a plane.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

/// Defines `step_blocks`, which steps the whole blocks of each plane with the functions of the module around it and the rest with
/// the definition, and `Vectors`, the scalars in each lane of a `$vector`; the fp32 numbers of a block are a `$block`.
macro_rules! step_planes {
    ($features:tt, $vector:ty, $block:ty, $broadcast:path) => {
        #[target_feature(enable = $features)]
        fn step_blocks(s: &Scalars, elements: Elements<'_>) {
            let v = Vectors::new(s);
            let weights = elements.weights;
            let rest = match elements.moments {
                MomentPlanes::AdamW { momentum, variance } => {
                    let (m, momentum) = momentum.as_chunks_mut::<BLOCK>();
                    let (var, variance) = variance.as_chunks_mut::<BLOCK>();
                    let moments = m.iter_mut().zip(var);
                    let update = |master, m, grad| v.adamw(master, m, grad);
                    Elements {
                        weights: step_weights(weights, moments, update),
                        moments: MomentPlanes::AdamW { momentum, variance },
                    }
                }
                MomentPlanes::Lion { momentum } => {
                    let (m, momentum) = momentum.as_chunks_mut::<BLOCK>();
                    let update = |master, m, grad| v.lion(master, m, grad);
                    Elements {
                        weights: step_weights(weights, m.iter_mut(), update),
                        moments: MomentPlanes::Lion { momentum },
                    }
                }
                MomentPlanes::Sgd => {
                    let update = |master, (), grad| v.sgd(master, grad);
                    Elements {
                        weights: step_weights(weights, std::iter::repeat(()), update),
                        moments: MomentPlanes::Sgd,
                    }
                }
            };
            scalar::step(s, rest);
        }

        /// Replaces the masters of each block with what `update` returns for them, their moments and their gradients. Returns
        /// the elements that fill no block.
        #[inline]
        #[target_feature(enable = $features)]
        fn step_weights<'a, M>(
            weights: Weights<'a>,
            moments: impl Iterator<Item = M>,
            update: impl Fn($block, M, $block) -> $block,
        ) -> Weights<'a> {
            match weights {
                Weights::SplitBf16 {
                    param,
                    residual,
                    grad,
                } => {
                    let (param, param_rest) = param.as_chunks_mut::<BLOCK>();
                    let (residual, residual_rest) = residual.as_chunks_mut::<BLOCK>();
                    let (grad, grad_rest) = grad.as_chunks::<BLOCK>();
                    let weights = param.iter_mut().zip(residual).zip(grad);
                    for (((param, residual), grad), m) in weights.zip(moments) {
                        prefetch_after(param);
                        prefetch_after(residual);
                        prefetch_after(grad);
                        let new = update(join(param, residual), m, from_bf16(grad));
                        split(new, param, residual);
                    }
                    Weights::SplitBf16 {
                        param: param_rest,
                        residual: residual_rest,
                        grad: grad_rest,
                    }
                }
                Weights::Fp32 { param, grad } => {
                    let (param, param_rest) = param.as_chunks_mut::<BLOCK>();
                    let (grad, grad_rest) = grad.as_chunks::<BLOCK>();
                    for ((param, grad), m) in param.iter_mut().zip(grad).zip(moments) {
                        prefetch_after(param);
                        prefetch_after(grad);
                        let new = update(load(param), m, load(grad));
                        store(new, param);
                    }
                    Weights::Fp32 {
                        param: param_rest,
                        grad: grad_rest,
                    }
                }
                Weights::Fp16WholeMaster { param, whole, grad } => {
                    let (param, param_rest) = param.as_chunks_mut::<BLOCK>();
                    let (whole, whole_rest) = whole.as_chunks_mut::<BLOCK>();
                    let (grad, grad_rest) = grad.as_chunks::<BLOCK>();
                    let weights = param.iter_mut().zip(whole).zip(grad);
                    for (((param, whole), grad), m) in weights.zip(moments) {
                        prefetch_after(param);
                        prefetch_after(whole);
                        prefetch_after(grad);
                        let new = update(load(whole), m, from_fp16(grad));
                        store(new, whole);
                        to_fp16(new, param);
                    }
                    Weights::Fp16WholeMaster {
                        param: param_rest,
                        whole: whole_rest,
                        grad: grad_rest,
                    }
                }
            }
        }

        /// The scalars, each broadcast to a vector.
        struct Vectors {
            grad_scale: $vector,
            beta1: $vector,
            one_minus_beta1: $vector,
            beta2: $vector,
            one_minus_beta2: $vector,
            root_correction: $vector,
            eps: $vector,
            minus_decay: $vector,
            minus_step_size: $vector,
        }

        impl Vectors {
            #[inline]
            #[target_feature(enable = $features)]
            fn new(s: &Scalars) -> Self {
                Self {
                    grad_scale: $broadcast(s.grad_scale),
                    beta1: $broadcast(s.beta1),
                    one_minus_beta1: $broadcast(s.one_minus_beta1),
                    beta2: $broadcast(s.beta2),
                    one_minus_beta2: $broadcast(s.one_minus_beta2),
                    root_correction: $broadcast(s.root_correction),
                    eps: $broadcast(s.eps),
                    minus_decay: $broadcast(s.minus_decay),
                    minus_step_size: $broadcast(s.minus_step_size),
                }
            }
        }
    };
}
pub(super) use step_planes;
