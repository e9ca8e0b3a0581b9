//! Tests the core against devices, trainers and workers that answer in any order, fail and start again.
//!
//! Likely faults are a slot used twice or lost, a stale tile handed out, a write in the wrong generation, a commit of a partly written generation,
//! more operations in flight than allowed, a wait that never ends, and bytes moved without need. Each seed draws a job, a setup and an order of
//! events; the world (`world.rs`) checks every action, and a toy model in which every number depends on all earlier ones (`toy.rs`) shows the rest.
//! `SWAPPER_SEEDS=n..m` runs other seeds, or repeats the seed of a failure.

mod rules;
mod toy;
mod world;

use swapper::{Op, Schedule, StepProgram};
use toy::{Reference, Rng};
use world::{End, Incarnation, Job, Moves, Setup, Store};

/// Takes four seconds on two cores.
const SEEDS: u64 = 8000;

/// Runs the seeds, or those that `SWAPPER_SEEDS` names. A seed that fails is printed.
fn for_seeds(test: impl Fn(&mut Rng)) {
    struct Print(u64);
    impl Drop for Print {
        fn drop(&mut self) {
            if std::thread::panicking() {
                let Self(seed) = *self;
                eprintln!("run it again with SWAPPER_SEEDS={seed}..{}", seed + 1);
            }
        }
    }
    let seeds = std::env::var("SWAPPER_SEEDS").map_or(0..SEEDS, |text| {
        let seeds = text
            .split_once("..")
            .and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
        seeds.unwrap_or_else(|| panic!("SWAPPER_SEEDS={text}: expected FIRST..END"))
    });
    for seed in seeds {
        let _print = Print(seed);
        test(&mut Rng(seed));
    }
}

fn draw_job(rng: &mut Rng) -> Job {
    let mut end = 0;
    let units: Vec<_> = (0..1 + rng.below(6))
        .map(|_| {
            let start = end;
            end += 1 + rng.below(4) as u32;
            start..end
        })
        .collect();
    let mut program = StepProgram::training(units.len()).ops().to_vec();
    let mut trained = vec![true; end as usize];
    if rng.chance(20) {
        // Tied embeddings: unit 0 is gathered at the head too.
        program.splice(
            units.len()..units.len(),
            [Op::Gather { unit: 0 }, Op::Gather { unit: 0 }],
        );
    }
    if rng.chance(10) {
        // A unit that only has gradients.
        let unit = rng.below(units.len());
        program.retain(|op| *op != Op::Gather { unit });
    }
    let mut frozen = vec![false; end as usize];
    let untrained = if rng.chance(30) { 1 + rng.below(3) } else { 0 };
    for _ in 0..untrained {
        let unit = rng.below(units.len());
        // Without gradients in this run, or without any: then it has no state either.
        let never = rng.chance(60);
        program.retain(|op| *op != Op::Scatter { unit });
        for range in units[unit].clone() {
            trained[range as usize] = false;
            frozen[range as usize] = never;
        }
    }
    let overflows = if rng.chance(30) { 30 } else { 0 };
    let steps = 1 + rng.below(6);
    let written_again = if rng.chance(30) { 30 } else { 0 };
    let mut skipped: Vec<bool> = (0..steps).map(|_| rng.chance(overflows)).collect();
    let mut rewrites = vec![Vec::new(); steps];
    for step in 0..steps {
        if rng.chance(written_again) {
            let may = |&unit: &usize| !frozen[units[unit].start as usize];
            rewrites[step] = (0..units.len()).filter(may).collect();
            rewrites[step].retain(|_| rng.chance(60));
            skipped[step] |= !rewrites[step].is_empty();
        }
    }
    let passes_max = if rng.chance(40) { 3 } else { 1 };
    let mut revised = vec![false; end as usize];
    if rng.chance(30) {
        for ranges in &units {
            let chosen = trained[ranges.start as usize] && rng.chance(60);
            for range in ranges.clone() {
                revised[range as usize] = chosen;
            }
        }
    }
    Job {
        units,
        program: StepProgram::new(program).unwrap(),
        trained,
        revised,
        frozen,
        skipped,
        rewrites,
        passes: (0..steps)
            .map(|_| 1 + rng.below(passes_max) as u64)
            .collect(),
        evaluate_every: if rng.chance(30) { 1 + rng.below(3) } else { 0 },
        durable: !rng.chance(10),
    }
}

