//! Lists the runs below a directory: their progress, the place of their state, and the checkpoints they can
//! return to. Only reads files, so a run in training is not disturbed.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use offload_support::paths::Word;
use offload_support::units::{ApproxBytes, CountOf};
use serde::{Serialize, Serializer};

use crate::evaluations::Evaluations;
use crate::model::ModelConfig;
use training_state::metrics::MetricsFile;
use training_state::run::{
    Checkpoint, CheckpointDir, Checkpoints, RunDescription, RunDir, RunId, STORE_IN_DIR,
    STORE_IN_PLACE,
};
use training_state::store::{is_package_run, job_of, link_of};

pub use training_settings::SETTINGS_FILE;

/// Version of the list's JSON format; raised when a field changes its name or meaning.
const LIST_VERSION: u32 = 1;

/// Levels of directories below the given one in which runs are searched for.
const DEPTH_MAX: u32 = 3;

/// Largest number of directories that are searched.
const DIRS_MAX: usize = 10_000;

/// Runs and orphaned files found.
#[derive(Clone, Debug, Serialize)]
pub struct RunsList {
    version: u32,
    pub runs: Vec<RunEntry>,
    /// Directories in the given one that contain no run.
    #[serde(serialize_with = "path_texts")]
    pub no_runs: Vec<PathBuf>,
    /// Directories with the tokens of runs that were never started, as `trainer preview-data` leaves them.
    pub previews: Vec<Preview>,
    /// Files of private stores whose run is gone, in the searched directories and in those that the runs use.
    pub orphans: Vec<Orphan>,
}

/// Directory with nothing but tokens.
#[derive(Clone, Debug, Serialize)]
pub struct Preview {
    #[serde(serialize_with = "path_text")]
    pub dir: PathBuf,
    pub bytes: u64,
}

/// File of a private store that no run uses.
#[derive(Clone, Debug, Serialize)]
pub struct Orphan {
    #[serde(serialize_with = "path_text")]
    pub file: PathBuf,
    pub bytes: u64,
    /// Directory of its run when the run used the file, if known.
    #[serde(serialize_with = "known_path_text")]
    pub run: Option<PathBuf>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct RunEntry {
    #[serde(serialize_with = "path_text")]
    pub dir: PathBuf,
    /// Name of the run's job in a store.
    pub job: Option<String>,
    /// The run and the node if this is another node's part of a run, as text.
    pub part: Option<String>,
    /// Reason why the run cannot be read.
    pub damaged: Option<String>,
    pub parameters: Option<u64>,
    pub layers: Option<u64>,
    pub hidden_size: Option<u64>,
    pub dtype: Option<String>,
    /// Step of the newest line of metrics; the committed state may be one step older.
    pub step: u64,
    /// Steps of the whole run, as the newest start had them.
    pub steps: Option<u64>,
    /// Whether early stopping ended the run before its last step.
    pub early_stopped: bool,
    /// Whether a trainer is working in the directory.
    pub running: bool,
    /// Bytes of the run directory and of the private store.
    pub bytes: u64,
    pub loss: Option<f64>,
    /// Newest evaluation.
    pub evaluation: Option<Evaluation>,
    /// Evaluation with the lowest loss.
    pub best_evaluation: Option<Evaluation>,
    /// Step at which a run resumes that keeps its state in checkpoints; `None` if it has none, or a store.
    pub kept_step: Option<u64>,
    /// Steps from one commit to the next of a run that has a store, as the newest start had them.
    pub commit_every: Option<u64>,
    /// Place of the state.
    pub store: Option<String>,
    /// Bytes of the private store on drives.
    pub store_bytes: u64,
    /// Files of the private store.
    #[serde(skip)]
    store_dirs: Vec<PathBuf>,
    /// Files of the private store that are missing.
    #[serde(serialize_with = "path_texts")]
    pub store_missing: Vec<PathBuf>,
    /// Checkpoints, oldest first.
    pub checkpoints: Vec<CheckpointEntry>,
    /// Checkpoints that were moved aside.
    pub aside: Vec<CheckpointEntry>,
}

/// An evaluation on the validation data.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Evaluation {
    pub step: u64,
    pub loss: f64,
}

impl Evaluation {
    fn from_step_and_loss((step, loss): (u64, f64)) -> Self {
        Self { step, loss }
    }
}

