//! SIGHUP: which changed settings a running daemon applies, and which need a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::check::check;
use crate::config::Config;
use crate::driver::SettingsChange;
use crate::findings::Severity;
use anyhow::{Result, bail};

/// Settings as they are served from now on, and messages about changed settings that need a restart.
#[derive(Debug)]
pub(super) struct Reload {
    pub(super) settings: Config,
    pub(super) refused: Vec<String>,
}

impl Reload {
    /// What the daemon applies.
    pub(super) fn change(&self) -> SettingsChange {
        SettingsChange {
            limits: self.settings.limits(),
            quotas: self.settings.quotas.clone(),
        }
    }
}

/// Returns each setting that differs, with its new and its old value.
pub(super) fn changes(before: &Config, now: &Config) -> Vec<String> {
    let [before, now] = [before, now].map(|config| {
        let table = toml::from_str(&config.to_toml()).expect("settings are printed as TOML");
        let mut values = BTreeMap::new();
        flatten("", &table, &mut values);
        values
    });
    let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let value = |of: Option<&String>| of.cloned().unwrap_or_else(|| "unset".into());
    let changes = keys.into_iter().filter_map(|key| {
        let (before, now) = (before.get(key), now.get(key));
        let is_changed = before != now;
        is_changed.then(|| format!("{key} = {} (was {})", value(now), value(before)))
    });
    changes.collect()
}

/// Collects the values of a table by their keys, as `quota.uid.1000.weight`.
fn flatten(of: &str, table: &toml::Table, values: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = format!("{of}{key}");
        match value {
            toml::Value::Table(table) => flatten(&format!("{key}."), table, values),
            value => drop(values.insert(key, value.to_string())),
        }
    }
}

/// A device of the store.
#[derive(Debug)]
pub(super) struct ListedDevice {
    pub(super) path: PathBuf,
    /// Whether the device is being drained.
    pub(super) leaving: bool,
}

/// Reads `path` again. `started` are the settings at the start, `served` the current devices.
pub(super) fn read(path: &Path, started: &Config, served: &[ListedDevice]) -> Result<Reload> {
    let config = Config::read(path)?;
    let problem = check(&config)
        .into_iter()
        .find(|finding| finding.severity == Severity::Problem);
    if let Some(problem) = problem {
        bail!("{}: {}", problem.subject, problem.message);
    }
    Ok(compare(started, served, &config))
}

/// Whether the list names a device that is not served, or no longer names one that is. Devices are added and drained while the daemon
/// runs, and a list that follows them, or still names a device that has left, needs no restart.
fn wants_other_devices(started: &Config, served: &[ListedDevice], new: &Config) -> bool {
    let is_served = |path: &PathBuf| served.iter().any(|device| device.path == *path);
    let comes = |path: &PathBuf| !started.devices.contains(path) && !is_served(path);
    let goes = |device: &ListedDevice| {
        let listed = |config: &Config| config.devices.contains(&device.path);
        listed(started) && !listed(new) && !device.leaving
    };
    new.devices.iter().any(comes) || served.iter().any(goes)
}

