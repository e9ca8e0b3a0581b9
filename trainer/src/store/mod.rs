//! The store behind a run: a daemon that runs already, or a private one in the directories of `nvme_path`.

mod daemon;
mod dir;

pub use daemon::{StoreFiles, start_private};
pub(crate) use daemon::{file_name, job_of, link_of, remove_files};
pub(crate) use dir::free_bytes;
pub use dir::{StoreError, check_dirs, check_space};
