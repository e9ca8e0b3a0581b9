//! The ranks of one job: their calls, and what must be true of each answer.

use offload_api::checksum::checksum;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{Generation, Rank};
use offloadd::core::{Call, CallId, Event, JobRecord, Reply};
use offloadd::store::definition::Durability;

use crate::oracle::{KnownJob, Snapshot};
use crate::trouble::Trouble;
use crate::world::{PEER, Process, SLOTS, World, content, definition, outcome};

const RANKS_MAX: usize = 2;

/// A tile in transfer and, for a write, the seed of its bytes.
type Moving = (u32, Option<u64>);

/// Content of a tile as its processes know it.
#[derive(Clone, Copy, PartialEq)]
enum Tile {
    Never,
    Holds(u64),
    /// The last write of the tile failed: it has no content until it is written again.
    Failed,
}

/// A job while its processes run.
pub(super) struct Running {
    processes: Vec<Process>,
    working: u64,
    current: Vec<Tile>,
    /// Transfers, by rank and slot.
    slots: Vec<Vec<Option<Moving>>>,
    pub(super) commits: Vec<CallId>,
    /// Whether a device failed: the job must end and resume from the durable generation.
    pub(super) poisoned: bool,
    /// Whether a failed flush that was not reported yet lost a tile: this generation must not be acknowledged.
    lost: bool,
}

/// Opens all ranks of a job, with this incarnation's number of ranks.
fn open(world: &mut World, known: &KnownJob) -> (Vec<Process>, Option<JobRecord>) {
    let ranks = 1 + world.random.below(RANKS_MAX) as u32;
    let mut record = None;
    let processes = (0..ranks).map(|rank| {
        let (process, found) = world.open(&known.name, rank, ranks).unwrap();
        record = found;
        process
    });
    let processes = processes.collect();
    (processes, record)
}

/// Begins, and cuts the power while the job is being defined or resumed.
pub(super) fn begin_and_be_cut_off(world: &mut World, known: &mut KnownJob) {
    if known.dropping {
        return;
    }
    let (processes, record) = open(world, known);
    let Some(record) = record.filter(|record| record.clean) else {
        return;
    };
    let (generation, _) = known.choose(&record, world.trouble, &mut world.random);
    let token = processes[0].token;
    world.call(Call::Resume {
        token,
        generation: Generation(generation),
    });
    for _ in 0..world.random.below(8) {
        world.step();
    }
    // Later generations may or may not be discarded already.
    known.acknowledged = generation;
    known.confirmed = known.confirmed.min(generation);
}

/// Returns the bytes that a job without space asked for; `None` for a write to a full drive.
fn needed_bytes(no_room: &Fault) -> Option<u64> {
    let (_, rest) = no_room.message.split_once(" needs ")?;
    rest.split_once(" bytes")?.0.parse().ok()
}

/// Returns the free bytes of all devices that have not left.
fn free_bytes(world: &World) -> u64 {
    let states = world.core.device_states().into_iter();
    let members = states.filter(|device| device.status.phase.is_some());
    members.map(|device| device.free_bytes).sum()
}

