//! Tests the conversion to 8-bit numbers against torch's, bit for bit, and their products on a GPU against fp64.

use std::sync::OnceLock;

use kernels_torch::TorchError;
use kernels_torch::fp8::{
    Fp8Format, Fp8Kernels, Fp8Layout, Fp8Matrix, Fp8Sums, fp8_kind, fp8_product,
};
use tch::{Device, Kind, Tensor};

use crate::opened;

fn fp8() -> Option<&'static (Fp8Kernels, Device)> {
    static COMPILED: OnceLock<Option<(Fp8Kernels, Device)>> = OnceLock::new();
    let compiled = COMPILED.get_or_init(|| {
        let (gpu, device) = opened("8-bit numbers")?;
        Some((Fp8Kernels::compile(&gpu, device).unwrap(), device))
    });
    compiled.as_ref()
}

const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];

/// Numbers of all sizes down to 2^-spread of the largest, which is `largest`, with zeros.
fn numbers(rows: i64, columns: i64, largest: f64, spread: f64, device: Device) -> Tensor {
    tch::manual_seed(rows * 1000 + columns);
    let double = (Kind::Double, Device::Cpu);
    let sizes = (Tensor::rand([rows, columns], double) * -spread).exp2() * largest;
    let x = sizes * Tensor::randn([rows, columns], double).sign();
    let x = x * Tensor::rand([rows, columns], double)
        .gt(0.05)
        .to_kind(Kind::Double);
    let _ = x.get(rows - 1).get(columns / 2).fill_(-largest);
    x.to_kind(Kind::BFloat16).to_device(device)
}

/// The definition: the largest power of two with which the largest number stays in the format, and torch's rounding.
fn expected(x: &Tensor, format: Fp8Format) -> (Tensor, f64) {
    let x = x.to_device(Device::Cpu).to_kind(Kind::Double);
    let largest = x.abs().max().double_value(&[]);
    let scale = if largest == 0.0 {
        1.0
    } else {
        (format.largest() / largest)
            .log2()
            .floor()
            .min(126.0)
            .exp2()
    };
    let scaled = (x * scale).to_kind(Kind::Float);
    (scaled.to_kind(fp8_kind(format)), 1.0 / scale)
}

fn convert(
    fp8: &Fp8Kernels,
    x: &Tensor,
    format: Fp8Format,
    layout: Fp8Layout,
) -> Result<Fp8Matrix, TorchError> {
    fp8.convert(x, &fp8.largest(x)?, format, layout)
}

fn bytes(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu)
        .contiguous()
        .view_dtype(Kind::Uint8)
}

fn assert_is(what: &str, found: &Fp8Matrix, x: &Tensor, format: Fp8Format) {
    let (numbers, inverse) = expected(x, format);
    assert_eq!(found.inverse_scale.double_value(&[]), inverse, "{what}");
    // A negative zero has other bits, and torch keeps it too.
    for (layout, found, numbers) in [
        ("straight", &found.straight, numbers.shallow_clone()),
        ("transposed", &found.transposed, numbers.transpose(0, 1)),
    ] {
        let Some(found) = found else { continue };
        assert_eq!(found.size(), numbers.size(), "{what}, {layout}");
        let wrong = bytes(found).ne_tensor(&bytes(&numbers)).sum(Kind::Int64);
        assert_eq!(
            wrong.int64_value(&[]),
            0,
            "{what}, {layout}: elements that differ"
        );
    }
}

