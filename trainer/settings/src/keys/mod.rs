//! The keys that a configuration file may have: those that are read, and DeepSpeed's that are not.
//!
//! Each of the two readers, the trainer and the Python package, has its column in the table. No key is ignored silently. A key is used; or it is
//! DeepSpeed's and has no effect here (reported before the start); or it asks for an unsupported feature (refused unless it is switched off); or it
//! is unknown (refused, with a suggestion if one is found). `table.rs` assigns DeepSpeed's keys to these cases. Keys that DeepSpeed itself ignores
//! are removed from a DeepSpeed file and reported.

pub(crate) mod auto;
#[cfg(test)]
mod deepspeed;
mod listing;
#[cfg(test)]
mod reference;
mod suggest;
mod table;

use serde_json::Value;

use crate::error::SettingsError;
use crate::reader::Reader;
use crate::schema::{Field, KeyType, Kind};
use crate::toml::{ConfigToml, PackageToml};
use table::{IGNORES_OTHERS, Key, KeySupport, SECTIONS};

pub use listing::listing;
pub(crate) use suggest::suggestion;

/// Keys of `zero_optimization` whose older spelling `old = true` DeepSpeed reads as `new = {"device": "cpu"}`.
pub(crate) const OLD_SPELLINGS: &[(&str, &str)] = &[
    ("cpu_offload", "offload_optimizer"),
    ("cpu_offload_param", "offload_param"),
];

/// Result of checking a file.
pub(crate) struct KeyFindings {
    /// A line about keys without effect, if there are any.
    pub(crate) note: Option<String>,
    /// Paths of keys without effect, except those that only switch off what is not there.
    pub(crate) without_effect: Vec<String>,
    /// Keys that are unknown, unsupported, or have a wrong type.
    pub(crate) faults: Vec<SettingsError>,
}

/// Checks every key of a file.
pub(crate) fn check(file: &Value, reader: Reader) -> KeyFindings {
    let mut check = Check {
        reader,
        used: used_keys(reader),
        without_effect: Vec::new(),
        off: Vec::new(),
        faults: Vec::new(),
    };
    check.walk("", file);
    KeyFindings {
        note: check.note(),
        without_effect: check.without_effect,
        faults: check.faults,
    }
}

/// The tables that `reader` parses.
fn root(reader: Reader) -> &'static Kind {
    match reader {
        Reader::Trainer => &ConfigToml::KIND,
        Reader::Package => &PackageToml::KIND,
    }
}

/// Removes every value of a wrong type from `file`, so that the rest can be parsed.
pub(crate) fn take_wrong_types(file: &mut Value, kind: &Kind) -> Vec<SettingsError> {
    let mut faults = Vec::new();
    take_wrong(file, "", kind, &mut faults);
    faults
}

fn take_wrong(value: &mut Value, prefix: &str, kind: &Kind, faults: &mut Vec<SettingsError>) {
    let (Value::Object(table), Some(fields)) = (value, kind.fields) else {
        return;
    };
    for field in fields {
        let Some(value) = table.get_mut(field.name) else {
            continue;
        };
        let path = join(prefix, field.name);
        if value.is_null() {
            table.remove(field.name);
        } else if (field.kind.accepts)(value) {
            take_wrong(value, &path, &field.kind, faults);
        } else {
            let hint = hint(&path, field, value);
            let message = format!("expected {}, got {value}{hint}", field.kind.words);
            faults.push(SettingsError::Type { key: path, message });
            table.remove(field.name);
        }
    }
}

/// Suggests what was probably meant by a value of a wrong type.
fn hint(path: &str, field: &Field, value: &Value) -> String {
    let has_switch = field
        .kind
        .fields
        .is_some_and(|fields| fields.iter().any(|field| field.name == "enabled"));
    match value {
        Value::Bool(_) if has_switch => format!(": write {path}.enabled = {value}"),
        Value::String(_) if (field.kind.accepts)(&Value::Array(vec![value.clone()])) => {
            format!(": write [{value}]")
        }
        Value::String(text)
            if serde_json::from_str(text)
                .is_ok_and(|inner: Value| (field.kind.accepts)(&inner)) =>
        {
            ": leave out the quotes".into()
        }
        _ => String::new(),
    }
}

