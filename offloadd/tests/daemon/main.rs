//! Tests whole daemons on real sockets, files and processes. Each module starts with the faults that it looks for.

#[path = "../another_user/mod.rs"]
mod another_user;
mod bytes;
mod common;
mod doctor;
mod full;
mod growth;
mod hostile;
mod injected_faults;
mod jobs;
mod lifecycle;
mod limits;
mod log;
#[path = "../loops/mod.rs"]
mod loops;
mod measured;
mod metrics;
mod names;
mod page;
mod progress;
mod quotas;
mod reading;
mod restart;
mod service;
mod sessions;
mod settings;
mod soak;
mod strace;
mod stuck;
mod top;
mod unlisted;
mod weights;