fn draw_setup(rng: &mut Rng, job: &Job) -> Setup {
    let ranges = job.ranges();
    let mut external = vec![false; ranges];
    if job.durable && rng.chance(40) {
        let percent = [30, 60, 100][rng.below(3)];
        let rewritten = |unit| job.rewrites.iter().any(|units| units.contains(&unit));
        for (unit, ranges) in job.units.iter().enumerate() {
            let chosen = rng.chance(percent) && !rewritten(unit);
            for range in ranges.clone() {
                external[range as usize] = chosen;
            }
        }
    }
    let fraction = |rng: &mut Rng| match rng.below(4) {
        _ if !job.durable => 1.0,
        0 => 0.0,
        1 => 1.0,
        _ => rng.below(101) as f64 / 100.0,
    };
    let shares = [fraction(rng), fraction(rng), fraction(rng)];
    let staging = [0, 1, 2].map(|kind: usize| {
        let residents = job.residents(kind, shares[kind], &external);
        let is_staged = |range: &usize| !(residents[*range] || kind == 2 && external[*range]);
        let staged = job.with(kind).filter(is_staged).count();
        let more = if rng.chance(50) { 0 } else { rng.below(ranges) };
        (2 + more).min(staged) as u32
    });
    Setup {
        external,
        shares,
        staging,
        iodepth: 2 + rng.below(7) as u32,
        workers: 1 + rng.below(4),
        schedule: match rng.chance(50) {
            true => Schedule::Immediate,
            false => Schedule::Deferred,
        },
        commit_every: rng.below(4) as u64,
        revisions: [0, 0, 5, 50][rng.below(4)],
        late_blobs: [0, 50, 100][rng.below(3)],
        begins: [0, 0, 30, 100][rng.below(4)],
        speeds: [(); 5].map(|()| [1, 10, 100][rng.below(3)]),
        fails_at: (job.durable && rng.chance(40)).then(|| rng.next() % 200),
    }
}

#[test]
fn training_through_failures_equals_training_in_memory() {
    let incarnations = std::cell::Cell::new((0, 0));
    let copied = std::cell::Cell::new(0);
    for_seeds(|rng| {
        let job = draw_job(rng);
        let reference = Reference::new(&job);
        let mut store = Store::default();
        loop {
            let setup = draw_setup(rng, &job);
            let (from, new) = match &store.committed {
                Some(generation) => (generation.step, false),
                None => (0, true),
            };
            let incarnation = Incarnation::new(&job, &reference, &setup, &mut store, rng);
            let (end, moves) = incarnation.run();
            let (all, failed) = incarnations.get();
            incarnations.set((all + 1, failed + u64::from(end == End::Failed)));
            copied.set(copied.get() + moves.copies);
            if end == End::Finished {
                check_moves(&job, &setup, from, new, &moves);
                break;
            }
            let committed = store.committed.as_ref().map_or(0, |g| g.step);
            assert!(committed >= from, "a failure lost a generation");
        }
    });
    let (all, failed) = incarnations.get();
    println!("{all} incarnations, {failed} of them ended by a failure");
    println!("{} ranges copied", copied.get());
    assert!(
        all < 100 || copied.get() > all,
        "the seeds copy too few external ranges to show anything"
    );
    assert!(
        all < 100 || failed > all / 20,
        "the seeds make too few failures to show anything"
    );
}

/// Returns the number of evaluations from step `from` on.
fn evaluations_of(job: &Job, from: u64) -> u64 {
    match job.evaluate_every {
        0 => 0,
        every => (from..job.skipped.len() as u64)
            .filter(|step| step % every as u64 == 0)
            .count() as u64,
    }
}

/// Commits of `steps` steps that copy external ranges.
fn commits_that_copy(setup: &Setup, steps: u64) -> u64 {
    match setup.external.contains(&true) {
        true => steps.checked_div(setup.commit_every).unwrap_or(0),
        false => 0,
    }
}

