//! Bytes that a step moves, and a lower bound of its time. Plans, benchmarks and reports share these functions.
//!
//! Bytes are counted from the tiles, padding included. A tile that stays in a staging slot across the end of the forward
//! pass or of a step is read once less. The bound counts that read anyway, so a run may be slightly faster than its bound.

use crate::layout::{ByKind, Kind, Layout};
use crate::settings::SwapperSettings;
use crate::{Schedule, SwapperError};

/// Bytes one step moves to and from devices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepBytes {
    /// Read in forward: for gathers and, if updates are deferred, for updates (gradients included).
    pub forward_read_bytes: f64,
    /// Read in backward.
    pub backward_read_bytes: f64,
    /// Read after backward, for updates at once.
    pub update_read_bytes: f64,
    /// Written. A commit's writes of resident tiles, and of those of external units, are spread over the steps between commits.
    pub written_bytes: f64,
    /// Gradients among the bytes written: those not kept in host memory. They are written in backward and read for the
    /// updates.
    pub grad_written_bytes: f64,
    /// The caller's own tiles, written in forward: not among the bytes written.
    pub scratch_written_bytes: f64,
    /// The caller's own tiles, read in backward: not among the bytes read there.
    pub scratch_read_bytes: f64,
}

impl StepBytes {
    /// Bytes of `count` processes that each move this.
    pub fn times(&self, count: f64) -> Self {
        Self {
            forward_read_bytes: self.forward_read_bytes * count,
            backward_read_bytes: self.backward_read_bytes * count,
            update_read_bytes: self.update_read_bytes * count,
            written_bytes: self.written_bytes * count,
            grad_written_bytes: self.grad_written_bytes * count,
            scratch_written_bytes: self.scratch_written_bytes * count,
            scratch_read_bytes: self.scratch_read_bytes * count,
        }
    }

    /// The bytes of a step that has read so many. Further passes of a step gather again, which counts as read in backward. Units that the caller
    /// keeps, if `some_stay`, are not gathered; without them, what is missing was read ahead in the step before.
    pub fn that_read(&self, read_bytes: f64, some_stay: bool) -> Self {
        let more = read_bytes - self.read_bytes();
        let backward = self.backward_read_bytes + if some_stay { more } else { more.max(0.0) };
        Self {
            forward_read_bytes: (self.forward_read_bytes + backward.min(0.0)).max(0.0),
            backward_read_bytes: backward.max(0.0),
            ..*self
        }
    }

    /// All bytes read of units.
    pub fn read_bytes(&self) -> f64 {
        self.forward_read_bytes + self.backward_read_bytes + self.update_read_bytes
    }

    /// All bytes read: of units, and the caller's own.
    pub fn all_read_bytes(&self) -> f64 {
        self.read_bytes() + self.scratch_read_bytes
    }

    /// All bytes written: of units, and the caller's own.
    pub fn all_written_bytes(&self) -> f64 {
        self.written_bytes + self.scratch_written_bytes
    }
}

/// Rates and times that bound a step, beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRates {
    /// All devices together, bytes a second.
    pub read_bytes_per_s: f64,
    /// All devices together, bytes a second.
    pub write_bytes_per_s: f64,
    /// Bytes of staging slots, with those of scratch tiles. They carry unwritten tiles into backward, and tiles read ahead into the next phase.
    pub staging_bytes: f64,
    /// Compute of the forward pass.
    pub forward_s: f64,
    /// Compute of the backward pass.
    pub backward_s: f64,
    /// Time of the optimizer over all tiles.
    pub update_s: f64,
    /// Time of transfers over the bus to an accelerator; 0 without one.
    pub bus_s: f64,
    /// Time of transfers between nodes; 0 on one node.
    pub network_s: f64,
}

impl SwapperSettings {
    /// Bytes of one training step with these settings: two gathers, one scatter and one update of each unit.
    pub fn step_bytes(&self) -> Result<StepBytes, SwapperError> {
        let layout = self.cut()?;
        Ok(self.step_bytes_of(&layout))
    }

