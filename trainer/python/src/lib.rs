//! The extension module `offloadd._offloadd`: one object that moves units between a PyTorch program's memory and tiles.
//!
//! Python passes numbers and addresses, and no call holds the interpreter's lock while it waits. Rust calls Python for two things:
//! to let it look at signals every 100 ms of a wait, so that Ctrl-C ends it, and to exchange parts of files with other nodes.
//!
//! ```text
//!   offloadd (Python)                 _offloadd (this crate)                  swapper
//!   hooks, order, gradients  ──────▶  Core: plan, copies, updates  ────────▶  tiles, commits
//! ```

mod activations;
mod checkpoint;
mod choices;
mod errors;
mod format;
mod fp8;
mod gpu;
mod memory;
mod nodes;
mod open;
mod plan;
mod progress;
mod schedule;
mod settings;
mod update;

use std::num::NonZero;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use kernels::reduce::GradType;
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use swapper::private::PrivateDaemon;
use swapper::{
    ArenaMemory, Canceller, Op, Revision, StepIo, StepProgram, Swapper, SwapperError, UninitTile,
};
use training_state::update::{mix, parts};

use crate::errors::{Error, Signals, failed};
use crate::format::{Format, ParamPlan, UpdateFormat};
use crate::fp8::{Fp8Converter, fp8_refusal};
use crate::gpu::{GpuMover, MoverCell, gpu_name};
use crate::nodes::Exchange;
use crate::open::{Plan, open, start_daemon};
use crate::progress::{Clock, Reporter, Step, StepFacts};
use crate::update::{Directions, StepHyper};

/// A run's tiles, and the daemon that has them where it is this run's own.
struct OpenRun {
    swapper: Swapper<StepHyper>,
    plan: Plan,
    formats: Vec<Format>,
    reporter: Reporter,
    clock: Clock,
    /// What the step that ended last moved.
    io: StepIo,
    /// With Muon, what the present step needs between backward and its updates.
    directions: Option<Directions>,
    /// The memory that tiles pass through, for a GPU to pin.
    arena: Option<ArenaMemory>,
    _daemon: Option<PrivateDaemon>,
}

