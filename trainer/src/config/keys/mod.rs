//! Which keys a run file may have: the ones we read, and DeepSpeed's that we do not.
//!
//! Nothing is ignored in silence. A key is used, or it is DeepSpeed's and has no effect here (named before the start), or it
//! asks for something we do not do (refused unless it is switched off), or it is unknown (refused with the nearest known key).
//! `table.rs` says which is which.

mod markdown;
mod table;

use serde_json::Value;

use super::{SettingsError, toml::ConfigToml};
use table::{Fate, Key, SECTIONS};

pub use markdown::markdown;

/// Checks every key of a run file. Answers the notes about keys without effect.
///
/// # Errors
/// The first key that is unknown or not supported, with its path.
pub(super) fn check(file: &Value) -> Result<Vec<String>, SettingsError> {
    let mut check = Check {
        used: used_keys(),
        unused: Vec::new(),
        notes: Vec::new(),
    };
    check.walk("", file)?;
    Ok(check.notes())
}

/// All entries of the table.
fn entries() -> impl Iterator<Item = &'static Key> {
    SECTIONS.iter().flat_map(|(_, keys)| *keys)
}

/// A file being checked.
struct Check {
    used: Vec<String>,
    /// Keys without effect that were found, those of one entry together.
    unused: Vec<(&'static Key, Vec<String>)>,
    notes: Vec<String>,
}

impl Check {
    fn walk(&mut self, prefix: &str, value: &Value) -> Result<(), SettingsError> {
        let Value::Object(table) = value else {
            return Ok(());
        };
        for (name, value) in table {
            let path = join(prefix, name);
            if self.used.contains(&path) {
                self.walk(&path, value)?;
            } else if let Some(key) = entries().find(|key| key.path == path) {
                self.check_below(key, &path, value)?;
                self.meet(key, path, value)?;
            } else if let Some(key) =
                entries().find(|key| key.path == prefix && key.has(name) && key.fate != Fate::Used)
            {
                self.meet(key, path, value)?;
            } else {
                return Err(self.unknown(path));
            }
        }
        Ok(())
    }

    /// What a table has that is not read is still known, or a typing error.
    fn check_below(&self, key: &Key, path: &str, value: &Value) -> Result<(), SettingsError> {
        let Value::Object(table) = value else {
            return Ok(());
        };
        for (name, value) in table {
            let path = join(path, name);
            let below = path[key.path.len() + 1..].to_owned();
            if !key.has(&below) {
                return Err(self.unknown(path));
            }
            self.check_below(key, &path, value)?;
        }
        Ok(())
    }

    /// A key that is known and not read.
    fn meet(
        &mut self,
        key: &'static Key,
        path: String,
        value: &Value,
    ) -> Result<(), SettingsError> {
        let neutral: &[&str] = match key.fate {
            Fate::Used => unreachable!("{} is read", key.path),
            Fate::Unused => {
                let same = |(other, _): &&mut (&Key, _)| std::ptr::eq(*other, key);
                match self.unused.iter_mut().find(same) {
                    Some((_, paths)) => paths.push(path),
                    None => self.unused.push((key, vec![path])),
                }
                return Ok(());
            }
            Fate::Refused => &[],
            Fate::RefusedBut(values) => values,
        };
        if !is_off(value) && !neutral.contains(&value.to_string().as_str()) {
            let instead = key.why;
            return Err(SettingsError::NotSupported { key: path, instead });
        }
        self.notes
            .push(format!("{path} is off, as it must be: it is not supported"));
        Ok(())
    }

    fn unknown(&self, path: String) -> SettingsError {
        SettingsError::UnknownKey {
            nearest: nearest(&path, &self.used),
            key: path,
        }
    }

    fn notes(self) -> Vec<String> {
        let unused = self.unused.iter().map(|(key, paths)| {
            let have = if paths.len() == 1 { "has" } else { "have" };
            format!("{} {have} no effect here: {}", paths.join(", "), key.why)
        });
        unused.chain(self.notes.iter().cloned()).collect()
    }
}

impl Key {
    /// Whether `name` (dotted where it is deeper) is one of the keys below, or a table that has one.
    fn has(&self, name: &str) -> bool {
        self.below.split_whitespace().any(|below| {
            let is_it = match below.strip_suffix('*') {
                Some(stem) => name.starts_with(stem),
                None => name == below,
            };
            let rest = below.strip_prefix(name);
            is_it || rest.is_some_and(|rest| rest.starts_with('.'))
        })
    }

    /// Its path, or those of the keys below it.
    fn paths(&self) -> Vec<String> {
        if self.below.is_empty() || self.below == "*" {
            return vec![self.path.to_owned()];
        }
        let below = self
            .below
            .split_whitespace()
            .filter(|below| !below.ends_with('*'));
        below.map(|below| join(self.path, below)).collect()
    }
}

/// Whether a key is read.
pub(super) fn is_used(path: &str) -> bool {
    used_keys().iter().any(|used| used == path)
}

/// The paths of all keys that are read, tables included.
fn used_keys() -> Vec<String> {
    fn collect(prefix: &str, value: &Value, paths: &mut Vec<String>) {
        let Value::Object(table) = value else { return };
        for (key, value) in table {
            let path = join(prefix, key);
            collect(&path, value, paths);
            paths.push(path);
        }
    }
    let all = serde_json::to_value(ConfigToml::default()).expect("the settings are plain data");
    let mut paths = Vec::new();
    collect("", &all, &mut paths);
    paths
}

/// Switched off in DeepSpeed's ways: false, null, an empty table, or a table with `enabled = false`. "auto" asks for nothing.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(word) => word == "auto",
        Value::Object(table) => table.is_empty() || table.get("enabled").is_some_and(is_off),
        _ => false,
    }
}

