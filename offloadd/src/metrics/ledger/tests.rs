//! Tests of which device and job an operation is counted for.

use std::time::Duration;

use super::*;
use crate::core::{CommitState, DeviceStatus};
use crate::engine::Memory;

fn ledger() -> Ledger {
    let device = |path: &str| DeviceState {
        path: path.into(),
        block_bytes: 4096,
        data_bytes: 1 << 30,
        free_bytes: 1 << 30,
        read_bytes_per_s: 1_000_000_000,
        write_bytes_per_s: 1_000_000_000,
        status: DeviceStatus::settled(0),
    };
    Ledger::new(&[device("/a"), device("/b")], Instant::now())
}

fn state(uid: u32, job: &JobName) -> JobState {
    JobState {
        uid,
        job: job.clone(),
        reserved_bytes: 0,
        session_count: 1,
        arena_bytes: 0,
        slot_count: 0,
        slot_used_count: 0,
        weights: crate::quota::Weights {
            user: 100,
            job: 100,
        },
        reading_count: 0,
        writing_count: 0,
        commit: CommitState::None,
        newest_generation: 0,
        working_generation: 0,
        poisoned: false,
    }
}

/// Records a write that succeeds at once.
fn written(ledger: &mut Ledger, device: u32, bytes: u32, place: Option<JobPlace>, now: Instant) {
    let id = IoId(1);
    ledger.started(
        id,
        DeviceIndex(device),
        IoOp::Write,
        [0, u64::from(bytes)],
        place,
        now,
    );
    let done = IoDone {
        id,
        outcome: Ok(bytes),
        device_ns: 1,
        retried_count: 0,
        memory: Memory::None,
    };
    ledger.ended(&done, now);
}

#[test]
fn an_operation_counts_for_its_device_and_its_job_and_a_short_one_has_failed() {
    let mut ledger = ledger();
    let now = Instant::now();
    let name = JobName::new("tiny").unwrap();
    let place = ledger.session_begins(7, &name);
    let ops = [
        (IoOp::Read, Ok(4096)),
        (IoOp::Read, Ok(512)),
        (IoOp::Write, Err(libc::EIO)),
    ];
    for (number, (op, outcome)) in ops.into_iter().enumerate() {
        let io = IoId(number as u64);
        ledger.started(io, DeviceIndex(1), op, [0, 4096], Some(place), now);
        let done = IoDone {
            id: io,
            outcome,
            device_ns: 50_000,
            retried_count: 2,
            memory: Memory::None,
        };
        ledger.ended(&done, now);
    }
    ledger.started(IoId(9), DeviceIndex(1), IoOp::Flush, [0, 0], None, now);
    ledger.started(IoId(10), DeviceIndex(0), IoOp::Write, [0, 8192], None, now);
    let job = ledger.job(state(7, &name));
    assert_eq!((job.counts.read.bytes, job.counts.read.count()), (4608, 2));
    let read = &job.counts.read;
    assert_eq!((read.failed_count, read.retried_count), (1, 4));
    let written = &job.counts.written;
    assert_eq!((written.bytes, written.failed_count), (0, 1));
    // Another owner's job of the same name.
    assert_eq!(ledger.job(state(8, &name)).counts, Counts::default());
    let states = ["/a", "/b"].map(|path| DeviceState {
        path: path.into(),
        block_bytes: 4096,
        data_bytes: 0,
        free_bytes: 0,
        read_bytes_per_s: 0,
        write_bytes_per_s: 0,
        status: DeviceStatus::settled(0),
    });
    let devices = ledger.devices(states.to_vec());
    assert_eq!(devices[1].counts.read, job.counts.read);
    assert_eq!((devices[0].queue_depth, devices[1].queue_depth), (1, 1));
    assert_eq!(devices[1].counts.flushed.count(), 0, "it has not ended");
}

#[test]
fn a_round_of_several_ranks_is_one_commit_from_the_last_call() {
    let mut ledger = ledger();
    let now = Instant::now();
    let name = JobName::new("tiny").unwrap();
    let place = ledger.session_begins(7, &name);
    let second = Duration::from_secs(1);
    ledger.commit_called(place, now);
    ledger.commit_called(place, now + 5 * second);
    ledger.commit_answered(place, true, now + 6 * second);
    ledger.commit_answered(place, true, now + 6 * second);
    ledger.commit_answered(place, false, now + 7 * second);
    let job = ledger.job(state(7, &name));
    assert_eq!((job.commits.count(), job.commit_failed_count), (1, 1));
    assert_eq!(job.commits.sum_ns(), 1_000_000_000);
}

