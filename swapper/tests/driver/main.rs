//! Tests the driver with its threads, on host memory and on a real private daemon.
//!
//! Likely faults are bytes lost or mixed up between threads, slots and devices, results that depend on where tiles live or when they are updated, a
//! hang when the daemon, the optimizer or the trainer fails, and a committed step that cannot be resumed. A toy model in which every byte depends on
//! all earlier ones is trained in every way and compared with plain vectors.

mod external;
mod memory;
mod mixed;
mod scratch;
mod store;
mod toy;
