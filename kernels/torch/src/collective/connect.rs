//! Connects the ranks of a run: heartbeats first, so that a missing rank is named; then Gloo.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::gloo::{Group, Interface, Store};
use super::tcp_heartbeat_store::TcpHeartbeatStore;
use training_ranks::{
    CollectiveError, DirHeartbeatStore, Heartbeat, Rendezvous, Timeouts, World, listen,
};

/// Interval of checks for dead ranks during other waits.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A rank's connections. Dropped in this order.
pub(super) struct Connections {
    pub(super) group: Group,
    pub(super) heartbeat: Arc<Heartbeat>,
    /// The store's server, if this rank runs it; dropped last.
    pub(super) store: Option<Store>,
}

/// Connects this rank with all others.
pub(super) fn connect(
    world: World,
    at: &Rendezvous,
    timeouts: Timeouts,
) -> Result<Connections, CollectiveError> {
    let deadline = Instant::now() + timeouts.connect;
    let (heartbeat, store) = match at {
        Rendezvous::Alone => panic!("a run of one process connects with nobody"),
        Rendezvous::Dir(dir) => {
            let heartbeats = Box::new(DirHeartbeatStore::open(&world, dir)?);
            let place = dir.display().to_string();
            let heartbeat = Heartbeat::start(world, timeouts, heartbeats, None, place);
            (heartbeat, None)
        }
        Rendezvous::Tcp { .. } => beat_over_tcp(world, at, timeouts, deadline)?,
    };
    let meeting = Meeting::new(&world, at, "")?;
    let group = meet(world, timeouts, &heartbeat, meeting, deadline)?;
    Ok(Connections {
        group,
        heartbeat: Arc::new(heartbeat),
        store,
    })
}

/// Connects ranks that [`connect`] has connected in another group, called `name`.
pub(super) fn connect_side(
    world: World,
    at: &Rendezvous,
    timeouts: Timeouts,
    heartbeat: &Heartbeat,
    name: &str,
) -> Result<Group, CollectiveError> {
    let deadline = Instant::now() + timeouts.connect;
    let meeting = Meeting::new(&world, at, name)?;
    meet(world, timeouts, heartbeat, meeting, deadline)
}

/// Starts heartbeats in a TCP store, which rank 0 serves unless the launcher does.
fn beat_over_tcp(
    world: World,
    at: &Rendezvous,
    timeouts: Timeouts,
    deadline: Instant,
) -> Result<(Heartbeat, Option<Store>), CollectiveError> {
    let Rendezvous::Tcp {
        host,
        port,
        ours,
        prefix,
        ..
    } = at.clone()
    else {
        unreachable!("called for TCP only")
    };
    let place = format!("{host}:{port}");
    let serves = ours && world.rank == 0;
    let opening = move || {
        let listener = serves
            .then(|| listen(&host, port, !world.one_node()))
            .transpose()?;
        let open = |listener| Store::over_tcp(&host, port, listener, &prefix, left(deadline));
        let server = listener.map(|listener| open(Some(listener))).transpose()?;
        let heartbeat_store = TcpHeartbeatStore::open(open(None)?, world.rank)?;
        Ok((server, heartbeat_store))
    };
    // Resolving a name and waiting for the store have no reliable timeouts of their own.
    let (server, heartbeat_store) = bounded(deadline, opening, || None)
        .unwrap_or_else(|| Err(absent(vec![0], timeouts, &place)))
        .map_err(|error| match error {
            // No server listens where rank 0 should.
            CollectiveError::Rendezvous { .. } if ours && !serves && left(deadline).is_zero() => {
                absent(vec![0], timeouts, &place)
            }
            error => error,
        })?;
    let host_rank = ours.then_some(0);
    let heartbeats = Box::new(heartbeat_store);
    let heartbeat = Heartbeat::start(world, timeouts, heartbeats, host_rank, place);
    Ok((heartbeat, server))
}

/// Where the ranks of a group find each other's addresses.
struct Meeting {
    place: String,
    interface: Interface,
    /// Opens the store with the addresses, within a time limit.
    open: Box<dyn FnOnce(Duration) -> Result<Store, CollectiveError> + Send>,
}

