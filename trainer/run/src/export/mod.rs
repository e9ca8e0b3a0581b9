//! Exports a run's weights to a directory that Hugging Face's library loads.
//!
//! ```text
//!   run directory ──▶ reader.rs: tiles ──▶ masters in fp32 ──▶ numbers of the requested type ──▶ their place in OUT.partial/model*.safetensors
//!   RUN/model: config.json, tokenizer ──────────────────────────────────────────────────────▶ OUT.partial
//!                                                                    all flushed, then renamed: OUT.partial ──▶ OUT
//! ```
//!
//! The position of each tensor is known before the first tile is read (`shards.rs`), so tiles are written as
//! they arrive and not kept. `OUT` appears complete or not at all. A killed export leaves `OUT.partial`,
//! which the next one removes.

mod own;
mod shards;
mod write;

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use offload_support::units::ApproxBytes;
use serde_json::json;
use test_hooks::kill_point::{Point, reach};

use crate::model::{Dtype, config_json};
use crate::open::RunError;
use crate::reader::RunReader;
use crate::weights::{Element, INDEX_FILE};
use offload_support::progress::{Audience, Progress, Unit};
pub use own::OwnExport;
use shards::Shards;
use training_state::run::{CheckpointName, ModelFiles, make_dir, resolved};
use training_state::store::{NotMounted, check_mounted, free_bytes};
use write::ShardWriter;

/// Parameters of an export.
#[derive(Clone, Debug)]
pub struct Export {
    pub run_dir: PathBuf,
    /// Checkpoint to export; `None` for the newest state.
    pub checkpoint: Option<CheckpointName>,
    /// Directory to create.
    pub out: PathBuf,
    /// Number type of the weights; `None` for the type that the run computes with.
    pub numbers: Option<Numbers>,
    /// Largest number of tensor bytes in one file, unless a single tensor is larger.
    pub shard_bytes: u64,
}

/// Number type in which weights are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    Bf16,
    Fp16,
    Fp32,
}

/// Result of an export.
#[derive(Clone, Debug)]
pub struct ExportResult {
    pub step: u64,
    pub run_dir: PathBuf,
    pub out: PathBuf,
    pub files: usize,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    NotMounted(#[from] NotMounted),
    #[error("{} already exists: name another directory, or remove it", out.display())]
    Exists { out: PathBuf },
    #[error("another export is writing to {}: wait for it, or name another directory", partial.display())]
    Busy { partial: PathBuf },
    #[error(
        "the file system of {} has {} free, but the weights take {}: free some space, or use another file system",
        dir.display(), ApproxBytes(*free_bytes), ApproxBytes(*needed_bytes)
    )]
    TooLittleSpace {
        dir: PathBuf,
        free_bytes: u64,
        needed_bytes: u64,
    },
    #[error(
        "tensor {tensor} contains {value}, which {numbers} cannot represent: export with --dtype {}",
        if *numbers == "fp16" { "bf16 or fp32" } else { "fp32" }
    )]
    Overflow {
        tensor: String,
        value: f32,
        numbers: &'static str,
    },
    #[error("cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

impl ExportError {
    /// Returns a conversion for `map_err` for the operation `verb` on `path`.
    fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { verb, path, source }
    }
}

impl Numbers {
    fn element(self) -> Element {
        match self {
            Self::Bf16 => Element::Bf16,
            Self::Fp16 => Element::Fp16,
            Self::Fp32 => Element::Fp32,
        }
    }

    fn from_dtype(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16,
            Dtype::Fp16 => Self::Fp16,
            Dtype::Fp32 => Self::Fp32,
        }
    }
}

/// Exports a run's newest state, or a checkpoint.
///
/// # Errors
/// There is no run, or it is in use; `out` already exists or has too little space; the requested type cannot
/// represent a number. Nothing is left of `out` then.
pub fn export(export: &Export) -> Result<ExportResult, ExportError> {
    if fs::symlink_metadata(&export.out).is_ok() {
        return Err(ExportError::Exists {
            out: export.out.clone(),
        });
    }
    if let Some(parent) = resolved(&export.out).parent() {
        check_mounted(parent)?;
    }
    let mut reader = RunReader::open(&export.run_dir, export.checkpoint.clone())?;
    let partial = Partial::make(&export.out)?;
    let numbers = export
        .numbers
        .unwrap_or(Numbers::from_dtype(reader.record.dtype));
    let (files, bytes) = write_weights(
        &mut reader,
        &partial.path,
        numbers.element(),
        export.shard_bytes,
        "exporting",
    )?;
    write_rest(&reader, &partial.path, numbers.element())?;
    let done = ExportResult {
        step: reader.tiles.state.step,
        run_dir: reader.dir.clone(),
        out: export.out.clone(),
        files,
        bytes,
    };
    reader.tiles.close()?;
    reach(Point::NamingExport);
    partial.finish(&export.out)?;
    Ok(done)
}

/// Usual largest number of tensor bytes in one file of weights.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Writes the newest weights of the run in `from` into the directory `to`, in fp32. Returns the step that
/// they are from.
///
/// # Errors
/// The run cannot be read; there is too little space.
pub fn copy_weights(from: &Path, to: &Path) -> Result<u64, RunError> {
    let mut reader = RunReader::open(from, None)?;
    let what = "reading the other run's weights";
    write_weights(&mut reader, to, Element::Fp32, SHARD_BYTES, what)
        .map_err(|error| RunError::FirstRun(Box::new(error)))?;
    let step = reader.tiles.state.step;
    reader.tiles.close()?;
    Ok(step)
}

