//! Conversions of a store's contents and damage to messages; also used by commands that read the store themselves.

use offload_api::proto;

use crate::store::content::{GenerationContent, JobContent, step_of};
use crate::store::definition::TileKind;
use crate::store::verify::{Damage, DamagedTile, UndecidedJob};

impl From<&JobContent> for proto::JobContent {
    fn from(job: &JobContent) -> Self {
        let definition = &job.definition;
        let kinds = [
            TileKind::Param,
            TileKind::State,
            TileKind::Grad,
            TileKind::Frozen,
        ];
        let kinds = kinds.map(|kind| {
            let tiles = definition.tiles().iter().filter(|tile| tile.kind == kind);
            let (count, bytes) = tiles.fold((0, 0), |(count, bytes), tile| {
                (count + 1, bytes + u64::from(tile.tile_bytes))
            });
            proto::KindContent {
                kind: kind as i32,
                tile_count: count,
                bytes,
            }
        });
        Self {
            uid: job.uid,
            job: job.name.as_str().into(),
            job_id: job.job_id,
            reserved_bytes: job.reserved_bytes,
            durability: definition.durability() as i32,
            nodes: definition.nodes(),
            kinds: kinds
                .into_iter()
                .filter(|kind| kind.tile_count > 0)
                .collect(),
            generations: job
                .generations
                .iter()
                .map(|one| generation(job, one))
                .collect(),
            unreadable: job.unreadable.clone(),
            pids: job.pids.clone(),
        }
    }
}

fn generation(job: &JobContent, one: &GenerationContent) -> proto::GenerationContent {
    let written = (job.definition.tiles().iter().zip(&*one.versions))
        .filter_map(|(spec, version)| Some((u64::from(spec.tile_bytes), version.as_ref()?)));
    let (mut tile_count, mut bytes, mut new_bytes) = (0, 0, 0);
    for (tile_bytes, version) in written {
        tile_count += 1;
        bytes += tile_bytes;
        if version.generation == one.generation {
            new_bytes += tile_bytes;
        }
    }
    proto::GenerationContent {
        generation: one.generation.0,
        confirmed: one.confirmed,
        overwriting: one.overwriting,
        tile_count,
        bytes,
        new_bytes,
        ranks: (one.blobs.iter())
            .map(|(rank, blob)| proto::RankContent {
                rank: rank.0,
                blob_bytes: blob.len() as u64,
                step: step_of(blob),
            })
            .collect(),
    }
}

impl From<&UndecidedJob> for proto::UndecidedJob {
    fn from(job: &UndecidedJob) -> Self {
        Self {
            uid: job.uid,
            job: job.job.as_str().into(),
            generation: job.generation.0,
            differing_count: job.differing_count,
        }
    }
}

impl From<&DamagedTile> for proto::DamagedTile {
    fn from(tile: &DamagedTile) -> Self {
        let (expected, found, unreadable) = match &tile.damage {
            Damage::Checksum { expected, found } => (*expected, *found, String::new()),
            Damage::Unreadable(why) => (0, 0, why.clone()),
        };
        Self {
            device: tile.path.clone(),
            offset: tile.offset,
            uid: tile.uid,
            job: tile.job.as_str().into(),
            index: tile.tile.0,
            tile: Some(proto::Tile::from(&tile.spec)),
            generation: tile.generation.0,
            written_by: tile.written_by.0,
            expected,
            found,
            unreadable,
        }
    }
}
