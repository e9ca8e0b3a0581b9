//! The Python exceptions, and which of the swapper's errors become which.

use std::sync::{Arc, Mutex};

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use swapper::{ClientError, FaultKind, SwapperError, TO_CHECKPOINT, TileError};
use training_state::store::StoreError;

create_exception!(
    offloadd,
    Error,
    PyException,
    "offloadd cannot continue; the message says why, and what to do."
);
create_exception!(
    offloadd,
    DaemonGone,
    Error,
    "The daemon has ended; committed steps are safe."
);
create_exception!(
    offloadd,
    Damaged,
    Error,
    "A stored tile came back with other bytes."
);
create_exception!(
    offloadd,
    DeviceFailed,
    Error,
    "A device could not read, write or commit."
);
create_exception!(
    offloadd,
    LayoutChanged,
    Error,
    "The run was begun with other parameters."
);
create_exception!(
    offloadd,
    NoSpace,
    Error,
    "A drive has too little free space."
);

create_exception!(
    offloadd,
    RankGone,
    Error,
    "Another rank of the run has ended; committed steps are safe."
);

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("BEGIN_ANEW", BEGIN_ANEW)?;
    module.add("Error", py.get_type::<Error>())?;
    module.add("DaemonGone", py.get_type::<DaemonGone>())?;
    module.add("Damaged", py.get_type::<Damaged>())?;
    module.add("DeviceFailed", py.get_type::<DeviceFailed>())?;
    module.add("LayoutChanged", py.get_type::<LayoutChanged>())?;
    module.add("NoSpace", py.get_type::<NoSpace>())?;
    module.add("RankGone", py.get_type::<RankGone>())
}

/// The way back where the nodes' stores do not belong together.
pub(crate) const BEGIN_ANEW: &str =
    "begin anew on all nodes with resume=False or another run_dir, and load a checkpoint";

/// The exception for an error of the swapper.
#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
pub(crate) fn failed(error: SwapperError) -> PyErr {
    failed_with(&error)
}

/// The exception for an error that others may be told too.
pub(crate) fn failed_with(error: &SwapperError) -> PyErr {
    let text = error.to_string();
    if error.is_of_a_gone_daemon() {
        return DaemonGone::new_err(format!(
            "{text}; start the script again, it resumes after the last committed step"
        ));
    }
    match error.cause() {
        SwapperError::Client { source, .. } => refused(source, text),
        SwapperError::Tile { source, .. } | SwapperError::ScratchTile { source, .. } => {
            match (source.kind(), source) {
                (_, TileError::Damaged { .. }) => Damaged::new_err(text),
                (FaultKind::NoSpace, _) => NoSpace::new_err(text),
                _ => DeviceFailed::new_err(text),
            }
        }
        SwapperError::StagingTooSmall { needed_bytes, .. } => Error::new_err(format!(
            "{text}: set offloadd.staging_bytes = {needed_bytes} or more, or leave it out"
        )),
        SwapperError::Stalled { .. } => DeviceFailed::new_err(text),
        SwapperError::LayoutChanged { .. } => LayoutChanged::new_err(text),
        SwapperError::Cancelled { .. } | SwapperError::OtherNodes { .. } => RankGone::new_err(text),
        SwapperError::Disagreement(_) => Error::new_err(text.replace(TO_CHECKPOINT, BEGIN_ANEW)),
        _ => Error::new_err(text),
    }
}

/// The exception for an error of the client, with its text.
pub(crate) fn refused(error: &ClientError, text: String) -> PyErr {
    match error.fault() {
        Some(FaultKind::NoSpace) => NoSpace::new_err(text),
        Some(FaultKind::LayoutChanged) => LayoutChanged::new_err(text),
        Some(FaultKind::Damaged) => Damaged::new_err(text),
        Some(FaultKind::Io | FaultKind::Short | FaultKind::Poisoned) => DeviceFailed::new_err(text),
        _ => Error::new_err(text),
    }
}

/// The exception for directories that cannot hold the device files.
pub(crate) fn no_store(error: StoreError) -> PyErr {
    let text = error.to_string();
    match error {
        StoreError::TooLittleSpace { .. } => NoSpace::new_err(text),
        _ => Error::new_err(text),
    }
}

/// Lets Python look at signals while a call waits, and keeps what a signal's handler raised.
#[derive(Clone, Default)]
pub(crate) struct Signals(Arc<Mutex<Option<PyErr>>>);

impl Signals {
    /// Whether a handler raised; the call that waits then ends.
    pub(crate) fn raised(&self) -> bool {
        let Err(error) = Python::attach(|py| py.check_signals()) else {
            return false;
        };
        *self.slot() = Some(error);
        true
    }

    /// What the handler raised, for an interrupted call.
    pub(crate) fn exception(&self, error: SwapperError) -> PyErr {
        match (&error, self.slot().take()) {
            (SwapperError::Interrupted, Some(raised)) => raised,
            _ => failed(error),
        }
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<PyErr>> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
