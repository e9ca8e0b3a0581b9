//! What devices do wrong, at random, while jobs run: fail once, break for good, be full or gone, be slow, lie.

use std::collections::BTreeMap;

use crate::disks::{SimDisks, SimEngine, SimFault, SimFaultPlan};
use offload_api::fault::FaultKind;
use offload_api::ids::DeviceIndex;
use offloadd::blocks::Blocks;
use test_hooks::random::SimRandom;

/// The temper of the devices in one story.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// They do as they are told.
    None,
    /// Some operations fail and say so; some devices do nothing else any more.
    Failing,
    /// One write a life is lost or lands elsewhere, and they say that all is well. `left`: not yet.
    Silent { left: bool },
}

/// Operations between two troubles, about.
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

    /// Whether a device that says so can be why a call or an operation ended like this.
    pub(crate) fn explains(self, kind: FaultKind) -> bool {
        let device = matches!(
            kind,
            FaultKind::Io | FaultKind::NoSpace | FaultKind::Short | FaultKind::Poisoned
        );
        device && self == Self::Failing
    }

    /// Something may go wrong with the reads, writes and flushes of a start.
    pub(crate) fn before_start(self, disks: &mut SimDisks, random: &mut SimRandom) {
        if self == Self::Failing && random.one_in(4) {
            disks.plan = Some(SimFaultPlan {
                at: disks.operation_count() + random.below(40) as u64,
                for_good: random.one_in(2),
                fault: failing(random),
            });
        }
    }

    /// Something may go wrong with the next operation.
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

/// How often each thing went wrong, in words.
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
