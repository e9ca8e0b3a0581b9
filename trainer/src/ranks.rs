//! The connection of this process to the other ranks of its run.

use std::error::Error;
use std::sync::Arc;

use kernels_torch::collective::{CollectiveError, Comm, Rendezvous, Timeouts, World};
use offload_support::errln;
use swapper::{Exchange, Nodes};
use training_state::ranks::{Group, GroupError, RankError, Ranks};

/// Error of connecting ranks.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Ranks(#[from] RankError),
}

/// Connects to the ranks given in the environment; without them the run is one process.
///
/// # Errors
/// The environment contradicts itself, or ranks do not connect in time.
pub(crate) fn connect() -> Result<Arc<Comm>, ConnectError> {
    let world = World::from_env()?;
    let at = Rendezvous::from_env(&world)?;
    if world.rank == 0 && at.is_open() {
        errln!("trainer: {}", crate::launch::OPEN_RENDEZVOUS);
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

/// Settings that describe a machine, so that the nodes of a run may have different ones.
const OF_A_NODE: [&str; 7] = [
    "data.cache",
    "offload.engine",
    "offload.host_memory_bytes",
    "offload.iodepth",
    "offload.socket",
    "placement.nvme_paths",
    "train.threads",
];

/// Refuses ranks whose settings differ from those of the first rank.
///
/// # Errors
/// Names the difference; a rank is gone.
pub(crate) fn check_same_settings(
    comm: &Comm,
    ranks: &Ranks,
    settings: &[String],
) -> Result<(), CollectiveError> {
    let same = |what: &str, value: &str| comm.same_everywhere(what, value);
    same("the program", env!("CARGO_PKG_VERSION"))?;
    let counts = |line: &&String| {
        let key = line.split(" = ").next().unwrap_or_default();
        ranks.nodes() == 1 || !OF_A_NODE.contains(&key)
    };
    let settings: Vec<&String> = settings.iter().filter(counts).collect();
    // Every rank must make the same number of calls.
    same("the number of settings", &settings.len().to_string())?;
    settings.iter().try_for_each(|line| same("a setting", line))
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
