//! Tests of several processes that work together, in one program: `cargo test -p kernels-torch --test collective`.
//!
//! Every rank is a process of its own: this program again, running the same test with torchrun's variables set (`harness.rs`).

mod fake;
mod gone;
mod gpus;
mod harness;
#[path = "../../../tests/shared/library_path.rs"]
mod library_path;
mod rendezvous;
mod values;
