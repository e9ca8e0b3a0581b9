//! The store behind a run: a daemon that runs already, or a private one in the folders of `nvme_path`.

mod daemon;
mod folder;

pub use daemon::{StoreFiles, start_private};
pub(crate) use daemon::{file_name, job_of, link_of, remove_files};
pub(crate) use folder::{Gib, free_bytes};
pub use folder::{StoreError, check_folders, check_space};
