//! Creates and destroys rate-limited drives.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use offload_support::retry::retry;

use super::group::{Group, GroupMembership};
use super::{DrivesPlan, RateLimit, State, check_name, dir_of, missing, read_state, state_file};
use crate::place::release_waits;
use crate::stop;
use crate::units::Bytes;

/// Space in the tmpfs besides the drives' files.
const RAM_SLACK_BYTES: u64 = 64 << 20;

/// Bytes that one thread writes at a time.
const TOUCH_BYTES: u64 = 256 << 20;

/// A set of rate-limited drives.
#[derive(Debug)]
pub(crate) struct Drives {
    name: String,
    dir: PathBuf,
    state: State,
}

impl Drives {
    /// Creates the drives. Leaves nothing after a failure.
    ///
    /// # Errors
    /// A requirement is missing, or a step failed.
    pub(crate) fn create(plan: &DrivesPlan) -> Result<Self> {
        Ok(Self::create_with(plan, |_| Ok(()))?.0)
    }

    /// Like [`Drives::create`]; `begin` is called with the directory before anything is listed in it.
    pub(super) fn create_with<T>(
        plan: &DrivesPlan,
        begin: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<(Self, T)> {
        plan.check()?;
        if let Some(what) = missing(plan.raid0) {
            bail!("rate-limited drives need {what}");
        }
        // Frees memory of orphaned drives. A failure is reported where it matters.
        let _ = super::destroy_orphaned();
        let bytes = u64::from(plan.count).saturating_mul(plan.bytes);
        let available_bytes = offload_support::memory::available_bytes().unwrap_or(u64::MAX);
        ensure!(
            bytes.saturating_add(RAM_SLACK_BYTES) <= available_bytes,
            "{} drives of {} do not fit in the {} of available memory",
            plan.count,
            Bytes(plan.bytes),
            Bytes(available_bytes)
        );
        let dir = dir_of(&plan.name);
        if state_file(&dir).exists() {
            bail!(
                "{} already exists; destroy its drives with `{}`",
                dir.display(),
                destroy_command(&plan.name)
            );
        }
        fs::create_dir_all(dir.join("ram"))
            .with_context(|| format!("creating {}", dir.display()))?;
        let begun = begin(&dir)?;
        let group = Group::of_set(&plan.name).context("missing() checked for it")?;
        let loop_devices = u64::from(plan.loop_devices);
        let mut drives = Self {
            name: plan.name.clone(),
            state: State {
                group: group.dir().to_owned(),
                devices: Vec::new(),
                dirs: Vec::new(),
                limit: RateLimit {
                    read: (plan.limit.read / loop_devices).max(1),
                    write: (plan.limit.write / loop_devices).max(1),
                },
            },
            dir,
        };
        let bytes = plan.bytes.div_ceil(loop_devices).next_multiple_of(4096);
        match drives.make(&group, plan.count * plan.loop_devices, bytes, plan.raid0) {
            Ok(()) => Ok((drives, begun)),
            Err(error) => match drives.destroy() {
                Ok(()) => Err(error),
                Err(left) => Err(error.context(format!("cleaning up also failed: {left:#}"))),
            },
        }
    }

    /// Opens the set `name`, created earlier.
    ///
    /// # Errors
    /// There is no such set.
    pub(crate) fn open(name: &str) -> Result<Self> {
        check_name(name)?;
        let dir = dir_of(name);
        let state = read_state(&dir)?;
        let state = state.with_context(|| {
            format!(
                "no drives in {}: create them with `bench-io testdrives create`",
                dir.display()
            )
        })?;
        Ok(Self {
            name: name.to_owned(),
            dir,
            state,
        })
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// Sets every device's rate limit; `None` lifts it.
    pub(crate) fn set_limit(&self, limit: Option<RateLimit>) -> Result<()> {
        self.set_limit_of(0..self.state.devices.len(), limit)
    }

    /// Sets the rate limit of a range of devices.
    pub(crate) fn set_limit_of(
        &self,
        devices: Range<usize>,
        limit: Option<RateLimit>,
    ) -> Result<()> {
        let group = Group::at(&self.state.group);
        let mut devices = self.state.devices[devices].iter();
        devices.try_for_each(|device| group.set(device, limit))
    }

    /// Limits this process and every process it starts.
    pub(crate) fn enter(&self) -> Result<GroupMembership> {
        Group::at(&self.state.group).enter()
    }

    fn make(&mut self, group: &Group, count: u32, bytes: u64, raid0: bool) -> Result<()> {
        self.note()?;
        let ram = self.dir.join("ram");
        let size = format!("size={}", u64::from(count) * bytes + RAM_SLACK_BYTES);
        // A loop device copies with one thread, faster from huge pages. Kernels without them refuse the option.
        let mount = |options: &str| {
            call(
                "mount",
                ["-t", "tmpfs", "-o", options, "testdrives", &text(&ram)],
            )
        };
        mount(&format!("{size},huge=always")).or_else(|_| mount(&size))?;
        group.make()?;
        let files: Vec<PathBuf> = (0..count)
            .map(|index| ram.join(format!("drive{index}")))
            .collect();
        touch(&files, bytes)?;
        for file in &files {
            stop::check()?;
            let device = attach(file)?;
            self.state.devices.push(device.into());
            self.note()?;
        }
        let devices = self.state.devices.clone();
        if raid0 {
            let mut words = vec!["-q", "-f", "-K", "-d", "raid0", "-m", "raid0"];
            let devices: Vec<String> = devices.iter().map(|device| text(device)).collect();
            words.extend(devices.iter().map(String::as_str));
            call("mkfs.btrfs", words)?;
            self.mount(Path::new(&devices[0]), "noatime,nodatacow")?;
        } else {
            for device in &devices {
                stop::check()?;
                // Few inodes and no lazy initialization: the file system holds some large files.
                let options = [
                    "-q",
                    "-F",
                    "-m",
                    "0",
                    "-N",
                    "64",
                    "-O",
                    "^has_journal",
                    "-E",
                    "nodiscard,lazy_itable_init=0",
                ];
                let device_text = text(device);
                call(
                    "mkfs.ext4",
                    options.into_iter().chain([device_text.as_str()]),
                )?;
                self.mount(device, "noatime")?;
            }
        }
        self.set_limit(Some(self.state.limit))
    }

    fn mount(&mut self, device: &Path, options: &str) -> Result<()> {
        let dir = self.dir.join(format!("drive{}", self.state.dirs.len()));
        fs::create_dir(&dir).with_context(|| format!("creating {}", dir.display()))?;
        self.state.dirs.push(dir.clone());
        self.note()?;
        call("mount", ["-o", options, &text(device), &text(&dir)]).map(drop)
    }

    /// Writes the state file before a step, so that an interrupted creation can be destroyed.
    fn note(&self) -> Result<()> {
        let path = state_file(&self.dir);
        let text = serde_json::to_vec_pretty(&self.state)?;
        // Atomically: a partial file could not be used to destroy the drives.
        let new = path.with_extension("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("writing {}", path.display()))
    }

    /// Destroys everything that was created. Waits a little for files that are about to be closed.
    ///
    /// # Errors
    /// Something still uses the drives. Call again after it has ended.
    pub(crate) fn destroy(&self) -> Result<()> {
        let mut trouble = Vec::new();
        for dir in &self.state.dirs {
            let unmount = || call_unless_gone("umount", &[&text(dir)]);
            trouble.extend(retry(release_waits(), unmount).err());
        }
        let ram = self.dir.join("ram");
        let detach = || {
            attached(&ram)
                .into_iter()
                .try_for_each(|device| call_unless_gone("losetup", &["-d", &text(&device)]))
        };
        trouble.extend(retry(release_waits(), detach).err());
        if trouble.is_empty() {
            // A creator's `losetup` may have outlived it and attach one more device.
            let unmount = || {
                detach()?;
                call_unless_gone("umount", &[&text(&ram)])
            };
            trouble.extend(retry(release_waits(), unmount).err());
            let group = Group::at(&self.state.group);
            trouble.extend(retry(release_waits(), || group.remove()).err());
        }
        if !trouble.is_empty() {
            bail!(
                "{}; end the programs that use the drives and run `{}` again",
                trouble.join("; "),
                destroy_command(&self.name)
            );
        }
        fs::remove_dir_all(&self.dir).with_context(|| format!("removing {}", self.dir.display()))
    }
}

fn destroy_command(name: &str) -> String {
    match name {
        "" => "bench-io testdrives destroy".into(),
        name => format!("bench-io testdrives destroy --name {name}"),
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Attaches a loop device to `file`; past the page cache if the kernel supports it.
fn attach(file: &Path) -> Result<String> {
    let file = text(file);
    let one = |more: &[&str]| {
        let words = ["-f", "--show", "-b", "4096"];
        call(
            "losetup",
            words.iter().chain(more).copied().chain([file.as_str()]),
        )
    };
    one(&["--direct-io=on"]).or_else(|_| one(&[]))
}

/// Finds the loop devices over files in `ram`, listed or not: a killed creator may not have listed its last one, and
/// the number of a listed one may have been reused.
fn attached(ram: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let over = entries.filter(|entry| {
        let file = fs::read_to_string(entry.path().join("loop/backing_file"));
        file.is_ok_and(|file| Path::new(&file).starts_with(ram))
    });
    over.map(|entry| Path::new("/dev").join(entry.file_name()))
        .collect()
}

/// Writes every page of the files, in parallel.
fn touch(files: &[PathBuf], bytes: u64) -> Result<()> {
    let pieces_a_file = bytes.div_ceil(TOUCH_BYTES);
    let pieces = pieces_a_file * files.len() as u64;
    let opened = files
        .iter()
        .map(File::create_new)
        .collect::<Result<Vec<_>, _>>()
        .context("creating the drives' files")?;
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<()> {
        let zeros = vec![0; 4 << 20];
        loop {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return Ok(());
            }
            let file = &opened[(piece / pieces_a_file) as usize];
            let mut at = piece % pieces_a_file * TOUCH_BYTES;
            let end = (at + TOUCH_BYTES).min(bytes);
            while at < end && stop::check().is_ok() {
                let now = (end - at).min(zeros.len() as u64);
                file.write_all_at(&zeros[..now as usize], at)?;
                at += now;
            }
        }
    };
    let threads = crate::machine::cores().min(8);
    let results: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running
            .into_iter()
            .map(|one| one.join().expect("writing does not panic"))
            .collect()
    });
    for result in results {
        result.context("writing the drives' files; memory may be short")?;
    }
    stop::check()
}

/// Runs a tool and returns its output; a failure contains its error text.
fn call<'a>(tool: &str, words: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let words: Vec<&str> = words.into_iter().collect();
    let output = Command::new(tool)
        .args(&words)
        .output()
        .with_context(|| format!("starting {tool}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{tool} {}: {} ({})",
            words.join(" "),
            stderr.trim(),
            output.status
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs a tool and ignores what an earlier call has already removed.
fn call_unless_gone(tool: &str, words: &[&str]) -> Result<(), String> {
    let gone = [
        "not mounted",
        "No such device",
        "no mount point",
        "No such file",
    ];
    match call(tool, words.iter().copied()) {
        Err(error) if !gone.iter().any(|words| error.to_string().contains(words)) => {
            Err(error.to_string())
        }
        _ => Ok(()),
    }
}
