//! A job's record as a stream of small messages, made one at a time: a record may exceed 50 MB, and a process that does not read it must
//! not make the daemon hold copies.

use offload_api::proto;

use crate::core::JobRecord;

/// Bytes of the layout per message.
const LAYOUT_BYTES: usize = 32 << 10;

/// Tiles per message, of about 20 bytes each.
const TILES: usize = 1024;

/// Makes the messages, which [`proto::JobRecord::append`] joins again. A blob is never split.
pub(super) fn parts(record: JobRecord) -> impl Iterator<Item = proto::JobRecord> {
    let JobRecord {
        definition,
        generations,
        clean,
    } = record;
    let first = proto::JobRecord {
        durability: definition.durability() as i32,
        nodes: definition.nodes(),
        clean,
        ..Default::default()
    };
    let (base, of_layout) = (first.clone(), definition.clone());
    let layout = (0..definition.layout().len())
        .step_by(LAYOUT_BYTES)
        .map(move |from| {
            let rest = &of_layout.layout()[from..];
            proto::JobRecord {
                layout: rest[..rest.len().min(LAYOUT_BYTES)].to_vec(),
                ..base.clone()
            }
        });
    let base = first.clone();
    let tiles = (0..definition.tiles().len())
        .step_by(TILES)
        .map(move |from| {
            let tiles = definition.tiles()[from..].iter().take(TILES);
            let tiles = tiles.map(proto::Tile::from);
            proto::JobRecord {
                tiles: tiles.collect(),
                ..base.clone()
            }
        });
    let base = first.clone();
    let generations = generations.into_iter().flat_map(move |generation| {
        let base = base.clone();
        let part = move |blobs| proto::JobRecord {
            generations: vec![proto::GenerationRecord {
                generation: generation.generation.0,
                confirmed: generation.confirmed,
                blobs,
            }],
            ..base.clone()
        };
        let blobs = generation.blobs;
        let first = part(Vec::new());
        let with_blobs = (0..blobs.len()).map(move |at| {
            let (rank, blob) = &blobs[at];
            part(vec![proto::RankBlob {
                rank: rank.0,
                blob: blob.clone(),
            }])
        });
        std::iter::once(first).chain(with_blobs)
    });
    (std::iter::once(first).chain(layout))
        .chain(tiles)
        .chain(generations)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use offload_api::ids::{Generation, Rank};
    use prost::Message;

    use super::*;
    use crate::core::GenerationRecord;
    use crate::store::definition::{Durability, JobDefinition, Tile, TileKind};

    #[test]
    fn small_parts_put_together_are_the_record() {
        let tile = |unit| Tile {
            unit,
            kind: TileKind::State,
            elem_offset: 7,
            tile_bytes: 4096,
        };
        let tiles: Vec<_> = (0..3 * TILES as u32 + 5).map(tile).collect();
        let layout: Vec<_> = (0..2 * LAYOUT_BYTES + 9).map(|n| n as u8).collect();
        let definition =
            JobDefinition::new(layout.clone(), tiles.clone(), Durability::Committed, 2).unwrap();
        let blobs: Vec<_> = (0..9).map(|n| (Rank(n), vec![n as u8; 60_000])).collect();
        let generation = |generation| GenerationRecord {
            generation: Generation(generation),
            confirmed: generation == 4,
            blobs: Arc::new(blobs.clone()),
        };
        let record = JobRecord {
            definition: Arc::new(definition),
            generations: vec![generation(4), generation(5)],
            clean: true,
        };
        let mut whole = proto::JobRecord::default();
        for (nth, part) in parts(record).enumerate() {
            assert!(part.encoded_len() <= 70_000, "{}", part.encoded_len());
            match nth {
                0 => whole = part,
                _ => whole.append(part),
            }
        }
        assert_eq!((whole.layout, whole.nodes, whole.clean), (layout, 2, true));
        let units: Vec<_> = whole.tiles.iter().map(|tile| tile.unit).collect();
        assert_eq!(units, (0..tiles.len() as u32).collect::<Vec<_>>());
        let found: Vec<_> = (whole.generations.iter())
            .map(|g| (g.generation, g.confirmed))
            .collect();
        assert_eq!(found, [(4, true), (5, false)]);
        for generation in whole.generations {
            let found: Vec<_> = (generation.blobs.into_iter())
                .map(|b| (Rank(b.rank), b.blob))
                .collect();
            assert!(found == blobs);
        }
    }
}
