//! `offloadd device`: adds devices to a store and removes them, with a running daemon or without.

mod calibrate;
mod list;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Subcommand;
use offload_api::proto;
use offload_support::outln;
use offload_support::progress::{Audience, Progress, Unit};
use offload_support::units::ApproxBytes;
use offloadd::config::Config;
use offloadd::core::Reply;
use offloadd::device::{DeviceBlocks, FileOwner};
use offloadd::device_admission::{AdmittedDevice, is_known, known_as, prepare};
use offloadd::offline::Stopped;
use offloadd::store::metadata_device::MetadataMove;
use offloadd::store::recover;
use offloadd::store_devices::StoreDevices;

use super::connection::{Daemon, refusal, runtime};
use super::open_all;
use super::store_access::{Holder, WhichStore, holder};

#[derive(Subcommand)]
pub(crate) enum DeviceCommand {
    /// Add a device to a store; tiles of existing jobs move to it in proportion to its rate
    #[command(after_help = "Examples:
  offloadd device add /mnt/nvme2/offloadd.tiles --size 500GiB --config /etc/offloadd.toml
  offloadd device add /dev/disk/by-id/nvme-SERIAL2 --socket /run/offloadd/offloadd.sock

A daemon that serves the store adds the device while jobs run; only root and the daemon's user may ask for it. Afterwards add the
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
        /// Copy at most this many bytes per second, for example 200MB/s, until the tiles have moved or the daemon restarts; default: `rebalance_bytes_per_s_max` of the settings
        #[arg(long, value_name = "RATE", value_parser = super::verify::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Move all tiles of a device to the others, and remove it from the store
    #[command(after_help = "Examples:
  offloadd device drain /mnt/nvme0/offloadd.tiles --config /etc/offloadd.toml
  offloadd device list --config /etc/offloadd.toml        # shows the progress

A daemon that serves the store drains the device while jobs run; only root and the daemon's user may ask for it. Refused if the
other devices do not have enough space. When the device is empty, remove it from `devices` in the settings. An interrupted drain
can be repeated. The first device, which holds the store's catalog and records, leaves at the next start of the daemon without
sessions to adopt, or at once if no daemon runs.")]
    Drain {
        /// Device, as named in the settings
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        /// Copy at most this many bytes per second, for example 200MB/s, until the tiles have moved or the daemon restarts; default: `rebalance_bytes_per_s_max` of the settings
        #[arg(long, value_name = "RATE", value_parser = super::verify::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Measure the rates of a device again, while no daemon serves the store; tiles of all jobs move to match
    #[command(after_help = "Examples:
  systemctl stop offloadd
  offloadd device calibrate /mnt/nvme2/offloadd.tiles --config /etc/offloadd.toml
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
    /// Change the rate limit of the tiles that are moving now
    #[command(after_help = "Examples:
  offloadd device rate 100MB/s
  offloadd device rate 10000GB/s                          # in effect no limit")]
    Rate {
        /// Bytes copied per second, on average
        #[arg(value_name = "RATE", value_parser = super::verify::rate)]
        rate: u64,
        #[command(flatten)]
        store: WhichStore,
    },
    /// List the devices of a store with their space, wear and the progress of moving tiles
    #[command(after_help = "Examples:
  offloadd device list
  offloadd device list --config /etc/offloadd.toml        # with a daemon or without
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
        } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(holder(&store))? {
                Holder::Daemon(mut daemon) => {
                    let request = proto::AddDeviceRequest {
                        path: utf8(&path)?,
                        file_bytes: size,
                        force,
                        rebalance_bytes_per_s_max: rate,
                    };
                    runtime.block_on(add_served(&mut daemon, &path, request))
                }
                Holder::Nobody(config) => {
                    let rate = rate.or(config.rebalance_bytes_per_s_max);
                    add_stopped(&config, &path, size, force, rate)
                }
            }
        }
        DeviceCommand::Drain { path, rate, store } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(holder(&store))? {
                Holder::Daemon(mut daemon) => {
                    runtime.block_on(drain_served(&mut daemon, &path, rate))
                }
                Holder::Nobody(config) => {
                    let rate = rate.or(config.rebalance_bytes_per_s_max);
                    drain_stopped(&config, &path, rate)
                }
            }
        }
        DeviceCommand::Calibrate { path, store } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(holder(&store))? {
                Holder::Daemon(daemon) => calibrate::served(&daemon),
                Holder::Nobody(config) => calibrate::unserved(&config, &path),
            }
        }
        DeviceCommand::Rate { rate, store } => match runtime.block_on(holder(&store))? {
            Holder::Daemon(mut daemon) => runtime.block_on(limit_served(&mut daemon, rate)),
            Holder::Nobody(config) => bail!(
                "no daemon at {}, so no tiles are moving; `device add --rate` and `device drain --rate` limit a new move",
                config.socket.display()
            ),
        },
        DeviceCommand::List { json, store } => {
            let lines = match runtime.block_on(holder(&store))? {
                Holder::Daemon(mut daemon) => runtime.block_on(list::lines_served(&mut daemon))?,
                Holder::Nobody(config) => list::lines_stopped(&config)?,
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

async fn add_served(
    daemon: &mut Daemon,
    path: &Path,
    request: proto::AddDeviceRequest,
) -> Result<()> {
    let limit = at_most(request.rebalance_bytes_per_s_max);
    let asked = daemon.client.add_device(request).await;
    let reply = asked.map_err(|status| refusal(&daemon.socket, &status))?;
    let reply = reply.into_inner();
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

async fn drain_served(daemon: &mut Daemon, path: &Path, rate: Option<u64>) -> Result<()> {
    let request = proto::DrainDeviceRequest {
        path: utf8(path)?,
        rebalance_bytes_per_s_max: rate,
    };
    let asked = daemon.client.drain_device(request).await;
    let reply = asked.map_err(|status| refusal(&daemon.socket, &status))?;
    outln!(
        "{} move away from {} while jobs run{}; `offloadd device list` shows the progress.",
        ApproxBytes(reply.into_inner().left_bytes),
        path.display(),
        at_most(rate)
    );
    print_drained(path);
    Ok(())
}

async fn limit_served(daemon: &mut Daemon, bytes_per_s_max: u64) -> Result<()> {
    let request = proto::LimitMovesRequest { bytes_per_s_max };
    let asked = daemon.client.limit_moves(request).await;
    asked.map_err(|status| refusal(&daemon.socket, &status))?;
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

fn open_stopped(config: &Config) -> Result<Stopped> {
    let stopped = Stopped::open(open_all(config)?)?;
    print_foreign_devices(&stopped);
    Ok(stopped)
}

/// Opens the store to change it, and moves its catalog and records to another device first if that is due.
fn open_settled(config: &Config) -> Result<Stopped> {
    let what = "moving the store's catalog and records";
    let mut work = Progress::new(what, Unit::Bytes, Audience::Person);
    let opened = Stopped::open_settled(open_all(config)?, &mut |done, total| {
        work.set(done, total);
    });
    drop(work);
    let (stopped, moved) = opened?;
    print_foreign_devices(&stopped);
    match moved {
        MetadataMove::NotDue => {}
        MetadataMove::Moved { to, .. } => outln!("moved the store's catalog and records to {to}"),
        MetadataMove::Failed(why) => {
            eprintln!("offloadd: cannot move the store's catalog and records: {why}");
        }
    }
    Ok(stopped)
}

fn print_foreign_devices(stopped: &Stopped) {
    for foreign_device in stopped.foreign_devices() {
        eprintln!("offloadd: device {foreign_device}");
    }
}

fn add_stopped(
    config: &Config,
    path: &Path,
    file_bytes: Option<u64>,
    force: bool,
    rate: Option<u64>,
) -> Result<()> {
    // After an interrupted add, the settings may list the device before the store has it. It is opened below.
    let mut config = config.clone();
    if is_interrupted_add(&config, path) {
        config.devices.retain(|listed| listed != path);
    }
    let mut stopped = open_settled(&config)?;
    let name = utf8(path)?;
    let mut devices = stopped.devices().into_iter();
    if let Some(known) = devices.find(|device| is_known(path, device)) {
        outln!("{}", known_as(path, &known));
        return move_all(&mut stopped, rate);
    }
    let AdmittedDevice {
        device,
        new,
        moved,
        made,
    } = prepare(
        path,
        file_bytes,
        force,
        stopped.id(),
        owner(&config),
        config.engine,
    )?;
    let (data_bytes, rates) = (new.data_bytes, new.rates);
    match stopped.add(device, new, moved) {
        Ok(Reply::AddDevice { number }) => print_added(
            path,
            number,
            data_bytes,
            [rates.read_bytes_per_s, rates.write_bytes_per_s],
        ),
        Ok(other) => unreachable!("the core answered another call: {other:?}"),
        Err(fault) => {
            // Releases the locks, so that the store can be opened below to see whether it needs the new file.
            drop(stopped);
            if made {
                let again = open_all(&config).ok().map(Stopped::open);
                let is_out = |store: Stopped| store.devices().iter().all(|d| d.path != name);
                if again.is_some_and(|store| store.is_ok_and(is_out)) {
                    let _ = std::fs::remove_file(path);
                }
            }
            bail!("{}", fault.message);
        }
    }
    move_all(&mut stopped, rate)
}

/// Owner of the store's other files, for a file that root creates: the daemon's user must be able to open it.
fn owner(config: &Config) -> Option<FileOwner> {
    let found = (config.devices.iter())
        .filter_map(|device| std::fs::metadata(device).ok())
        .find(std::fs::Metadata::is_file);
    let found = found.filter(|_| rustix::process::geteuid().is_root())?;
    Some(FileOwner {
        uid: found.uid(),
        gid: found.gid(),
    })
}

/// Whether the settings list the device but the store does not have it yet.
fn is_interrupted_add(config: &Config, path: &Path) -> bool {
    let listed = config.devices.iter().any(|device| device == path);
    if !listed || !path.exists() {
        return listed;
    }
    let others = config.devices.iter().filter(|device| *device != path);
    let others: Vec<PathBuf> = others.cloned().collect();
    !others.is_empty()
        && StoreDevices::open(&others).is_ok_and(|opened| {
            let in_store = opened
                .unlisted
                .iter()
                .any(|one| Path::new(one.path()) == path);
            !in_store && recover::identify(&mut DeviceBlocks(&opened.devices)).is_ok()
        })
}

fn drain_stopped(config: &Config, path: &Path, rate: Option<u64>) -> Result<()> {
    let mut stopped = open_settled(config)?;
    let name = utf8(path)?;
    if stopped
        .foreign_devices()
        .iter()
        .any(|foreign_device| foreign_device.path == name)
    {
        outln!("{name} is not part of the store any more");
        return Ok(());
    }
    match stopped.drain(&name) {
        Ok(Reply::DrainDevice { left_bytes }) => {
            outln!("{} to move away from {name}", ApproxBytes(left_bytes));
        }
        Ok(other) => unreachable!("the core answered another call: {other:?}"),
        Err(fault) => bail!("{}", fault.message),
    }
    move_all(&mut stopped, rate)?;
    if !has_left(&stopped, &name) {
        // The metadata device leaves in two steps: its tiles first, then the catalog and records when the store is opened.
        drop(stopped);
        stopped = open_settled(config)?;
        move_all(&mut stopped, rate)?;
    }
    if !has_left(&stopped, &name) {
        let states = stopped.devices().into_iter();
        let mut found = states.filter(|state| state.path == name);
        let why = found.find_map(|state| state.status.stuck);
        let why = why.unwrap_or_else(|| "run the command again".into());
        bail!("{name} is not empty yet: {why}");
    }
    outln!(
        "{name} is empty and not part of the store any more: remove it from `devices` in the settings"
    );
    Ok(())
}

fn has_left(stopped: &Stopped, name: &str) -> bool {
    let states = stopped.devices().into_iter();
    !states
        .into_iter()
        .any(|device| device.path == name && device.status.phase.is_some())
}

fn move_all(stopped: &mut Stopped, rate: Option<u64>) -> Result<()> {
    let left = stopped.devices().into_iter().map(|d| d.status.left_bytes);
    let total_bytes: u64 = left.sum();
    let what = format!("moving tiles{}", at_most(rate));
    let mut work = Progress::new(what, Unit::Bytes, Audience::Person);
    let moved = stopped.move_all(rate, &mut |moved_bytes| {
        work.set(moved_bytes, total_bytes.max(moved_bytes));
    });
    drop(work);
    if let Err(error) = stopped.keep_wear() {
        eprintln!("offloadd: the wear of a device could not be recorded on it: {error}");
    }
    moved.map_err(|fault| anyhow!("{}", fault.message))
}
