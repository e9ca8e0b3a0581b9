//! Tells the daemon of a tile that is not what was written: this side finds it, and who looks after the drives reads the
//! daemon's log and counts.

use std::time::Duration;

use offload_api::ids::DeviceIndex;
use offload_api::proto;

use super::Session;
use crate::control::SHORT_WAIT;
use crate::{Done, TileError};

/// Told of one session: more of a failed drive say nothing new.
const REPORTS_MAX: u32 = 16;

/// A process mostly ends over a damaged tile, so its word must be out before. The daemon answers within microseconds.
const HEARD_WAIT: Duration = Duration::from_millis(500);

impl Session {
    /// Nothing depends on whether it is heard.
    pub(super) fn report_damage(&mut self, done: &Done) {
        let Err(TileError::Damaged {
            device,
            offset,
            tile,
            generation,
            expected,
            found,
        }) = &done.result
        else {
            return;
        };
        let devices = &self.info.devices;
        let index = devices.iter().position(|known| known.path == *device);
        let Some(index) = index.filter(|_| self.reported_count < REPORTS_MAX) else {
            return;
        };
        self.reported_count += 1;
        let request = proto::ReportDamageRequest {
            token: self.token.clone(),
            device: DeviceIndex(index as u32).0,
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
