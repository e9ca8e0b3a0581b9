//! The driver with its threads, on host memory and on a real private daemon.
//!
//! What could go wrong: bytes lost or mixed up between threads, slots and devices; results that depend on where tiles live or
//! when they are updated; a hang when the daemon, the optimizer or the trainer fails; a committed step that does not come back.
//! A toy model whose every byte depends on all before it is trained in every way and compared with plain vectors.

mod memory;
mod mixed;
mod store;
mod toy;
