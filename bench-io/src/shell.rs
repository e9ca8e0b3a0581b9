//! Quotes commands for a shell, so that a printed command can be repeated.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

/// Joins the words in one line, quoted where a shell would interpret them.
pub(crate) fn command<W: AsRef<OsStr>>(words: impl IntoIterator<Item = W>) -> String {
    let words = words.into_iter().map(|word| quoted(word.as_ref()));
    words.collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(byte);
    match word.to_str() {
        Some(text) if !text.is_empty() && text.bytes().all(|byte| is_plain(&byte)) => text.into(),
        Some(text) if !text.chars().any(char::is_control) => {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
        // Unprintable characters and bytes that are not text are quoted byte by byte.
        _ => {
            let mut out = String::from("$'");
            for byte in word.as_bytes() {
                // Writing to a String cannot fail.
                let _ = match byte {
                    byte if is_plain(byte) || *byte == b' ' => write!(out, "{}", char::from(*byte)),
                    byte => write!(out, "\\x{byte:02x}"),
                };
            }
            out + "'"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_a_shell_reads_otherwise_are_quoted() {
        for (word, line) in [
            (&b"--size=1.5g"[..], "--size=1.5g"),
            (b"/mnt/a:b", "/mnt/a:b"),
            (b"", "''"),
            (b"a b", "'a b'"),
            (b"$HOME", "'$HOME'"),
            (b"it's", r"'it'\''s'"),
            (b"a\\:b", r"'a\:b'"),
            (b"~x", "'~x'"),
            ("größe".as_bytes(), "'größe'"),
            (b"x\xff'1\n", r"$'x\xff\x271\x0a'"),
        ] {
            assert_eq!(command([OsStr::from_bytes(word)]), line);
        }
        assert_eq!(command(["a", "b c"]), "a 'b c'");
    }

    #[test]
    #[expect(clippy::print_stdout, reason = "a skipped test says so")]
    fn a_shell_gives_the_words_back() {
        let words = [
            &b"a  b"[..],
            b"$x`y`",
            b"it's \"so\"",
            b"\\",
            b"*",
            b"x\xff\n\x011",
        ];
        let words = words.map(OsStr::from_bytes);
        let Ok(output) = std::process::Command::new("bash")
            .args(["-c", &format!("printf '%s\\0' {}", command(words))])
            .output()
        else {
            println!("skipped: no bash here: a shell gives the words back");
            return;
        };
        let expected: Vec<u8> = words
            .iter()
            .flat_map(|word| [word.as_bytes(), b"\0"].concat())
            .collect();
        assert_eq!(output.stdout, expected);
    }
}
