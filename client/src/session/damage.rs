//! What a process and the daemon tell each other about failures. This side finds damaged tiles and reports them, because administrators read the
//! daemon's log and metrics; the daemon knows the paths of devices, and why a job cannot write any more.

use std::path::PathBuf;
use std::time::Duration;

use offload_api::fault::FaultKind;
use offload_api::ids::DeviceNumber;
use offload_api::proto;

use super::Session;
use crate::control::{Control, SHORT_WAIT};
use crate::error::log_of;
use crate::types::DeviceInfo;
use crate::{EndedOperation, TileError, convert};

/// Maximum number of reports of one session. More reports of a failed drive add no information.
const REPORTS_MAX: u32 = 16;

/// How long to wait for the daemon to receive a report. A process usually ends after a damaged tile, so the report must be delivered before; the
/// daemon answers within microseconds.
const ANSWER_WAIT: Duration = Duration::from_millis(500);

/// Returns the path of a device. A device that was added after the session opened is asked for. After the daemon left a
/// question unanswered, it is not asked again, or every failed tile would wait.
pub(super) fn name_of(
    device: DeviceNumber,
    known: &mut Vec<DeviceInfo>,
    unheard: &mut bool,
    control: &Control,
) -> PathBuf {
    let find = |known: &[DeviceInfo]| {
        let found = known.iter().find(|info| info.number == device);
        found.map(|info| info.path.clone())
    };
    if find(known).is_none() && !*unheard {
        let asking = control.begin("Describe", SHORT_WAIT, |mut client| async move {
            client.describe(proto::DescribeRequest {}).await
        });
        match asking.poll_for(ANSWER_WAIT) {
            Some(Ok(reply)) => *known = reply.devices.into_iter().map(convert::device).collect(),
            Some(Err(_)) => {}
            None => *unheard = true,
        }
    }
    find(known)
        .unwrap_or_else(|| format!("device {device} of the store (offloadd gave no path)").into())
}

impl Session {
    /// Names the daemon's log, for a message.
    pub fn log(&self) -> String {
        log_of(self.control.socket())
    }

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

    /// Puts the reason why the job is unusable into a refusal: a completion has no room for words. The daemon is asked once.
    pub(super) fn explain(&mut self, done: &mut EndedOperation) {
        let Err(TileError::Refused {
            kind: FaultKind::Poisoned,
            why,
            ..
        }) = &mut done.result
        else {
            return;
        };
        let reason = self.unusable.get_or_insert_with(|| {
            let token = self.token.clone();
            let asking = (self.control).begin("Reattach", SHORT_WAIT, |mut client| async move {
                client.reattach(proto::ReattachRequest { token }).await
            });
            match asking.poll_for(ANSWER_WAIT) {
                Some(Ok(reply)) => reply.unusable.map(|fault| fault.message),
                Some(Err(_)) | None => None,
            }
        });
        if let Some(reason) = reason {
            why.clone_from(reason);
        }
    }

    /// Reports a damaged tile to the daemon. Nothing depends on the daemon receiving the report.
    pub(super) fn report_damage(&mut self, done: &EndedOperation, device: DeviceNumber) {
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
