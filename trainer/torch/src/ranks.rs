//! The connection of this process to the other ranks of its run.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::sync::Arc;

use kernels_torch::collective::Comm;
use offload_support::errln;
use serde::{Deserialize, Serialize};
use swapper::{Exchange, Nodes};
use training_ranks::{CollectiveError, Rendezvous, Timeouts, World};
use training_run::config::RunSettings;
use training_state::ranks::{Group, GroupError, RankError, Ranks};

/// Error of connecting ranks.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Ranks(#[from] RankError),
    #[error("the ranks have different settings: {differences}: {advice}")]
    Settings {
        /// Keys with the values of two ranks.
        differences: String,
        advice: &'static str,
    },
}

/// Connects to the ranks given in the environment; without them the run is one process.
///
/// # Errors
/// The environment contradicts itself, or ranks do not connect in time.
pub(crate) fn connect() -> Result<Arc<Comm>, ConnectError> {
    let world = World::from_env()?;
    let at = Rendezvous::from_env(&world)?;
    if world.rank == 0 && at.is_open() {
        errln!("trainer: {}", trainer::launch::OPEN_RENDEZVOUS);
    }
    let comm = Comm::connect(world, &at, Timeouts::default())?;
    Ok(Arc::new(comm))
}

/// Finds the nodes of the ranks that `comm` connects.
///
/// # Errors
/// The ranks of a node do not follow each other; a rank is gone.
pub(crate) fn ranks_of(comm: &Arc<Comm>) -> Result<Ranks, ConnectError> {
    let world = comm.world();
    let group = Arc::new(CommGroup(comm.clone()));
    Ok(Ranks::on_nodes(group, world.local_rank, world.local_ranks)?)
}

/// Connects the nodes of `run` for their commits; `None` for a run on one node.
///
/// # Errors
/// A rank is gone.
pub(crate) fn nodes_of(
    comm: &Arc<Comm>,
    ranks: &Ranks,
    run: &str,
) -> Result<Option<Nodes>, ConnectError> {
    if ranks.nodes() == 1 {
        return Ok(None);
    }
    let side = Arc::new(comm.connect_side()?);
    Ok(Some(Nodes {
        run: run.into(),
        node: ranks.node(),
        first_ranks: ranks.first_ranks().to_vec(),
        exchange: Arc::new(SideRanks {
            ranks: Ranks::new(Arc::new(CommGroup(side.clone()))),
            comm: side,
        }),
    }))
}

/// Connects the first ranks of the nodes, as ranks that are numbered like their nodes. The other ranks of a node are alone.
///
/// # Errors
/// A rank is gone.
pub(crate) fn first_ranks_of(comm: &Comm, ranks: &Ranks) -> Result<Ranks, ConnectError> {
    if !ranks.is_first_of_node() {
        return Ok(Ranks::alone());
    }
    let first_ranks = comm.connect_first_ranks(ranks.node(), ranks.nodes())?;
    Ok(Ranks::new(Arc::new(CommGroup(Arc::new(first_ranks)))))
}

/// Settings that describe a machine, so that the nodes of a run may have different ones; as resolved, and as written in a
/// run file.
const OF_A_NODE: [&str; 9] = [
    "data.cache",
    "offload.engine",
    "offload.host_memory_bytes",
    "offload.iodepth",
    "offload.socket",
    "placement.nvme_paths",
    "train.threads",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
];

/// Settings that an error about differences names.
const DIFFERENCES_MAX: usize = 4;

/// Settings of a rank as lines `key = value`.
#[derive(Serialize, Deserialize)]
struct RankSettings {
    resolved: Vec<String>,
    /// Under the keys of a run file.
    written: Vec<String>,
}

/// Refuses ranks whose settings differ from those of the first rank.
///
/// # Errors
/// Names the differences; a rank is gone.
pub(crate) fn check_same_settings(
    comm: &Comm,
    ranks: &Ranks,
    settings: &RunSettings,
) -> Result<(), ConnectError> {
    comm.same_everywhere("the version of the trainer", env!("CARGO_PKG_VERSION"))?;
    let own = RankSettings {
        resolved: settings.lines(),
        written: settings.written(),
    };
    let all = ranks.messages(serde_json::to_vec(&own).expect("plain data"))?;
    let of_rank = |bytes: &Vec<u8>| -> RankSettings {
        serde_json::from_slice(bytes).expect("the same program on every rank")
    };
    let first = of_rank(&all[0]);
    let on_nodes = ranks.nodes() > 1;
    for (rank, bytes) in (1..).zip(&all[1..]) {
        let name = match on_nodes {
            true => format!("rank {rank} (node {})", ranks.node_of(rank)),
            false => format!("rank {rank}"),
        };
        check_same(&first, &of_rank(bytes), &name, on_nodes)?;
    }
    Ok(())
}

