//! The size of NCCL's buffers where sockets connect nodes. NCCL reads it from the environment at its first use.

use std::ffi::OsString;
use std::path::Path;

/// Variable with the bytes of NCCL's buffer for each of its connections.
const VARIABLE: &str = "NCCL_BUFFSIZE";

/// Every collective begins with empty buffers and ends with empty ones, and the link is partly idle meanwhile. Over sockets at
/// 1 GB/s, collectives of 13 MB one after another reached 94 % of the link's rate with NCCL's default, 4 MiB, and 98 % with this.
const BYTES: &str = "1048576";

/// Directory in which Linux lists network devices that NCCL prefers to sockets.
const INFINIBAND: &str = "/sys/class/infiniband";

/// Returns the variable to set and its value for a process of a run on `several_nodes`; `None` on one node, if it is set already, or if
/// NCCL connects the nodes by something else than sockets.
pub fn nccl_buffer(several_nodes: bool) -> Option<(&'static str, &'static str)> {
    let get = |name: &str| std::env::var_os(name);
    let is_wanted = several_nodes && get(VARIABLE).is_none();
    (is_wanted && by_sockets(&get, Path::new(INFINIBAND))).then_some((VARIABLE, BYTES))
}

/// Whether NCCL uses sockets, because it was told to or because there is nothing else in `infiniband`.
fn by_sockets(get: &dyn Fn(&str) -> Option<OsString>, infiniband: &Path) -> bool {
    let is = |name: &str, value: &str| get(name).is_some_and(|found| found == value);
    let devices = std::fs::read_dir(infiniband);
    let has_device = devices.is_ok_and(|mut devices| devices.next().is_some());
    is("NCCL_NET", "Socket") || is("NCCL_IB_DISABLE", "1") || !has_device
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<'a>(set: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + use<'a> {
        move |name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        }
    }

    #[test]
    fn a_device_of_another_network_is_preferred_to_sockets_unless_it_is_switched_off() {
        let dir = tempfile::tempdir().unwrap();
        assert!(by_sockets(&with(&[]), dir.path()));
        assert!(by_sockets(&with(&[]), &dir.path().join("none")));
        std::fs::write(dir.path().join("mlx5_0"), "").unwrap();
        assert!(!by_sockets(&with(&[]), dir.path()));
        assert!(by_sockets(&with(&[("NCCL_NET", "Socket")]), dir.path()));
        assert!(by_sockets(&with(&[("NCCL_IB_DISABLE", "1")]), dir.path()));
    }
}