#[test]
fn conversion_has_the_bits_of_torch_in_each_layout() {
    let Some((fp8, device)) = fp8() else { return };
    // Mantissas of the largest value on both sides of the format's, sizes that need a scale at the limits, subnormal results.
    let sizes = [
        (1.0, 4.0),
        (1.7421875, 20.0),
        (1.75, 6.0),
        (1.9e-5, 30.0),
        (3.0e38, 8.0),
        (1e-38, 3.0),
    ];
    // Less than a tile, and several with edges.
    let small = [(16, 16), (144, 272), (48, 640)];
    let cases = small
        .iter()
        .flat_map(|shape| sizes.map(|size| (*shape, size)));
    // More than all blocks read at a time.
    for ((rows, columns), (largest, spread)) in cases.chain([((2048, 1040), sizes[1])]) {
        let x = numbers(rows, columns, largest, spread, *device);
        for format in FORMATS {
            let found = convert(fp8, &x, format, Fp8Layout::Both).unwrap();
            let what = format!("{rows} x {columns} up to {largest}, {format:?}");
            assert_is(&what, &found, &x, format);
        }
    }
    let x = numbers(144, 272, 1.0, 4.0, *device);
    for (layout, straight, transposed) in [
        (Fp8Layout::Straight, true, false),
        (Fp8Layout::Transposed, false, true),
        (Fp8Layout::Both, true, true),
    ] {
        let found = convert(fp8, &x, Fp8Format::E4m3, layout).unwrap();
        assert_eq!(found.straight.is_some(), straight);
        assert_eq!(found.transposed.is_some(), transposed);
        assert_is("one layout", &found, &x, Fp8Format::E4m3);
    }
}

#[test]
fn a_matrix_of_zeros_stays_and_one_that_is_not_finite_is_nan_as_a_whole() {
    let Some((fp8, device)) = fp8() else { return };
    let zeros = Tensor::zeros([32, 48], (Kind::BFloat16, *device));
    for format in FORMATS {
        let found = convert(fp8, &zeros, format, Fp8Layout::Both).unwrap();
        assert_is("zeros", &found, &zeros, format);
        for wrong in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let x = zeros.copy();
            let _ = x.get(17).get(5).fill_(wrong);
            let found = convert(fp8, &x, format, Fp8Layout::Both).unwrap();
            assert!(
                found.inverse_scale.double_value(&[]).is_nan(),
                "{wrong}, {format:?}"
            );
        }
    }
}

#[test]
fn products_of_8_bit_numbers_are_those_of_their_values() {
    let Some((fp8, device)) = fp8() else { return };
    let (n, k, m) = (256, 1024, 512);
    let a = numbers(n, k, 3.0, 10.0, *device);
    let b = numbers(m, k, 0.02, 8.0, *device);
    let bias = numbers(1, m, 0.5, 3.0, *device).view([m]);
    let value = |x: &Tensor, format| {
        let (numbers, inverse) = expected(x, format);
        numbers.to_kind(Kind::Double) * inverse
    };
    for (format, sums, tolerance) in [
        (Fp8Format::E4m3, Fp8Sums::Fast, 2e-3),
        (Fp8Format::E5m2, Fp8Sums::Exact, 5e-4),
    ] {
        let left = convert(fp8, &a, format, Fp8Layout::Straight).unwrap();
        let right = convert(fp8, &b, Fp8Format::E4m3, Fp8Layout::Straight).unwrap();
        let exact = value(&a, format).matmul(&value(&b, Fp8Format::E4m3).transpose(0, 1));
        let place = Tensor::empty([n, m], (Kind::BFloat16, *device));
        for (bias, out) in [(None, None), (Some(&bias), None), (None, Some(&place))] {
            let found = fp8_product(
                (left.straight.as_ref().unwrap(), &left.inverse_scale),
                (right.straight.as_ref().unwrap(), &right.inverse_scale),
                bias,
                out,
                sums,
            )
            .unwrap();
            let exact = match bias {
                Some(bias) => &exact + bias.to_device(Device::Cpu).to_kind(Kind::Double),
                None => exact.shallow_clone(),
            };
            let largest = exact.abs().max().double_value(&[]);
            let apart = found.to_device(Device::Cpu).to_kind(Kind::Double) - &exact;
            // Rounding of the result to bf16, and of the sums.
            let allowed = exact.abs() / 256.0 + largest * tolerance;
            let worst = (apart.abs() - allowed).max().double_value(&[]);
            assert!(
                worst <= 0.0,
                "{format:?}, {sums:?}: {worst:e} more than rounding, of {largest}"
            );
            if let Some(out) = out {
                assert!(out.equal(&found), "written where it was asked for");
            }
        }
    }
}
