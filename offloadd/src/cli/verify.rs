//! `offloadd verify`: everything a store holds is read and compared, on its devices or, while a daemon has it, by the daemon.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offload_support::units::{ApproxBytes, parse_rate};
use offloadd::config::Config;
use offloadd::device::DeviceBlocks;
use offloadd::store::verify::verify_watched;
use serde_json::{Value, json};
use tonic::transport::Channel;

use super::connection::{refusal, runtime};
use super::store_access::{At, Holder, holder};
use super::{open_all, ratings};
use offload_support::progress::{Audience, Progress, Unit};

/// What a daemon reads besides its work, if nothing else is said: felt by nobody on an NVMe drive.
pub(super) const SCRUB_BYTES_PER_S: u64 = 200_000_000;

/// What people may choose.
pub(crate) struct Choice {
    pub(crate) at: At,
    pub(crate) bytes_per_s: Option<u64>,
    pub(crate) job: Option<String>,
    pub(crate) json: bool,
}

/// What was found, in the words of the daemon, whoever found it.
#[derive(Default)]
struct Found {
    by_daemon: bool,
    job_count: u64,
    tile_count: u64,
    tile_bytes: u64,
    damaged: Vec<proto::DamagedTile>,
    /// More than are named.
    damaged_count: u64,
    notes: Vec<offloadd::store::dual_copy::Note>,
    /// Tiles that nobody could look at, and why.
    unread_count: u64,
    unread: Vec<String>,
    unclean: Vec<proto::JobName>,
    undecided: Vec<proto::UndecidedJob>,
    wear: Vec<WearCount>,
}

struct WearCount {
    path: String,
    worn_bytes: u64,
    rated_bytes: Option<u64>,
}

impl Found {
    fn is_sound(&self) -> bool {
        self.damaged_count == 0
            && self.notes.is_empty()
            && self.unread_count == 0
            && self.undecided.is_empty()
    }

    fn verdict(&self) -> &'static str {
        match (self.is_sound(), self.unread_count) {
            (true, _) => "sound",
            (false, 0) if self.damaged_count == 0 && self.notes.is_empty() => "undecided",
            (false, 0) => "damaged",
            (false, _) if self.damaged_count == 0 && self.notes.is_empty() => "not all was read",
            (false, _) => "damaged, and not all was read",
        }
    }
}

/// Reads the rate of a scrub, in bytes a second. A slower one never ends, and no machine reads faster.
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let rate = parse_rate(text).map_err(|error| error.to_string())?;
    match (1 << 20..=10_000_000_000_000).contains(&rate) {
        true => Ok(rate),
        false => Err(format!("`{text}` is not between 1MiB/s and 10000GB/s")),
    }
}

