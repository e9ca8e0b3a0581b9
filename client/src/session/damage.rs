//! Tells the daemon of a tile that is not what was written: this side finds it, and who looks after the drives reads the
//! daemon's log and counts.

use std::path::PathBuf;
use std::time::Duration;

use offload_api::ids::DeviceIndex;
use offload_api::proto;

use super::Session;
use crate::control::{Control, SHORT_WAIT};
use crate::types::DeviceInfo;
use crate::{Done, TileError, convert};

/// Told of one session: more of a failed drive say nothing new.
const REPORTS_MAX: u32 = 16;

/// A process mostly ends over a damaged tile, so its word must be out before. The daemon answers within microseconds.
const HEARD_WAIT: Duration = Duration::from_millis(500);

/// What people call a device. One that came to the store after the session opened is asked for once; a daemon that leaves that
/// without an answer is not asked again, or each tile that fails on it would wait. An error is an answer, and comes at once.
pub(super) fn name_of(
    device: DeviceIndex,
    known: &mut Vec<DeviceInfo>,
    unheard: &mut bool,
    control: &Control,
) -> PathBuf {
    let index = device.0 as usize;
    if index >= known.len() && !*unheard {
        let asking = control.begin("Describe", SHORT_WAIT, |mut client| async move {
            client.describe(proto::DescribeRequest {}).await
        });
        match asking.poll_for(HEARD_WAIT) {
            Some(Ok(reply)) => *known = reply.devices.into_iter().map(convert::device).collect(),
            Some(Err(_)) => {}
            None => *unheard = true,
        }
    }
    known.get(index).map_or_else(
        || format!("device {index} of the store (offloadd did not say which)").into(),
        |device| device.path.clone(),
    )
}

impl Session {
    /// What the daemon says of devices that hang or whose file was deleted, with their paths. Empty when it does not answer.
    pub fn device_trouble(&self) -> Vec<String> {
        let asking = (self.control).begin("Metrics", SHORT_WAIT, |mut client| async move {
            client.metrics(proto::MetricsRequest {}).await
        });
        let Some(Ok(reply)) = asking.poll_for(HEARD_WAIT) else {
            return Vec::new();
        };
        let troubled = reply.devices.into_iter().filter_map(|view| {
            let (device, trouble) = (view.device?, view.trouble?);
            Some(format!("device {}: {trouble}", device.path))
        });
        troubled.collect()
    }

    /// Nothing depends on whether it is heard.
    pub(super) fn report_damage(&mut self, done: &Done, device: DeviceIndex) {
        let Err(TileError::Damaged {
            offset,
            tile,
            generation,
            expected,
            found,
            ..
        }) = &done.result
        else {
            return;
        };
        if self.reported_count == REPORTS_MAX {
            return;
        }
        self.reported_count += 1;
        let request = proto::ReportDamageRequest {
            token: self.token.clone(),
            device: device.0,
            offset: *offset,
            tile: tile.0,
            generation: generation.0,
            expected: *expected,
            found: *found,
        };
        let telling = (self.control).begin("ReportDamage", SHORT_WAIT, |mut client| async move {
            client.report_damage(request).await
        });
        let _ = telling.poll_for(HEARD_WAIT);
    }
}
