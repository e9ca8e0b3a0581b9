//! The launchers of a run's nodes meet and agree on who takes part and how ranks are numbered.
//!
//! ```text
//!   node R ──arrived/ROUND/R──▶ store ──▶ node 0 decides ──agreed/ROUND──▶ store ──▶ every node
//! ```
//!
//! The store is c10d's, in the launcher of node 0. A round is one start of the ranks; a restart is the next round. Node 0
//! decides as soon as every expected node is there, or some seconds after the least number of nodes is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use kernels_torch::collective::LauncherStore;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use training_ranks::{CollectiveError, Heartbeat, TOKEN_VARIABLE};

use super::requests::LaunchRequests;
use trainer::launch::{Meeting, NodeCount};

/// Time that node 0 waits for further nodes once the least number is there.
const LAST_CALL: Duration = Duration::from_secs(10);

/// Interval at which launchers look into the store.
const LOOK: Duration = Duration::from_millis(50);

/// Interval at which a waiting launcher looks for signals.
const REQUESTS: Duration = Duration::from_millis(10);

/// Key of the reason for which node 0 refuses the meeting.
const REFUSED: &str = "refused";

/// Node that takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MeetingNode {
    /// Value of its `--node-rank`.
    pub(super) node: u32,
    /// Its host name.
    host: String,
    /// Number of its ranks.
    pub(super) ranks: u32,
    /// Options that must be equal on all nodes.
    options: String,
}

impl std::fmt::Display for MeetingNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "node {} ({})", self.node, self.host)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    #[error(transparent)]
    Store(#[from] CollectiveError),
    #[error(
        "after {waited_s} s {} {} still missing at the rendezvous {place}: start `trainer launch` on {} with the same --nnodes, --rendezvous and {TOKEN_VARIABLE}, or raise --rendezvous-timeout",
        list(missing), if missing.len() == 1 { "is" } else { "are" }, if missing.len() == 1 { "it" } else { "them" }
    )]
    Missing {
        missing: Vec<u32>,
        waited_s: u64,
        place: String,
    },
    #[error(
        "after {waited_s} s node 0 has not answered at the rendezvous {place} ({why}): check that its launcher runs, that the address is that of node 0, that no firewall is between the nodes, and that {TOKEN_VARIABLE} is the same on all nodes"
    )]
    NoAnswer {
        waited_s: u64,
        place: String,
        why: String,
    },
    #[error(
        "node {node} is taken at the rendezvous {place}: two launchers were started with --node-rank {node}; give each node its own number"
    )]
    Taken { node: u32, place: String },
    #[error("node 0 refused to start the run: {0}")]
    Refused(String),
    #[error(
        "the run started without this node, which came too late; with --max-restarts, it can join when the others start again"
    )]
    LeftOut,
    #[error("stopped by a signal while waiting for other nodes")]
    Stopped(Signal),
}

/// Result of a meeting.
pub(super) struct Agreement {
    /// Number of the start, from 0.
    pub(super) round: u32,
    /// Nodes in the order of their ranks.
    pub(super) members: Vec<MeetingNode>,
    /// This node among `members`.
    pub(super) own: usize,
    pub(super) heartbeat: Heartbeat,
}

impl Agreement {
    /// Number of this node's first rank.
    pub(super) fn first_rank(&self) -> u32 {
        self.members[..self.own]
            .iter()
            .map(|member| member.ranks)
            .sum()
    }

    /// Number of all ranks.
    pub(super) fn ranks(&self) -> u32 {
        self.members.iter().map(|member| member.ranks).sum()
    }
}

/// This node's launcher, which meets those of other nodes.
#[derive(Clone)]
pub(super) struct Launchers(pub(super) Meeting);

