//! What `trainer launch` is asked for: the ranks of this node, of one node among several, or of all hosts in a host file. The program with
//! libtorch starts them (`trainer/torch/src/launch/`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use offload_support::errln;
use training_ranks::JobToken;

pub mod hostfile;
mod node_count;

use hostfile::{Host, SLOTS_MAX};
pub use node_count::NodeCount;

/// Warning about a run whose rendezvous other machines reach and that has no job token.
pub const OPEN_RENDEZVOUS: &str = "warning: the run has no job token, so any process that reaches its rendezvous can join or disturb it: set OFFLOADD_JOB_TOKEN to the same value on all nodes (`openssl rand -hex 16` makes one)";

/// Ranks of this node, and where they meet the others.
#[derive(Debug)]
pub struct Launch {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of restarts after a failure.
    pub restarts_max: u32,
    /// Where launchers of several nodes meet. `None`: the run has this node only.
    pub meeting: Option<Meeting>,
    /// Whether another launcher started this one and controls it through standard input.
    pub controlled: bool,
}

/// Place of a meeting, and this launcher's part in it.
#[derive(Clone, Debug)]
pub struct Meeting {
    /// Number of nodes.
    pub nodes: NodeCount,
    /// Number of this node.
    pub node: u32,
    /// Host name or address of node 0, where its launcher listens.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Time for nodes to come.
    pub timeout: Duration,
    /// Secret that all launchers of the run have.
    pub token: Option<JobToken>,
}

/// Options of a run on several hosts.
#[derive(Debug)]
pub struct Hosts {
    /// Hosts in the order of their node numbers.
    pub hosts: Vec<Host>,
    /// Program that is called as `PROGRAM HOST COMMAND`.
    pub shell: OsString,
    /// Number of nodes; the largest is the number of hosts.
    pub nodes: NodeCount,
    /// Host name or address of the first host, and port, at which launchers meet.
    pub rendezvous: String,
    /// Time for launchers to come to the rendezvous.
    pub timeout: Duration,
    /// Number of restarts after a failure.
    pub restarts_max: u32,
    /// Secret of the run; made if there is none.
    pub token: Option<JobToken>,
}

/// What to start.
#[derive(Debug)]
pub enum Options {
    /// Ranks on this node.
    Node(Launch),
    /// A launcher on each of several hosts.
    Hosts(Hosts),
}

pub(crate) const EXAMPLES: &str = "Examples:
  trainer launch --nproc 4 RUN.toml
  trainer launch --nproc 2 RUN.toml --set train.steps=50 --fresh    # with options of `trainer train`
  trainer train RUN.toml                                            # resume the same run with one process

Two nodes, with one command on each, and the same OFFLOADD_JOB_TOKEN in both environments:
  trainer launch --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 --nproc 8 RUN.toml
  trainer launch --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29400 --nproc 8 RUN.toml

The hosts of a file with lines such as `worker-1 slots=8`, through ssh:
  trainer launch --hostfile hosts RUN.toml

Under Slurm and Open MPI no launcher is necessary:
  srun trainer train RUN.toml
  mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500 trainer train RUN.toml";

/// Port of the rendezvous on the first host of a host file.
const PORT: u16 = 29400;

/// Longest time to wait for nodes: a week.
const TIMEOUT_S_MAX: u64 = 7 * 24 * 3600;

/// Arguments of `trainer launch`.
#[derive(Args)]
pub struct LaunchArgs {
    /// Number of processes on this node. Each computes on the GPU with its number on the node, or all on the CPU.
    #[arg(long, value_name = "N", required_unless_present = "hostfile",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(SLOTS_MAX)))]
    nproc: Option<u32>,
    /// Number of nodes, or the least and the largest number.
    ///
    /// Each node needs a launcher. The numbers of processes may differ. With a least number such as in `2:4`, the run also starts
    /// when some nodes do not come within 10 s after the others, and starts again without those that fail (--max-restarts).
    #[arg(long, value_name = "N|MIN:MAX")]
    nnodes: Option<NodeCount>,
    /// Number of this node, from 0.
    #[arg(long, value_name = "R", conflicts_with = "hostfile")]
    node_rank: Option<u32>,
    /// Host name or address of node 0, and a free port there. The launcher of node 0 listens at this address only.
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// Time for all nodes to come, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=TIMEOUT_S_MAX))]
    rendezvous_timeout: u64,
    /// Number of times that the processes are started again after a failure.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    max_restarts: u32,
    /// File with the job token, which must be the same on all nodes. Default: the environment variable OFFLOADD_JOB_TOKEN.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Start a launcher on each host of this file, whose lines are `HOST slots=PROCESSES`.
    ///
    /// This program, the run file and the data must be at the same paths on all hosts. The first host is node 0. A job token is
    /// made unless there is one.
    #[arg(long, value_name = "FILE", conflicts_with = "nproc")]
    hostfile: Option<PathBuf>,
    /// Program that runs a command on another host. It is called as `PROGRAM HOST COMMAND`.
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "ssh",
        requires = "hostfile"
    )]
    remote_shell: OsString,
    /// Read the job token and requests to end from standard input, as a launcher that --hostfile starts.
    #[arg(long, hide = true, requires = "node_rank")]
    controlled: bool,
    /// The run file and further arguments of `trainer train`.
    #[arg(
        value_name = "RUN.toml [--set KEY=VALUE]... [--fresh]",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub train: Vec<OsString>,
}