/// Removes what DeepSpeed itself does not read from a DeepSpeed file, and returns the paths.
pub(crate) fn take_ignored(file: &mut Value, reader: Reader) -> Vec<String> {
    let mut ignored = Vec::new();
    let is_known = |path: &str| used_keys(reader).iter().any(|used| used == path);
    let is_known = |path: &str| is_known(path) || entry(path).is_some();
    // No other program has this table: a name like it is refused as a typing error.
    let is_ours = |path: &str| reader == Reader::Package && suggest::is_nearly(path, "offloadd");
    take_unread(
        file,
        "",
        &|path| is_known(path) || is_ours(path),
        &mut ignored,
    );
    ignored
}

fn take_unread(
    value: &mut Value,
    prefix: &str,
    is_known: &impl Fn(&str) -> bool,
    ignored: &mut Vec<String>,
) {
    let Value::Object(table) = value else { return };
    table.retain(|name, value| {
        let path = join(prefix, name);
        // A dot in a name is no path.
        if !name.contains('.') && is_known(&path) {
            take_unread(value, &path, is_known, ignored);
            return true;
        }
        let refused = !IGNORES_OTHERS.contains(&prefix);
        if !refused {
            ignored.push(path);
        }
        refused
    });
}

/// All entries of the table of DeepSpeed's keys.
fn entries() -> impl Iterator<Item = &'static Key> {
    SECTIONS.iter().flat_map(|(_, keys)| *keys)
}

/// Returns the table's entry for `path`.
fn entry(path: &str) -> Option<&'static Key> {
    entries().find(|key| key.path == path).or_else(|| {
        entries().find(|key| {
            let below = path.strip_prefix(key.path);
            let below = below.and_then(|below| below.strip_prefix('.'));
            below.is_some_and(|below| key.has(below))
        })
    })
}

/// Check of a file in progress.
struct Check {
    reader: Reader,
    used: Vec<String>,
    /// Paths of keys without effect.
    without_effect: Vec<String>,
    /// Paths of refused keys that are switched off.
    off: Vec<String>,
    faults: Vec<SettingsError>,
}

impl Check {
    fn walk(&mut self, prefix: &str, value: &Value) {
        let Value::Object(table) = value else { return };
        for (name, value) in table {
            let path = join(prefix, name);
            if name.contains('.') {
                self.unknown(path, value);
            } else if self.used.contains(&path) {
                self.walk(&path, value);
            } else if let Some(key) = entry(&path) {
                self.check_below(&path, value);
                self.meet(key, path, value);
            } else {
                self.unknown(path, value);
            }
        }
    }

    /// Checks a table that is not read itself: each key in it must be known, and none may ask for what is refused.
    fn check_below(&mut self, path: &str, value: &Value) {
        let Value::Object(table) = value else { return };
        for (name, value) in table {
            let path = join(path, name);
            match entry(&path) {
                Some(key)
                    if key.path == path
                        && key.in_column(self.reader).0 == KeySupport::Refused
                        && !is_off(value) =>
                {
                    self.meet(key, path, value);
                }
                Some(_) => self.check_below(&path, value),
                None => self.unknown(path, value),
            }
        }
    }

    /// Handles a known key that is not read.
    fn meet(&mut self, key: &'static Key, path: String, value: &Value) {
        let (support, instead) = key.in_column(self.reader);
        let is_off = match support {
            KeySupport::Used => unreachable!("{} is read", key.path),
            KeySupport::Unused => return self.without_effect.push(path),
            KeySupport::Refused => is_off(value),
            // A feature that is usually on: the key is a request when it turns the feature off.
            KeySupport::RefusedBut(values) => {
                let is_left = value.is_null() || value.as_str() == Some("auto");
                is_left || values.contains(&value.to_string().as_str())
            }
        };
        if is_off {
            return self.off.push(path);
        }
        self.faults.push(match self.reader {
            Reader::Trainer => SettingsError::NotSupported { key: path, instead },
            Reader::Package => SettingsError::OtherProgram { key: path, instead },
        });
    }

