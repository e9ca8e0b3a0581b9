//! A toy model: the content of a tile is one number, and every update mixes everything it read, so one stale read changes all later content.
//! `Reference` computes the same without a core.

use crate::world::Job;

/// Seeded numbers (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(&[self.0])
    }

    /// Returns a number from 0 to `end - 1`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// Returns one number computed from several.
pub(crate) fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x1234_5678_9ABC_DEF0, |hash, part| {
        let mut z = (hash ^ part).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 30)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 27)
    })
}

/// Content of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) value: u64,
    /// Step that made it; 0 for the fill.
    pub(crate) step: u64,
}

pub(crate) fn filled(kind: usize, range: usize) -> Content {
    Content {
        value: mix(&[kind as u64, range as u64]),
        step: 0,
    }
}

/// Returns a range's gradient after `sums` scatters of the step, each of which adds to the one before.
pub(crate) fn gradient(step: u64, range: usize, param: Content, sums: u64) -> u64 {
    (0..sums).fold(0, |sum, number| {
        mix(&[sum, number, step, range as u64, param.value])
    })
}

/// Returns a tile after a rewrite.
pub(crate) fn rewritten(step: u64, kind: usize, content: Content) -> Content {
    Content {
        value: mix(&[kind as u64, step, content.value, 5]),
        step,
    }
}

/// Returns a state after a revision by `grad`.
pub(crate) fn revised(step: u64, state: Content, grad: u64) -> Content {
    Content {
        value: mix(&[step, state.value, grad, 7]),
        step,
    }
}

/// Returns param and state of a range after a step of `job` in which they are updated.
pub(crate) fn trained(job: &Job, step: u64, range: usize, contents: [Content; 2]) -> [Content; 2] {
    let sums = job.passes[step as usize - 1];
    let [param, state] = contents;
    let grad = |sums| gradient(step, range, param, sums);
    match job.revised[range] {
        // Its last scatter follows the revision.
        true => update(
            step,
            [param, revised(step, state, grad(sums))],
            grad(sums + 1),
        ),
        false => update(step, contents, grad(sums)),
    }
}

/// Returns param and state after an update.
pub(crate) fn update(step: u64, contents: [Content; 2], grad: u64) -> [Content; 2] {
    let [param, state] = contents;
    [0, 1].map(|kind| Content {
        value: mix(&[kind, step, param.value, state.value, grad]),
        step,
    })
}

/// Contents of every range after each step; index 0 is the fill.
pub(crate) struct Reference(pub(crate) Vec<Vec<[Content; 2]>>);

impl Reference {
    /// Computes the result of training `job`.
    pub(crate) fn new(job: &Job) -> Self {
        let ranges = job.ranges();
        let mut contents: Vec<_> = (0..ranges)
            .map(|range| [filled(0, range), filled(1, range)])
            .collect();
        let mut all = vec![contents.clone()];
        for (step, &skip) in (1..).zip(&job.skipped) {
            for range in (0..ranges).filter(|&range| job.trained[range] && !skip) {
                contents[range] = trained(job, step, range, contents[range]);
            }
            for &unit in &job.rewrites[step as usize - 1] {
                for range in job.units[unit].clone() {
                    let before = contents[range as usize];
                    contents[range as usize] =
                        [0, 1].map(|kind| rewritten(step, kind, before[kind]));
                }
            }
            all.push(contents.clone());
        }
        Self(all)
    }
}