impl Launchers {
    /// Where the launchers meet, for messages.
    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.0.host, self.0.port)
    }

    /// Runs the store if this is node 0.
    ///
    /// # Errors
    /// The address cannot be listened at.
    pub(super) fn serve(&self) -> Result<Option<LauncherStore>, CollectiveError> {
        let nodes = self.0.nodes.max > 1;
        (self.0.node == 0)
            .then(|| {
                LauncherStore::serve(
                    &self.0.host,
                    self.0.port,
                    self.0.token.as_ref(),
                    nodes,
                    self.0.timeout,
                )
            })
            .transpose()
    }

    /// Meets the other launchers for `round` or a later one. `expected` are the nodes for which node 0 waits longest.
    /// The store is used on another thread, because its calls may block while the network is down.
    ///
    /// # Errors
    /// Nodes do not come in time, or contradict each other; a signal arrived.
    pub(super) fn meet(
        &self,
        ranks: u32,
        restarts_max: u32,
        round: u32,
        expected: BTreeSet<u32>,
        requests: &mut LaunchRequests,
    ) -> Result<Agreement, MeetingError> {
        let own = MeetingNode {
            node: self.0.node,
            host: host_name(),
            ranks,
            options: format!("--nnodes {} --max-restarts {restarts_max}", self.0.nodes),
        };
        let meeting = self.clone();
        let deadline = Instant::now() + self.0.timeout;
        let (sender, result) = channel();
        std::thread::spawn(move || {
            // Nobody receives it after a signal.
            let _ = sender.send(meeting.meet_by(deadline, own, round, &expected));
        });
        // The thread's own errors are more specific than this limit.
        let last = deadline + Duration::from_secs(2);
        loop {
            if let Some(signal) = requests.pending().first() {
                return Err(MeetingError::Stopped(*signal));
            }
            match result.recv_timeout(REQUESTS) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if Instant::now() < last => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(self.no_answer("the connection hangs"));
                }
                Err(RecvTimeoutError::Disconnected) => panic!("the meeting panicked"),
            }
        }
    }

    fn meet_by(
        &self,
        deadline: Instant,
        own: MeetingNode,
        mut round: u32,
        expected: &BTreeSet<u32>,
    ) -> Result<Agreement, MeetingError> {
        let unanswered = |error: CollectiveError| match error {
            CollectiveError::Rendezvous { message, .. } if self.0.node > 0 => {
                self.no_answer(&message)
            }
            error => error.into(),
        };
        let store = LauncherStore::connect(
            &self.0.host,
            self.0.port,
            self.0.token.as_ref(),
            left(deadline),
        )
        .map_err(unanswered)?;
        let mut arrived = false;
        let members = loop {
            if let Some(reason) = store.get(REFUSED)? {
                return Err(MeetingError::Refused(reason));
            }
            if let Some(members) = agreed(&store, round)? {
                if members.iter().any(|member| member.node == own.node) {
                    break members;
                }
                // Its ranks run without this node: the next round may include it.
                (round, arrived) = (round + 1, false);
                continue;
            }
            if !arrived {
                self.arrive(&store, &own, round)?;
                arrived = true;
            }
            if self.0.node == 0 {
                self.decide(&store, &own, round, expected, deadline)?;
            } else if left(deadline).is_zero() {
                return Err(self.unfinished(&store, round)?);
            } else {
                std::thread::sleep(LOOK);
            }
        };
        let own = (members.iter()).position(|member| member.node == own.node);
        let own = own.expect("found above");
        let heartbeat_time = left(deadline).max(Duration::from_secs(10));
        let heartbeat = store.heartbeat(own as u32, members.len() as u32, round, heartbeat_time)?;
        Ok(Agreement {
            round,
            members,
            own,
            heartbeat,
        })
    }

    fn arrive(
        &self,
        store: &LauncherStore,
        own: &MeetingNode,
        round: u32,
    ) -> Result<(), MeetingError> {
        if !store.claim(&format!("taken/{round}/{}", own.node))? {
            return Err(MeetingError::Taken {
                node: own.node,
                place: self.address(),
            });
        }
        let text = serde_json::to_string(own).expect("a member is JSON");
        Ok(store.set(&format!("arrived/{round}/{}", own.node), &text)?)
    }

    /// As node 0: waits for the others, and writes who takes part, or why nobody does.
    fn decide(
        &self,
        store: &LauncherStore,
        own: &MeetingNode,
        round: u32,
        expected: &BTreeSet<u32>,
        deadline: Instant,
    ) -> Result<(), MeetingError> {
        let mut arrived = BTreeMap::new();
        let mut enough_since: Option<Instant> = None;
        let refuse = |reason: String| -> Result<(), MeetingError> {
            store.set(REFUSED, &reason)?;
            // The others read it, each within one look.
            std::thread::sleep(4 * LOOK);
            Err(MeetingError::Refused(reason))
        };
        loop {
            for node in 0..self.0.nodes.max {
                if arrived.contains_key(&node) {
                    continue;
                }
                let Some(text) = store.get(&format!("arrived/{round}/{node}"))? else {
                    continue;
                };
                let Some(member) =
                    parsed::<MeetingNode>(&text).filter(|member| member.node == node)
                else {
                    return refuse(format!(
                        "node {node} runs another version of this program: start the same one on all nodes"
                    ));
                };
                if member.options != own.options {
                    return refuse(format!(
                        "{member} was started with {}, and node 0 with {}: give all nodes the same options",
                        member.options, own.options
                    ));
                }
                arrived.insert(node, member);
            }
            if arrived.len() >= self.0.nodes.min as usize {
                enough_since.get_or_insert_with(Instant::now);
            }
            let waited = enough_since.map(|since| since.elapsed());
            if is_decided(&arrived, expected, self.0.nodes, waited) {
                let members: Vec<MeetingNode> = arrived.into_values().collect();
                let text = serde_json::to_string(&members).expect("members are JSON");
                return Ok(store.set(&agreed_key(round), &text)?);
            }
            if left(deadline).is_zero() {
                let missing = self.missing(|node| arrived.contains_key(&node));
                let _ = refuse(missing.to_string());
                return Err(missing);
            }
            std::thread::sleep(LOOK);
        }
    }

    fn missing(&self, has_arrived: impl Fn(u32) -> bool) -> MeetingError {
        MeetingError::Missing {
            missing: (0..self.0.nodes.max)
                .filter(|&node| !has_arrived(node))
                .collect(),
            waited_s: self.0.timeout.as_secs(),
            place: self.address(),
        }
    }

    /// The reason why nothing was decided in time, for a node other than node 0.
    fn unfinished(
        &self,
        store: &LauncherStore,
        round: u32,
    ) -> Result<MeetingError, CollectiveError> {
        if round > 0 && agreed(store, round - 1)?.is_some() {
            return Ok(MeetingError::LeftOut);
        }
        let mut arrived = BTreeSet::new();
        for node in 0..self.0.nodes.max {
            if store.get(&format!("arrived/{round}/{node}"))?.is_some() {
                arrived.insert(node);
            }
        }
        Ok(self.missing(|node| arrived.contains(&node)))
    }

    fn no_answer(&self, why: &str) -> MeetingError {
        MeetingError::NoAnswer {
            waited_s: self.0.timeout.as_secs(),
            place: self.address(),
            why: why.to_owned(),
        }
    }
}

