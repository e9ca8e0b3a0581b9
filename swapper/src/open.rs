//! Opening: allocates memory, opens or creates the job, and finds the generation to resume from. Refuses a job with
//! another layout.

use std::path::Path;

use offload_client::{
    BLOCK_BYTES, ClientError, Generation, IODEPTH_MIN, JobDefinition, JobRecord, MemoryArena, Rank,
    Session, SessionInfo, SessionSettings, SlotClass, Tile, TileKind,
};

use crate::SwapperError;
use crate::backing::Arena;
use crate::layout::{Kind, Layout};
use crate::nodes::{self, Nodes};
use crate::settings::{
    Backing, DeviceRates, MemoryPlan, OpenReport, StoreSettings, SwapperSettings,
};

/// Returns the slots, what was found, and with several nodes the number of this start.
pub(crate) fn open(
    settings: &SwapperSettings,
    layout: &Layout,
) -> Result<(Arena, OpenReport, Option<u64>), SwapperError> {
    let memory = settings.plan_of(layout)?;
    match &settings.backing {
        Backing::Memory => open_memory(settings, memory),
        Backing::Store(store) => open_store(settings, store, layout, memory),
    }
}

/// Reads the layout description stored with `job` in the store behind `socket`, and the number of its nodes; `None` if the
/// store has no such job. Changes nothing.
///
/// # Errors
/// Same as [`Session::open`]: no daemon listens, or another session has the job open.
pub fn job_layout(socket: &Path, job: &str) -> Result<Option<(Vec<u8>, u32)>, ClientError> {
    // The session moves no tile.
    let slot = SlotClass {
        slot_bytes: u64::from(BLOCK_BYTES),
        slot_count: 1,
    };
    let session = Session::open(SessionSettings {
        socket: socket.to_owned(),
        job: job.to_owned(),
        rank: Rank(0),
        local_ranks: 1,
        classes: vec![slot],
        iodepth: IODEPTH_MIN,
    })?;
    let job = session.info().job.as_ref();
    let layout = job.map(|job| (job.layout.clone(), job.nodes));
    session.close()?;
    Ok(layout)
}

fn open_memory(
    settings: &SwapperSettings,
    memory: MemoryPlan,
) -> Result<(Arena, OpenReport, Option<u64>), SwapperError> {
    let arena = MemoryArena::new(&memory.classes()).map_err(client(|| {
        format!("allocating {} bytes of host memory", memory.host_bytes())
    }))?;
    let opened = OpenReport {
        resumed: None,
        resumed_own: None,
        generation: 0,
        memory,
        arena: Some(arena.memory()),
        iodepth: settings.iodepth,
        engine: "memory".into(),
        devices: Vec::new(),
        notes: Vec::new(),
    };
    Ok((Arena::Memory(arena), opened, None))
}

