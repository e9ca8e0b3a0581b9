//! `offloadd device list`: the devices of a store as a table or as JSON.

use std::time::Duration;

use anyhow::Result;
use offload_api::ids::Epoch;
use offload_support::units::ApproxBytes;
use offloadd::config::Config;
use offloadd::core::{Core, DeviceState};
use offloadd::device::DeviceBlocks;
use offloadd::store::catalog::Phase;
use offloadd::store::recover;
use serde_json::{Value, json};

use super::at_most;
use crate::cli::connection::Daemon;
use crate::cli::open_all;

/// Time between the two snapshots that give the rate of moving tiles.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct DeviceLine {
    state: DeviceState,
    /// A problem that needs an administrator.
    trouble: Option<String>,
    /// Rate at which tiles move; `None` if not measured.
    moving_bytes_per_s: Option<u64>,
    /// Limit of that rate.
    rebalance_bytes_per_s_max: Option<u64>,
}

impl DeviceLine {
    fn time_left(&self) -> Option<Duration> {
        // With a limit, tiles may move in one batch every few seconds, so a single interval can show too high a rate.
        let rates = [self.moving_bytes_per_s, self.rebalance_bytes_per_s_max];
        let rate = rates.into_iter().flatten().filter(|rate| *rate > 0).min()?;
        Some(Duration::from_secs(self.state.status.left_bytes / rate))
    }
}

pub(super) async fn lines_served(daemon: &mut Daemon) -> Result<Vec<DeviceLine>> {
    let mut before = daemon.snapshot().await?;
    let settled = |d: &DeviceState| matches!(d.status.phase, None | Some(Phase::Settled));
    let moving = before.devices.iter().any(|view| !settled(&view.state));
    let mut now = before.clone();
    if moving {
        (before, now) = daemon.two_snapshots(INTERVAL).await?;
    }
    let seconds = now.uptime.saturating_sub(before.uptime).as_secs_f64();
    let limit = now.rebalance_bytes_per_s_max;
    let lines = now.devices.into_iter().enumerate();
    let lines = lines.map(|(index, view)| {
        let earlier = (before.devices.get(index)).map(|d| d.state.status.left_bytes);
        let moved_bytes = earlier.map(|left| left.saturating_sub(view.state.status.left_bytes));
        DeviceLine {
            moving_bytes_per_s: moved_bytes
                .filter(|_| seconds > 0.0)
                .map(|bytes| (bytes as f64 / seconds) as u64),
            rebalance_bytes_per_s_max: limit.filter(|_| !settled(&view.state)),
            trouble: view.trouble,
            state: view.state,
        }
    });
    let lines = lines.filter(|line| line.state.status.phase.is_some());
    Ok(lines.collect())
}

/// Reads the devices of a store that no daemon serves.
pub(super) fn lines_unserved(config: &Config) -> Result<Vec<DeviceLine>> {
    let opened = open_all(config)?;
    let store = recover::read(&mut DeviceBlocks(&opened))?;
    for foreign_device in &store.foreign_devices {
        eprintln!("offloadd: device {foreign_device}");
    }
    // No session has this epoch.
    let core = Core::new(store, Epoch(1), config.limits());
    let lines = core.device_states().into_iter().map(|state| DeviceLine {
        trouble: None,
        moving_bytes_per_s: None,
        rebalance_bytes_per_s_max: (config.rebalance_bytes_per_s_max)
            .filter(|_| !matches!(state.status.phase, None | Some(Phase::Settled))),
        state,
    });
    Ok(lines.collect())
}

pub(super) fn table(lines: &[DeviceLine]) -> String {
    let mut text = format!(
        "{:>6}  {:<8}  {:>10}  {:>10}  {:>10}  path\n",
        "device", "state", "data", "free", "to move"
    );
    for line in lines {
        let DeviceState {
            path,
            data_bytes,
            free_bytes,
            status,
            ..
        } = &line.state;
        let to_move = match status.left_bytes {
            0 => String::new(),
            left => ApproxBytes(left).to_string(),
        };
        text += &format!(
            "{:>6}  {:<8}  {:>10}  {:>10}  {to_move:>10}  {path}\n",
            status.number,
            status.phase_name(),
            ApproxBytes(*data_bytes),
            ApproxBytes(*free_bytes),
        );
    }
    for line in lines {
        let status = &line.state.status;
        if let Some(left) = line.time_left() {
            text += &format!(
                "device {}: about {} s left{}\n",
                status.number,
                left.as_secs() + 1,
                at_most(line.rebalance_bytes_per_s_max)
            );
        }
        if let Some(trouble) = &line.trouble {
            text += &format!("device {}: {trouble}\n", status.number);
        }
        if let Some(stuck) = &status.stuck {
            text += &format!("device {}: {stuck}\n", status.number);
        }
    }
    text
}

pub(super) fn to_json(lines: &[DeviceLine]) -> Value {
    let devices = lines.iter().map(|line| {
        let DeviceState {
            path,
            data_bytes,
            free_bytes,
            read_bytes_per_s,
            write_bytes_per_s,
            status,
            ..
        } = &line.state;
        json!({
            "device": path,
            "number": status.number,
            "phase": status.phase_name(),
            "data_bytes": data_bytes,
            "free_bytes": free_bytes,
            "read_bytes_per_s": read_bytes_per_s,
            "write_bytes_per_s": write_bytes_per_s,
            "trouble": line.trouble,
            "left_bytes": status.left_bytes,
            "left_s": line.time_left().map(|left| left.as_secs() + 1),
            "rebalance_bytes_per_s_max": line.rebalance_bytes_per_s_max,
            "stuck": status.stuck,
            "waits_for_start": status.waits_for_start,
        })
    });
    json!({ "devices": devices.collect::<Vec<_>>() })
}
