//! Which GPUs multiply matrices of 8-bit numbers, and in which sizes: so that a plan can ask.

use crate::gpu::Vendor;

/// Rows and columns of matrices of 8-bit numbers are multiples of it: what the conversion stores at once, and what products take.
pub const FP8_UNIT: usize = 16;

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

#[cfg(test)]
mod tests {
    use super::*;

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
