//! Commands whose arguments need a file of their own.

pub(crate) mod export;
pub(crate) mod gpu_facts;
pub(crate) mod init;
pub(crate) mod plan;
pub(crate) mod preview_data;
pub(crate) mod relocate;
pub(crate) mod remove;
pub(crate) mod runs;
pub(crate) mod source;
