//! Checks whether the metrics endpoint can listen on loopback: the service's sandbox has no network without a drop-in.

use std::net::SocketAddr;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket};

use crate::findings::Finding;

const WHAT: &str = "metrics.listen";

/// Gives the service a network.
const FIX: &str = "install -D -t /etc/systemd/system/offloadd.service.d /usr/share/doc/offloadd/metrics-loopback.conf && systemctl \
                    daemon-reload; or listen = \"unix:/run/offloadd/metrics.sock\"";

/// Directories of units and drop-ins.
const UNIT_DIRS: [&str; 4] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];

/// Checks this process, and the service if it is installed.
pub(super) fn loopback(address: SocketAddr) -> Finding {
    let make = |family| socket(family, SocketType::STREAM, None).map(drop);
    judge(address, Path::new("/"), make)
}

fn judge(
    address: SocketAddr,
    root: &Path,
    make: impl FnOnce(AddressFamily) -> Result<(), Errno>,
) -> Finding {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    if let Err(errno) = make(family) {
        let why = format!(
            "cannot create a socket for {address} ({errno}); the service's sandbox has no network on purpose"
        );
        return Finding::problem(WHAT, why, FIX);
    }
    match service_is_shut_out(root) {
        true => Finding::hint(
            WHAT,
            format!(
                "{address} works for this process, but the installed service offloadd has no network and could not listen there"
            ),
            FIX,
        ),
        false => Finding::fine(WHAT, address.to_string()),
    }
}

/// Whether the service is installed and no drop-in gives it a network.
fn service_is_shut_out(root: &Path) -> bool {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let dirs = UNIT_DIRS.map(|dir| root.join(dir));
    // The first file found is the unit.
    let Some(unit) = (dirs.iter()).find_map(|dir| read(&dir.join("offloadd.service"))) else {
        return false;
    };
    let drop_ins = dirs.iter().filter_map(|dir| {
        let entries = std::fs::read_dir(dir.join("offloadd.service.d")).ok()?;
        let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let files = files.filter(|path| path.extension().is_some_and(|end| end == "conf"));
        Some(files.filter_map(|path| read(&path)).collect::<String>())
    });
    let (own, dropped) = (unit, drop_ins.collect::<Vec<_>>().join("\n"));
    let says = |text: &str, key: &str, values: &[&str]| {
        let mut lines = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='));
        lines.any(|value| value.split_whitespace().any(|word| values.contains(&word)))
    };
    let yes = ["yes", "true", "on", "1"];
    let no = ["no", "false", "off", "0"];
    let alone = says(&own, "PrivateNetwork", &yes) && !says(&dropped, "PrivateNetwork", &no);
    let families = "RestrictAddressFamilies";
    let inet = ["AF_INET", "AF_INET6"];
    let limited = says(&own, families, &["AF_UNIX"]);
    let forbidden = limited && !says(&own, families, &inet) && !says(&dropped, families, &inet);
    alone || forbidden
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Severity;

    fn packaging(name: &str) -> String {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/");
        std::fs::read_to_string(format!("{dir}{name}")).unwrap()
    }

    fn address() -> SocketAddr {
        "127.0.0.1:9464".parse().unwrap()
    }

    #[test]
    fn a_sandbox_that_forbids_the_socket_is_told_with_what_mends_it() {
        let root = tempfile::tempdir().unwrap();
        for (address, family) in [
            (address(), AddressFamily::INET),
            ("[::1]:9464".parse().unwrap(), AddressFamily::INET6),
        ] {
            let found = judge(address, root.path(), |asked| {
                assert_eq!(asked, family);
                Err(Errno::AFNOSUPPORT)
            });
            assert_eq!(found.severity, Severity::Problem);
            assert!(found.fix.unwrap().contains("metrics-loopback.conf"));
        }
        let open = judge(address(), root.path(), |_| Ok(()));
        assert_eq!(open.severity, Severity::Fine, "no service is here");
    }

    #[test]
    fn the_packaged_service_is_shut_out_until_the_packaged_drop_in_is_there() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let severity = || judge(address(), root.path(), |_| Ok(())).severity;
        put(
            "usr/lib/systemd/system/offloadd.service",
            &packaging("offloadd.service"),
        );
        assert_eq!(severity(), Severity::Hint);
        let drop_in = "etc/systemd/system/offloadd.service.d/network.conf";
        // Half of it is not enough.
        put(drop_in, "[Service]\nRestrictAddressFamilies=AF_INET\n");
        assert_eq!(severity(), Severity::Hint);
        put(drop_in, "[Service]\nPrivateNetwork=no\n");
        assert_eq!(severity(), Severity::Hint);
        put(drop_in, &packaging("metrics-loopback.conf"));
        assert_eq!(severity(), Severity::Fine);
    }
}
