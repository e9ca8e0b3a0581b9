//! Named points of a training process at which a test may kill it, in every phase of a run.
//!
//! `OFFLOADD_KILL=committing@3` kills the process with SIGKILL when it reaches that point for the third time;
//! `OFFLOADD_KILL=rank1:committing@3` only the process with that `RANK`. With `OFFLOADD_KILL_HOLDS=FILE` the process instead
//! creates FILE at that point and waits until FILE is deleted. Meanwhile the test may kill another process: another rank, the
//! launcher or the daemon.

/// A point where a process may be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The tokenized data are written and not yet renamed to their final name.
    Tokens,
    /// The store's daemon serves; the run has no session yet.
    Opening,
    /// The run record is about to be written.
    Describing,
    /// A tile has its initial weights.
    Filling,
    /// The run is open.
    Opened,
    /// A block's forward was computed.
    Forward,
    /// A block's backward was computed.
    Backward,
    /// States of a block have new momenta, and directions are in place of its gradients.
    Revised,
    /// A tile was updated.
    Updated,
    /// A tile is about to be written behind.
    Writing,
    /// A generation is about to be committed.
    Committing,
    /// A generation is durable on this node, and the other nodes do not know it yet.
    Prepared,
    /// A generation is durable on every node and about to be confirmed on this one.
    Confirming,
    /// A commit was acknowledged, and nothing has used the acknowledgement yet.
    Committed,
    /// The log line of a step is about to be written.
    Telling,
    /// A tile of a checkpoint was written.
    Checkpointing,
    /// A node has received bytes of the other nodes' files, and none of the files has its name.
    CopyingFiles,
    /// The tiles of a checkpoint are written, and it is not yet renamed to its final name.
    NamingCheckpoint,
    /// A checkpoint has its final name; older ones are not yet deleted.
    CheckpointNamed,
    /// Pending updates are about to be applied and committed.
    Draining,
    /// Everything is stored, and the run is about to be closed.
    Closing,
    /// The weights of a tile were exported.
    Exporting,
    /// An export is complete and not yet renamed to its final name.
    NamingExport,
}

impl Point {
    /// All points, in the order in which a process reaches them.
    pub const ALL: [Self; 23] = [
        Self::Tokens,
        Self::Opening,
        Self::Describing,
        Self::Filling,
        Self::Opened,
        Self::Forward,
        Self::Backward,
        Self::Revised,
        Self::Updated,
        Self::Writing,
        Self::Committing,
        Self::Prepared,
        Self::Confirming,
        Self::Committed,
        Self::Telling,
        Self::Checkpointing,
        Self::CopyingFiles,
        Self::NamingCheckpoint,
        Self::CheckpointNamed,
        Self::Draining,
        Self::Closing,
        Self::Exporting,
        Self::NamingExport,
    ];

    /// Returns the name in `OFFLOADD_KILL`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Opening => "opening",
            Self::Describing => "describing",
            Self::Filling => "filling",
            Self::Opened => "opened",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Revised => "revised",
            Self::Updated => "updated",
            Self::Writing => "writing",
            Self::Committing => "committing",
            Self::Prepared => "prepared",
            Self::Confirming => "confirming",
            Self::Committed => "committed",
            Self::Telling => "telling",
            Self::Checkpointing => "saving",
            Self::CopyingFiles => "copying-files",
            Self::NamingCheckpoint => "naming-checkpoint",
            Self::CheckpointNamed => "checkpoint-named",
            Self::Draining => "draining",
            Self::Closing => "closing",
            Self::Exporting => "exporting",
            Self::NamingExport => "naming-export",
        }
    }
}

/// Kills or holds the process if a test asked for it at `point`. Panics on a value that cannot be parsed, so that no test runs
/// without its kill.
#[cfg(feature = "active")]
pub fn reach(point: Point) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static ASKED_FOR: OnceLock<Option<(Point, u64)>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let asked_for = ASKED_FOR.get_or_init(|| {
        let text = std::env::var("OFFLOADD_KILL").ok()?;
        let says = "it is POINT@NUMBER or rankN:POINT@NUMBER";
        let asked_for = parse(&text).unwrap_or_else(|| panic!("OFFLOADD_KILL={text}: {says}"));
        let rank = || std::env::var("RANK").ok()?.parse::<u32>().ok();
        (asked_for.rank.is_none() || asked_for.rank == rank())
            .then_some((asked_for.point, asked_for.number))
    });
    let Some((at, number)) = *asked_for else {
        return;
    };
    if point == at && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == number {
        match std::env::var_os("OFFLOADD_KILL_HOLDS") {
            Some(file) => hold(std::path::Path::new(&file)),
            None => {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL)
                    .expect("a process may kill itself");
            }
        }
    }
}

/// Creates `file` and waits until it is deleted.
#[cfg(feature = "active")]
fn hold(file: &std::path::Path) {
    std::fs::write(file, []).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    while file.exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Does nothing in this build.
#[cfg(not(feature = "active"))]
pub const fn reach(_point: Point) {}

/// A parsed value of `OFFLOADD_KILL`.
#[cfg(any(test, feature = "active"))]
#[derive(Debug, PartialEq, Eq)]
struct AskedFor {
    rank: Option<u32>,
    point: Point,
    /// How often the point is reached before the kill.
    number: u64,
}

#[cfg(any(test, feature = "active"))]
fn parse(text: &str) -> Option<AskedFor> {
    let (rank, text) = match text.split_once(':') {
        Some((rank, rest)) => (Some(rank.strip_prefix("rank")?.parse().ok()?), rest),
        None => (None, text),
    };
    let (name, number) = text.split_once('@')?;
    let point = Point::ALL.into_iter().find(|point| point.name() == name)?;
    let number = number.parse().ok()?;
    (number > 0).then_some(AskedFor {
        rank,
        point,
        number,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_point_has_a_name_of_its_own() {
        for point in Point::ALL {
            for (rank, before) in [(None, ""), (Some(12), "rank12:")] {
                let text = format!("{before}{}@7", point.name());
                let number = 7;
                let expected = AskedFor {
                    rank,
                    point,
                    number,
                };
                assert_eq!(parse(&text), Some(expected));
            }
        }
        for nonsense in [
            "",
            "forward",
            "forward@0",
            "forward@x",
            "nowhere@1",
            ":forward@1",
            "rank:forward@1",
            "1:forward@1",
        ] {
            assert_eq!(parse(nonsense), None, "{nonsense}");
        }
    }
}
