//! The private store of a run: device files in the directories of `nvme_path`, and the daemon that serves them.

mod daemon;
mod dir;
mod mounts;
mod relocate;

pub use daemon::{
    OtherJob, PACKAGE_RUN_FILE, StoreFiles, check_daemon, device_file_bytes, device_free_bytes,
    file_name, is_package_run, job_at, job_of, link_of, other_job, remove_files, start_private,
};
pub use dir::{
    StoreError, StoreSpace, check_dirs, check_is_dir, check_space, file_system, free_bytes,
    is_in_memory, space_needed,
};
pub use mounts::{NotMounted, check_mounted, remember_mounts};
pub use relocate::Relocation;
