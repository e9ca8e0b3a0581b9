//! Tests of promotions: a queued read that somebody waits for now.

use offload_api::ids::{Generation, SlotIndex, TicketId, TileIndex};
use offload_api::ring::entry::{Priority, Promote, Request, Verb};
use offloadd::store::definition::Durability::Committed;
use test_hooks::random::SimRandom;

use super::world::{World, definition, formatted, job, outcome};

const TILES: u32 = 6;

fn world() -> World {
    World::start(formatted(), SimRandom::new(1))
}

#[test]
fn a_promotion_reaches_the_operation_of_its_ticket_and_no_other() {
    let mut world = world();
    let [one, two] = ["a", "b"].map(|name| {
        let (process, _) = world.open(&job(name), 0, 1).unwrap();
        world
            .define(process, definition(TILES, Committed, 1))
            .unwrap();
        world.resume(process, 0).unwrap();
        process
    });
    for process in [one, two] {
        world.write(process, 1, 1, 5).unwrap();
    }
    for process in [one, two] {
        world.submit_read(process, 1, 3);
    }
    let promote = |ticket| Promote {
        ticket: TicketId(ticket),
        priority: Priority::Demand,
    };
    let epoch = world.epoch;
    world.submit_raw(one, promote(4).to_sqe(epoch));
    assert_eq!(world.promoted, [], "nothing of this ticket is in flight");
    world.submit_raw(one, promote(3).to_sqe(epoch));
    world.submit_raw(two, promote(3).to_sqe(epoch));
    assert_eq!(world.promoted.len(), 2);
    assert_ne!(world.promoted[0], world.promoted[1], "each its own");
    // With an older daemon's epoch: nobody waits for an answer.
    let mut stale = promote(3).to_sqe(epoch);
    stale.epoch ^= 1;
    world.submit_raw(one, stale);
    world.run();
    for process in [one, two] {
        let entry = world.completion(process).unwrap();
        assert_eq!((entry.ticket, outcome(&entry)), (3, Ok(())));
        assert!(
            world.completion(process).is_none(),
            "a promotion has no completion"
        );
    }
    // The operation has ended.
    world.submit_raw(one, promote(3).to_sqe(epoch));
    assert_eq!((world.promoted.len(), world.evicted.len()), (2, 0));
    let mut nonsense = promote(3).to_sqe(epoch);
    nonsense.slot = 1;
    world.submit_raw(one, nonsense);
    assert_eq!(world.evicted, [one.session]);
}

#[test]
fn of_two_operations_with_one_ticket_the_last_is_urged_until_it_has_ended() {
    let mut world = world();
    let (process, _) = world.open(&job("a"), 0, 1).unwrap();
    world
        .define(process, definition(TILES, Committed, 1))
        .unwrap();
    world.resume(process, 0).unwrap();
    for tile in [1, 2] {
        world.write(process, 1, tile, 5).unwrap();
    }
    let read = |tile| Request {
        ticket: TicketId(7),
        verb: Verb::SwapIn,
        priority: Priority::Prefetch,
        tile: TileIndex(tile),
        slot: SlotIndex(tile),
        generation: Generation(0),
        checksum: 0,
    };
    let promote = Promote {
        ticket: TicketId(7),
        priority: Priority::Demand,
    };
    let promote = promote.to_sqe(world.epoch);
    world.submit(process, read(1));
    world.submit_raw(process, promote);
    world.submit(process, read(2));
    world.submit_raw(process, promote);
    assert_eq!(world.promoted.len(), 2);
    assert_ne!(world.promoted[0], world.promoted[1]);
    world.run();
    for _ in 0..2 {
        let entry = world.completion(process).unwrap();
        assert_eq!((entry.ticket, outcome(&entry)), (7, Ok(())));
    }
    world.submit_raw(process, promote);
    assert_eq!((world.promoted.len(), world.evicted.len()), (2, 0));
}
