//! Prints a store's jobs as text and as JSON.

use std::fmt::Write;

use anyhow::Result;
use offload_api::proto;
use offload_support::units::{ApproxBytes, CountOf};
use offloadd::core::UserState;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::metrics::samples;
use offloadd::store::content::JobContent;
use offloadd::store::recover;
use serde_json::{Value, json};

use crate::cli::top::numbers;

/// Reads the jobs from the devices of a store that no daemon serves; prints structures that are damaged to stderr.
pub(super) fn read(devices: &[Device]) -> Result<Vec<proto::JobContent>> {
    let store = recover::read(&mut DeviceBlocks(devices))?;
    for note in &store.notes {
        eprintln!("DAMAGED {note}");
    }
    let jobs = store.jobs.iter();
    Ok(jobs
        .map(|job| proto::JobContent::from(&JobContent::from(job)))
        .collect())
}

/// Step that the ranks have recorded: "8", or "7-8" if they differ.
pub(super) fn steps(ranks: &[proto::RankContent]) -> String {
    let steps = || ranks.iter().filter_map(|rank| rank.step);
    match (steps().min(), steps().max()) {
        (Some(least), Some(most)) if least == most => least.to_string(),
        (Some(least), Some(most)) => format!("{least}-{most}"),
        _ => "-".into(),
    }
}

pub(super) fn state(generation: &proto::GenerationContent) -> &'static str {
    match (generation.overwriting, generation.confirmed) {
        (true, _) => "overwritten",
        (false, true) => "confirmed",
        (false, false) => "prepared",
    }
}

pub(in crate::cli) fn kind_name(kind: i32) -> &'static str {
    match proto::TileKind::try_from(kind) {
        Ok(proto::TileKind::Param) => "param",
        Ok(proto::TileKind::State) => "state",
        Ok(proto::TileKind::Grad) => "grad",
        Ok(proto::TileKind::Frozen) => "frozen",
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

/// Names a process; 0 is one in another PID namespace.
fn process(pid: u32) -> String {
    match pid {
        0 => "a process in another PID namespace".into(),
        pid => format!("process {pid}"),
    }
}

pub(super) fn text(job: &proto::JobContent) -> String {
    let kinds = job.kinds.iter().map(|kind| {
        let (bytes, name) = (ApproxBytes(kind.bytes), kind_name(kind.kind));
        format!("{bytes} {name} in {}", CountOf(kind.tile_count, "tile"))
    });
    let mut text = format!(
        "{} (uid {}): {}; {} reserved, durability {}, {}\n",
        job.job,
        job.uid,
        kinds.collect::<Vec<_>>().join(", "),
        ApproxBytes(job.reserved_bytes),
        durability_name(job.durability),
        CountOf(job.nodes, "node")
    );
    if !job.pids.is_empty() {
        let pids: Vec<String> = job.pids.iter().map(|pid| process(*pid)).collect();
        let _ = writeln!(text, "  open in {}", pids.join(", "));
    }
    for record in &job.unreadable {
        let _ = writeln!(
            text,
            "  DAMAGED {record}; it may be the newest generation: restart offloadd to read it again, or run `offloadd job \
             discard-unreadable {}`",
            job.job
        );
    }
    if job.generations.is_empty() && job.unreadable.is_empty() {
        text += "  nothing committed\n";
    }
    for generation in &job.generations {
        let _ = writeln!(
            text,
            "  generation {}, {}: step {} of {}; {} in {}, {} of them new",
            generation.generation,
            state(generation),
            steps(&generation.ranks),
            CountOf(generation.ranks.len(), "rank"),
            ApproxBytes(generation.bytes),
            CountOf(generation.tile_count, "tile"),
            ApproxBytes(generation.new_bytes)
        );
    }
    text
}

/// `users` is empty without a daemon, which has the quotas.
pub(super) fn jobs_to_json(jobs: &[proto::JobContent], users: &[UserState]) -> Value {
    let users = users.iter().map(|user| {
        let mut value = numbers(samples::USER, user);
        value["uid"] = user.uid.into();
        value
    });
    json!({
        "jobs": jobs.iter().map(to_json).collect::<Vec<_>>(),
        "users": users.collect::<Vec<_>>(),
    })
}

pub(super) fn to_json(job: &proto::JobContent) -> Value {
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
        "pids": job.pids,
    })
}
