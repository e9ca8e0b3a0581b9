//! Lets the program and its tests find libtorch at run time, where the build script of kernels-torch found it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let runpath = std::env::var("DEP_OFFLOAD_TORCH_RUNPATH")
        .expect("kernels-torch names libtorch's directory");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{runpath}");
}