impl OpenRun {
    /// Passes each tile of `unit` to `write`, with its parameters from a unit that lies at `address`.
    fn write(
        &mut self,
        unit: usize,
        address: usize,
        write: impl Fn(&[u8], &mut UninitTile<'_>) + Sync,
    ) -> Result<(), SwapperError> {
        let param_bytes = self.formats[unit].param_bytes;
        self.swapper.fill(unit, |tiles: &mut [UninitTile<'_>]| {
            // The first content of host memory costs a page fault for every 4 KiB.
            on_all_cores(tiles, |tile| {
                let from = memory::elements(address, &tile.range.elems, param_bytes);
                write(from, tile);
            });
            Ok(())
        })
    }

    /// Passes `unit`'s gradients of this step to `change`, with their type and elements. Returns the sum of squares of each
    /// parameter's gradients in this rank's tiles.
    fn gradients(
        &mut self,
        unit: usize,
        mut change: impl FnMut(GradType, &Range<u64>, &mut [u8]),
    ) -> Result<Vec<f64>, SwapperError> {
        let Some(UpdateFormat { grads, .. }) = self.formats[unit].update else {
            return Err(SwapperError::Program {
                what: format!("unit {unit} is not trained and takes no gradients"),
            });
        };
        let params = &self.plan.units[unit].params;
        let mut squares = vec![0.0; params.len()];
        self.swapper.scatter(unit, |parts| {
            for (elems, sum) in parts {
                change(grads, elems, sum);
                update::squares(grads, params, elems, sum, &mut squares);
            }
            Ok::<(), SwapperError>(())
        })?;
        Ok(squares)
    }

    /// Updates the momenta of `unit`, and passes what is to be made orthogonal, which is in its gradients' place then, to `take`: all tiles that are
    /// in slots at a time.
    fn revise<E: From<SwapperError>>(
        &mut self,
        unit: usize,
        mut take: impl FnMut(&mut [Revision<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (Some(UpdateFormat { format, grads }), Some(directions)) =
            (self.formats[unit].update, &mut self.directions)
        else {
            let what = format!("unit {unit} is revised in no step of Muon");
            return Err(SwapperError::Program { what }.into());
        };
        let before = self.plan.units[..unit].iter();
        let first = before.map(|unit| unit.params.len()).sum();
        let steps = directions.of_unit(&self.plan.units[unit].params, first);
        directions.left.retain(|&one| one != unit);
        self.swapper.revise(unit, |tiles| {
            on_all_cores(tiles, |tile| {
                let elems = tile.range.elems.clone();
                let steps = parts(&elems, &steps).map(|(elems, step)| (elems, *step));
                mix(format, grads, tile, steps);
            });
            take(tiles)
        })
    }

    /// The elements of some of `unit`'s parameters, by their numbers within it.
    fn whole_params(&self, unit: usize, params: &[usize]) -> Vec<(Range<u64>, usize)> {
        let all = &self.plan.units[unit].params;
        let whole = |&index: &usize| {
            let ParamPlan { offset, elems } = all[index];
            (offset..offset + elems, index)
        };
        params.iter().map(whole).collect()
    }
}

/// Calls `work` with each of `tiles`, on every core for some of them.
fn on_all_cores<T: Send>(tiles: &mut [T], work: impl Fn(&mut T) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let (first, rest) = tiles.split_at_mut(tiles.len().div_ceil(cores));
    // Threads of their own: a pool would be lost to a process that forks.
    std::thread::scope(|scope| {
        for tiles in rest.chunks_mut(first.len().max(1)) {
            scope.spawn(|| tiles.iter_mut().for_each(&work));
        }
        first.iter_mut().for_each(&work);
    });
}

/// The state (JSON) that was saved with the checkpoint in `dir`.
#[pyfunction]
fn checkpoint_state(dir: PathBuf) -> PyResult<String> {
    checkpoint::read_state(&dir).map(|state| state.to_string())
}

/// The daemon of a run's own device files, until `Core.open` takes it.
#[pyclass(frozen)]
struct Daemon {
    daemon: Mutex<Option<PrivateDaemon>>,
    /// Where it listens.
    #[pyo3(get)]
    socket: PathBuf,
}

#[pymethods]
impl Daemon {
    /// Starts the daemon of the run that the JSON text `plan` describes; None where the run has no device files of its own.
    #[staticmethod]
    fn start(py: Python<'_>, plan: &str) -> PyResult<Option<Self>> {
        let plan: Plan = serde_json::from_str(plan).map_err(|e| Error::new_err(e.to_string()))?;
        if plan.socket.is_some() || plan.nvme.is_empty() {
            return Ok(None);
        }
        let daemon = py.detach(|| start_daemon(&plan))?;
        Ok(Some(Self {
            socket: daemon.socket().to_owned(),
            daemon: Mutex::new(Some(daemon)),
        }))
    }
}

/// What Python holds. Every call takes the lock, so calls from several threads come one after the other.
#[pyclass(frozen)]
struct Core {
    run: Arc<Mutex<Option<OpenRun>>>,
    /// Set while a GPU computes; other calls wait until its jobs have ended.
    mover: MoverCell,
    /// The process that opened the run. A fork of it shares the daemon's memory and has none of the threads.
    process: u32,
    signals: Signals,
    canceller: Canceller,
    #[pyo3(get)]
    engine: String,
    #[pyo3(get)]
    host_bytes: u64,
    #[pyo3(get)]
    device_bytes: u64,
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Option<OpenRun>> {
        self.run
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Runs `call` without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl Send + FnOnce(&mut OpenRun) -> Result<T, SwapperError>,
    ) -> PyResult<T> {
        self.with_any(py, |run| {
            call(run).map_err(|error| self.signals.exception(error))
        })
    }

    /// As `with`, for calls that fail otherwise too.
    fn with_any<T: Send>(
        &self,
        py: Python<'_>,
        call: impl Send + FnOnce(&mut OpenRun) -> PyResult<T>,
    ) -> PyResult<T> {
        if self.is_forked() {
            return Err(Error::new_err(
                "this process is a fork of the one that opened the run, and cannot use it: read parameters before the fork",
            ));
        }
        if let Some(mover) = self.mover.get() {
            mover.settle(py)?;
        }
        py.detach(|| match self.lock().as_mut() {
            Some(run) => {
                let began = Instant::now();
                let result = call(run);
                run.clock.called(began.elapsed());
                result
            }
            None => Err(Error::new_err("the run is closed")),
        })
    }

    fn checkpoint_error(&self, error: checkpoint::Failure) -> PyErr {
        match error {
            checkpoint::Failure::Swapper(error) => self.signals.exception(error),
            checkpoint::Failure::Checkpoint(error) => checkpoint::exception(error),
        }
    }
}

impl Drop for Core {
    /// A fork leaves the session and the daemon alone.
    fn drop(&mut self) {
        if self.is_forked() {
            // Where a GPU computes, the clone of the thread that moves units outlives this one.
            if let Some(run) = Arc::get_mut(&mut self.run) {
                let run = run.get_mut().unwrap_or_else(|p| p.into_inner());
                std::mem::forget(run.take());
            }
        }
    }
}

/// Scalars of a step's updates: lr, beta1, beta2, eps, weight_decay.
type Groups = Vec<(f64, f64, f64, f64, f64)>;

/// Of each parameter in the units' order its group, the number of its update from 1 or 0 for no update, and the factor of its gradient.
type OfParams = Vec<(usize, u64, f64)>;

/// What changes momenta, of each parameter in the units' order: decay, Nesterov's mixture or not, factor of the gradient.
type Momenta = Vec<Option<(f64, bool, f64)>>;

/// What is committed beside the tiles.
type Blob = Option<Py<PyBytes>>;

fn program(ops: &[(bool, usize)]) -> Result<StepProgram, SwapperError> {
    let op = |&(scatter, unit): &(bool, usize)| match scatter {
        true => Op::Scatter { unit },
        false => Op::Gather { unit },
    };
    StepProgram::new(ops.iter().map(op).collect())
}

#[pymethods]
impl Core {
    /// Opens this rank's part of the run that the JSON text `plan` describes, behind `socket` where the run has device files of
    /// its own; `daemon` is the one this process started for them, and `exchange` connects several nodes. Returns it with the first rank's blob of
    /// the last committed step and this rank's, each None where there is none. `begin_fill` must follow if the run is new.
    #[staticmethod]
    #[pyo3(signature = (plan, socket, daemon, exchange))]
    fn open(
        py: Python<'_>,
        plan: &str,
        socket: Option<PathBuf>,
        daemon: Option<Py<Daemon>>,
        exchange: Option<Py<Exchange>>,
    ) -> PyResult<(Self, Blob, Blob)> {
        let plan: Plan = serde_json::from_str(plan).map_err(|e| Error::new_err(e.to_string()))?;
        let take = |daemon: Py<Daemon>| {
            let mut daemon = daemon.get().daemon.lock();
            daemon.as_mut().ok().and_then(|daemon| daemon.take())
        };
        let daemon = daemon.and_then(take);
        let exchange = exchange.map(|exchange| exchange.get().mailbox());
        let (mut run, opened) = py.detach(|| open(plan, socket, daemon, exchange))?;
        let signals = Signals::default();
        let asks = signals.clone();
        run.swapper.set_interrupt(move || asks.raised());
        let blob = |blob: Option<Vec<u8>>| blob.map(|blob| PyBytes::new(py, &blob).unbind());
        let core = Self {
            engine: opened.engine,
            host_bytes: opened.memory.host_bytes(),
            device_bytes: opened.memory.table_bytes,
            canceller: run.swapper.canceller(),
            run: Arc::new(Mutex::new(Some(run))),
            mover: MoverCell::new(),
            process: std::process::id(),
            signals,
        };
        Ok((core, blob(opened.resumed), blob(opened.resumed_own)))
    }

    /// Makes the call that waits for other ranks, or the next one, raise `RankGone` with `why`. For any thread.
    fn cancel(&self, why: String) {
        self.canceller.cancel(why);
    }

    /// Begins to give every unit its first content: `fill` of each in order must follow, then `end_fill`, which commits with
    /// `blob`.
    fn begin_fill(&self, py: Python<'_>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |run| run.swapper.begin_fill(blob))
    }

    /// Applies pending updates, commits, and begins to give trained `units` other parameters: `rewrite` of each in this order
    /// must follow, then `end_fill`, which commits all of them at once with `blob`.
    fn begin_rewrite(&self, py: Python<'_>, units: Vec<usize>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |run| run.swapper.begin_rewrite(&units, blob))
    }

    /// Writes `unit`'s parameters, which lie at `address`, to its tiles.
    fn fill(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |run| {
            let format = run.formats[unit];
            run.write(unit, address, |from, tile| {
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
        self.with(py, |run| {
            let (format, params) = (run.formats[unit], run.whole_params(unit, &params));
            run.write(unit, address, |from, tile| {
                update::rewrite(&format, &params, from, tile);
            })
        })
    }

    /// Writes momentum and variance of some of `unit`'s parameters to its tiles, and the masters of those in `with_master`. Each lies in
    /// fp32 at one of the three `addresses`, for the whole unit. Others stay. In place of `rewrite`.
    fn rewrite_state(
        &self,
        py: Python<'_>,
        unit: usize,
        addresses: [usize; 3],
        params: Vec<usize>,
        with_master: Vec<usize>,
    ) -> PyResult<()> {
        self.with(py, |run| {
            let format = run.formats[unit];
            let [params, with_master] =
                [params, with_master].map(|params| run.whole_params(unit, &params));
            run.swapper.fill(unit, |tiles: &mut [UninitTile<'_>]| {
                for tile in tiles {
                    let elems = &tile.range.elems;
                    let [master, moments @ ..] =
                        addresses.map(|address| memory::elements(address, elems, size_of::<f32>()));
                    update::rewrite_masters(&format, &with_master, master, tile);
                    update::rewrite_moments(&format, &params, moments, tile);
                }
                Ok(())
            })
        })
    }

    /// Commits what `begin_fill` or `begin_rewrite` began.
    fn end_fill(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| run.swapper.end_fill())
    }

    /// Begins a step: gradients of one that was not finished are dropped.
    fn begin_step(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| run.swapper.begin_step(StepProgram::default()))
    }

    /// Announces what comes next, as (whether gradients come, unit); gradients of the present step stay.
    fn announce(&self, py: Python<'_>, ops: Vec<(bool, usize)>) -> PyResult<()> {
        let announce = move |run: &mut OpenRun| run.swapper.begin_pass(program(&ops)?);
        match self.mover.get() {
            Some(mover) => {
                mover.post(move |run| Ok(announce(run)?));
                Ok(())
            }
            None => self.with(py, announce),
        }
    }

    /// Writes `unit`'s parameters at `address`, all pending updates applied.
    fn gather(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |run| {
            let bytes = run.formats[unit].param_bytes;
            run.swapper.gather(unit, |parts| {
                for (elems, param) in parts {
                    memory::write(address, elems, bytes, param);
                }
                Ok::<(), SwapperError>(())
            })
        })
    }

    /// Takes `unit`'s gradients at `address` and adds them to those of this step. Returns the sum of squares of each
    /// parameter's sum so far in this rank's tiles.
    fn scatter(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<Vec<f64>> {
        self.with(py, |run| {
            let add = run.swapper.has_gradients(unit);
            run.gradients(unit, |grads, elems, sum| {
                let grad = memory::elements(address, elems, grads.elem_bytes());
                match add {
                    true => update::add(grads, grad, sum),
                    false => sum.copy_from_slice(grad),
                }
            })
        })
    }

    /// Copies the gradients of this step that `unit` has to `address`, as far as this rank has its tiles. An announced scatter
    /// that changes nothing.
    fn read_gradients(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |run| {
            run.gradients(unit, |grads, elems, sum| {
                memory::write(address, elems, grads.elem_bytes(), sum);
            })
            .map(drop)
        })
    }

    /// Gives `unit` the gradients at `address` in place of those of this step that it has. Returns what `scatter` does.
    fn write_gradients(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<Vec<f64>> {
        self.with(py, |run| {
            run.gradients(unit, |grads, elems, sum| {
                sum.copy_from_slice(memory::elements(address, elems, grads.elem_bytes()));
            })
        })
    }

    /// Copies fp32 masters, momentum and variance of trained `units`, each with three addresses of fp32 numbers for the
    /// whole unit, as far as this rank has its tiles. Moments that the rule does not have are not written. Commits nothing.
    fn read_state(&self, py: Python<'_>, units: Vec<(usize, [usize; 3])>) -> PyResult<()> {
        self.with(py, |run| {
            let formats = &run.formats;
            let mut left = units.iter();
            let mut now = left.next();
            let numbers: Vec<usize> = units.iter().map(|(unit, _)| *unit).collect();
            run.swapper
                .visit_units(&numbers, &mut |range, param, state| {
                    while now.is_some_and(|(unit, _)| *unit != range.unit) {
                        now = left.next();
                    }
                    let (_, addresses) = now.expect("tiles come in the order of the units");
                    let planes = update::read_state(&formats[range.unit], param, state);
                    let planes = addresses.iter().zip(planes);
                    for (address, plane) in planes.filter(|(_, plane)| !plane.is_empty()) {
                        memory::write(*address, &range.elems, size_of::<f32>(), &plane);
                    }
                })
        })
    }

    /// Ends the step: updates the units whose gradients have come and whose updates have not begun.
    fn finish(&self, py: Python<'_>, groups: Groups, of_params: OfParams) -> PyResult<()> {
        self.with(py, |run| {
            let hyper = StepHyper::new(&groups, &of_params);
            run.io = StepIo::default();
            run.io = run.swapper.finish_unsealed(Some(hyper))?;
            Ok(())
        })
    }

    /// Waits until momenta may change, in a step of Muon: `units` are revised in this order, each before the next one. `momenta` has for each parameter
    /// in the units' order the decay of its momentum, whether Nesterov's mixture is made orthogonal, and the factor of its gradient; None where no momentum
    /// changes. The step must be finished, with the same `groups` and `of_params`.
    fn begin_directions(
        &self,
        py: Python<'_>,
        units: Vec<usize>,
        momenta: Momenta,
        groups: Groups,
        of_params: OfParams,
    ) -> PyResult<()> {
        self.with(py, |run| {
            let hyper = StepHyper::new(&groups, &of_params);
            let directions = Directions::new(hyper, &momenta, units);
            run.swapper.settle_updates_before(&directions.rest()?)?;
            run.directions = Some(directions);
            Ok(())
        })
    }

    /// Updates the momenta of `unit`, and writes what is to be made orthogonal to `address`, in the type of its gradients. `write_gradients` of the
    /// directions must follow, then `update_revised`.
    fn revise(&self, py: Python<'_>, unit: usize, address: usize) -> PyResult<()> {
        self.with(py, |run| {
            let grads = run.formats[unit].update.map(|update| update.grads);
            run.revise(unit, |tiles| {
                for tile in tiles {
                    let bytes = grads.expect("it is trained").elem_bytes();
                    memory::write(address, &tile.range.elems, bytes, tile.grad);
                }
                Ok::<(), SwapperError>(())
            })
        })
    }

    /// Begins to update `unit`, which has its directions.
    fn update_revised(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        let update = move |run: &mut OpenRun| {
            let directions = (run.directions.as_ref()).expect("the unit was revised");
            let rest = directions.rest()?;
            (run.swapper).update_revised(unit, &directions.hyper, &rest)
        };
        match self.mover.get() {
            Some(mover) => {
                mover.post(move |run| Ok(update(run)?));
                Ok(())
            }
            None => self.with(py, update),
        }
    }

    /// Begins to update the units whose gradients have come in this step, while others are still to come. `hyper` has what `finish` takes, of
    /// the whole step, with its first call.
    fn begin_updates(&self, py: Python<'_>, hyper: Option<(Groups, OfParams)>) -> PyResult<()> {
        let hyper = hyper.map(|(groups, of_params)| StepHyper::new(&groups, &of_params));
        let begin = move |run: &mut OpenRun| run.swapper.begin_updates(hyper);
        match self.mover.get() {
            Some(mover) => {
                mover.post(move |run| Ok(begin(run)?));
                Ok(())
            }
            None => self.with(py, begin),
        }
    }

    /// Ends a step whose units are all being updated.
    fn finish_begun(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| {
            run.io = StepIo::default();
            run.io = run.swapper.finish_begun()?;
            Ok(())
        })
    }

    /// The program enters a phase: 1 forward, 2 backward, 0 anything else.
    fn phase(&self, py: Python<'_>, phase: usize) {
        py.detach(|| {
            if let Some(run) = self.lock().as_mut() {
                run.clock.enter(phase);
            }
        });
    }

    /// Opens metrics.jsonl and the monitors of a run that has done `step` steps with `samples` samples.
    #[pyo3(signature = (step, samples, tensorboard, csv, wall_clock_breakdown))]
    fn open_reports(
        &self,
        py: Python<'_>,
        step: u64,
        samples: u64,
        tensorboard: Option<PathBuf>,
        csv: Option<PathBuf>,
        wall_clock_breakdown: bool,
    ) -> PyResult<Option<String>> {
        self.with_any(py, |run| {
            run.reporter.open(
                &run.plan.run_dir,
                step,
                samples,
                tensorboard,
                csv,
                wall_clock_breakdown,
            )
        })
    }

    /// Reports the step that ended last: to metrics.jsonl, to the monitors, and to the caller. `loss` is NaN where it is unknown.
    #[pyo3(signature = (step, samples, loss, grad_norm, lr, loss_scale, skipped, gpu_resident_bytes))]
    #[allow(clippy::too_many_arguments, reason = "one value a column")]
    fn report(
        &self,
        py: Python<'_>,
        step: u64,
        samples: u64,
        loss: f64,
        grad_norm: f64,
        lr: f64,
        loss_scale: Option<f64>,
        skipped: bool,
        gpu_resident_bytes: u64,
    ) -> PyResult<StepFacts> {
        self.with_any(py, |run| {
            run.reporter.report(
                &mut run.clock,
                &run.io,
                &Step {
                    step,
                    samples,
                    loss,
                    grad_norm,
                    lr,
                    loss_scale,
                    skipped,
                    gpu_resident_bytes,
                },
            )
        })
    }

    /// Copies this rank's trained tiles into `dir`, which exists. Returns what `describe` needs of each rank: the file, as JSON,
    /// and a fingerprint of the frozen tiles.
    fn save(&self, py: Python<'_>, dir: PathBuf) -> PyResult<(String, u64)> {
        self.with_any(py, |run| {
            let (file, frozen) = checkpoint::save(&mut run.swapper, &run.plan, &dir)
                .map_err(|error| self.checkpoint_error(error))?;
            Ok((serde_json::to_string(&file).expect("plain data"), frozen))
        })
    }

    /// Completes the checkpoint in `dir`, which has the `files` (JSON) of all ranks, with `state` (JSON) of the run at `step`. `frozen` is
    /// the sum of all ranks' fingerprints.
    #[allow(clippy::too_many_arguments, reason = "one value a field")]
    fn describe(
        &self,
        py: Python<'_>,
        dir: PathBuf,
        step: u64,
        unix_s: u64,
        state: &str,
        files: &str,
        frozen: u64,
    ) -> PyResult<()> {
        let broken = |e: serde_json::Error| Error::new_err(e.to_string());
        let state = serde_json::from_str(state).map_err(broken)?;
        let files = serde_json::from_str(files).map_err(broken)?;
        self.with_any(py, |run| {
            checkpoint::describe(&run.plan, &dir, step, unix_s, state, files, frozen)
                .map_err(checkpoint::exception)
        })
    }

    /// A fingerprint of this rank's frozen tiles.
    fn frozen(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |run| checkpoint::frozen(&mut run.swapper, &run.plan))
    }

    /// Fills this rank's trained tiles from the checkpoint in `dir` and commits them with `blob`. `frozen` is the sum of all
    /// ranks' fingerprints.
    fn load(&self, py: Python<'_>, dir: PathBuf, blob: Vec<u8>, frozen: u64) -> PyResult<()> {
        self.with_any(py, |run| {
            checkpoint::load(&mut run.swapper, &run.plan, &dir, blob, frozen)
                .map_err(|error| self.checkpoint_error(error))
        })
    }

    /// Brings what is committed with the step that ended.
    fn seal(&self, py: Python<'_>, blob: Vec<u8>) -> PyResult<()> {
        self.with(py, |run| run.swapper.seal(blob))
    }

    /// Applies pending updates and commits.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |run| run.swapper.drain())
    }

    /// Ends in order; what was not drained is lost. Does nothing the second time and in a fork.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_forked() {
            return Ok(());
        }
        py.detach(|| match self.lock().take() {
            Some(run) => run.swapper.close().map_err(failed),
            None => Ok(()),
        })
    }
}

