//! How many bytes a step moves, and the shortest time it can take. One function for plans, benchmarks and reports.
//!
//! Bytes are counted from the tiles themselves, padding included. What stays in staging over a turning point (the end of
//! forward, the end of a step) is read once less; the bound leaves that out, so a run may come a little under it.

use crate::layout::{Kind, Layout};
use crate::settings::SwapperSettings;
use crate::{Schedule, SwapperError};

/// Bytes one step moves to and from devices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepBytes {
    /// Read in forward: for gathers, and for updates when they are deferred.
    pub forward_read_bytes: f64,
    /// Read in backward.
    pub backward_read_bytes: f64,
    /// Read after backward, for updates at once.
    pub update_read_bytes: f64,
    /// Written. What a commit writes of resident tiles is spread over the steps between commits.
    pub written_bytes: f64,
}

impl StepBytes {
    /// All that is read.
    pub fn read_bytes(&self) -> f64 {
        self.forward_read_bytes + self.backward_read_bytes + self.update_read_bytes
    }
}

/// What the bound of a step depends on besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRates {
    /// All devices together, bytes a second.
    pub read_bytes_per_s: f64,
    /// All devices together, bytes a second.
    pub write_bytes_per_s: f64,
    /// Staging slots, which carry unwritten tiles into backward and read-ahead out of it.
    pub staging_bytes: f64,
    /// Compute of the forward pass.
    pub forward_s: f64,
    /// Compute of the backward pass.
    pub backward_s: f64,
    /// The optimizer over all tiles.
    pub update_s: f64,
    /// What crosses the bus to an accelerator; 0 without one.
    pub bus_s: f64,
}

impl SwapperSettings {
    /// Bytes one step of training with these settings moves: two gathers, one scatter and one update of each unit.
    pub fn step_bytes(&self) -> Result<StepBytes, SwapperError> {
        let layout = self.cut()?;
        Ok(self.step_bytes_of(&layout))
    }

    pub(crate) fn step_bytes_of(&self, layout: &Layout) -> StepBytes {
        let residency = self.residency(layout);
        let sum = |kind: Kind, resident: bool| -> f64 {
            (0..layout.ranges().len() as u32)
                .filter(|&range| residency[kind as usize][range as usize] == resident)
                .map(|range| layout.moved_bytes(kind, range) as f64)
                .sum()
        };
        let [param, state] = Kind::ALL.map(|kind| sum(kind, false));
        let resident = sum(Kind::Param, true) + sum(Kind::State, true);
        let committed = match (&self.backing, self.commit_every) {
            (crate::Backing::Memory, _) | (_, 0) => 0.0,
            (_, every) => resident / every as f64,
        };
        let update = match self.schedule {
            Schedule::AtOnce => param + state,
            Schedule::Deferred => 0.0,
        };
        StepBytes {
            forward_read_bytes: match self.schedule {
                Schedule::AtOnce => param,
                Schedule::Deferred => param + state,
            },
            backward_read_bytes: param,
            update_read_bytes: update,
            written_bytes: param + state + committed,
        }
    }
}

/// The shortest time a step of `schedule` can take, in seconds.
///
/// Deferred, with W and R bytes at rates w and r and S bytes of staging:
/// `max(W/w, R/r, bus, t_bwd + max(t_fwd, t_update, (W-S)/w, (R_fwd-S)/r))`. At once, the three phases follow each other,
/// each as long as the longest of its compute, its reads and its writes.
pub fn bound_s(schedule: Schedule, bytes: &StepBytes, rates: &StepRates) -> f64 {
    let over = |bytes: f64, rate: f64| {
        if bytes <= 0.0 { 0.0 } else { bytes / rate }
    };
    let reading = |bytes: f64| over(bytes, rates.read_bytes_per_s);
    let writing = |bytes: f64| over(bytes, rates.write_bytes_per_s);
    let staged = |bytes: f64| bytes - rates.staging_bytes;
    let phases = match schedule {
        Schedule::Deferred => {
            rates.backward_s
                + rates
                    .forward_s
                    .max(rates.update_s)
                    .max(writing(staged(bytes.written_bytes)))
                    .max(reading(staged(bytes.forward_read_bytes)))
        }
        Schedule::AtOnce => {
            let ahead = |compute: f64, bytes: f64| compute.max(reading(staged(bytes)));
            ahead(rates.forward_s, bytes.forward_read_bytes)
                + ahead(rates.backward_s, bytes.backward_read_bytes)
                + ahead(rates.update_s, bytes.update_read_bytes).max(writing(bytes.written_bytes))
        }
    };
    writing(bytes.written_bytes)
        .max(reading(bytes.read_bytes()))
        .max(rates.bus_s)
        .max(phases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Staging, StoreSettings, TileBytes, UnitShape};

    fn settings(schedule: Schedule, share: f64, commit_every: u64) -> SwapperSettings {
        SwapperSettings {
            units: vec![UnitShape { elems: 1 << 20 }; 4],
            tile_bytes: TileBytes {
                param_bytes_per_elem: 2,
                grad_bytes_per_elem: 2,
                state_tile_bytes: |elems| elems * 10,
            },
            tile_elems: 1 << 18,
            param_share: share,
            state_share: share,
            staging: Staging::default(),
            schedule,
            commit_every,
            iodepth: 8,
            backing: Backing::Store(StoreSettings {
                socket: "none".into(),
                job: "none".into(),
                durability: offload_client::Durability::Committed,
            }),
            layout: Vec::new(),
            rank: 0,
            ranks: 1,
        }
    }

    #[test]
    fn bytes_a_parameter_are_those_of_the_design() {
        let elems = f64::from(4 << 20);
        let of = |schedule, share, every| {
            let bytes = settings(schedule, share, every).step_bytes().unwrap();
            (bytes.read_bytes() / elems, bytes.written_bytes / elems)
        };
        assert_eq!(of(Schedule::Deferred, 0.0, 1), (14.0, 12.0));
        assert_eq!(of(Schedule::AtOnce, 0.0, 1), (16.0, 12.0));
        assert_eq!(of(Schedule::Deferred, 0.5, 4), (7.0, 6.0 + 1.5));
        assert_eq!(of(Schedule::Deferred, 0.5, 0), (7.0, 6.0));
        assert_eq!(of(Schedule::Deferred, 1.0, 1), (0.0, 12.0));
        let mut params_at_home = settings(Schedule::Deferred, 0.0, 2);
        params_at_home.param_share = 1.0;
        let bytes = params_at_home.step_bytes().unwrap();
        assert_eq!(bytes.read_bytes() / elems, 10.0);
        assert_eq!(bytes.written_bytes / elems, 10.0 + 2.0 / 2.0);
        let mut memory = settings(Schedule::AtOnce, 0.0, 1);
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
        };
        let fast = StepRates {
            read_bytes_per_s: 1e9,
            write_bytes_per_s: 1e9,
            staging_bytes: 4.0,
            forward_s: 1.0,
            backward_s: 2.0,
            update_s: 0.5,
            bus_s: 0.0,
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
        // 8 unstaged bytes at 2 a second in forward, then backward.
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
        assert_eq!(bound_s(Schedule::AtOnce, &none, &no_devices), 3.5);
    }
}
