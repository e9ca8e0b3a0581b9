//! Generates the messages and both halves of the service from the proto file, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/offload.proto");
    let descriptors = protox::compile(["proto/offload.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
