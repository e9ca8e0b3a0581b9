//! Which GPUs multiply matrices of 8-bit numbers, in which sizes, and from which on that saves time: so that a plan can ask.

use crate::gpu::Vendor;

/// Rows and columns of matrices of 8-bit numbers are multiples of it: what the conversion stores at once, and what products take.
pub const FP8_UNIT: usize = 16;

/// Layers of a PyTorch model with a smaller side multiply in 16 bits: [`fp8_time`] is about 1 here. The number is fixed, and does not follow
/// the rates of a GPU, because a run's results depend on which layers multiply in 8 bits.
pub const FP8_SIDE_MIN: usize = 1024;

/// Time of products in 8 bits relative to those in 16, for blocks of any width: the matrix units' share.
const PRODUCTS_SHARE: f64 = 0.48;

/// Width at which converting the factors, whose cost does not grow with it, takes as long as the products in 16 bits. With this
/// and [`PRODUCTS_SHARE`], steps on an H200 of 1.345 G (hidden size 2,048) and 6.74 G parameters (4,096), 0.198 and 0.876 s, are met.
const CONVERSION_WIDTH: f64 = 590.0;

/// First architecture of NVIDIA whose matrix units take 8-bit numbers: Ada, then Hopper.
const ARCH_MIN: u32 = 89;

/// Returns why a GPU of this vendor and architecture (`sm_90`) cannot multiply 8-bit numbers; `None` if it can.
pub fn fp8_refusal(vendor: Vendor, arch: &str) -> Option<String> {
    if vendor == Vendor::Hip {
        return Some("only NVIDIA's GPUs are supported".to_owned());
    }
    let number = arch
        .strip_prefix("sm_")
        .and_then(|number| number.parse::<u32>().ok());
    let old = number.is_none_or(|number| number < ARCH_MIN);
    old.then(|| {
        format!(
            "this GPU ({arch}) has no matrix units for them, as those from sm_{ARCH_MIN} on have"
        )
    })
}

/// Returns the time of products in 8 bits, with the conversion of their factors, relative to products in 16, in blocks of this width.
pub fn fp8_time(width: usize) -> f64 {
    PRODUCTS_SHARE + CONVERSION_WIDTH / width as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_from_which_layers_multiply_in_8_bits_are_about_those_from_which_it_pays() {
        assert!(fp8_time(FP8_SIDE_MIN / 2) > 1.5, "it would not pay");
        assert!(fp8_time(FP8_SIDE_MIN) < 1.1, "it would cost");
        assert!(fp8_time(2 * FP8_SIDE_MIN) < 0.8, "it would pay below");
    }

    #[test]
    fn gpus_before_ada_and_those_of_amd_are_refused_by_name() {
        for (vendor, arch, why) in [
            (Vendor::Cuda, "sm_80", "(sm_80) has no matrix units"),
            (Vendor::Cuda, "sm_86", "(sm_86) has no matrix units"),
            (Vendor::Cuda, "unknown", "(unknown)"),
            (Vendor::Hip, "gfx942", "only NVIDIA's"),
        ] {
            let said = fp8_refusal(vendor, arch).unwrap();
            assert!(said.contains(why), "{said}");
        }
        for arch in ["sm_89", "sm_90", "sm_100", "sm_120"] {
            assert_eq!(fp8_refusal(Vendor::Cuda, arch), None);
        }
    }
}
