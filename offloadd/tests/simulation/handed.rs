//! Tests what the next daemon makes of a hand-over: the state's file, the state, names of descriptors. What could go wrong: damaged or invented input
//! ends the daemon, or gives a session something that belongs to another.
//!
//! The fuzz target `handover` tries the same with inputs that coverage guides.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use crate::disks::{SimFault, SimFaultPlan};
use offload_api::ids::{Epoch, SlotIndex, TicketId, TileIndex};
use offload_api::ring::entry::{Priority, Request, Verb};
use offloadd::core::{Action, AdoptedSession, Call, CallId, Core, Event, Reply};
use offloadd::handover::message::HandoverState;
use offloadd::handover::{self, Descriptors, FoundHandover, HandedOver};
use offloadd::io::{IoOp, IoResult};
use offloadd::store::DATA_OFFSET;
use offloadd::store::definition::Durability;
use offloadd::store::recover::{self, RecoveredStore};
use prost::Message;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use test_hooks::random::SimRandom;

use super::world::{LIMITS, PEER, World, definition, formatted, job};

/// Values of an input's first byte, which say what the rest is.
const FILE: u8 = 0;
const STATE: u8 = 1;
const NAMES: u8 = 2;

/// A store and the hand-over of its last daemon.
struct HandedOverStore {
    store: RecoveredStore,
    state: HandoverState,
}

fn handed() -> &'static HandedOverStore {
    static HANDED: OnceLock<HandedOverStore> = OnceLock::new();
    HANDED.get_or_init(|| {
        let mut world = World::start(formatted(), SimRandom::new(5));
        // Two ranks, one generation committed, some tiles written since (one write failed), and scratch tiles.
        let (one, _) = world.open(&job("pair"), 0, 2).unwrap();
        let (two, _) = world.open(&job("pair"), 1, 2).unwrap();
        let tiles = definition(4, Durability::Committed, 1);
        world.define(one, tiles).unwrap();
        for rank in [one, two] {
            world.resume(rank, 0).unwrap();
        }
        for tile in 0..4 {
            world.write(one, 1, tile, 1).unwrap();
        }
        let first = world.commit_call(one, 1, b"one");
        let second = world.commit_call(two, 1, b"two");
        world.answer(first).unwrap();
        world.answer(second).unwrap();
        world.write(two, 2, 1, 2).unwrap();
        world.write(two, 2, 2, 2).unwrap();
        let reserve = Call::ReserveScratch {
            token: two.token,
            tile_bytes: vec![4096, 8192],
        };
        world.ask(reserve).unwrap();
        world.write(two, 2, 4, 3).unwrap();
        world.engine.disks.plan = Some(SimFaultPlan {
            at: world.engine.disks.operation_count(),
            for_good: false,
            fault: SimFault::Full,
        });
        world.write(two, 2, 3, 3).unwrap_err();
        // One job of two nodes, in place, whose generation is not confirmed; and one that has only been opened.
        let (in_place, _) = world.open(&job("in-place"), 0, 1).unwrap();
        world
            .define(in_place, definition(3, Durability::None, 2))
            .unwrap();
        world.resume(in_place, 0).unwrap();
        world.write(in_place, 1, 0, 4).unwrap();
        world.commit(in_place, 1).unwrap();
        world.open(&job("came"), 0, 3).unwrap();
        world.run();
        let mut state = world.core.hand_over();
        state.handover = 7;
        let (mut disks, _) = world.crash(false);
        let store = recover::read(&mut disks).unwrap();
        HandedOverStore { store, state }
    })
}

