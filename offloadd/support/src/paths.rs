//! Paths in messages.

use std::ffi::OsStr;
use std::fmt;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use shlex::bytes::Quoter;

/// Mode of a new file in a run directory: it is the owner's alone, whatever the directory's mode and the umask are.
pub const PRIVATE: u32 = 0o600;

/// Says what a relative path that was not found is relative to; nothing for another path or error. Follows the path in a message.
#[derive(Clone, Copy, Debug)]
pub struct RelativeTo<'a> {
    path: &'a Path,
    is_missing: bool,
}

impl<'a> RelativeTo<'a> {
    /// For a path that does not exist.
    pub fn not_found(path: &'a Path) -> Self {
        Self {
            path,
            is_missing: true,
        }
    }

    /// For a path that could not be used because of `error`.
    pub fn after(path: &'a Path, error: &std::io::Error) -> Self {
        Self {
            path,
            is_missing: error.kind() == ErrorKind::NotFound,
        }
    }
}

impl fmt::Display for RelativeTo<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::env::current_dir() {
            Ok(dir) if self.is_missing && self.path.is_relative() => {
                write!(f, " (relative to the current directory, {})", dir.display())
            }
            _ => Ok(()),
        }
    }
}

/// A path as a word of a command in a message, quoted where a shell would take it for something else.
#[derive(Clone, Copy, Debug)]
pub struct Word<'a>(pub &'a Path);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&quoted(self.0.as_os_str())))
    }
}

/// Quotes an argument for a POSIX shell where that is necessary.
pub fn quoted(arg: &OsStr) -> Vec<u8> {
    let quoter = Quoter::new().allow_nul(true);
    let quoted = quoter.quote(arg.as_bytes());
    quoted.expect("a zero byte is allowed").into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_relative_path_says_what_it_is_relative_to() {
        let denied = std::io::Error::from(ErrorKind::PermissionDenied);
        for (path, is_told) in [("a/b", true), ("/a/b", false)] {
            let path = Path::new(path);
            let text = RelativeTo::not_found(path).to_string();
            assert_eq!(
                text.contains("relative to the current directory, /"),
                is_told
            );
            assert_eq!(RelativeTo::after(path, &denied).to_string(), "");
        }
    }

    #[test]
    fn a_path_is_one_word_of_a_command() {
        for (path, word) in [
            ("/mnt/nvme0/run-1", "/mnt/nvme0/run-1"),
            ("my runs/a", "'my runs/a'"),
            ("it's", "\"it's\""),
            ("~/a;b", "'~/a;b'"),
        ] {
            assert_eq!(Word(Path::new(path)).to_string(), word);
        }
    }
}