/// The known key that looks most like `path`, if one does. Keys of the same name in another table count as near.
fn nearest(path: &str, used: &[String]) -> Option<String> {
    let name = |path: &str| path.rsplit('.').next().unwrap_or("").to_owned();
    let near = |known: &str| {
        let whole = strsim::jaro_winkler(path, known);
        let last = 0.99 * strsim::normalized_damerau_levenshtein(&name(path), &name(known));
        let table = path.rsplit_once('.').map(|(table, _)| table)
            == known.rsplit_once('.').map(|(table, _)| table);
        last.max(0.9 * whole) + if table { 0.05 } else { 0.0 }
    };
    let known = used.iter().cloned().chain(entries().flat_map(Key::paths));
    known
        .map(|known| (near(&known), known))
        .filter(|(near, _)| *near > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}

/// The path of `key` in the table `prefix`.
pub(super) fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() {
        key.to_owned()
    } else {
        format!("{prefix}.{key}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn unknown(file: Value) -> (String, Option<String>) {
        match check(&file) {
            Err(SettingsError::UnknownKey { key, nearest }) => (key, nearest),
            other => panic!("expected an unknown key, got {other:?}"),
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_its_path_and_the_nearest_one() {
        let (key, nearest) = unknown(json!({"optimizer": {"params": {"weight_decai": 0.1}}}));
        assert_eq!(key, "optimizer.params.weight_decai");
        assert_eq!(nearest.as_deref(), Some("optimizer.params.weight_decay"));
        let (_, nearest) = unknown(json!({"train_micro_batch_size": 4}));
        assert_eq!(nearest.as_deref(), Some("train_micro_batch_size_per_gpu"));
        let (_, nearest) = unknown(json!({"seq_len": 4}));
        assert_eq!(nearest.as_deref(), Some("train.seq_len"));
        let (_, nearest) = unknown(json!({"qqq": 4}));
        assert_eq!(nearest, None);
    }

    #[test]
    fn a_deepspeed_key_we_do_not_read_is_never_silent() {
        let notes = check(&json!({"aio": {"block_size": 1}, "steps_per_print": 10})).unwrap();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(check(&json!({"wandb": {"enabled": true}})).is_err());
        let off = json!({"wandb": {"enabled": false}});
        assert_eq!(check(&off).unwrap().len(), 1);
    }

    #[test]
    fn a_typing_error_in_a_table_without_effect_is_found() {
        let (key, nearest) = unknown(json!({"flops_profiler": {"profile_stp": 1}}));
        assert_eq!(key, "flops_profiler.profile_stp");
        assert_eq!(nearest.as_deref(), Some("flops_profiler.profile_step"));
        let (key, _) = unknown(json!({"checkpoint": {"writer": {"typ": 1}}}));
        assert_eq!(key, "checkpoint.writer.typ");
        // Off, and wrong all the same.
        let (key, _) = unknown(json!({"wandb": {"enabled": false, "job": 1}}));
        assert_eq!(key, "wandb.job");
        let fine = json!({
            "checkpoint": {"writer": {"type": "FAST"}, "parallel_write": {"pipeline_stage": true}},
            "amd_specific": {"anything": {"at": "all"}},
            "data_efficiency": {"enabled": false, "data_sampling": {"curriculum_learning": {"curriculum_metrics": {"x": 1}}}}
        });
        assert_eq!(check(&fine).unwrap().len(), 3);
    }

    #[test]
    fn what_asks_for_something_that_is_not_here_is_refused_unless_it_is_off() {
        for (file, part) in [
            (
                json!({"optimizer": {"params": {"max_grad_norm": 1.0}}}),
                "write it as gradient_clipping",
            ),
            (
                json!({"gradient_allreduce_op": "sum"}),
                "gradients are averaged",
            ),
            (
                json!({"zero_optimization": {"zero_hpz_partition_size": 8}}),
                "runs are of one node",
            ),
            (
                json!({"zero_optimization": {"cpu_offload": true}}),
                "offload_optimizer",
            ),
            (json!({"amp": {"enabled": true}}), "bf16.enabled"),
            (
                json!({"elasticity": {"enabled": true}}),
                "any number of ranks",
            ),
        ] {
            let text = check(&file).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        }
        let off = json!({
            "gradient_allreduce_op": "mean", "amp": {"enabled": false}, "elasticity": {},
            "zero_optimization": {"zero_hpz_partition_size": 1, "cpu_offload": false, "mics_shard_size": -1}
        });
        assert_eq!(check(&off).unwrap().len(), 6);
    }

    #[test]
    fn the_table_has_every_key_once_and_those_that_are_read_as_used() {
        let tables = ["model", "data", "train", "offload", "deepspeed"];
        let ours = ["optimizer.params.decay", "optimizer.params.no_decay"];
        let used = used_keys().into_iter().filter(|path| {
            let top = path.split('.').next().unwrap_or("");
            !tables.contains(&top) && !ours.contains(&path.as_str())
        });
        // Tables are not listed beside what is in them.
        let all: Vec<String> = used.collect();
        let is_table = |path: &String| {
            all.iter()
                .any(|other| other.starts_with(&format!("{path}.")))
        };
        let mut read: Vec<String> = all.iter().filter(|path| !is_table(path)).cloned().collect();
        read.sort();
        let of = |wanted: fn(Fate) -> bool| -> Vec<String> {
            let keys = entries().filter(|key| wanted(key.fate));
            let mut paths: Vec<String> = keys.flat_map(Key::paths).collect();
            paths.sort();
            paths
        };
        assert_eq!(of(|fate| fate == Fate::Used), read);
        let mut every = of(|_| true);
        let count = every.len();
        every.dedup();
        assert_eq!(every.len(), count, "a key is listed twice");
    }
}