/// Writes the weights read by `reader` into `dir`, with an index if they are more than one file; `what`
/// labels the progress. Returns the number of files and their bytes.
fn write_weights(
    reader: &mut RunReader,
    dir: &Path,
    element: Element,
    shard_bytes: u64,
    what: &str,
) -> Result<(usize, u64), ExportError> {
    let shards = Shards::new(
        &reader.record.model,
        &reader.tiles.units,
        element,
        shard_bytes,
    );
    check_space(dir, shards.bytes())?;
    let mut writer = ShardWriter::make(dir, &shards, reader.tiles.formats.clone())?;
    let mut work = Progress::new(what, Unit::Bytes, Audience::Person).with_total(shards.bytes());
    let mut failed = None;
    reader.tiles.visit(&mut |range, param, state| {
        if failed.is_none() {
            failed = writer.tile(range, param, state).err();
            reach(Point::Exporting);
            work.add((range.elems.end - range.elems.start) * element.size_bytes() as u64);
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    writer.finish()?;
    if let Some(index) = shards.index() {
        write_file(&dir.join(INDEX_FILE), &pretty(&index))?;
    }
    Ok((shards.count(), shards.bytes()))
}

/// Writes `config.json` and copies the other files that the model came with.
fn write_rest(reader: &RunReader, dir: &Path, element: Element) -> Result<(), ExportError> {
    let kept = ModelFiles::in_run_dir(&reader.dir);
    let dtype = element.torch_word();
    let config = config_json(&reader.record.model, dtype, kept.config());
    write_file(&dir.join("config.json"), &pretty(&json!(config)))?;
    for path in kept.others() {
        let to = dir.join(path.file_name().expect("a file has a name"));
        fs::copy(&path, &to)
            .and_then(|_| File::open(&to)?.sync_all())
            .map_err(ExportError::io("copy", &path))?;
    }
    Ok(())
}

fn pretty(value: &serde_json::Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("plain data");
    text.push(b'\n');
    text
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ExportError> {
    use std::io::Write;
    File::create(path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .map_err(ExportError::io("write", path))
}

fn check_space(dir: &Path, needed_bytes: u64) -> Result<(), ExportError> {
    let free_bytes = free_bytes(dir).map_err(ExportError::io("read the free space of", dir))?;
    if free_bytes < needed_bytes {
        return Err(ExportError::TooLittleSpace {
            dir: dir.to_owned(),
            free_bytes,
            needed_bytes,
        });
    }
    Ok(())
}

/// Directory being filled; removed on drop unless it is finished.
struct Partial {
    path: PathBuf,
    /// Locked against another export to the same directory.
    dir: File,
    finished: bool,
}

impl Partial {
    /// Creates `OUT.partial`; removes what a killed export left there.
    fn make(out: &Path) -> Result<Self, ExportError> {
        let name = out.file_name().ok_or_else(|| ExportError::Exists {
            out: out.to_owned(),
        })?;
        let parent = parent(out);
        make_dir(parent).map_err(ExportError::io("create the directory", parent))?;
        let mut partial_name = name.to_owned();
        partial_name.push(".partial");
        let path = parent.join(partial_name);
        if let Ok(left) = File::open(&path) {
            lock(&left, &path)?;
            fs::remove_dir_all(&path).map_err(ExportError::io("remove", &path))?;
        }
        fs::create_dir(&path).map_err(ExportError::io("create the directory", &path))?;
        let dir = File::open(&path).map_err(ExportError::io("open", &path))?;
        lock(&dir, &path)?;
        Ok(Self {
            path,
            dir,
            finished: false,
        })
    }

    /// Renames it to `out` durably.
    fn finish(mut self, out: &Path) -> Result<(), ExportError> {
        self.dir
            .sync_all()
            .map_err(ExportError::io("flush", &self.path))?;
        let (old, new) = (&self.path, out);
        let here = rustix::fs::CWD;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(here, old, here, new, flags) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                return Err(ExportError::Exists { out: out.into() });
            }
            Err(error) => return Err(ExportError::io("name", out)(error.into())),
        }
        self.finished = true;
        let parent = parent(out);
        File::open(parent)
            .and_then(|dir| dir.sync_all())
            .map_err(ExportError::io("flush", parent))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.finished {
            // A failure here is ignored: the reason that the export was not finished is reported.
            let _ = fs::remove_dir_all(&self.path);
        }
        // A child process that was just started may still hold a copy of the locked file.
        let _ = self.dir.unlock();
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn lock(dir: &File, path: &Path) -> Result<(), ExportError> {
    rustix::fs::flock(dir, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        ExportError::Busy {
            partial: path.to_owned(),
        }
    })
}

impl fmt::Display for ExportResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "exported step {} of {} to {}: {} in {}",
            self.step,
            self.run_dir.display(),
            self.out.display(),
            ApproxBytes(self.bytes),
            if self.files == 1 {
                "one file".to_owned()
            } else {
                format!("{} files", self.files)
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_do_not_fit_are_refused_with_the_free_space() {
        let dir = tempfile::tempdir().unwrap();
        check_space(dir.path(), 1).unwrap();
        let said = check_space(dir.path(), u64::MAX).unwrap_err().to_string();
        let dir = dir.path().display().to_string();
        for part in [
            &*dir,
            "free, but the weights take 16777216.0 TiB",
            "free some space",
        ] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }
}
