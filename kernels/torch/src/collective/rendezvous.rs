//! Meeting point of a run's ranks: a directory on one node, or a TCP address.

use std::path::PathBuf;

use super::world::{lossy, number};
use super::{CollectiveError, World};

/// Variable with the directory in which the ranks of one node meet. `trainer launch` creates it, readable by its user
/// only.
pub const DIR_VARIABLE: &str = "OFFLOADD_RENDEZVOUS";

/// Meeting point of a run's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// One process: no rendezvous.
    Alone,
    /// An empty directory, created for this launch. All ranks are on this node.
    Dir(PathBuf),
    /// A store that listens at an address.
    Tcp {
        /// Host name or address.
        host: String,
        /// TCP port.
        port: u16,
        /// Whether rank 0 runs the store; otherwise the launcher does.
        ours: bool,
        /// Prefix that separates this launch's keys from those of an earlier one in the same store.
        prefix: String,
        /// Network interface for Gloo; without one, that of the route to `host`.
        interface: Option<String>,
    },
}

impl Rendezvous {
    /// Reads the environment: the directory in [`DIR_VARIABLE`], else torchrun's `MASTER_ADDR` and `MASTER_PORT`. A
    /// store of the launcher (`TORCHELASTIC_USE_AGENT_STORE=True`) is used as it is. `GLOO_SOCKET_IFNAME` names the
    /// interface, as for torch.
    ///
    /// # Errors
    /// A variable is missing or is not a directory, host or port.
    pub fn from_env(world: &World) -> Result<Rendezvous, CollectiveError> {
        Rendezvous::from_variables(world, &mut |name| std::env::var_os(name).map(lossy))
    }

    /// Like [`Rendezvous::from_env`], with the variables from `get`.
    pub fn from_variables(
        world: &World,
        get: &mut dyn FnMut(&str) -> Option<String>,
    ) -> Result<Rendezvous, CollectiveError> {
        if world.ranks == 1 {
            return Ok(Rendezvous::Alone);
        }
        if let Some(dir) = get(DIR_VARIABLE) {
            let problem = if dir.is_empty() {
                "is empty"
            } else if !world.one_node() {
                "names a directory, but the run has processes on other nodes: give MASTER_ADDR and MASTER_PORT instead"
            } else {
                return Ok(Rendezvous::Dir(dir.into()));
            };
            return Err(CollectiveError::Environment {
                name: DIR_VARIABLE,
                value: dir,
                problem: problem.to_owned(),
            });
        }
        let host = get("MASTER_ADDR").ok_or(CollectiveError::Missing {
            name: "MASTER_ADDR",
        })?;
        let printable = |c: char| c.is_ascii_graphic();
        if host.is_empty() || host.len() > 253 || !host.chars().all(printable) {
            return Err(CollectiveError::Environment {
                name: "MASTER_ADDR",
                value: host,
                problem: "is no host name or address".to_owned(),
            });
        }
        let port = number("MASTER_PORT", get("MASTER_PORT"), 1, u16::MAX.into())? as u16;
        let agent = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        // The launcher's store survives restarts of its workers, with their old keys.
        let mut part = |name| get(name).unwrap_or_default();
        let prefix = format!(
            "offloadd/{}/{}",
            part("TORCHELASTIC_RUN_ID"),
            part("TORCHELASTIC_RESTART_COUNT")
        );
        Ok(Rendezvous::Tcp {
            host,
            port,
            ours: !agent,
            prefix,
            interface: get("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_NODE: World = World {
        rank: 1,
        ranks: 2,
        local_rank: 1,
        local_ranks: 2,
    };
    const TWO_NODES: World = World {
        rank: 1,
        ranks: 2,
        local_rank: 0,
        local_ranks: 1,
    };

    fn found(world: &World, variables: &[(&str, &str)]) -> Result<Rendezvous, String> {
        Rendezvous::from_variables(world, &mut |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn one_process_meets_nobody() {
        assert_eq!(found(&World::ALONE, &[]).unwrap(), Rendezvous::Alone);
    }

    #[test]
    fn a_directory_comes_before_an_address() {
        let variables = [(DIR_VARIABLE, "/run/meet"), ("MASTER_ADDR", "host")];
        assert_eq!(
            found(&ONE_NODE, &variables).unwrap(),
            Rendezvous::Dir("/run/meet".into())
        );
        let error = found(&TWO_NODES, &variables).unwrap_err();
        assert!(error.contains("other nodes"), "{error}");
        let error = found(&ONE_NODE, &[(DIR_VARIABLE, "")]).unwrap_err();
        assert!(error.contains("is empty"), "{error}");
    }

    #[test]
    fn an_address_is_served_by_rank_0_or_by_the_launcher() {
        let mut variables = vec![("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        let tcp = |ours, prefix: &str| Rendezvous::Tcp {
            host: "10.0.0.1".to_owned(),
            port: 29500,
            ours,
            prefix: prefix.to_owned(),
            interface: None,
        };
        assert_eq!(
            found(&TWO_NODES, &variables).unwrap(),
            tcp(true, "offloadd//")
        );
        variables.extend([
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ]);
        assert_eq!(
            found(&TWO_NODES, &variables).unwrap(),
            tcp(false, "offloadd/none/2")
        );
    }

    #[test]
    fn a_missing_or_impossible_address_is_named() {
        let error = found(&TWO_NODES, &[]).unwrap_err();
        assert!(error.contains("MASTER_ADDR is not set"), "{error}");
        let error = found(&TWO_NODES, &[("MASTER_ADDR", "host")]).unwrap_err();
        assert!(error.contains("MASTER_PORT is not set"), "{error}");
        for host in ["", "a b", "a\nb", &"x".repeat(254), "ho\u{fffd}st"] {
            let error = found(&TWO_NODES, &[("MASTER_ADDR", host)]).unwrap_err();
            assert!(error.contains("no host name"), "{host}: {error}");
        }
        for port in ["", "0", "65536", "-1", "http"] {
            let variables = [("MASTER_ADDR", "host"), ("MASTER_PORT", port)];
            let error = found(&TWO_NODES, &variables).unwrap_err();
            assert!(error.contains("MASTER_PORT"), "{port}: {error}");
        }
    }
}