/// One checkpoint of a run.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointEntry {
    pub step: u64,
    #[serde(serialize_with = "path_text")]
    pub dir: PathBuf,
    /// Damage found from its description and the sizes of its files.
    pub damaged: Option<String>,
    pub bytes: u64,
    /// Creation time in seconds since 1970.
    pub unix_s: u64,
    pub loss: Option<f64>,
    /// Loss of the evaluation after its step.
    pub validation_loss: Option<f64>,
}

/// Lists the runs in `dir` and below it.
///
/// # Errors
/// The directory cannot be read.
pub fn list(dir: &Path) -> std::io::Result<RunsList> {
    let mut list = RunsList {
        version: LIST_VERSION,
        runs: Vec::new(),
        no_runs: Vec::new(),
        previews: Vec::new(),
        orphans: Vec::new(),
    };
    let mut left = DIRS_MAX;
    let mut looked = vec![dir.to_owned()];
    fs::read_dir(dir)?;
    if !add_run(dir, &mut list.runs) {
        for below in dirs_in(dir)? {
            let before = list.runs.len();
            look_below(
                &below,
                DEPTH_MAX - 1,
                &mut left,
                &mut list.runs,
                &mut looked,
            );
            if list.runs.len() == before {
                list.no_runs.push(below);
            }
        }
    }
    list.runs.sort_by(|a, b| a.dir.cmp(&b.dir));
    looked.extend(list.runs.iter().flat_map(|run| run.store_dirs.clone()));
    let previews = looked.iter().filter(|dir| RunDir::has_only_tokens(dir));
    let previews = previews.map(|dir| Preview {
        dir: dir.clone(),
        bytes: dir_bytes(dir, DEPTH_MAX),
    });
    list.previews = previews.collect();
    list.orphans = orphans(looked, &list.runs);
    Ok(list)
}

/// Returns store files in `dirs` that belong neither to one of `runs` nor to the run that the link beside
/// them points to.
fn orphans(dirs: Vec<PathBuf>, runs: &[RunEntry]) -> Vec<Orphan> {
    let dirs = dirs.iter().filter_map(|dir| fs::canonicalize(dir).ok());
    let dirs: BTreeSet<PathBuf> = dirs.collect();
    let files = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok());
    let files = files.flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut orphans: Vec<Orphan> = files.filter_map(|file| orphan(&file, runs)).collect();
    orphans.sort_by(|a, b| a.file.cmp(&b.file));
    orphans
}

/// Describes `file` if it is a store file that belongs neither to one of `runs` nor to the run that the link
/// beside it points to.
pub(crate) fn orphan(file: &Path, runs: &[RunEntry]) -> Option<Orphan> {
    let job = job_of(file.file_name()?.to_str()?)?;
    let run = fs::read_link(link_of(file)).ok();
    let uses_it = |dir: &PathBuf| {
        RunId::kept(dir).is_some_and(|id| id.job == job) || is_package_run(dir, job)
    };
    let known = runs.iter().any(|entry| entry.job.as_deref() == Some(job));
    if known || run.as_ref().is_some_and(uses_it) {
        return None;
    }
    let bytes = fs::metadata(file).map_or(0, |found| found.len());
    Some(Orphan {
        file: file.to_owned(),
        bytes,
        run,
    })
}

/// Adds `dir` if it contains a run. Directories below a run are not searched.
fn add_run(dir: &Path, runs: &mut Vec<RunEntry>) -> bool {
    match RunDir::described(dir) {
        Ok(None) => return false,
        Ok(Some(description)) => runs.push(RunEntry::from_description(dir, &description)),
        Err(error) => runs.push(RunEntry::damaged(dir, error.to_string())),
    }
    true
}

fn look_below(
    dir: &Path,
    depth: u32,
    left: &mut usize,
    runs: &mut Vec<RunEntry>,
    looked: &mut Vec<PathBuf>,
) {
    if *left == 0 || add_run(dir, runs) {
        return;
    }
    looked.push(dir.to_owned());
    if depth == 0 {
        return;
    }
    // An unreadable directory counts as empty.
    for below in dirs_in(dir).unwrap_or_default() {
        *left = left.saturating_sub(1);
        look_below(&below, depth - 1, left, runs, looked);
    }
}