impl Meeting {
    /// Meeting of the group called `name`; the first group has no name.
    fn new(world: &World, at: &Rendezvous, name: &str) -> Result<Self, CollectiveError> {
        let ranks = world.ranks;
        match at.clone() {
            Rendezvous::Alone => panic!("a run of one process meets nobody"),
            Rendezvous::Dir(dir) => {
                let file = format!("store{name}");
                Ok(Self {
                    place: dir.display().to_string(),
                    interface: Interface::Address(Ipv4Addr::LOCALHOST.to_string()),
                    open: Box::new(move |timeout| Store::in_dir(&dir, &file, ranks, timeout)),
                })
            }
            Rendezvous::Tcp {
                host,
                port,
                prefix,
                interface,
                ..
            } => {
                let place = format!("{host}:{port}");
                let interface = match interface {
                    Some(name) => Interface::Name(name),
                    None if world.one_node() => Interface::Address(Ipv4Addr::LOCALHOST.to_string()),
                    None => Interface::Address(route_to(&host, port, &place)?.to_string()),
                };
                let prefix = format!("{prefix}{name}");
                Ok(Self {
                    place,
                    interface,
                    open: Box::new(move |timeout| {
                        Store::over_tcp(&host, port, None, &prefix, timeout)
                    }),
                })
            }
        }
    }
}

