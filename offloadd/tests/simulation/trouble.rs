//! Random faults of devices while jobs run: they fail once, break permanently, are full or gone, are slow, or lose and misdirect writes silently.

use std::collections::BTreeMap;

use crate::disks::{SimDisks, SimEngine, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offload_api::ids::DeviceIndex;
use offloadd::blocks::Blocks;
use test_hooks::random::SimRandom;

/// Kind of faults in one scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// No faults.
    None,
    /// Some operations fail and report it; some devices fail from then on.
    Failing,
    /// One write per incarnation is lost or misdirected and reported as done. `left`: not yet.
    Silent { left: bool },
}

/// Average number of operations between two faults.
const ONE_IN: usize = 60;

impl Trouble {
    pub(crate) fn random(random: &mut SimRandom) -> Self {
        match random.below(4) {
            0 | 1 => Self::None,
            2 => Self::Failing,
            _ => Self::Silent { left: true },
        }
    }

    pub(crate) fn is_silent(self) -> bool {
        matches!(self, Self::Silent { .. })
    }

    /// Whether a reported device error can be the reason why a call or an operation ended with this kind.
    pub(crate) fn explains(self, kind: FaultKind) -> bool {
        let device = matches!(
            kind,
            FaultKind::Io | FaultKind::NoSpace | FaultKind::Short | FaultKind::Poisoned
        );
        device && self == Self::Failing
    }

    /// Plans a fault of the reads, writes and flushes of a start.
    pub(crate) fn before_start(self, disks: &mut SimDisks, random: &mut SimRandom) {
        if self == Self::Failing && random.one_in(4) {
            disks.plan = Some(SimFaultPlan {
                at: disks.operation_count() + random.below(40) as u64,
                for_good: random.one_in(2),
                fault: failing(random),
            });
        }
    }

    /// Plans a fault of the next operation.
    pub(crate) fn before_operation(&mut self, engine: &mut SimEngine, random: &mut SimRandom) {
        if *self == Self::None {
            return;
        }
        let devices = engine.disks.count();
        if random.one_in(ONE_IN) {
            let slow = DeviceIndex(random.below(devices) as u32);
            engine.slow = (!random.one_in(2)).then_some(slow);
        }
        if !random.one_in(ONE_IN) {
            return;
        }
        let fault = match self {
            Self::None | Self::Silent { left: false } => return,
            Self::Failing => failing(random),
            Self::Silent { left } => {
                *left = false;
                let blocks = 1 + random.below(255) as u64;
                match random.one_in(2) {
                    true => SimFault::Lost,
                    false => SimFault::Misdirected(4096 * blocks),
                }
            }
        };
        let position = random.below(devices);
        if *self == Self::Failing && random.one_in(8) {
            engine.disks.break_for_good(position, fault);
            return;
        }
        engine.disks.plan = Some(SimFaultPlan {
            at: engine.disks.operation_count(),
            for_good: false,
            fault,
        });
    }
}

/// Returns how often each fault happened, by name.
pub(crate) fn told(happened: &BTreeMap<SimFault, u64>) -> BTreeMap<String, u64> {
    let mut told = BTreeMap::new();
    for (fault, count) in happened {
        let name = match fault {
            SimFault::Errno(errno) => std::io::Error::from_raw_os_error(*errno).to_string(),
            SimFault::Misdirected(_) => "Misdirected".into(),
            other => format!("{other:?}"),
        };
        *told.entry(name).or_default() += count;
    }
    told
}

fn failing(random: &mut SimRandom) -> SimFault {
    let faults = [
        SimFault::Errno(libc::EIO),
        SimFault::Errno(libc::ETIMEDOUT),
        SimFault::Errno(libc::ENOSPC),
        SimFault::Short,
        SimFault::FlushLost,
        SimFault::Full,
        SimFault::Gone,
    ];
    faults[random.below(faults.len())]
}
