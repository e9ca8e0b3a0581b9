//! One module a command: what it takes, and what it prints.

pub(crate) mod canonical;
pub(crate) mod run;
pub(crate) mod scale;
pub(crate) mod testdrives;
pub(crate) mod training;
pub(crate) mod tune;
pub(crate) mod verify;