fn open_store(
    settings: &SwapperSettings,
    store: &StoreSettings,
    layout: &Layout,
    memory: MemoryPlan,
) -> Result<(Arena, OpenReport, Option<u64>), SwapperError> {
    let mut session = Session::open(SessionSettings {
        socket: store.socket.clone(),
        job: store.job.clone(),
        rank: Rank(settings.rank),
        local_ranks: settings.local().len() as u32,
        classes: memory.classes(),
        iodepth: settings.session_iodepth(),
    })
    .map_err(client(|| format!("opening job {:?}", store.job)))?;

    let definition = JobDefinition {
        layout: settings.layout.clone(),
        tiles: tiles(layout),
        durability: store.durability,
        nodes: store.nodes.as_ref().map_or(1, Nodes::count),
    };
    let record = session.info().job.as_ref();
    let agreed = match &store.nodes {
        Some(nodes) => Some(nodes.agree(record)?),
        None => None,
    };
    match record {
        Some(record) => {
            if let Some(what) = difference(record, &definition) {
                return Err(SwapperError::LayoutChanged {
                    job: store.job.clone(),
                    what,
                });
            }
        }
        None => {
            session.define_tiles(definition).map_err(client(|| {
                format!(
                    "reserving space for {} tiles of job {:?}",
                    memory.table_count, store.job
                )
            }))?;
        }
    }
    let newest = || {
        let record = session.info().job.as_ref()?;
        Some(record.generations.last()?.generation)
    };
    let generation = match &agreed {
        Some(agreed) => agreed.generation,
        None => newest().unwrap_or(Generation(0)),
    };
    session.resume(generation).map_err(client(|| {
        format!("resuming generation {generation} of job {:?}", store.job)
    }))?;

    reserve_scratch(&mut session, settings, store, layout)?;
    let info = session.info();
    let given = |blob: Vec<u8>| match &store.nodes {
        Some(_) => nodes::split(&blob).map_or_else(Vec::new, |(_, given)| given.to_vec()),
        None => blob,
    };
    let opened = OpenReport {
        resumed: blob_of(info, generation, &store.job)?.map(given),
        resumed_own: own_blob_of(info, generation, Rank(settings.rank)).map(given),
        generation: generation.0,
        memory,
        arena: Some(session.memory()),
        iodepth: info.iodepth,
        engine: info.engine.clone(),
        devices: info
            .devices
            .iter()
            .map(|device| DeviceRates {
                path: device.path.display().to_string(),
                read_bytes_per_s: device.read_bytes_per_s,
                write_bytes_per_s: device.write_bytes_per_s,
            })
            .collect(),
        notes: [
            format!("engine {}: {}", info.engine, info.engine_reason),
            info.memory_note.clone(),
        ]
        .into_iter()
        .filter(|note| !note.is_empty())
        .collect(),
    };
    let needed = crate::IODEPTH_MIN + settings.scratch.slot_count.min(1);
    if opened.iodepth < needed {
        return Err(SwapperError::Settings {
            what: format!(
                "the daemon grants only {} operations in flight, but {} are needed: raise iodepth_max in its settings, or inflight_max of your quota",
                opened.iodepth, needed
            ),
        });
    }
    let start = agreed.map(|agreed| agreed.start);
    Ok((Arena::Session(Box::new(session)), opened, start))
}

/// Reserves scratch tiles: for the gradients that are not kept in host memory, and behind them the caller's own.
fn reserve_scratch(
    session: &mut Session,
    settings: &SwapperSettings,
    store: &StoreSettings,
    layout: &Layout,
) -> Result<(), SwapperError> {
    let residency = settings.residency(layout);
    let scratch: Vec<u32> = (0..layout.ranges().len() as u32)
        .filter(|&range| layout.has(Kind::Grad, range) && !residency[Kind::Grad][range as usize])
        .map(|range| layout.moved_bytes(Kind::Grad, range) as u32)
        .chain(std::iter::repeat_n(
            settings.scratch.tile_bytes,
            settings.scratch.tile_count as usize,
        ))
        .collect();
    if !scratch.is_empty() {
        let first = session.reserve_scratch(&scratch).map_err(client(|| {
            let own = match settings.scratch.bytes() {
                0 => String::new(),
                bytes => format!(" and {bytes} bytes of scratch tiles"),
            };
            format!(
                "reserving space for gradients{own} of job {:?} on devices",
                store.job
            )
        }))?;
        assert_eq!(
            first.0 as usize,
            layout.table().len(),
            "they follow the job's tiles"
        );
    }
    Ok(())
}

fn tiles(layout: &Layout) -> Vec<Tile> {
    layout
        .table()
        .iter()
        .map(|entry| Tile {
            unit: entry.unit,
            kind: match entry.kind {
                Kind::Param if !layout.trained(entry.unit as usize) => TileKind::Frozen,
                Kind::Param => TileKind::Param,
                Kind::State => TileKind::State,
                Kind::Grad => panic!("gradients are in no table"),
            },
            elem_offset: entry.elem_offset,
            tile_bytes: entry.tile_bytes,
        })
        .collect()
}

