//! `offloadd device calibrate`: measures the rates of one device again, while no daemon serves its store.

use std::path::Path;

use anyhow::{Result, bail};
use offload_support::outln;
use offloadd::calibrate::{Calibration, calibrate};
use offloadd::config::Config;
use offloadd::store::superblock::MeasuredRates;

use super::super::connection::Daemon;
use super::super::open_all;
use super::utf8;

pub(super) fn served(daemon: &Daemon) -> Result<()> {
    bail!(
        "the daemon at {} serves this store, and measuring needs the device to itself: stop the jobs and the daemon (`systemctl stop offloadd`), \
         run this command again with --config, and start the daemon",
        daemon.socket.display()
    );
}

pub(super) fn unserved(config: &Config, path: &Path) -> Result<()> {
    let devices = open_all(config)?;
    let Calibration { before, now } = calibrate(&devices, &utf8(path)?, config.engine)?;
    outln!("{}", path.display());
    outln!("  before  {}", text(before));
    outln!("  now     {}", text(now));
    outln!(
        "New jobs are placed by these rates. Tiles of existing jobs move to match when the daemon is started; `offloadd device list` shows the progress."
    );
    Ok(())
}

fn text(rates: MeasuredRates) -> String {
    let MeasuredRates {
        read_bytes_per_s: read,
        write_bytes_per_s: write,
    } = rates;
    match read.min(write) {
        0 => "not measured".to_owned(),
        _ => format!(
            "reads {:.2} GB/s, writes {:.2} GB/s",
            read as f64 / 1e9,
            write as f64 / 1e9
        ),
    }
}
