//! Tests the core over simulated disks.
//!
//! What could go wrong: acknowledged state is lost, a torn tile is taken for an intact one, a generation is a mixture of two, memory is freed while a
//! device still writes to it, a failed operation counts as done. Each module causes one kind of fault; `removed` disables a safeguard and checks that
//! its test then fails.
//!
//! `OFFLOADD_SEEDS=n..m cargo test --test simulation` runs other seeds, or repeats the seed of a failure.

mod crashes;
mod cuts;
mod damage;
mod disks;
mod failures;
mod flushes;
mod format;
mod growth;
mod handed;
mod incarnations;
mod metadata_device;
mod nodes;
mod oracle;
mod priorities;
mod quotas;
mod reading;
mod removed;
mod rules;
mod scratch;
mod trace;
mod trouble;
mod unreadable;
mod world;
