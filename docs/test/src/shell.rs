//! Checks shell lines in documents that call one of our programs.

use clap::Command;

use crate::{Block, blocks};

/// Checks that the program accepts every line of a `sh` block that calls it. Runs nothing.
///
/// # Panics
/// If the program refuses a line; the message names all of these lines.
pub fn assert_commands_parse(program: &Command) {
    let mut seen = 0;
    let mut refused = Vec::new();
    for block in blocks().iter().filter(|block| block.language == "sh") {
        for (place, words) in calls(block, program.get_name()) {
            seen += 1;
            if let Err(error) = program.clone().try_get_matches_from(&words)
                && error.use_stderr()
            {
                let error = error.to_string();
                let first = error.lines().next().unwrap_or_default();
                refused.push(format!("{place}: {}: {first}", words.join(" ")));
            }
        }
    }
    assert!(seen > 0, "no document calls {}", program.get_name());
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// Returns the calls of `program` in a block: place and words.
fn calls(block: &Block, program: &str) -> Vec<(String, Vec<String>)> {
    let text = block.text.replace("\\\n", " ");
    let mut found = Vec::new();
    for line in text.lines() {
        for words in commands(line) {
            // `runuser -u offloadd -- offloadd format`, `target/release/trainer plan`, `RUST_LOG=debug offloadd serve`.
            let after_dashes = words
                .iter()
                .position(|word| word == "--")
                .map_or(0, |at| at + 1);
            let runner = words
                .first()
                .is_some_and(|word| ["runuser", "sudo"].contains(&word.as_str()));
            let words = if runner {
                &words[after_dashes..]
            } else {
                &words[..]
            };
            let start = words.iter().take_while(|word| is_assignment(word)).count();
            let is_called = |word: &String| word.rsplit('/').next() == Some(program);
            if words.get(start).is_some_and(is_called) {
                found.push((block.place.clone(), words[start..].to_vec()));
            }
        }
    }
    found
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    })
}

/// Returns the simple commands of a line, without comments and redirections.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut redirected = false;
    let end_word =
        |word: &mut Option<String>, commands: &mut Vec<Vec<String>>, redirected: &mut bool| {
            if let Some(word) = word.take()
                && !std::mem::take(redirected)
            {
                commands
                    .last_mut()
                    .expect("one command at least")
                    .push(word);
            }
        };
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ') => end_word(&mut word, &mut commands, &mut redirected),
            (None, '>') => {
                end_word(&mut word, &mut commands, &mut redirected);
                redirected = true;
            }
            (None, '|' | ';' | '&') => {
                end_word(&mut word, &mut commands, &mut redirected);
                commands.push(Vec::new());
            }
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    end_word(&mut word, &mut commands, &mut redirected);
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let block = Block {
            place: String::new(),
            language: "sh".into(),
            tag: String::new(),
            text: text.into(),
        };
        calls(&block, "tool")
            .into_iter()
            .map(|(_, words)| words.join(" "))
            .collect()
    }

    #[test]
    fn calls_are_found_wherever_a_shell_runs_them() {
        assert_eq!(found("tool a 'b c'   # tool d\n"), ["tool a b c"]);
        assert_eq!(
            found("make x && A=1 target/tool b > out | tool c; other tool"),
            ["tool b", "tool c"].map(|call| call.replace("tool b", "target/tool b"))
        );
        assert_eq!(
            found("runuser -u tool -- tool a --b \\\n  c\n"),
            ["tool a --b c"]
        );
        assert_eq!(found("# tool a\nother --from tool\n"), Vec::<String>::new());
    }

    #[test]
    #[should_panic(expected = "no document calls")]
    fn a_program_that_no_document_calls_is_a_fault() {
        assert_commands_parse(&Command::new("no-such-program"));
    }
}
