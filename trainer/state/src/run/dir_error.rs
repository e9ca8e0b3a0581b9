//! Errors of using a run directory.

use std::path::PathBuf;

use offload_support::paths::Word;

/// Number of nodes while they take their state from a checkpoint, and in a copy on another node: no node's part can be resumed.
pub const INCOMPLETE: u32 = 0;

/// Error of using a run directory.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    #[error("train.run_dir: cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} is not UTF-8 text, as the files of a run must contain it: rename that directory, or use another one", path.display())]
    NotText { path: PathBuf },
    #[error("{message}")]
    Checkpoints { message: String },
    #[error("train.run_dir: another trainer is using {}: wait until it has ended", path.display())]
    Busy { path: PathBuf },
    #[error(
        "node {node}: {} holds {found}, and this run is {expected}: number the nodes as at the run's first start, set another train.run_dir, or delete what is there with `trainer remove {}`",
        path.display(), Word(path)
    )]
    OtherRun {
        node: u32,
        path: PathBuf,
        found: String,
        expected: String,
    },
    #[error(
        "the run in {} {}: {}resume from a checkpoint with --resume-from STEP (`trainer runs` lists them) or --resume-from newest, or start again with --fresh",
        path.display(), kept_on(*was, *now), if *was == INCOMPLETE { "" } else { "start as many, " }
    )]
    Nodes { path: PathBuf, was: u32, now: u32 },
    #[error("{} is damaged ({message}): `trainer train` with the run's configuration rebuilds it", path.display())]
    Damaged { path: PathBuf, message: String },
    #[error(
        "node {node}: the state in {} is older than the run, which has since begun anew or resumed from a checkpoint without this node: resume with --resume-from newest",
        path.display()
    )]
    Outdated { node: u32, path: PathBuf },
    #[error(
        "{} holds another run: {what} was {was} and is now {now}. Set it back, use another train.run_dir, or start again with --fresh, which deletes the run",
        path.display()
    )]
    Changed {
        path: PathBuf,
        what: String,
        was: String,
        now: String,
    },
}

fn kept_on(was: u32, now: u32) -> String {
    match was {
        INCOMPLETE => {
            "was interrupted while it took its state from a checkpoint, or was copied from another node"
                .to_owned()
        }
        _ => format!("keeps its state on {was} node(s), and this start has {now}"),
    }
}
