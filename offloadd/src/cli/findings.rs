//! Findings on a terminal, and for programs.

use offloadd::findings::{Finding, Severity};
use serde_json::{Value, json};

/// A line, and one with what mends it.
pub(super) fn text(finding: &Finding) -> String {
    let severity = match finding.severity {
        Severity::Fine => "ok     ",
        Severity::Hint => "HINT   ",
        Severity::Problem => "PROBLEM",
    };
    let mut text = format!("{severity} {}: {}", finding.what, finding.message);
    if let Some(mend) = &finding.mend {
        text += &format!("\n        {mend}");
    }
    text
}

pub(super) fn to_json(finding: &Finding) -> Value {
    json!({
        "what": finding.what,
        "severity": finding.severity.name(),
        "message": finding.message,
        "mend": finding.mend,
    })
}
