//! The processes of one node: they report what their store holds, resume, write, commit, and confirm what all have prepared.

use offload_api::fault::FaultKind;
use offload_api::ids::Generation;
use offload_client::nodes::{
    Disagreement, HeldGeneration, NodeGenerations, confirmable, resume_from,
};
use offloadd::core::{Call, CallId, JobRecord, Reply};
use offloadd::store::definition::{Durability, JobDefinition};
use test_hooks::random::SimRandom;

use super::Counts;
use super::oracle::{Oracle, Tiles};
use crate::world::{Process, SLOTS, World, content, definition, job, outcome};

const RUN: &[u8] = b"the identity of the run";

/// Content of a message between the nodes of one start.
#[derive(Clone, Debug)]
pub(super) enum Body {
    /// Report of the sender's store.
    Held(Vec<u8>),
    /// The sender has prepared this generation.
    Prepared(u64),
    /// The connection is broken: the sender has ended, or a message was lost.
    Broken,
}

/// Knowledge that does not belong to a single node.
pub(super) struct ClusterKnowledge<'a> {
    pub(super) oracle: &'a mut Oracle,
    pub(super) counts: &'a mut Counts,
    pub(super) random: &'a mut SimRandom,
    /// Whether the drives of a node have other content than they had.
    pub(super) changed: bool,
    /// Messages that go to all other nodes.
    pub(super) sent: Vec<Body>,
}

impl ClusterKnowledge<'_> {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// Why processes end.
pub(super) enum EndReason {
    /// The nodes' stores do not belong together.
    Disagrees(Disagreement),
    /// The daemon refused a call that succeeds later.
    TriesAgain,
}

/// A write in flight.
#[derive(Clone, Copy)]
struct Write {
    tile: u32,
    seed: u64,
    /// Whether it was submitted before the last generation was confirmed.
    early: bool,
}

enum Stage {
    /// Waits for the reports of all nodes.
    Gathering,
    Defining(CallId),
    Resuming(Vec<CallId>),
    /// Writes tiles; so many writes are left.
    Working(usize),
    Committing(Vec<CallId>),
    /// Waits until all nodes have prepared the generation.
    Prepared,
    Confirming(CallId),
}

/// The processes of one node and one start.
pub(super) struct Member {
    node: usize,
    /// Number of the start, unique among starts.
    pub(super) start: u64,
    pub(super) ranks: Vec<Process>,
    stage: Stage,
    held: Vec<Option<NodeGenerations>>,
    /// Whether the store has the job.
    defined: bool,
    /// Newest generation that each node has prepared, as far as this node knows.
    prepared: Vec<Generation>,
    tiles: Tiles,
    /// Writes by rank and slot.
    writes: Vec<Vec<Option<Write>>>,
    /// Whether the processes are stopped; their sessions stay open.
    pub(super) stopped: bool,
}

/// Defines the tiles of a node. The layout names the node and the run, as a run directory does.
fn definition_of(node: usize, nodes: usize, tiles: usize) -> JobDefinition {
    let plain = definition(tiles as u32, Durability::Committed, nodes as u32);
    let layout = [&(node as u32).to_le_bytes()[..], RUN].concat();
    let tiles = plain.tiles().to_vec();
    JobDefinition::new(layout, tiles, Durability::Committed, nodes as u32).unwrap()
}

/// Returns the report of a store; `node` and `nodes` are those of a store without the job.
fn held_of(record: Option<&JobRecord>, node: usize, nodes: usize) -> NodeGenerations {
    let Some(record) = record else {
        return NodeGenerations {
            run: RUN.to_vec(),
            node: node as u32,
            nodes: nodes as u32,
            generations: Vec::new(),
        };
    };
    let (node, run) = record.definition.layout().split_first_chunk().unwrap();
    let generations = record.generations.iter().map(|generation| {
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let blobs = generation.blobs.iter().map(|(_, blob)| blob);
        let starts: Vec<u64> = blobs.clone().map(|blob| number(&blob[..8])).collect();
        assert!(starts.iter().all(|start| *start == starts[0]), "{starts:?}");
        for blob in blobs {
            assert_eq!(number(&blob[8..]), generation.generation.0);
        }
        HeldGeneration {
            generation: generation.generation,
            start: starts[0],
            confirmed: generation.confirmed,
        }
    });
    NodeGenerations {
        run: run.to_vec(),
        node: u32::from_le_bytes(*node),
        nodes: record.definition.nodes(),
        generations: generations.collect(),
    }
}