impl LaunchArgs {
    /// What to start, and the number of ranks if it is known already.
    ///
    /// # Errors
    /// Arguments that contradict each other; a host file or a token that cannot be read.
    pub fn options(&self) -> anyhow::Result<(Options, Option<u32>)> {
        if let Some(path) = &self.hostfile {
            let options = self.hosts(path)?;
            let ranks = (options.nodes.min == options.nodes.max)
                .then(|| options.hosts.iter().map(|host| host.slots).sum());
            return Ok((Options::Hosts(options), ranks));
        }
        let options = Launch {
            ranks: self.nproc.expect("required without a host file"),
            restarts_max: self.max_restarts,
            meeting: self.meeting()?,
            controlled: self.controlled,
        };
        let ranks = options.meeting.is_none().then_some(options.ranks);
        Ok((Options::Node(options), ranks))
    }

    /// Where this launcher meets those of other nodes; `None` for a run of one node.
    fn meeting(&self) -> anyhow::Result<Option<Meeting>> {
        let (nodes, node, rendezvous) = match (self.nnodes, self.node_rank, &self.rendezvous) {
            (None, None, None) => return Ok(None),
            (Some(nodes), Some(node), Some(rendezvous)) => (nodes, node, rendezvous),
            (nodes, node, rendezvous) => {
                let given = [
                    ("--nnodes", nodes.is_some()),
                    ("--node-rank", node.is_some()),
                    ("--rendezvous", rendezvous.is_some()),
                ];
                let missing = given.iter().filter(|(_, is_given)| !is_given);
                let missing: Vec<&str> = missing.map(|(name, _)| *name).collect();
                bail!(
                    "{} is missing: a launcher of several nodes needs --nnodes, --node-rank and --rendezvous",
                    missing.join(" and ")
                );
            }
        };
        if node >= nodes.max {
            bail!(
                "--node-rank {node} is too large: {} nodes have the numbers 0 to {}",
                nodes.max,
                nodes.max - 1
            );
        }
        let (host, port) = address(rendezvous)?;
        let token = self.token()?;
        // A launcher that --hostfile started reads its token later.
        if token.is_none() && !self.controlled && node == 0 && !is_loopback(&host) {
            errln!("trainer: {}", OPEN_RENDEZVOUS);
        }
        Ok(Some(Meeting {
            nodes,
            node,
            host,
            port,
            timeout: Duration::from_secs(self.rendezvous_timeout),
            token,
        }))
    }

    fn hosts(&self, path: &Path) -> anyhow::Result<Hosts> {
        let hosts = hostfile::read(path)?;
        let count = hosts.len() as u32;
        let all = NodeCount {
            min: count,
            max: count,
        };
        let nodes = self.nnodes.unwrap_or(all);
        if nodes.max != count {
            bail!(
                "--nnodes {nodes} contradicts {}, which names {count} host(s): leave --nnodes out, or give MIN:{count}",
                path.display()
            );
        }
        let rendezvous = match &self.rendezvous {
            Some(rendezvous) => rendezvous.clone(),
            None => match hosts[0].address() {
                host if host.contains(':') => format!("[{host}]:{PORT}"),
                host => format!("{host}:{PORT}"),
            },
        };
        address(&rendezvous)?;
        Ok(Hosts {
            hosts,
            shell: self.remote_shell.clone(),
            nodes,
            rendezvous,
            timeout: Duration::from_secs(self.rendezvous_timeout),
            restarts_max: self.max_restarts,
            token: self.token()?,
        })
    }

    fn token(&self) -> anyhow::Result<Option<JobToken>> {
        let Some(path) = &self.token_file else {
            return Ok(JobToken::from_env()?);
        };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read --token-file {}", path.display()))?;
        let token = JobToken::new(text.trim_end())
            .with_context(|| format!("--token-file {}", path.display()))?;
        Ok(Some(token))
    }
}

/// Splits `HOST:PORT`; an IPv6 address stands in brackets.
fn address(text: &str) -> anyhow::Result<(String, u16)> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        let port: u16 = port.parse().ok().filter(|&port| digits && port > 0)?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']')?,
            None if host.contains(':') => return None,
            None => host,
        };
        let usable = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        (!host.is_empty() && host.len() <= 253 && host.chars().all(usable))
            .then(|| (host.to_owned(), port))
    });
    parts.with_context(|| {
        format!(
            "--rendezvous {text:?} is not HOST:PORT, such as 10.0.0.1:{PORT} or [fe80::1]:{PORT}"
        )
    })
}

fn is_loopback(host: &str) -> bool {
    let address = host.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_and_checked() {
        for (text, host, port) in [
            ("10.0.0.1:29400", "10.0.0.1", 29400),
            ("node-1.cluster:1", "node-1.cluster", 1),
            ("[fe80::1]:65535", "fe80::1", 65535),
        ] {
            assert_eq!(address(text).unwrap(), (host.to_owned(), port));
        }
        for text in [
            "",
            "host",
            ":1",
            "host:",
            "host:0",
            "host:65536",
            "host:+1",
            "fe80::1:80",
            "[fe80::1:80",
            "a b:1",
        ] {
            let error = address(text).unwrap_err().to_string();
            assert!(error.contains("is not HOST:PORT"), "{text}: {error}");
        }
    }
}
