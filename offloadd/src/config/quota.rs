//! The sections `[quota.default]`, `[quota.uid.1000]`, `[quota.job]` and `[quota.uid.1000.job.llama]` of the settings.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Size;
use crate::quota::{Quota, Quotas, WEIGHT_MAX};
use crate::store::definition::JobName;

/// Keys of `[quota]`.
pub(super) const SECTIONS: [&str; 3] = ["default", "job", "uid"];

/// Keys of `[quota.default]` and of every other quota; `job` only of a user's.
pub(super) const KEYS: [&str; 7] = [
    "host_bytes_max",
    "device_bytes_max",
    "jobs_max",
    "sessions_max",
    "inflight_max",
    "weight",
    "job",
];

#[derive(Debug, Default, Deserialize)]
pub(super) struct QuotasToml {
    #[serde(default)]
    default: QuotaToml,
    #[serde(default)]
    job: QuotaToml,
    /// By user ID; the keys of a TOML table are strings.
    #[serde(default)]
    uid: BTreeMap<String, QuotaToml>,
}

#[derive(Debug, Default, Deserialize)]
struct QuotaToml {
    /// Most pinned host memory of the sessions together.
    ///
    /// Default: no limit. Example: `"32GiB"`.
    host_bytes_max: Option<Size>,
    /// Most space on the devices that the jobs' tiles reserve together.
    ///
    /// Default: no limit. Example: `"2TiB"`.
    device_bytes_max: Option<Size>,
    /// Most jobs in the store, open or not. For users only; a store has places for 1,024 jobs of all users.
    ///
    /// Default: `256`. Example: `32`.
    jobs_max: Option<u32>,
    /// Most sessions at a time.
    ///
    /// Default: of a user, half of the daemon's `sessions_max`; of a job, no limit. Example: `8`.
    sessions_max: Option<u32>,
    /// Most operations in flight of all sessions together.
    ///
    /// Default: no limit. Example: `256`.
    inflight_max: Option<u32>,
    /// Bandwidth of a drive relative to the other users, or to the user's other jobs, while several want more than it gives; 1 to 10000.
    ///
    /// Default: `100`. Example: `300`.
    weight: Option<u32>,
    /// Quotas of a user's jobs, by the job's name or its run's.
    #[serde(default)]
    job: BTreeMap<String, QuotaToml>,
}

impl QuotasToml {
    pub(super) fn check(&self) -> Result<Quotas, String> {
        let mut uids = BTreeMap::new();
        let mut jobs = BTreeMap::new();
        for (word, quota) in &self.uid {
            let uid = (word.parse())
                .map_err(|_| format!("uid.{word}: expected a user ID, as in [quota.uid.1000]"))?;
            let name = format!("uid.{word}");
            if uids.insert(uid, quota.check(&name)?).is_some() {
                return Err(format!("{name}: uid {uid} already has a quota"));
            }
            let own = quota.check_jobs(&name)?;
            if !own.is_empty() {
                jobs.insert(uid, own);
            }
        }
        for (name, quota) in [("default", &self.default), ("job", &self.job)] {
            quota.check_has_no_jobs(name)?;
        }
        Ok(Quotas {
            default: self.default.check("default")?,
            job: self.job.check_job("job")?,
            uids,
            jobs,
        })
    }
}

impl QuotaToml {
    fn check(&self, name: &str) -> Result<Quota, String> {
        let size = |key: &str, size: &Option<Size>| {
            let bytes = size.as_ref().map(Size::bytes).transpose();
            bytes.map_err(|message| format!("{name}.{key}: {message}"))
        };
        if let Some(weight) = self.weight
            && !(1..=WEIGHT_MAX).contains(&weight)
        {
            return Err(format!(
                "{name}.weight: {weight} is not from 1 to {WEIGHT_MAX}"
            ));
        }
        Ok(Quota {
            host_bytes_max: size("host_bytes_max", &self.host_bytes_max)?,
            device_bytes_max: size("device_bytes_max", &self.device_bytes_max)?,
            jobs_max: self.jobs_max,
            sessions_max: self.sessions_max,
            inflight_max: self.inflight_max,
            weight: self.weight,
        })
    }