/// Returns the directories in `dir` by name, without links and hidden ones.
fn dirs_in(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir)?.filter_map(Result::ok);
    let mut dirs: Vec<PathBuf> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .map(|entry| entry.path())
        .collect();
    dirs.sort();
    Ok(dirs)
}

impl RunEntry {
    fn damaged(dir: &Path, why: String) -> Self {
        let job = RunId::kept(dir).map(|id| id.job);
        Self {
            dir: dir.to_owned(),
            part: part_of(job.as_deref()),
            job,
            store_dirs: Vec::new(),
            damaged: Some(why),
            parameters: None,
            layers: None,
            hidden_size: None,
            dtype: None,
            step: 0,
            steps: None,
            early_stopped: false,
            running: false,
            bytes: dir_bytes(dir, DEPTH_MAX),
            loss: None,
            evaluation: None,
            best_evaluation: None,
            kept_step: None,
            commit_every: None,
            store: None,
            store_bytes: 0,
            store_missing: Vec::new(),
            checkpoints: Vec::new(),
            aside: Vec::new(),
        }
    }

    fn from_description(dir: &Path, description: &RunDescription) -> Self {
        let (layout, files) = (&description.layout, &description.files);
        let model: Option<ModelConfig> = serde_json::from_value(layout["model"].clone()).ok();
        let last = MetricsFile::last(dir);
        let bytes_of = |file: &PathBuf| fs::metadata(file).map(|file| file.len());
        let checkpoints = Checkpoints::in_run_dir(dir);
        let evaluations = MetricsFile::evaluations(dir, None);
        let entries = |checkpoints: Vec<CheckpointDir>| {
            let entries = checkpoints.into_iter();
            let entries =
                entries.map(|found| CheckpointEntry::from_checkpoint(found, &evaluations));
            entries.collect::<Vec<_>>()
        };
        let checkpoints_made = entries(checkpoints.list().unwrap_or_default());
        let in_dir = description.store == STORE_IN_DIR;
        let kept_step = (checkpoints_made.iter().rev())
            .find(|found| in_dir && found.damaged.is_none())
            .map(|found| found.step);
        let job = RunId::kept(dir).map(|id| id.job);
        let settings = fs::read_to_string(dir.join(SETTINGS_FILE)).unwrap_or_default();
        let patience = setting(&settings, "train.early_stopping_patience").unwrap_or(0);
        Self {
            dir: dir.to_owned(),
            part: part_of(job.as_deref()),
            job,
            store_dirs: (files.iter().filter_map(|file| file.parent()))
                .map(Path::to_owned)
                .collect(),
            damaged: None,
            parameters: model.map(|model| model.params_count() as u64),
            layers: layout["model"]["num_hidden_layers"].as_u64(),
            hidden_size: layout["model"]["hidden_size"].as_u64(),
            dtype: layout["dtype"].as_str().map(str::to_owned),
            // A full drive may lack lines of the metrics.
            step: (last.as_ref().map(|last| last.step))
                .max(kept_step)
                .unwrap_or(0),
            steps: setting(&settings, "train.steps"),
            early_stopped: Evaluations::from_steps_and_losses(&evaluations).has_stalled(patience),
            evaluation: evaluations
                .last()
                .copied()
                .map(Evaluation::from_step_and_loss),
            best_evaluation: Evaluations::from_steps_and_losses(&evaluations)
                .lowest()
                .map(Evaluation::from_step_and_loss),
            kept_step,
            commit_every: commit_every(&settings).filter(|_| !in_dir),
            running: RunDir::is_used(dir),
            bytes: {
                let outside = files.iter().filter(|file| !file.starts_with(dir));
                let outside: u64 = outside.filter_map(|file| bytes_of(file).ok()).sum();
                dir_bytes(dir, DEPTH_MAX) + outside
            },
            loss: last.map(|last| last.loss),
            store: Some(description.store.clone()),
            store_bytes: files.iter().filter_map(|file| bytes_of(file).ok()).sum(),
            store_missing: (files.iter().filter(|file| !file.exists()).cloned()).collect(),
            checkpoints: checkpoints_made,
            aside: entries(checkpoints.list_aside().unwrap_or_default()),
        }
    }

    /// State of the run in words.
    fn status(&self) -> &'static str {
        match self.steps {
            _ if self.running => "running",
            Some(steps) if self.step >= steps => "finished",
            _ if self.early_stopped => "finished (early stopping)",
            _ => "stopped",
        }
    }
}

