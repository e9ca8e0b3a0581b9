//! The extension module `offloadd._offloadd`: one object that moves units between a PyTorch program's memory and tiles.
//!
//! Python passes numbers and addresses, Rust never calls Python, and no call holds the interpreter's lock while it waits.
//!
//! ```text
//!   offloadd (Python)                 _offloadd (this crate)                  swapper
//!   hooks, order, gradients  ──────▶  Core: plan, copies, updates  ────────▶  tiles, commits
//! ```

mod memory;
mod open;
mod update;

use std::sync::{Mutex, MutexGuard};

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use swapper::private::PrivateDaemon;
use swapper::{Op, StepProgram, Swapper, SwapperError, UninitTile};

use crate::open::{Format, ParamPlan, Plan, open};
use crate::update::StepHyper;

create_exception!(_offloadd, Error, PyException, "offloadd cannot go on.");
create_exception!(
    _offloadd,
    Damaged,
    Error,
    "A stored tile came back with other bytes."
);
create_exception!(
    _offloadd,
    DeviceFailed,
    Error,
    "A device could not read, write or commit."
);
create_exception!(
    _offloadd,
    LayoutChanged,
    Error,
    "The run was begun with other parameters."
);

fn failed(error: SwapperError) -> PyErr {
    let text = error.to_string();
    match error {
        SwapperError::Tile {
            source: swapper::TileError::Damaged { .. },
            ..
        } => Damaged::new_err(text),
        SwapperError::Tile { .. } | SwapperError::Stalled { .. } => DeviceFailed::new_err(text),
        SwapperError::LayoutChanged { .. } => LayoutChanged::new_err(text),
        _ => Error::new_err(text),
    }
}

/// A run's tiles, and the daemon that has them where it is this run's own.
struct Held {
    swapper: Swapper<StepHyper>,
    plan: Plan,
    formats: Vec<Format>,
    step: u64,
    _daemon: Option<PrivateDaemon>,
}

impl Held {
    /// Passes each tile of `unit` to `write`, with its parameters from a unit that lies at `address`.
    fn write(
        &mut self,
        unit: usize,
        address: usize,
        mut write: impl FnMut(&[u8], &mut UninitTile<'_>),
    ) -> Result<(), SwapperError> {
        let param_bytes = self.formats[unit].param_bytes;
        self.swapper.fill(unit, |tiles: &mut [UninitTile<'_>]| {
            for tile in tiles {
                write(
                    memory::elements(address, &tile.range.elems, param_bytes),
                    tile,
                );
            }
            Ok(())
        })
    }
}

/// What Python holds. Every call takes the lock, so calls from several threads come one after the other.
#[pyclass(frozen)]
struct Core {
    held: Mutex<Option<Held>>,
    #[pyo3(get)]
    engine: String,
    #[pyo3(get)]
    host_bytes: u64,
    #[pyo3(get)]
    device_bytes: u64,
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Runs `call` without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl Send + FnOnce(&mut Held) -> Result<T, SwapperError>,
    ) -> PyResult<T> {
        py.detach(|| match self.lock().as_mut() {
            Some(held) => call(held).map_err(failed),
            None => Err(Error::new_err("the run is closed")),
        })
    }
}

fn program(ops: &[(bool, usize)]) -> Result<StepProgram, SwapperError> {
    let op = |&(scatter, unit): &(bool, usize)| match scatter {
        true => Op::Scatter { unit },
        false => Op::Gather { unit },
    };
    StepProgram::new(ops.iter().map(op).collect())
}

#[pymethods]
impl Core {
    /// Opens the run that the JSON text `plan` describes. Returns it with the blob of its last committed step, or None for a
    /// new run, which `initialize` must follow.
    #[staticmethod]
    fn open(py: Python<'_>, plan: &str) -> PyResult<(Self, Option<Py<PyBytes>>)> {
        let plan: Plan = serde_json::from_str(plan).map_err(|e| Error::new_err(e.to_string()))?;
        let (held, opened) = py.detach(|| open(plan))?;
        let blob = opened.resumed.map(|blob| PyBytes::new(py, &blob).unbind());
        let core = Self {
            engine: opened.engine,
            host_bytes: opened.memory.host_bytes(),
            device_bytes: opened.memory.table_bytes,
            held: Mutex::new(Some(held)),
        };
        Ok((core, blob))
    }

    /// Begins to give every unit its first content: `fill` of each in order must follow, then `end_fill`, which commits with
    /// `blob`.
    fn begin_fill(&self, py: Python<'_>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |held| held.swapper.begin_fill(blob))
    }

