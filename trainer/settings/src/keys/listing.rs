//! A list of all keys, one a line, for `trainer config-reference`.

use std::fmt::Write;

use super::{each_used, entry};
use crate::Reader;

/// Formats each key with its type, default and description, in columns.
pub fn listing() -> String {
    let mut rows: Vec<[String; 4]> = Vec::new();
    each_used(Reader::Trainer, &mut |path, field| {
        if field.kind.fields.is_some() {
            return;
        }
        let what = match field.what.is_empty() {
            false => field.what(),
            true => entry(&path).map_or(String::new(), |key| key.why.to_owned()),
        };
        let default = match field.default {
            "" => "-",
            default => default,
        };
        rows.push([path, field.kind.words.into(), default.into(), what]);
    });
    let heads = ["key", "type", "default", "description"].map(str::to_owned);
    rows.insert(0, heads);
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    let mut text = String::new();
    for [key, kind, default, what] in &rows {
        let [keys, kinds, defaults] = widths;
        let _ = writeln!(
            text,
            "{key:keys$}  {kind:kinds$}  {default:defaults$}  {what}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_listed_with_its_type_and_description() {
        let listing = listing();
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
    }
}
