//! What was looked at, how it is, and the line that mends it: said alike by every command that looks at something.

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Fine,
    /// It works, and could be better.
    Hint,
    /// It does not work, or not safely.
    Problem,
}

impl Severity {
    /// For people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Hint => "hint",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// A word or two: "memlock", "device /mnt/nvme0/tiles".
    pub what: String,
    /// How bad it is.
    pub severity: Severity,
    /// How it is.
    pub message: String,
    /// What to type or write to mend it.
    pub mend: Option<String>,
}

impl Finding {
    /// It is as it should be.
    pub fn fine(what: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            severity: Severity::Fine,
            message: message.into(),
            mend: None,
        }
    }

    /// It could be better.
    pub fn hint(
        what: impl Into<String>,
        message: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Hint,
            mend: Some(mend.into()),
            ..Self::fine(what, message)
        }
    }

    /// It does not work.
    pub fn problem(
        what: impl Into<String>,
        message: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self {
            severity: Severity::Problem,
            ..Self::hint(what, message, mend)
        }
    }
}

/// The worst of them; of none: fine.
pub fn worst(findings: &[Finding]) -> Severity {
    let severities = findings.iter().map(|finding| finding.severity);
    severities.max().unwrap_or(Severity::Fine)
}
