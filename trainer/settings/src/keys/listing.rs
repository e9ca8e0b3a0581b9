//! A list of keys for `trainer config-reference`: one a line in columns for programs, or paragraphs that fit a terminal.

use std::fmt::Write;

use super::{each_used, entry, suggestion};
use crate::error::SettingsError;
use crate::reader::Reader;

/// Fewest and most columns of a paragraph.
const COLUMNS: std::ops::RangeInclusive<usize> = 40..=120;

/// A key as it is shown.
struct Row {
    key: String,
    kind: &'static str,
    default: String,
    what: String,
}

/// Formats the keys that are, or are in, one of `wanted`; all if there is none. With `columns`, each is a paragraph that fits a
/// terminal of that width.
///
/// # Errors
/// There is no such key or table.
pub fn listing(wanted: &[String], columns: Option<usize>) -> Result<String, SettingsError> {
    let mut rows = rows();
    for name in wanted {
        if !rows.iter().any(|row| is_in(&row.key, name)) {
            return Err(SettingsError::UnknownKey {
                key: name.clone(),
                nearest: suggestion(name, Reader::Trainer),
            });
        }
    }
    rows.retain(|row| wanted.is_empty() || wanted.iter().any(|name| is_in(&row.key, name)));
    Ok(match columns {
        None => in_columns(&rows),
        Some(columns) => {
            let columns = columns.clamp(*COLUMNS.start(), *COLUMNS.end());
            let paragraphs = rows.iter().map(|row| paragraph(row, columns));
            paragraphs.collect::<Vec<_>>().join("\n")
        }
    })
}

fn is_in(key: &str, name: &str) -> bool {
    let name = name.trim_matches(['[', ']']);
    key.strip_prefix(name)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    each_used(Reader::Trainer, &mut |path, field| {
        if field.kind.fields.is_some() {
            return;
        }
        let what = match field.what.is_empty() {
            false => field.what(),
            true => entry(&path).map_or(String::new(), |key| key.why.to_owned()),
        };
        rows.push(Row {
            default: match field.default {
                "" => default_in(&what).unwrap_or("-").to_owned(),
                default => default.to_owned(),
            },
            key: path,
            kind: field.kind.words,
            what,
        });
    });
    rows
}

/// Default that the description of a DeepSpeed key states: "...; 1000 when left out", "...; 0, the default, ...", or "...; left out or
/// false: ...". One that ends in "; required" has none.
pub(super) fn default_in(what: &str) -> Option<&str> {
    if let Some((_, required)) = what.rsplit_once("; ").filter(|(_, end)| *end == "required") {
        return Some(required);
    }
    if let Some((_, after)) = what.split_once("left out or ") {
        return after.split([':', ',']).next();
    }
    let marks = [" when left out", ", the default", ", DeepSpeed's default"];
    let before = marks.iter().find_map(|mark| what.split_once(mark));
    let (before, _) = before?;
    let start = before.rfind("; ").map_or(0, |at| at + 2);
    let value = before[start..].trim();
    let value = value.rsplit(": ").next().unwrap_or(value);
    (!value.is_empty() && value.len() <= DEFAULT_CHARS_MAX).then_some(value)
}

/// Longest default that is taken out of a description.
const DEFAULT_CHARS_MAX: usize = 36;

fn in_columns(rows: &[Row]) -> String {
    let heads = Row {
        key: "key".into(),
        kind: "type",
        default: "default".into(),
        what: "description".into(),
    };
    let all = || std::iter::once(&heads).chain(rows);
    let width = |of: fn(&Row) -> usize| all().map(of).max().unwrap_or(0);
    let keys = width(|row| row.key.len());
    let kinds = width(|row| row.kind.len());
    let defaults = width(|row| row.default.len());
    let mut text = String::new();
    for Row {
        key,
        kind,
        default,
        what,
    } in all()
    {
        let _ = writeln!(
            text,
            "{key:keys$}  {kind:kinds$}  {default:defaults$}  {what}"
        );
    }
    text
}

fn paragraph(row: &Row, columns: usize) -> String {
    let mut text = format!("{}\n", row.key);
    let facts = match row.default.as_str() {
        "-" => format!("{}.", row.kind),
        default => format!("{}. Default: {default}.", row.kind),
    };
    for words in [facts, row.what.clone()] {
        let mut line = String::from("   ");
        for word in words.split_whitespace() {
            if line.chars().count() + 1 + word.chars().count() > columns && line.len() > 3 {
                let _ = writeln!(text, "{line}");
                line = String::from("   ");
            }
            line.push(' ');
            line.push_str(word);
        }
        let _ = writeln!(text, "{line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_listed_with_its_type_and_description() {
        let listing = listing(&[], None).unwrap();
        each_used(Reader::Trainer, &mut |path, field| {
            let line = listing
                .lines()
                .find(|line| line.split(' ').next() == Some(&path));
            assert_eq!(line.is_none(), field.kind.fields.is_some(), "{path}");
            let told = line.is_none_or(|line| !line.ends_with("  "));
            assert!(told, "{path} has no description");
        });
        let steps = listing
            .lines()
            .find(|line| line.starts_with("train.steps "));
        let steps = steps.unwrap();
        assert!(
            steps.contains("a whole number") && steps.contains("required"),
            "{steps}"
        );
        let lr = listing
            .lines()
            .find(|line| line.starts_with("optimizer.params.lr "));
        assert!(lr.unwrap().contains("learning rate"), "{lr:?}");
        let window = listing
            .lines()
            .find(|line| line.starts_with("fp16.loss_scale_window "));
        assert!(window.unwrap().contains("  1000  "), "{window:?}");
        for (key, default) in [
            ("fp16.loss_scale", "0"),
            ("bf16.check_grad_overflow", "false"),
            ("wall_clock_breakdown", "false"),
            ("scheduler.params.warmup_type", "\"log\""),
            ("scheduler.params.cycle_min_lr", "required"),
            (
                "csv_monitor.output_path",
                "csv_monitor/ in the run directory",
            ),
        ] {
            let row = rows().into_iter().find(|row| row.key == key).unwrap();
            assert_eq!(row.default, default, "{key}");
        }
    }

    #[test]
    fn a_terminal_gets_paragraphs_that_fit_and_only_what_was_asked_for() {
        let all = listing(&[], Some(80)).unwrap();
        let long: Vec<_> = all
            .lines()
            .filter(|line| line.chars().count() > 80)
            .collect();
        assert!(long.is_empty(), "{long:?}");
        let one = listing(&["train.epochs".into()], Some(80)).unwrap();
        assert!(
            one.starts_with("train.epochs\n    a number. Default: ") && !one.contains("\n\n"),
            "{one}"
        );
        let tables = listing(&["bf16".into(), "[data]".into()], None).unwrap();
        assert!(tables.contains("\nbf16.enabled ") && tables.contains("\ndata.files "));
        assert!(!tables.contains("\ntrain."));
        let unknown = listing(&["train.epoch".into()], None).unwrap_err();
        assert!(
            unknown.to_string().contains("did you mean `train.epochs`"),
            "{unknown}"
        );
    }
}
