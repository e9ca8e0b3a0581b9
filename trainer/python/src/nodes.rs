//! Several nodes: where each one's part of a run is, the messages that commits need between them, and the process group through
//! which they copy checkpoints.
//!
//! ```text
//!   swapper's thread ── exchange ──▶ Mailbox ◀── next, answer ── a Python thread ◀──▶ torch.distributed's store
//! ```
//!
//! Rust never calls Python for commits, and both threads wait without the interpreter's lock. Copying calls Python for each part of
//! at most 4 MiB.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use training_state::ranks::{self, Group, GroupError};
use training_state::run::{node_dir, node_job};

use crate::errors::Error;

/// The first rank of each node, from every rank's number on its node and number of ranks there.
#[pyfunction]
pub(crate) fn first_ranks(local_numbers: Vec<[u64; 2]>) -> PyResult<Vec<u32>> {
    ranks::first_ranks(&local_numbers).map_err(|error| Error::new_err(error.to_string()))
}

/// The directory of a node of the run in `run_dir`, and the name of its job; `job` is the first node's.
#[pyfunction]
pub(crate) fn node_part(run_dir: PathBuf, job: &str, node: u32) -> (PathBuf, String) {
    (node_dir(&run_dir, node), node_job(job, node))
}

/// The first ranks of the nodes. A function of Python's gathers for them.
pub(crate) struct FirstRanks {
    node: u32,
    count: u32,
    gather: Py<PyAny>,
}

impl FirstRanks {
    /// Node number `node` of `count`. `gather` takes bytes and returns those of every node, in a list.
    pub(crate) fn new(node: u32, count: u32, gather: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self {
            node,
            count,
            gather,
        })
    }

    /// The exception that `gather` raised.
    pub(crate) fn exception(error: GroupError) -> PyErr {
        let raised = error.0.downcast::<PyErr>();
        raised.map_or_else(|error| Error::new_err(error.to_string()), |raised| *raised)
    }
}

impl Group for FirstRanks {
    fn rank(&self) -> u32 {
        self.node
    }

    fn ranks(&self) -> u32 {
        self.count
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let all = Python::attach(|py| {
            let all = self.gather.call1(py, (PyBytes::new(py, own),))?;
            let all = all.extract::<Vec<PyBackedBytes>>(py)?;
            Ok(all.iter().map(|bytes| bytes.to_vec()).collect())
        });
        all.map_err(|error: PyErr| GroupError(Box::new(error)))
    }
}

/// Holds one message to the other ranks, and their answers.
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    own: Option<Vec<u8>>,
    told: Option<Vec<Vec<u8>>>,
    /// Why no message can be exchanged any more.
    failed: Option<String>,
    /// Why this rank's swapper has failed.
    given_up: Option<String>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }

    /// Changes the state once `found` returns something or the exchange has failed.
    fn wait<T>(&self, mut found: impl FnMut(&mut State) -> Option<T>) -> Result<T, String> {
        let mut state = self.lock();
        loop {
            if let Some(why) = &state.failed {
                return Err(why.clone());
            }
            if let Some(found) = found(&mut state) {
                return Ok(found);
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(|p| p.into_inner());
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

impl swapper::Exchange for Mailbox {
    fn exchange(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Box<dyn StdError + Send + Sync>> {
        self.change(|state| state.own = Some(own.to_vec()));
        Ok(self.wait(|state| state.told.take())?)
    }

    fn give_up(&self, reason: &str) {
        // After the exchange has failed, it is the reason.
        self.change(|state| {
            if state.failed.is_none() {
                state.given_up = Some(reason.to_owned());
            }
        });
    }
}

/// The messages that the nodes of a run exchange for their commits, one after the other.
#[pyclass(frozen)]
pub(crate) struct Exchange(Arc<Mailbox>);

impl Exchange {
    pub(crate) fn mailbox(&self) -> Arc<Mailbox> {
        self.0.clone()
    }
}

#[pymethods]
impl Exchange {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// Waits for this rank's next message to all ranks; None after `fail`.
    fn next(&self, py: Python<'_>) -> Option<Py<PyBytes>> {
        let own = py.detach(|| self.0.wait(|state| state.own.take()));
        own.ok().map(|own| PyBytes::new(py, &own).unbind())
    }

    /// Hands over the messages of all ranks, in their order.
    fn answer(&self, told: Vec<Vec<u8>>) {
        self.0.change(|state| state.told = Some(told));
    }

    /// Ends the exchange: whoever waits for it fails with `why`.
    fn fail(&self, why: String) {
        self.0.change(|state| {
            state.failed.get_or_insert(why);
        });
    }

    /// Why this rank's part of the run has failed, if it has.
    #[getter]
    fn given_up(&self) -> Option<String> {
        self.0.lock().given_up.clone()
    }
}
