//! A device is measured again. What could go wrong: a cut between its superblock and the catalog leaves a store that does not
//! open, or rates that nothing goes by; room that was lent is used twice or never given back; nothing moves, or what need not.

use crate::disks::{SimDisks, SimFault, SimFaultPlan};
use offload_api::fault::{Fault, FaultKind};
use offloadd::blocks::Blocks;
use offloadd::core::{Call, Event, Measuring, Moves, Reply};
use offloadd::io::AlignedBytes;
use offloadd::store::catalog::Phase;
use offloadd::store::definition::Durability;
use offloadd::store::format::{MeasuredRates, format};
use offloadd::store::recover;
use offloadd::store::superblock::StoreId;
use offloadd::store::verify::verify;
use test_hooks::random::SimRandom;

use super::{expect_all, write_all};
use crate::world::{Process, World, definition, formatted, job};

const TILES: u32 = 40;

fn rates(bytes_per_s: u64) -> MeasuredRates {
    MeasuredRates {
        read_bytes_per_s: bytes_per_s,
        write_bytes_per_s: bytes_per_s,
    }
}

/// Two disks with room to be measured in.
fn disks() -> SimDisks {
    let mut disks = SimDisks::new(&[4 << 20, 4 << 20]);
    let measured = [rates(900), rates(300)];
    format(
        &mut disks,
        StoreId(*b"a store's id 16b"),
        &measured,
        7,
        false,
    )
    .unwrap();
    disks
}

fn begin(world: &mut World, path: &str) -> Result<Measuring, Fault> {
    let path = path.to_owned();
    let call = world.call(Call::BeginMeasuring { path });
    world.answer(call).map(|reply| match reply {
        Reply::BeginMeasuring(measuring) => measuring,
        other => panic!("{other:?}"),
    })
}

fn end(world: &mut World, rates: Option<MeasuredRates>) -> Result<bool, Fault> {
    end_with(world, rates, true)
}

fn end_with(
    world: &mut World,
    rates: Option<MeasuredRates>,
    all_ended: bool,
) -> Result<bool, Fault> {
    let call = world.call(Call::EndMeasuring { rates, all_ended });
    world.answer(call).map(|reply| match reply {
        Reply::EndMeasuring { busy, .. } => busy,
        other => panic!("{other:?}"),
    })
}

/// As whoever measures does: it writes all that it was lent.
fn overwrite(world: &mut World, measuring: &Measuring) {
    let position = world.positions[measuring.device.0 as usize];
    let mut noise = AlignedBytes::zeroed(measuring.area.bytes as usize);
    noise.as_mut_slice().fill(0xa5);
    let disks = &mut world.engine.disks;
    (disks.write(position, measuring.area.offset, &noise)).unwrap();
}

fn measure(world: &mut World, path: &str, bytes_per_s: u64) -> Result<bool, Fault> {
    let measuring = begin(world, path)?;
    overwrite(world, &measuring);
    end(world, Some(rates(bytes_per_s)))
}

fn kept(world: &World) -> Vec<u64> {
    let states = world.core.device_states().into_iter();
    states.map(|state| state.write_bytes_per_s).collect()
}

fn job_at_rest(world: &mut World) {
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(world, process, 1, TILES);
    world.close(process).unwrap();
}

/// Of all extents, on each disk.
fn bytes_on(world: &World) -> [u64; 2] {
    let store = recover::read(&mut world.engine.disks.clone()).unwrap();
    let mut bytes = [0; 2];
    for job in &store.jobs {
        let tiles = job.table.definition.tiles().iter();
        for (tile, extents) in tiles.zip(&job.table.extents) {
            for extent in extents {
                bytes[store[extent.device].position] += u64::from(tile.tile_bytes);
            }
        }
    }
    bytes
}

/// Once all that is to move has, the second disk has that part of it.
fn expect_on_second(world: &mut World, part: f64) {
    world.move_all();
    assert_eq!(world.core.moves(), Moves::None);
    let settled = |phase| phase == Some(Phase::Settled);
    let states = world.core.device_states();
    assert!(states.iter().all(|state| settled(state.status.phase)));
    expect_part(bytes_on(world), part);
}

/// Whole tiles move, and those of two sizes.
fn expect_part(bytes: [u64; 2], part: f64) {
    let due = (bytes[0] + bytes[1]) as f64 * part;
    assert!((bytes[1] as f64 - due).abs() <= 24e3, "{bytes:?}: {due}");
}