/// Describes another node's part of a run.
fn part_of(job: Option<&str>) -> Option<String> {
    let job = job.filter(|job| RunId::part(job).is_some())?;
    Some(RunId::describe_job(job))
}

/// Number with which `key` is set in `settings`, the text of a settings.toml.
fn setting(settings: &str, key: &str) -> Option<u64> {
    let mut lines = settings.lines().filter_map(|line| line.split_once(" = "));
    let (_, value) = lines.find(|(found, _)| *found == key)?;
    value.parse().ok()
}

/// Steps from one commit to the next in `settings`, the text of a settings.toml: as set, or as the plan chose them.
fn commit_every(settings: &str) -> Option<u64> {
    const KEY: &str = "offload.commit_every";
    let chosen = || {
        let mut lines = settings.lines().filter_map(|line| line.split_once(" = "));
        let (_, value) = lines.find(|(before, _)| before.ends_with(KEY))?;
        value.split(':').next()?.parse().ok()
    };
    setting(settings, KEY).or_else(chosen)
}

/// Writes a path as text. Bytes that are no text become U+FFFD.
fn path_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

fn path_texts<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

fn known_path_text<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    path.as_ref()
        .map(|path| path.to_string_lossy())
        .serialize(serializer)
}

/// Bytes of the files in `dir` and in `depth` levels of directories below it.
fn dir_bytes(dir: &Path, depth: u32) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() && depth > 0 => dir_bytes(&entry.path(), depth - 1),
        Ok(found) if found.is_file() => found.len(),
        _ => 0,
    });
    bytes.sum()
}

impl CheckpointEntry {
    fn from_checkpoint(checkpoint: CheckpointDir, evaluations: &[(u64, f64)]) -> Self {
        let opened = Checkpoint::open(&checkpoint.path, 0);
        let opened = opened.and_then(|opened| opened.check_sizes().map(|()| opened));
        let damaged = opened.as_ref().err().map(ToString::to_string);
        let description = opened.ok().map(|opened| opened.description);
        let said = description.as_ref();
        Self {
            step: checkpoint.step,
            dir: checkpoint.path,
            damaged,
            bytes: said.map_or(0, |said| said.bytes()),
            unix_s: said.map_or(0, |said| said.unix_s),
            loss: said.and_then(|said| said.loss()),
            validation_loss: (evaluations.iter())
                .find(|(step, _)| *step == checkpoint.step)
                .map(|(_, loss)| *loss),
        }
    }
}

impl fmt::Display for RunsList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for run in &self.runs {
            writeln!(f, "{run}")?;
        }
        for preview in &self.previews {
            writeln!(f, "{preview}")?;
        }
        for orphan in &self.orphans {
            writeln!(f, "{orphan}")?;
        }
        let bytes = self.runs.iter().map(|run| run.bytes).sum();
        write!(
            f,
            "{}, {} on disk",
            CountOf(self.runs.len() as u64, "run"),
            ApproxBytes(bytes)
        )
    }
}

impl fmt::Display for Preview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dir, bytes) = (self.dir.display(), ApproxBytes(self.bytes));
        let word = Word(&self.dir);
        write!(
            f,
            "tokens without a run: {dir}, {bytes}\n  the run was never started; `trainer remove {word}` deletes them"
        )
    }
}

impl fmt::Display for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (file, bytes) = (self.file.display(), ApproxBytes(self.bytes));
        let word = Word(&self.file);
        match &self.run {
            Some(run) => {
                let run = run.display();
                write!(
                    f,
                    "store without a run: {file}, {bytes}\n  its run was in {run}; if the run was not moved, `trainer remove {word}` deletes the file"
                )
            }
            None => write!(
                f,
                "store without a run: {file}, {bytes}\n  its run is unknown; `trainer remove {word}` deletes the file"
            ),
        }
    }
}