/// Waits until all ranks send heartbeats, then connects them.
fn meet(
    world: World,
    timeouts: Timeouts,
    heartbeat: &Heartbeat,
    meeting: Meeting,
    deadline: Instant,
) -> Result<Group, CollectiveError> {
    const OP: &str = "connecting the ranks";
    let Meeting {
        place,
        interface: at,
        open,
    } = meeting;
    let met = || {
        while !heartbeat.absent().is_empty() {
            if let Some(gone) = heartbeat.verdict(OP) {
                return Err(gone);
            }
            if left(deadline).is_zero() {
                return Err(absent(heartbeat.absent(), timeouts, &place));
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        // All ranks are there, so connecting is quick unless a rank has just stopped.
        let last = deadline.max(Instant::now() + timeouts.attribute());
        let operation = 2 * timeouts.operation + timeouts.connect;
        let connecting = move || {
            let store = open(left(last))?;
            Group::connect(&store, world, &at, left(last), operation)
        };
        let verdict = || heartbeat.verdict(OP);
        match bounded(last, connecting, verdict) {
            Some(Ok(group)) => Ok(group),
            Some(Err(error)) => Err(attribute(heartbeat, timeouts, OP).unwrap_or(error)),
            None => Err(CollectiveError::Rendezvous {
                op: OP,
                place,
                message: format!("not done after {:.0} s", timeouts.connect.as_secs_f64()),
            }),
        }
    };
    let met = met();
    if let Err(error) = &met {
        heartbeat.end(&format!("it could not connect: {error}"));
    }
    met
}

/// After a failure: the error of the rank that is gone, once that is known; `None` if all are alive.
pub(super) fn attribute(
    heartbeat: &Heartbeat,
    timeouts: Timeouts,
    op: &str,
) -> Option<CollectiveError> {
    let until = Instant::now() + timeouts.attribute();
    loop {
        if let Some(gone) = heartbeat.verdict(op) {
            return Some(gone);
        }
        if left(until).is_zero() {
            return None;
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

/// Runs `f` on a thread of its own, for at most `time`; returns its result, or an error that `verdict` finds before.
pub(super) fn left_alone<T: Send + 'static>(
    time: Duration,
    op: &str,
    f: impl FnOnce() -> Result<T, CollectiveError> + Send + 'static,
    verdict: impl Fn() -> Option<CollectiveError>,
) -> Result<T, CollectiveError> {
    bounded(Instant::now() + time, f, verdict).unwrap_or_else(|| {
        Err(CollectiveError::Backend {
            op: op.to_owned(),
            message: format!("not done after {:.0} s", time.as_secs_f64()),
        })
    })
}

/// Runs `f` on a thread of its own; returns its result, or an error that `verdict` finds before; `None` after the
/// deadline. The thread is then left to its own timeouts.
fn bounded<T: Send + 'static>(
    deadline: Instant,
    f: impl FnOnce() -> Result<T, CollectiveError> + Send + 'static,
    verdict: impl Fn() -> Option<CollectiveError>,
) -> Option<Result<T, CollectiveError>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(f()));
    // Slightly longer than the timeout of `f`, whose own error is more specific.
    let deadline = deadline + Duration::from_secs(1);
    loop {
        match receiver.recv_timeout(CHECK_INTERVAL) {
            Ok(result) => return Some(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                panic!("connecting panicked")
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(gone) = verdict() {
            return Some(Err(gone));
        }
        if left(deadline).is_zero() {
            return None;
        }
    }
}

/// This node's address on the route to `host`.
fn route_to(host: &str, port: u16, place: &str) -> Result<IpAddr, CollectiveError> {
    let local = |to: SocketAddr| {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a UDP socket sends nothing; it only determines the route.
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(to)?;
        Ok(socket.local_addr()?.ip())
    };
    let found = (host, port)
        .to_socket_addrs()
        .and_then(|mut found| {
            found
                .next()
                .ok_or_else(|| std::io::Error::other("no address"))
        })
        .and_then(local);
    found.map_err(|error| CollectiveError::Rendezvous {
        op: "finding the route",
        place: place.to_owned(),
        message: error.to_string(),
    })
}

fn absent(ranks: Vec<u32>, timeouts: Timeouts, place: &str) -> CollectiveError {
    CollectiveError::Absent {
        ranks,
        waited_s: timeouts.connect.as_secs_f64(),
        place: place.to_owned(),
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    //! Ranks as threads of this process, for cases in which no rank dies.
    use std::net::TcpListener;

    use super::*;
    use crate::collective::Comm;

    /// One of two ranks on one node.
    fn of_two(rank: u32) -> World {
        World {
            rank,
            ranks: 2,
            local_rank: rank,
            local_ranks: 2,
        }
    }

    const PATIENCE: Timeouts = Timeouts {
        connect: Duration::from_secs(20),
        operation: Duration::from_secs(20),
        silence: Duration::from_secs(2),
        beat: Duration::from_millis(100),
    };

    #[test]
    fn ranks_meet_in_a_store_that_a_launcher_runs_also_when_it_starts_them_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let opening = Duration::from_secs(20);
        let launcher = Store::over_tcp("127.0.0.1", port, Some(listener), "launcher", opening);
        let launcher = launcher.unwrap();
        let at = |restart: u32| Rendezvous::Tcp {
            host: "127.0.0.1".to_owned(),
            port,
            ours: false,
            prefix: format!("run/{restart}"),
            has_token: false,
            interface: None,
        };
        let meet = |restart: u32| -> Vec<Comm> {
            let connect =
                |rank| move || Comm::connect(of_two(rank), &at(restart), PATIENCE).unwrap();
            std::thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| scope.spawn(connect(rank)));
                ranks.map(|rank| rank.join().unwrap()).into()
            })
        };
        drop(meet(0));
        let comms = meet(1);
        std::thread::scope(|scope| {
            for comm in &comms {
                scope.spawn(|| {
                    let mut values = [f64::from(comm.world().rank) + 1.0];
                    comm.all_reduce_sum_f64(&mut values).unwrap();
                    assert_eq!(values, [3.0]);
                });
            }
        });
        assert_eq!(comms[0].gone(), None);
        // The run ends with the launcher.
        drop(launcher);
        let until = Instant::now() + Duration::from_secs(5);
        while comms[0].gone().is_none() && !left(until).is_zero() {
            std::thread::sleep(CHECK_INTERVAL);
        }
        let gone = comms[0].gone();
        assert!(
            matches!(gone, Some(CollectiveError::Rendezvous { .. })),
            "{gone:?}"
        );
    }

    #[test]
    fn gloo_uses_the_address_on_the_way_to_the_store() {
        assert_eq!(
            route_to("127.0.0.1", 29500, "here").unwrap(),
            IpAddr::V4(Ipv4Addr::LOCALHOST)
        );
        let error = route_to("no-such-host.invalid", 29500, "there").unwrap_err();
        assert!(
            error
                .to_string()
                .contains("finding the route at the rendezvous there"),
            "{error}"
        );
    }
}
