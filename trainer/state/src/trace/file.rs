//! The timeline's file: JSON in the array format of Chrome's trace viewer, which Perfetto also reads.
//!
//! A viewer's row shows events one at a time, or nested. Transfers of tiles overlap, so each uses the first
//! free lane of its track.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::{Event, Track};

/// Number of lanes of a track: row numbers are `track * LANES_MAX + lane`. Further events share the last
/// lane.
const LANES_MAX: usize = 1000;

impl Track {
    fn word(self) -> &'static str {
        match self {
            Self::Step => "steps",
            Self::Compute => "compute",
            Self::Move => "gather and scatter",
            Self::Copy => "copies",
            Self::Collective => "collectives",
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Update => "updates",
            Self::Commit => "commits",
        }
    }

    /// Returns whether the track's events come from one thread, so that they follow each other or nest.
    fn nests(self) -> bool {
        matches!(self, Self::Step | Self::Compute | Self::Move)
    }
}

/// Process number of `rank` in the file. Viewers do not show process 0.
fn pid(rank: u32) -> u32 {
    rank + 1
}

/// Writes `events` to `path` with times relative to `zero`.
pub(super) fn write(
    path: &Path,
    rank: u32,
    zero: Instant,
    mut events: Vec<Event>,
    dropped_count: u64,
) -> io::Result<()> {
    // An enclosing event must precede its nested events.
    events.sort_by(|a, b| {
        (a.track, a.start)
            .cmp(&(b.track, b.start))
            .then(b.end.cmp(&a.end))
    });
    let new = new_path(path);
    let written =
        write_all(&new, rank, zero, &events, dropped_count).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        // The caller reports the original error.
        let _ = fs::remove_file(&new);
    }
    written
}

/// Checks that the file `path` can be created.
pub(super) fn probe(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let new = new_path(path);
    fs::File::create(&new)?;
    fs::remove_file(&new)
}

/// Temporary path that the file is written to.
fn new_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn write_all(
    path: &Path,
    rank: u32,
    zero: Instant,
    events: &[Event],
    dropped_count: u64,
) -> io::Result<()> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    let process = json!({"name": format!("rank {rank}"), "dropped_events": dropped_count});
    write!(
        file,
        "[\n{}",
        json!({"ph": "M", "pid": pid(rank), "tid": 0, "name": "process_name", "args": process})
    )?;
    // Time from which each lane of each track is free.
    let mut lanes: BTreeMap<Track, Vec<Instant>> = BTreeMap::new();
    for event in events {
        let free = lanes.entry(event.track).or_default();
        let lane = take_lane(free, event);
        write!(file, ",\n{}", line(event, rank, zero, lane))?;
    }
    for (track, free) in &lanes {
        for lane in 0..free.len() {
            let name = match (free.len(), lane) {
                (1, _) => track.word().to_owned(),
                (_, lane) => format!("{} {lane}", track.word()),
            };
            for (what, value) in [
                ("thread_name", json!({"name": name})),
                (
                    "thread_sort_index",
                    json!({"sort_index": row(*track, lane)}),
                ),
            ] {
                let row = row(*track, lane);
                let named =
                    json!({"ph": "M", "pid": pid(rank), "tid": row, "name": what, "args": value});
                write!(file, ",\n{named}")?;
            }
        }
    }
    writeln!(file, "\n]")?;
    file.flush()
}

/// Takes the first lane that is free at the start of `event`, until its end.
fn take_lane(free: &mut Vec<Instant>, event: &Event) -> usize {
    if event.track.nests() {
        free.resize(1, event.end);
        return 0;
    }
    let found = free.iter().position(|free| *free <= event.start);
    let lane = match found {
        Some(lane) => lane,
        None if free.len() < LANES_MAX => {
            free.push(event.end);
            free.len() - 1
        }
        None => LANES_MAX - 1,
    };
    free[lane] = event.end;
    lane
}

fn row(track: Track, lane: usize) -> usize {
    // Row 0 belongs to the process.
    (track as usize + 1) * LANES_MAX + lane
}

fn line(event: &Event, rank: u32, zero: Instant, lane: usize) -> Value {
    // An event that began before the trace is shown from the trace's start.
    let us = |at: Instant| at.saturating_duration_since(zero).as_nanos() as f64 / 1e3;
    let mut args = serde_json::Map::new();
    if event.bytes > 0 {
        args.insert("bytes".into(), event.bytes.into());
    }
    if let Some(elems) = &event.tile {
        args.insert(
            "elems".into(),
            format!("{}..{}", elems.start, elems.end).into(),
        );
    }
    json!({
        "ph": "X",
        "pid": pid(rank),
        "tid": row(event.track, lane),
        "cat": event.track.word(),
        "name": event.name,
        "ts": us(event.start),
        "dur": us(event.end) - us(event.start),
        "args": args,
    })
}
