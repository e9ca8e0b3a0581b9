//! Reports: figures with the machine and devices they were measured on, and warnings.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use offload_support::{console, outln};
use serde::Serialize;

use crate::figures::Figures;
use crate::job::Job;
use crate::prepared::PreparedTarget;

mod about;
pub(crate) mod warnings;

pub(crate) use about::{About, DeviceReport};

/// Version of the JSON report; raised when a field changes its name or meaning.
const REPORT_VERSION: u32 = 7;

/// Prints a report as text or as one line of JSON.
///
/// # Errors
/// Output was lost for another reason than a closed reader.
pub(crate) fn print<R: fmt::Display + Serialize>(report: &R, json: bool) -> Result<()> {
    match json {
        true => outln!("{}", serde_json::to_string(report)?),
        false => console::out(format_args!("{report}")),
    }
    Ok(console::finish()?)
}

/// Writes `NAME.json` in `dir`: a report, with lines for a picture of it (`trainer/bench/io/draw.py`), which say how it was measured.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn leave<R: Serialize>(
    dir: &Path,
    name: &str,
    description: Vec<String>,
    report: &R,
) -> Result<()> {
    #[derive(Serialize)]
    struct DescribedReport<'a, R> {
        #[serde(flatten)]
        report: &'a R,
        description: Vec<String>,
    }
    let text = serde_json::to_string_pretty(&DescribedReport {
        report,
        description,
    })?;
    let path = dir.join(name).with_extension("json");
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) about: About<SettingsReport>,
    pub(crate) target: &'static str,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

/// The job, in fio's terms.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SettingsReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) rw: &'static str,
    pub(crate) bs: u32,
    pub(crate) iodepth: u32,
    pub(crate) numjobs: u32,
    pub(crate) runtime: f64,
    pub(crate) ramp_time: f64,
    pub(crate) ioengine: String,
    pub(crate) size: u64,
    pub(crate) direct: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rwmixread: Option<u32>,
}

impl SettingsReport {
    /// The settings of `job` with their effective values.
    pub(crate) fn new(job: &Job, prepared: &PreparedTarget) -> Self {
        Self {
            name: job.name.clone(),
            rw: job.rw.word(),
            bs: job.bs,
            // Several files share the depth equally, at least one operation each.
            iodepth: prepared.plan.depth,
            numjobs: job.numjobs,
            runtime: job.runtime.as_secs_f64(),
            ramp_time: job.ramp.as_secs_f64(),
            ioengine: job.engine_word.clone(),
            size: prepared.size,
            direct: job.direct,
            rwmixread: (job.rw.reads() && job.rw.writes()).then_some(job.read_percent),
        }
    }
}

/// Formats the settings as fio's options.
impl fmt::Display for SettingsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rw={} bs={} iodepth={} numjobs={}",
            self.rw, self.bs, self.iodepth, self.numjobs
        )?;
        if let Some(percent) = self.rwmixread {
            write!(f, " rwmixread={percent}")?;
        }
        write!(
            f,
            " size={} direct={} ioengine={} ramp_time={} runtime={}",
            self.size,
            u8::from(self.direct),
            self.ioengine,
            self.ramp_time,
            self.runtime
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.about.settings;
        if let Some(name) = &settings.name {
            writeln!(f, "{name}:")?;
        }
        write!(f, "{}", self.figures)?;
        writeln!(
            f,
            "\ntarget={} {settings}; {:.2} s, engine {}",
            self.target, self.figures.seconds, self.figures.engine
        )?;
        write!(f, "{}", self.about)
    }
}
