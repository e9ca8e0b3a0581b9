//! Compiles src/shim.cpp and src/collective/gloo/shim.cpp against the libtorch that torch-sys found, and says where that is: a RUNPATH
//! for our own tests, and the same for dependents (`DEP_OFFLOAD_TORCH_RUNPATH`).

use std::path::{Path, PathBuf};

fn main() {
    // torch-sys found it: LIBTORCH, or the installed torch with LIBTORCH_USE_PYTORCH=1.
    let lib = PathBuf::from(
        std::env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys names libtorch's folder"),
    );
    let include = match std::env::var_os("LIBTORCH_INCLUDE") {
        Some(folder) => PathBuf::from(folder).join("include"),
        None => lib
            .parent()
            .expect("libtorch/lib has a parent")
            .join("include"),
    };
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/guarded.h");
    println!("cargo:rerun-if-changed=src/shim.cpp");
    println!("cargo:rerun-if-changed=src/collective/gloo");
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .opt_level(1)
        .warnings(false)
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1") // as the wheels of 2.11.0 are built
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        // The wheels have Gloo inside libtorch_cpu.so and declare it, but bring no headers of Gloo itself.
        .define("USE_C10D_GLOO", None)
        .include("src/collective/gloo/stubs")
        .file("src/shim.cpp")
        .file("src/collective/gloo/shim.cpp")
        .compile("offload_torch_shim");
    let runpath = runpath(&lib);
    println!("cargo:runpath={runpath}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{runpath}");
}

/// Where a binary looks for libtorch: in `.libtorch` beside the target folder, relative to `target/debug/trainer` and to
/// `target/debug/deps/test`, so that the repository can be moved; and in the folder itself when it is elsewhere.
fn runpath(lib: &Path) -> String {
    let mut paths = vec![
        "$ORIGIN/../../.libtorch/torch/lib".to_owned(),
        "$ORIGIN/../../../.libtorch/torch/lib".to_owned(),
    ];
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE-HASH/out.
    let beside = out
        .ancestors()
        .nth(4)
        .map(|target| target.join("../.libtorch/torch/lib").canonicalize());
    if !matches!((beside, lib.canonicalize()), (Some(Ok(a)), Ok(b)) if a == b) {
        paths.push(lib.display().to_string());
    }
    paths.join(":")
}
