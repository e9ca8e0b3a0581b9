//! The connection of this process to the other ranks of its run.

use std::sync::Arc;

use kernels_torch::collective::{CollectiveError, Comm, Rendezvous, Timeouts, World};
use training_state::ranks::{Group, GroupError, Ranks};

/// Error of connecting ranks.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(
        "only {local_ranks} of {ranks} ranks are on this node: runs over several nodes are not supported yet; start all ranks on one node"
    )]
    Nodes { ranks: u32, local_ranks: u32 },
}

/// Connects to the ranks given in the environment; without them the run is one process.
///
/// # Errors
/// The environment contradicts itself, processes are on several nodes, or ranks do not connect in time.
pub(crate) fn connect() -> Result<Arc<Comm>, ConnectError> {
    let world = World::from_env()?;
    if !world.one_node() {
        return Err(ConnectError::Nodes {
            ranks: world.ranks,
            local_ranks: world.local_ranks,
        });
    }
    let at = Rendezvous::from_env(&world)?;
    let comm = Comm::connect(world, &at, Timeouts::default())?;
    Ok(Arc::new(comm))
}

/// The ranks that `comm` connects.
pub(crate) fn ranks_of(comm: &Arc<Comm>) -> Ranks {
    Ranks::new(Arc::new(CommGroup(comm.clone())))
}

/// Refuses ranks whose settings or data differ from those of the first rank.
///
/// # Errors
/// Names the difference; a rank is gone.
pub(crate) fn check_same_run(
    comm: &Comm,
    settings: &[String],
    text_fingerprint: u64,
) -> Result<(), CollectiveError> {
    let same = |what: &str, value: &str| comm.same_everywhere(what, value);
    same("the program", env!("CARGO_PKG_VERSION"))?;
    // Every rank must make the same number of calls.
    same("the number of settings", &settings.len().to_string())?;
    for line in settings {
        same("a setting", line)?;
    }
    same(
        "the text's fingerprint",
        &format!("{text_fingerprint:016x}"),
    )
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
