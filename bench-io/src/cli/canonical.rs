//! `bench-io` without a command: one canonical workload, two numbers, beside what the same engine does without a daemon.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use offload_client::private::{PrivateDaemon, PrivateSettings};
use offloadd::api::IODEPTH_MAX;
use offloadd::config::parse_size;
use offloadd::engine::EngineChoice;

use crate::canonical::bare;
use crate::canonical::workload::{self, Shape};
use crate::place::WorkFolder;

/// The canonical workload's settings.
#[derive(Args)]
pub(crate) struct CanonicalArgs {
    /// Where the drive is mounted
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Bytes to move in each direction
    #[arg(long, default_value = "1GiB", value_parser = parse_size)]
    size: u64,
    /// Bytes of a tile
    #[arg(long, default_value = "4MiB", value_parser = parse_size)]
    tile: u64,
    /// Operations in flight
    #[arg(long, default_value_t = 16)]
    iodepth: u32,
    /// auto, uring, aio, psync, polled or sqpoll
    #[arg(long, default_value = "auto")]
    engine: String,
    /// One JSON object instead of lines to read
    #[arg(long)]
    json: bool,
}

/// Runs it and prints its numbers.
///
/// # Errors
/// Settings that cannot be, or an operation that failed.
pub(crate) fn run(args: &CanonicalArgs) -> Result<()> {
    let choice = EngineChoice::from_name(&args.engine).with_context(|| {
        format!(
            "--engine {}: it is one of {:?}",
            args.engine,
            EngineChoice::NAMES
        )
    })?;
    ensure!(
        args.tile > 0 && args.tile.is_multiple_of(4096) && args.size >= args.tile,
        "--tile {}: a multiple of 4096 bytes, not larger than --size",
        args.tile
    );
    ensure!(
        (1..=IODEPTH_MAX).contains(&args.iodepth),
        "--iodepth {}: 1 to {IODEPTH_MAX}",
        args.iodepth
    );
    let shape = Shape {
        tile_bytes: u32::try_from(args.tile).context("--tile: at most 4 GiB")?,
        tile_count: u32::try_from(args.size / args.tile)
            .context("--size: too many tiles; use larger ones")?,
        iodepth: args.iodepth,
    };
    let work = WorkFolder::make(&args.folder)?;
    let device = work.path().join("tiles");
    let progress = ProgressBar::new(2 * shape.total_bytes()).with_style(
        ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
            .context("a fixed template")?,
    );
    let daemon = PrivateDaemon::start(PrivateSettings {
        program: None,
        folder: work.path().to_owned(),
        devices: vec![(device.clone(), 2 * shape.total_bytes() + (256 << 20))],
        arena_bytes_max: shape.geometry()?.arena_bytes() + (64 << 20),
        iodepth_max: args.iodepth,
        engine: args.engine.clone(),
    })?;
    let (through, about) = workload::run(daemon.socket(), &shape, &progress)?;
    drop(daemon);
    progress.finish_and_clear();
    let bare = bare::run(&device, &shape, choice)?;

    let gb = |rate: f64| rate / 1e9;
    if args.json {
        let rates = |r: &workload::Rates| serde_json::json!({"write_bytes_per_s": r.write_bytes_per_s, "read_bytes_per_s": r.read_bytes_per_s});
        let report = serde_json::json!({
            "folder": args.folder, "tile_bytes": shape.tile_bytes, "tile_count": shape.tile_count, "iodepth": shape.iodepth,
            "about": about, "debug_build": cfg!(debug_assertions), "daemon": rates(&through), "engine_alone": rates(&bare),
        });
        println!("{report}");
        return Ok(());
    }
    if cfg!(debug_assertions) {
        println!("warning: a debug build; these numbers mean little");
    }
    println!(
        "{} tiles of {} bytes in {}; {about}",
        shape.tile_count,
        shape.tile_bytes,
        args.folder.display()
    );
    for (name, through, bare) in [
        ("write", through.write_bytes_per_s, bare.write_bytes_per_s),
        ("read", through.read_bytes_per_s, bare.read_bytes_per_s),
    ] {
        println!(
            "{name:6} {:6.2} GB/s   {:3.0} % of the engine alone ({:.2} GB/s)",
            gb(through),
            100.0 * through / bare,
            gb(bare)
        );
    }
    Ok(())
}
