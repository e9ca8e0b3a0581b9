//! The machine as a report names it: hardware, how busy it is, who used the processor.

use std::fs;

use offloadd::doctor;
use serde::Serialize;

/// For a report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    /// Whether arenas get huge pages, in the kernel's word.
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
            memory_bytes: offloadd::memory::total_bytes().unwrap_or(0),
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

/// Processes that wait for a processor or a drive, over the last minute.
pub(crate) fn load_average() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Processor seconds of a process since it began, of all its threads; nothing when it is not ours to see.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything but is in brackets.
    let after = text.rsplit_once(") ")?.1;
    let mut words = after.split(' ').skip(11);
    let mut ticks = || words.next()?.parse::<u64>().ok();
    let (user, system) = (ticks()?, ticks()?);
    Some((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Seconds that all processors together were idle, and seconds in all.
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
            // Waiting for a drive is idle.
            idle: ticks.get(3)? + ticks.get(4)?,
            all: ticks.iter().take(8).sum(),
        })
    }

    /// Of the time since `earlier`, the share that was idle.
    pub(crate) fn share_since(self, earlier: Self) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        Some(self.idle.saturating_sub(earlier.idle) as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_the_processor_and_that_is_counted() {
        let me = std::process::id();
        let before = cpu_seconds(me).unwrap();
        let mut state = 1;
        let since = std::time::Instant::now();
        while since.elapsed().as_millis() < 300 {
            state = crate::noise::next(state);
        }
        let used = cpu_seconds(me).unwrap() - before;
        assert!(state != 0 && used > 0.05, "{used}");
        assert_eq!(cpu_seconds(u32::MAX), None);
    }
}
