//! The job token: a secret of one run, part of every key's name in the store in which its ranks meet.

use super::CollectiveError;

/// Variable with the job token. All processes of a run have the same one.
pub const TOKEN_VARIABLE: &str = "OFFLOADD_JOB_TOKEN";

/// Shortest and longest token.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=128;

/// A secret of one run. Its `Debug` text does not contain it.
#[derive(Clone, PartialEq, Eq)]
pub struct JobToken(String);

impl JobToken {
    /// Makes a token of 128 random bits.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn random() -> std::io::Result<JobToken> {
        use std::io::Read;
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
        Ok(JobToken(digits.collect()))
    }

    /// Checks a token that a user made.
    ///
    /// # Errors
    /// It is too short or too long, or has other characters than letters, digits, `-` and `_`.
    pub fn new(text: &str) -> Result<JobToken, CollectiveError> {
        let problem = if !LENGTHS.contains(&text.len()) {
            "does not have 16 to 128 characters; `openssl rand -hex 16` makes one"
        } else if !text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        {
            "has characters other than letters, digits, - and _; `openssl rand -hex 16` makes a token"
        } else {
            return Ok(JobToken(text.to_owned()));
        };
        Err(CollectiveError::Token { problem })
    }

    /// The token in [`TOKEN_VARIABLE`], if it is set.
    ///
    /// # Errors
    /// Those of [`JobToken::new`].
    pub fn from_env() -> Result<Option<JobToken>, CollectiveError> {
        JobToken::from_variables(&mut |name| std::env::var_os(name).map(super::world::lossy))
    }

    pub(super) fn from_variables(
        get: &mut dyn FnMut(&str) -> Option<String>,
    ) -> Result<Option<JobToken>, CollectiveError> {
        get(TOKEN_VARIABLE)
            .as_deref()
            .map(JobToken::new)
            .transpose()
    }

    /// The token itself.
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for JobToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobToken")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_random_and_their_texts_are_checked_without_being_shown() {
        let (one, two) = (JobToken::random().unwrap(), JobToken::random().unwrap());
        assert_ne!(one, two);
        assert_eq!(one.secret().len(), 32);
        assert_eq!(JobToken::new(one.secret()).unwrap(), one);
        assert!(!format!("{one:?}").contains(one.secret()));
        for text in [
            "",
            "short",
            "with/a-slash-in-between",
            "sixteen chars 12",
            &"x".repeat(129),
        ] {
            let error = JobToken::new(text).unwrap_err().to_string();
            assert!(error.starts_with("OFFLOADD_JOB_TOKEN "), "{error}");
            assert!(text.is_empty() || !error.contains(text), "{error}");
        }
    }
}
