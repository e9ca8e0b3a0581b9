//! `offloadd verify`: reads everything a store contains and compares checksums, through its daemon or on its devices.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use offload_api::proto;
use offload_support::progress::{Audience, Progress, Unit};
use offload_support::units::{ApproxBytes, CountOf};
use offloadd::config::Config;
use offloadd::device::DeviceBlocks;
use offloadd::store::verify::verify_watched;
use serde_json::{Value, json};

use super::connection::{Daemon, refusal, runtime};
use super::open_all;
use super::rate::{SCRUB_BYTES_PER_S, rate};
use super::store_access::{Holder, WhichStore, holder};

#[derive(Args)]
pub(crate) struct VerifyOptions {
    #[command(flatten)]
    store: WhichStore,
    /// Read at most this many bytes per second, for example 200MB/s
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<u64>,
    /// Verify only this job; needs a running daemon
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Findings, by a daemon or on the devices.
#[derive(Default)]
struct VerifyResult {
    by_daemon: bool,
    job_count: u64,
    tile_count: u64,
    tile_bytes: u64,
    damaged: Vec<proto::DamagedTile>,
    /// May exceed the length of `damaged`.
    damaged_count: u64,
    notes: Vec<offloadd::store::dual_copy::Note>,
    /// Tiles on devices that could not be opened.
    unread_count: u64,
    unread: Vec<String>,
    unclean: Vec<proto::JobName>,
    undecided: Vec<proto::UndecidedJob>,
}

impl VerifyResult {
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
            (false, _) if self.damaged_count == 0 && self.notes.is_empty() => {
                "not everything could be read"
            }
            (false, _) => "damaged, and not everything could be read",
        }
    }
}

pub(crate) fn run(options: &VerifyOptions) -> Result<ExitCode> {
    let audience = match options.json {
        true => Audience::Nobody,
        false => Audience::Person,
    };
    let found = runtime()?.block_on(async {
        match holder(&options.store).await? {
            Holder::Daemon(mut daemon) => scrub(&mut daemon, options, audience).await,
            Holder::Nobody(config) => read(&config, options, audience),
        }
    })?;
    super::print(&match options.json {
        true => format!("{}\n", to_json(&found)),
        false => text(&found),
    })?;
    Ok(match found.is_sound() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn read(config: &Config, options: &VerifyOptions, audience: Audience) -> Result<VerifyResult> {
    if options.job.is_some() {
        bail!("--job needs a running daemon; without one, verify the whole store");
    }
    let devices = open_all(config)?;
    let mut work = Progress::new("verifying", Unit::Bytes, audience);
    let started = Instant::now();
    let report = verify_watched(&mut DeviceBlocks(&devices), &mut |done, total| {
        work.set(done, total);
        if let Some(rate) = options.rate {
            let due = Duration::from_secs_f64(done as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(started.elapsed()));
        }
    })?;
    drop(work);
    let unclean = report.unclean_jobs.iter().map(|(uid, job)| proto::JobName {
        uid: *uid,
        job: job.as_str().into(),
    });
    Ok(VerifyResult {
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
        unclean: unclean.collect(),
        undecided: (report.undecided_jobs.iter())
            .map(proto::UndecidedJob::from)
            .collect(),
        notes: report.notes,
        ..VerifyResult::default()
    })
}

async fn scrub(
    daemon: &mut Daemon,
    options: &VerifyOptions,
    audience: Audience,
) -> Result<VerifyResult> {
    let request = proto::ScrubRequest {
        bytes_per_s: options.rate.unwrap_or(SCRUB_BYTES_PER_S),
        job: options.job.clone().unwrap_or_default(),
    };
    let scrub = daemon.work(async |client| client.scrub(request).await);
    let mut answers = scrub.await?;
    let socket = &daemon.socket;
    let failed = |status: tonic::Status| refusal(socket, &status);
    let mut work = Progress::new("scrubbing", Unit::Bytes, audience);
    let mut found = VerifyResult {
        by_daemon: true,
        ..VerifyResult::default()
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
                let wished = options.rate.unwrap_or(SCRUB_BYTES_PER_S);
                let less = progress.bytes_per_s > 0 && progress.bytes_per_s < wished;
                if less && !std::mem::replace(&mut told_less, true) && !options.json {
                    eprintln!(
                        "offloadd: reading {} per second: `scrub_bytes_per_s_max` of the daemon limits all users together",
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
            "the daemon at {} ended before everything was read",
            socket.display()
        );
    }
    Ok(found)
}

fn damaged_line(tile: &proto::DamagedTile) -> String {
    let spec = tile.tile.unwrap_or_default();
    let wrong = match tile.unreadable.as_str() {
        "" => format!(
            "checksum {:08x}, expected {:08x}",
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
        super::job::kind_name(spec.kind),
        spec.elem_offset,
        tile.generation,
        tile.job,
        tile.uid,
        tile.written_by,
    )
}

fn text(found: &VerifyResult) -> String {
    let mut text: String = found.damaged.iter().map(damaged_line).collect();
    if found.damaged_count > found.damaged.len() as u64 {
        let more = found.damaged_count - found.damaged.len() as u64;
        text += &format!("DAMAGED {more} more tiles\n");
    }
    for note in &found.notes {
        text += &format!("DAMAGED {note}\n");
    }
    for why in &found.unread {
        text += &format!("NOT READ {why}\n");
    }
    if found.unread_count > 0 {
        text += &format!(
            "NOT READ {} on devices that could not be opened\n",
            CountOf(found.unread_count, "tile")
        );
    }
    for proto::JobName { uid, job } in &found.unclean {
        text += &format!(
            "UNCLEAN job {job} of uid {uid}: it writes in place (durability none) and was not closed in order; its tiles were not compared\n"
        );
    }
    for one in &found.undecided {
        text += &format!(
            "UNDECIDED job {} of uid {}: one of its records cannot be read; {}. Restart the daemon to read it again, or run `offloadd job \
             discard-unreadable {}`\n",
            one.job,
            one.uid,
            beside(one),
            one.job
        );
    }
    text += &format!(
        "{}, {}, {} read{}: {}\n",
        CountOf(found.job_count, "job"),
        CountOf(found.tile_count, "tile"),
        ApproxBytes(found.tile_bytes),
        if found.by_daemon {
            " by the daemon"
        } else {
            ""
        },
        found.verdict()
    );
    if found.damaged_count > 0 {
        text += "Begin each job with a damaged tile again from a checkpoint (`trainer train RUN.toml --resume-from STEP`; `trainer runs` lists \
                 them), or without one from the beginning (`--fresh`)\n";
    }
    text
}

/// State of the newest generation that can still be read.
fn beside(one: &proto::UndecidedJob) -> String {
    match (one.generation, one.differing_count) {
        (0, _) => "no other generation can be read".into(),
        (generation, 0) => format!("the tiles of generation {generation} match their checksums"),
        (generation, count) => format!(
            "{count} tiles of generation {generation} were overwritten by a later generation or are damaged"
        ),
    }
}

fn to_json(found: &VerifyResult) -> Value {
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
