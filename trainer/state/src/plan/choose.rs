//! Chooses staging, commit interval and resident tiles of a run, as functions of bytes and rates.

use std::ops::RangeInclusive;

use swapper::{Schedule, StepBytes, StepRates, bound_s, staging_needed_bytes};

/// Smallest staging if a rate is assumed: it keeps one drive of 6.2 and 3.2 GB/s busy while 1.3 G parameters
/// are trained on a fast GPU.
pub const STAGING_BYTES_ASSUMED: u64 = 1_400_000_000;

/// Fraction of free host memory that choices leave unused, for the page cache, other programs and uncounted
/// needs.
const HOST_MARGIN_SHARE: f64 = 0.1;

/// Least and most staging of a script.
const SCRIPT_STAGING_BYTES: RangeInclusive<u64> = 64 << 20..=4 << 30;

/// Largest fraction of a step that commits of resident tiles may add.
const COMMIT_SHARE_MAX: f64 = 0.05;

/// Slots in use for an update or a hand-over while others are in flight.
const WORKING_SLOTS: u64 = 2;

/// Tiles of one kind that may be on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    pub count: u64,
    pub slot_bytes: u64,
}

impl Tiles {
    fn bytes(self) -> u64 {
        self.count * self.slot_bytes
    }
}

/// Returns the staging of a deferred step: what the bound needs, and the tiles in flight and in use. Staging
/// grows in units of `round_bytes`: two slots for parameters and one for state.
pub fn staging_bytes(bytes: &StepBytes, rates: &StepRates, iodepth: u32, round_bytes: u64) -> u64 {
    let in_flight = (u64::from(iodepth) / 2 + WORKING_SLOTS) * round_bytes;
    staging_needed_bytes(bytes, rates) as u64 + in_flight
}

/// Returns the staging of a script's rank with `state_bytes` of parameters, moments and gradients: an eighth keeps one drive busy. How long the
/// script computes, from which [`staging_bytes`] follows, is unknown before it runs. Small models get what they need anyway.
pub fn script_staging_bytes(state_bytes: u64) -> u64 {
    (state_bytes / 8).clamp(*SCRIPT_STAGING_BYTES.start(), *SCRIPT_STAGING_BYTES.end())
}

/// Returns whether `grad_bytes` of a script's rank stay in host memory: if they take at most half of the rank's part of what is available.
/// The other half is for the tensors that the script makes, which no plan knows.
pub fn script_gradients_stay(
    grad_bytes: u64,
    available_bytes: Option<u64>,
    local_ranks: u64,
) -> bool {
    available_bytes.is_some_and(|bytes| grad_bytes <= bytes / local_ranks / 2)
}

/// Returns the part of `bytes` of free host memory that choices may use.
pub fn without_host_margin(bytes: u64) -> u64 {
    (bytes as f64 * (1.0 - HOST_MARGIN_SHARE)) as u64
}

/// Returns the number of steps between commits: 1 if no tile is resident, otherwise the fewest for which
/// commits add less than a twentieth to a step. `bytes` are those of a step without a commit.
pub fn commit_every(
    schedule: Schedule,
    bytes: &StepBytes,
    resident_bytes: u64,
    rates: &StepRates,
) -> u64 {
    if resident_bytes == 0 {
        return 1;
    }
    let step_s = bound_s(schedule, bytes, rates);
    let commit_s = resident_bytes as f64 / rates.write_bytes_per_s;
    ((commit_s / (COMMIT_SHARE_MAX * step_s)).ceil() as u64).max(1)
}