/// Returns inputs from which others are derived: real hand-overs.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let state = &handed().state;
    let file = File::from(handover::seal(state).unwrap());
    let mut whole = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut whole, 0).unwrap();
    let mut names = Vec::new();
    let handed_over = HandedOver {
        state: state.clone(),
        descriptors: state.sessions.iter().map(|_| descriptors()).collect(),
    };
    let keep = |name: &str, _: std::os::fd::BorrowedFd<'_>| {
        names.extend(name.bytes().chain(*b"\n"));
        Ok(())
    };
    handed_over.give(keep).unwrap();
    let mut alone = state.clone();
    alone.sessions.retain(|session| session.job == 0);
    [
        (FILE, whole),
        (STATE, state.encode_to_vec()),
        (STATE, alone.encode_to_vec()),
        (NAMES, names),
    ]
    .map(|(kind, bytes)| [&[kind][..], &bytes].concat())
    .to_vec()
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

fn descriptors() -> Descriptors {
    Descriptors {
        arena: null(),
        ring: null(),
        submission_doorbell: null(),
        completion_doorbell: null(),
        completion_reader: null(),
        life_line: null(),
        process: Some(null()),
    }
}

/// Tries arbitrary bytes. Returns whether something was adopted. A refusal must have a message.
pub(crate) fn try_input(bytes: &[u8]) -> bool {
    match bytes.split_first() {
        None => false,
        Some((&FILE, bytes)) => try_file(bytes),
        Some((&NAMES, bytes)) => try_names(bytes),
        Some((_, bytes)) => HandoverState::decode(bytes).is_ok_and(|state| try_state(&state)),
    }
}

fn try_file(bytes: &[u8]) -> bool {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("state", flags).unwrap());
    file.write_all_at(bytes, 0).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    match handover::open(&file) {
        Ok(state) => {
            assert_eq!(handover::open(handover::seal(&state).unwrap()), Ok(state));
            true
        }
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            false
        }
    }
}

/// Tries one name per line. Descriptors named as claims can be spent, and those named as states are states.
fn try_names(bytes: &[u8]) -> bool {
    let lines = String::from_utf8_lossy(bytes);
    let named = lines.lines().take(100).map(|name| {
        let fd = if name.ends_with("-claim") {
            eventfd(1, EventfdFlags::NONBLOCK).unwrap()
        } else if name.ends_with("-state") {
            handover::seal(&handed().state).unwrap()
        } else {
            null()
        };
        (name.to_owned(), fd)
    });
    match FoundHandover::among(named.collect()) {
        Ok(None) => lines.is_empty(),
        Ok(Some(mut found)) => {
            assert_eq!(found.state.handover, 7, "its name says so");
            let numbers: Vec<u64> = found.state.sessions.iter().map(|s| s.number).collect();
            for number in numbers {
                let _ = found.descriptors(number);
                assert!(found.descriptors(number).is_none(), "given twice");
            }
            assert!(found.claim.spend());
            true
        }
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            false
        }
    }
}

fn core() -> Core {
    Core::new(handed().store.clone(), Epoch(1), LIMITS)
}

/// Returns the free memory and space of a daemon.
fn free_bytes(core: &mut Core) -> (u64, Vec<u64>) {
    let mut actions = Vec::new();
    core.on_event(
        Event::Call {
            call: CallId(1),
            peer: PEER,
            request: Call::Describe,
        },
        &mut actions,
    );
    let Some(Action::Reply {
        reply: Ok(Reply::Describe(found)),
        ..
    }) = actions.pop()
    else {
        panic!("it is not described");
    };
    let devices = found.devices.iter().map(|device| device.free_bytes);
    (found.arena_free_bytes, devices.collect())
}

fn try_state(state: &HandoverState) -> bool {
    let mut core = core();
    let before = free_bytes(&mut core);
    let (adopted, left_out) = match core.adopt(state, |_| true) {
        Ok(adopted) => adopted,
        Err(why) => {
            assert!(!why.is_empty());
            assert_eq!(free_bytes(&mut core), before);
            return false;
        }
    };
    assert!(left_out.iter().all(|why| !why.is_empty()));
    let places: BTreeSet<usize> = adopted.iter().map(|one| one.index).collect();
    assert_eq!(places.len(), adopted.len(), "a session is taken up twice");
    // The hand-over that it would make is as good.
    let given = handed_on(&core.hand_over(), adopted.len());
    assert_eq!(handed_on(&given, adopted.len()), given);
    for one in &adopted {
        read_all(&mut core, one);
    }
    let mut actions = Vec::new();
    for one in &adopted {
        let session = one.session;
        core.on_event(Event::PeerGone { session }, &mut actions);
    }
    let dropped = |action: &&Action| matches!(action, Action::DropArena { .. });
    assert_eq!(actions.iter().filter(dropped).count(), adopted.len());
    assert_eq!(free_bytes(&mut core), before, "something was kept");
    !adopted.is_empty()
}

