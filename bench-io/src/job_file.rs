//! fio's job files: sections of `key=value` lines, where `[global]` applies to all jobs.
//!
//! A key is an option of the command line, and is read as one.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use configparser::ini::{Ini, IniDefault};

use crate::job::JobOptions;

/// fio's section of keys that apply to every job.
const GLOBAL: &str = "global";

/// Keys and options of fio that change nothing here: one job is measured at a time, by threads, for its runtime, as one group.
const WITHOUT_EFFECT: [&str; 12] = [
    "description",
    "exitall",
    "fallocate",
    "group_reporting",
    "invalidate",
    "norandommap",
    "randrepeat",
    "refill_buffers",
    "stonewall",
    "thread",
    "time_based",
    "wait_for_previous",
];

/// Options of fio's command line in [`WITHOUT_EFFECT`]. They are accepted, so that a command line of fio works, and not
/// listed.
#[derive(Debug)]
pub(crate) struct IdleOptions(pub(crate) Vec<String>);

impl FromArgMatches for IdleOptions {
    fn from_arg_matches(found: &ArgMatches) -> clap::error::Result<Self> {
        let given = |key: &&str| found.value_source(key) == Some(ValueSource::CommandLine);
        let keys = WITHOUT_EFFECT.iter().filter(|key| given(key));
        Ok(Self(keys.map(|key| (*key).to_owned()).collect()))
    }

    fn update_from_arg_matches(&mut self, found: &ArgMatches) -> clap::error::Result<()> {
        *self = Self::from_arg_matches(found)?;
        Ok(())
    }
}

