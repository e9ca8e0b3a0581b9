//! Tests that `docs/daemon-configuration.md` matches the settings' doc comments, and that settings in documents are accepted.

use std::fmt::Write;

use docs_test::{Setting, settings};

use super::keys::{KEYS, METRICS_KEYS};
use super::*;

const HEAD: &str = "# Configuration of the daemon

Generated from the doc comments of the settings by `make docs`; a test keeps it current.

The settings of `offloadd` are one TOML file. An unknown key is an error that suggests the nearest known one. Sizes are bytes, or text with
KiB, MiB, GiB or TiB. `offloadd check-config FILE` checks a file and prints all settings as they would be served; `systemctl reload offloadd` (or
SIGHUP) applies a changed file and says which changes need a restart.
[offloadd/packaging/offloadd.toml](../offloadd/packaging/offloadd.toml) is the commented file that the package installs.
";

const QUOTAS: &str = "
Quotas limit each user (`[quota.default]`), one user (`[quota.uid.1000]`), each job (`[quota.job]`) or one user's job
(`[quota.uid.1000.job.NAME]`). The table that is named last for a user or job wins, key by key. All have these keys:
";

fn page() -> String {
    let source = include_str!("../config.rs");
    let mut text = HEAD.to_owned();
    write_table(&mut text, "", &settings(source, "ConfigToml"));
    text += "\n## `[metrics]`\n";
    write_table(&mut text, "metrics", &settings(source, "MetricsToml"));
    text += "\n## `[quota]`\n";
    text += QUOTAS;
    write_table(&mut text, "quota.uid.1000", &quota_settings());
    text
}

fn quota_settings() -> Vec<Setting> {
    settings(include_str!("quota.rs"), "QuotaToml")
}

fn write_table(text: &mut String, table: &str, settings: &[Setting]) {
    text.push_str("\n| key | type | default | meaning |\n|---|---|---|---|\n");
    for setting in settings {
        let Setting {
            name,
            kind,
            default,
            meaning,
            ..
        } = setting;
        let _ = writeln!(
            text,
            "| `{name}` | {} | {default} | {meaning} |",
            type_name(kind)
        );
    }
    text.push_str("\n```toml daemon\n");
    if !table.is_empty() {
        let _ = writeln!(text, "[{table}]");
    }
    for Setting { name, example, .. } in settings {
        let _ = writeln!(text, "{name} = {example}");
    }
    text.push_str("```\n");
}

/// Returns a reader's name for a Rust type.
fn type_name(kind: &str) -> &'static str {
    match kind {
        "PathBuf" => "path",
        "Vec<PathBuf>" => "list of paths",
        "Size" => "size",
        "String" => "text",
        "bool" => "true or false",
        "u32" => "whole number",
        "Rating" => "number, or list of numbers",
        other => panic!("no words for the type {other}"),
    }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("offloadd.toml"))
}

/// Adds a list of devices to settings that lack one.
fn with_devices(text: &str) -> String {
    match text.lines().any(|line| line.starts_with("devices")) {
        true => text.to_owned(),
        false => format!(
            "devices = [\"/mnt/nvme0/offloadd/tiles\", \"/mnt/nvme1/offloadd/tiles\"]\n{text}"
        ),
    }
}

#[test]
fn the_page_in_docs_is_current() {
    docs_test::assert_page("docs/daemon-configuration.md", &page());
}

#[test]
fn the_page_has_every_key_and_its_true_default() {
    let source = include_str!("../config.rs");
    let top = settings(source, "ConfigToml");
    let metrics = settings(source, "MetricsToml");
    let names = |settings: &[Setting]| -> Vec<String> {
        settings
            .iter()
            .map(|setting| setting.name.clone())
            .collect()
    };
    let tables = KEYS.len() - 2;
    assert_eq!(KEYS[tables..], ["metrics", "quota"]);
    assert_eq!(names(&top), KEYS[..tables]);
    assert_eq!(names(&metrics), METRICS_KEYS);
    let jobs = quota::KEYS.len() - 1;
    assert_eq!(quota::KEYS[jobs], "job");
    assert_eq!(names(&quota_settings()), quota::KEYS[..jobs]);
    let left_out = parse(&with_devices("")).unwrap();
    let mut compared = 0;
    for Setting { name, default, .. } in &top {
        if let Some(value) = default
            .strip_prefix('`')
            .and_then(|value| value.strip_suffix('`'))
        {
            let parsed = parse(&with_devices(&format!("{name} = {value}"))).unwrap();
            assert_eq!(parsed, left_out, "{name} = {value}");
            compared += 1;
        }
    }
    assert!(compared > 5, "{compared}");
}

#[test]
fn settings_in_the_documents_are_accepted() {
    let blocks = docs_test::blocks();
    let blocks = blocks.iter().filter(|block| block.tag == "daemon");
    let mut count = 0;
    for block in blocks {
        if let Err(error) = parse(&with_devices(&block.text)) {
            panic!("{}: {error}", block.place);
        }
        count += 1;
    }
    assert!(count > 3, "{count}");
}