    pub(crate) fn step_bytes_of(&self, layout: &Layout) -> StepBytes {
        let residency = self.residency(layout);
        let mut moved = ByKind([0.0; 3]);
        // What is revised is updated in the same step, as everything is at once.
        let mut revised = ByKind([0.0; 3]);
        let (mut untrained, mut resident) = (0.0, 0.0);
        for range in 0..layout.ranges().len() as u32 {
            let is_trained = layout.has(Kind::State, range);
            for kind in Kind::ALL {
                let bytes = layout.moved_bytes(kind, range) as f64;
                if residency[kind][range as usize] || layout.has_external(range) {
                    if is_trained && kind != Kind::Grad {
                        resident += bytes;
                    }
                    continue;
                }
                moved[kind] += bytes;
                if layout.revised(range) {
                    revised[kind] += bytes;
                }
                if !is_trained {
                    untrained += bytes;
                }
            }
        }
        let ByKind([param, state, grad]) = moved;
        let updated = param - untrained;
        let committed = match (&self.backing, self.commit_every) {
            (crate::Backing::Memory, _) | (_, 0) => 0.0,
            (_, every) => resident / every as f64,
        };
        let [with_gathers, update] = match self.schedule {
            Schedule::Immediate => [0.0, updated + state + grad],
            Schedule::Deferred => {
                let ByKind([revised_params, revised_states, revised_grads]) = revised;
                let beside_params = revised_states + revised_grads;
                [state + grad - beside_params, revised_params + beside_params]
            }
        };
        StepBytes {
            forward_read_bytes: param + with_gathers,
            backward_read_bytes: param,
            update_read_bytes: update,
            written_bytes: updated + state + committed + grad,
            grad_written_bytes: grad,
            scratch_written_bytes: 0.0,
            scratch_read_bytes: 0.0,
        }
    }
}

/// The resource that limits a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wall {
    /// Forward and backward.
    Compute,
    /// Reading from devices.
    Reads,
    /// Writing to devices.
    Writes,
    /// The optimizer.
    Update,
    /// The bus to an accelerator.
    Bus,
    /// The network between nodes.
    Network,
}

impl Wall {
    /// Name for reports.
    pub fn word(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Reads => "device reads",
            Self::Writes => "device writes",
            Self::Update => "update",
            Self::Bus => "bus",
            Self::Network => "network",
        }
    }
}

/// One lower bound of a step's time.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    /// The resource that takes most of the time.
    pub wall: Wall,
    /// The term as a formula.
    pub what: &'static str,
    /// Seconds.
    pub s: f64,
}

/// Lower bound of a step's time.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Seconds: the longest of the terms.
    pub s: f64,
    /// Limiting resource of the longest term.
    pub wall: Wall,
    /// All terms, the longest first.
    pub terms: Vec<Term>,
}

/// Lower bound in seconds of a step of `schedule`. See [`bound`].
pub fn bound_s(schedule: Schedule, bytes: &StepBytes, rates: &StepRates) -> f64 {
    bound(schedule, bytes, rates).s
}

