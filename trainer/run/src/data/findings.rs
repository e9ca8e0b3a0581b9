//! What a person should know about the data before a run trains on it: what does not count in the loss although it may be
//! meant to, what the chat template leaves out, and records that were skipped. Each has a count and examples.
//!
//! The findings are stored in the token file, because later starts do not read the data again.

use std::collections::BTreeMap;
use std::fmt::Display;

use offload_support::units::CountOf;
use serde::{Deserialize, Serialize};

/// Different roles that are named.
const ROLES_MAX: usize = 4;
/// Examples of skipped records.
const SKIPPED_EXAMPLES_MAX: usize = 5;
/// Longest example, in characters.
const EXAMPLE_CHARS: usize = 160;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum FindingKind {
    /// Answers whose end does not count.
    Answers,
    /// Messages of a role that does not count.
    Role(String),
    /// Conversations whose tools the template does not print.
    Tools,
    /// Conversations whose calls of tools the template does not print.
    Calls,
    /// Messages whose reasoning the template does not print.
    Reasoning,
    /// Documents in which no token counts.
    Documents,
    /// Windows in which no token counts.
    Windows,
    /// Records that could not be read.
    Records,
}

/// One case that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Finding {
    pub(super) kind: FindingKind,
    /// Whether a person should know it.
    pub(super) is_wrong: bool,
    pub(super) example: String,
}

