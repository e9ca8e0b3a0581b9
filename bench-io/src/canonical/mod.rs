//! The canonical workload: whole tiles written in order, committed and read back, and the same bytes without a daemon.

pub(crate) mod bare;
pub(crate) mod workload;
