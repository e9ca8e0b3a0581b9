//! Tests that every kernel source compiles for NVIDIA and for AMD, without a GPU, with each compiler on this machine.
//!
//! Likely faults are a source that uses something one of the compilers lacks (an include, a builtin, a keyword), which nobody without that vendor's
//! GPU would notice, and a kernel that spills registers. `make test-tools` fetches NVRTC, and installs clang and Debian's HIP runtime if it may.

use std::path::{Path, PathBuf};
use std::process::Command;

use kernels::gpu::{CompileOptions, Compiler, GpuError, PRELUDE, SOURCES, Vendor};

use crate::on_fake::scratch;

/// Returns the compiler, or prints what is missing.
fn compiler(vendor: Vendor) -> Option<Compiler> {
    // `.ci/test-tools.sh` puts NVRTC here.
    let fetched: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("target/tmp has a parent")
        .join("nvrtc/nvidia/cu13/lib");
    match Compiler::open(vendor, &[fetched]) {
        Ok(compiler) => {
            println!("{vendor} compiler {:?}", compiler.version().unwrap());
            Some(compiler)
        }
        Err(GpuError::NoCompiler { tried, .. }) => {
            println!("skipped: no run-time compiler for {vendor}: {}", tried[0]);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// AMD's GPUs that people have, the first four in every push, all with `OFFLOADD_ALL_CASES`: MI200, MI300, Radeon cards of the RX 7000 and
/// 9000 series; then MI100, MI350, the RX 6000 series, RX 7800 and Strix Halo.
const AMD_ARCHS: [&str; 9] = [
    "gfx90a", "gfx942", "gfx1100", "gfx1201", "gfx908", "gfx950", "gfx1030", "gfx1101", "gfx1151",
];

fn assert_all_compile(vendor: Vendor, archs: &[&str]) {
    let Some(compiler) = compiler(vendor) else {
        return;
    };
    for arch in archs {
        for (name, source) in SOURCES {
            let code = compiler.compile(arch, name, source, &CompileOptions::default());
            let code = code.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(
                code[..4],
                *b"\x7fELF",
                "{name} for {arch} is no device code"
            );
        }
    }
}

#[test]
fn every_source_compiles_with_nvrtc() {
    assert_all_compile(Vendor::Cuda, &["sm_80", "sm_90a"]);
}

#[test]
fn every_source_compiles_with_hiprtc() {
    // The newest that Debian 12's HIP 5.2 knows; clang below knows newer ones.
    assert_all_compile(Vendor::Hip, &["gfx90a"]);
}

#[test]
fn a_wrong_source_gives_the_compilers_words_and_the_line() {
    for (vendor, arch) in [(Vendor::Cuda, "sm_90"), (Vendor::Hip, "gfx90a")] {
        let Some(compiler) = compiler(vendor) else {
            continue;
        };
        let source = "// fine\nKERNEL broken(float *x) { x[0] = nowhere_declared; }";
        let options = CompileOptions::default();
        let error = compiler
            .compile(arch, "broken.cu", source, &options)
            .unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, GpuError::Compile { .. }), "{text}");
        for word in [arch, "nowhere_declared", "broken.cu"] {
            assert!(text.contains(word), "{vendor}: no {word} in {text}");
        }
        assert!(
            text.contains("broken.cu(2)") || text.contains("broken.cu:2"),
            "{vendor}: the line is not that of the source: {text}"
        );
    }
}

#[test]
fn options_reach_the_compiler() {
    for (vendor, arch) in [(Vendor::Cuda, "sm_90"), (Vendor::Hip, "gfx90a")] {
        let Some(compiler) = compiler(vendor) else {
            continue;
        };
        let source = "KERNEL fused(float *x) { x[0] = x[1] * x[2] + FACTOR; }";
        let compiled = |defines: &[(&str, &str)], contract| {
            let own = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
            let options = CompileOptions {
                defines: defines.iter().map(own).collect(),
                contract,
            };
            compiler.compile(arch, "fused.cu", source, &options)
        };
        compiled(&[], false).expect_err("FACTOR is not defined");
        let apart = compiled(&[("FACTOR", "x[3]")], false).unwrap();
        let together = compiled(&[("FACTOR", "x[3]")], true).unwrap();
        assert!(apart != together, "{vendor}: `contract` changes nothing");
    }
}

#[test]
fn every_source_compiles_with_clang_for_amd_and_spills_no_register() {
    let names = (17..=24).rev().map(|n| format!("clang++-{n}"));
    let works = |name: &String| {
        let answer = Command::new(name).arg("--version").output();
        answer.is_ok_and(|answer| answer.status.success())
    };
    let Some(clang) = names.into_iter().find(works) else {
        println!("skipped: no clang of version 17 or later: the check of kernels for gfx942");
        return;
    };
    let archs = match std::env::var_os("OFFLOADD_ALL_CASES") {
        Some(_) => AMD_ARCHS.len(),
        None => 4,
    };
    let dir = scratch();
    for (name, source) in SOURCES {
        let path = dir.path().join(format!("{name}.hip"));
        std::fs::write(&path, format!("{PRELUDE}\n{source}")).unwrap();
        for arch in &AMD_ARCHS[..archs] {
            let output = Command::new(&clang)
                .args([
                    "-x",
                    "hip",
                    "--offload-device-only",
                    "--no-gpu-bundle-output",
                ])
                .args(["-nogpuinc", "-nogpulib", "-O3", "-std=c++17"])
                .args(["-ffp-contract=off", "-Wall", "-Werror", "-S"])
                .arg("-Rpass-analysis=kernel-resource-usage")
                .arg(format!("--offload-arch={arch}"))
                .args(["-o", "/dev/null"])
                .arg(&path)
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{clang}, {name} for {arch}:\n{printed}"
            );
            let spills: Vec<&str> = printed
                .lines()
                .filter(|l| l.contains("VGPRs Spill:"))
                .collect();
            assert!(
                !spills.is_empty(),
                "{name}: clang does not say what kernels use:\n{printed}"
            );
            for line in spills {
                assert!(
                    line.contains("VGPRs Spill: 0 "),
                    "{name} for {arch}: {line}"
                );
            }
        }
    }
}
