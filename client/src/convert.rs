//! Converts between this crate's types and the messages. Everything that a daemon sends is checked here, once.

use offload_api::fault::Fault;
use offload_api::ids::{DeviceNumber, Generation, Rank};
use offload_api::proto;
use offload_api::tile::{Durability, Tile};

use crate::ClientError;
use crate::types::{DeviceInfo, GenerationRecord, JobDefinition, JobRecord, RankBlob};

pub(crate) fn device(device: proto::Device) -> DeviceInfo {
    DeviceInfo {
        number: DeviceNumber(device.number),
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
    proto::DefineTilesRequest {
        token,
        layout: definition.layout.clone(),
        tiles: definition.tiles.iter().map(proto::Tile::from).collect(),
        durability: definition.durability as i32,
        nodes: definition.nodes,
    }
}

pub(crate) fn job(record: proto::JobRecord) -> Result<JobRecord, ClientError> {
    let odd = |fault: Fault| ClientError::protocol(fault.message);
    let durability = Durability::check(record.durability).map_err(odd)?;
    let tiles: Result<_, _> = record.tiles.iter().map(Tile::try_from).collect();
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
        tiles: tiles.map_err(odd)?,
        durability,
        nodes: record.nodes,
        generations: generations.collect(),
        clean: record.clean,
    })
}
