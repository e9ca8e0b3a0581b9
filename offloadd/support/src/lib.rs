//! Functions that every program of this workspace needs: texts, progress, output, retries, available memory.
//!
//! - [`units`]: one grammar for sizes, rates and counts, and their texts;
//! - [`progress`]: a bar or lines for work that takes long, with an estimate of the remaining time;
//! - [`console`]: output that survives a reader that closes the pipe;
//! - [`paths`]: what a relative path in a message is relative to;
//! - [`plain_log`]: warnings and errors for people, equal ones counted;
//! - [`retry`]: a bounded number of attempts;
//! - [`aligned`]: memory for direct I/O;
//! - `documents`: manual pages and completions of a program, with the feature of this name;
//! - [`signals`]: signals that a program was started to ignore, or survives;
//! - [`file_systems`]: which of them keep their files in memory;
//! - [`energy`]: joules of a GPU and of processors, by their counters;
//! - [`job_name`]: names of the jobs of runs;
//! - [`gpu_facts`]: what `trainer` tells `offloadd doctor` of GPUs;
//! - [`nvidia`]: what NVIDIA's driver says of this machine's GPUs;
//! - [`memory`]: how much memory this process may use, by the machine and its control groups.
//!
//! The crate depends on no other crate of the workspace and knows nothing of tiles.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod aligned;
pub mod console;
#[cfg(feature = "documents")]
pub mod documents;
pub mod energy;
pub mod file_systems;
pub mod gpu_facts;
pub mod job_name;
pub mod memory;
pub mod nvidia;
pub mod paths;
pub mod pcie;
pub mod plain_log;
pub mod progress;
pub mod retry;
pub mod signals;
pub mod units;