/// Refuses the settings of the rank called `name` if they differ from those of the `first`.
fn check_same(
    first: &RankSettings,
    other: &RankSettings,
    name: &str,
    on_nodes: bool,
) -> Result<(), ConnectError> {
    let differing = |first: &[String], other: &[String]| -> Vec<String> {
        let (first, other) = (by_key(first), by_key(other));
        let keys: BTreeSet<&str> = first.keys().chain(other.keys()).copied().collect();
        let counts =
            |key: &&str| first.get(key) != other.get(key) && !(on_nodes && OF_A_NODE.contains(key));
        let value =
            |of: &BTreeMap<&str, &str>, key| of.get(key).map_or("not set", |v| *v).to_owned();
        let text = |key| {
            let (first, other) = (value(&first, key), value(&other, key));
            format!("{key} is {first} on rank 0 and {other} on {name}")
        };
        keys.into_iter().filter(counts).map(text).collect()
    };
    let resolved = differing(&first.resolved, &other.resolved);
    if resolved.is_empty() {
        return Ok(());
    }
    let written = differing(&first.written, &other.written);
    let (found, advice) = match written.is_empty() {
        false => (
            written,
            "start all ranks with the same run file and the same options",
        ),
        true => (
            resolved,
            "their run files are the same, so the files that these name differ (model.path): copy them from one machine to the other",
        ),
    };
    let shown = &found[..found.len().min(DIFFERENCES_MAX)];
    Err(ConnectError::Settings {
        differences: shown.join("; "),
        advice,
    })
}

/// Values of lines `key = value`.
fn by_key(lines: &[String]) -> BTreeMap<&str, &str> {
    lines
        .iter()
        .filter_map(|line| line.split_once(" = "))
        .collect()
}

struct CommGroup(Arc<Comm>);

impl Group for CommGroup {
    fn rank(&self) -> u32 {
        self.0.world().rank
    }

    fn ranks(&self) -> u32 {
        self.0.world().ranks
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let all = self.0.all_gather_bytes(own);
        all.map_err(|error| GroupError(error.into()))
    }
}

/// The ranks of all nodes, on a connection that only commits use.
struct SideRanks {
    ranks: Ranks,
    comm: Arc<Comm>,
}

impl Exchange for SideRanks {
    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
        Ok(self.ranks.messages(own.to_vec())?)
    }

    fn give_up(&self, reason: &str) {
        self.comm.give_up(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(resolved: &[&str], written: &[&str]) -> RankSettings {
        let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect();
        RankSettings {
            resolved: lines(resolved),
            written: lines(written),
        }
    }

    #[test]
    fn different_settings_are_named_as_they_are_written() {
        let paths = |path: &str| {
            settings(
                &[
                    "data.shuffle = true",
                    &format!("placement.nvme_paths = [{path}]"),
                ],
                &[&format!(
                    "zero_optimization.offload_param.nvme_path = {path}"
                )],
            )
        };
        let (first, other) = (paths("\"/a\""), paths("\"/b\""));
        let error = check_same(&first, &other, "rank 1", false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the ranks have different settings: zero_optimization.offload_param.nvme_path is \"/a\" on rank 0 and \"/b\" on rank 1: start all ranks with the same run file and the same options"
        );
        // Machines differ.
        assert!(check_same(&first, &other, "rank 1 (node 1)", true).is_ok());
        let shuffled = |shuffle: &str| {
            let resolved = format!("data.shuffle = {shuffle}");
            settings(&[&resolved], &[])
        };
        let error = check_same(
            &shuffled("true"),
            &shuffled("false"),
            "rank 1 (node 1)",
            true,
        );
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("data.shuffle is true on rank 0 and false on rank 1 (node 1)"),
            "{error}"
        );
        assert!(error.contains("(model.path): copy them"), "{error}");
        let error = check_same(&shuffled("true"), &settings(&[], &[]), "rank 1", false);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("true on rank 0 and not set on rank 1"),
            "{error}"
        );
    }
}