impl Finding {
    pub(super) fn new(kind: FindingKind, is_wrong: bool, example: String) -> Self {
        Self {
            kind,
            is_wrong,
            example,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct FindingCount {
    wrong: u64,
    all: u64,
    examples: Vec<String>,
}

/// All that was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Findings(BTreeMap<String, (FindingKind, FindingCount)>);

impl Findings {
    /// Adds a case at `place`.
    pub(super) fn add(&mut self, finding: Finding, place: &dyn Display) {
        let mut kind = finding.kind;
        if let FindingKind::Role(role) = &kind {
            let roles = self
                .0
                .values()
                .filter(|(kind, _)| matches!(kind, FindingKind::Role(_)));
            let is_known = self.0.contains_key(&format!("{kind:?}"));
            if !is_known && roles.count() >= ROLES_MAX {
                kind = FindingKind::Role("others".into());
            } else if role.chars().count() > EXAMPLE_CHARS {
                kind = FindingKind::Role(role.chars().take(EXAMPLE_CHARS).collect());
            }
        }
        let examples_max = examples_max(&kind);
        let found = self.0.entry(format!("{kind:?}"));
        let (_, count) = found.or_insert_with(|| (kind, FindingCount::default()));
        count.all += 1;
        if !finding.is_wrong {
            return;
        }
        count.wrong += 1;
        if count.examples.len() < examples_max {
            let example = match finding.example.is_empty() {
                true => place.to_string(),
                false => format!("{place}: {}", finding.example),
            };
            count
                .examples
                .push(example.chars().take(EXAMPLE_CHARS).collect());
        }
    }

    /// Adds the findings of other files.
    pub(super) fn extend(&mut self, other: &Self) {
        for (name, (kind, more)) in &other.0 {
            let found = self.0.entry(name.clone());
            let (_, count) = found.or_insert_with(|| (kind.clone(), FindingCount::default()));
            count.wrong += more.wrong;
            count.all += more.all;
            let examples_max = examples_max(kind);
            let more = more.examples.iter().cloned();
            count
                .examples
                .extend(more.take(examples_max - count.examples.len().min(examples_max)));
        }
    }

    /// Encodes the findings in at most `bytes_max` bytes, without examples if they do not fit with them.
    pub(super) fn encode(&self, bytes_max: usize) -> Vec<u8> {
        let mut kept = self.clone();
        kept.0.retain(|_, (_, count)| count.wrong > 0);
        loop {
            let bytes = serde_json::to_vec(&kept).expect("plain data");
            if bytes.len() <= bytes_max {
                return bytes;
            }
            let counts = kept.0.values_mut().map(|(_, count)| count);
            let longest = counts.max_by_key(|count| count.examples.len());
            if longest.and_then(|count| count.examples.pop()).is_none() {
                kept.0.clear();
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Describes each finding in a line.
    pub(super) fn lines(&self) -> Vec<String> {
        let found = self.0.values().filter(|(_, count)| count.wrong > 0);
        found.map(|(kind, count)| line(kind, count)).collect()
    }
}

fn examples_max(kind: &FindingKind) -> usize {
    match kind {
        FindingKind::Records => SKIPPED_EXAMPLES_MAX,
        _ => 1,
    }
}

fn line(kind: &FindingKind, count: &FindingCount) -> String {
    let FindingCount {
        wrong,
        all,
        examples,
    } = count;
    let of = |what: &'static str| format!("{wrong} of {}", CountOf(*all, what));
    let example = examples.join("; ");
    match kind {
        FindingKind::Answers => format!(
            "the end of {} is not learned, because the template puts nothing after them but the next message ({example}): the model will not stop by itself. Use another template (data.chat_template), or one that has the end in a {{% generation %}} block",
            of("answer")
        ),
        FindingKind::Role(role) => format!(
            "{} of the role \"{role}\" {} not learned, because only the role \"assistant\" is ({example})",
            CountOf(*wrong, "message"),
            if *wrong == 1 { "is" } else { "are" }
        ),
        FindingKind::Tools => format!(
            "the chat template does not print the tools of {} with tools ({example})",
            of("conversation")
        ),
        FindingKind::Calls => format!(
            "the chat template does not print the tool calls of {} with tool calls ({example})",
            of("conversation")
        ),
        FindingKind::Reasoning => format!(
            "the chat template does not print the reasoning of {} with reasoning ({example})",
            of("message")
        ),
        FindingKind::Documents => format!(
            "no token counts in the loss in {} ({example})",
            of("document")
        ),
        FindingKind::Windows => format!(
            "{} without a token that counts in the loss {} left out ({example})",
            CountOf(*wrong, "window"),
            if *wrong == 1 { "is" } else { "are" }
        ),
        FindingKind::Records => format!(
            "{} could not be read and {} skipped (data.on_bad_record): {example}",
            CountOf(*wrong, "record"),
            if *wrong == 1 { "is" } else { "are" }
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_counted_with_examples_and_fit_into_the_file() {
        let mut found = Findings::default();
        for number in 0..1000 {
            let place = format!("chats.jsonl, line {number}");
            let mut add = |kind, is_wrong, example: &str| {
                found.add(Finding::new(kind, is_wrong, example.repeat(100)), &place);
            };
            add(FindingKind::Answers, number % 2 == 1, "ü");
            add(FindingKind::Tools, false, "");
            add(FindingKind::Records, number < 7, "is not JSON ");
            add(FindingKind::Role(format!("role {number}")), true, "");
        }
        let lines = found.lines();
        assert!(
            lines[0].starts_with("the end of 500 of 1000 answers is not learned"),
            "{lines:?}"
        );
        assert!(lines[0].contains("(chats.jsonl, line 1: üü"), "{lines:?}");
        assert!(
            lines[1].starts_with("7 records could not be read and are skipped"),
            "{lines:?}"
        );
        assert!(
            lines[1].contains("line 0: is") && lines[1].contains("line 4: is"),
            "{lines:?}"
        );
        assert!(
            lines
                .iter()
                .any(|line| line.starts_with("996 messages of the role \"others\" are not")),
            "{lines:?}"
        );
        assert_eq!(lines.len(), 2 + ROLES_MAX + 1);
        for bytes_max in [3968, 400, 2] {
            let bytes = found.encode(bytes_max);
            assert!(bytes.len() <= bytes_max);
            let read = Findings::decode(&bytes).unwrap();
            assert!(read.lines().len() <= lines.len());
        }
        assert_eq!(
            Findings::decode(&found.encode(3968)).unwrap().lines(),
            lines
        );
    }
}
