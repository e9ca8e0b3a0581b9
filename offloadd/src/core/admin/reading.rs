//! A read-only incarnation: the store could not be prepared for writes, because a device takes none.
//!
//! What is committed can be read. Every call that would write is refused with the device's name. Nothing on the devices changes, so
//! sessions that an earlier daemon handed over can still be adopted by a later one.

use offload_api::fault::{Fault, FaultKind};

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
                "the store is read-only, because a device failed a write when offloadd was started ({error}): repair or replace the device and start offloadd again"
            ),
        );
        self.catalog.refuse_all(fault.clone());
        data.begin_read_only(fault.clone());
        self.read_only = Some(fault);
    }

    /// Reason why the store is read-only, if it is.
    pub(in crate::core) fn read_only(&self) -> Option<&Fault> {
        self.read_only.as_ref()
    }

    pub(super) fn check_writing(&self) -> Result<(), Fault> {
        self.read_only.clone().map_or(Ok(()), Err)
    }
}