pub(crate) fn run(choice: Choice) -> Result<ExitCode> {
    let listener = match choice.json {
        true => Audience::Nobody,
        false => Audience::Person,
    };
    let found = runtime()?.block_on(async {
        match holder(&choice.at).await? {
            Holder::Daemon(socket, client) => scrub(&socket, client, &choice, listener).await,
            Holder::Nobody(config) => read(&config, &choice, listener),
        }
    })?;
    super::print(&match choice.json {
        true => format!("{}\n", to_json(&found)),
        false => text(&found),
    })?;
    Ok(match found.is_sound() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Under the store's lock.
fn read(config: &Config, choice: &Choice, listener: Audience) -> Result<Found> {
    if choice.job.is_some() {
        bail!("--job is for a running daemon; without one all of the store is verified");
    }
    let devices = open_all(config)?;
    let mut work = Progress::new("verifying", Unit::Bytes, listener);
    let started = Instant::now();
    let report = verify_watched(&mut DeviceBlocks(&devices), &mut |done, total| {
        work.set(done, total);
        if let Some(rate) = choice.bytes_per_s {
            let due = Duration::from_secs_f64(done as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(started.elapsed()));
        }
    })?;
    drop(work);
    let ratings = ratings(config);
    let wear = report.wear.iter().map(|device| WearCount {
        path: device.path.clone(),
        worn_bytes: device.wear.written_bytes,
        rated_bytes: ratings.of(&device.path),
    });
    let unclean = report.unclean_jobs.iter().map(|(uid, job)| proto::JobName {
        uid: *uid,
        job: job.as_str().into(),
    });
    Ok(Found {
        by_daemon: false,
        job_count: report.job_count as u64,
        tile_count: report.tile_count as u64,
        tile_bytes: report.tile_bytes,
        damaged_count: report.damaged_tiles.len() as u64,
        damaged: report
            .damaged_tiles
            .iter()
            .map(proto::DamagedTile::from)
            .collect(),
        wear: wear.collect(),
        unclean: unclean.collect(),
        undecided: (report.undecided_jobs.iter())
            .map(proto::UndecidedJob::from)
            .collect(),
        notes: report.notes,
        ..Found::default()
    })
}

/// Beside everything else a daemon does.
async fn scrub(
    socket: &Path,
    mut client: OffloadClient<Channel>,
    choice: &Choice,
    listener: Audience,
) -> Result<Found> {
    let failed = |status: tonic::Status| refusal(socket, &status);
    let request = proto::ScrubRequest {
        bytes_per_s: choice.bytes_per_s.unwrap_or(SCRUB_BYTES_PER_S),
        job: choice.job.clone().unwrap_or_default(),
    };
    let mut answers = client.scrub(request).await.map_err(failed)?.into_inner();
    let mut work = Progress::new("scrubbing", Unit::Bytes, listener);
    let mut found = Found {
        by_daemon: true,
        ..Found::default()
    };
    let mut ended = false;
    let mut told_less = false;
    while let Some(reply) = answers.message().await.map_err(failed)? {
        match reply.what {
            Some(proto::scrub_reply::What::Damaged(tile)) => found.damaged.push(tile),
            Some(proto::scrub_reply::What::Progress(progress)) => {
                work.set(progress.done_bytes, progress.total_bytes);
                found.job_count = progress.job_count;
                found.tile_count = progress.tile_count;
                found.tile_bytes = progress.done_bytes;
                found.damaged_count = progress.damaged_count;
                found.unclean = progress.unclean_jobs;
                found.undecided = progress.undecided_jobs;
                found.unread_count = progress.unread_count;
                found.unread = progress.unread;
                let wished = choice.bytes_per_s.unwrap_or(SCRUB_BYTES_PER_S);
                let less = progress.bytes_per_s > 0 && progress.bytes_per_s < wished;
                if less && !std::mem::replace(&mut told_less, true) && !choice.json {
                    eprintln!(
                        "offloadd: {} a second is read: the daemon's `scrub_bytes_per_s_max` is for all users together",
                        ApproxBytes(progress.bytes_per_s)
                    );
                }
                ended = progress.ended;
            }
            None => {}
        }
    }
    drop(work);
    if !ended {
        bail!(
            "the daemon at {} stopped before all was read",
            socket.display()
        );
    }
    let metrics = client
        .metrics(proto::MetricsRequest {})
        .await
        .map_err(failed)?;
    let wear = metrics
        .into_inner()
        .devices
        .into_iter()
        .map(|device| WearCount {
            path: device.device.unwrap_or_default().path,
            worn_bytes: device.worn_bytes,
            rated_bytes: device.rated_bytes,
        });
    found.wear = wear.collect();
    Ok(found)
}

fn damaged_line(tile: &proto::DamagedTile) -> String {
    let spec = tile.tile.unwrap_or_default();
    let wrong = match tile.unreadable.as_str() {
        "" => format!(
            "checksum {:08x}, committed was {:08x}",
            tile.found, tile.expected
        ),
        why => why.to_owned(),
    };
    format!(
        "DAMAGED {} bytes at {} of {}: tile {} (unit {}, {}, element {}) of generation {} of job {} of uid {}, written by generation {}: {wrong}\n",
        spec.tile_bytes,
        tile.offset,
        tile.device,
        tile.index,
        spec.unit,
        super::inspect::kind_name(spec.kind),
        spec.elem_offset,
        tile.generation,
        tile.job,
        tile.uid,
        tile.written_by,
    )
}

fn text(found: &Found) -> String {
    let mut text: String = found.damaged.iter().map(damaged_line).collect();
    if found.damaged_count > found.damaged.len() as u64 {
        let more = found.damaged_count - found.damaged.len() as u64;
        text += &format!("DAMAGED {more} tiles more\n");
    }
    for note in &found.notes {
        text += &format!("DAMAGED {note}\n");
    }
    for why in &found.unread {
        text += &format!("NOT READ {why}\n");
    }
    if found.unread_count > 0 {
        text += &format!(
            "NOT READ {} tiles lie on devices that could not be opened: nothing is known of them\n",
            found.unread_count
        );
    }
    for proto::JobName { uid, job } in &found.unclean {
        text += &format!(
            "UNCLEAN job {job} of uid {uid}: written in place (durability none) and not ended in order; its tiles were not compared\n"
        );
    }
    for one in &found.undecided {
        text += &format!(
            "UNDECIDED job {} of uid {}: {}; start the daemon again if the device gives its record now, or `offloadd give-up {}`\n",
            one.job,
            one.uid,
            beside(one),
            one.job
        );
    }
    for device in &found.wear {
        let rated = device.rated_bytes.map_or_else(String::new, |rated| {
            let share = 100.0 * device.worn_bytes as f64 / rated as f64;
            format!(", {share:.1} % of what it is rated for")
        });
        text += &format!(
            "{}: {} written since it was formatted{rated}\n",
            device.path,
            ApproxBytes(device.worn_bytes)
        );
    }
    text += &format!(
        "{} jobs, {} tiles, {} read{}: {}\n",
        found.job_count,
        found.tile_count,
        ApproxBytes(found.tile_bytes),
        if found.by_daemon {
            " by the daemon"
        } else {
            ""
        },
        found.verdict()
    );
    text
}

/// What is left of a job beside the record that its device does not give.
fn beside(one: &proto::UndecidedJob) -> String {
    match (one.generation, one.differing_count) {
        (0, _) => "no other generation of it can be read".into(),
        (generation, 0) => format!("no tile of generation {generation} that was compared differs"),
        (generation, count) => format!(
            "{count} tiles of generation {generation} are not what it wrote: written over by a later one, or damaged"
        ),
    }
}

fn to_json(found: &Found) -> Value {
    json!({
        "sound": found.is_sound(),
        "by_daemon": found.by_daemon,
        "job_count": found.job_count,
        "tile_count": found.tile_count,
        "tile_bytes": found.tile_bytes,
        "damaged_count": found.damaged_count,
        "damaged_tiles": found.damaged.iter().map(tile_to_json).collect::<Vec<_>>(),
        "unread_count": found.unread_count,
        "unread": found.unread,
        "notes": found.notes.iter().map(|note| json!({
            "device": note.path,
            "offset": note.offset,
            "what": note.what,
            "why": note.why,
        })).collect::<Vec<_>>(),
        "wear": found.wear.iter().map(|device| json!({
            "device": device.path,
            "worn_bytes": device.worn_bytes,
            "rated_bytes": device.rated_bytes,
        })).collect::<Vec<_>>(),
        "unclean_jobs": found.unclean.iter().map(|one| json!({
            "uid": one.uid,
            "job": one.job,
        })).collect::<Vec<_>>(),
        "undecided_jobs": found.undecided.iter().map(|one| json!({
            "uid": one.uid,
            "job": one.job,
            "generation": one.generation,
            "differing_count": one.differing_count,
        })).collect::<Vec<_>>(),
    })
}

fn tile_to_json(tile: &proto::DamagedTile) -> Value {
    let spec = tile.tile.unwrap_or_default();
    let damage = match tile.unreadable.as_str() {
        "" => json!({ "expected": tile.expected, "found": tile.found }),
        why => json!({ "unreadable": why }),
    };
    json!({
        "device": tile.device,
        "offset": tile.offset,
        "uid": tile.uid,
        "job": tile.job,
        "tile": tile.index,
        "tile_bytes": spec.tile_bytes,
        "generation": tile.generation,
        "written_by": tile.written_by,
        "damage": damage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit_and_bounds() {
        assert_eq!(rate("200MB/s"), Ok(200_000_000));
        assert_eq!(rate("1.5 GB/s"), Ok(1_500_000_000));
        assert_eq!(rate("2MiB"), Ok(2 << 20));
        for wrong in [
            "",
            "200",
            "MB/s",
            "1kB/s",
            "-5MB/s",
            "1e99GB/s",
            "20000GB/s",
            "nanMB/s",
            "5mb",
        ] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