/// What the Python files take this module for.
const INTERFACE: &str = include_str!("../python/offloadd/_offloadd.pyi");

/// Refuses Python files that were made for another build of this module, by the description of it that lies beside them.
fn check_python_files(py: Python<'_>) -> PyResult<()> {
    let package = PathBuf::from(py.import("offloadd")?.filename()?.to_string());
    match std::fs::read_to_string(package.with_file_name("_offloadd.pyi")) {
        Ok(found) if found != INTERFACE => Err(PyImportError::new_err(format!(
            "{}: the extension _offloadd beside it was built for other Python files: install both again (pip install .), or build it (make python)",
            package.display()
        ))),
        // A copy of the package without it says nothing.
        _ => Ok(()),
    }
}

#[pymodule]
fn _offloadd(module: &Bound<'_, PyModule>) -> PyResult<()> {
    check_python_files(module.py())?;
    module.add("STORE_FILE", training_state::store::PACKAGE_RUN_FILE)?;
    module.add_class::<Core>()?;
    module.add_class::<Daemon>()?;
    module.add_class::<Exchange>()?;
    module.add_class::<StepFacts>()?;
    module.add_class::<GpuMover>()?;
    module.add_class::<Fp8Converter>()?;
    module.add_class::<activations::ActivationTiles>()?;
    module.add_function(wrap_pyfunction!(activations::activation_area, module)?)?;
    module.add_class::<schedule::LossScale>()?;
    module.add_function(wrap_pyfunction!(gpu_name, module)?)?;
    module.add_function(wrap_pyfunction!(fp8_refusal, module)?)?;
    module.add("FP8_SIDE_MIN", kernels::fp8::FP8_SIDE_MIN)?;
    module.add("FP8_UNIT", kernels::fp8::FP8_UNIT)?;
    module.add_function(wrap_pyfunction!(choices::choices, module)?)?;
    module.add_function(wrap_pyfunction!(choices::node_copy, module)?)?;
    module.add_function(wrap_pyfunction!(plan::of_run, module)?)?;
    module.add_function(wrap_pyfunction!(plan::host_available_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(plan::parse_memory, module)?)?;
    module.add_function(wrap_pyfunction!(plan::parse_count, module)?)?;
    module.add_function(wrap_pyfunction!(plan::parse_rate, module)?)?;
    module.add_function(wrap_pyfunction!(plan::parse_drives, module)?)?;
    module.add_function(wrap_pyfunction!(plan::muon_directions, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_state, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::describe_file, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::held_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::copy_between_nodes, module)?)?;
    module.add_function(wrap_pyfunction!(open::check_drives, module)?)?;
    module.add_function(wrap_pyfunction!(open::remove_files, module)?)?;
    module.add_function(wrap_pyfunction!(nodes::first_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(nodes::node_part, module)?)?;
    module.add_function(wrap_pyfunction!(schedule::of_step, module)?)?;
    module.add_function(wrap_pyfunction!(schedule::deepspeed_schedulers, module)?)?;
    module.add_function(wrap_pyfunction!(settings::read_json, module)?)?;
    module.add_function(wrap_pyfunction!(settings::check_settings, module)?)?;
    module.add_function(wrap_pyfunction!(settings::schedule_of, module)?)?;
    errors::add(module)
}
