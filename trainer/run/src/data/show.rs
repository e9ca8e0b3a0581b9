//! Prints windows as text with the tokens that count in the loss marked, so that a person can check what a
//! run will train on.

use super::tokenize::Tokenizer;
use super::{Corpus, Data, DataError, Windows};
use crate::data::IGNORED;

/// How tokens that count are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// Tokens that do not count are dim.
    Colours,
    /// Tokens that count are between brackets.
    Brackets,
}

/// Formats the first `count` samples of a run.
///
/// # Errors
/// The tokens cannot be read.
pub fn show(corpus: &Corpus, data: &Data, count: u64, marks: Marks) -> Result<String, DataError> {
    let mut text = String::new();
    for sample in 0..count {
        let windows = data.samples(sample, 1)?;
        let counted = (windows.targets.iter())
            .filter(|id| **id != IGNORED)
            .count();
        text += &format!(
            "sample {sample}: {} tokens, {counted} count in the loss\n",
            windows.targets.len()
        );
        text += &marked(&corpus.tokenizer, &windows, marks);
        text += "\n\n";
    }
    Ok(text)
}

/// Longer padding is shown as a number of tokens.
const PADDING_SHOWN_MAX: usize = 4;

/// Formats the text of a window.
fn marked(tokenizer: &Tokenizer, window: &Windows, marks: Marks) -> String {
    // The first token is never a target; the last is only a target.
    let counts = [IGNORED].into_iter().chain(window.targets.iter().copied());
    let ids = window
        .inputs
        .iter()
        .copied()
        .chain(window.targets.last().copied());
    let mut runs: Vec<(bool, Vec<u32>)> = Vec::new();
    // Runs that begin a document.
    let mut begin = Vec::new();
    for (at, (id, target)) in ids.zip(counts).enumerate() {
        let (counts, Ok(id)) = (target != IGNORED, u32::try_from(id)) else {
            continue;
        };
        let begins = window.documents.contains(&at);
        if begins {
            begin.push(runs.len());
        }
        match runs.last_mut() {
            Some((same, run)) if *same == counts && !begins => run.push(id),
            _ => runs.push((counts, vec![id])),
        }
    }
    let mut text = String::new();
    // The padding token may also be the end-of-document token, so the first one may belong to the text.
    let padding = tokenizer.padding();
    let padded = match runs.last_mut() {
        Some((false, ids)) => {
            let filled = ids.iter().rev().take_while(|id| **id == padding).count();
            let padded = if filled > PADDING_SHOWN_MAX {
                filled
            } else {
                0
            };
            ids.truncate(ids.len() - padded);
            padded
        }
        _ => 0,
    };
    for (run, (counts, ids)) in runs.into_iter().enumerate() {
        if begin.contains(&run) && !ids.is_empty() {
            text += "\n[next document]\n";
        }
        let said = tokenizer.decode(&ids);
        text += &match (marks, counts) {
            (Marks::Colours, true) => said,
            (Marks::Colours, false) => format!("\x1b[2m{said}\x1b[0m"),
            (Marks::Brackets, true) => format!("\u{27E6}{said}\u{27E7}"),
            (Marks::Brackets, false) => said,
        };
    }
    if padded > 0 {
        text += &format!(" [padding: {padded} tokens]");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_count_are_marked() {
        let window = Windows {
            inputs: "ask an".bytes().map(i64::from).collect(),
            targets: vec![IGNORED, IGNORED, IGNORED, 97, 110, 115],
            documents: Vec::new(),
        };
        let text = |marks| marked(&Tokenizer::Bytes, &window, marks);
        assert_eq!(text(Marks::Brackets), "ask \u{27E6}ans\u{27E7}");
        assert_eq!(text(Marks::Colours), "\x1b[2mask \x1b[0mans");
        let mut filled = Windows {
            inputs: "ask an\n".bytes().map(i64::from).collect(),
            targets: vec![IGNORED, IGNORED, IGNORED, 97, 110, 10, IGNORED],
            documents: Vec::new(),
        };
        filled.inputs.resize(300, 0);
        filled.documents = vec![7];
        filled.targets.resize(300, IGNORED);
        assert_eq!(
            marked(&Tokenizer::Bytes, &filled, Marks::Brackets),
            "ask \u{27E6}an\n\u{27E7} [padding: 293 tokens]"
        );
        let two = Windows {
            documents: vec![4],
            ..window.clone()
        };
        assert_eq!(
            marked(&Tokenizer::Bytes, &two, Marks::Brackets),
            "ask \n[next document]\n\u{27E6}ans\u{27E7}"
        );
        let masked = Windows {
            targets: vec![IGNORED; 6],
            ..window
        };
        assert_eq!(
            marked(&Tokenizer::Bytes, &masked, Marks::Brackets),
            "ask an"
        );
    }
}