    fn unknown(&mut self, path: String, value: &Value) {
        let of_other_program = match self.reader {
            Reader::Trainer => suggest::tracker(&path, value).or_else(|| suggest::feature(&path)),
            Reader::Package => None,
        };
        self.faults.push(match of_other_program {
            Some(instead) => SettingsError::OtherProgram { key: path, instead },
            None => SettingsError::UnknownKey {
                nearest: suggestion(&path, self.reader),
                key: path,
            },
        });
    }

    fn note(&self) -> Option<String> {
        let all: Vec<&str> = (self.without_effect.iter().chain(&self.off))
            .map(String::as_str)
            .collect();
        match all.as_slice() {
            [] => None,
            [one] => {
                let why = entry(one).map_or("", |key| key.in_column(self.reader).1);
                Some(format!("{one} has no effect here: {why}"))
            }
            several => Some(format!(
                "{} keys have no effect here (docs/coming-from-deepspeed.md says why): {}",
                several.len(),
                several.join(", ")
            )),
        }
    }
}

impl Key {
    /// Support and explanation for `reader`.
    pub(crate) fn in_column(&self, reader: Reader) -> (KeySupport, &'static str) {
        match (reader, self.package) {
            (Reader::Package, Some(own)) => own,
            _ => (self.support, self.why),
        }
    }

    /// Returns whether `name` (dotted if it is deeper) is one of the keys below this one, or a table that
    /// contains one.
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

    /// Returns the key's path, or those of the keys below it.
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

/// Returns whether a key is read.
pub(crate) fn is_used(path: &str, reader: Reader) -> bool {
    used_keys(reader).iter().any(|used| used == path)
}

/// Paths of all keys that are read, including tables, in the order of declaration.
fn used_keys(reader: Reader) -> Vec<String> {
    let mut paths = Vec::new();
    each_used(reader, &mut |path, _| paths.push(path));
    paths
}

/// Calls `see` for each key that `reader` reads.
fn each_used(reader: Reader, see: &mut impl FnMut(String, &'static Field)) {
    each_below("", root(reader), reader, see);
}

fn each_below(
    prefix: &str,
    kind: &Kind,
    reader: Reader,
    see: &mut impl FnMut(String, &'static Field),
) {
    for field in kind.fields.unwrap_or_default() {
        if field.is_trainers && reader == Reader::Package {
            continue;
        }
        let path = join(prefix, field.name);
        see(path.clone(), field);
        each_below(&path, &field.kind, reader, see);
    }
}

/// Calls `see` for each of the trainer's own keys with its default.
pub fn each_default(see: &mut impl FnMut(&str, &str)) {
    each_used(Reader::Trainer, &mut |path, field| {
        see(&path, field.default);
    });
}

/// Returns whether a value switches a feature off in one of DeepSpeed's ways: false, null, 0, an empty table, or
/// a table with `enabled = false`. "auto" also counts as off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(word) => word == "auto",
        Value::Object(table) => table.is_empty() || table.get("enabled").is_some_and(is_off),
        _ => false,
    }
}

/// Joins the table path `prefix` and `key`.
pub fn join(prefix: &str, key: &str) -> String {
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
        match check(&file, Reader::Trainer).faults.pop() {
            Some(SettingsError::UnknownKey { key, nearest }) => (key, nearest),
            other => panic!("expected an unknown key, got {other:?}"),
        }
    }

