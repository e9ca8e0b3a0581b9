//! Host files: the hosts of a run and the number of ranks on each, in DeepSpeed's format.
//!
//! ```text
//!   # comment
//!   worker-1 slots=4
//!   user@worker-2 slots=2
//! ```

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest host file, and most of its hosts and of slots on one host.
const FILE_BYTES_MAX: u64 = 1 << 20;
pub const HOSTS_MAX: usize = 1024;
pub const SLOTS_MAX: u32 = 256;

/// Host of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name or address, possibly with `USER@` before it. Never an option of a remote shell: it does not begin with `-`.
    pub name: String,
    /// Number of ranks.
    pub slots: u32,
}

impl Host {
    /// Name or address without the user.
    pub fn address(&self) -> &str {
        self.name
            .split_once('@')
            .map_or(&self.name, |(_, host)| host)
    }
}

/// Error of a host file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostfileError {
    #[error("cannot read the host file {}: {message}", path.display())]
    Read { path: PathBuf, message: String },
    #[error("{}, line {line}: {problem}; expected a line such as `worker-1 slots=4`", path.display())]
    Line {
        path: PathBuf,
        line: usize,
        problem: String,
    },
    #[error("{} names no host; add lines such as `worker-1 slots=4`", path.display())]
    Empty { path: PathBuf },
}

/// Reads a host file.
///
/// # Errors
/// It cannot be read, names no host, or has an invalid line.
pub fn read(path: &Path) -> Result<Vec<Host>, HostfileError> {
    let failed = |message: String| HostfileError::Read {
        path: path.to_path_buf(),
        message,
    };
    let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    let mut text = String::new();
    (file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(|error| failed(error.to_string()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(failed("it is larger than 1 MiB".to_owned()));
    }
    parse(&text, path)
}

fn parse(text: &str, path: &Path) -> Result<Vec<Host>, HostfileError> {
    let mut hosts = Vec::new();
    let mut seen = BTreeSet::new();
    for (line, number) in text.lines().zip(1..) {
        let failed = |problem| HostfileError::Line {
            path: path.to_path_buf(),
            line: number,
            problem,
        };
        let words = line.split('#').next().unwrap_or_default();
        let Some(host) = host(words).map_err(failed)? else {
            continue;
        };
        if !seen.insert(host.address().to_owned()) {
            return Err(failed(format!("host {:?} is named twice", host.address())));
        }
        hosts.push(host);
        if hosts.len() > HOSTS_MAX {
            return Err(failed(format!("there are more than {HOSTS_MAX} hosts")));
        }
    }
    if hosts.is_empty() {
        return Err(HostfileError::Empty {
            path: path.to_path_buf(),
        });
    }
    Ok(hosts)
}

/// Parses one line without its comment; `None` if it is empty. An error is a problem that completes a message.
fn host(words: &str) -> Result<Option<Host>, String> {
    let mut words = words.split_whitespace();
    let Some(name) = words.next() else {
        return Ok(None);
    };
    check_name(name)?;
    let Some(slots) = words.next() else {
        return Err(format!("host {name:?} has no number of slots"));
    };
    let Some(digits) = slots.strip_prefix("slots=") else {
        return Err(format!("unknown word {slots:?}"));
    };
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let count = digits
        .parse()
        .ok()
        .filter(|count| is_number && (1..=SLOTS_MAX).contains(count));
    let Some(slots) = count else {
        return Err(format!(
            "slots={digits} is not a number from 1 to {SLOTS_MAX}"
        ));
    };
    if let Some(word) = words.next() {
        return Err(format!("unknown word {word:?}"));
    }
    Ok(Some(Host {
        name: name.to_owned(),
        slots,
    }))
}

/// Refuses names that a remote shell would read as options, and characters that names and addresses do not have.
fn check_name(name: &str) -> Result<(), String> {
    let (user, host) = match name.split_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, name),
    };
    for part in user.into_iter().chain([host]) {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        if part.is_empty()
            || part.starts_with('-')
            || part.len() > 253
            || !part.chars().all(allowed)
        {
            return Err(format!("{name:?} is no host name or address"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, u32)>, String> {
        let hosts = parse(text, Path::new("hosts")).map_err(|error| error.to_string())?;
        Ok(hosts
            .into_iter()
            .map(|host| (host.name, host.slots))
            .collect())
    }

    #[test]
    fn hosts_slots_and_comments_are_read() {
        let text = "# the old ones\n\nworker-1 slots=4\n  me@10.0.0.2\tslots=2  # slow\r\nfe80::1 slots=256\n";
        let hosts = [("worker-1", 4), ("me@10.0.0.2", 2), ("fe80::1", 256)];
        let expected = hosts.map(|(name, slots)| (name.to_owned(), slots));
        assert_eq!(parsed(text), Ok(expected.to_vec()));
        let host = &parse(text, Path::new("hosts")).unwrap()[1];
        assert_eq!(host.address(), "10.0.0.2");
    }

    #[test]
    fn lines_that_do_not_fit_are_refused_with_their_number() {
        for (line, says) in [
            ("worker-1", "host \"worker-1\" has no number of slots"),
            ("worker-1 slots=0", "slots=0 is not a number from 1 to 256"),
            ("worker-1 slots=257", "slots=257 is not"),
            ("worker-1 slots=+4", "slots=+4 is not"),
            ("worker-1 slots=", "slots= is not"),
            ("worker-1 gpus=4", "unknown word \"gpus=4\""),
            (
                "worker-1 slots=4 max-slots=8",
                "unknown word \"max-slots=8\"",
            ),
            ("other slots=1", "host \"other\" is named twice"),
            ("me@other slots=1", "host \"other\" is named twice"),
            ("-oProxyCommand=x slots=1", "is no host name or address"),
            ("me@-x slots=1", "is no host name or address"),
            ("-me@x slots=1", "is no host name or address"),
            ("a@b@c slots=1", "is no host name or address"),
            ("@x slots=1", "is no host name or address"),
            ("x;reboot slots=1", "is no host name or address"),
            ("$(reboot) slots=1", "is no host name or address"),
            ("wörker slots=1", "is no host name or address"),
        ] {
            let error = parsed(&format!("other slots=2\n\n{line}\n")).unwrap_err();
            assert!(error.starts_with("hosts, line 3: "), "{line}: {error}");
            assert!(error.contains(says), "{line}: {error}");
        }
        let error = parsed("# nobody\n").unwrap_err();
        assert!(error.contains("hosts names no host"), "{error}");
        let many: String = (0..=HOSTS_MAX).map(|n| format!("n{n} slots=1\n")).collect();
        let error = parsed(&many).unwrap_err();
        assert!(error.contains("more than 1024 hosts"), "{error}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        let said = |path: &Path| read(path).unwrap_err().to_string();
        assert!(said(&path).contains(&path.display().to_string()));
        std::fs::write(&path, b"n\xff slots=1").unwrap();
        assert!(said(&path).contains("UTF-8"), "{}", said(&path));
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(said(&path).contains("larger than 1 MiB"));
    }
}
