//! How the products of a block's projections are computed: in the kind of its numbers, or in 8 bits.
//!
//! In 8 bits, each factor is converted with one scale of its own: weights and activations to E4M3, gradients to E5M2. Sums, results and
//! everything else of a block stay in the kind of its numbers. Torch operators define it; a GPU's matrix units compute the same, with
//! the sums of a forward product in fewer bits.

use std::cell::OnceCell;

use kernels_torch::fp8::{
    Fp8Format, Fp8Kernels, Fp8Layout, Fp8Matrix, Fp8Sums, Largest, fp8_kind, fp8_product,
};
use tch::{Kind, Tensor};

use super::product;
use crate::compute::ComputeError;
use crate::compute::grads::WriteMode;

/// Implementation of a block's products.
pub(crate) enum Products {
    /// In the kind of the factors.
    InKind,
    /// In 8 bits, with torch operators on any device.
    Fp8Plain,
    /// In 8 bits, by a GPU's matrix units.
    Fp8(Box<Fp8Kernels>),
}

/// Largest values of a projection's factors that forward and backward convert, each found once.
#[derive(Default)]
pub(super) struct LargestValues {
    input: OnceCell<LargestValue>,
    weight: OnceCell<LargestValue>,
}

/// The largest value of a factor.
enum LargestValue {
    /// On the GPU.
    Parts(Largest),
    /// As a number; a later use must be of a factor with the same one.
    Plain(f64),
}

/// A factor of products with its form in 8 bits, if they are computed so.
pub(super) struct Factor<'a> {
    pub(super) own: &'a Tensor,
    fp8: Option<Fp8Matrix>,
}

impl Products {
    /// Prepares a projection's input [rows, columns]: straight for the forward product, transposed for the weight's gradient.
    pub(super) fn input<'a>(
        &self,
        x: &'a Tensor,
        layout: Fp8Layout,
        largest: &LargestValues,
    ) -> Result<Factor<'a>, ComputeError> {
        self.factor(x, Fp8Format::E4m3, layout, &largest.input)
    }

    /// Prepares a projection's weight [outputs, inputs]: straight for its forward product, transposed for its input's gradient.
    pub(super) fn weight<'a>(
        &self,
        weight: &'a Tensor,
        layout: Fp8Layout,
        largest: &LargestValues,
    ) -> Result<Factor<'a>, ComputeError> {
        self.factor(weight, Fp8Format::E4m3, layout, &largest.weight)
    }

    /// Prepares the gradient of a projection's output [rows, columns] for both products of backward.
    pub(super) fn gradient<'a>(&self, grad: &'a Tensor) -> Result<Factor<'a>, ComputeError> {
        self.factor(grad, Fp8Format::E5m2, Fp8Layout::Both, &OnceCell::new())
    }

    fn factor<'a>(
        &self,
        own: &'a Tensor,
        format: Fp8Format,
        layout: Fp8Layout,
        largest: &OnceCell<LargestValue>,
    ) -> Result<Factor<'a>, ComputeError> {
        let fp8 = match self {
            Products::InKind => None,
            Products::Fp8Plain => Some(plain_convert(own, format, largest)?),
            Products::Fp8(kernels) => {
                let x = own.f_contiguous()?;
                if largest.get().is_none() {
                    let _ = largest.set(LargestValue::Parts(kernels.largest(&x)?));
                }
                let Some(LargestValue::Parts(largest)) = largest.get() else {
                    unreachable!("one engine computes in one way");
                };
                Some(kernels.convert(&x, largest, format, layout)?)
            }
        };
        Ok(Factor { own, fp8 })
    }

    /// Multiplies `x` [n, k] by the transposed `weight` [m, k], adding `bias`, `[m]`, before rounding.
    pub(super) fn times_transposed_plus(
        &self,
        x: &Factor,
        weight: &Factor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor, ComputeError> {
        match (&x.fp8, &weight.fp8) {
            (Some(a), Some(b)) => {
                let (a, b) = (straight(a), straight(b));
                self.fp8_product(a, b, bias, None, Fp8Sums::Fast)
            }
            _ => product::times_transposed_plus(x.own, weight.own, bias),
        }
    }

    /// Multiplies `grad` [n, m] by `weight` [m, k].
    pub(super) fn times(&self, grad: &Factor, weight: &Factor) -> Result<Tensor, ComputeError> {
        match (&grad.fp8, &weight.fp8) {
            (Some(a), Some(b)) => {
                let (a, b) = (straight(a), transposed(b));
                self.fp8_product(a, b, None, None, Fp8Sums::Exact)
            }
            _ => product::times(grad.own, weight.own),
        }
    }

    /// Writes a weight's gradient, the transposed `grad` [n, m] times `x` [n, k], to `out` [m, k]. Products of 8 bits are
    /// rounded to bf16 before they are added, because torch's product of such numbers adds nothing.
    pub(super) fn weight_grad(
        &self,
        out: &Tensor,
        mode: WriteMode,
        grad: &Factor,
        x: &Factor,
    ) -> Result<(), ComputeError> {
        match (&grad.fp8, &x.fp8) {
            (Some(a), Some(b)) => {
                let (a, b) = (transposed(a), transposed(b));
                let over = (mode == WriteMode::Replace).then_some(out);
                let product = self.fp8_product(a, b, None, over, Fp8Sums::Exact)?;
                if mode == WriteMode::Add {
                    let _ = out.shallow_clone().f_add_(&product)?;
                }
                Ok(())
            }
            _ => match mode {
                WriteMode::Replace => product::weight_grad(out, grad.own, x.own),
                WriteMode::Add => product::weight_grad_added(out, grad.own, x.own),
            },
        }
    }

    /// Multiplies `a` [n, k] by the transposed `b` [m, k].
    fn fp8_product(
        &self,
        a: (&Tensor, &Tensor),
        b: (&Tensor, &Tensor),
        bias: Option<&Tensor>,
        out: Option<&Tensor>,
        sums: Fp8Sums,
    ) -> Result<Tensor, ComputeError> {
        match self {
            Products::Fp8Plain => plain_product(a, b, bias, out),
            _ => Ok(fp8_product(a, b, bias, out, sums)?),
        }
    }
}

