//! Texts of errors for people.

/// Joins an error and its causes. Leaves out a cause that the text before it contains already.
pub fn whole(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("opening it: {source}")]
    struct NamesItsCause {
        source: std::io::Error,
    }

    #[test]
    fn a_cause_that_an_error_names_itself_is_not_repeated() {
        let source = std::io::Error::from_raw_os_error(libc::EINVAL);
        let once = format!("device 1: opening it: {source}");
        let error = Err::<(), _>(NamesItsCause { source }).context("device 1");
        assert_eq!(whole(&error.unwrap_err()), once);
        let plain = anyhow::anyhow!("no room").context("the store");
        assert_eq!(whole(&plain), "the store: no room");
    }
}