/// Opens all ranks, compares what the store offers with the oracle, and resumes. Returns `None` when a device prevented that.
pub(super) fn begin(world: &mut World, known: &mut KnownJob) -> Option<Running> {
    if known.dropping {
        return None;
    }
    let (processes, record) = open(world, known);
    let given_up = |world: &mut World, processes: &[Process], kind| {
        let trouble = world.trouble;
        assert!(trouble.explains(kind), "{kind:?} where {trouble:?}");
        leave(world, processes);
        None
    };
    let (generation, attempt) = match record {
        Some(record) if !record.clean => {
            return start_again(world, known, &processes, &record);
        }
        Some(record) => {
            known.defined = true;
            known.choose(&record, world.trouble, &mut world.random)
        }
        None => {
            assert!(!known.defined, "an acknowledged job is gone");
            let definition = definition(known.tile_count, known.durability, known.nodes);
            if let Err(fault) = world.define(processes[0], definition) {
                // After devices were drained, the others may be too small, or tiles may occupy the place of its records.
                if fault.kind == FaultKind::NoSpace
                    && (fault.message.contains("must be contiguous on ")
                        || needed_bytes(&fault).is_some_and(|bytes| bytes > free_bytes(world)))
                {
                    leave(world, &processes);
                    return None;
                }
                return given_up(world, &processes, fault.kind);
            }
            known.defined = true;
            (0, None)
        }
    };
    // When one rank has resumed, the later generations are discarded.
    known.acknowledged = known.acknowledged.min(generation);
    known.confirmed = known.confirmed.min(generation);
    for process in &processes {
        match world.resume(*process, generation) {
            Ok(reply) => {
                let working_generation = Generation(generation + 1);
                assert_eq!(reply, Reply::Resume { working_generation });
            }
            // The device did not return one copy of a record at the start, and the other copy was torn: perhaps the next start can read both.
            Err(fault) if fault.kind == FaultKind::Damaged => {
                assert_eq!(world.trouble, Trouble::Failing, "{fault}");
                leave(world, &processes);
                return None;
            }
            Err(fault) => return given_up(world, &processes, fault.kind),
        }
    }
    known.resumed_from(generation, world.trouble);
    let tiles = match attempt {
        Some(snapshot) => snapshot.tiles,
        None => vec![None; known.tile_count as usize],
    };
    if !known.is_whole(world, processes[0], &tiles) {
        leave(world, &processes);
        return None;
    }
    let tile = |seed: Option<u64>| seed.map_or(Tile::Never, Tile::Holds);
    Some(Running {
        slots: vec![vec![None; SLOTS as usize]; processes.len()],
        processes,
        working: generation + 1,
        current: tiles.into_iter().map(tile).collect(),
        commits: Vec::new(),
        poisoned: false,
        lost: false,
    })
}

/// Starts over with a job written in place that did not end in order: it is refused, and can be deleted and defined again.
fn start_again(
    world: &mut World,
    known: &mut KnownJob,
    processes: &[Process],
    record: &JobRecord,
) -> Option<Running> {
    assert_eq!(known.durability, Durability::None);
    let newest = record.generations.last().expect("it was committed once");
    let fault = world.resume(processes[0], newest.generation.0).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Unclean);
    for process in processes {
        world.close(*process).unwrap();
    }
    let job = known.name.clone();
    known.discard_unreadable();
    match world.ask(Call::DropJob { uid: PEER.uid, job }) {
        Ok(_) => {
            known.attempts.clear();
            begin(world, known)
        }
        Err(fault) => {
            assert!(world.trouble.explains(fault.kind), "{fault}");
            known.dropping = true;
            None
        }
    }
}

pub(super) fn submit(world: &mut World, known: &KnownJob, running: &mut Running) {
    let rank = world.random.below(running.processes.len());
    let Some(slot) = running.slots[rank].iter().position(Option::is_none) else {
        return;
    };
    let tile = world.random.below(known.tile_count as usize) as u32;
    // No process touches a tile in transfer: the daemon would refuse it.
    let moving = (running.slots.iter().flatten().flatten()).any(|(moving, _)| *moving == tile);
    if moving {
        return;
    }
    let process = running.processes[rank];
    if world.random.one_in(3) {
        running.slots[rank][slot] = Some((tile, None));
        world.submit_read(process, tile, slot as u32);
    } else if running.commits.is_empty() {
        let seed = world.random.number();
        running.slots[rank][slot] = Some((tile, Some(seed)));
        world.submit_write(process, running.working, tile, slot as u32, seed);
    }
}

/// Lets all ranks call commit; some of their writes may still be in flight.
pub(super) fn commit(world: &mut World, known: &mut KnownJob, running: &mut Running) {
    let holds = |tile: &Tile| match tile {
        Tile::Holds(seed) => Some(*seed),
        // A commit with a failed tile is refused.
        Tile::Never | Tile::Failed => None,
    };
    let mut tiles: Vec<_> = running.current.iter().map(holds).collect();
    for (tile, seed) in running.slots.iter().flatten().flatten() {
        if seed.is_some() {
            tiles[*tile as usize] = *seed;
        }
    }
    let attempt = world.random.number();
    let blob = |rank: usize| [&attempt.to_le_bytes()[..], &[rank as u8; 10]].concat();
    let blobs = (0..running.processes.len())
        .map(|rank| (Rank(rank as u32), blob(rank)))
        .collect();
    let snapshot = Snapshot { tiles, blobs };
    let attempts = known.attempts.entry(running.working).or_default();
    attempts.push(snapshot);
    running.commits = (running.processes.clone().iter().enumerate())
        .map(|(rank, process)| world.commit_call(*process, running.working, &blob(rank)))
        .collect();
}

