//! Helpers for tests of whole daemons: a store in a temporary directory, the program on it, and a process's side by hand (the client crate has its
//! own tests; here every byte can be wrong on purpose).

#[macro_use]
mod process;
mod running;
mod small;
mod store;

pub(crate) use process::*;
pub(crate) use running::*;
pub(crate) use small::*;
pub(crate) use store::*;
