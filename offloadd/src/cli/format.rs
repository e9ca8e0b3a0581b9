//! `offloadd format`: reserves space, measures all devices, and writes an empty store to them.

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use offload_support::outln;
use offload_support::units::ApproxBytes;
use offloadd::config::Config;
use offloadd::device::{Device, DeviceBlocks};
use offloadd::engine::EngineChoice;
use offloadd::measure::{MeasureError, measure_blank};
use offloadd::metrics::MovedBeside;
use offloadd::store;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;

use super::follow_parent;
use offload_support::progress::{Audience, Progress, Unit};

pub(crate) fn run(
    config: Option<PathBuf>,
    named: Vec<PathBuf>,
    file_bytes: Option<u64>,
    force: bool,
    private: bool,
) -> Result<()> {
    if private {
        // A format that is killed halfway is repeated by the next one.
        follow_parent()?;
    }
    let (paths, engine) = match config {
        Some(path) => {
            let config = Config::read(&path)?;
            (config.devices, config.engine)
        }
        None => (named, EngineChoice::Auto),
    };
    // The store records the paths, so they must be absolute.
    let paths = paths
        .iter()
        .map(|path| std::path::absolute(path).with_context(|| path.display().to_string()))
        .collect::<Result<Vec<_>>>()?;
    if let Some(twice) = paths
        .iter()
        .enumerate()
        .find(|(index, path)| paths[..*index].contains(path))
    {
        bail!("device {} is given twice", twice.1.display());
    }
    // Before any file is created or truncated.
    if let Some(bytes) = file_bytes {
        let raw = |path: &PathBuf| {
            std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
        };
        let files = paths.iter().filter(|path| !raw(path));
        for path in files {
            store::format::check_size(&path.display().to_string(), bytes)?;
        }
    }
    let new: Vec<_> = paths.iter().filter(|path| !path.exists()).collect();
    let made = make_store(&paths, file_bytes, force, engine);
    if made.is_err() {
        // Remove new files if the store could not be created on all devices.
        for path in new {
            let _ = std::fs::remove_file(path);
        }
    }
    made
}

fn make_store(
    paths: &[PathBuf],
    file_bytes: Option<u64>,
    force: bool,
    engine: EngineChoice,
) -> Result<()> {
    let devices = paths
        .iter()
        .map(|path| {
            let what = format!("filling {}", path.display());
            let mut work = Progress::new(what, Unit::Bytes, Audience::Person);
            Device::create_watched(path, file_bytes, force, &mut |done, total| {
                work.set(done, total);
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    store::format::check(&mut DeviceBlocks(&devices), force)?;
    if !force {
        devices.iter().try_for_each(Device::check_blank)?;
    }
    for device in &devices {
        for risk in device.risks() {
            eprintln!("offloadd: {}: {}", device.path(), risk.what);
        }
    }
    let rates = measure_together(&devices, engine)?;
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .context("drawing random bytes for the store's ID")?;
    let created_unix_s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let superblocks = store::format::format(
        &mut DeviceBlocks(&devices),
        StoreId(id),
        &rates,
        created_unix_s,
        force,
    )?;
    outln!("store {}", StoreId(id));
    outln!(
        "{:>6}  {:>12}  {:>10}  {:>10}  path",
        "device",
        "data",
        "read",
        "write"
    );
    for (device, superblock) in devices.iter().zip(superblocks) {
        outln!(
            "{:>6}  {:>12}  {:>5.2} GB/s  {:>5.2} GB/s  {}",
            superblock.number,
            ApproxBytes(superblock.data_bytes),
            superblock.read_bytes_per_s as f64 / 1e9,
            superblock.write_bytes_per_s as f64 / 1e9,
            device.path()
        );
    }
    Ok(())
}

/// Measures all devices at once: they are used together, and it takes two seconds for any number of them.
fn measure_together(
    devices: &[Device],
    engine: EngineChoice,
) -> Result<Vec<MeasuredRates>, MeasureError> {
    std::thread::scope(|scope| {
        let measuring: Vec<_> = devices
            .iter()
            .map(|device| {
                scope.spawn(move || measure_blank(device, engine, &mut MovedBeside::default()))
            })
            .collect();
        let results = measuring
            .into_iter()
            .map(|one| one.join().expect("measuring does not panic"));
        results.collect()
    })
}
