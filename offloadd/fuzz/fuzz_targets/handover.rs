//! What one daemon hands over to the next, changed: the state's file, the state itself (which a checksum would hide), names
//! of descriptors. It is refused in words, or taken up so that it can be handed over again and all of it be given back.
//!
//! The first byte says which. The corpus begins with what the code itself hands over, in the directory that `run.sh` names.

#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/simulation/handed.rs"]
mod handed;
#[allow(dead_code)]
#[path = "../../tests/simulation/trouble.rs"]
mod trouble;
#[allow(dead_code)]
#[path = "../../tests/simulation/world.rs"]
mod world;

fn plant() {
    let Some(corpus) = std::env::var_os("OFFLOADD_CORPUS").map(PathBuf::from) else {
        return;
    };
    for (nth, seed) in handed::seeds().iter().enumerate() {
        std::fs::write(corpus.join(format!("seed{nth}")), seed).expect("a directory for the corpus");
    }
}

fuzz_target!(init: plant(), |bytes: &[u8]| {
    handed::try_input(bytes);
});
