//! Several nodes, the messages between them, and everything that happens to them.

use offload_client::nodes::Disagreement;
use offloadd::core::Event;
use test_hooks::random::SimRandom;

use super::Counts;
use super::member::{Body, ClusterKnowledge, EndReason, Member};
use super::oracle::Oracle;
use crate::disks::SimDisks;
use crate::world::{World, formatted_with, job};

/// Smallest drives of a store: most of the time is spent on their memory.
const DISKS_BYTES: [u64; 2] = [2 << 20, 2 << 20];

fn formatted() -> SimDisks {
    formatted_with(DISKS_BYTES)
}

/// A message to one node. Those of other starts are not delivered, because every start connects anew.
struct Message {
    start: u64,
    from: usize,
    to: usize,
    body: Body,
}

enum Machine {
    Up(Box<World>),
    Down(Box<(SimDisks, SimRandom)>),
}

struct Node {
    machine: Option<Machine>,
    member: Option<Member>,
    /// Stopped processes that have survived their daemon.
    orphans: Vec<Member>,
    /// Older content of the drives.
    copy: Option<SimDisks>,
    /// The drives' own content, while another one is in its place that no start has accepted.
    newest: Option<SimDisks>,
}

impl Node {
    fn world(&mut self) -> Option<&mut World> {
        match self.machine.as_mut().expect("up or down") {
            Machine::Up(world) => Some(world),
            Machine::Down(_) => None,
        }
    }

    /// Ends the daemon, and with `power` loses what was not flushed.
    fn crash(&mut self, power: bool) {
        let machine = self.machine.take().expect("up or down");
        self.machine = Some(match machine {
            Machine::Up(world) => Machine::Down(Box::new(world.crash(power))),
            down => down,
        });
    }
}

