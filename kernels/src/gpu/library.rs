//! Finds and opens the vendors' libraries at run time. No GPU library is linked, so one program runs with and without a
//! GPU.

use std::path::{Path, PathBuf};

use super::Vendor;
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

/// Opens the first available library of `names`: by its plain name (already loaded, LD_LIBRARY_PATH, the system), then
/// in each of `dirs`. It stays loaded, because drivers start threads that outlive any owner.
///
/// # Errors
/// Each place tried, with the loader's answer.
pub fn open_first(
    names: &[&str],
    dirs: &[PathBuf],
) -> Result<(&'static Library, String), Vec<String>> {
    let mut tried = Vec::new();
    let plain = names.iter().map(PathBuf::from);
    let beside = dirs
        .iter()
        .flat_map(|dir| names.iter().map(move |name| dir.join(name)))
        .filter(|path| path.exists());
    for path in plain.chain(beside) {
        match open(&path) {
            Ok(library) => return Ok((library, path.display().to_string())),
            Err(answer) => tried.push(answer),
        }
    }
    for dir in dirs {
        tried.push(format!("not found in {}", dir.display()));
    }
    Err(tried)
}

/// Opens one library permanently.
///
/// # Errors
/// The loader's answer, which names the file.
pub(super) fn open(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: these are the vendors' libraries, whose initialisers may run at any time on any thread.
    match unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => Ok(Box::leak(Box::new(library.into()))),
        Err(error) => Err(load_error(path, &error)),
    }
}

/// Directories of the loaded libraries whose file name starts with `prefix`.
pub fn dirs_of_loaded(prefix: &str) -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    dirs_in_maps(&maps, prefix)
}

/// Directories where pip installs the run-time compiler beside a loaded torch: `torch/lib/../../nvidia/cu13/lib`.
pub(super) fn dirs_beside_torch() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = ["libc10", "libtorch"]
        .iter()
        .flat_map(|prefix| dirs_of_loaded(prefix))
        .flat_map(|lib| {
            let site = lib.join("../..");
            [
                site.join("nvidia/cu13/lib"),
                site.join("nvidia/cuda_nvrtc/lib"),
                lib,
            ]
        })
        .collect();
    dirs.dedup();
    dirs
}

/// Directories of a vendor's toolkit: from its environment variables, else the installer's default.
pub fn dirs_of_toolkit(vendor: Vendor) -> Vec<PathBuf> {
    let (variables, usual, lib): (&[&str], &str, &str) = match vendor {
        Vendor::Cuda => (&["CUDA_HOME", "CUDA_PATH"], "/usr/local/cuda", "lib64"),
        Vendor::Hip => (&["ROCM_PATH", "HIP_PATH"], "/opt/rocm", "lib"),
    };
    let named = variables.iter().filter_map(std::env::var_os);
    named
        .map(PathBuf::from)
        .chain([PathBuf::from(usual)])
        .map(|toolkit| toolkit.join(lib))
        .collect()
}

fn dirs_in_maps(maps: &str, prefix: &str) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| Some(Path::new(&line[line.find('/')?..])))
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(prefix))
        })
        .filter_map(|path| Some(path.parent()?.to_path_buf()))
        .collect();
    dirs.dedup();
    dirs
}

/// The loader's message. Most name the file; the path is prepended to those that do not.
fn load_error(path: &Path, error: &libloading::Error) -> String {
    let words = match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    };
    let path = path.display().to_string();
    if words.contains(&path) {
        words
    } else {
        format!("{path}: {words}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_loaded_library_is_found_in_the_memory_map() {
        let maps = "7f00-7f01 r--p 00000000 00:00 0\n\
                    7f01-7f02 r-xp 00000000 fe:00 12 /opt/py thon/torch/lib/libc10.so\n\
                    7f02-7f03 r--p 00000000 fe:00 12 /opt/py thon/torch/lib/libc10.so\n\
                    7f03-7f04 r--p 00000000 fe:00 12 /usr/lib/libc.so.6\n";
        assert_eq!(
            dirs_in_maps(maps, "libc10"),
            [PathBuf::from("/opt/py thon/torch/lib")]
        );
        assert!(dirs_in_maps(maps, "libcuda").is_empty());
        assert!(
            !dirs_of_loaded("libc.so").is_empty(),
            "this very process has a C library"
        );
    }

    #[test]
    fn what_is_not_there_is_named_in_the_answer() {
        let answer = open_first(
            &["libsurely-not-here.so.7"],
            &[PathBuf::from("/nowhere-at-all")],
        );
        let tried = answer.expect_err("nothing to open").join(" ");
        assert!(tried.contains("libsurely-not-here.so.7"), "{tried}");
        assert!(tried.contains("/nowhere-at-all"), "{tried}");
    }
}
