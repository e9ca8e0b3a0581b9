//! The keys of the settings file, and suggestions for unknown ones.

use super::quota;

/// Keys at the top of the file.
pub(super) const KEYS: [&str; 11] = [
    "socket",
    "devices",
    "arena_bytes_max",
    "engine",
    "require_locked",
    "sessions_max",
    "iodepth_max",
    "scrub_bytes_per_s_max",
    "rebalance_bytes_per_s_max",
    "metrics",
    "quota",
];

/// Keys of `[metrics]`.
pub(super) const METRICS_KEYS: [&str; 1] = ["listen"];

/// Finds the first key that is no setting: its section, the key, and the end of the error message.
pub(super) fn unknown_key(file: &toml::Table) -> Option<(String, String, String)> {
    sections(file)
        .into_iter()
        .find_map(|(section, table, known)| {
            let key = table.keys().find(|key| !known.contains(&key.as_str()))?;
            let hint = match nearest_key(key, known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known keys: {}", known.join(", ")),
            };
            let section = match section.as_str() {
                "" => section,
                name => format!("[{name}]: "),
            };
            Some((section, key.clone(), hint))
        })
}

/// The tables of the file, each with its name and the keys it may have.
fn sections(file: &toml::Table) -> Vec<(String, &toml::Table, &'static [&'static str])> {
    fn tables<'a>(
        parent: &'a toml::Table,
        name: &str,
    ) -> impl Iterator<Item = (&'a String, &'a toml::Table)> {
        let table = parent.get(name).and_then(toml::Value::as_table);
        let entries = table.into_iter().flatten();
        entries.filter_map(|(name, value)| Some((name, value.as_table()?)))
    }
    let mut sections = vec![(String::new(), file, &KEYS[..])];
    let top = |name: &str| file.get(name).and_then(toml::Value::as_table);
    sections.extend(top("metrics").map(|table| ("metrics".to_owned(), table, &METRICS_KEYS[..])));
    sections.extend(top("quota").map(|table| ("quota".to_owned(), table, &quota::SECTIONS[..])));
    for (name, table) in tables(file, "quota").filter(|(name, _)| *name != "uid") {
        sections.push((format!("quota.{name}"), table, &quota::KEYS));
    }
    for (uid, user) in top("quota")
        .into_iter()
        .flat_map(|quota| tables(quota, "uid"))
    {
        sections.push((format!("quota.uid.{uid}"), user, &quota::KEYS));
        for (job, table) in tables(user, "job") {
            sections.push((format!("quota.uid.{uid}.job.{job}"), table, &quota::KEYS));
        }
    }
    sections
}

/// Returns the known key that is most similar to `key`, if one is similar enough to be meant.
fn nearest_key<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|known| (strsim::normalized_damerau_levenshtein(key, known), *known))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(similarity, _)| *similarity >= 0.5)
        .map(|(_, known)| known)
}