pub(super) struct Cluster<'a> {
    random: SimRandom,
    nodes: Vec<Node>,
    tiles: usize,
    messages: Vec<Message>,
    /// Side of each node, while messages between the sides are not delivered.
    partition: Option<Vec<bool>>,
    /// Number of the newest start.
    start: u64,
    /// Whether a process of the newest start has ended, so that the next process begins another start.
    over: bool,
    /// The last start whose nodes disagreed.
    refused: u64,
    oracle: Oracle,
    counts: &'a mut Counts,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(seed: u64, counts: &'a mut Counts) -> Self {
        let mut random = SimRandom::new(seed);
        let node_count = 2 + random.below(3);
        let nodes = (0..node_count).map(|_| Node {
            machine: Some(Machine::Down(Box::new((
                formatted(),
                SimRandom::new(random.number()),
            )))),
            member: None,
            orphans: Vec::new(),
            copy: None,
            newest: None,
        });
        let nodes = nodes.collect();
        Self {
            nodes,
            tiles: 1 + random.below(4),
            random,
            messages: Vec::new(),
            partition: None,
            start: 0,
            over: true,
            refused: 0,
            oracle: Oracle::default(),
            counts,
        }
    }

    pub(super) fn run(mut self) {
        for _ in 0..100 + self.random.below(1400) {
            self.tick();
            if self.random.one_in(120) {
                self.incident();
            }
        }
        if self.random.one_in(2) {
            self.cut_all();
        }
        self.partition = None;
        let target = self.oracle.newest_confirmed() + 2;
        for _ in 0..30_000 {
            self.tick();
            if self.oracle.newest_confirmed() >= target {
                return;
            }
        }
        panic!("the nodes do not continue");
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn tick(&mut self) {
        let at = self.random.below(self.nodes.len());
        match self.random.below(8) {
            0..=3 => {
                if let Some(world) = self.nodes[at].world() {
                    world.step();
                }
            }
            4..=5 => self.advance(at),
            _ => self.deliver(),
        }
    }

    /// Lets a node take its next step: its power returns, its daemon, launcher or processes do something.
    fn advance(&mut self, at: usize) {
        if self.nodes[at].world().is_none() {
            return self.power_on(at);
        }
        if let Some(orphan) = self.nodes[at].orphans.pop() {
            return self
                .with_world(at, |world, shared| orphan.call_late(world, shared))
                .0;
        }
        match &self.nodes[at].member {
            None => self.launch(at),
            Some(member) if member.stopped => self.beside_stopped(at),
            Some(_) => self.step(at),
        }
    }

    /// Calls `run` with the daemon of a node that is up. Returns its result and the messages for the other nodes.
    fn with_world<T>(
        &mut self,
        at: usize,
        run: impl FnOnce(&mut World, &mut ClusterKnowledge<'_>) -> T,
    ) -> (T, Vec<Body>) {
        let changed = self.nodes.iter().any(|node| node.newest.is_some());
        let mut shared = ClusterKnowledge {
            changed,
            oracle: &mut self.oracle,
            counts: self.counts,
            random: &mut self.random,
            sent: Vec::new(),
        };
        let world = self.nodes[at].world().expect("it is up");
        let result = run(world, &mut shared);
        (result, shared.sent)
    }

    fn send(&mut self, start: u64, from: usize, body: &Body) {
        for to in (0..self.nodes.len()).filter(|to| *to != from) {
            let body = body.clone();
            self.messages.push(Message {
                start,
                from,
                to,
                body,
            });
        }
    }

    /// Starts the processes of a node; they join the newest start, unless a process of it has ended already.
    fn launch(&mut self, at: usize) {
        if std::mem::take(&mut self.over) {
            self.start += 1;
        }
        let (start, sizes) = (self.start, [at, self.nodes.len(), self.tiles]);
        let (member, sent) = self.with_world(at, |world, shared| {
            Member::open(world, sizes, start, shared)
        });
        self.nodes[at].member = member;
        for body in sent {
            self.send(start, at, &body);
        }
    }

    /// The processes of a node are stopped: they continue, are killed, or another start is tried beside them.
    fn beside_stopped(&mut self, at: usize) {
        let member = self.nodes[at].member.as_mut().expect("it is stopped");
        match self.random.below(12) {
            0 => {
                member.stopped = false;
                let start = member.start;
                // Sooner or later they notice that the others have given them up.
                self.messages.push(Message {
                    start,
                    from: at,
                    to: at,
                    body: Body::Broken,
                });
                self.count("stopped processes that continued");
            }
            1 => self.end(at),
            2 => {
                let rank = self.random.below(member.ranks.len()) as u32;
                let world = self.nodes[at].world().expect("it is up");
                world.open(&job("a"), rank, 2).unwrap_err();
                self.count("starts refused beside a stopped process");
            }
            _ => {}
        }
    }

    fn step(&mut self, at: usize) {
        let mut member = self.nodes[at].member.take().expect("it runs");
        let start = member.start;
        let chose_before = self.oracle.has_chosen(start);
        let (result, sent) = self.with_world(at, |world, shared| member.step(world, shared));
        self.nodes[at].member = Some(member);
        for body in sent {
            self.send(start, at, &body);
        }
        match result {
            Ok(()) if self.oracle.has_chosen(start) && !chose_before => {
                // Accepts the drives' content of which this start has a report.
                let joined = |node: &&mut Node| {
                    let member = node.member.as_ref();
                    member.is_some_and(|member| member.start == start)
                };
                let joined = self.nodes.iter_mut().filter(joined);
                joined.for_each(|node| node.newest = None);
            }
            Ok(()) => {}
            Err(EndReason::TriesAgain) => self.end(at),
            // Another node of this start has found it first.
            Err(EndReason::Disagrees(_)) if self.refused == start => self.end(at),
            Err(EndReason::Disagrees(why)) => {
                self.refused = start;
                self.refuse(at, &why);
            }
        }
    }

    /// The nodes disagree: only those whose drives were changed may be blamed. The drives' own content returns.
    fn refuse(&mut self, at: usize, why: &Disagreement) {
        let changed = |node: &u32| self.nodes[*node as usize].newest.is_some();
        let blamed = match why {
            Disagreement::Lost { lacking, .. } => lacking.iter().all(changed),
            Disagreement::Twice { nodes, .. } => nodes.iter().any(changed),
            Disagreement::Node { node, .. } => changed(node),
            Disagreement::Run { .. } | Disagreement::Nodes { .. } => false,
        };
        assert!(blamed, "{why}");
        self.count("disagreements refused");
        self.end(at);
        for at in 0..self.nodes.len() {
            if let Some(newest) = self.nodes[at].newest.take() {
                self.die(at, true);
                let Some(Machine::Down(down)) = &mut self.nodes[at].machine else {
                    panic!("its power was cut");
                };
                down.0 = newest;
            }
        }
    }

    /// Delivers one of the messages, if it can be delivered now.
    fn deliver(&mut self) {
        if self.messages.is_empty() {
            return;
        }
        let chosen = self.random.below(self.messages.len());
        let message = self.messages.swap_remove(chosen);
        let broken = matches!(message.body, Body::Broken);
        let cut =
            (self.partition.as_ref()).is_some_and(|side| side[message.from] != side[message.to]);
        let joins = message.start == self.start && !self.over;
        match &mut self.nodes[message.to].member {
            Some(member) if member.start == message.start => match () {
                () if member.stopped || (cut && !broken) => self.messages.push(message),
                () if broken => self.end(message.to),
                () => member.receive(message.from, &message.body),
            },
            // The receiver is yet to join this start.
            _ if joins => self.messages.push(message),
            _ => {}
        }
    }

    /// Ends the processes of a node. The other nodes notice it later.
    fn end(&mut self, at: usize) {
        let Some(member) = self.nodes[at].member.take() else {
            return;
        };
        self.over |= member.start == self.start;
        self.send(member.start, at, &Body::Broken);
        let mut ranks = member.ranks;
        while !ranks.is_empty() {
            let rank = ranks.swap_remove(self.random.below(ranks.len()));
            let steps = self.random.below(3);
            let Some(world) = self.nodes[at].world() else {
                return;
            };
            let session = rank.session;
            world.event(Event::PeerGone { session });
            for _ in 0..steps {
                world.step();
            }
        }
    }

    /// Ends the daemon of a node, with `power` all of the node.
    fn die(&mut self, at: usize, power: bool) {
        let node = &mut self.nodes[at];
        node.crash(power);
        let stopped = node.member.as_ref().is_some_and(|member| member.stopped);
        if power {
            node.orphans.clear();
        } else if stopped {
            let member = node.member.take().expect("just seen");
            self.over |= member.start == self.start;
            node.orphans.push(member);
        }
        self.end(at);
    }

    fn cut_all(&mut self) {
        (0..self.nodes.len()).for_each(|at| self.die(at, true));
        self.count("power cuts of all nodes");
    }

    /// Starts the daemon of a node, perhaps on drives with other content.
    fn power_on(&mut self, at: usize) {
        let own = self.nodes.iter().filter(|node| node.newest.is_none());
        // Some node keeps its own content: without any nobody could notice.
        let may_change = own.count() > 1 && self.nodes[at].newest.is_none();
        let node = &mut self.nodes[at];
        let Some(Machine::Down(down)) = node.machine.take() else {
            panic!("it is down");
        };
        let (mut disks, random) = *down;
        if may_change && self.random.one_in(12) {
            let from = match self.random.one_in(4) {
                true => self.random.below(self.nodes.len()),
                false => at,
            };
            let copy = match self.random.one_in(6) {
                true => Some(formatted()),
                false => self.nodes[from].copy.clone(),
            };
            if let Some(copy) = copy {
                self.nodes[at].newest = Some(std::mem::replace(&mut disks, copy));
                self.count("older copies of drives");
            }
        } else if self.random.one_in(16) {
            node.copy = Some(disks.clone());
        }
        let world = World::start(disks, random);
        self.nodes[at].machine = Some(Machine::Up(Box::new(world)));
    }

    fn incident(&mut self) {
        let at = self.random.below(self.nodes.len());
        match self.random.below(16) {
            0..=2 => {
                self.die(at, true);
                self.count("power cuts of a node");
            }
            3 => self.cut_all(),
            4..=6 => {
                self.die(at, false);
                self.count("deaths of daemons");
            }
            7..=9 => {
                self.end(at);
                self.count("deaths of ranks");
            }
            10..=11 => self.lose_message(),
            12..=13 => self.stop(at),
            _ => self.part_or_join(),
        }
    }

    /// Loses a message; both ends notice that the connection is broken.
    fn lose_message(&mut self) {
        if self.messages.is_empty() {
            return;
        }
        let chosen = self.random.below(self.messages.len());
        if !matches!(self.messages[chosen].body, Body::Broken) {
            self.lose(chosen);
            self.count("lost messages");
        }
    }

    fn lose(&mut self, index: usize) {
        let Message {
            start, from, to, ..
        } = self.messages.swap_remove(index);
        for (from, to) in [(from, to), (to, from)] {
            let body = Body::Broken;
            self.messages.push(Message {
                start,
                from,
                to,
                body,
            });
        }
    }

    /// Stops the processes of a node for some time. The other nodes notice that they do not answer.
    fn stop(&mut self, at: usize) {
        let Some(member) = &mut self.nodes[at].member else {
            return;
        };
        if !std::mem::replace(&mut member.stopped, true) {
            let start = member.start;
            self.over |= start == self.start;
            self.send(start, at, &Body::Broken);
            self.count("processes stopped");
        }
    }

    /// Cuts the nodes into two sides, or joins them again: messages between the sides are late, or lost.
    fn part_or_join(&mut self) {
        let Some(side) = self.partition.take() else {
            let side = self.nodes.iter().map(|_| self.random.one_in(2)).collect();
            self.partition = Some(side);
            return self.count("partitions");
        };
        if self.random.one_in(2) {
            return;
        }
        for index in (0..self.messages.len()).rev() {
            let Message { from, to, body, .. } = &self.messages[index];
            if side[*from] != side[*to] && !matches!(body, Body::Broken) {
                self.lose(index);
            }
        }
    }
}