/// Returns the hand-over of the next incarnation, which adopted `state`.
fn handed_on(state: &HandoverState, session_count: usize) -> HandoverState {
    let mut next = core();
    let (adopted, left_out) = next.adopt(state, |_| true).expect("its own state");
    assert_eq!((adopted.len(), left_out), (session_count, Vec::new()));
    next.hand_over()
}

/// Reads tiles of a session, and ends the operations.
fn read_all(core: &mut Core, one: &AdoptedSession) {
    let room = |device: usize| handed().store.devices[device].superblock.data_bytes;
    for tile in 0..8 {
        let request = Request {
            ticket: TicketId(1),
            verb: Verb::SwapIn,
            priority: Priority::Prefetch,
            tile: TileIndex(tile),
            slot: SlotIndex(0),
            generation: offload_api::ids::Generation(0),
            checksum: 0,
        };
        let entry = request.to_sqe(core.epoch());
        let session = one.session;
        let mut actions = Vec::new();
        core.on_event(Event::Submission { session, entry }, &mut actions);
        assert_eq!(actions.len(), 1, "{actions:?}");
        let Some(Action::Io {
            io,
            device,
            op: IoOp::Read,
            offset,
            bytes,
            ..
        }) = actions.pop()
        else {
            continue;
        };
        let end = offset + u64::from(bytes);
        assert!(offset >= DATA_OFFSET && end <= DATA_OFFSET + room(device.0 as usize));
        let result = IoResult {
            outcome: Ok(bytes),
            device_ns: 0,
        };
        let read = None;
        core.on_event(Event::IoDone { io, result, read }, &mut actions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints the number of the input after a failure.
    struct Trying(u64);

    impl Drop for Trying {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("it was the input made from {}", self.0);
            }
        }
    }

    /// Returns one of the seeds, changed at some places.
    fn changed(seeds: &[Vec<u8>], random: &mut SimRandom) -> Vec<u8> {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        for _ in 0..1 + random.below(3) {
            // The kind of input stays the same.
            let at = 1 + random.below(bytes.len() - 1);
            let end = (at + 1 + random.below(16)).min(bytes.len());
            match random.below(7) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = random.number() as u8,
                2 => bytes[at] = bytes[at].wrapping_add(1),
                3 => bytes[at] = bytes[at].wrapping_sub(1),
                4 => drop(bytes.drain(at..end)),
                5 => {
                    let again = bytes[at..end].to_vec();
                    bytes.splice(at..at, again);
                }
                _ => bytes.truncate(at + 1),
            }
            if bytes.len() < 2 {
                break;
            }
        }
        bytes
    }

    #[test]
    fn what_is_handed_over_is_adopted() {
        for (nth, seed) in seeds().iter().enumerate() {
            assert!(try_input(seed), "seed {nth}");
        }
    }

    #[test]
    fn any_change_of_what_is_handed_over_is_refused_or_adopted_whole() {
        let seeds = seeds();
        let mut taken = 0;
        let inputs = 0..20_000;
        for input in inputs.clone() {
            let trying = Trying(input);
            let bytes = changed(&seeds, &mut SimRandom::new(input));
            taken += u64::from(try_input(&bytes));
            drop(trying);
        }
        let refused = inputs.end - taken;
        assert!(
            taken > 1000 && refused > 1000,
            "{taken} taken, {refused} refused"
        );
    }
}