    /// Checks the quota of a job, for which `jobs_max` means nothing.
    fn check_job(&self, name: &str) -> Result<Quota, String> {
        match self.jobs_max {
            Some(_) => Err(format!(
                "{name}.jobs_max: applies to users only; set it in [quota.default] or [quota.uid.1000]"
            )),
            None => self.check(name),
        }
    }

    fn check_jobs(&self, name: &str) -> Result<BTreeMap<JobName, Quota>, String> {
        let jobs = self.job.iter().map(|(word, quota)| {
            let name = format!("{name}.job.{word}");
            let job = JobName::new(word.as_str())
                .map_err(|fault| format!("{name}: {}", fault.message))?;
            quota.check_has_no_jobs(&name)?;
            Ok((job, quota.check_job(&name)?))
        });
        jobs.collect()
    }

    fn check_has_no_jobs(&self, name: &str) -> Result<(), String> {
        match self.job.keys().next() {
            Some(job) => Err(format!(
                "{name}.job: a job belongs to one user; use [quota.uid.1000.job.{job:?}]"
            )),
            None => Ok(()),
        }
    }
}

/// Formats quotas as TOML that parses to the same quotas; empty if there are none.
pub(super) fn to_toml(quotas: &Quotas) -> String {
    let table = |name: &str, quota: &Quota| {
        let Quota {
            host_bytes_max,
            device_bytes_max,
            jobs_max,
            sessions_max,
            inflight_max,
            weight,
        } = *quota;
        let line = |key: &str, value: Option<u64>| {
            value.map_or_else(String::new, |value| format!("{key} = {value}\n"))
        };
        let lines = [
            line("host_bytes_max", host_bytes_max),
            line("device_bytes_max", device_bytes_max),
            line("jobs_max", jobs_max.map(u64::from)),
            line("sessions_max", sessions_max.map(u64::from)),
            line("inflight_max", inflight_max.map(u64::from)),
            line("weight", weight.map(u64::from)),
        ]
        .concat();
        match lines.is_empty() {
            true => lines,
            false => format!("[quota.{name}]\n{lines}"),
        }
    };
    let uids = quotas.uids.iter();
    let uids = uids.map(|(uid, quota)| table(&format!("uid.{uid}"), quota));
    let jobs = quotas.jobs.iter().flat_map(|(uid, jobs)| {
        let names = jobs.iter();
        // Quoted, because a name may contain dots.
        names.map(move |(job, quota)| (format!("uid.{uid}.job.\"{job}\""), quota))
    });
    let jobs = jobs.map(|(name, quota)| table(&name, quota));
    let both = [table("default", &quotas.default), table("job", &quotas.job)];
    both.into_iter().chain(uids).chain(jobs).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn parse(quotas: &str) -> Result<Quotas, String> {
        let text =
            format!("socket = \"/s\"\ndevices = [\"/d\"]\narena_bytes_max = \"1GiB\"\n{quotas}");
        let config = Config::parse(&text, Path::new("offloadd.toml"));
        config
            .map(|config| config.quotas)
            .map_err(|error| error.to_string())
    }

    const WHOLE: &str = "[quota.default]\nhost_bytes_max = \"4GiB\"\nsessions_max = 8\n[quota.job]\ninflight_max = 16\nweight = 50\n\
                         [quota.uid.1000]\nhost_bytes_max = \"8GiB\"\ndevice_bytes_max = 4096\njobs_max = 3\nweight = 300\n\
                         [quota.uid.1000.job.\"llama.7b\"]\nweight = 200\nsessions_max = 2\n";

    #[test]
    fn a_users_own_quota_overrides_the_default_key_by_key() {
        let quotas = parse(WHOLE).unwrap();
        assert_eq!(quotas.for_user(7).host_bytes_max, Some(4 << 30));
        let own = quotas.for_user(1000);
        assert_eq!(
            (own.host_bytes_max, own.device_bytes_max),
            (Some(8 << 30), Some(4096))
        );
        assert_eq!((own.sessions_max, own.weight), (Some(8), Some(300)));
        assert_eq!((own.jobs_max, quotas.for_user(7).jobs_max), (Some(3), None));
        let job = |uid, name| quotas.of_job(uid, &JobName::new(name).unwrap());
        let own = job(1000, "llama.7b");
        assert_eq!(
            (own.weight, own.sessions_max, own.inflight_max),
            (Some(200), Some(2), Some(16))
        );
        // The name of a run applies to its job, whose name ends with random digits.
        assert_eq!(job(1000, "llama-7b-1dad8fd8bc5ae5a4"), own);
        assert_eq!(job(1000, "llama-7b-1dad8fd8bc5ae5a4-node3"), own);
        let others = [
            job(1000, "llama"),
            job(7, "llama.7b"),
            job(1000, "llama.7b-2"),
            job(1000, "llama-7b-1dad8fd8bc5ae5ag"),
            job(1000, "old-llama-7b-1dad8fd8bc5ae5a4"),
        ];
        for other in others {
            assert_eq!(other, quotas.job);
            assert_eq!((other.weight, other.inflight_max), (Some(50), Some(16)));
        }
        assert_eq!(parse("").unwrap(), Quotas::default());
    }

    #[test]
    fn quotas_are_printed_as_they_are_read() {
        let quotas = parse(WHOLE).unwrap();
        assert_eq!(parse(&to_toml(&quotas)).unwrap(), quotas);
        assert_eq!(to_toml(&Quotas::default()), "");
    }

    #[test]
    fn invalid_quotas_are_refused_by_name() {
        for (text, expected) in [
            (
                "[quota.uid.alice]\nsessions_max = 1",
                "uid.alice: expected a user ID",
            ),
            ("[quota.uid.-1]\nsessions_max = 1", "uid.-1"),
            (
                "[quota.default]\nhost_bytes = 1",
                "[quota.default]: unknown key `host_bytes`; did you mean `host_bytes_max`?",
            ),
            (
                "[quota.defaults]\nsessions_max = 1",
                "[quota]: unknown key `defaults`; did you mean `default`?",
            ),
            (
                "[quota.uid.1]\nhost_bytes_max = \"1Gb\"",
                "uid.1.host_bytes_max",
            ),
            ("[quota.uid.1]\nsessions_max = -1", "sessions_max"),
            (
                "[quota.uid.1]\nweight = 0",
                "uid.1.weight: 0 is not from 1 to 10000",
            ),
            ("[quota.default]\nweight = 10001", "default.weight: 10001"),
            (
                "[quota.job]\njobs_max = 1",
                "job.jobs_max: applies to users only",
            ),
            (
                "[quota.uid.1.job.x]\njobs_max = 1",
                "uid.1.job.x.jobs_max: applies to users only",
            ),
            ("[quota.job]\nweight = 0", "job.weight: 0 is not from 1 to"),
            (
                "[quota.uid.1.job.x]\nweight = 10001",
                "uid.1.job.x.weight: 10001",
            ),
            (
                "[quota.uid.1.job.x]\nweigth = 1",
                "[quota.uid.1.job.x]: unknown key `weigth`; did you mean `weight`?",
            ),
            (
                "[quota.uid.1.job.\"a b\"]\nweight = 1",
                "uid.1.job.a b: job name \"a b\"",
            ),
            (
                "[quota.default.job.x]\nweight = 1",
                "default.job: a job belongs to one user; use [quota.uid.1000.job.\"x\"]",
            ),
            (
                "[quota.job.job.x]\nweight = 1",
                "job.job: a job belongs to one",
            ),
            (
                "[quota.uid.1.job.x.job.y]\nweight = 1",
                "uid.1.job.x.job: a job belongs to one user",
            ),
            (
                "[quota.uid.1]\nweight = 1\n[quota.uid.01]\nweight = 2",
                "uid 1 already has a quota",
            ),
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