impl Member {
    /// Opens the sessions of a node and reports what its store holds. `None` while another process has the job open.
    pub(super) fn open(
        world: &mut World,
        [node, nodes, tiles]: [usize; 3],
        start: u64,
        shared: &mut ClusterKnowledge<'_>,
    ) -> Option<Self> {
        let local_ranks = 1 + shared.random.below(2) as u32;
        let mut ranks = Vec::new();
        let mut record = None;
        for rank in 0..local_ranks {
            match world.open(&job("a"), rank, local_ranks) {
                Ok((process, found)) => {
                    ranks.push(process);
                    record = found;
                }
                Err(fault) => {
                    let is_open = matches!(fault.kind, FaultKind::Busy | FaultKind::Ending);
                    assert!(is_open && rank == 0, "{fault}");
                    return None;
                }
            }
        }
        let own = held_of(record.as_ref(), node, nodes);
        shared.sent.push(Body::Held(own.to_bytes()));
        let mut held = vec![None; nodes];
        held[node] = Some(own);
        Some(Self {
            node,
            start,
            writes: vec![vec![None; SLOTS as usize]; ranks.len()],
            ranks,
            stage: Stage::Gathering,
            held,
            prepared: vec![Generation(0); nodes],
            defined: record.is_some(),
            tiles: vec![None; tiles],
            stopped: false,
        })
    }

    /// Takes a message of another node.
    pub(super) fn receive(&mut self, from: usize, body: &Body) {
        match body {
            Body::Held(bytes) => self.held[from] = NodeGenerations::from_bytes(bytes),
            // A fast node can be a generation ahead before this one has all reports.
            Body::Prepared(generation) => self.prepared[from] = Generation(*generation),
            Body::Broken => panic!("the processes end"),
        }
    }

    fn newest(&self) -> u64 {
        self.prepared[self.node].0
    }

    /// Takes the next step, if there is one now.
    pub(super) fn step(
        &mut self,
        world: &mut World,
        shared: &mut ClusterKnowledge<'_>,
    ) -> Result<(), EndReason> {
        match &mut self.stage {
            Stage::Gathering => return self.choose(world, shared),
            Stage::Defining(call) => {
                if let Some(reply) = world.replies.remove(call) {
                    // Calls of processes that have died meanwhile still wait for the same definition.
                    if let Err(fault) = reply {
                        assert_eq!(fault.kind, FaultKind::TooMany, "{fault}");
                        return Err(EndReason::TriesAgain);
                    }
                    self.resume(world);
                }
            }
            Stage::Resuming(calls) => {
                if calls.iter().all(|call| world.replies.contains_key(call)) {
                    for call in calls {
                        world.replies.remove(call).unwrap().unwrap();
                    }
                    shared.oracle.is_confirmed(self.newest());
                    self.check_tiles(world, shared);
                    self.begin_generation(shared);
                }
            }
            Stage::Working(_) => self.work(world, shared),
            Stage::Committing(calls) => {
                if calls.iter().all(|call| world.replies.contains_key(call)) {
                    for call in calls {
                        world.replies.remove(call).unwrap().unwrap();
                    }
                    let newest = self.newest() + 1;
                    self.prepared[self.node] = Generation(newest);
                    shared.oracle.is_prepared(newest);
                    shared.sent.push(Body::Prepared(newest));
                    self.stage = Stage::Prepared;
                }
            }
            Stage::Prepared => self.confirm(world, shared),
            Stage::Confirming(call) => {
                if let Some(reply) = world.replies.remove(call) {
                    assert_eq!(reply.unwrap(), Reply::Confirm);
                    shared.count("confirmations");
                    shared.oracle.is_confirmed(self.newest());
                    self.begin_generation(shared);
                }
            }
        }
        Ok(())
    }

    /// Chooses the generation to resume from when all reports are there.
    fn choose(
        &mut self,
        world: &mut World,
        shared: &mut ClusterKnowledge<'_>,
    ) -> Result<(), EndReason> {
        let Some(held) = self
            .held
            .iter()
            .cloned()
            .collect::<Option<Vec<NodeGenerations>>>()
        else {
            return Ok(());
        };
        let chosen = resume_from(&held).map_err(EndReason::Disagrees)?;
        (shared.oracle).choose(self.start, chosen.0, &held, shared.changed, shared.counts);
        for prepared in &mut self.prepared {
            *prepared = chosen.max(*prepared);
        }
        if !self.defined {
            let definition = definition_of(self.node, held.len(), self.tiles.len());
            let token = self.ranks[0].token;
            self.stage = Stage::Defining(world.call(Call::Define { token, definition }));
        } else {
            self.resume(world);
        }
        Ok(())
    }

    fn resume(&mut self, world: &mut World) {
        let generation = Generation(self.newest());
        let resume = |rank: &Process| {
            let token = rank.token;
            world.call(Call::Resume { token, generation })
        };
        self.stage = Stage::Resuming(self.ranks.iter().map(resume).collect());
    }