/// Lower bound of a step of `schedule`, term by term.
///
/// Deferred, with W bytes written and R read at rates w and r, and S bytes of staging: `max(W/w, R/r, bus, network, t_bwd +
/// max(t_fwd, t_update, (W-S)/w, (R_fwd-S)/r))`, where W in the last two terms counts only the writes of updates and scratch tiles; and
/// `t_fwd + (G-S)/w` for the G bytes of gradients that backward writes. At once: the sum of three phases, each as long
/// as the longest of its compute, its reads and its writes.
pub fn bound(schedule: Schedule, bytes: &StepBytes, rates: &StepRates) -> Bound {
    let over = |bytes: f64, rate: f64| {
        if bytes <= 0.0 { 0.0 } else { bytes / rate }
    };
    let reading = |bytes: f64| over(bytes, rates.read_bytes_per_s);
    let writing = |bytes: f64| over(bytes, rates.write_bytes_per_s);
    let staged = |bytes: f64| bytes - rates.staging_bytes;
    let term = |wall, what, s| Term { wall, what, s };
    let (all_read, all_written) = (bytes.all_read_bytes(), bytes.all_written_bytes());
    let mut terms = vec![
        term(Wall::Writes, "all writes", writing(all_written)),
        term(Wall::Reads, "all reads", reading(all_read)),
        term(Wall::Bus, "bus", rates.bus_s),
        term(Wall::Network, "network", rates.network_s),
    ];
    match schedule {
        Schedule::Deferred => {
            let after = |s: f64| rates.backward_s + s;
            let written_s = writing(staged(all_written - bytes.grad_written_bytes));
            let grads_s = rates.forward_s + writing(staged(bytes.grad_written_bytes));
            let read_s = reading(staged(bytes.forward_read_bytes));
            terms.extend([
                term(Wall::Compute, "backward + forward", after(rates.forward_s)),
                term(Wall::Update, "backward + update", after(rates.update_s)),
                term(
                    Wall::Writes,
                    "backward + writes beyond staging",
                    after(written_s),
                ),
                term(
                    Wall::Reads,
                    "backward + forward's reads beyond staging",
                    after(read_s),
                ),
                term(
                    Wall::Writes,
                    "forward + gradients' writes beyond staging",
                    grads_s,
                ),
            ]);
        }
        Schedule::Immediate => {
            let read_s = |bytes: f64| reading(staged(bytes));
            let phases = [
                [
                    (Wall::Compute, rates.forward_s),
                    (Wall::Reads, read_s(bytes.forward_read_bytes)),
                    (Wall::Writes, writing(staged(bytes.scratch_written_bytes))),
                ],
                [
                    (Wall::Compute, rates.backward_s),
                    (
                        Wall::Reads,
                        read_s(bytes.backward_read_bytes + bytes.scratch_read_bytes),
                    ),
                    (Wall::Writes, writing(staged(bytes.grad_written_bytes))),
                ],
                [
                    (Wall::Update, rates.update_s),
                    (Wall::Reads, read_s(bytes.update_read_bytes)),
                    (
                        Wall::Writes,
                        writing(bytes.written_bytes - bytes.grad_written_bytes),
                    ),
                ],
            ];
            let longest = phases.map(|phase| longest(phase, |(_, s)| *s));
            // The sum is limited by the resource of its longest phase.
            let (wall, _) = self::longest(longest, |(_, s)| *s);
            let sum = longest.iter().map(|(_, s)| s).sum();
            terms.push(term(wall, "forward + backward + update", sum));
        }
    }
    // Stable: among equal terms the first one wins, so a bound by drives is called that.
    terms.sort_by(|a, b| b.s.total_cmp(&a.s));
    Bound {
        s: terms[0].s,
        wall: terms[0].wall,
        terms,
    }
}

/// The first of `items` that no other exceeds.
fn longest<T: Copy, const N: usize>(items: [T; N], s: impl Fn(&T) -> f64) -> T {
    let mut best = items[0];
    for item in &items[1..] {
        if s(item) > s(&best) {
            best = *item;
        }
    }
    best
}

