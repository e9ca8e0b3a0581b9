//! The trainer's side: blocking calls that ask the owner thread, and closures that get the lent slots.
//!
//! A step is `begin_step`, then the announced gathers and scatters in order, then `finish_step` (or `skip_step`). With `begin_updates` between
//! them, units whose gradients are complete are updated while those of others come.
//! Updates, read-ahead, write-behind and commits run on the other threads meanwhile.

mod serving;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use offload_client::Slot;

use crate::core::Request;
use crate::inbox::Inbox;
use crate::layout::{ByKind, Kind, Layout, TileRange};
use crate::lease::{Message, Reply};
use crate::op::Op;
use crate::optimizer::{Optimizer, UninitTile};
use crate::owner::Owner;
use crate::schedule::{self, Schedule, StepProgram};
use crate::scratch::Scratch;
use crate::settings::{OpenReport, StepIo, SwapperSettings};
use crate::span::Spans;
use crate::{SwapperError, open};

/// Ends a swapper's waiting calls, from any thread.
#[derive(Clone)]
pub struct Canceller(Arc<dyn Fn(String) + Send + Sync>);

impl Canceller {
    /// Makes the present call, or the next one, return [`SwapperError::Cancelled`] with `why`. A commit waits for all
    /// ranks of its job; this stops the wait for a rank that will not come.
    pub fn cancel(&self, why: String) {
        (self.0)(why);
    }
}

/// Longest wait between two calls of an interrupt.
const INTERRUPT_STEP: Duration = Duration::from_millis(100);

/// Called while the trainer waits; `true` ends the wait.
struct Interrupt(Box<dyn FnMut() -> bool + Send>);

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

/// A range of a unit's elements, and its parameters.
pub type Part<'a> = (Range<u64>, &'a [u8]);

/// A range of a unit's elements, and the gradients to write.
pub type PartMut<'a> = (Range<u64>, &'a mut [u8]);

/// A range whose state may change before its update.
#[derive(Debug)]
pub struct Revision<'a> {
    /// The range.
    pub range: &'a TileRange,
    /// State, which may be changed.
    pub state: &'a mut [u8],
    /// Gradients of the step. What is written here lasts until the next scatter of the range alone, which must replace it.
    pub grad: &'a mut [u8],
}

/// Reads a range's `param` and `state`; the state of a unit that is not trained is empty.
pub type TileVisitor<'a> = dyn FnMut(&TileRange, &[u8], &[u8]) + 'a;

/// How tiles get a new content.
#[derive(Clone, Copy, Debug)]
enum Filling {
    /// All of it is given: nothing is read.
    Fill,
    /// What is there is read and changed.
    Rewrite,
}

/// Holds all tiles of one rank. `H` is the value that the updates of one step share, such as the learning rate.
///
/// After an error other than a refused call, every call answers [`SwapperError::Stopped`]; what was committed stays.
/// Dropping it without [`Swapper::close`] is like a crash: what was not committed is lost.
///
/// A thread of its own moves tiles by a program of the whole step that is made before it. That thread needs no decision of the caller's in mid-step; the
/// price is a caller that has to use units in the announced order, and one more thread between a tile and whoever waits for it.
#[derive(Debug)]
pub struct Swapper<H: Clone + Send + 'static> {
    layout: Arc<Layout>,
    schedule: Schedule,
    commit_every: u64,
    initialized: bool,
    /// What [`Swapper::begin_fill`] or [`Swapper::begin_rewrite`] began and [`Swapper::end_fill`] has not ended.
    filling: Option<Filling>,
    owner: Owner<H>,
    inbox: Inbox<H>,
    replies: Receiver<Reply>,
    scratch: Option<Scratch>,
    program: StepProgram,
    /// Units whose gradients came in this step.
    scattered: BTreeSet<usize>,
    /// Units whose updates have begun in this step, which is not finished.
    begun: BTreeSet<usize>,
    /// Units whose updates may still be to run.
    pending: Vec<usize>,
    /// Steps finished since a commit was last planned, and the newest step's blob.
    uncommitted_count: u64,
    blob: Vec<u8>,
    waited: Duration,
    /// I/O counted before the present step.
    counted: StepIo,
    /// I/O of the step before, where updates of this one have begun.
    io_before: Option<StepIo>,
    recording: bool,
    spans: Spans,
    interrupt: Option<Interrupt>,
    /// A request was interrupted and is still being served.
    abandoned: bool,
    /// A scatter was interrupted: the step's gradients are not whole.
    torn: bool,
    /// States were revised in this step, which is not finished.
    revised: bool,
    stopped: bool,
}

