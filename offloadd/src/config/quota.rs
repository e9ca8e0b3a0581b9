//! `[quota.default]`, `[quota.uid.1000]`, `[quota.job]` and `[quota.uid.1000.job.llama]` of the settings.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Size;
use crate::quota::{Quota, Quotas, SHARE_MAX};
use crate::store::definition::JobName;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QuotasToml {
    #[serde(default)]
    default: QuotaToml,
    #[serde(default)]
    job: QuotaToml,
    /// Keys of a TOML table are words.
    #[serde(default)]
    uid: BTreeMap<String, QuotaToml>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// Default: no limit. Example: `8`.
    sessions_max: Option<u32>,
    /// Most operations in flight of all sessions together.
    ///
    /// Default: no limit. Example: `256`.
    inflight_max: Option<u32>,
    /// Bandwidth of a drive relative to the other users, or to the user's other jobs, while several want more than it gives; 1 to 10000.
    ///
    /// Default: `100`. Example: `300`.
    share: Option<u32>,
    /// Of a user: his jobs' own, by name.
    #[serde(default)]
    job: BTreeMap<String, QuotaToml>,
}

impl QuotasToml {
    pub(super) fn check(&self) -> Result<Quotas, String> {
        let mut uids = BTreeMap::new();
        let mut jobs = BTreeMap::new();
        for (word, quota) in &self.uid {
            let uid = (word.parse())
                .map_err(|_| format!("uid.{word}: a user's number, like [quota.uid.1000]"))?;
            let name = format!("uid.{word}");
            if uids.insert(uid, quota.check(&name)?).is_some() {
                return Err(format!("{name}: uid {uid} has a quota already"));
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
        if let Some(share) = self.share
            && !(1..=SHARE_MAX).contains(&share)
        {
            return Err(format!("{name}.share: {share}; from 1 to {SHARE_MAX}"));
        }
        Ok(Quota {
            host_bytes_max: size("host_bytes_max", &self.host_bytes_max)?,
            device_bytes_max: size("device_bytes_max", &self.device_bytes_max)?,
            jobs_max: self.jobs_max,
            sessions_max: self.sessions_max,
            inflight_max: self.inflight_max,
            share: self.share,
        })
    }

    /// Of a job, which has no jobs.
    fn check_job(&self, name: &str) -> Result<Quota, String> {
        match self.jobs_max {
            Some(_) => Err(format!(
                "{name}.jobs_max: jobs are a user's: set it in [quota.default] or [quota.uid.1000]"
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
                "{name}.job: a job is one user's: [quota.uid.1000.job.{job:?}]"
            )),
            None => Ok(()),
        }
    }
}

/// As they would be read again; nothing where there are none.
pub fn words(quotas: &Quotas) -> String {
    let table = |name: &str, quota: &Quota| {
        let Quota {
            host_bytes_max,
            device_bytes_max,
            jobs_max,
            sessions_max,
            inflight_max,
            share,
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
            line("share", share.map(u64::from)),
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
        // A name may have dots.
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

    const WHOLE: &str = "[quota.default]\nhost_bytes_max = \"4GiB\"\nsessions_max = 8\n[quota.job]\ninflight_max = 16\nshare = 50\n\
                         [quota.uid.1000]\nhost_bytes_max = \"8GiB\"\ndevice_bytes_max = 4096\njobs_max = 3\nshare = 300\n\
                         [quota.uid.1000.job.\"llama.7b\"]\nshare = 200\nsessions_max = 2\n";

    #[test]
    fn a_users_own_quota_goes_before_the_default_key_by_key() {
        let quotas = parse(WHOLE).unwrap();
        assert_eq!(quotas.of(7).host_bytes_max, Some(4 << 30));
        let own = quotas.of(1000);
        assert_eq!(
            (own.host_bytes_max, own.device_bytes_max),
            (Some(8 << 30), Some(4096))
        );
        assert_eq!((own.sessions_max, own.share), (Some(8), Some(300)));
        assert_eq!((own.jobs_max, quotas.of(7).jobs_max), (Some(3), None));
        let job = |uid, name| quotas.of_job(uid, &JobName::new(name).unwrap());
        let own = job(1000, "llama.7b");
        assert_eq!(
            (own.share, own.sessions_max, own.inflight_max),
            (Some(200), Some(2), Some(16))
        );
        for other in [job(1000, "llama"), job(7, "llama.7b")] {
            assert_eq!(other, quotas.job);
            assert_eq!((other.share, other.inflight_max), (Some(50), Some(16)));
        }
        assert_eq!(parse("").unwrap(), Quotas::default());
    }

    #[test]
    fn they_are_printed_as_they_are_read() {
        let quotas = parse(WHOLE).unwrap();
        assert_eq!(parse(&words(&quotas)).unwrap(), quotas);
        assert_eq!(words(&Quotas::default()), "");
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        for (text, said) in [
            (
                "[quota.uid.alice]\nsessions_max = 1",
                "uid.alice: a user's number",
            ),
            ("[quota.uid.-1]\nsessions_max = 1", "uid.-1"),
            (
                "[quota.default]\nhost_bytes = 1",
                "unknown field `host_bytes`",
            ),
            (
                "[quota.defaults]\nsessions_max = 1",
                "unknown field `defaults`",
            ),
            (
                "[quota.uid.1]\nhost_bytes_max = \"1Gb\"",
                "uid.1.host_bytes_max",
            ),
            ("[quota.uid.1]\nsessions_max = -1", "sessions_max"),
            (
                "[quota.uid.1]\nshare = 0",
                "uid.1.share: 0; from 1 to 10000",
            ),
            ("[quota.default]\nshare = 10001", "default.share: 10001"),
            (
                "[quota.job]\njobs_max = 1",
                "job.jobs_max: jobs are a user's",
            ),
            (
                "[quota.uid.1.job.x]\njobs_max = 1",
                "uid.1.job.x.jobs_max: jobs are a user's",
            ),
            ("[quota.job]\nshare = 0", "job.share: 0; from 1 to"),
            (
                "[quota.uid.1.job.x]\nshare = 10001",
                "uid.1.job.x.share: 10001",
            ),
            ("[quota.uid.1.job.x]\nshares = 1", "unknown field `shares`"),
            (
                "[quota.uid.1.job.\"a b\"]\nshare = 1",
                "uid.1.job.a b: job name \"a b\"",
            ),
            (
                "[quota.default.job.x]\nshare = 1",
                "default.job: a job is one user's: [quota.uid.1000.job.\"x\"]",
            ),
            ("[quota.job.job.x]\nshare = 1", "job.job: a job is one"),
            (
                "[quota.uid.1.job.x.job.y]\nshare = 1",
                "uid.1.job.x.job: a job is one user's",
            ),
            (
                "[quota.uid.1]\nshare = 1\n[quota.uid.01]\nshare = 2",
                "uid 1 has a quota already",
            ),
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.contains(said), "{text}: {message}");
        }
    }
}
