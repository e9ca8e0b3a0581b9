//! The core over simulated disks.
//!
//! What could go wrong: something acknowledged is lost, a torn tile is taken for a whole one, a generation is a mixture of
//! two, memory is given away while a device still writes it, a failed operation is taken for a done one. Each file here
//! makes one kind of trouble on purpose; `removed` takes a mechanism away and asks that its test then fails.
//!
//! `OFFLOADD_SEEDS=n..m cargo test --test simulation` runs other seeds, or the one of a failure again.

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
mod oracle;
mod quotas;
mod reading;
mod removed;
mod rules;
mod scratch;
mod trace;
mod trouble;
mod unreadable;
mod world;
