//! One module per command: its options and its output.

pub(crate) mod run;
pub(crate) mod scale;
pub(crate) mod testdrives;
pub(crate) mod training;
