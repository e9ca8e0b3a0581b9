//! Reports damaged tiles to the daemon. This side finds the damage; administrators read the daemon's log and metrics.

use std::path::PathBuf;
use std::time::Duration;

use offload_api::ids::DeviceIndex;
use offload_api::proto;

use super::Session;
use crate::control::{Control, SHORT_WAIT};
use crate::types::DeviceInfo;
use crate::{Done, TileError, convert};

/// Maximum number of reports of one session. More reports of a failed drive add no information.
const REPORTS_MAX: u32 = 16;

/// How long to wait for the daemon to receive a report. A process usually ends after a damaged tile, so the report must be delivered before; the
/// daemon answers within microseconds.
const ANSWER_WAIT: Duration = Duration::from_millis(500);

/// Returns the path of a device. A device that was added after the session opened is asked for. After the daemon left a
/// question unanswered, it is not asked again, or every failed tile would wait.
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
        match asking.poll_for(ANSWER_WAIT) {
            Some(Ok(reply)) => *known = reply.devices.into_iter().map(convert::device).collect(),
            Some(Err(_)) => {}
            None => *unheard = true,
        }
    }
    known.get(index).map_or_else(
        || format!("device {index} of the store (offloadd gave no path)").into(),
        |device| device.path.clone(),
    )
}

impl Session {
    /// Asks the daemon for devices that hang or whose file was deleted. Returns one line each; none when the daemon does not
    /// answer.
    pub fn device_trouble(&self) -> Vec<String> {
        let asking = (self.control).begin("Metrics", SHORT_WAIT, |mut client| async move {
            client.metrics(proto::MetricsRequest {}).await
        });
        let Some(Ok(reply)) = asking.poll_for(ANSWER_WAIT) else {
            return Vec::new();
        };
        let troubled = reply.devices.into_iter().filter_map(|view| {
            let (device, trouble) = (view.device?, view.trouble?);
            Some(format!("device {}: {trouble}", device.path))
        });
        troubled.collect()
    }

    /// Reports a damaged tile to the daemon. Nothing depends on the daemon receiving the report.
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
        let _ = telling.poll_for(ANSWER_WAIT);
    }
}