    /// Number of keys in the note about keys without effect.
    fn without_effect(file: Value) -> usize {
        let KeyFindings { note, faults, .. } = check(&file, Reader::Trainer);
        assert!(faults.is_empty(), "{faults:?}");
        let note = note.unwrap_or_default();
        assert_eq!(note.lines().count(), 1, "{note}");
        note.split(' ')
            .next()
            .and_then(|count| count.parse().ok())
            .unwrap_or(1)
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
    fn a_deepspeed_key_without_effect_is_always_reported() {
        let note = check(
            &json!({"aio": {"block_size": 1}, "steps_per_print": 10}),
            Reader::Trainer,
        )
        .note;
        let note = note.unwrap();
        assert!(
            note.starts_with("aio.block_size has no effect here: one thread"),
            "{note}"
        );
        assert_eq!(
            check(&json!({"wandb": {"enabled": true}}), Reader::Trainer)
                .faults
                .len(),
            1
        );
        assert_eq!(without_effect(json!({"wandb": {"enabled": false}})), 1);
    }

    #[test]
    fn a_typing_error_in_a_table_without_effect_is_found() {
        let (key, nearest) = unknown(json!({"flops_profiler": {"profile_stp": 1}}));
        assert_eq!(key, "flops_profiler.profile_stp");
        assert_eq!(nearest.as_deref(), Some("flops_profiler.profile_step"));
        let (key, _) = unknown(json!({"checkpoint": {"writer": {"typ": 1}}}));
        assert_eq!(key, "checkpoint.writer.typ");
        // Unknown, even though the feature is off.
        let (key, _) = unknown(json!({"wandb": {"enabled": false, "job": 1}}));
        assert_eq!(key, "wandb.job");
        let fine = json!({
            "checkpoint": {"writer": {"type": "FAST"}, "parallel_write": {"pipeline_stage": true}},
            "amd_specific": {"anything": {"at": "all"}},
            "data_efficiency": {"enabled": false, "data_sampling": {"curriculum_learning": {"curriculum_metrics": {"x": 1}}}}
        });
        assert_eq!(without_effect(fine), 3);
    }

    #[test]
    fn an_unsupported_feature_is_refused_unless_it_is_off() {
        for (file, part) in [
            (
                json!({"optimizer": {"params": {"max_grad_norm": 1.0}}}),
                "write it as gradient_clipping",
            ),
            (
                json!({"optimizer": {"params": {"bias_correction": false}}}),
                "bias correction is always applied",
            ),
            (
                json!({"gradient_allreduce_op": "sum"}),
                "gradients are averaged",
            ),
            (
                json!({"zero_optimization": {"zero_hpz_partition_size": 8}}),
                "unless offload.shard is \"all\"",
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
            (
                json!({"checkpoint": {"use_node_local_storage": true, "tag_validation": "Warn"}}),
                "set train.checkpoints_on_each_node = true",
            ),
        ] {
            let faults = check(&file, Reader::Trainer).faults;
            assert_eq!(faults.len(), 1, "{faults:?}");
            let text = faults[0].to_string();
            assert!(text.contains(part), "{text}");
        }
        let off = json!({
            "gradient_allreduce_op": "mean", "amp": {"enabled": false}, "elasticity": {},
            "zero_optimization": {"zero_hpz_partition_size": 1, "cpu_offload": false, "mics_shard_size": -1},
            "checkpoint": {"use_node_local_storage": false}
        });
        assert_eq!(without_effect(off), 7);
    }

    #[test]
    fn the_table_has_every_key_once_and_those_that_are_read_as_used() {
        let tables = ["model", "data", "train", "offload", "deepspeed", "offloadd"];
        let ours = [
            "optimizer.groups",
            "optimizer.master",
            "optimizer.moments",
            "optimizer.params.adjust_lr_fn",
            "optimizer.params.decay",
            "optimizer.params.nesterov",
            "optimizer.params.no_decay",
            "optimizer.params.ns_coefficients",
            "optimizer.params.ns_steps",
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_ratio",
        ];
        let of = |reader: Reader, wanted: fn(KeySupport) -> bool| -> Vec<String> {
            let keys = entries().filter(|key| wanted(key.in_column(reader).0));
            let mut paths: Vec<String> = keys.flat_map(Key::paths).collect();
            paths.sort();
            paths
        };
        for reader in [Reader::Trainer, Reader::Package] {
            let used = used_keys(reader).into_iter().filter(|path| {
                let top = path.split('.').next().unwrap_or("");
                !tables.contains(&top) && !ours.contains(&path.as_str())
            });
            // Tables are listed by the keys in them.
            let all: Vec<String> = used.collect();
            let is_table = |path: &String| {
                all.iter()
                    .any(|other| other.starts_with(&format!("{path}.")))
            };
            let mut read: Vec<String> =
                all.iter().filter(|path| !is_table(path)).cloned().collect();
            read.sort();
            assert_eq!(
                of(reader, |support| support == KeySupport::Used),
                read,
                "{reader:?}"
            );
        }
        let mut every = of(Reader::Trainer, |_| true);
        let count = every.len();
        every.dedup();
        assert_eq!(every.len(), count, "a key is listed twice");
    }
}