impl<H: Clone + Send + 'static> Swapper<H> {
    /// Allocates memory, opens or creates the job, and resumes its newest generation. Each of `optimizers` gets a
    /// thread and takes the next tile when it is idle, so the result must not depend on which one updates a tile.
    pub fn open(
        settings: SwapperSettings,
        optimizers: Vec<Box<dyn Optimizer<H>>>,
    ) -> Result<(Self, OpenReport), SwapperError> {
        assert!(!optimizers.is_empty(), "somebody updates");
        let layout = Arc::new(settings.cut()?);
        let (backing, opened, start) = open::open(&settings, &layout)?;
        let layout_of_owner = layout.clone();
        let (owner, (inbox, replies, scratch)) = Owner::start(
            &settings,
            layout_of_owner,
            backing,
            &opened,
            start,
            optimizers,
        );
        let swapper = Self {
            layout,
            schedule: settings.schedule,
            commit_every: settings.commit_every,
            initialized: opened.resumed.is_some(),
            filling: None,
            owner,
            inbox,
            replies,
            scratch,
            program: StepProgram::default(),
            scattered: BTreeSet::new(),
            begun: BTreeSet::new(),
            pending: Vec::new(),
            uncommitted_count: 0,
            blob: opened.resumed.clone().unwrap_or_default(),
            waited: Duration::ZERO,
            counted: StepIo::default(),
            io_before: None,
            recording: false,
            spans: Spans::default(),
            interrupt: None,
            abandoned: false,
            torn: false,
            revised: false,
            stopped: false,
        };
        Ok((swapper, opened))
    }

    /// Returns the division of units into ranges and tiles.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Gives every tile its first content and commits it with `blob`. `fill` gets the ranges in order, as many at a
    /// time as there are free slots. Without a store this also restores a checkpoint.
    ///
    /// # Errors
    /// The error of `fill`, after which nothing more is served, or one of the swapper.
    pub fn initialize<E: From<SwapperError>>(
        &mut self,
        mut fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
        blob: Vec<u8>,
    ) -> Result<(), E> {
        self.begin_fill(blob)?;
        for unit in 0..self.layout.units().len() {
            self.fill(unit, &mut fill)?;
        }
        Ok(self.end_fill()?)
    }

    /// Begins what [`Swapper::initialize`] does in one call: [`Swapper::fill`] of every unit in order must follow, and then
    /// [`Swapper::end_fill`], which commits.
    pub fn begin_fill(&mut self, blob: Vec<u8>) -> Result<(), SwapperError> {
        self.check()?;
        let units = 0..self.layout.units().len();
        let ops = units.map(|unit| Op::Fill { unit }).collect();
        self.blob = blob;
        self.plan_fill(Filling::Fill, ops)
    }

    /// Drains and begins to give `units` another content. [`Swapper::fill`] of each of them in this order must follow, and
    /// then [`Swapper::end_fill`], which commits all of them at once with `blob`. Gradients of a step that is not finished are
    /// dropped.
    ///
    /// # Errors
    /// [`SwapperError::Program`] for a unit that is not trained: it is written once.
    pub fn begin_rewrite(&mut self, units: &[usize], blob: Vec<u8>) -> Result<(), SwapperError> {
        self.check_initialized()?;
        self.check_finished()?;
        if let Some(unit) = units.iter().find(|&&unit| !self.layout.trained(unit)) {
            return Err(SwapperError::Program {
                what: format!("unit {unit} is not trained: its parameters are written once"),
            });
        }
        if let Some(unit) = units.iter().find(|&&unit| self.layout.external(unit)) {
            return Err(SwapperError::Program {
                what: format!("unit {unit} is external: the caller has its content"),
            });
        }
        self.drain()?;
        self.scattered.clear();
        self.torn = false;
        let ops = units.iter().map(|&unit| Op::Rewrite { unit }).collect();
        self.blob = blob;
        self.plan_fill(Filling::Rewrite, ops)
    }

    fn plan_fill(&mut self, filling: Filling, mut ops: Vec<Op>) -> Result<(), SwapperError> {
        ops.push(Op::Commit);
        self.filling = Some(filling);
        self.send(Message::Plan {
            ops,
            keep: false,
            blob: Some(self.blob.clone()),
        })
    }

    /// Calls `fill` to write `unit`'s ranges in order, as many at a time as there are free slots.
    ///
    /// # Errors
    /// The error of `fill`, after which nothing more is served, or one of the swapper.
    pub fn fill<E: From<SwapperError>>(
        &mut self,
        unit: usize,
        mut fill: impl FnMut(&mut [UninitTile<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check_running()?;
        let op = match self.filling {
            Some(Filling::Rewrite) => Op::Rewrite { unit },
            Some(Filling::Fill) | None => Op::Fill { unit },
        };
        let layout = self.layout.clone();
        self.serve(op, |lent| {
            let mut tiles: Vec<UninitTile> = lent
                .iter_mut()
                .map(|lent| {
                    let range = lent.range;
                    let bytes = |kind| ..layout.content_bytes(kind, range);
                    let ByKind([Some(param), state, _]) = &mut lent.slots else {
                        panic!("a fill needs the parameters of its range");
                    };
                    let state = state.as_mut().map(Slot::as_mut_slice);
                    UninitTile {
                        range: &layout.ranges()[range as usize],
                        param: &mut param.as_mut_slice()[bytes(Kind::Param)],
                        state: &mut state.unwrap_or_default()[bytes(Kind::State)],
                    }
                })
                .collect();
            fill(&mut tiles)
        })
    }

    /// Ends what [`Swapper::begin_fill`] or [`Swapper::begin_rewrite`] began: returns when it is committed.
    pub fn end_fill(&mut self) -> Result<(), SwapperError> {
        self.check_running()?;
        self.counted = self.settle(Vec::new(), None)?;
        self.initialized = true;
        self.filling = None;
        self.uncommitted_count = 0;
        self.pending.clear();
        Ok(())
    }

    /// Begins a step. Gathers and scatters must then come exactly as `program` says.
    ///
    /// A step that is never finished changes nothing: its gradients are dropped when the next one begins.
    pub fn begin_step(&mut self, program: StepProgram) -> Result<(), SwapperError> {
        self.check()?;
        self.check_finished()?;
        self.plan_pass(program, false)?;
        self.scattered.clear();
        self.torn = false;
        Ok(())
    }

    /// Begins another pass of the step, or announces the rest of this one in another order: the gradients that have come
    /// stay, and scatters of their units add to them.
    pub fn begin_pass(&mut self, program: StepProgram) -> Result<(), SwapperError> {
        self.check_whole()?;
        self.plan_pass(program, true)
    }

    /// Whether `unit` has gradients of this step: its next scatter finds them in the slots and adds to them.
    pub fn has_gradients(&self, unit: usize) -> bool {
        self.scattered.contains(&unit)
    }

    fn plan_pass(&mut self, program: StepProgram, keep: bool) -> Result<(), SwapperError> {
        self.check_initialized()?;
        let units = self.layout.units().len();
        for op in program.ops() {
            if let Op::Gather { unit } | Op::Scatter { unit } | Op::Revise { unit } = *op
                && unit >= units
            {
                return Err(SwapperError::Program {
                    what: format!("{op:?}: there are only {units} units"),
                });
            }
            if let Op::Scatter { unit } = *op
                && !self.layout.trained(unit)
            {
                return Err(SwapperError::Program {
                    what: format!("{op:?}: the unit is not trained and has no gradients"),
                });
            }
        }
        let ops = self.plan_ops(&self.pending, false, &program);
        self.program = program;
        self.send(Message::Plan {
            ops,
            keep,
            blob: None,
        })
    }

    /// Calls `take` with the parameters of `unit`'s ranges in order, as many at a time as are in slots, with pending
    /// updates applied. Ranges count elements from the unit's first.
    ///
    /// # Errors
    /// The error of `take`, after which nothing more is served, or one of the swapper.
    pub fn gather<E: From<SwapperError>>(
        &mut self,
        unit: usize,
        mut take: impl FnMut(&[Part<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check()?;
        let layout = self.layout.clone();
        self.serve(Op::Gather { unit }, |lent| {
            let parts: Vec<Part> = lent
                .iter_mut()
                .map(|lent| {
                    let elems = layout.ranges()[lent.range as usize].elems.clone();
                    let bytes = layout.content_bytes(Kind::Param, lent.range);
                    (elems, &lent.whole(Kind::Param)[..bytes])
                })
                .collect();
            take(&parts)
        })
    }

    /// Calls `fill` to write the gradients of `unit`'s ranges in order, as many at a time as there is room for. The slots
    /// have arbitrary content before a step's first scatter of the unit, and the sum so far before further ones
    /// ([`Swapper::has_gradients`]).
    ///
    /// # Errors
    /// The error of `fill`, after which nothing more is served, or one of the swapper.
    pub fn scatter<E: From<SwapperError>>(
        &mut self,
        unit: usize,
        mut fill: impl FnMut(&mut [PartMut<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check()?;
        if self.begun.contains(&unit) {
            return Err(SwapperError::Program {
                what: format!(
                    "the update of unit {unit} has begun, and it takes no more gradients in this step"
                ),
            }
            .into());
        }
        let layout = self.layout.clone();
        self.serve(Op::Scatter { unit }, |lent| {
            let mut parts: Vec<PartMut> = lent
                .iter_mut()
                .map(|lent| {
                    let elems = layout.ranges()[lent.range as usize].elems.clone();
                    let bytes = layout.content_bytes(Kind::Grad, lent.range);
                    (elems, &mut lent.whole(Kind::Grad)[..bytes])
                })
                .collect();
            fill(&mut parts)
        })?;
        self.scattered.insert(unit);
        Ok(())
    }

    /// Calls `revise` with the gradients of `unit`'s ranges in order, as many at a time as are in slots, and with their states, which it may change before
    /// the update. [`Swapper::settle_updates_before`] comes before a step's first revision, and nothing but the rest of the step may follow it: what was
    /// changed cannot be dropped, and is not committed before the step is finished.
    ///
    /// # Errors
    /// The error of `revise`, after which nothing more is served, or one of the swapper.
    pub fn revise<E: From<SwapperError>>(
        &mut self,
        unit: usize,
        mut revise: impl FnMut(&mut [Revision<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check()?;
        self.check_whole()?;
        if !self.scattered.contains(&unit) {
            return Err(SwapperError::Program {
                what: format!("unit {unit} has no gradients of this step by which to revise it"),
            }
            .into());
        }
        let layout = self.layout.clone();
        self.revised = true;
        self.serve(Op::Revise { unit }, |lent| {
            let mut parts: Vec<Revision> = lent
                .iter_mut()
                .map(|lent| {
                    let range = lent.range;
                    let bytes = |kind| ..layout.content_bytes(kind, range);
                    let ByKind([_, Some(state), Some(grad)]) = &mut lent.slots else {
                        panic!("a revision needs state and gradients of its range");
                    };
                    Revision {
                        range: &layout.ranges()[range as usize],
                        state: &mut state.as_mut_slice()[bytes(Kind::State)],
                        grad: &mut grad.as_mut_slice()[bytes(Kind::Grad)],
                    }
                })
                .collect();
            revise(&mut parts)
        })
    }

    /// Begins to update the units whose gradients have come, before the step is finished. `hyper` is that of the whole step, and comes with
    /// the first call of a step. These units take no more gradients in it, and it can be neither skipped nor begun again: more scatters
    /// and calls of this kind may follow, then [`Swapper::finish_begun`], or [`Swapper::finish_unsealed`] with what the last units are updated with.
    pub fn begin_updates(&mut self, hyper: Option<H>) -> Result<(), SwapperError> {
        self.check_initialized()?;
        self.check_whole()?;
        if self.begun.is_empty() != hyper.is_some() {
            return Err(SwapperError::Program {
                what: "the first updates that begin in a step bring its hyperparameters".into(),
            });
        }
        let first = hyper.is_some();
        self.begun.append(&mut self.scattered);
        let io = self.join(hyper, &StepProgram::default())?;
        if first {
            self.io_before = Some(self.count(io));
        }
        Ok(())
    }

    /// Begins to update `unit`, which was revised, while its states are in their slots, with the `hyper` of the whole step. It takes no more
    /// gradients in it. The operations `rest` are still to come, and then [`Swapper::finish_step`] with the same `hyper`.
    pub fn update_revised(
        &mut self,
        unit: usize,
        hyper: &H,
        rest: &StepProgram,
    ) -> Result<(), SwapperError> {
        self.check_initialized()?;
        self.check_whole()?;
        let first = self.begun.is_empty().then(|| hyper.clone());
        if self.scattered.remove(&unit) {
            self.begun.insert(unit);
            self.join(first, rest)?;
        }
        Ok(())
    }

    /// Like [`Swapper::finish_unsealed`], where updates of the step have begun: with their hyperparameters, and without waiting for
    /// them.
    pub fn finish_begun(&mut self) -> Result<StepIo, SwapperError> {
        self.check()?;
        self.check_whole()?;
        if self.begun.is_empty() {
            return Err(SwapperError::Program {
                what: "no update of this step has begun".into(),
            });
        }
        self.begun.append(&mut self.scattered);
        let io = self.join(None, &StepProgram::default());
        // An interrupted step ends all the same.
        self.begun.clear();
        self.revised = false;
        let io = io?;
        Ok(self.count(io))
    }

    /// The I/O of a step, of all that was counted: up to where the updates of the next one begin.
    fn count(&mut self, io: StepIo) -> StepIo {
        self.io_before.take().unwrap_or_else(|| {
            let before = std::mem::replace(&mut self.counted, io);
            io.since(&before)
        })
    }

    /// Updates the units whose updates have begun, before `rest`.
    fn join(&mut self, hyper: Option<H>, rest: &StepProgram) -> Result<StepIo, SwapperError> {
        self.pending = self.begun.iter().copied().collect();
        let ops = schedule::immediate(&self.pending, false, rest);
        let finish = Request::Finish {
            ops,
            update: true,
            wait: false,
            settled: true,
            joins: hyper.is_none(),
        };
        self.request(finish, hyper, None, |lent| -> Result<(), SwapperError> {
            panic!("updates that begin lend {}", lent.len())
        })
    }

    /// Ends the pass: updates the scattered units with `hyper`.
    ///
    /// At once: returns after all updates and, if one is due, the commit. Deferred: returns immediately; each unit is
    /// updated before its next gather, and a due commit follows. `blob` is committed with this step's tiles.
    pub fn finish_step(&mut self, hyper: H, blob: Vec<u8>) -> Result<StepIo, SwapperError> {
        self.end_step(Some(hyper), Some(blob))
    }

    /// Drops this step's gradients after an overflow: no tile changes, but `blob` counts as a step for commits.
    pub fn skip_step(&mut self, blob: Vec<u8>) -> Result<StepIo, SwapperError> {
        self.end_step(None, Some(blob))
    }

    /// Like [`Swapper::finish_step`], or [`Swapper::skip_step`] without `hyper`, for a caller that knows the step's blob only
    /// later: the step is not committed, and the next one must not begin, before [`Swapper::seal`]. Returns when the step before
    /// is committed, so that no more than one finished step can be lost.
    pub fn finish_unsealed(&mut self, hyper: Option<H>) -> Result<StepIo, SwapperError> {
        self.end_step(hyper, None)
    }

    /// Brings the blob of the step that [`Swapper::finish_unsealed`] ended, and plans its commit where one is due. At once:
    /// returns when it is acknowledged.
    pub fn seal(&mut self, blob: Vec<u8>) -> Result<(), SwapperError> {
        self.check()?;
        self.check_finished()?;
        self.blob = blob.clone();
        if !self.counts_to_commit() {
            return Ok(());
        }
        self.pending = self.with_copied(self.pending.clone(), true);
        let ops = self.plan_ops(&self.pending, true, &self.program);
        match self.schedule {
            Schedule::Immediate => self.settle(ops, Some(blob)).map(drop),
            Schedule::Deferred => self.send(Message::Plan {
                ops,
                keep: true,
                blob: Some(blob),
            }),
        }
    }

    /// Applies pending updates, writes what is dirty and commits it with the newest blob, if that is not done already.
    /// Gradients of a step that is not finished stay for its further passes.
    pub fn drain(&mut self) -> Result<(), SwapperError> {
        self.check()?;
        self.check_finished()?;
        let commit = self.uncommitted_count > 0;
        self.pending = self.with_copied(self.pending.clone(), commit);
        let ops = schedule::immediate(&self.pending, commit, &StepProgram::default());
        let blob = commit.then(|| self.blob.clone());
        self.settle(ops, blob)?;
        self.uncommitted_count = 0;
        self.pending.clear();
        Ok(())
    }

    /// Waits until all updates of the step before have run, and what the last commit needs of external units is copied: the caller may now
    /// update these.
    pub fn settle_updates(&mut self) -> Result<(), SwapperError> {
        self.check()?;
        self.request(
            Request::Settle,
            None,
            None,
            |lent| -> Result<(), SwapperError> { panic!("updates lend {}", lent.len()) },
        )?;
        Ok(())
    }

    /// Like [`Swapper::settle_updates`] in the middle of a step, of which the operations `rest` are to come. Revised states are written after the last
    /// commit, which may need the slots that they take.
    pub fn settle_updates_before(&mut self, rest: &StepProgram) -> Result<(), SwapperError> {
        self.check_finished()?;
        self.settle_updates()?;
        let ops = self.plan_ops(&self.pending, false, rest);
        self.send(Message::Plan {
            ops,
            keep: true,
            blob: None,
        })
    }

    /// Units whose newest content the caller has.
    pub fn external_units(&self) -> Vec<usize> {
        self.units_that(true)
    }

    fn units_that(&self, are_external: bool) -> Vec<usize> {
        let units = 0..self.layout.units().len();
        units
            .filter(|&unit| self.layout.external(unit) == are_external)
            .collect()
    }

    /// Drains, then calls `visitor` with `param` and `state` of each range that is not external, ordered by unit and element.
    pub fn visit(&mut self, visitor: &mut TileVisitor) -> Result<(), SwapperError> {
        self.drain()?;
        self.visit_units(&self.units_that(false), visitor)
    }

    /// Applies pending updates, and calls `visitor` with `param` and `state` of each range of `units`. Commits nothing, so that a
    /// step that is not sealed yet stays so. Of external units it sees what was last copied.
    pub fn visit_units(
        &mut self,
        units: &[usize],
        visitor: &mut TileVisitor,
    ) -> Result<(), SwapperError> {
        self.check_initialized()?;
        self.check_finished()?;
        let updates = schedule::immediate(&self.pending, false, &StepProgram::default());
        self.settle(updates, None)?;
        self.pending.clear();
        let layout = self.layout.clone();
        let ops = units.iter().map(|&unit| Op::Visit { unit }).collect();
        self.send(Message::Plan {
            ops,
            keep: true,
            blob: None,
        })?;
        for &unit in units {
            self.serve(Op::Visit { unit }, |lent| {
                for lent in lent {
                    let ByKind([Some(param), state, _]) = &lent.slots else {
                        panic!("a visit needs the parameters of its range");
                    };
                    let state = state.as_ref().map(Slot::as_slice);
                    let bytes = |kind| ..layout.content_bytes(kind, lent.range);
                    visitor(
                        &layout.ranges()[lent.range as usize],
                        &param.as_slice()[bytes(Kind::Param)],
                        &state.unwrap_or_default()[bytes(Kind::State)],
                    );
                }
                Ok::<(), SwapperError>(())
            })?;
        }
        Ok(())
    }

    /// The caller's own tiles, for any thread; `None` without [`SwapperSettings::scratch`].
    pub fn scratch(&self) -> Option<Scratch> {
        self.scratch.clone()
    }

    /// A handle with which another thread can end this swapper's waiting.
    pub fn canceller(&self) -> Canceller {
        let inbox = self.inbox.clone();
        Canceller(Arc::new(move |why| {
            // An owner that has ended waits for nothing.
            let _ = inbox.send(Message::Cancel { why });
        }))
    }

    /// Calls `interrupt` every 100 ms while a call waits; when it returns `true`, the call returns
    /// [`SwapperError::Interrupted`]. The next call first waits for what was left.
    pub fn set_interrupt(&mut self, interrupt: impl FnMut() -> bool + Send + 'static) {
        self.interrupt = Some(Interrupt(Box::new(interrupt)));
    }

    /// Sets how long operations may be in flight without a completion before the swapper gives up; four minutes by
    /// default. Time in which this process was suspended does not count.
    pub fn set_stall_max(&mut self, stall_max: Duration) -> Result<(), SwapperError> {
        self.check()?;
        self.send(Message::StallMax(stall_max))
    }

    /// Starts or stops collecting spans and discards those not taken. If collection starts before a step is finished
    /// and [`Swapper::take_spans`] is called after it, the spans of the next step are complete.
    pub fn record_spans(&mut self, recording: bool) -> Result<(), SwapperError> {
        self.check()?;
        self.recording = recording;
        self.spans = Spans::default();
        self.send(Message::Record(recording))
    }

    /// Takes the collected spans, up to the last answered call.
    pub fn take_spans(&mut self) -> Spans {
        std::mem::take(&mut self.spans)
    }

    /// Closes the session. Tiles that were not drained are lost, as in a crash.
    pub fn close(mut self) -> Result<(), SwapperError> {
        self.owner.close()
    }

    /// Counts a step; `true` when a commit is due.
    fn counts_to_commit(&mut self) -> bool {
        self.uncommitted_count += 1;
        let due = self.commit_every > 0 && self.uncommitted_count >= self.commit_every;
        if due {
            self.uncommitted_count = 0;
        }
        due
    }

    fn end_step(
        &mut self,
        hyper: Option<H>,
        blob: Option<Vec<u8>>,
    ) -> Result<StepIo, SwapperError> {
        self.check()?;
        match hyper {
            Some(_) => self.check_whole()?,
            None => self.check_finished()?,
        }
        // What has begun ends before the rest is updated.
        self.begun.clear();
        self.torn = false;
        self.revised = false;
        let update = hyper.is_some();
        let updated = std::mem::take(&mut self.scattered);
        let updated: Vec<usize> = updated.into_iter().filter(|_| update).collect();
        let settled = blob.is_none();
        let commit = !settled && self.counts_to_commit();
        let updated = self.with_copied(updated, commit);
        let ops = self.plan_ops(&updated, commit, &self.program);
        if let Some(blob) = &blob {
            self.blob = blob.clone();
        }
        let io = self.request(
            Request::Finish {
                ops,
                update,
                wait: self.schedule == Schedule::Immediate,
                settled,
                joins: false,
            },
            hyper,
            blob.filter(|_| commit),
            |lent| -> Result<(), SwapperError> { panic!("a finished step lends {}", lent.len()) },
        );
        // An interrupted step ends all the same.
        self.pending = updated;
        let io = io?;
        Ok(self.count(io))
    }

    /// Adds to pending units those of which a commit may need a copy.
    fn with_copied(&self, mut pending: Vec<usize>, commit: bool) -> Vec<usize> {
        if commit {
            pending.extend(self.units_that(true));
            pending.sort_unstable();
            pending.dedup();
        }
        pending
    }

    /// The program with the updates of `pending` units where the schedule places them.
    fn plan_ops(&self, pending: &[usize], commit: bool, program: &StepProgram) -> Vec<Op> {
        match self.schedule {
            Schedule::Immediate => schedule::immediate(pending, commit, program),
            Schedule::Deferred => schedule::deferred(pending, commit, program),
        }
    }

    /// Follows `ops` until nothing is pending and every commit is acknowledged.
    fn settle(&mut self, ops: Vec<Op>, blob: Option<Vec<u8>>) -> Result<StepIo, SwapperError> {
        self.request(
            Request::Drain { ops },
            None,
            blob,
            |lent| -> Result<(), SwapperError> { panic!("a drain lends {}", lent.len()) },
        )
    }
}