/// Returns how many tiles of each kind stay in host memory if `left_bytes` are available for them and for
/// staging. Parameters take precedence: they are read twice in a step, state once. If all tiles stay, no
/// staging is needed.
pub fn resident_counts(
    [param, state]: [Tiles; 2],
    left_bytes: u64,
    staging_bytes: u64,
) -> [u64; 2] {
    if param.bytes() + state.bytes() <= left_bytes {
        return [param.count, state.count];
    }
    let left_bytes = left_bytes.saturating_sub(staging_bytes);
    let of = |tiles: Tiles, left: u64| {
        let fits = left.checked_div(tiles.slot_bytes).unwrap_or(0);
        tiles.count.min(fits)
    };
    let params = of(param, left_bytes);
    let states = of(state, left_bytes - params * param.slot_bytes);
    [params, states]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: f64 = 1.345e9;
    const TILE_ELEMS: u64 = 1 << 20;
    const ROUND_BYTES: u64 = (2 + 2 + 10) * TILE_ELEMS;

    /// Bytes of a step of 1.345 G parameters, for each of which the drives hold `param` and `state` bytes.
    fn bytes(param: f64, state: f64) -> StepBytes {
        StepBytes {
            forward_read_bytes: (param + state) * PARAMS,
            backward_read_bytes: param * PARAMS,
            update_read_bytes: 0.0,
            written_bytes: (param + state) * PARAMS,
            ..StepBytes::default()
        }
    }

    /// 16k tokens at 305 TFLOPS, the best possible on an H200 with the update on its processor.
    fn rates(drives: f64) -> StepRates {
        let compute_s = 6.0 * PARAMS * 16384.0 / 305e12;
        StepRates {
            read_bytes_per_s: drives * 6.2e9,
            write_bytes_per_s: drives * 3.2e9,
            staging_bytes: 0.0,
            forward_s: compute_s / 4.0,
            backward_s: compute_s * 3.0 / 4.0,
            update_s: PARAMS / 5.6e9,
            bus_s: 0.0,
            network_s: 0.0,
        }
    }

    #[test]
    fn staging_keeps_one_drive_busy_with_1_4_gb_and_four_with_5() {
        let of = |drives| {
            let all = bytes(2.0, 10.0);
            staging_bytes(&all, &rates(drives), 32, ROUND_BYTES) as f64 / 1e9
        };
        assert!((1.2..1.5).contains(&of(1.0)), "{} GB", of(1.0));
        assert!((4.2..5.2).contains(&of(4.0)), "{} GB", of(4.0));
        let chosen = StepRates {
            staging_bytes: of(4.0) * 1e9,
            ..rates(4.0)
        };
        let all = bytes(2.0, 10.0);
        let endless = StepRates {
            staging_bytes: 1e12,
            ..rates(4.0)
        };
        let bound = |rates| bound_s(Schedule::Deferred, &all, rates);
        assert_eq!(
            bound(&chosen),
            bound(&endless),
            "more staging would not help"
        );
    }

    #[test]
    fn a_script_stages_an_eighth_of_its_state_within_limits() {
        for (state_bytes, staged_bytes) in [
            (0, 64 << 20),
            (512 << 20, 64 << 20),
            (8 << 30, 1 << 30),
            (1 << 40, 4 << 30),
        ] {
            assert_eq!(script_staging_bytes(state_bytes), staged_bytes);
        }
    }

    #[test]
    fn gradients_of_a_script_stay_if_they_take_half_of_the_ranks_memory() {
        assert!(script_gradients_stay(25, Some(100), 2));
        assert!(!script_gradients_stay(26, Some(100), 2));
        assert!(!script_gradients_stay(0, None, 1));
    }

    #[test]
    fn a_commit_without_extra_writes_is_made_in_every_step() {
        let all = bytes(2.0, 10.0);
        assert_eq!(commit_every(Schedule::Deferred, &all, 0, &rates(1.0)), 1);
    }

    #[test]
    fn commits_of_resident_tiles_cost_less_than_a_twentieth_at_the_shortest_interval() {
        // 16-bit parameters in host memory, everything in host memory, half of everything.
        for (staged, resident) in [
            (bytes(0.0, 10.0), 2.0),
            (bytes(0.0, 0.0), 12.0),
            (bytes(1.0, 5.0), 6.0),
        ] {
            let resident_bytes = (resident * PARAMS) as u64;
            for drives in [1.0, 4.0] {
                let rates = rates(drives);
                let n = commit_every(Schedule::Deferred, &staged, resident_bytes, &rates);
                let step_s = bound_s(Schedule::Deferred, &staged, &rates);
                let share =
                    |n: u64| resident_bytes as f64 / n as f64 / rates.write_bytes_per_s / step_s;
                assert!(share(n) <= 0.05, "{n} steps: {}", share(n));
                assert!(n == 1 || share(n - 1) > 0.05, "{n} steps");
            }
        }
        // Computed by hand: a commit writes 2 B in addition to the 10 B of a step that only writes: a fifth
        // of the step, so every 4 steps.
        let params_in_memory = commit_every(
            Schedule::Deferred,
            &bytes(0.0, 10.0),
            (2.0 * PARAMS) as u64,
            &rates(1.0),
        );
        assert_eq!(params_in_memory, 4);
    }

    #[test]
    fn parameters_take_precedence_in_host_memory() {
        let param = Tiles {
            count: 100,
            slot_bytes: 2,
        };
        let state = Tiles {
            count: 100,
            slot_bytes: 10,
        };
        let counts = |left| resident_counts([param, state], left, 50);
        assert_eq!(counts(40), [0, 0]);
        assert_eq!(counts(50 + 120), [60, 0]);
        assert_eq!(counts(50 + 200 + 305), [100, 30]);
        // Nothing is staged here, so no memory is reserved for staging.
        assert_eq!(counts(1200), [100, 100]);
        assert_eq!(counts(1199), [100, 94]);
        // A kind that never goes to devices has no tiles here.
        assert_eq!(
            resident_counts([Tiles::default(), state], 1000 + 49, 50),
            [0, 100]
        );
    }
}
