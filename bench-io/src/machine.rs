//! The machine in a report: hardware, load, and CPU time of processes.

use std::fs;
use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use offloadd::doctor;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    /// The kernel's setting for huge pages of shared memory.
    pub(crate) huge_pages: Option<String>,
    /// UTC.
    pub(crate) date: String,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = info
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or_else(|| "unknown processor".into(), |(_, name)| name.into());
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor,
            cores: cores(),
            memory_bytes: offload_support::memory::total_bytes().unwrap_or(0),
            kernel: format!("Linux {}", release.trim()),
            huge_pages: doctor::huge_pages(&doctor::Roots::default()),
            date: chrono::Utc::now().format("%Y-%m-%d %H:%M UTC").to_string(),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} cores, {} GiB, {}, huge pages {}, {}",
            self.processor,
            self.cores,
            self.memory_bytes >> 30,
            self.kernel,
            self.huge_pages.as_deref().unwrap_or("none"),
            self.date
        )
    }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// Processes waiting for a processor or a drive, averaged over the last minute.
pub(crate) fn load_average() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Processor seconds of a process with all its threads, ended ones included; `None` if it is gone. Read from its clock
/// in nanoseconds: /proc counts in ticks of 10 ms, too coarse for a short measurement.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    let time = clock_gettime(clock_getcpuclockid(pid).ok()?).ok()?;
    Some(Duration::from(time).as_secs_f64())
}

/// Idle and total seconds of all processors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdleTime {
    idle: u64,
    all: u64,
}

impl IdleTime {
    pub(crate) fn now() -> Option<Self> {
        let text = fs::read_to_string("/proc/stat").ok()?;
        let line = text.lines().next()?.strip_prefix("cpu")?;
        let ticks: Vec<u64> = line
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        Some(Self {
            // Waiting for a drive is idle time.
            idle: ticks.get(3)? + ticks.get(4)?,
            all: ticks.iter().take(8).sum(),
        })
    }

    /// Fraction of the time since `earlier` that was idle.
    pub(crate) fn share_since(self, earlier: Self) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        Some(self.idle.saturating_sub(earlier.idle) as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};

    use super::*;

    #[test]
    fn this_process_uses_the_processor_and_that_is_counted() {
        let me = std::process::id();
        let before = cpu_seconds(me).unwrap();
        let mut state = 1;
        let since = std::time::Instant::now();
        while since.elapsed().as_millis() < 300 {
            state = crate::random_data::next(state);
        }
        let used = cpu_seconds(me).unwrap() - before;
        assert!(state != 0 && used > 0.05, "{used}");
        assert_eq!(cpu_seconds(u32::MAX), None);
    }

    #[test]
    fn what_takes_less_than_a_tick_is_counted_also_of_another_process() {
        // A clock that counts in ticks would see nothing in most of these intervals.
        let used = |pid: u32, work: &mut dyn FnMut()| {
            let before = cpu_seconds(pid).unwrap();
            work();
            cpu_seconds(pid).unwrap() - before
        };
        let mut state = 1;
        let mut short = || {
            for _ in 0..10_000 {
                state = crate::random_data::next(state);
            }
        };
        let me = std::process::id();
        let seen = (0..20).filter(|_| used(me, &mut short) > 0.0).count();
        assert_eq!((seen, state == 0), (20, false));

        // A shell that works a little for each line.
        let mut other = std::process::Command::new("sh")
            .args(["-c", "while read -r line; do echo $line; done"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = other.stdin.take().unwrap();
        let mut answers = BufReader::new(other.stdout.take().unwrap());
        let mut ask = || {
            lines.write_all(b"x\n").unwrap();
            answers.read_line(&mut String::new()).unwrap();
        };
        ask();
        let seen = (0..20).filter(|_| used(other.id(), &mut ask) > 0.0).count();
        drop((lines, answers));
        let gone = other.id();
        other.wait().unwrap();
        assert_eq!(seen, 20);
        assert_eq!(cpu_seconds(gone), None);
    }
}
