//! A start on several nodes with `train.checkpoints_on_each_node`: finds whether the nodes share the run's directory, and otherwise
//! completes what each of them has there.

use std::path::Path;

use super::probe::{PROBE_WAIT_SEPARATE, seen};
use super::{RunError, StartPoint};
use crate::config::RunSettings;
use offload_support::outln;
use training_state::ranks::Ranks;
use training_state::run::{CheckpointName, HeldByNodes, NodeContents, NodeDirs, RunDir, resolved};

/// Directories of nodes that share none, seen from a rank.
#[derive(Clone)]
pub struct EachNode {
    /// Used by the first rank of each node.
    pub dirs: NodeDirs,
    /// What the nodes hold. Only the first rank of each node knows it.
    held: Option<HeldByNodes>,
}

impl EachNode {
    /// Brings the run's files to the nodes that lack them. `first_ranks` connects the first ranks of the nodes, and `settings` are
    /// those of this node. `None` if all nodes see the same `whole_dir`. All ranks must call it.
    ///
    /// # Errors
    /// Only some nodes share the directory; another trainer uses it; a node cannot read or write; a rank is gone.
    pub fn open(
        ranks: &Ranks,
        first_ranks: Ranks,
        whole_dir: &Path,
        settings: &RunSettings,
    ) -> Result<Option<Self>, RunError> {
        if shares(ranks, whole_dir)? {
            if ranks.is_first() {
                outln!(
                    "note: train.checkpoints_on_each_node: all nodes see the same {}, so each checkpoint is written once",
                    whole_dir.display()
                );
            }
            return Ok(None);
        }
        let dirs = NodeDirs::new(first_ranks, whole_dir);
        let held =
            ranks.on_all_ranks::<_, RunError>("looking for the run on every node", || {
                if !ranks.is_first_of_node() {
                    return Ok(None);
                }
                RunDir::wait_until_unused(&resolved(&settings.train.run_dir))?;
                Ok(Some(NodeContents::read(whole_dir)?))
            })?;
        let held = ranks.on_all_ranks::<_, RunError>("copying the run's files to all nodes", || {
            let Some(own) = held else {
                return Ok(None);
            };
            let held = dirs.meet(&own)?;
            if let Some(aside) = dirs.update(&held)? {
                outln!(
                    "note: node {} has checkpoints of steps that the run has since given up; they were moved to {}",
                    ranks.node(),
                    aside.display()
                );
            }
            Ok(Some(held))
        })?;
        Ok(Some(Self { dirs, held }))
    }

    /// Step of the newest checkpoint, on the first rank of each node.
    pub(super) fn newest(&self) -> Option<u64> {
        self.held.as_ref()?.newest()
    }

    /// Copies the checkpoint from which `start` begins, or else the newest one, to the nodes that lack it; and with `keeps_best` the one
    /// with the lowest validation loss. All ranks must call it.
    ///
    /// # Errors
    /// A node has too little space for it, or cannot read or write; a rank is gone.
    pub fn restore(
        &self,
        ranks: &Ranks,
        start: &StartPoint,
        keeps_best: bool,
    ) -> Result<(), RunError> {
        let step = match start {
            StartPoint::Checkpoint(CheckpointName::Step(step)) => Some(*step),
            StartPoint::GoOn | StartPoint::Newest => self.newest(),
            StartPoint::Checkpoint(CheckpointName::Dir(_)) | StartPoint::Fresh => None,
        };
        // The first node's metrics may be newer than their copies.
        let best =
            ranks.by_first::<_, RunError>("reading the evaluations", || {
                let best = self.held.as_ref().and_then(|held| self.dirs.best(held));
                Ok(best.filter(|best| {
                    keeps_best && *start != StartPoint::Fresh && Some(*best) != step
                }))
            })?;
        ranks.on_all_ranks("copying a checkpoint to the nodes that lack it", || {
            let say = |note: String| {
                if ranks.is_first() {
                    outln!("note: {note}");
                }
            };
            let held = self.held.iter();
            let wanted =
                held.flat_map(|held| step.into_iter().chain(best).map(move |step| (held, step)));
            for (held, step) in wanted {
                self.dirs.restore(held, step, &say)?;
            }
            Ok(())
        })
    }
}

/// Returns whether all nodes see the same `dir`.
///
/// # Errors
/// Only some of them do; a node cannot write there; a rank is gone.
fn shares(ranks: &Ranks, dir: &Path) -> Result<bool, RunError> {
    let seen = seen(ranks, dir, PROBE_WAIT_SEPARATE)?;
    let count = seen.iter().filter(|seen| **seen).count();
    let all = ranks.numbers([count as u64])?;
    let counts = (0..)
        .zip(ranks.first_ranks())
        .map(|(node, &first)| (node, all[first as usize][0]));
    // A node sees its own file.
    let sharing: Vec<u32> = counts
        .filter(|(_, count)| *count > 1)
        .map(|(node, _)| node)
        .collect();
    let sees_all = |count: &[u64; 1]| count[0] == 0 || count[0] == u64::from(ranks.nodes());
    if sharing.is_empty() || all.iter().all(sees_all) {
        return Ok(!sharing.is_empty());
    }
    Err(RunError::PartlyShared {
        run_dir: dir.to_owned(),
        sharing: sharing
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    })
}
