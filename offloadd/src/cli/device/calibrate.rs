//! `offloadd device calibrate`: measures the rates of one device again.

use std::path::Path;

use anyhow::{Result, anyhow};
use offload_api::proto;
use offload_support::outln;
use offloadd::config::Config;
use offloadd::store::format::MeasuredRates;

use super::super::connection::{Daemon, refusal};
use super::{move_all, open_settled, utf8};

pub(super) async fn served(daemon: &mut Daemon, path: &Path) -> Result<()> {
    let request = proto::MeasureDeviceRequest { path: utf8(path)? };
    let asked = daemon.client.measure_device(request).await;
    let reply = asked.map_err(|status| refusal(&daemon.socket, &status))?;
    let reply = reply.into_inner();
    say(
        path,
        [
            reply.read_bytes_per_s_before,
            reply.write_bytes_per_s_before,
        ],
        [reply.read_bytes_per_s, reply.write_bytes_per_s],
    );
    if reply.busy {
        outln!(
            "The device was busy with jobs or moving tiles, so it may be faster than this; calibrate it again when it is idle."
        );
    }
    outln!(
        "New jobs are placed by these rates, and tiles of existing jobs move to match; `offloadd device list` shows the progress."
    );
    Ok(())
}

fn say(path: &Path, before: [u64; 2], now: [u64; 2]) {
    let text = |[read, write]: [u64; 2]| match read.min(write) {
        0 => "not measured".to_owned(),
        _ => format!(
            "reads {:.2} GB/s, writes {:.2} GB/s",
            read as f64 / 1e9,
            write as f64 / 1e9
        ),
    };
    outln!("{}", path.display());
    outln!("  before  {}", text(before));
    outln!("  now     {}", text(now));
}

pub(super) fn stopped(config: &Config, path: &Path) -> Result<()> {
    let mut stopped = open_settled(config)?;
    let measured = stopped.measure(&utf8(path)?, config.engine);
    let (before, now) = measured.map_err(|fault| anyhow!("{}", fault.message))?;
    let pair = |rates: MeasuredRates| [rates.read_bytes_per_s, rates.write_bytes_per_s];
    say(path, pair(before), pair(now));
    move_all(&mut stopped, config.rebalance_bytes_per_s_max)
}