    /// Compares every tile with what this node committed for the generation.
    fn check_tiles(&mut self, world: &mut World, shared: &ClusterKnowledge<'_>) {
        let (generation, held) = (self.newest(), self.held[self.node].as_ref());
        let records = &held.expect("its own report").generations;
        let by = records.iter().find(|held| held.generation.0 == generation);
        let by = by.map_or(0, |held| held.start);
        self.tiles = (shared.oracle).tiles(self.node, generation, by, self.tiles.len());
        for (tile, seed) in self.tiles.iter().enumerate() {
            match (seed, world.read(self.ranks[0], tile as u32)) {
                (Some(seed), Ok(bytes)) => assert!(
                    bytes == content(*seed, bytes.len()),
                    "tile {tile} of node {} is not what it committed as generation {generation}",
                    self.node
                ),
                (None, Err(FaultKind::NeverWritten)) => {}
                (seed, read) => panic!("tile {tile}, which holds {seed:?}: {:?}", read.err()),
            }
        }
    }

    fn begin_generation(&mut self, shared: &mut ClusterKnowledge<'_>) {
        self.stage = Stage::Working(1 + shared.random.below(self.tiles.len()));
    }

    fn work(&mut self, world: &mut World, shared: &mut ClusterKnowledge<'_>) {
        self.take_completions(world, shared);
        let in_flight = self.writes.iter().flatten().flatten().count();
        match &mut self.stage {
            Stage::Working(left) if *left > 0 => {
                *left -= 1;
                self.write(world, shared, false);
            }
            _ if in_flight == 0 => self.commit(world, shared),
            _ => {}
        }
    }

    fn write(&mut self, world: &mut World, shared: &mut ClusterKnowledge<'_>, early: bool) {
        let tile = shared.random.below(self.tiles.len());
        let rank = tile % self.ranks.len();
        let (mut all, own) = (self.writes.iter().flatten().flatten(), &self.writes[rank]);
        let Some(slot) = own.iter().position(Option::is_none) else {
            return;
        };
        // The daemon refuses a second transfer of a tile.
        if all.any(|write| write.tile == tile as u32) {
            return;
        }
        let (tile, seed) = (tile as u32, shared.random.number());
        self.writes[rank][slot] = Some(Write { tile, seed, early });
        let generation = self.newest() + 1;
        world.submit_write(self.ranks[rank], generation, tile, slot as u32, seed);
    }

    fn take_completions(&mut self, world: &mut World, shared: &mut ClusterKnowledge<'_>) {
        for (rank, writes) in self.ranks.iter().zip(&mut self.writes) {
            while let Some(entry) = world.completion(*rank) {
                let write = writes[entry.ticket as usize].take().expect("a write");
                match outcome(&entry) {
                    Ok(()) => self.tiles[write.tile as usize] = Some(write.seed),
                    Err(FaultKind::WrongGeneration) if write.early => {
                        shared.count("writes before the confirmation refused");
                    }
                    Err(kind) => panic!("tile {}: {kind:?}", write.tile),
                }
            }
        }
    }

    fn commit(&mut self, world: &mut World, shared: &mut ClusterKnowledge<'_>) {
        let generation = self.newest() + 1;
        (shared.oracle).begin(self.node, generation, self.start, &self.tiles);
        let blob = [self.start.to_le_bytes(), generation.to_le_bytes()].concat();
        let calls = (self.ranks.iter()).map(|rank| world.commit_call(*rank, generation, &blob));
        self.stage = Stage::Committing(calls.collect());
    }

    /// Confirms the generation once all nodes have prepared it. A process may try to write the next one before.
    fn confirm(&mut self, world: &mut World, shared: &mut ClusterKnowledge<'_>) {
        self.take_completions(world, shared);
        let generation = Generation(self.newest());
        if confirmable(&self.prepared) == generation {
            let token = self.ranks[0].token;
            self.stage = Stage::Confirming(world.call(Call::Confirm { token, generation }));
        } else if shared.random.one_in(4) {
            self.write(world, shared, true);
        }
    }

    /// Makes calls with the tokens of sessions that the daemon does not know any more.
    pub(super) fn call_late(&self, world: &mut World, shared: &mut ClusterKnowledge<'_>) {
        let generation = Generation(shared.oracle.newest_confirmed());
        for rank in &self.ranks {
            let token = rank.token;
            let calls = [
                Call::Confirm { token, generation },
                Call::Resume { token, generation },
                Call::Commit {
                    token,
                    generation: Generation(generation.0 + 1),
                    blob: Vec::new(),
                },
            ];
            for call in calls {
                let fault = world.ask(call).unwrap_err();
                assert_eq!(fault.kind, FaultKind::NotFound, "{fault}");
                shared.count("late calls refused");
            }
        }
    }
}