fn straight(matrix: &Fp8Matrix) -> (&Tensor, &Tensor) {
    let numbers = matrix
        .straight
        .as_ref()
        .expect("converted for this product");
    (numbers, &matrix.inverse_scale)
}

fn transposed(matrix: &Fp8Matrix) -> (&Tensor, &Tensor) {
    let numbers = (matrix.transposed.as_ref()).expect("converted for this product");
    (numbers, &matrix.inverse_scale)
}

/// Converts with the largest power of two as scale with which the largest number stays in the format.
fn plain_convert(
    x: &Tensor,
    format: Fp8Format,
    found: &OnceCell<LargestValue>,
) -> Result<Fp8Matrix, ComputeError> {
    let wide = x.f_to_kind(Kind::Double)?;
    let largest = wide.f_abs()?.f_max()?.f_double_value(&[])?;
    match found.get_or_init(|| LargestValue::Plain(largest)) {
        LargestValue::Plain(before) => assert_eq!(
            before.to_bits(),
            largest.to_bits(),
            "a largest value is that of its factor"
        ),
        LargestValue::Parts(_) => unreachable!("one engine computes in one way"),
    }
    let scale = if largest == 0.0 || !largest.is_finite() {
        1.0
    } else {
        (format.largest() / largest)
            .log2()
            .floor()
            .min(126.0)
            .exp2()
    };
    let inverse = if largest.is_finite() {
        1.0 / scale
    } else {
        f64::NAN
    };
    let numbers = wide.f_mul_scalar(scale)?.f_to_kind(Kind::Float)?;
    let numbers = numbers.f_to_kind(fp8_kind(format))?;
    Ok(Fp8Matrix {
        transposed: Some(numbers.f_transpose(0, 1)?.f_contiguous()?),
        straight: Some(numbers),
        inverse_scale: Tensor::f_full([0i64; 0], inverse, (Kind::Float, x.device()))?,
    })
}

fn plain_product(
    (a, a_scale): (&Tensor, &Tensor),
    (b, b_scale): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    out: Option<&Tensor>,
) -> Result<Tensor, ComputeError> {
    let value = |x: &Tensor, scale: &Tensor| x.f_to_kind(Kind::Float)?.f_mul(scale);
    let product = value(a, a_scale)?.f_mm(&value(b, b_scale)?.f_transpose(0, 1)?)?;
    let product = match bias {
        Some(bias) => product.f_add(&bias.f_to_kind(Kind::Float)?)?,
        None => product,
    };
    let product = product.f_to_kind(Kind::BFloat16)?;
    if let Some(out) = out {
        out.shallow_clone().f_copy_(&product)?;
    }
    Ok(product)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// Integers that 8 bits of either format hold, of bf16: products and sums of them are exact.
    fn integers(rows: i64, columns: i64, factor: i64) -> Tensor {
        let all = Tensor::arange(rows * columns, (Kind::Int64, Device::Cpu));
        let small = (all * factor + 3).remainder(9) - 4;
        small.to_kind(Kind::BFloat16).view([rows, columns])
    }

    #[test]
    fn products_of_numbers_that_8_bits_hold_are_exact() {
        let (tokens, inputs, outputs) = (16, 32, 48);
        // Each factor has a scale of its own.
        let x = integers(tokens, inputs, 7) * 0.25;
        let weight = integers(outputs, inputs, 5) * 8.0;
        let grad = integers(tokens, outputs, 11) * 1e-3f64.log2().floor().exp2();
        let bias = integers(1, outputs, 4).view([outputs]);
        let largest = LargestValues::default();
        let of = |products: &Products| {
            let straight = Fp8Layout::Straight;
            let gradient = products.gradient(&grad).unwrap();
            let input = |layout| products.input(&x, layout, &largest).unwrap();
            let weight = |layout| products.weight(&weight, layout, &largest).unwrap();
            let of_weight = Tensor::empty([outputs, inputs], (Kind::BFloat16, Device::Cpu));
            let transposed = Fp8Layout::Transposed;
            let of_weight_input = input(transposed);
            let write = |out: &Tensor, mode| {
                (products.weight_grad(out, mode, &gradient, &of_weight_input)).unwrap();
            };
            write(&of_weight, WriteMode::Replace);
            let summed = Tensor::ones([outputs, inputs], (Kind::Float, Device::Cpu));
            write(&summed, WriteMode::Add);
            assert!(summed.equal(&(of_weight.to_kind(Kind::Float) + 1.0)));
            [
                (products.times_transposed_plus(&input(straight), &weight(straight), Some(&bias)))
                    .unwrap(),
                products.times(&gradient, &weight(transposed)).unwrap(),
                of_weight,
            ]
        };
        for (eight, own) in of(&Products::Fp8Plain).iter().zip(&of(&Products::InKind)) {
            assert!(own.abs().max().double_value(&[]) > 0.0);
            assert!(eight.equal(own), "{eight} is not {own}");
        }
    }
}
