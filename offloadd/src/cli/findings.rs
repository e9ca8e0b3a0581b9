//! Findings as text and as JSON.

use offloadd::findings::{Finding, Severity};
use serde_json::{Value, json};

/// Formats a finding as a line, followed by a line with its fix.
pub(super) fn text(finding: &Finding) -> String {
    let severity = match finding.severity {
        Severity::Fine => "ok     ",
        Severity::Hint => "HINT   ",
        Severity::Problem => "PROBLEM",
    };
    let mut text = format!("{severity} {}: {}", finding.subject, finding.message);
    if let Some(fix) = &finding.fix {
        text += &format!("\n        {fix}");
    }
    text
}

pub(super) fn to_json(finding: &Finding) -> Value {
    json!({
        "subject": finding.subject,
        "severity": finding.severity.name(),
        "message": finding.message,
        "fix": finding.fix,
    })
}