impl Args for IdleOptions {
    fn augment_args(command: Command) -> Command {
        let option = |key| {
            let option = Arg::new(key).long(key).hide(true);
            option.num_args(0..=1).require_equals(true)
        };
        command.args(WITHOUT_EFFECT.map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Keys whose values are lists, divided by colons.
const LISTS: [&str; 2] = ["filename", "directory"];

/// Reads the job `section`, or the only one, of the file at `path`, and its keys without effect.
///
/// # Errors
/// The file cannot be read, has not exactly one such job, or has an unknown key or a wrong value.
pub(crate) fn read(path: &Path, section: Option<&str>) -> Result<(JobOptions, Vec<String>)> {
    let text = std::fs::read_to_string(path);
    text.map_err(anyhow::Error::from)
        .and_then(|text| parse(&text, section))
        .with_context(|| format!("reading the job file {}", path.display()))
}

/// [`read`] for a file's text.
pub(crate) fn parse(text: &str, section: Option<&str>) -> Result<(JobOptions, Vec<String>)> {
    let mut defaults = IniDefault::default();
    defaults.case_sensitive = true;
    defaults.delimiters = vec!['='];
    let mut file = Ini::new_from_defaults(defaults);
    file.read(text.to_owned())
        .map_err(|error| anyhow!("{error}"))?;
    let mut sections = file.get_map().unwrap_or_default();
    let global = sections.remove(GLOBAL).unwrap_or_default();
    ensure!(
        !sections.contains_key("default"),
        "keys stand before the first section: write [{GLOBAL}] or [NAME] above them"
    );
    let mut names: Vec<&String> = sections.keys().collect();
    names.sort();
    let name = match (section, &names[..]) {
        (None, [one]) => (*one).clone(),
        (Some(one), _) if sections.contains_key(one) => one.to_owned(),
        (None, []) => bail!("no job: add a section [NAME]"),
        (None, _) => bail!("several jobs, {names:?}: choose one with --section"),
        (Some(one), _) => bail!("--section {one}: no such job; the file has {names:?}"),
    };
    let job = sections.remove(&name).unwrap_or_default();
    let mut keys = global;
    keys.entry("name".into()).or_insert(Some(name));
    keys.extend(job);
    let mut words = Vec::new();
    let mut idle = Vec::new();
    for (key, value) in keys {
        if WITHOUT_EFFECT.contains(&&*key) {
            idle.push(key);
            continue;
        }
        match value {
            // A switch that is on.
            None => words.push(format!("--{key}")),
            Some(value) if key == "overwrite" => {
                if !matches!(&*value, "0" | "false") {
                    words.push("--overwrite".into());
                }
            }
            Some(value) if LISTS.contains(&&*key) => {
                words.extend(value.split(':').map(|one| format!("--{key}={one}")));
            }
            Some(value) => words.push(format!("--{key}={value}")),
        }
    }
    idle.sort();
    let command = JobOptions::augment_args(Command::new("job").no_binary_name(true));
    let found = command
        .disable_help_flag(true)
        .try_get_matches_from(words)
        .map_err(in_words)?;
    Ok((JobOptions::from_arg_matches(&found)?, idle))
}

/// What is verified here, for whoever asks for fio's verification.
pub(crate) const VERIFY: &str = "with target=daemon every tile that is read is compared with its checksum, with target=device nothing is compared: leave it out";

/// Whether `key` is one of fio's keys of verification.
pub(crate) fn is_verify(key: &str) -> bool {
    key == "do_verify" || key.starts_with("verify")
}

/// Whether to suggest the key `meant` to whoever wrote `key`. A similar word must not lead anybody to destroy data.
pub(crate) fn may_suggest(key: &str, meant: &str) -> bool {
    meant != "overwrite" || key.starts_with("over")
}

/// An error of the command line's reader, told of a key.
fn in_words(error: clap::Error) -> anyhow::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.trim_start_matches('-').to_owned()),
        _ => None,
    };
    match (error.kind(), text(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(key)) => {
            let key = key.split('=').next().unwrap_or_default();
            if is_verify(key) {
                return anyhow!("{key}: {VERIFY}");
            }
            let meant = text(ContextKind::SuggestedArg)
                .filter(|meant| may_suggest(key, meant))
                .map(|key| format!("; did you mean `{key}`?"));
            let meant = meant.unwrap_or_else(|| {
                "; `bench-io run --help` lists the keys, leave this one out".into()
            });
            anyhow!("unknown key `{key}`{meant}")
        }
        _ => {
            let said = error.to_string();
            let said = said.split("\n\n").next().unwrap_or_default();
            anyhow!(
                "{}",
                said.trim_start_matches("error: ")
                    .trim()
                    .replace("'--", "'")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Access, Place};

    const FILE: &str = "; comment
[global]
bs=1m
direct=1
group_reporting
runtime=30s
directory=/a:/b

[first]
rw=randread
iodepth=64

[second]
rw=write
bs=64k
";

    #[test]
    fn global_keys_apply_to_each_job_and_a_jobs_own_come_first() {
        let (first, idle) = parse(FILE, Some("first")).unwrap();
        let first = first.check().unwrap();
        assert_eq!(
            (first.rw, first.bs, first.iodepth),
            (Access::RandRead, 1 << 20, 64)
        );
        assert_eq!(
            (first.name.as_deref(), first.runtime.as_secs()),
            (Some("first"), 30)
        );
        assert_eq!(first.place, Place::Private(vec!["/a".into(), "/b".into()]));
        assert_eq!(idle, ["group_reporting"]);
        let (second, _) = parse(FILE, Some("second")).unwrap();
        let second = second.check().unwrap();
        assert_eq!((second.rw, second.bs), (Access::Write, 64 << 10));
    }

    #[test]
    fn one_job_needs_no_name_and_of_several_one_must_be_chosen() {
        assert!(parse("[only]\nrw=read", None).is_ok());
        for (text, section, message) in [
            (
                FILE,
                None,
                "several jobs, [\"first\", \"second\"]: choose one with --section",
            ),
            (FILE, Some("third"), "--section third: no such job"),
            ("[global]\nbs=1m", None, "no job: add a section"),
            ("bs=1m\n[job]\nrw=read", None, "before the first section"),
            (
                "[job]\nblocksiz=4096",
                None,
                "unknown key `blocksiz`; did you mean `blocksize`?",
            ),
            ("[job]\nbs=many", None, "`many`"),
            (
                "[job]\nrw=backwards",
                None,
                "invalid value 'backwards' for 'rw <RW>'",
            ),
        ] {
            let error = parse(text, section).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
