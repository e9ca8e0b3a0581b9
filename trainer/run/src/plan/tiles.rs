//! Converts settings to those of the swapper.

use kernels::adamw::UpdateRule;
use swapper::{Backing, Staging, StoreSettings, SwapperSettings, UnitShape};

use crate::config::{
    Durability, Fraction, GradientsChoice, OptimizerStep, ResidentFraction, RunSettings, Tier,
};
use crate::model::UnitLayout;
use training_state::plan::choose::STAGING_BYTES_ASSUMED;
use training_state::update::{TileFormats, tile_bytes};

/// Storage of each tile's numbers.
pub(super) fn formats(settings: &RunSettings, units: &[UnitLayout]) -> TileFormats {
    let format = settings.tile_format();
    if format.rule != UpdateRule::Muon {
        return format.into();
    }
    let rest = |unit: &UnitLayout| {
        let params = unit.params.iter();
        let rest = params.filter(|param| !param.member.is_block_matrix());
        let elems = rest.map(|param| param.range_elems());
        elems
            .map(|elems| elems.start as u64..elems.end as u64)
            .collect()
    };
    TileFormats::muon(format.master, format.moments, units.iter().map(rest))
}

/// Settings of the swapper that a plan starts from. Values still to be chosen are at their minimum.
pub(super) fn swapper_settings(
    settings: &RunSettings,
    units: &[UnitLayout],
    formats: &TileFormats,
) -> SwapperSettings {
    let is_muon = settings.optimizer.muon.is_some();
    let has_matrices = |unit: &UnitLayout| {
        unit.params
            .iter()
            .any(|param| param.member.is_block_matrix())
    };
    let shapes: Vec<UnitShape> = units
        .iter()
        .enumerate()
        .map(|(number, unit)| UnitShape {
            elems: unit.elems as u64,
            tile_bytes: tile_bytes(formats.usual(), formats.master().grad_bytes()),
            trained: true,
            other_state: formats.other_state(number),
            revised: is_muon && has_matrices(unit),
            external: false,
        })
        .collect();
    let offload = &settings.offload;
    let backing = if settings.placement.has_store() {
        Backing::Store(StoreSettings {
            socket: offload.socket.clone().unwrap_or_default(),
            job: String::new(),
            durability: match offload.durability {
                Durability::Full => swapper::Durability::Committed,
                Durability::None => swapper::Durability::None,
            },
            nodes: None,
        })
    } else {
        Backing::Memory
    };
    let fraction = match settings.placement.resident_fraction {
        ResidentFraction::Fixed(fraction) => fraction,
        // Chosen once the rest is known.
        ResidentFraction::Auto => Fraction::NONE,
    };
    let of = |tier: Tier| match tier {
        Tier::Nvme => fraction.get(),
        Tier::None | Tier::Cpu => Fraction::ALL.get(),
    };
    SwapperSettings {
        tile_elems: offload
            .tile_elems
            .unwrap_or_else(|| swapper::choose_tile_elems(&shapes)),
        units: shapes,
        param_fraction: of(settings.placement.param),
        state_fraction: of(settings.placement.optimizer),
        grad_fraction: match offload.gradients {
            GradientsChoice::Nvme => Fraction::NONE.get(),
            // Reduced later if not all of them fit.
            GradientsChoice::Auto | GradientsChoice::Cpu => Fraction::ALL.get(),
        },
        staging: Staging::Bytes(offload.staging_bytes.unwrap_or(STAGING_BYTES_ASSUMED)),
        schedule: match offload.optimizer_step {
            OptimizerStep::Immediate => swapper::Schedule::Immediate,
            OptimizerStep::Deferred => swapper::Schedule::Deferred,
        },
        commit_every: offload.commit_every.unwrap_or(1),
        scratch: swapper::ScratchSettings::default(),
        iodepth: offload.iodepth,
        backing,
        layout: Vec::new(),
        // The first rank owns the most.
        rank: 0,
        ranks: if settings.placement.stage.divides_state() {
            settings.ranks
        } else {
            // Each process holds all tiles.
            1
        },
        node_ranks: (settings.placement.stage.divides_state()
            && settings.local_ranks < settings.ranks)
            .then_some(0..settings.local_ranks),
    }
}
