//! Named points of a training process at which a test may kill it, in every phase of a run: in test builds only.
//!
//! `OFFLOADD_KILL=committing@3` ends the process with SIGKILL when it comes by that point for the third time;
//! `OFFLOADD_KILL=rank1:committing@3` only the process that is rank 1 of its run (`RANK`). With `OFFLOADD_KILL_HOLDS=FILE`
//! nobody is killed: the process makes FILE, and the thread that came by waits until that is gone. Whoever watches kills whom
//! he wants meanwhile: another rank, their launcher, their daemon.

/// Where a process may be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Tokens are made and have no name yet.
    Tokens,
    /// The store's daemon serves; the run has no session yet.
    Opening,
    /// A run is about to get its record.
    Describing,
    /// One more tile has its first weights.
    Filling,
    /// The run is open where it stands.
    Opened,
    /// A block's forward was computed.
    Forward,
    /// A block's backward was computed.
    Backward,
    /// A tile was updated.
    Updated,
    /// A tile is about to be written behind.
    Writing,
    /// A generation is about to be committed.
    Committing,
    /// A commit was acknowledged, and nobody acted on it yet.
    Committed,
    /// A step's line is about to be written.
    Telling,
    /// One more tile of a save was written.
    Checkpointing,
    /// The tiles of a save are written, and it has no name yet.
    NamingCheckpoint,
    /// A save has its name; older ones are still there.
    CheckpointNamed,
    /// What is pending is about to be applied and committed.
    Draining,
    /// All is kept, and the run is about to be closed.
    Closing,
    /// One more tile's weights were exported.
    Exporting,
    /// An export is whole and has no name yet.
    NamingExport,
}

impl Point {
    /// All of them, in the order in which a process comes by.
    pub const ALL: [Self; 19] = [
        Self::Tokens,
        Self::Opening,
        Self::Describing,
        Self::Filling,
        Self::Opened,
        Self::Forward,
        Self::Backward,
        Self::Updated,
        Self::Writing,
        Self::Committing,
        Self::Committed,
        Self::Telling,
        Self::Checkpointing,
        Self::NamingCheckpoint,
        Self::CheckpointNamed,
        Self::Draining,
        Self::Closing,
        Self::Exporting,
        Self::NamingExport,
    ];

    /// Its name in `OFFLOADD_KILL`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Opening => "opening",
            Self::Describing => "describing",
            Self::Filling => "filling",
            Self::Opened => "opened",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Updated => "updated",
            Self::Writing => "writing",
            Self::Committing => "committing",
            Self::Committed => "committed",
            Self::Telling => "telling",
            Self::Checkpointing => "saving",
            Self::NamingCheckpoint => "naming-save",
            Self::CheckpointNamed => "save-named",
            Self::Draining => "draining",
            Self::Closing => "closing",
            Self::Exporting => "exporting",
            Self::NamingExport => "naming-export",
        }
    }
}

/// The process reaches `point`. Panics when what a test asked for makes no sense: it must not believe in a kill that never
/// comes.
#[cfg(feature = "safeguard")]
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

/// Says in `file` that the point was reached, and waits until the file is gone.
#[cfg(feature = "safeguard")]
fn hold(file: &std::path::Path) {
    std::fs::write(file, []).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    while file.exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// The process reaches `point`: nothing happens, in this build.
#[cfg(not(feature = "safeguard"))]
pub const fn reach(_point: Point) {}

/// What a test asks for.
#[cfg(any(test, feature = "safeguard"))]
#[derive(Debug, PartialEq, Eq)]
struct AskedFor {
    rank: Option<u32>,
    point: Point,
    /// How often it is come by.
    number: u64,
}

#[cfg(any(test, feature = "safeguard"))]
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