/// Whether a revised state stays in its slot until its update: each unit's update begins when it is revised, before others', and there are slots for
/// all its states.
fn keeps_revised(job: &Job, setup: &Setup, moves: &Moves) -> bool {
    let residents = job.residents(1, setup.shares[1], &setup.external);
    let staged = |range: &u32| !residents[*range as usize];
    let revised = job.revised_units().into_iter();
    let mut counts = revised.map(|unit| job.units[unit].clone().filter(staged).count());
    let fits = counts.all(|count| count <= setup.staging[1] as usize);
    setup.begins == 100 && moves.joined == 0 && fits
}

/// Checks that an incarnation without failure moved as many tiles as the formulas of the design say: never more, and all writes.
fn check_moves(job: &Job, setup: &Setup, from: u64, new: bool, moves: &Moves) {
    let steps = (from as usize..job.skipped.len())
        .filter(|&step| !job.skipped[step])
        .count() as u64;
    let all_steps = job.skipped.len() as u64 - from;
    let rewriting = |step: &usize| !job.rewrites[*step].is_empty();
    let rewrites = (from as usize..job.skipped.len()).filter(rewriting).count() as u64;
    let passes: u64 = (from as usize..job.skipped.len())
        .filter(|step| !rewriting(step))
        .map(|step| job.passes[step])
        .sum();
    // Further passes of steps that update: each finds the sum so far.
    let sums = passes - (all_steps - rewrites);
    let drains = evaluations_of(job, from) + rewrites;
    let evaluations = evaluations_of(job, from);
    for kind in [0, 1, 2] {
        let residents = job.residents(kind, setup.shares[kind], &setup.external);
        let keeps_revised = keeps_revised(job, setup, moves);
        let mut reads_max = 0;
        let mut writes_max = 0;
        let mut writes_min = 0;
        for (unit, ranges) in job.units.iter().enumerate() {
            let gathers = job.program.ops().iter();
            let gathers = gathers.filter(|op| **op == Op::Gather { unit }).count() as u64;
            let rewritten = (from as usize..job.skipped.len())
                .filter(|&step| job.rewrites[step].contains(&unit))
                .count() as u64;
            for range in ranges.clone() {
                if kind > 0 && job.frozen[range as usize] {
                    continue;
                }
                let updates = steps * u64::from(job.trained[range as usize]);
                if kind == 2 && setup.external[range as usize] {
                    continue;
                }
                if kind == 2 {
                    // Written and read at most once per pass, and never if resident; a skipped step has gradients too.
                    if !residents[range as usize] && job.trained[range as usize] {
                        // A revision reads them, and the scatter after it replaces them.
                        let revised = updates * u64::from(job.revised[range as usize]);
                        writes_max += passes + revised;
                        reads_max += updates + sums + 2 * revised;
                    }
                    continue;
                }
                let fills = u64::from(new) + rewritten;
                let external = setup.external[range as usize];
                // What has state is copied whether it was updated or not.
                let updates = match external && !job.frozen[range as usize] {
                    true => steps,
                    false => updates,
                };
                writes_max += updates + fills;
                if residents[range as usize] || external {
                    // Once per commit, however often the tile was updated.
                    let commits =
                        drains + 1 + all_steps.checked_div(setup.commit_every).unwrap_or(0);
                    writes_max -= updates - updates.min(commits);
                    // Read once in a resumed incarnation, or not at all; external ones by the final visit.
                    reads_max += u64::from(!new || external);
                    let commits_all = setup.commit_every == 1;
                    writes_min += fills + if commits_all { updates } else { updates.min(1) };
                    continue;
                }
                // With deferred updates, an update finds the parameters that its gather needs anyway, except in a drain.
                reads_max += match (kind, setup.schedule) {
                    (1, _) | (_, Schedule::Immediate) => updates,
                    _ if gathers == 0 => updates,
                    // Where updates begin within a step, the gathers after it come later.
                    (_, Schedule::Deferred) if moves.begun > 0 => updates,
                    (_, Schedule::Deferred) => updates.min(1 + drains),
                };
                // A revised state is written, and read for its update, unless that begins while it is in its slot.
                let revised = kind == 1 && job.revised[range as usize] && !keeps_revised;
                reads_max += updates * u64::from(revised) + rewritten;
                writes_max += updates * u64::from(revised);
                reads_max += if kind == 0 {
                    passes * gathers + evaluations
                } else {
                    0
                };
                // The final visit.
                reads_max += 1;
                writes_min += fills
                    + if setup.commit_every == 1 {
                        updates
                    } else {
                        updates.min(1)
                    };
            }
        }
        if !job.durable {
            (reads_max, writes_max, writes_min) = (0, 0, 0);
        }
        // A change of plans that the core cannot foresee (an evaluation, a skipped step, another order, the end, copies for a commit) wastes what was
        // read ahead.
        let surprises = 2
            + 3 * drains
            + 2 * (all_steps - steps)
            + 2 * (moves.further + moves.begun)
            + commits_that_copy(setup, all_steps);
        let wasted = surprises * u64::from(setup.staging[kind]);
        assert!(
            moves.reads[kind] <= reads_max + wasted,
            "{} reads of kind {kind}, {reads_max} and {wasted} wasted at most: {setup:?} {job:?}",
            moves.reads[kind]
        );
        assert!(
            (writes_min..=writes_max).contains(&moves.writes[kind]),
            "{} writes of kind {kind}, not {writes_min} to {writes_max}: {setup:?}",
            moves.writes[kind]
        );
    }
}

