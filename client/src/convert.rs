//! Converts between this crate's types and the messages. Everything a daemon sends is checked here, once.

use offload_api::ids::{Generation, Rank};
use offload_api::proto;

use crate::types::{
    DeviceInfo, Durability, GenerationRecord, JobDefinition, JobRecord, RankBlob, Tile, TileKind,
};
use crate::{ClientError, SlotClass};

pub(crate) fn class(class: &SlotClass) -> proto::SlotClass {
    proto::SlotClass {
        slot_bytes: class.slot_bytes,
        slot_count: class.slot_count,
    }
}

pub(crate) fn device(device: proto::Device) -> DeviceInfo {
    DeviceInfo {
        left: device.phase() == proto::DevicePhase::Left,
        path: device.path.into(),
        block_bytes: device.block_bytes,
        data_bytes: device.data_bytes,
        free_bytes: device.free_bytes,
        read_bytes_per_s: device.read_bytes_per_s,
        write_bytes_per_s: device.write_bytes_per_s,
    }
}

pub(crate) fn definition(token: Vec<u8>, definition: &JobDefinition) -> proto::DefineTilesRequest {
    let tiles = definition.tiles.iter().map(|tile| {
        let kind = match tile.kind {
            TileKind::Param => proto::TileKind::Param,
            TileKind::State => proto::TileKind::State,
            TileKind::Grad => proto::TileKind::Grad,
        };
        proto::Tile {
            unit: tile.unit,
            kind: kind.into(),
            elem_offset: tile.elem_offset,
            tile_bytes: tile.tile_bytes,
        }
    });
    let durability = match definition.durability {
        Durability::Committed => proto::Durability::Committed,
        Durability::None => proto::Durability::None,
    };
    proto::DefineTilesRequest {
        token,
        layout: definition.layout.clone(),
        tiles: tiles.collect(),
        durability: durability.into(),
        nodes: definition.nodes,
    }
}

pub(crate) fn job(record: proto::JobRecord) -> Result<JobRecord, ClientError> {
    let durability = match record.durability() {
        proto::Durability::Committed => Durability::Committed,
        proto::Durability::None => Durability::None,
        proto::Durability::Unspecified => return Err(odd("durability", record.durability)),
    };
    let tiles: Result<_, _> = record.tiles.iter().map(tile).collect();
    let generations = record.generations.into_iter().map(|g| GenerationRecord {
        generation: Generation(g.generation),
        confirmed: g.confirmed,
        blobs: g
            .blobs
            .into_iter()
            .map(|b| RankBlob {
                rank: Rank(b.rank),
                blob: b.blob,
            })
            .collect(),
    });
    Ok(JobRecord {
        layout: record.layout,
        tiles: tiles?,
        durability,
        nodes: record.nodes,
        generations: generations.collect(),
        clean: record.clean,
    })
}

fn tile(tile: &proto::Tile) -> Result<Tile, ClientError> {
    let kind = match tile.kind() {
        proto::TileKind::Param => TileKind::Param,
        proto::TileKind::State => TileKind::State,
        proto::TileKind::Grad => TileKind::Grad,
        proto::TileKind::Unspecified => return Err(odd("tile kind", tile.kind)),
    };
    Ok(Tile {
        unit: tile.unit,
        kind,
        elem_offset: tile.elem_offset,
        tile_bytes: tile.tile_bytes,
    })
}

fn odd(what: &str, number: i32) -> ClientError {
    ClientError::protocol(format!("{what} {number} is unknown to this program"))
}
