//! `offloadd device`: devices come to a store and leave it, with a daemon that serves it or without.

mod list;
mod measure;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use offload_api::proto;
use offload_support::outln;
use offload_support::units::ApproxBytes;
use offloadd::config::Config;
use offloadd::core::Reply;
use offloadd::device::{DeviceBlocks, FileOwner};
use offloadd::device_admission::{AdmittedDevice, is_known, known_as, prepare};
use offloadd::offline::Stopped;
use offloadd::store::metadata_device::MetadataMove;
use offloadd::store::recover;
use offloadd::store_devices::StoreDevices;

use super::connection::{refusal, runtime};
use super::open_all;
use super::top::Daemon;
use offload_support::progress::{Audience, Progress, Unit};

#[derive(Subcommand)]
pub(crate) enum DeviceCommand {
    /// Bring a device into a store; tiles of the jobs that are there move to it, in proportion to its rate
    #[command(after_help = "Examples:
  offloadd device add /mnt/nvme2/offloadd.tiles --size 500GiB --config /etc/offloadd.toml
  offloadd device add /dev/disk/by-id/nvme-SERIAL2 --socket /run/offloadd/offloadd.sock

Through the daemon where one serves the store, while jobs run; only root and who runs the daemon may. Afterwards the device
belongs into `devices` of the settings: the store opens with all its devices or not at all. Until it is there, a start opens it
where the store has it, and warns. What is cut off can be run again. With --rate no more is copied a second, on the average; `offloadd device rate` changes it. Without it what
`rebalance_bytes_per_s_max` in the settings says.")]
    Add {
        /// A file to make, or a block device
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        /// Of the file, like 500GiB; a block device is taken whole
        #[arg(long, value_name = "SIZE", value_parser = offload_support::units::parse_bytes)]
        size: Option<u64>,
        /// Overwrite what is on it
        #[arg(long)]
        force: bool,
        /// Copy tiles no faster than that, like 200MB/s: until they have moved or the daemon is started again
        #[arg(long, value_name = "RATE", value_parser = super::verify::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Move all tiles of a device to the others, after which it is of the store no more
    #[command(after_help = "Examples:
  offloadd device drain /mnt/nvme0/offloadd.tiles --config /etc/offloadd.toml
  offloadd device list --config /etc/offloadd.toml        # how far it is

Through the daemon where one serves the store, while jobs run; only root and who runs the daemon may. Afterwards the device
is to be taken from `devices` of the settings. Refused when the others have no room. What is cut off can be run again.
With --rate no more is copied a second, on the average; `offloadd device rate` changes it. Without it what
`rebalance_bytes_per_s_max` in the settings says. The device with the store's catalog and records (the first one) leaves when offloadd is started next with no session to take up; without a daemon, at once.")]
    Drain {
        /// As the settings name it
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        /// Copy tiles no faster than that, like 200MB/s: until they have moved or the daemon is started again
        #[arg(long, value_name = "RATE", value_parser = super::verify::rate)]
        rate: Option<u64>,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Measure a device of a store again: tiles of all jobs move as its new rates say
    #[command(after_help = "Examples:
  offloadd device measure /mnt/nvme2/offloadd.tiles --config /etc/offloadd.toml
  offloadd device list --json                             # the rates that are kept

A device that came while processors or drives were busy may have been measured too slow, and so have too few tiles. Writes for
a second into free room on it, half of its largest piece and 2 GiB at most, and reads that again. Through the daemon where one
serves the store, while jobs run: then the figures are what they leave, and whoever uses that device waits longer for two seconds,
behind 16 MiB at a time that take no turns. Only root and who runs the daemon may.")]
    Measure {
        /// As the settings name it
        #[arg(value_name = "DEVICE")]
        path: PathBuf,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Change how fast the tiles that move now may be copied
    #[command(after_help = "Example:
  offloadd device rate 100MB/s --socket /run/offloadd/offloadd.sock    # 10000GB/s: as fast as it goes beside the jobs")]
    Rate {
        /// Of what is copied, on the average
        #[arg(value_name = "RATE", value_parser = super::verify::rate)]
        rate: u64,
        #[command(flatten)]
        store: WhichStore,
    },
    /// Show the devices of a store, what is on them, and how far tiles that move are
    List {
        /// For programs
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        store: WhichStore,
    },
}

#[derive(Args)]
pub(crate) struct WhichStore {
    /// The store of these settings, with its daemon or without
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    /// The store of the daemon that answers there
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = offloadd::config::SOCKET_DEFAULT
    )]
    socket: PathBuf,
}

/// How a store is reached.
enum StoreAccess {
    Served(Box<Daemon>),
    Stopped(Box<Config>),
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
            match runtime.block_on(access(&store))? {
                StoreAccess::Served(mut daemon) => {
                    let request = proto::AddDeviceRequest {
                        path: utf8(&path)?,
                        file_bytes: size,
                        force,
                        rebalance_bytes_per_s_max: rate,
                    };
                    runtime.block_on(add_served(&mut daemon, &path, request))
                }
                StoreAccess::Stopped(config) => {
                    let rate = rate.or(config.rebalance_bytes_per_s_max);
                    add_stopped(&config, &path, size, force, rate)
                }
            }
        }
        DeviceCommand::Drain { path, rate, store } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(access(&store))? {
                StoreAccess::Served(mut daemon) => {
                    runtime.block_on(drain_served(&mut daemon, &path, rate))
                }
                StoreAccess::Stopped(config) => {
                    let rate = rate.or(config.rebalance_bytes_per_s_max);
                    drain_stopped(&config, &path, rate)
                }
            }
        }
        DeviceCommand::Measure { path, store } => {
            let path = std::path::absolute(path)?;
            match runtime.block_on(access(&store))? {
                StoreAccess::Served(mut daemon) => {
                    runtime.block_on(measure::served(&mut daemon, &path))
                }
                StoreAccess::Stopped(config) => measure::stopped(&config, &path),
            }
        }
        DeviceCommand::Rate { rate, store } => match runtime.block_on(access(&store))? {
            StoreAccess::Served(mut daemon) => runtime.block_on(limit_served(&mut daemon, rate)),
            StoreAccess::Stopped(config) => bail!(
                "no daemon answers at {}, so no tiles move: `offloadd device drain --rate` and `add --rate` say how fast they are to",
                config.socket.display()
            ),
        },
        DeviceCommand::List { json, store } => {
            let lines = match runtime.block_on(access(&store))? {
                StoreAccess::Served(mut daemon) => {
                    runtime.block_on(list::lines_served(&mut daemon))?
                }
                StoreAccess::Stopped(config) => list::lines_stopped(&config)?,
            };
            match json {
                true => outln!("{}", list::to_json(&lines)),
                false => print!("{}", list::table(&lines)),
            }
            Ok(())
        }
    }
}