fn goes_on(world: &mut World) -> Process {
    let (process, _) = world.open(&job("one"), 0, 1).unwrap();
    world.resume(process, 1).unwrap();
    expect_all(world, process, 1, TILES);
    process
}

#[test]
fn tiles_of_jobs_go_by_the_new_rates_and_so_do_those_that_come() {
    let mut world = World::start(disks(), SimRandom::new(31));
    job_at_rest(&mut world);
    expect_on_second(&mut world, 0.25);
    assert_eq!(measure(&mut world, "sim1", 900), Ok(false));
    assert_eq!(kept(&world), [900, 900]);
    expect_on_second(&mut world, 0.5);
    // It gives what it has too much as well, though nobody came.
    assert_eq!(measure(&mut world, "sim1", 100), Ok(false));
    expect_on_second(&mut world, 0.1);
    // The same again moves nothing.
    let moved_bytes = world.core.moved_bytes();
    assert_eq!(measure(&mut world, "sim1", 100), Ok(false));
    assert_eq!(world.core.moves(), Moves::None);
    assert_eq!(world.core.moved_bytes(), moved_bytes);
    assert_eq!(measure(&mut world, "sim0", 300), Ok(false));
    expect_on_second(&mut world, 0.25);

    let (mut disks, random) = world.crash(true);
    assert_eq!(verify(&mut disks).unwrap().damaged_tiles, []);
    let mut world = World::start(disks, random);
    assert_eq!(kept(&world), [300, 100]);
    let process = goes_on(&mut world);
    world.close(process).unwrap();
    assert_eq!(measure(&mut world, "sim1", 300), Ok(false));
    let before = bytes_on(&world);
    world.begin("two", TILES, Durability::Committed);
    let after = bytes_on(&world);
    expect_part([0, 1].map(|disk| after[disk] - before[disk]), 0.5);
}

#[test]
fn a_running_job_moves_by_what_it_writes_and_the_figure_is_called_busy() {
    let mut world = World::start(disks(), SimRandom::new(32));
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    assert_eq!(measure(&mut world, "sim1", 900), Ok(true));
    assert_eq!(world.core.moves(), Moves::Waiting);
    for generation in 2..6 {
        world.event(Event::RebalanceTick { force: false });
        write_all(&mut world, process, generation, TILES);
        expect_all(&mut world, process, generation, TILES);
    }
    expect_on_second(&mut world, 0.5);
    assert_eq!(world.core.copied_bytes(), 0, "it moved by itself");
    expect_all(&mut world, process, 5, TILES);
}