/// Whether the run starts with the nodes that have arrived. `waited` is the time since there are enough.
fn is_decided(
    arrived: &BTreeMap<u32, MeetingNode>,
    expected: &BTreeSet<u32>,
    nodes: NodeCount,
    waited: Option<Duration>,
) -> bool {
    let Some(waited) = waited.filter(|_| arrived.len() >= nodes.min as usize) else {
        return false;
    };
    waited >= LAST_CALL || expected.iter().all(|node| arrived.contains_key(node))
}

fn agreed_key(round: u32) -> String {
    format!("agreed/{round}")
}

fn agreed(store: &LauncherStore, round: u32) -> Result<Option<Vec<MeetingNode>>, CollectiveError> {
    let text = store.get(&agreed_key(round))?;
    Ok(text.as_deref().and_then(parsed))
}

fn parsed<T: serde::de::DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.chars().filter(|c| c.is_ascii_graphic()).collect()
}

/// Formats nodes as "node 3" or "nodes 1, 2 and 5".
fn list(nodes: &[u32]) -> String {
    let texts: Vec<String> = nodes.iter().map(u32::to_string).collect();
    match texts.as_slice() {
        [] => "no node".to_owned(),
        [one] => format!("node {one}"),
        [most @ .., last] => format!("nodes {} and {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    //! Errors that these tests find: a run starts with fewer nodes than it may; node 0 waits for a node that is known to
    //! be gone, or does not wait for one that is late; nodes disagree about numbers; a launcher waits without end.

    use test_hooks::port::ReservedPort;

    use super::*;
    use training_ranks::JobToken;

    fn member(node: u32) -> MeetingNode {
        MeetingNode {
            node,
            host: format!("h{node}"),
            ranks: node + 1,
            options: String::new(),
        }
    }

    #[test]
    fn node_0_waits_for_the_expected_nodes_and_then_only_for_a_last_call() {
        let nodes = NodeCount { min: 2, max: 4 };
        let decided = |arrived: &[u32], expected: &[u32], waited: Option<Duration>| {
            let arrived = arrived.iter().map(|&node| (node, member(node))).collect();
            is_decided(&arrived, &expected.iter().copied().collect(), nodes, waited)
        };
        let now = Some(Duration::ZERO);
        assert!(decided(&[0, 1, 2, 3], &[0, 1, 2, 3], now));
        assert!(
            !decided(&[0, 1, 2], &[0, 1, 2, 3], now),
            "a node may be late"
        );
        assert!(decided(&[0, 1, 2], &[0, 1, 2, 3], Some(LAST_CALL)));
        assert!(
            decided(&[0, 2], &[0, 2], now),
            "nodes 1 and 3 are known to be gone"
        );
        assert!(!decided(&[0], &[0], Some(2 * LAST_CALL)), "too few");
        assert!(!decided(&[0], &[0], None), "too few");
    }

    /// A meeting at a port that is reserved for it.
    fn meeting(nodes: &str) -> (Meeting, ReservedPort) {
        let port = ReservedPort::new();
        let meeting = Meeting {
            nodes: nodes.parse().unwrap(),
            node: 0,
            host: "127.0.0.1".to_owned(),
            port: port.number(),
            timeout: Duration::from_secs(20),
            token: Some(JobToken::random().unwrap()),
        };
        (meeting, port)
    }

    fn join(
        meeting: &Meeting,
        node: u32,
        ranks: u32,
        round: u32,
        expected: &[u32],
    ) -> Result<Agreement, String> {
        let own = Meeting {
            node,
            ..meeting.clone()
        };
        let expected = expected.iter().copied().collect();
        let mut requests = LaunchRequests::new().unwrap();
        Launchers(own)
            .meet(ranks, 1, round, expected, &mut requests)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn nodes_agree_on_their_numbers_and_meet_again_with_those_that_are_left() {
        let (meeting, _port) = meeting("1:3");
        let _store = Launchers(meeting.clone()).serve().unwrap();
        let all = |round, nodes: &'static [u32]| -> Vec<Agreement> {
            std::thread::scope(|scope| {
                let come = |&node: &u32| {
                    let meeting = &meeting;
                    scope.spawn(move || join(meeting, node, node + 1, round, nodes).unwrap())
                };
                let coming: Vec<_> = nodes.iter().map(come).collect();
                coming
                    .into_iter()
                    .map(|node| node.join().unwrap())
                    .collect()
            })
        };
        let first = all(0, &[0, 1, 2]);
        let numbers = |agreed: &[Agreement]| -> Vec<(u32, u32)> {
            agreed
                .iter()
                .map(|node| (node.first_rank(), node.ranks()))
                .collect()
        };
        assert_eq!(numbers(&first), [(0, 6), (1, 6), (3, 6)]);
        let second = all(1, &[0, 2]);
        assert_eq!(numbers(&second), [(0, 4), (1, 4)]);
        assert!(second.iter().all(|node| node.round == 1));
        // A node that comes late sees that both rounds run without it.
        let impatient = Meeting {
            timeout: Duration::from_secs(1),
            ..meeting.clone()
        };
        let error = join(&impatient, 1, 1, 1, &[]).map(|_| ()).unwrap_err();
        assert!(error.contains("without this node"), "{error}");
    }

    #[test]
    fn launchers_that_do_not_belong_together_are_refused() {
        let hurried = || {
            let (mut meeting, port) = meeting("2");
            meeting.timeout = Duration::from_secs(2);
            (meeting, port)
        };
        // A meeting of its own: the thread that connects goes on for a while, and would come to the next one.
        let (without_node_0, _port) = hurried();
        let error = (join(&without_node_0, 1, 1, 0, &[]).map(|_| ())).unwrap_err();
        assert!(error.contains("node 0 has not answered"), "{error}");
        let (meeting, _port) = hurried();
        let _store = Launchers(meeting.clone()).serve().unwrap();
        let other_token = Meeting {
            token: Some(JobToken::random().unwrap()),
            ..meeting.clone()
        };
        let both = |one: &Meeting| {
            std::thread::scope(|scope| {
                let one = scope.spawn(move || join(one, 1, 1, 0, &[]).map(|_| ()));
                let zero = join(&meeting, 0, 1, 0, &[0, 1]).map(|_| ());
                (zero.unwrap_err(), one.join().unwrap().unwrap_err())
            })
        };
        let (zero, one) = both(&other_token);
        assert!(zero.contains("node 1 is still missing"), "{zero}");
        assert!(
            one.contains("nodes 0 and 1 are still missing")
                || one.contains("node 0 is still missing"),
            "{one}"
        );
    }

    #[test]
    fn options_that_differ_are_refused_on_every_node() {
        let (meeting, _port) = meeting("2");
        let _store = Launchers(meeting.clone()).serve().unwrap();
        let other = Meeting {
            nodes: "1:2".parse().unwrap(),
            ..meeting.clone()
        };
        std::thread::scope(|scope| {
            let one = scope.spawn(|| join(&other, 1, 1, 0, &[]).map(|_| ()));
            let zero = join(&meeting, 0, 1, 0, &[0, 1]).map(|_| ()).unwrap_err();
            for error in [zero, one.join().unwrap().unwrap_err()] {
                assert!(
                    error.contains("was started with --nnodes 1:2")
                        && error.contains("node 0 with --nnodes 2 "),
                    "{error}"
                );
            }
        });
    }
}