/// Returns the tiles that `steps` steps over 12 units of one range each move, with devices faster than everything else.
fn moves_of(steps: usize, schedule: Schedule, staging: [u32; 3], seed: u64) -> Moves {
    let units = 12;
    let job = Job {
        units: (0..units).map(|unit| unit..unit + 1).collect(),
        program: StepProgram::training(units as usize),
        trained: vec![true; units as usize],
        revised: vec![false; units as usize],
        frozen: vec![false; units as usize],
        skipped: vec![false; steps],
        rewrites: vec![Vec::new(); steps],
        passes: vec![1; steps],
        evaluate_every: 0,
        durable: true,
    };
    let setup = Setup {
        external: vec![false; units as usize],
        shares: [0.0; 3],
        staging,
        iodepth: 8,
        workers: 1,
        schedule,
        commit_every: 1,
        revisions: 0,
        late_blobs: 0,
        begins: 0,
        speeds: [1, 1, 100_000, 100_000, 100_000],
        fails_at: None,
    };
    let reference = Reference::new(&job);
    let incarnation = Incarnation::new(
        &job,
        &reference,
        &setup,
        &mut Store::default(),
        &mut Rng(seed),
    )
    .run();
    incarnation.1
}

#[test]
fn a_step_moves_the_formulas_bytes_less_what_stays_at_turning_points() {
    for (schedule, param_reads) in [(Schedule::Immediate, 36), (Schedule::Deferred, 24)] {
        for staging in [[2, 2, 2], [3, 2, 3], [4, 4, 2], [4, 8, 4]] {
            for seed in 0..10 {
                // Ten more steps, so that the start and the end do not count.
                let [few, many] = [10, 20].map(|steps| moves_of(steps, schedule, staging, seed));
                let a_step = |few: u64, many: u64| (many - few) as f64 / 10.0;
                // The end of forward and the end of a step find the last param tiles still in their slots.
                let kept = 2 * staging[0];
                assert_eq!(
                    a_step(few.reads[0], many.reads[0]),
                    f64::from(param_reads - kept),
                    "{schedule:?}, {staging:?}, seed {seed}"
                );
                if staging[1] <= 4 {
                    assert_eq!(a_step(few.reads[1], many.reads[1]), 12.0);
                }
                assert!(a_step(few.reads[1], many.reads[1]) <= 12.0);
                // The gradients that came last are used first, and are still in their slots.
                let kept = f64::from(staging[2]);
                assert_eq!(a_step(few.reads[2], many.reads[2]), 12.0 - kept);
                for kind in [0, 1, 2] {
                    assert_eq!(a_step(few.writes[kind], many.writes[kind]), 12.0);
                }
            }
        }
    }
}
