//! `offloadd verify`: the store's own check, told to people or programs.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use offloadd::config::Config;
use offloadd::device::DeviceBlocks;
use offloadd::store::verify::{Damage, DamagedTile, Report, verify_watched};
use serde_json::{Value, json};

use super::long_work::{Listener, LongWork, Unit};
use super::{binary, open_all};

pub(crate) fn run(config: &Path, as_json: bool) -> Result<ExitCode> {
    let config = Config::read(config)?;
    let devices = open_all(&config.devices)?;
    let listener = match as_json {
        true => Listener::Nobody,
        false => Listener::Person,
    };
    let mut work = LongWork::new("verifying", Unit::Bytes, listener);
    let report = verify_watched(&mut DeviceBlocks(&devices), &mut |done, total| {
        work.at(done, total);
    })?;
    drop(work);
    if as_json {
        println!("{}", to_json(&report, &config));
    } else {
        tell(&report, &config);
    }
    Ok(if report.is_sound() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn tell(report: &Report, config: &Config) {
    for tile in &report.damaged_tiles {
        println!("DAMAGED {tile}");
    }
    for note in &report.notes {
        println!("DAMAGED {note}");
    }
    for (uid, job) in &report.unclean_jobs {
        println!(
            "UNCLEAN job {job} of uid {uid}: written in place (durability none) and not ended in order; its tiles were not compared"
        );
    }
    for device in &report.wear {
        let written_bytes = device.wear.written_bytes;
        let rated = config.rated_bytes[device.position].map_or_else(String::new, |rated| {
            let share = 100.0 * written_bytes as f64 / rated as f64;
            format!(", {share:.1} % of what it is rated for")
        });
        println!(
            "{}: {} written since it was formatted{rated}",
            device.path,
            binary(written_bytes)
        );
    }
    println!(
        "{} jobs, {} tiles, {} read: {}",
        report.job_count,
        report.tile_count,
        binary(report.tile_bytes),
        if report.is_sound() {
            "sound"
        } else {
            "damaged"
        }
    );
}

fn to_json(report: &Report, config: &Config) -> Value {
    json!({
        "sound": report.is_sound(),
        "job_count": report.job_count,
        "tile_count": report.tile_count,
        "tile_bytes": report.tile_bytes,
        "damaged_tiles": report.damaged_tiles.iter().map(tile_to_json).collect::<Vec<_>>(),
        "notes": report.notes.iter().map(|note| json!({
            "device": note.path,
            "offset": note.offset,
            "what": note.what,
            "why": note.why,
        })).collect::<Vec<_>>(),
        "wear": report.wear.iter().map(|device| json!({
            "device": device.path,
            "worn_bytes": device.wear.written_bytes,
            "rated_bytes": config.rated_bytes[device.position],
        })).collect::<Vec<_>>(),
        "unclean_jobs": report.unclean_jobs.iter().map(|(uid, job)| json!({
            "uid": uid,
            "job": job.as_str(),
        })).collect::<Vec<_>>(),
    })
}

fn tile_to_json(tile: &DamagedTile) -> Value {
    let damage = match &tile.damage {
        Damage::Checksum { expected, found } => json!({ "expected": expected, "found": found }),
        Damage::Unreadable(why) => json!({ "unreadable": why }),
    };
    json!({
        "device": tile.path,
        "offset": tile.offset,
        "uid": tile.uid,
        "job": tile.job.as_str(),
        "tile": tile.tile.0,
        "tile_bytes": tile.spec.tile_bytes,
        "generation": tile.generation.0,
        "written_by": tile.written_by.0,
        "damage": damage,
    })
}