fn compare(started: &Config, served: &[ListedDevice], new: &Config) -> Reload {
    let restart = |key: &str| format!("`{key}` needs a restart");
    let mut refused = Vec::new();
    let fixed = [
        ("socket", started.socket != new.socket),
        ("devices", wants_other_devices(started, served, new)),
        ("engine", started.engine != new.engine),
        (
            "require_locked",
            started.require_locked != new.require_locked,
        ),
        (
            "scrub_bytes_per_s_max",
            started.scrub_bytes_per_s_max != new.scrub_bytes_per_s_max,
        ),
        (
            "metrics.listen",
            started.metrics_listen != new.metrics_listen,
        ),
    ];
    refused.extend(
        fixed
            .iter()
            .filter(|(_, changed)| *changed)
            .map(|(key, _)| restart(key)),
    );
    let mut settings = Config {
        arena_bytes_max: new.arena_bytes_max,
        sessions_max: new.sessions_max,
        iodepth_max: new.iodepth_max,
        rebalance_bytes_per_s_max: new.rebalance_bytes_per_s_max,
        quotas: new.quotas.clone(),
        ..started.clone()
    };
    // Tables were allocated for these limits at the start.
    for (key, limit, started) in [
        (
            "sessions_max",
            &mut settings.sessions_max,
            started.sessions_max,
        ),
        (
            "iodepth_max",
            &mut settings.iodepth_max,
            started.iodepth_max,
        ),
    ] {
        if *limit > started {
            refused.push(format!(
                "`{key}` above {started}, its value at the start, needs a restart"
            ));
            *limit = started;
        }
    }
    Reload { settings, refused }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTED: &str = "
        socket = \"/run/offloadd/offloadd.sock\"
        devices = [\"/a\", \"/b\"]
        arena_bytes_max = \"1GiB\"
        sessions_max = 8
        iodepth_max = 16
    ";

    fn serving(paths: &[&str]) -> Vec<ListedDevice> {
        let one = |path: &&str| ListedDevice {
            path: path.into(),
            leaving: false,
        };
        paths.iter().map(one).collect()
    }

    fn compared(from: &str, to: &str) -> Reload {
        let parse = |text: &str| Config::parse(text, Path::new("offloadd.toml")).unwrap();
        let new = STARTED.replace(from, to);
        assert_ne!(new, STARTED);
        compare(&parse(STARTED), &serving(&["/a", "/b"]), &parse(&new))
    }

    #[test]
    fn settings_that_can_change_are_applied() {
        let reload = compared("1GiB", "2GiB");
        assert_eq!(reload.settings.arena_bytes_max, 2 << 30);
        assert!(reload.refused.is_empty(), "{:?}", reload.refused);
        let slower = "rebalance_bytes_per_s_max = \"1MiB\"\n        sessions_max";
        let reload = compared("sessions_max", slower);
        assert_eq!(reload.settings.rebalance_bytes_per_s_max, Some(1 << 20));
        assert!(reload.refused.is_empty(), "{:?}", reload.refused);
        let reload = compared("sessions_max = 8", "sessions_max = 2");
        assert_eq!(reload.settings.sessions_max, 2);
    }

    #[test]
    fn each_changed_setting_is_told_with_both_values() {
        let parse = |text: &str| Config::parse(text, Path::new("offloadd.toml")).unwrap();
        let quotas = |weight: u32| {
            let quotas =
                format!("[quota.uid.7]\nweight = {weight}\n[quota.uid.7.job.\"a.b\"]\nweight = 2");
            parse(&format!("{STARTED}\n{quotas}"))
        };
        let none = parse(STARTED);
        assert_eq!(changes(&none, &none), [""; 0]);
        let found = changes(&quotas(300), &quotas(200));
        assert_eq!(found, ["quota.uid.7.weight = 200 (was 300)"]);
        let found = changes(&quotas(300), &none);
        let unset = [
            "quota.uid.7.job.a.b.weight = unset (was 2)",
            "quota.uid.7.weight = unset (was 300)",
        ];
        assert_eq!(found, unset);
        let found = changes(&none, &compared("1GiB", "2GiB").settings);
        assert_eq!(found, ["arena_bytes_max = 2147483648 (was 1073741824)"]);
        // What needs a restart has not changed.
        let found = changes(&none, &compared("/run/offloadd/", "/run/other/").settings);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn settings_that_need_a_restart_are_named_and_stay() {
        for (from, to, key) in [
            ("/run/offloadd/", "/run/other/", "socket"),
            ("\"/a\", \"/b\"", "\"/a\", \"/c\"", "devices"),
            ("sessions_max", "engine = \"psync\"\nsessions_max", "engine"),
            (
                "sessions_max",
                "require_locked = true\nsessions_max",
                "require_locked",
            ),
            (
                "sessions_max",
                "scrub_bytes_per_s_max = \"1GiB\"\nsessions_max",
                "scrub_bytes_per_s_max",
            ),
            ("sessions_max = 8", "sessions_max = 9", "sessions_max"),
            ("iodepth_max = 16", "iodepth_max = 17", "iodepth_max"),
        ] {
            let reload = compared(from, to);
            assert_eq!(reload.refused.len(), 1, "{:?}", reload.refused);
            assert!(
                reload.refused[0].contains(&format!("`{key}`")),
                "{:?}",
                reload.refused
            );
            assert_eq!(reload.settings.sessions_max, 8);
            assert_eq!(reload.settings.iodepth_max, 16);
        }
        let listening = format!("{STARTED}\n[metrics]\nlisten = \"127.0.0.1:9464\"");
        let parse = |text: &str| Config::parse(text, Path::new("offloadd.toml")).unwrap();
        let reload = compare(&parse(STARTED), &serving(&["/a", "/b"]), &parse(&listening));
        assert_eq!(reload.refused, ["`metrics.listen` needs a restart"]);
    }

    #[test]
    fn a_list_that_follows_the_store_needs_no_restart() {
        let parse = |text: &str| Config::parse(text, Path::new("offloadd.toml")).unwrap();
        let refused = |served: &[ListedDevice], list: &str| {
            let new = STARTED.replace("\"/a\", \"/b\"", list);
            let reload = compare(&parse(STARTED), served, &parse(&new));
            assert!(reload.refused.iter().all(|one| one.contains("`devices`")));
            !reload.refused.is_empty()
        };
        // /c was added and /b was drained.
        let moved = serving(&["/a", "/c"]);
        for list in [
            "\"/a\", \"/c\"",
            "\"/c\", \"/a\"",
            "\"/a\", \"/b\"",
            "\"/a\", \"/b\", \"/c\"",
        ] {
            assert!(!refused(&moved, list), "{list}");
        }
        for list in ["\"/c\"", "\"/a\", \"/d\"", "\"/a\", \"/c\", \"/d\""] {
            assert!(refused(&moved, list), "{list}");
        }
        // A device that is being drained may be listed or not; others must be listed.
        let mut leaving = serving(&["/a", "/b"]);
        assert!(refused(&leaving, "\"/a\""));
        leaving[1].leaving = true;
        assert!(!refused(&leaving, "\"/a\""));
        assert!(!refused(&leaving, "\"/b\", \"/a\""));
    }
}