/// Through the daemon, if one answers at the settings' socket.
async fn access(store: &WhichStore) -> Result<StoreAccess> {
    let Some(config) = &store.config else {
        return Ok(StoreAccess::Served(Box::new(
            Daemon::connect(&store.socket).await?,
        )));
    };
    let config = Config::read(config)?;
    if !config.socket.exists() {
        return Ok(StoreAccess::Stopped(Box::new(config)));
    }
    // A daemon that was killed leaves its socket: the devices' locks say whether one is there.
    Ok(match Daemon::connect(&config.socket).await {
        Ok(daemon) => StoreAccess::Served(Box::new(daemon)),
        Err(_) => StoreAccess::Stopped(Box::new(config)),
    })
}

fn utf8(path: &Path) -> Result<String> {
    let text = path.to_str().context("a device's path must be UTF-8")?;
    Ok(text.to_owned())
}

async fn add_served(
    daemon: &mut Daemon,
    path: &Path,
    request: proto::AddDeviceRequest,
) -> Result<()> {
    let rate_limiter = at_most(request.rebalance_bytes_per_s_max);
    let asked = daemon.client.add_device(request).await;
    let reply = asked.map_err(|status| refusal(&daemon.socket, &status))?;
    let reply = reply.into_inner();
    say_added(
        path,
        reply.number,
        reply.data_bytes,
        [reply.read_bytes_per_s, reply.write_bytes_per_s],
    );
    outln!(
        "Tiles move to it while jobs run{rate_limiter}; `offloadd device list` shows how far they are."
    );
    Ok(())
}

fn say_added(path: &Path, number: u32, data_bytes: u64, rates: [u64; 2]) {
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
        "{} leave {} while jobs run{}; `offloadd device list` shows how far they are.",
        ApproxBytes(reply.into_inner().left_bytes),
        path.display(),
        at_most(rate)
    );
    say_drained(path);
    Ok(())
}

