//! Tests `trainer gpu-facts` as a program: on the fake driver of a GPU, and without a GPU.

#[path = "../../../kernels/tests/shared/on_fake.rs"]
mod on_fake;

use std::path::Path;
use std::process::{Command, Output};

use kernels::gpu::Gpu;
use offload_support::gpu_facts::{CopiesFact, GpuFacts};

fn ask() -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("gpu-facts").output().unwrap()
}

#[test]
fn a_gpus_copies_and_libraries_are_told() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: facts about a GPU");
            let output = ask();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.starts_with("trainer: no GPU found"), "{said}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    println!("{:?}", gpu.info());
    let output = ask();
    let facts: GpuFacts = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(facts.gpus[0].pci, gpu.info().pci);
    assert!(facts.unopened.is_empty(), "{facts:?}");
    for fact in &facts.gpus {
        let measured = matches!(
            fact.copies,
            CopiesFact::Measured { to_gpu_bytes_per_s, from_gpu_bytes_per_s }
                if to_gpu_bytes_per_s > 1e6 && from_gpu_bytes_per_s > 1e6
        );
        assert!(measured && fact.planned_bytes_per_s > 1e9, "{facts:?}");
    }
}

#[test]
fn a_fake_gpus_copies_and_libraries_are_told() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = manifest.join("../kernels/tests/gpu/fake");
    let source = source.canonicalize().unwrap_or(source);
    let libraries = ["libcuda.so.1", "libnvrtc.so.13"];
    let tests = ["a_gpus_copies_"];
    on_fake::run_on_fake(&source, &libraries, &[], &tests, on_fake::CUDA_INFO);
}
