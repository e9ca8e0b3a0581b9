//! Whole daemons on real sockets, files and processes. What could go wrong is said at the top of each part.

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
mod life;
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
mod top;
mod unlisted;
mod wear;
mod weights;
