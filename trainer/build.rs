//! Lets the trainer and its tests find libtorch at run time, where kernels' build script found it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let runpath = std::env::var("DEP_OFFLOAD_KERNELS_RUNPATH")
        .expect("kernels is built with its feature torch");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{runpath}");
}
