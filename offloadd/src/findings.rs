//! Results of checks, with the command or setting that fixes each; used by every command that checks something.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// No fault was found.
    Fine,
    /// Works, but could be better.
    Hint,
    /// Does not work, or not safely.
    Problem,
}

impl Severity {
    /// Name in texts and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Hint => "hint",
            Self::Problem => "problem",
        }
    }
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Subject of the check: "memlock", "device /mnt/nvme0/tiles".
    pub subject: String,
    /// Whether it is in order.
    pub severity: Severity,
    /// Result of the check.
    pub message: String,
    /// Command or setting that fixes it.
    pub fix: Option<String>,
}

impl Finding {
    /// A check without objection.
    pub fn fine(subject: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            severity: Severity::Fine,
            message: message.into(),
            fix: None,
        }
    }

    /// Something that could be better.
    pub fn hint(
        subject: impl Into<String>,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Hint,
            fix: Some(fix.into()),
            ..Self::fine(subject, message)
        }
    }

    /// Something that does not work.
    pub fn problem(
        subject: impl Into<String>,
        message: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Problem,
            ..Self::hint(subject, message, fix)
        }
    }
}

/// Returns the worst severity, or `Fine` if there are no findings.
pub fn worst(findings: &[Finding]) -> Severity {
    let severities = findings.iter().map(|finding| finding.severity);
    severities.max().unwrap_or(Severity::Fine)
}
