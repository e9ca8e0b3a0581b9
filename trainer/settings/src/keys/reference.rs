//! A page about every key that is read, in Markdown: `docs/trainer-configuration.md`.

use std::fmt::Write;

use super::listing::default_in;
use super::{entry, join};
use crate::reader::Reader;
use crate::schema::{Field, KeyType, Kind};
use crate::toml::ConfigToml;

const HEAD: &str = "# Configuration of the trainer

Generated from the program by `make docs`; a test keeps it current. `trainer config-reference` prints the same keys for the terminal.

A run is configured by one TOML file, or by JSON if its name ends in `.json`. It contains DeepSpeed's keys with DeepSpeed's meaning, and
the tables `model`, `data`, `train` and `offload`. An unknown key is an error that names the nearest known one. `--set KEY=VALUE` replaces a
value on the command line. Sizes are bytes, or text with KiB, MiB, GiB or TiB. If the
default is –, the meaning describes it. `trainer plan RUN.toml` shows all resolved values, including those that
the plan chose.

[What the trainer can do](training.md) explains the features that the keys control; [coming from DeepSpeed](coming-from-deepspeed.md) lists DeepSpeed's
keys that are not read.
";

/// Keys that contradict another key; both are in the examples, the second as a comment.
const ALTERNATIVES: &[(&str, &str)] = &[
    ("train.epochs", "train.steps"),
    (
        "scheduler.params.warmup_ratio",
        "scheduler.params.warmup_steps",
    ),
    ("optimizer.params.no_decay", "optimizer.params.decay"),
    ("data.validation_fraction", "data.eval_files"),
];

/// One table of the page.
struct Section {
    path: String,
    rows: Vec<(String, &'static Field)>,
}

/// Formats the page.
pub(super) fn page() -> String {
    let mut text = HEAD.to_owned();
    for Section { path, rows } in sections() {
        let title = match path.is_empty() {
            true => "Top level".into(),
            false => format!("`[{path}]`"),
        };
        let _ = write!(
            text,
            "\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        );
        for (path, field) in &rows {
            let meaning = meaning(path, field);
            let stated = match field.default {
                "" => default_in(&meaning).unwrap_or_default(),
                stated => stated,
            };
            let default = match (stated, is_value(stated)) {
                ("", _) => "–".into(),
                (value, true) => format!("`{value}`"),
                (words, false) => words.to_owned(),
            };
            let cells = [
                format!("`{}`", field.name),
                field.kind.words.into(),
                default,
                meaning,
            ];
            let _ = writeln!(
                text,
                "| {} |",
                cells.map(|cell| cell.replace('|', "\\|")).join(" | ")
            );
        }
        let examples: Vec<_> = (rows.iter())
            .filter(|(_, field)| !field.example.is_empty())
            .map(|(path, field)| {
                let line = format!("{} = {}", field.name, field.example);
                match ALTERNATIVES.iter().find(|(_, second)| second == path) {
                    Some((first, _)) => {
                        let first = first.rsplit('.').next().unwrap_or(first);
                        format!("# {line}    # in place of {first}")
                    }
                    None => line,
                }
            })
            .collect();
        if !examples.is_empty() {
            let head = match path.is_empty() {
                true => String::new(),
                false => format!("[{path}]\n"),
            };
            let _ = write!(
                text,
                "\n```toml example\n{head}{}\n```\n",
                examples.join("\n")
            );
        }
    }
    text
}

/// Returns whether a default is a TOML value and not a description.
fn is_value(default: &str) -> bool {
    format!("x = {default}").parse::<toml::Table>().is_ok()
}

fn meaning(path: &str, field: &Field) -> String {
    match field.what.is_empty() {
        false => field.what(),
        true => {
            let why = entry(path).map_or("", |key| key.why);
            let mut letters = why.chars();
            // A value stays as it is written.
            let is_value = why.starts_with("true:") || why.starts_with("false ");
            let upper = |c: char| if is_value { c } else { c.to_ascii_uppercase() };
            let first = letters.next().map(upper);
            first.into_iter().chain(letters).collect::<String>() + "."
        }
    }
}

/// Tables of a configuration file in the order of declaration, without those that have no keys of their own.
fn sections() -> Vec<Section> {
    let mut sections = Vec::new();
    collect("", &ConfigToml::KIND, &mut sections);
    sections.retain(|section| !section.rows.is_empty());
    sections
}

fn collect(prefix: &str, kind: &Kind, sections: &mut Vec<Section>) {
    let fields = kind.fields.unwrap_or_default();
    let is_table = |field: &&Field| field.kind.fields.is_some();
    let rows = fields.iter().filter(|field| !is_table(field));
    sections.push(Section {
        path: prefix.to_owned(),
        rows: rows
            .map(|field| (join(prefix, field.name), field))
            .collect(),
    });
    for field in fields.iter().filter(is_table) {
        collect(&join(prefix, field.name), &field.kind, sections);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_docs_is_current() {
        docs_test::assert_page("docs/trainer-configuration.md", &page());
    }

    #[test]
    fn every_own_key_has_a_description_a_default_and_an_example_of_its_type() {
        let mut ours = 0;
        for (path, field) in sections().into_iter().flat_map(|section| section.rows) {
            let meaning = meaning(&path, field);
            assert!(
                meaning.len() > 10 && meaning.ends_with('.'),
                "{path}: {meaning:?}"
            );
            // DeepSpeed's keys are described in their own table.
            if field.what.is_empty() {
                continue;
            }
            ours += 1;
            assert!(!field.default.is_empty(), "{path} has no default");
            let example = format!("x = {}", field.example);
            let table: toml::Table = example
                .parse()
                .unwrap_or_else(|error| panic!("{path}: {example}: {error}"));
            let value = serde_json::to_value(&table["x"]).unwrap();
            assert!(
                (field.kind.accepts)(&value),
                "{path}: {example} is not {}",
                field.kind.words
            );
        }
        assert!(ours > 50, "{ours}");
    }

    #[test]
    fn an_example_has_not_both_of_two_keys_that_contradict_each_other() {
        let page = page();
        for key in ALTERNATIVES
            .iter()
            .flat_map(|(first, second)| [first, second])
        {
            assert!(super::super::is_used(key, Reader::Trainer), "{key}");
        }
        for (line, shown) in [
            ("\nepochs = ", true),
            ("\nsteps = ", false),
            ("\n# steps = ", true),
        ] {
            assert_eq!(page.contains(line), shown, "{line}");
        }
    }

    #[test]
    fn no_two_keys_share_a_description() {
        let mut seen = std::collections::HashMap::new();
        for (path, field) in sections().into_iter().flat_map(|section| section.rows) {
            if path.starts_with("fp16.") || path.starts_with("scheduler.params.") {
                let other = seen.insert(meaning(&path, field), path.clone());
                assert_eq!(other, None, "{path}");
            }
        }
        assert!(seen.len() > 25);
    }
}
