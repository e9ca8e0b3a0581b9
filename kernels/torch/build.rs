//! Compiles src/shim.cpp and src/collective/gloo/shim.cpp against torch-sys's libtorch, and sets a RUNPATH to it for
//! this crate's tests and, through `DEP_OFFLOAD_TORCH_RUNPATH`, for dependents.

use std::path::{Path, PathBuf};

fn main() {
    // torch-sys found it through LIBTORCH, or in the installed torch with LIBTORCH_USE_PYTORCH=1.
    let lib = PathBuf::from(
        std::env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys names libtorch's directory"),
    );
    let include = match std::env::var_os("LIBTORCH_INCLUDE") {
        Some(dir) => PathBuf::from(dir).join("include"),
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
        // The wheels contain Gloo in libtorch_cpu.so and declare it, but contain no headers of Gloo.
        .define("USE_C10D_GLOO", None)
        .include("src/collective/gloo/stubs")
        .file("src/shim.cpp")
        .file("src/collective/gloo/shim.cpp")
        .compile("offload_torch_shim");
    let runpath = runpath(&lib);
    println!("cargo:runpath={runpath}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{runpath}");
}

/// RUNPATH of a binary: the directories in which it looks for libtorch, in this order:
///
/// - `.libtorch` beside the target directory (from `target/debug/trainer` and `target/debug/deps/test`), so that the
///   repository can be moved
/// - `PREFIX/lib/libtorch` for `PREFIX/bin/trainer`, where programs are installed
/// - the directory at build time, for a binary that is copied elsewhere on the same machine
///
/// The loader searches before `main`, so a binary without libtorch shows only the loader's message.
fn runpath(lib: &Path) -> String {
    let built = lib.canonicalize().unwrap_or_else(|_| lib.to_path_buf());
    [
        "$ORIGIN/../../.libtorch/torch/lib",
        "$ORIGIN/../../../.libtorch/torch/lib",
        "$ORIGIN/../lib/libtorch/torch/lib",
        &built.display().to_string(),
    ]
    .join(":")
}
