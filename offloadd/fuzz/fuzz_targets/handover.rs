//! Changes what one daemon hands over to the next: the state's file, the state itself (which a checksum would hide), and names of descriptors. The
//! next daemon must refuse it with a message, or adopt it so that everything can be handed over again and freed.
//!
//! The first byte says what is changed. The corpus begins with real hand-overs, in the directory that `run.sh` names.

#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/simulation/handed.rs"]
mod handed;
// The modules are those of the simulation, which uses more of them.
#[allow(dead_code)]
#[path = "../../tests/simulation/disks.rs"]
mod disks;
#[allow(dead_code)]
#[path = "../../tests/simulation/trace.rs"]
mod trace;
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