#[test]
fn a_dropped_jobs_bytes_are_not_the_next_ones_of_its_name() {
    let mut ledger = ledger();
    let now = Instant::now();
    let name = JobName::new("tiny").unwrap();
    let write = |ledger: &mut Ledger, bytes| {
        let place = ledger.session_begins(7, &name);
        written(ledger, 0, bytes, Some(place), now);
        ledger.session_ends(place);
    };
    write(&mut ledger, 8192);
    assert_eq!(ledger.job(state(7, &name)).counts.written.bytes, 8192);
    ledger.job_dropped(7, &name);
    assert_eq!(ledger.job(state(7, &name)).counts.written.bytes, 0);
    write(&mut ledger, 4096);
    assert_eq!(ledger.job(state(7, &name)).counts.written.bytes, 4096);
}

/// Adds a session of a job that writes `bytes` to the first device.
fn one_that_writes(ledger: &mut Ledger, name: &JobName, bytes: u32) -> JobPlace {
    let now = ledger.started_at();
    let place = ledger.session_begins(7, name);
    written(ledger, 0, bytes, Some(place), now);
    place
}

#[test]
fn names_that_come_and_go_take_nothing_from_a_closed_job_that_stays() {
    let mut ledger = ledger();
    let stays = JobName::new("stays").unwrap();
    let place = one_that_writes(&mut ledger, &stays, 8192);
    ledger.session_ends(place);
    for number in 0..3 * JOBS_MAX {
        let name = JobName::new(format!("job{number}")).unwrap();
        let place = one_that_writes(&mut ledger, &name, 4096);
        ledger.session_ends(place);
        ledger.job_dropped(7, &name);
        assert_eq!(ledger.job(state(7, &name)).counts, Counts::default());
    }
    assert_eq!(ledger.jobs.len(), 2, "one place after the other");
    // Jobs that are never deleted and hold nothing do not use up the places either.
    for number in 0..3 * JOBS_MAX {
        let name = JobName::new(format!("idle{number}")).unwrap();
        let place = ledger.session_begins(7, &name);
        ledger.session_ends(place);
    }
    assert_eq!(ledger.jobs.len(), JOBS_MAX);
    assert_eq!(ledger.job(state(7, &stays)).counts.written.bytes, 8192);
}

#[test]
fn a_job_that_is_dropped_while_a_session_of_it_ends_leaves_its_place_with_that_one() {
    let mut ledger = ledger();
    let name = JobName::new("tiny").unwrap();
    let ending = one_that_writes(&mut ledger, &name, 8192);
    ledger.job_dropped(7, &name);
    let next = one_that_writes(&mut ledger, &name, 4096);
    assert_ne!(next, ending, "its last operations are not the next one's");
    assert_eq!(ledger.job(state(7, &name)).counts.written.bytes, 4096);
    ledger.session_ends(ending);
    let other = JobName::new("other").unwrap();
    assert_eq!(ledger.session_begins(7, &other), ending, "it is free now");
    assert_eq!(ledger.job(state(7, &name)).counts.written.bytes, 4096);
    assert_eq!(ledger.job(state(7, &other)).counts, Counts::default());
}

#[test]
fn endless_names_take_no_endless_memory_and_no_place_that_is_in_use() {
    let mut ledger = ledger();
    let name = |number: usize| JobName::new(format!("job{number}")).unwrap();
    let used = ledger.session_begins(7, &name(0));
    for number in 1..3 * JOBS_MAX {
        let place = ledger.session_begins(7, &name(number));
        assert_ne!(place, used);
        ledger.session_ends(place);
    }
    assert_eq!(ledger.jobs.len(), JOBS_MAX);
    assert_eq!(ledger.session_begins(7, &name(0)), used);
}

#[test]
fn a_flush_that_does_not_end_is_named_beside_reads_that_do() {
    let mut ledger = ledger();
    let start = Instant::now();
    let [hung, well] = [0, 1].map(DeviceIndex);
    ledger.started(IoId(7), hung, IoOp::Flush, [0, 0], None, start);
    // The daemon wakes to check, even if nothing is read or written.
    assert!(ledger.judge_at().is_some());
    for second in 0..20 {
        let now = start + Duration::from_secs(second);
        for device in [0, 1] {
            written(&mut ledger, device, 4096, None, now);
        }
        let hanging = ledger.hanging(hung, now);
        assert_eq!(hanging.is_some(), second >= 10, "after {second} s");
        assert_eq!(ledger.hanging(well, now), None);
    }
    let hanging = ledger
        .hanging(hung, start + Duration::from_secs(12))
        .unwrap();
    let message = hanging.to_string();
    assert!(
        message.contains("a flush has not ended for 12 s"),
        "{message}"
    );
    assert_eq!(hanging.inflight_count, 1);
}