pub(super) fn take_completions(world: &mut World, running: &mut Running) {
    for rank in 0..running.processes.len() {
        let process = running.processes[rank];
        while let Some(entry) = world.completion(process) {
            let (tile, seed) = running.slots[rank][entry.ticket as usize].take().unwrap();
            let current = &mut running.current[tile as usize];
            match (seed, *current, outcome(&entry)) {
                (Some(seed), _, Ok(())) => *current = Tile::Holds(seed),
                (Some(_), _, Err(FaultKind::Poisoned)) => {
                    assert!(world.trouble.explains(FaultKind::Poisoned));
                    running.poisoned = true;
                }
                (Some(_), _, Err(kind)) => {
                    assert!(world.trouble.explains(kind), "{kind:?}");
                    *current = Tile::Failed;
                }
                (None, Tile::Holds(seed), Ok(())) => {
                    let bytes = content(seed, 4096 << (tile % 2));
                    let slot = world.slot(process, entry.ticket as u32, bytes.len());
                    let damaged = checksum(slot) != entry.checksum;
                    let same = *slot == bytes;
                    // The reader compares the checksum, as the client does.
                    let explained = world.trouble.is_silent() || world.trouble == Trouble::Failing;
                    assert!(
                        same || damaged && explained,
                        "tile {tile} is not what was written last"
                    );
                    running.lost |= damaged && world.trouble == Trouble::Failing;
                    assert!(!(same && damaged), "a sound tile {tile} is called damaged");
                }
                (None, Tile::Never | Tile::Failed, Err(FaultKind::NeverWritten)) => {}
                (None, _, Err(kind)) if world.trouble.explains(kind) => {}
                (None, _, other) => panic!("tile {tile} reads as {other:?}"),
            }
        }
    }
}

/// Takes the results of commits. Returns false when the job must begin again.
pub(super) fn take_commits(world: &mut World, known: &mut KnownJob, running: &mut Running) -> bool {
    let answered = (running.commits.iter()).all(|call| world.replies.contains_key(call));
    if running.commits.is_empty() || !answered {
        return true;
    }
    let expected = Reply::Commit {
        generation: Generation(running.working),
        confirmed: known.nodes == 1,
        working_generation: Generation(running.working + 1),
    };
    let replies: Vec<_> = (std::mem::take(&mut running.commits).iter())
        .map(|call| world.replies.remove(call).unwrap())
        .collect();
    for reply in &replies {
        assert_eq!(*reply, replies[0], "ranks were told different things");
        match reply {
            Ok(reply) => assert_eq!(*reply, expected),
            Err(fault) => assert!(world.trouble.explains(fault.kind), "{fault}"),
        }
    }
    if replies[0].is_err() {
        // Perhaps only tiles must be written again; otherwise the next calls are refused.
        return world.random.one_in(2);
    }
    assert!(!running.current.contains(&Tile::Failed));
    assert!(!running.lost, "a lost tile is acknowledged");
    known.acknowledged = running.working;
    running.working += 1;
    if known.nodes == 1 {
        known.confirmed = known.acknowledged;
        return true;
    }
    // Sometimes the power goes before the others are ready: the steps end here for this job.
    if world.random.one_in(4) {
        return false;
    }
    let confirm = Call::Confirm {
        token: running.processes[0].token,
        generation: Generation(known.acknowledged),
    };
    match world.ask(confirm) {
        Ok(reply) => assert_eq!(reply, Reply::Confirm),
        Err(fault) => {
            assert!(world.trouble.explains(fault.kind), "{fault}");
            return false;
        }
    }
    known.confirmed = known.acknowledged;
    true
}

/// Ends all ranks, one of them first, with their operations in flight. Their commit may still become durable.
pub(super) fn die(world: &mut World, running: &mut Running) {
    leave(world, &running.processes);
    for call in std::mem::take(&mut running.commits) {
        assert!(world.replies.remove(&call).is_some());
    }
}

fn leave(world: &mut World, processes: &[Process]) {
    for process in processes {
        world.event(Event::PeerGone {
            session: process.session,
        });
        if world.random.one_in(2) {
            world.step();
        }
    }
    world.run();
    for process in processes {
        assert!(world.dropped.contains(&process.session));
    }
}