/// Returns the first rank's blob of `generation`; `None` if nothing was ever committed. All ranks resume from the same
/// blob, because the generation may have been written by another number of ranks.
fn blob_of(
    info: &SessionInfo,
    generation: Generation,
    job: &str,
) -> Result<Option<Vec<u8>>, SwapperError> {
    let generations = info.job.as_ref().map_or(&[][..], |job| &job.generations);
    let Some(record) = generations.iter().find(|g| g.generation == generation) else {
        return Ok(None);
    };
    match record.blobs.iter().min_by_key(|blob| blob.rank) {
        Some(blob) => Ok(Some(blob.blob.clone())),
        None => Err(SwapperError::LayoutChanged {
            job: job.into(),
            what: format!("generation {generation} has no blob of any rank"),
        }),
    }
}

fn own_blob_of(info: &SessionInfo, generation: Generation, rank: Rank) -> Option<Vec<u8>> {
    let record = info.job.as_ref()?;
    let record = record
        .generations
        .iter()
        .find(|g| g.generation == generation)?;
    let own = record.blobs.iter().find(|blob| blob.rank == rank);
    own.map(|blob| blob.blob.clone())
}

/// Describes how an existing job differs from the wanted one.
fn difference(record: &JobRecord, wanted: &JobDefinition) -> Option<String> {
    if record.layout != wanted.layout {
        return Some("its model or layout description is another one".into());
    }
    if record.durability != wanted.durability {
        return Some(format!(
            "its durability is {:?}, not {:?}",
            record.durability, wanted.durability
        ));
    }
    if record.nodes != wanted.nodes {
        return Some(format!(
            "it runs on {} nodes, not {}",
            record.nodes, wanted.nodes
        ));
    }
    if record.tiles != wanted.tiles {
        let first = record
            .tiles
            .iter()
            .zip(&wanted.tiles)
            .position(|(has, wants)| has != wants)
            .unwrap_or_else(|| record.tiles.len().min(wanted.tiles.len()));
        let count = match (record.tiles.len(), wanted.tiles.len()) {
            (has, wants) if has == wants => String::new(),
            (has, wants) => format!("it has {has} tiles instead of {wants}; "),
        };
        return Some(format!(
            "{count}tile {first} is the first that differs: tile_elems, the precision or the ranks of each node changed"
        ));
    }
    None
}

fn client(
    doing: impl FnOnce() -> String,
) -> impl FnOnce(offload_client::ClientError) -> SwapperError {
    move |source| SwapperError::Client {
        doing: doing(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Durability;

    #[test]
    fn each_difference_is_told() {
        let tile = |tile_bytes| Tile {
            unit: 0,
            kind: TileKind::Param,
            elem_offset: 0,
            tile_bytes,
        };
        let wanted = JobDefinition {
            layout: b"a".to_vec(),
            tiles: vec![tile(4096), tile(8192)],
            durability: Durability::Committed,
            nodes: 1,
        };
        let same = JobRecord {
            layout: wanted.layout.clone(),
            tiles: wanted.tiles.clone(),
            durability: wanted.durability,
            nodes: wanted.nodes,
            generations: Vec::new(),
            clean: true,
        };
        assert_eq!(difference(&same, &wanted), None);
        let told = |change: fn(&mut JobRecord), words: &str| {
            let mut other = same.clone();
            change(&mut other);
            let what = difference(&other, &wanted).unwrap();
            assert!(what.contains(words), "{what}");
            assert_eq!(what.contains(" instead of "), other.tiles.len() != 2);
        };
        told(|r| r.layout.push(0), "layout");
        told(|r| r.durability = Durability::None, "durability");
        told(|r| r.nodes = 2, "2 nodes");
        told(|r| r.tiles[1].tile_bytes = 4096, "tile 1 is");
        told(|r| r.tiles.truncate(1), "1 tiles instead of 2; tile 1");
    }
}
