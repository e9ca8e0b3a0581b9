//! Tests that a daemon killed at any moment leaves no generation that is torn, mixed from two, or older than the acknowledged one. The moments are
//! random, and the seed is printed.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use offload_client::{ClientError, Generation, Session, TileIndex};

use crate::real::*;

/// Kills the daemon repeatedly at random moments of writing and committing, and compares the store with the acknowledged generations: never less, and
/// never a mixture. A moment is a number of steps and a part of one: a number of milliseconds would end every round of a busy machine before its first
/// commit.
#[test]
fn whenever_it_is_killed_the_store_holds_one_whole_generation_not_older_than_acknowledged() {
    let place = Place::new();
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    println!("seed {seed}");
    let mut state = seed | 1;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    // Content of each generation, by tile; the last one may not be acknowledged.
    let mut generations: Vec<Vec<u64>> = vec![vec![0; TILE_COUNT as usize]];
    let mut acknowledged = 0;
    let mut killed_in_commit_count = 0;
    for round in 0..12u64 {
        let daemon = place.start();
        let mut session = Session::open(settings(daemon.socket())).unwrap();
        session.define_tiles(definition()).unwrap();
        let job = session.info().job.clone();
        let newest = job
            .as_ref()
            .and_then(|job| job.generations.last())
            .map_or(0, |g| g.generation.0 as usize);
        assert!(
            newest == acknowledged || newest + 1 == generations.len(),
            "round {round}: generation {newest} is offered, {acknowledged} was acknowledged"
        );
        assert!(newest >= acknowledged);
        killed_in_commit_count += usize::from(newest > acknowledged);
        session.resume(Generation(newest as u64)).unwrap();
        generations.truncate(newest + 1);
        acknowledged = newest;
        for tile in 0..TILE_COUNT {
            let seed = generations[newest][tile as usize];
            if seed != 0 {
                assert_content(&mut session, tile..tile + 1, seed);
            }
        }
        let (whole_steps, percent_of_next) = (random(8) as usize, random(100) as u32);
        std::thread::scope(|scope| {
            let (finish_step, step_times) = mpsc::channel();
            let daemon = &daemon;
            scope.spawn(move || {
                let last = step_times.iter().take(whole_steps).last();
                let next = last.unwrap_or(Duration::from_millis(3));
                std::thread::sleep(next * percent_of_next / 100);
                kill_9(daemon);
            });
            for step in 1.. {
                let started = Instant::now();
                let mut next = generations[acknowledged].clone();
                let first = random(u64::from(TILE_COUNT)) as u32;
                for tile in first..TILE_COUNT.min(first + 4) {
                    let seed = round * 1000 + step;
                    next[tile as usize] = seed;
                    if try_write(&mut session, tile, seed).is_err() {
                        return;
                    }
                }
                generations.push(next);
                if session.commit(Vec::new()).is_err() {
                    return;
                }
                acknowledged += 1;
                // Nobody receives it once the moment has come.
                let _ = finish_step.send(started.elapsed());
            }
        });
    }
    println!("{acknowledged} generations, {killed_in_commit_count} of them never acknowledged");
    assert!(
        acknowledged > 0,
        "every round was killed before its first commit"
    );
}

#[test]
fn written_in_place_a_killed_daemon_leaves_a_mixture() {
    if !daemon_has_hooks(&Place::new()) {
        skip_without_hooks();
        return;
    }
    assert_depends_on(
        "crashes::whenever_it_is_killed_the_store_holds_one_whole_generation_not_older_than_acknowledged",
        "out-of-place",
    );
}

/// Swaps `tile` out; an error means that the daemon is dead.
fn try_write(session: &mut Session, tile: u32, seed: u64) -> Result<(), ClientError> {
    let mut slot = session.take_slot(0).expect("a free slot");
    slot.as_mut_slice().copy_from_slice(&content(tile, seed));
    session
        .swap_out(TileIndex(tile), slot)
        .map_err(|(_, error)| error)?;
    for done in wait_for(session, 1)? {
        done.result.unwrap();
    }
    Ok(())
}
