//! Meeting point of a run's ranks: a directory on one node, or a TCP address.

use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;

use super::job_token::JobToken;
use super::starter::Starter;
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
        /// Prefix that separates this launch's keys from those of an earlier one in the same store. It contains the job
        /// token.
        prefix: String,
        /// Whether the prefix contains a job token.
        has_token: bool,
        /// Network interface for Gloo; without one, that of the route to `host`.
        interface: Option<String>,
    },
}

impl Rendezvous {
    /// Reads the environment: the directory in [`DIR_VARIABLE`], else `MASTER_ADDR` and `MASTER_PORT`, which torchrun sets.
    /// Under Slurm the ranks otherwise meet on the first node, at a port that the numbers of job and step determine. A
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
        let started = Starter::from_variables(get)?;
        let step = match &started {
            Starter::Slurm(step) => Some(step),
            _ => None,
        };
        let host = get("MASTER_ADDR").or_else(|| Some(step?.first_node.clone()));
        let host = host.ok_or(CollectiveError::Missing {
            name: "MASTER_ADDR",
            help: started.help(),
        })?;
        let printable = |c: char| c.is_ascii_graphic();
        if host.is_empty() || host.len() > 253 || !host.chars().all(printable) {
            return Err(CollectiveError::Environment {
                name: "MASTER_ADDR",
                value: host,
                problem: "is no host name or address".to_owned(),
            });
        }
        let port = match (get("MASTER_PORT"), step) {
            (None, Some(step)) => step.port,
            (port, _) => number("MASTER_PORT", port, 1, u16::MAX.into(), started.help())? as u16,
        };
        let agent = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let token = JobToken::from_variables(get)?;
        // The launcher's store survives restarts of its workers, with their old keys.
        let mut part = |name| get(name).unwrap_or_default();
        let run = match step {
            Some(step) => step.run.clone(),
            None => format!(
                "{}/{}",
                part("TORCHELASTIC_RUN_ID"),
                part("TORCHELASTIC_RESTART_COUNT")
            ),
        };
        Ok(Rendezvous::Tcp {
            host,
            port,
            ours: !agent,
            prefix: key_prefix(token.as_ref(), &run),
            has_token: token.is_some(),
            interface: get("GLOO_SOCKET_IFNAME").filter(|name| !name.is_empty()),
        })
    }

    /// Whether any process on the network that reaches rank 0 can join the run: its ranks meet at an address other than
    /// loopback, and have no job token.
    pub fn is_open(&self) -> bool {
        match self {
            Rendezvous::Tcp {
                host,
                ours,
                has_token,
                ..
            } => *ours && !has_token && !is_loopback(host),
            Rendezvous::Alone | Rendezvous::Dir(_) => false,
        }
    }
}

/// Prefix of the keys of `run`.
pub fn key_prefix(token: Option<&JobToken>, run: &str) -> String {
    format!("offloadd/{}/{run}", token.map_or("", JobToken::secret))
}

/// Whether `host` names the loopback interface without asking a name server.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Listens at `host` and `port` only: c10d by itself would listen on every interface. With `nodes` ranks on other nodes come
/// there, so a name that means the loopback interface on this node is refused.
pub fn listen(host: &str, port: u16, nodes: bool) -> Result<TcpListener, CollectiveError> {
    let failed = |message: String| CollectiveError::Rendezvous {
        op: "listening",
        place: format!("{host}:{port}"),
        message,
    };
    let listener = TcpListener::bind((host, port)).map_err(|error| failed(error.to_string()))?;
    let address = listener
        .local_addr()
        .map_err(|error| failed(error.to_string()))?;
    if nodes && address.ip().is_loopback() && !is_loopback(host) {
        return Err(failed(format!(
            "{host} is {} on this node, where other nodes cannot reach it; give the address that they use",
            address.ip()
        )));
    }
    Ok(listener)
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
            has_token: false,
            interface: None,
        };
        assert_eq!(
            found(&TWO_NODES, &variables).unwrap(),
            tcp(true, "offloadd///")
        );
        variables.extend([
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ]);
        assert_eq!(
            found(&TWO_NODES, &variables).unwrap(),
            tcp(false, "offloadd//none/2")
        );
    }

    #[test]
    fn tasks_of_slurm_meet_on_the_first_node_unless_an_address_is_given() {
        let mut variables = vec![
            ("SLURM_STEP_ID", "2"),
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ];
        let tcp = |host: &str, port| Rendezvous::Tcp {
            host: host.to_owned(),
            port,
            ours: true,
            prefix: "offloadd//slurm-4711.2.".to_owned(),
            has_token: false,
            interface: None,
        };
        let by_step = found(&TWO_NODES, &variables).unwrap();
        assert_eq!(by_step, tcp("gpu07", 16_043));
        assert!(by_step.is_open());
        variables.extend([("MASTER_ADDR", "10.0.0.7"), ("MASTER_PORT", "29500")]);
        assert_eq!(
            found(&TWO_NODES, &variables).unwrap(),
            tcp("10.0.0.7", 29500)
        );
    }

    #[test]
    fn mpirun_does_not_say_where_processes_meet() {
        let variables = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        let error = found(&TWO_NODES, &variables).unwrap_err();
        assert!(
            error.contains("MASTER_ADDR is not set: mpirun does not say"),
            "{error}"
        );
    }

    #[test]
    fn a_token_is_part_of_every_key_and_closes_the_run() {
        let token = "0123456789abcdef0123456789abcdef";
        let mut variables = vec![("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        assert!(found(&TWO_NODES, &variables).unwrap().is_open());
        variables.push(("OFFLOADD_JOB_TOKEN", token));
        let with = found(&TWO_NODES, &variables).unwrap();
        assert!(!with.is_open());
        let Rendezvous::Tcp { prefix, .. } = with else {
            panic!("{with:?}")
        };
        assert_eq!(prefix, format!("offloadd/{token}//"));
        for host in ["127.0.0.1", "::1", "localhost"] {
            let variables = [("MASTER_ADDR", host), ("MASTER_PORT", "29500")];
            assert!(!found(&TWO_NODES, &variables).unwrap().is_open(), "{host}");
        }
        let short = [
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "1"),
            ("OFFLOADD_JOB_TOKEN", "short"),
        ];
        let error = found(&TWO_NODES, &short).unwrap_err();
        assert!(
            error.contains("OFFLOADD_JOB_TOKEN does not have 16"),
            "{error}"
        );
    }

    #[test]
    fn the_listener_is_at_its_address_only_and_a_name_that_others_cannot_reach_is_refused() {
        let listener = listen("127.0.0.1", 0, true).unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(address.ip().to_string(), "127.0.0.1");
        let error = listen("127.0.0.1", address.port(), true).unwrap_err();
        let place = format!(
            "listening at the rendezvous 127.0.0.1:{} failed",
            address.port()
        );
        assert!(error.to_string().contains(&place), "{error}");
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
