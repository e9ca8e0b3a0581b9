//! `offloadd inspect`: what a store holds, from the daemon that has it or from its devices.

use std::fmt::Write;

use anyhow::Result;
use offload_api::proto;
use offload_support::units::ApproxBytes;
use offloadd::core::{DeviceState, DeviceStatus};
use offloadd::device::DeviceBlocks;
use offloadd::store::content::JobContent;
use offloadd::store::recover;
use serde_json::{Value, json};

use super::connection::{refusal, runtime};
use super::open_all;
use super::store_access::{At, Holder, holder};

pub(crate) fn run(at: &At, as_json: bool) -> Result<()> {
    let content = runtime()?.block_on(async {
        match holder(at).await? {
            Holder::Daemon(socket, mut client) => {
                let answer = client.inspect(proto::InspectRequest {}).await;
                Ok(answer
                    .map_err(|status| refusal(&socket, &status))?
                    .into_inner())
            }
            Holder::Nobody(config) => read(&open_all(&config)?),
        }
    })?;
    let text = match as_json {
        true => format!("{}\n", to_json(&content)),
        false => draw(&content),
    };
    super::print(&text)
}

/// From the devices of a store that nobody else has.
pub(super) fn read(devices: &[offloadd::device::Device]) -> Result<proto::InspectReply> {
    let store = recover::read(&mut DeviceBlocks(devices))?;
    for note in &store.notes {
        eprintln!("DAMAGED {note}");
    }
    let device = |(index, device): (usize, &recover::RecoveredDevice)| {
        let state = DeviceState {
            path: device.path.clone(),
            block_bytes: offload_api::BLOCK_BYTES,
            data_bytes: device.superblock.data_bytes,
            free_bytes: store
                .space
                .free_bytes(offload_api::ids::DeviceIndex(index as u32)),
            read_bytes_per_s: device.superblock.read_bytes_per_s,
            write_bytes_per_s: device.superblock.write_bytes_per_s,
            status: DeviceStatus {
                phase: device.phase,
                ..DeviceStatus::settled(device.superblock.number)
            },
        };
        proto::Device::from(state)
    };
    let jobs = store
        .jobs
        .iter()
        .map(|job| proto::JobContent::from(&JobContent::from(job)));
    Ok(proto::InspectReply {
        devices: store.devices.iter().enumerate().map(device).collect(),
        jobs: jobs.collect(),
    })
}

/// The one step all ranks say, or the least and the most.
fn steps(ranks: &[proto::RankContent]) -> String {
    let steps = || ranks.iter().filter_map(|rank| rank.step);
    match (steps().min(), steps().max()) {
        (Some(least), Some(most)) if least == most => least.to_string(),
        (Some(least), Some(most)) => format!("{least}-{most}"),
        _ => "-".into(),
    }
}

fn state(generation: &proto::GenerationContent) -> &'static str {
    match (generation.overwriting, generation.confirmed) {
        (true, _) => "written over",
        (false, true) => "confirmed",
        (false, false) => "prepared",
    }
}

pub(super) fn kind_name(kind: i32) -> &'static str {
    match proto::TileKind::try_from(kind) {
        Ok(proto::TileKind::Param) => "param",
        Ok(proto::TileKind::State) => "state",
        Ok(proto::TileKind::Grad) => "grad",
        _ => "unknown",
    }
}

fn durability_name(durability: i32) -> &'static str {
    match proto::Durability::try_from(durability) {
        Ok(proto::Durability::Committed) => "committed",
        Ok(proto::Durability::None) => "none",
        _ => "unknown",
    }
}

fn draw(content: &proto::InspectReply) -> String {
    let mut text = String::new();
    for device in &content.devices {
        let _ = writeln!(
            text,
            "{}: {} of {} free",
            device.path,
            ApproxBytes(device.free_bytes),
            ApproxBytes(device.data_bytes)
        );
    }
    for job in &content.jobs {
        let kinds: Vec<_> = (job.kinds.iter())
            .map(|kind| {
                format!(
                    "{} {} in {} tiles",
                    ApproxBytes(kind.bytes),
                    kind_name(kind.kind),
                    kind.tile_count
                )
            })
            .collect();
        let _ = writeln!(
            text,
            "\n{} (uid {}): {}; {} reserved, durability {}, {} node{}",
            job.job,
            job.uid,
            kinds.join(", "),
            ApproxBytes(job.reserved_bytes),
            durability_name(job.durability),
            job.nodes,
            if job.nodes == 1 { "" } else { "s" }
        );
        for record in &job.unreadable {
            let _ = writeln!(
                text,
                "  DAMAGED {record}; it may be the newest: start offloadd again if the device gives it now, or `offloadd give-up {}`",
                job.job
            );
        }
        if job.generations.is_empty() && job.unreadable.is_empty() {
            let _ = writeln!(text, "  nothing committed");
        }
        for generation in &job.generations {
            let _ = writeln!(
                text,
                "  generation {}, {}: step {} of {} ranks; {} in {} tiles, {} of them new",
                generation.generation,
                state(generation),
                steps(&generation.ranks),
                generation.ranks.len(),
                ApproxBytes(generation.bytes),
                generation.tile_count,
                ApproxBytes(generation.new_bytes)
            );
        }
    }
    let _ = writeln!(text, "{} jobs", content.jobs.len());
    text
}

fn to_json(content: &proto::InspectReply) -> Value {
    let devices = content.devices.iter().map(|device| {
        json!({
            "device": device.path,
            "data_bytes": device.data_bytes,
            "free_bytes": device.free_bytes,
            "read_bytes_per_s": device.read_bytes_per_s,
            "write_bytes_per_s": device.write_bytes_per_s,
        })
    });
    json!({
        "devices": devices.collect::<Vec<_>>(),
        "jobs": content.jobs.iter().map(job_to_json).collect::<Vec<_>>(),
    })
}

fn job_to_json(job: &proto::JobContent) -> Value {
    let kinds = job.kinds.iter().map(|kind| {
        json!({
            "kind": kind_name(kind.kind),
            "tile_count": kind.tile_count,
            "bytes": kind.bytes,
        })
    });
    let generations = job.generations.iter().map(|generation| {
        let ranks = generation.ranks.iter().map(
            |rank| json!({ "rank": rank.rank, "blob_bytes": rank.blob_bytes, "step": rank.step }),
        );
        json!({
            "generation": generation.generation,
            "state": state(generation),
            "tile_count": generation.tile_count,
            "bytes": generation.bytes,
            "new_bytes": generation.new_bytes,
            "ranks": ranks.collect::<Vec<_>>(),
        })
    });
    json!({
        "job": job.job,
        "uid": job.uid,
        "job_id": job.job_id,
        "reserved_bytes": job.reserved_bytes,
        "durability": durability_name(job.durability),
        "nodes": job.nodes,
        "kinds": kinds.collect::<Vec<_>>(),
        "generations": generations.collect::<Vec<_>>(),
        "unreadable": job.unreadable,
    })
}