/// Smallest staging with which a deferred step is not limited by staging. `rates.staging_bytes` is ignored; 0 when
/// nothing moves. Tiles in flight need space in addition.
pub fn staging_needed_bytes(bytes: &StepBytes, rates: &StepRates) -> f64 {
    let endless = StepRates {
        staging_bytes: f64::INFINITY,
        ..*rates
    };
    // With unlimited staging the terms with S vanish. Gradients are left out: they are fewer bytes than the updates
    // write.
    let beside_s = bound_s(Schedule::Deferred, bytes, &endless) - rates.backward_s;
    let written =
        bytes.all_written_bytes() - bytes.grad_written_bytes - beside_s * rates.write_bytes_per_s;
    let read = bytes.forward_read_bytes - beside_s * rates.read_bytes_per_s;
    written.max(read).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Staging, StoreSettings, TileBytes, UnitShape};

    fn settings(schedule: Schedule, fraction: f64, commit_every: u64) -> SwapperSettings {
        SwapperSettings {
            units: vec![
                UnitShape {
                    elems: 1 << 20,
                    tile_bytes: TileBytes {
                        param_bytes_per_elem: 2,
                        grad_bytes_per_elem: 2,
                        state_tile_bytes: |elems| elems * 10,
                    },
                    trained: true,
                    other_state: None,
                    revised: false,
                    external: false,
                };
                4
            ],
            tile_elems: 1 << 18,
            param_fraction: fraction,
            state_fraction: fraction,
            grad_fraction: 1.0,
            staging: Staging::default(),
            schedule,
            commit_every,
            scratch: crate::ScratchSettings::default(),
            iodepth: 8,
            backing: Backing::Store(StoreSettings {
                socket: "none".into(),
                job: "none".into(),
                durability: offload_client::Durability::Committed,
                nodes: None,
            }),
            layout: Vec::new(),
            rank: 0,
            ranks: 1,
            node_ranks: None,
        }
    }

    #[test]
    fn bytes_a_parameter_are_those_of_the_design() {
        let elems = f64::from(4 << 20);
        let of = |schedule, fraction, every| {
            let bytes = settings(schedule, fraction, every).step_bytes().unwrap();
            (bytes.read_bytes() / elems, bytes.written_bytes / elems)
        };
        assert_eq!(of(Schedule::Deferred, 0.0, 1), (14.0, 12.0));
        assert_eq!(of(Schedule::Immediate, 0.0, 1), (16.0, 12.0));
        assert_eq!(of(Schedule::Deferred, 0.5, 4), (7.0, 6.0 + 1.5));
        assert_eq!(of(Schedule::Deferred, 0.5, 0), (7.0, 6.0));
        assert_eq!(of(Schedule::Deferred, 1.0, 1), (0.0, 12.0));
        let mut params_in_memory = settings(Schedule::Deferred, 0.0, 2);
        params_in_memory.param_fraction = 1.0;
        let bytes = params_in_memory.step_bytes().unwrap();
        assert_eq!(bytes.read_bytes() / elems, 10.0);
        assert_eq!(bytes.written_bytes / elems, 10.0 + 2.0 / 2.0);
        // Gradients not kept: 2 bytes written and 2 read, under either schedule.
        for schedule in [Schedule::Immediate, Schedule::Deferred] {
            let kept = settings(schedule, 0.0, 1);
            let mut spilled = kept.clone();
            spilled.grad_fraction = 0.0;
            let [kept, spilled] = [kept, spilled].map(|of| of.step_bytes().unwrap());
            assert_eq!((spilled.read_bytes() - kept.read_bytes()) / elems, 2.0);
            assert_eq!((spilled.written_bytes - kept.written_bytes) / elems, 2.0);
            assert_eq!(spilled.grad_written_bytes / elems, 2.0);
        }
        let mut memory = settings(Schedule::Immediate, 0.0, 1);
        memory.backing = Backing::Memory;
        assert_eq!(memory.step_bytes().unwrap(), StepBytes::default());
    }

    #[test]
    fn each_resource_can_be_the_wall() {
        let bytes = StepBytes {
            forward_read_bytes: 12.0,
            backward_read_bytes: 2.0,
            update_read_bytes: 0.0,
            written_bytes: 12.0,
            ..StepBytes::default()
        };
        let fast = StepRates {
            read_bytes_per_s: 1e9,
            write_bytes_per_s: 1e9,
            staging_bytes: 4.0,
            forward_s: 1.0,
            backward_s: 2.0,
            update_s: 0.5,
            bus_s: 0.0,
            network_s: 0.0,
        };
        let bound = |rates: StepRates| bound_s(Schedule::Deferred, &bytes, &rates);
        assert_eq!(bound(fast), 3.0);
        assert_eq!(
            bound(StepRates {
                update_s: 4.0,
                ..fast
            }),
            6.0
        );
        assert_eq!(bound(StepRates { bus_s: 9.0, ..fast }), 9.0);
        let network_s = 9.0;
        assert_eq!(bound(StepRates { network_s, ..fast }), 9.0);
        // 8 unstaged bytes at 2 bytes a second in forward, then backward.
        assert_eq!(
            bound(StepRates {
                write_bytes_per_s: 2.0,
                ..fast
            }),
            6.0
        );
        assert_eq!(
            bound(StepRates {
                write_bytes_per_s: 1.0,
                ..fast
            }),
            12.0
        );
        assert_eq!(
            bound(StepRates {
                read_bytes_per_s: 2.0,
                ..fast
            }),
            7.0
        );
        let none = StepBytes::default();
        let no_devices = StepRates {
            read_bytes_per_s: 0.0,
            write_bytes_per_s: 0.0,
            ..fast
        };
        assert_eq!(bound_s(Schedule::Immediate, &none, &no_devices), 3.5);
    }

    /// 1.345 G parameters, all state on drives; `tflops` counts 6 operations a parameter and token, 16k tokens.
    fn large(drives: f64, tflops: f64) -> (StepBytes, StepRates) {
        let params = 1.345e9;
        let bytes = StepBytes {
            forward_read_bytes: 12.0 * params,
            backward_read_bytes: 2.0 * params,
            update_read_bytes: 0.0,
            written_bytes: 12.0 * params,
            ..StepBytes::default()
        };
        let compute_s = 6.0 * params * 16384.0 / (tflops * 1e12);
        let rates = StepRates {
            read_bytes_per_s: drives * 6.2e9,
            write_bytes_per_s: drives * 3.2e9,
            staging_bytes: 0.0,
            forward_s: compute_s / 4.0,
            backward_s: compute_s * 3.0 / 4.0,
            update_s: params / 5.6e9,
            bus_s: 0.0,
            network_s: 0.0,
        };
        (bytes, rates)
    }

    #[test]
    fn the_wall_is_named_and_the_terms_are_in_order() {
        let (bytes, rates) = large(1.0, 305.0);
        let one = bound(Schedule::Deferred, &bytes, &rates);
        assert_eq!(one.wall, Wall::Writes);
        assert_eq!(one.terms[0].what, "backward + writes beyond staging");
        let staged = StepRates {
            staging_bytes: staging_needed_bytes(&bytes, &rates),
            ..rates
        };
        let one = bound(Schedule::Deferred, &bytes, &staged);
        assert_eq!((one.wall, one.terms[0].what), (Wall::Writes, "all writes"));
        assert!((one.s - bytes.written_bytes / 3.2e9).abs() < 1e-9);
        assert!(one.terms.is_sorted_by(|a, b| a.s >= b.s));
        // TFLOPS at the bound: 26 to 31 for one drive, 105 to 126 for four.
        let tflops = |s: f64| 6.0 * 1.345e9 * 16384.0 / s / 1e12;
        assert!((26.0..31.0).contains(&tflops(one.s)), "{}", tflops(one.s));
        let none = StepBytes::default();
        assert_eq!(
            bound(Schedule::Deferred, &none, &rates).wall,
            Wall::Update,
            "0.24 s of updates are longer than 0.11 s of forward"
        );
        let immediate = bound(Schedule::Immediate, &bytes, &rates);
        assert_eq!(immediate.wall, Wall::Writes);
        assert!(immediate.s > one.s);
    }

    #[test]
    fn less_staging_than_needed_makes_the_step_longer_and_more_does_not_make_it_shorter() {
        for (drives, tflops, scratch_bytes) in [
            (1.0, 305.0, 0.0),
            (1.0, 305.0, 20e9),
            (4.0, 305.0, 0.0),
            (4.0, 20.0, 0.0),
            (1.0, 5.0, 0.0),
        ] {
            let (mut bytes, rates) = large(drives, tflops);
            bytes.scratch_written_bytes = scratch_bytes;
            bytes.scratch_read_bytes = scratch_bytes;
            let needed = staging_needed_bytes(&bytes, &rates);
            let with = |staging_bytes| {
                let rates = StepRates {
                    staging_bytes,
                    ..rates
                };
                bound_s(Schedule::Deferred, &bytes, &rates)
            };
            assert!((with(needed) - with(1e15)).abs() < 1e-9);
            if needed > 0.0 {
                assert!(
                    with(0.9 * needed) > with(needed) + 1e-6,
                    "{drives} {tflops}"
                );
            }
        }
        // A step that computes longer than its drives move needs no staging.
        let (bytes, rates) = large(1.0, 1.0);
        assert_eq!(staging_needed_bytes(&bytes, &rates), 0.0);
    }

    #[test]
    fn what_is_not_read_because_it_stays_bounds_no_step() {
        let planned = StepBytes {
            forward_read_bytes: 100.0,
            backward_read_bytes: 40.0,
            update_read_bytes: 10.0,
            written_bytes: 90.0,
            ..StepBytes::default()
        };
        let read = |bytes, some_stay| {
            let of_step = planned.that_read(bytes, some_stay);
            [of_step.forward_read_bytes, of_step.backward_read_bytes]
        };
        assert_eq!(read(190.0, false), [100.0, 80.0]);
        assert_eq!(read(120.0, false), [100.0, 40.0]);
        assert_eq!(read(120.0, true), [100.0, 10.0]);
        assert_eq!(read(70.0, true), [60.0, 0.0]);
        assert_eq!(read(0.0, true), [0.0, 0.0]);
    }
}
