//! `offloadd device`: adds devices to a served store, drains them, and lists them.

mod calibrate;
mod list;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use offload_api::proto;
use offload_support::outln;
use offload_support::units::ApproxBytes;

use super::connection::{Daemon, runtime};
use super::store_access::{Holder, WhichStore, holder, serving};

#[derive(Subcommand)]
pub(crate) enum DeviceCommand {
    /// Add a device to a store; tiles of existing jobs move to it in proportion to its rate
    #[command(after_help = "Examples:
  offloadd device add /mnt/nvme2/offloadd/tiles --size 500GiB
  offloadd device add /dev/disk/by-id/nvme-SERIAL2 --socket /run/offloadd/offloadd.sock

The daemon that serves the store adds the device while jobs run; only root and the daemon's user may ask for it. Afterwards add the
device to `devices` in the settings. Until then, each start of the daemon warns and opens the device at the path that the store
remembers. An interrupted add can be repeated.")]
    Add {
        /// File to create, or block device
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        /// Size of the file, for example 500GiB; a block device is used whole
        #[arg(long, value_name = "SIZE", value_parser = offload_support::units::parse_bytes)]
        size: Option<u64>,
        /// Overwrite an existing file or store
        #[arg(long)]
        force: bool,
        /// Copy at most this many bytes per second, for example 200MB/s, until the tiles have moved or the daemon restarts; default:
        /// `rebalance_bytes_per_s_max` of the settings
        #[arg(long, value_name = "RATE", value_parser = super::rate::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Move all tiles of a device to the others, and remove it from the store
    #[command(after_help = "Examples:
  offloadd device drain /mnt/nvme0/offloadd/tiles
  offloadd device list                                    # shows the progress

The daemon that serves the store drains the device while jobs run; only root and the daemon's user may ask for it. Refused if the
other devices do not have enough space. When the device is empty, remove it from `devices` in the settings. An interrupted drain
can be repeated. The metadata device, which holds the store's catalog and records, leaves at the next start of the daemon without
sessions to adopt.")]
    Drain {
        /// Device, as named in the settings
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        /// Copy at most this many bytes per second, for example 200MB/s, until the tiles have moved or the daemon restarts; default:
        /// `rebalance_bytes_per_s_max` of the settings
        #[arg(long, value_name = "RATE", value_parser = super::rate::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Measure the rates of a device again, while no daemon serves the store; tiles of all jobs move to match
    #[command(after_help = "Examples:
  systemctl stop offloadd
  offloadd device calibrate /mnt/nvme2/offloadd/tiles --config /etc/offloadd/offloadd.toml
  systemctl start offloadd
  offloadd device list --json                             # shows the stored rates

Use this for a device that was added while processors or drives were busy: its rates may be too low, and then it gets too few
tiles. Writes to free space for one second (at most 2 GiB) and reads it back. Refused while a daemon serves the store, because
jobs would slow down the measurement. When the daemon is started again, it moves the tiles. Sessions that a daemon handed over
to the next one end.")]
    Calibrate {
        /// Device, as named in the settings
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Change the rate limit while tiles move between devices
    #[command(after_help = "Examples:
  offloadd device rebalance-rate 100MB/s
  offloadd device rebalance-rate 10000GB/s                # in effect no limit")]
    RebalanceRate {
        /// Bytes copied per second, on average
        #[arg(value_name = "RATE", value_parser = super::rate::rate)]
        rate: u64,
        #[command(flatten)]
        store: WhichStore,
    },
    /// List the devices of a store with their space and the progress of moving tiles
    #[command(after_help = "Examples:
  offloadd device list
  offloadd device list --config /etc/offloadd/offloadd.toml        # with a daemon or without
  offloadd device list --json | jq '.devices[].free_bytes'")]
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        store: WhichStore,
    },
}

pub(crate) fn run(command: DeviceCommand) -> Result<()> {
    let runtime = runtime()?;
    match command {
        DeviceCommand::Add {
            path,
            size,
            force,
            rate,
            store,
        } => runtime.block_on(async {
            let path = std::path::absolute(path)?;
            let request = proto::AddDeviceRequest {
                path: utf8(&path)?,
                file_bytes: size,
                force,
                rebalance_bytes_per_s_max: rate,
            };
            add(&mut serving(&store).await?, &path, request).await
        }),
        DeviceCommand::Drain { path, rate, store } => runtime.block_on(async {
            let path = std::path::absolute(path)?;
            drain(&mut serving(&store).await?, &path, rate).await
        }),
        DeviceCommand::Calibrate { path, store } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(holder(&store))? {
                Holder::Daemon(daemon) => calibrate::served(&daemon),
                Holder::Nobody(config) => calibrate::unserved(&config, &path),
            }
        }
        DeviceCommand::RebalanceRate { rate, store } => runtime.block_on(async {
            let mut daemon = serving(&store).await?;
            limit(&mut daemon, rate).await
        }),
        DeviceCommand::List { json, store } => {
            let lines = match runtime.block_on(holder(&store))? {
                Holder::Daemon(mut daemon) => runtime.block_on(list::lines_served(&mut daemon))?,
                Holder::Nobody(config) => list::lines_unserved(&config)?,
            };
            match json {
                true => outln!("{}", list::to_json(&lines)),
                false => print!("{}", list::table(&lines)),
            }
            Ok(())
        }
    }
}

fn utf8(path: &Path) -> Result<String> {
    let text = path.to_str().context("the device's path must be UTF-8")?;
    Ok(text.to_owned())
}

async fn add(daemon: &mut Daemon, path: &Path, request: proto::AddDeviceRequest) -> Result<()> {
    let limit = at_most(request.rebalance_bytes_per_s_max);
    // The daemon fills the file and measures it.
    let adding = daemon.work(async |client| client.add_device(request).await);
    let reply = adding.await?;
    print_added(
        path,
        reply.number,
        reply.data_bytes,
        [reply.read_bytes_per_s, reply.write_bytes_per_s],
    );
    outln!(
        "Tiles are moving to it while jobs run{limit}; `offloadd device list` shows the progress."
    );
    Ok(())
}

fn print_added(path: &Path, number: u32, data_bytes: u64, rates: [u64; 2]) {
    let [read, write] = rates.map(|rate| rate as f64 / 1e9);
    outln!(
        "device {number}: {}, {} for tiles, reads {read:.2} GB/s, writes {write:.2} GB/s",
        path.display(),
        ApproxBytes(data_bytes)
    );
    outln!(
        "Add it to `devices` in the settings: \"{}\"",
        path.display()
    );
}

async fn drain(daemon: &mut Daemon, path: &Path, rate: Option<u64>) -> Result<()> {
    let request = proto::DrainDeviceRequest {
        path: utf8(path)?,
        rebalance_bytes_per_s_max: rate,
    };
    let draining = daemon.ask(async |client| client.drain_device(request).await);
    let reply = draining.await?;
    outln!(
        "{} move away from {} while jobs run{}; `offloadd device list` shows the progress.",
        ApproxBytes(reply.left_bytes),
        path.display(),
        at_most(rate)
    );
    print_drained(path);
    Ok(())
}

async fn limit(daemon: &mut Daemon, bytes_per_s_max: u64) -> Result<()> {
    let request = proto::LimitMovesRequest { bytes_per_s_max };
    let limiting = daemon.ask(async |client| client.limit_moves(request).await);
    limiting.await?;
    outln!(
        "Tiles now move{}; `offloadd device list` shows the progress.",
        at_most(Some(bytes_per_s_max))
    );
    Ok(())
}

/// Formats a rate limit: ", at most 95.4 MiB per second"; empty without one.
fn at_most(bytes_per_s_max: Option<u64>) -> String {
    bytes_per_s_max.map_or_else(String::new, |rate| {
        format!(", at most {} per second", ApproxBytes(rate))
    })
}

fn print_drained(path: &Path) {
    outln!(
        "When it has left the store, remove it from `devices` in the settings: \"{}\"",
        path.display()
    );
}
