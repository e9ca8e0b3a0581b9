//! Paths in messages.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

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
}
