//! Tests that the right rank is held responsible: not one that gave up because another is gone, not one that is alive, and never nobody.
//!
//! The tests supply the rounds; no thread runs.

use super::*;

const OP: &str = "a test";

fn shared(rank: u32, host: Option<u32>) -> HeartbeatState {
    let world = World {
        rank,
        ranks: 3,
        local_rank: rank,
        local_ranks: 3,
    };
    HeartbeatState {
        world,
        timeouts: Timeouts::default(),
        host,
        place: "here".to_owned(),
        state: Mutex::new(State {
            own: Beat::default(),
            peers: vec![Peer::default(); 3],
            round: 0,
            began: None,
            lost: None,
            unwritten: false,
            stop: false,
            stopped: false,
        }),
        changed: Condvar::new(),
    }
}

fn beat(count: u64) -> LastHeartbeat {
    LastHeartbeat::Beat(Some(Beat {
        count,
        ..Beat::default()
    }))
}

fn ended(count: u64, reason: &str) -> LastHeartbeat {
    LastHeartbeat::Beat(Some(Beat {
        count,
        reached: 0,
        end: Some(reason.to_owned()),
    }))
}

fn round(
    shared: &HeartbeatState,
    one: LastHeartbeat,
    two: LastHeartbeat,
) -> Option<CollectiveError> {
    let mut state = shared.lock();
    state.round += 1;
    state.see(vec![(1, one), (2, two)]);
    drop(state);
    shared.verdict(OP)
}

#[test]
fn ranks_that_beat_are_not_blamed_and_absent_ones_are_only_absent() {
    let shared = shared(0, None);
    for count in 0..100 {
        assert_eq!(round(&shared, beat(count), LastHeartbeat::Nothing), None);
    }
    // A heartbeat only every third round, as on a busy machine.
    for count in 0..100 {
        assert_eq!(round(&shared, beat(count), beat(count / 3)), None);
    }
}

#[test]
fn a_dead_rank_is_named_at_once() {
    let shared = shared(0, None);
    assert_eq!(round(&shared, beat(1), beat(1)), None);
    let verdict = round(&shared, beat(2), LastHeartbeat::Dead(None));
    assert!(matches!(
        verdict,
        Some(CollectiveError::Died { rank: 2, .. })
    ));
}

#[test]
fn a_stopped_rank_is_named_after_the_silence_it_is_given() {
    let shared = shared(0, None);
    round(&shared, beat(0), beat(0));
    for count in 1..10 {
        assert_eq!(round(&shared, beat(0), beat(count)), None, "round {count}");
    }
    let verdict = round(&shared, beat(0), beat(10));
    let expected = CollectiveError::Silent {
        rank: 1,
        silent_s: 5.0,
        op: OP.to_owned(),
    };
    assert_eq!(verdict, Some(expected));
}

#[test]
fn the_rank_that_stopped_first_is_blamed_and_not_those_that_gave_up_because_of_it() {
    let shared = shared(0, None);
    round(&shared, beat(0), beat(0));
    // Rank 1 is stopped; rank 2 notices it before we do, gives up and dies.
    for count in 1..8 {
        assert_eq!(round(&shared, beat(0), beat(count)), None);
    }
    assert_eq!(round(&shared, beat(0), ended(8, "rank 1 is silent")), None);
    assert_eq!(round(&shared, beat(0), LastHeartbeat::Dead(None)), None);
    let verdict = round(&shared, beat(0), LastHeartbeat::Dead(None));
    assert!(matches!(
        verdict,
        Some(CollectiveError::Silent { rank: 1, .. })
    ));
    // If rank 1 was only slow, the other rank is responsible after all.
    let verdict = round(&shared, beat(1), LastHeartbeat::Dead(None));
    assert!(
        matches!(&verdict, Some(CollectiveError::Left { rank: 2, reason, .. }) if reason == "rank 1 is silent"),
        "{verdict:?}"
    );
}

#[test]
fn a_rank_that_gave_up_is_named_with_its_reason_once_its_last_bytes_could_arrive() {
    let shared = shared(0, None);
    round(&shared, beat(0), beat(0));
    assert_eq!(round(&shared, ended(1, "the disk is full"), beat(1)), None);
    assert_eq!(round(&shared, ended(1, "the disk is full"), beat(2)), None);
    let verdict = round(&shared, ended(1, "the disk is full"), beat(3));
    let expected = CollectiveError::Left {
        rank: 1,
        waiting: 0,
        op: OP.to_owned(),
        reason: "the disk is full".to_owned(),
    };
    assert_eq!(verdict, Some(expected));
}

#[test]
fn nonsense_in_place_of_a_beat_is_silence() {
    let shared = shared(0, None);
    round(&shared, beat(0), beat(0));
    let mut verdict = None;
    for count in 1..=10 {
        verdict = round(&shared, LastHeartbeat::Beat(None), beat(count));
    }
    assert!(matches!(
        verdict,
        Some(CollectiveError::Silent { rank: 1, .. })
    ));
}

#[test]
fn a_board_that_is_gone_is_its_hosts_death() {
    let lost = CollectiveError::Rendezvous {
        op: "writing to the store",
        place: "here".to_owned(),
        message: "connection reset".to_owned(),
    };
    for (rank, host, died) in [(1, Some(0), true), (0, Some(0), false), (1, None, false)] {
        let shared = shared(rank, host);
        shared.lock().lost = Some(lost.clone());
        let expected = if died {
            CollectiveError::Died {
                rank: 0,
                op: OP.to_owned(),
            }
        } else {
            lost.clone()
        };
        assert_eq!(shared.verdict(OP), Some(expected));
    }
}

#[test]
fn a_board_that_does_not_answer_is_its_hosts_silence() {
    let shared = shared(1, Some(0));
    shared.lock().began = Instant::now().checked_sub(Duration::from_secs(4));
    assert_eq!(shared.verdict(OP), None);
    shared.lock().began = Instant::now().checked_sub(Duration::from_secs(6));
    assert!(matches!(
        shared.verdict(OP),
        Some(CollectiveError::Silent { rank: 0, .. })
    ));
}

#[test]
fn one_who_comes_late_blames_the_dead_rank_and_not_the_one_that_says_so() {
    let shared = shared(0, None);
    let verdict = round(&shared, ended(9, "rank 2 died"), LastHeartbeat::Dead(None));
    assert!(matches!(
        verdict,
        Some(CollectiveError::Died { rank: 2, .. })
    ));
}