impl fmt::Display for RunEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dir.display())?;
        if let Some(why) = &self.damaged {
            return write!(f, "\n  damaged: {why}");
        }
        match &self.part {
            // The first node has the metrics.
            Some(part) => write!(f, "\n  {part}, {} on disk", ApproxBytes(self.bytes))?,
            None => self.progress(f)?,
        }
        match self.store.as_deref() {
            Some(STORE_IN_DIR) => write!(f, "\n  kept {}", self.kept())?,
            store => write!(f, "\n  state {}", store.unwrap_or("?"))?,
        }
        if self.store_bytes > 0 {
            write!(f, ", {}", ApproxBytes(self.store_bytes))?;
        }
        let is_committed =
            !(self.store.as_ref()).is_some_and(|store| store.ends_with(STORE_IN_PLACE));
        match self.commit_every.filter(|_| is_committed) {
            Some(1) => write!(f, ", committed after every step")?,
            Some(steps) => write!(
                f,
                ", committed every {steps} steps: a crash loses what came after the last commit"
            )?,
            None => {}
        }
        for file in &self.store_missing {
            write!(f, "\n  its store {} is missing", file.display())?;
        }
        for checkpoint in &self.checkpoints {
            write!(f, "\n  checkpoint at {checkpoint}")?;
            let best = self.best_evaluation.map(|best| best.step);
            if best == Some(checkpoint.step) && checkpoint.damaged.is_none() {
                write!(f, ", the best")?;
            }
        }
        for checkpoint in &self.aside {
            write!(
                f,
                "\n  set aside: checkpoint at {checkpoint}, in {}",
                checkpoint.dir.display()
            )?;
        }
        Ok(())
    }
}

impl RunEntry {
    fn progress(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |number: Option<u64>| number.map_or("?".into(), |number| number.to_string());
        let millions = self.parameters.map(|count| count as f64 / 1e6);
        write!(
            f,
            "\n  {}, {} on disk\n  {} M parameters ({} layers of {}, {}), step {}",
            self.status(),
            ApproxBytes(self.bytes),
            millions.map_or("?".into(), |millions| format!("{millions:.2}")),
            number(self.layers),
            number(self.hidden_size),
            self.dtype.as_deref().unwrap_or("?"),
            self.step
        )?;
        if let Some(steps) = self.steps {
            write!(f, " of {steps}")?;
        }
        if let Some(loss) = self.loss {
            write!(f, ", loss {loss:.4}")?;
        }
        if let (Some(last), Some(best)) = (self.evaluation, self.best_evaluation) {
            write!(
                f,
                "\n  validation loss {:.4} at step {}",
                last.loss, last.step
            )?;
            match best.step == last.step {
                true => write!(f, ", the lowest")?,
                false => write!(f, ", lowest {:.4} at step {}", best.loss, best.step)?,
            }
        }
        Ok(())
    }

    /// Says what a run that keeps its state in checkpoints has kept.
    fn kept(&self) -> String {
        let fate = match self.running {
            true => "only in the memory of the running trainer",
            false => "lost",
        };
        let steps = |first: u64| match self.step - first {
            0 => format!("step {first} is"),
            _ => format!("steps {first} to {} are", self.step),
        };
        match self.kept_step {
            None if self.step == 0 => "nothing yet".into(),
            None => format!("nothing: there is no checkpoint, and {} {fate}", steps(1)),
            Some(kept) if kept >= self.step => format!("all, in the checkpoint of step {kept}"),
            Some(kept) => format!("the checkpoint of step {kept}; {} {fate}", steps(kept + 1)),
        }
    }
}

impl fmt::Display for CheckpointEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.damaged {
            return write!(f, "step {}: {why}", self.step);
        }
        write!(
            f,
            "step {}: {} UTC, {}",
            self.step,
            utc(self.unix_s),
            ApproxBytes(self.bytes)
        )?;
        if let Some(loss) = self.loss {
            write!(f, ", loss {loss:.4}")?;
        }
        match self.validation_loss {
            Some(loss) => write!(f, ", validation loss {loss:.4}"),
            None => Ok(()),
        }
    }
}

/// Formats seconds since 1970 as date and time in UTC.
pub fn utc(unix_s: u64) -> String {
    let time = i64::try_from(unix_s).ok();
    let time = time.and_then(|unix_s| chrono::DateTime::from_timestamp(unix_s, 0));
    time.map_or("-".into(), |time| {
        time.format("%Y-%m-%d %H:%M:%S").to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix_s, date) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (1_798_761_540, "2026-12-31 23:59:00"),
        ] {
            assert_eq!(utc(unix_s), date);
        }
        assert_eq!(utc(u64::MAX), "-");
    }
}
