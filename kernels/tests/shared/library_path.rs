//! Where a program of tests that is started again finds libraries.

use std::ffi::OsString;
use std::path::Path;

/// A value of LD_LIBRARY_PATH with `dir` first: a program that was carried to another machine finds torch by the others.
pub(crate) fn before_others(dir: &Path) -> OsString {
    let mut path = dir.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(others);
    }
    path
}