    /// Applies pending updates, commits, and begins to give trained `units` other parameters: `rewrite` of each in this order
    /// must follow, then `end_fill`, which commits all of them at once with `blob`.
    fn begin_rewrite(&self, py: Python<'_>, units: Vec<usize>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |held| held.swapper.begin_rewrite(&units, blob))
    }

    /// Writes `unit`'s parameters, which lie at `address`, to its tiles.
    fn fill(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |held| {
            let format = held.formats[unit];
            held.write(unit, address, |from, tile| {
                update::init(&format, from, tile)
            })
        })
    }

    /// Writes some of `unit`'s parameters, which lie at `address`, to its tiles. The others and all moments stay.
    fn rewrite(
        &self,
        py: Python<'_>,
        unit: usize,
        address: usize,
        params: Vec<usize>,
    ) -> PyResult<()> {
        self.with(py, |held| {
            let format = held.formats[unit];
            let all = &held.plan.units[unit].params;
            let whole = |&index: &usize| {
                let ParamPlan { offset, elems } = all[index];
                (offset..offset + elems, index)
            };
            let params: Vec<_> = params.iter().map(whole).collect();
            held.write(unit, address, |from, tile| {
                update::rewrite(&format, &params, from, tile);
            })
        })
    }

    /// Commits what `begin_fill` or `begin_rewrite` began.
    fn end_fill(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |held| held.swapper.end_fill())
    }

    /// Begins a step: gradients of one that was not finished are dropped.
    fn begin_step(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |held| held.swapper.begin_step(StepProgram::default()))
    }

    /// Announces what comes next, as (whether gradients come, unit); gradients of the present step stay.
    fn announce(&self, py: Python<'_>, ops: Vec<(bool, usize)>) -> PyResult<()> {
        self.with(py, |held| held.swapper.begin_pass(program(&ops)?))
    }

    /// Writes `unit`'s parameters at `address`, all pending updates applied.
    fn gather(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |held| {
            let bytes = held.formats[unit].param_bytes;
            held.swapper.gather(unit, |parts| {
                for (elems, param) in parts {
                    memory::write(address, elems, bytes, param);
                }
                Ok::<(), SwapperError>(())
            })
        })
    }

    /// Takes `unit`'s gradients at `address` and adds them to those of this step. Returns the sum of squares of each
    /// parameter's sum so far.
    fn scatter(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<Vec<f64>> {
        self.with(py, |held| {
            let add = held.swapper.has_gradients(unit);
            let params = &held.plan.units[unit].params;
            let mut squares = vec![0.0; params.len()];
            let format = held.formats[unit];
            let Some(updated) = format.update else {
                return Err(SwapperError::Program {
                    what: format!("unit {unit} is not trained and takes no gradients"),
                });
            };
            held.swapper.scatter(unit, |parts| {
                for (elems, grad) in parts {
                    let from = memory::elements(address, elems, format.param_bytes);
                    update::take(&updated, from, grad, add);
                    update::squares(updated.grads, params, elems, grad, &mut squares);
                }
                Ok::<(), SwapperError>(())
            })?;
            Ok(squares)
        })
    }

    /// Ends the step. `groups` are (lr, beta1, beta2, eps, weight_decay); of each parameter in the units' order,
    /// `of_params` has (group, update number from 1 or 0 for no update, factor of the gradient).
    fn finish(
        &self,
        py: Python<'_>,
        groups: Vec<(f64, f64, f64, f64, f64)>,
        of_params: Vec<(usize, u64, f64)>,
    ) -> PyResult<()> {
        self.with(py, |held| {
            held.step += 1;
            let hyper = StepHyper::new(&groups, &of_params);
            held.swapper.finish_unsealed(Some(hyper)).map(drop)
        })
    }

    /// Ends the step without an update: its gradients are dropped.
    fn skip(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |held| held.swapper.finish_unsealed(None).map(drop))
    }

    /// Brings what is committed with the step that ended.
    fn seal(&self, py: Python<'_>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |held| held.swapper.seal(blob))
    }

    /// Applies pending updates and commits.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |held| held.swapper.drain())
    }

    /// Ends in order; what was not drained is lost. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| match self.lock().take() {
            Some(held) => held.swapper.close().map_err(failed),
            None => Ok(()),
        })
    }
}

#[pymodule]
fn _offloadd(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add_class::<Core>()?;
    module.add("Error", py.get_type::<Error>())?;
    module.add("Damaged", py.get_type::<Damaged>())?;
    module.add("DeviceFailed", py.get_type::<DeviceFailed>())?;
    module.add("LayoutChanged", py.get_type::<LayoutChanged>())?;
    Ok(())
}