#[test]
fn a_cut_at_any_operation_keeps_the_rates_of_before_or_the_new_ones() {
    let mut seen = [0; 3];
    for steps in 0.. {
        let mut ended = true;
        for power in [true, false] {
            let mut world = World::start(disks(), SimRandom::new(steps));
            job_at_rest(&mut world);
            let measuring = begin(&mut world, "sim1").unwrap();
            overwrite(&mut world, &measuring);
            let rates = Some(rates(900));
            let all_ended = true;
            let call = world.call(Call::EndMeasuring { rates, all_ended });
            for _ in 0..steps {
                world.step();
            }
            let answered = world.replies.contains_key(&call);
            ended &= answered;
            let (disks, random) = world.crash(power);
            let mut world = World::start(disks, random);
            let new = kept(&world) == [900, 900];
            assert!(new || kept(&world) == [900, 300], "{:?}", kept(&world));
            assert!(new || !answered, "what was answered is kept");
            let moves = world.core.moves() != Moves::None;
            assert!(moves || !answered);
            seen[usize::from(new) + usize::from(moves)] += 1;
            // Whatever it was, the same again does the rest.
            assert_eq!(measure(&mut world, "sim1", 900), Ok(moves));
            expect_on_second(&mut world, 0.5);
            goes_on(&mut world);
        }
        if ended {
            break;
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

#[test]
fn a_failed_operation_is_told_and_the_store_goes_on() {
    let (mut refused, mut broken) = (0, 0);
    for at in 0..12 {
        for fault in [SimFault::Errno(libc::EIO), SimFault::Full] {
            let mut world = World::start(disks(), SimRandom::new(at));
            job_at_rest(&mut world);
            let measuring = begin(&mut world, "sim1").unwrap();
            overwrite(&mut world, &measuring);
            let disks = &mut world.engine.disks;
            disks.plan = Some(SimFaultPlan {
                at: disks.operation_count() + at,
                for_good: false,
                fault,
            });
            let ended = end(&mut world, Some(rates(900)));
            world.engine.disks.repair();
            refused += usize::from(ended.is_err());
            let (two, _) = world.open(&job("two"), 0, 1).unwrap();
            let defined = world.define(two, definition(2, Durability::Committed, 1));
            broken += usize::from(defined.is_err());
            // One copy of its superblock may be damaged, and the next try would begin with the other.
            assert_eq!(begin(&mut world, "sim1").is_err(), ended.is_err());
            let (disks, random) = world.crash(true);
            let mut world = World::start(disks, random);
            assert!(ended.is_err() || kept(&world) == [900, 900]);
            let moves = world.core.moves() != Moves::None;
            assert_eq!(measure(&mut world, "sim1", 900), Ok(moves));
            expect_on_second(&mut world, 0.5);
            goes_on(&mut world);
        }
    }
    // Four operations of the superblock, and as many of the catalog, which only those break; a full device takes flushes.
    assert_eq!((refused, broken), (8 + 4, 4 + 2));
}

#[test]
fn room_that_may_still_be_written_is_lent_and_given_to_nobody() {
    let mut world = World::start(disks(), SimRandom::new(35));
    job_at_rest(&mut world);
    expect_on_second(&mut world, 0.25);
    let free = |world: &World| world.core.device_states()[1].free_bytes;
    let before = free(&world);
    let left_behind = begin(&mut world, "sim1").unwrap();
    assert_eq!(end_with(&mut world, None, false), Ok(false));
    assert_eq!(free(&world), before - left_behind.area.bytes);
    assert_eq!(kept(&world), [900, 300]);
    // It is measured elsewhere, and that is given back.
    let lent = begin(&mut world, "sim1").unwrap();
    let apart = lent.area.offset + lent.area.bytes <= left_behind.area.offset
        || left_behind.area.offset + left_behind.area.bytes <= lent.area.offset;
    assert!(apart, "{lent:?} {left_behind:?}");
    overwrite(&mut world, &lent);
    assert_eq!(end(&mut world, Some(rates(900))), Ok(false));
    assert_eq!(free(&world), before - left_behind.area.bytes);
    // Tiles that come do not lie there: what is written late changes nothing.
    expect_on_second(&mut world, 0.5);
    overwrite(&mut world, &left_behind);
    goes_on(&mut world);

    // Nobody writes there any more when the daemon has ended.
    let with_it = free(&world);
    let (disks, random) = world.crash(true);
    let world = World::start(disks, random);
    assert_eq!(free(&world), with_it + left_behind.area.bytes);
}

#[test]
fn a_ceiling_of_moves_that_have_ended_is_not_of_those_that_come() {
    let mut world = World::start(disks(), SimRandom::new(37));
    job_at_rest(&mut world);
    assert_eq!(measure(&mut world, "sim1", 900), Ok(false));
    assert_eq!(world.core.rebalance_bytes_per_s_max(), None);
    let bytes_per_s_max = 1 << 20;
    world.ask(Call::LimitMoves { bytes_per_s_max }).unwrap();
    // Those under way keep theirs; and though none moves just now, the device is busy.
    assert_eq!(world.core.moves(), Moves::Waiting);
    assert_eq!(measure(&mut world, "sim1", 900), Ok(true));
    let rate_limiter = Some(bytes_per_s_max);
    assert_eq!(world.core.rebalance_bytes_per_s_max(), rate_limiter);
    expect_on_second(&mut world, 0.5);
    assert_eq!(measure(&mut world, "sim1", 100), Ok(false));
    assert_eq!(world.core.moves(), Moves::Waiting);
    assert_eq!(world.core.rebalance_bytes_per_s_max(), None);
}

/// All its tiles have come to the second disk, and nobody has said so.
fn all_moved(seed: u64) -> World {
    let mut world = World::start(disks(), SimRandom::new(seed));
    job_at_rest(&mut world);
    assert_eq!(measure(&mut world, "sim1", 900), Ok(false));
    world.event(Event::RebalanceTick { force: true });
    world.run();
    expect_part(bytes_on(&world), 0.5);
    assert_eq!(world.core.moves(), Moves::Waiting);
    world
}

#[test]
fn tiles_still_move_when_a_device_was_about_to_be_called_settled_meanwhile() {
    let mut world = all_moved(38);
    let lent = begin(&mut world, "sim1").unwrap();
    overwrite(&mut world, &lent);
    let (rates, all_ended) = (Some(rates(2700)), true);
    let call = world.call(Call::EndMeasuring { rates, all_ended });
    // Nothing is left to move by the rates of before: that waits behind the new ones.
    world.event(Event::RebalanceTick { force: true });
    assert!(world.answer(call).is_ok());
    world.run();
    expect_on_second(&mut world, 0.75);
}

#[test]
fn rates_that_are_refused_because_much_waits_can_be_told_again() {
    let mut world = all_moved(39);
    let free = |world: &World| world.core.device_states()[1].free_bytes;
    let lent = begin(&mut world, "sim1").unwrap();
    overwrite(&mut world, &lent);
    let while_lent = free(&world);
    // More than may wait.
    for _ in 0..300 {
        world.event(Event::RebalanceTick { force: true });
    }
    let refused = end(&mut world, Some(rates(2700))).unwrap_err();
    assert_eq!(refused.kind, FaultKind::TooMany, "{refused}");
    assert_eq!(free(&world), while_lent);
    world.run();
    assert_eq!(end(&mut world, Some(rates(2700))), Ok(true));
    assert_eq!(kept(&world), [900, 2700]);
    expect_on_second(&mut world, 0.75);
}

#[test]
fn what_cannot_be_measured_is_refused_and_what_was_lent_is_given_back() {
    let mut world = World::start(disks(), SimRandom::new(33));
    let kind = |result: Result<_, Fault>| result.unwrap_err().kind;
    let free = |world: &World| world.core.device_states()[1].free_bytes;
    let before = free(&world);
    let unknown = begin(&mut world, "nobody").unwrap_err();
    assert_eq!(unknown.kind, FaultKind::NotFound, "{unknown}");
    assert!(unknown.message.contains("sim0, sim1"), "{unknown}");
    assert_eq!(kind(end(&mut world, None).map(drop)), FaultKind::Invalid);

    let lent = begin(&mut world, "sim1").unwrap();
    assert_eq!(lent.area.bytes, before - free(&world));
    assert_eq!(kind(begin(&mut world, "sim0").map(drop)), FaultKind::Busy);
    // Jobs that come meanwhile have other room.
    let process = world.begin("one", TILES, Durability::Committed);
    write_all(&mut world, process, 1, TILES);
    overwrite(&mut world, &lent);
    expect_all(&mut world, process, 1, TILES);
    let with_job = free(&world);
    // It could not be measured.
    assert_eq!(end(&mut world, None), Ok(true));
    assert_eq!(free(&world), with_job + lent.area.bytes);
    assert_eq!(kept(&world), [900, 300]);
    world.close(process).unwrap();

    // It is asked to leave meanwhile, and then it stays as it was.
    begin(&mut world, "sim1").unwrap();
    let call = world.drain_call("sim1");
    assert!(world.answer(call).is_ok());
    let leaving = end(&mut world, Some(rates(900))).unwrap_err();
    assert_eq!(leaving.kind, FaultKind::Invalid, "{leaving}");
    assert!(leaving.message.contains("sim1 is drained"), "{leaving}");
    let leaving = begin(&mut world, "sim1").unwrap_err();
    assert!(leaving.message.contains("sim1 is drained"), "{leaving}");
    world.move_all();
    assert_eq!(world.left, [1]);
    let gone = begin(&mut world, "sim1").unwrap_err();
    assert_eq!(gone.kind, FaultKind::NotFound, "{gone}");
    let (disks, _) = world.crash(true);
    let mut alone = disks.pick(&[0]);
    assert_eq!(recover::read(&mut alone).unwrap().devices.len(), 1);

    // Too small a piece is free.
    let mut world = World::start(formatted(), SimRandom::new(34));
    world.begin("one", TILES, Durability::Committed);
    let full = begin(&mut world, "sim1").unwrap_err();
    assert_eq!(full.kind, FaultKind::NoSpace, "{full}");
    assert!(
        full.message.contains("1048576 bytes in one piece"),
        "{full}"
    );
}
