//! `csv_monitor`: one file for each scalar, `Train/Samples/lr` in `Train_Samples_lr.csv`. The first column is
//! the number of samples so far.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{MonitorError, Scalar};
use offload_support::paths::PRIVATE;

const MONITOR: &str = "csv_monitor";

/// Directory with its open files.
pub(super) struct CsvDir {
    dir: PathBuf,
    files: BTreeMap<&'static str, File>,
}

impl CsvDir {
    /// Creates the directory, or truncates its files to the rows of up to `samples` samples.
    ///
    /// # Errors
    /// The directory cannot be created, or a file cannot be read or cut.
    pub(super) fn open(dir: &Path, samples: u64) -> Result<Self, MonitorError> {
        std::fs::create_dir_all(dir).map_err(MonitorError::from_io(MONITOR, "make", dir))?;
        let entries =
            std::fs::read_dir(dir).map_err(MonitorError::from_io(MONITOR, "read", dir))?;
        for entry in entries {
            let path = entry
                .map_err(MonitorError::from_io(MONITOR, "read", dir))?
                .path();
            let name = path.file_name().map(|name| name.to_string_lossy());
            let is_ours = |name: &str| {
                (name.starts_with("Train_Samples_") || name.starts_with("Eval_Samples_"))
                    && name.ends_with(".csv")
            };
            if name.is_some_and(|name| is_ours(&name)) && path.is_file() {
                cut(&path, samples).map_err(MonitorError::from_io(MONITOR, "truncate", &path))?;
            }
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            files: BTreeMap::new(),
        })
    }

    /// Adds a row to each scalar's file.
    ///
    /// # Errors
    /// A file cannot be created or written.
    pub(super) fn write(&mut self, scalars: &[Scalar], samples: u64) -> Result<(), MonitorError> {
        for (name, value) in scalars {
            let path = self.dir.join(format!("{}.csv", name.replace('/', "_")));
            let file = match self.files.entry(name) {
                std::collections::btree_map::Entry::Occupied(open) => open.into_mut(),
                std::collections::btree_map::Entry::Vacant(place) => {
                    let file =
                        open(&path, name).map_err(MonitorError::from_io(MONITOR, "open", &path));
                    place.insert(file?)
                }
            };
            // Line ends of Python's csv module.
            let row = format!("{samples},{value}\r\n");
            file.write_all(row.as_bytes())
                .map_err(MonitorError::from_io(MONITOR, "write", &path))?;
        }
        Ok(())
    }
}

/// Opens a scalar's file for appending; a new file gets its header.
fn open(path: &Path, name: &str) -> std::io::Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(PRIVATE)
        .open(path)?;
    if file.metadata()?.len() == 0 {
        let column = name.rsplit('/').next().unwrap_or(name);
        file.write_all(format!("step,{column}\r\n").as_bytes())?;
    }
    Ok(file)
}

/// Keeps the header and the complete rows of up to `samples` samples.
fn cut(path: &Path, samples: u64) -> std::io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut reader = BufReader::new(&file);
    let (mut kept_bytes, mut line, mut is_head) = (0, Vec::new(), true);
    loop {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line)?;
        let step = line.split(|byte| *byte == b',').next().unwrap_or(&[]);
        let step = std::str::from_utf8(step)
            .ok()
            .and_then(|step| step.parse::<u64>().ok());
        let stays = if is_head {
            line.starts_with(b"step,")
        } else {
            step.is_some_and(|step| step <= samples)
        };
        if !(stays && line.ends_with(b"\n")) {
            break;
        }
        is_head = false;
        kept_bytes += bytes as u64;
    }
    file.set_len(kept_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOSS: &str = "Train/Samples/train_loss";

    fn text(dir: &Path) -> String {
        std::fs::read_to_string(dir.join("Train_Samples_train_loss.csv")).unwrap()
    }

    #[test]
    fn rows_are_deepspeeds_and_those_after_a_resumed_step_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = &dir.path().join("a/b");
        let mut csv = CsvDir::open(dir, 0).unwrap();
        for samples in [8, 16, 24] {
            csv.write(&[(LOSS, samples as f64 / 5.0)], samples).unwrap();
        }
        assert_eq!(
            text(dir),
            "step,train_loss\r\n8,1.6\r\n16,3.2\r\n24,4.8\r\n"
        );
        // An incomplete row, as after a crash.
        csv.files.get_mut(LOSS).unwrap().write_all(b"32,5").unwrap();
        let mut csv = CsvDir::open(dir, 16).unwrap();
        csv.write(&[(LOSS, 1.0)], 24).unwrap();
        assert_eq!(text(dir), "step,train_loss\r\n8,1.6\r\n16,3.2\r\n24,1\r\n");
        CsvDir::open(dir, 24).unwrap();
        assert_eq!(text(dir).lines().count(), 4);
        CsvDir::open(dir, 0).unwrap();
        assert_eq!(text(dir), "step,train_loss\r\n");
    }

    #[test]
    fn a_directory_that_cannot_be_created_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = CsvDir::open(&file.join("below"), 0)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains("cannot make") && error.contains("file/below for csv_monitor"),
            "{error}"
        );
    }
}
