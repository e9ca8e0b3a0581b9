//! An incarnation in which nothing is written: the store could not be made ready for more, because a device takes no writes.
//!
//! What is committed can be read. Whatever would write is refused with the device's name; nothing that a daemon before or after
//! this one relies on changes, so that sessions which one of them handed over still go on.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;

use super::Admin;
use crate::blocks::BlockError;
use crate::core::data::Data;

impl Admin {
    /// Refuses every write from now on: `error` says why.
    pub(in crate::core) fn begin_reading(&mut self, error: &BlockError, data: &mut Data) {
        assert!(self.catalog.is_idle(), "before anybody has come");
        let fault = Fault::new(
            FaultKind::Poisoned,
            format!(
                "the store is read-only since offloadd was started, because a device did not take what a start writes ({error}): repair or replace the device and start offloadd again"
            ),
        );
        self.catalog.refuse_all(fault.clone());
        data.begin_read_only(fault.clone());
        self.read_only = Some(fault);
    }

    /// Why nothing is written in this incarnation.
    pub(in crate::core) fn read_only(&self) -> Option<&Fault> {
        self.read_only.as_ref()
    }

    /// Said of one device for all.
    pub(super) fn only_read(&self, device: DeviceIndex) -> Option<String> {
        let why = self.read_only.as_ref().filter(|_| device == self.home);
        why.map(|fault| fault.message.clone())
    }

    pub(super) fn check_writing(&self) -> Result<(), Fault> {
        self.read_only.clone().map_or(Ok(()), Err)
    }
}