async fn limit_served(daemon: &mut Daemon, bytes_per_s_max: u64) -> Result<()> {
    let request = proto::LimitMovesRequest { bytes_per_s_max };
    let asked = daemon.client.limit_moves(request).await;
    asked.map_err(|status| refusal(&daemon.socket, &status))?;
    outln!(
        "Tiles move{} from now on; `offloadd device list` shows how far they are.",
        at_most(Some(bytes_per_s_max))
    );
    Ok(())
}

/// ", at most 95.4 MiB a second"; nothing where there is no ceiling.
fn at_most(bytes_per_s_max: Option<u64>) -> String {
    bytes_per_s_max.map_or_else(String::new, |rate| {
        format!(", at most {} a second", ApproxBytes(rate))
    })
}

fn say_drained(path: &Path) {
    outln!(
        "When it is of the store no more, take it from `devices` in the settings: \"{}\"",
        path.display()
    );
}

fn open_stopped(config: &Config) -> Result<Stopped> {
    let stopped = Stopped::open(open_all(config)?)?;
    say_outsiders(&stopped);
    Ok(stopped)
}

/// The same, to change it; if the store's home is to move, it does.
fn open_settled(config: &Config) -> Result<Stopped> {
    let what = "moving the store's catalog and records";
    let mut work = Progress::new(what, Unit::Bytes, Audience::Person);
    let opened = Stopped::open_settled(open_all(config)?, &mut |done, total| {
        work.set(done, total);
    });
    drop(work);
    let (stopped, moved) = opened?;
    say_outsiders(&stopped);
    match moved {
        MetadataMove::NotDue => {}
        MetadataMove::Moved { to, .. } => outln!("the store's catalog and records moved to {to}"),
        MetadataMove::Failed(why) => {
            eprintln!("offloadd: the store's catalog and records cannot move: {why}");
        }
    }
    Ok(stopped)
}

fn say_outsiders(stopped: &Stopped) {
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
    // An add that was cut off may be listed already: what is not of the store yet is opened below.
    let mut config = config.clone();
    let begun = cut_off(&config, path);
    if begun {
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
        Ok(Reply::AddDevice { number }) => say_added(
            path,
            number,
            data_bytes,
            [rates.read_bytes_per_s, rates.write_bytes_per_s],
        ),
        Ok(other) => unreachable!("the core answered another call: {other:?}"),
        Err(fault) => {
            // With its locks: whether the store opens without the new file is to be seen.
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

/// A file that root made belongs to whom the store's other files belong to: his daemon could not open it otherwise.
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

/// Whether the settings list a device that is not of the store yet, as after an add that was cut off.
fn cut_off(config: &Config, path: &Path) -> bool {
    let listed = config.devices.iter().any(|device| device == path);
    if !listed || !path.exists() {
        return listed;
    }
    let others = config.devices.iter().filter(|device| *device != path);
    let others: Vec<PathBuf> = others.cloned().collect();
    !others.is_empty()
        && StoreDevices::open(&others).is_ok_and(|opened| {
            let of_store = opened
                .unlisted
                .iter()
                .any(|one| Path::new(one.path()) == path);
            !of_store && recover::identify(&mut DeviceBlocks(&opened.devices)).is_ok()
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
        outln!("{name} is of the store no more");
        return Ok(());
    }
    match stopped.drain(&name) {
        Ok(Reply::DrainDevice { left_bytes }) => {
            outln!("{} leave {name}", ApproxBytes(left_bytes));
        }
        Ok(other) => unreachable!("the core answered another call: {other:?}"),
        Err(fault) => bail!("{}", fault.message),
    }
    move_all(&mut stopped, rate)?;
    if !has_left(&stopped, &name) {
        // The home goes in two steps: tiles first, then catalog and records as the store is opened.
        drop(stopped);
        stopped = open_settled(config)?;
        move_all(&mut stopped, rate)?;
    }
    if !has_left(&stopped, &name) {
        let states = stopped.devices().into_iter();
        let mut standings = states.filter(|state| state.path == name);
        let why = standings.find_map(|state| state.status.stuck);
        let why = why.unwrap_or_else(|| "run the same again".into());
        bail!("{name} is not empty yet: {why}");
    }
    outln!("{name} is empty and of the store no more: take it from `devices` in the settings");
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
        eprintln!("offloadd: how far a device is worn could not be kept on it: {error}");
    }
    moved.map_err(|fault| anyhow!("{}", fault.message))
}
