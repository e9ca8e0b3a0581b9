//! The acting half: one owner thread serves the trainer, the update workers and the session. It holds every slot that is
//! not lent, and carries out the core's actions. It decides nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Instant;

use offload_client::{
    ClientError, CommittedGeneration, EndedOperation, Generation, Session, Slot, Ticket, TileIndex,
    Verb,
};
use test_hooks::kill_point::{Point, reach};

use crate::SwapperError;
use crate::backing::Arena;
use crate::core::{Action, Core, CoreSettings, Event, SlotNumber, TileId};
use crate::layout::{ByKind, Kind, Layout};
use crate::lease::{Lease, Message, Reply, UpdateJob};
use crate::nodes::Confirmer;
use crate::scratch::{self, ScratchQueue};
use crate::settings::{OpenReport, StepIo, SwapperSettings};
use crate::span::{Span, SpanKind, Spans};
use crate::stall::Stall;

type Swap = fn(&mut Session, TileIndex, Slot) -> Result<Ticket, (Slot, ClientError)>;

/// An operation in flight.
struct Moving {
    tile: TileId,
    slot: SlotNumber,
    ticket: Ticket,
    since: Instant,
}

pub(crate) struct Driver<H> {
    core: Core,
    actions: Vec<Action>,
    layout: Arc<Layout>,
    arena: Arena,
    /// Slots by kind and number; `None` while a slot is lent, with a worker or in flight.
    slots: ByKind<Vec<Option<Slot>>>,
    /// Scratch tile of each range's gradients, unless they are kept in host memory.
    grad_tiles: Vec<Option<TileIndex>>,
    /// Ranges that the trainer gets with the next reply: a message for each would cost more than the copy of its tile.
    lending: Vec<Lease>,
    /// Slot numbers of lent ranges.
    away: HashMap<u32, ByKind<Option<SlotNumber>>>,
    /// Operations in flight, by the daemon's tile index.
    inflight: HashMap<TileIndex, Moving>,
    /// The caller's own tiles, which the core does not know.
    scratch: Option<ScratchQueue>,
    stall: Stall,
    done: Vec<EndedOperation>,

    replies: Sender<Reply>,
    jobs: Sender<UpdateJob<H>>,
    /// Hyperparameters of the newest steps with updates: one step's updates run at a time, the next one may wait.
    hypers: VecDeque<(u64, H)>,
    steps: u64,
    /// Updates with the workers, and since when there has been one.
    updating_count: usize,
    updating_since: Instant,
    /// Blobs of planned commits that have not begun, in order.
    blobs: VecDeque<Vec<u8>>,
    commit_begun: Option<Instant>,
    /// Asks other nodes whether a generation may be confirmed, if there are any.
    confirmer: Option<Confirmer>,

    recording: bool,
    spans: Spans,
    /// Whether the trainer waits for an answer.
    asked: bool,
    /// Counts from the start.
    io: StepIo,
}

impl<H: Clone> Driver<H> {
    pub(crate) fn new(
        settings: &SwapperSettings,
        layout: Arc<Layout>,
        mut arena: Arena,
        opened: &OpenReport,
        replies: Sender<Reply>,
        jobs: Sender<UpdateJob<H>>,
        workers_count: usize,
    ) -> Self {
        let memory = &opened.memory;
        let resident = settings.residency(&layout);
        let mut grad_indices = (layout.table().len() as u32..).map(TileIndex);
        let trained: Vec<bool> = (0..layout.ranges().len() as u32)
            .map(|range| layout.has(Kind::State, range))
            .collect();
        let ranges = 0..layout.ranges().len() as u32;
        let external = ranges.clone().map(|range| layout.has_external(range));
        let external = external.collect();
        let grad_tiles: Vec<Option<TileIndex>> = (ranges.zip(&resident[Kind::Grad]))
            .map(
                |(range, resident)| match !resident && layout.has(Kind::Grad, range) {
                    true => grad_indices.next(),
                    false => None,
                },
            )
            .collect();
        // Of the operations that were granted, the caller's own tiles have what the core did not ask for, and at least one.
        let beside = (opened.iodepth.saturating_sub(settings.iodepth)).max(1);
        let scratch_inflight_max = memory.scratch.slot_count.min(beside);
        let scratch = (memory.scratch.slot_count > 0).then(|| {
            let slots = arena.take_all(Kind::ALL.len(), memory.scratch.slot_count);
            let slots = slots.into_iter().flatten().collect();
            let shared = Arc::new(scratch::ScratchArea::new(memory.scratch, slots));
            let first = grad_indices.next().expect("endless");
            ScratchQueue::new(shared, first, scratch_inflight_max as usize)
        });
        let slots = ByKind::new(|kind| {
            let staging = memory.staging_counts()[kind];
            let mut slots = arena.take_all(kind as usize, staging);
            let stays = (0..).zip(&resident[kind]).filter(|(_, stays)| **stays);
            for (range, _) in stays {
                // Only states are of several sizes.
                let smaller = (kind == Kind::State).then(|| layout.own_slot_bytes(kind, range));
                let smaller = smaller.and_then(|bytes| memory.smaller_class(bytes));
                slots.extend(arena.take_all(smaller.unwrap_or(kind as usize), 1));
            }
            slots
        });
        let core = Core::new(CoreSettings {
            units: layout.units().to_vec(),
            trained,
            external,
            resident,
            staging: memory.staging_counts(),
            iodepth: opened.iodepth - scratch_inflight_max,
            workers: workers_count,
            durable: matches!(arena, Arena::Session(_)),
        });
        Self {
            core,
            actions: Vec::new(),
            layout,
            arena,
            slots,
            grad_tiles,
            lending: Vec::new(),
            away: HashMap::new(),
            inflight: HashMap::new(),
            scratch,
            stall: Stall::default(),
            done: Vec::new(),
            replies,
            jobs,
            hypers: VecDeque::new(),
            steps: 0,
            updating_count: 0,
            updating_since: Instant::now(),
            blobs: VecDeque::new(),
            commit_begun: None,
            confirmer: None,
            recording: false,
            spans: Spans::default(),
            asked: false,
            io: StepIo {
                generation: opened.generation,
                ..StepIo::default()
            },
        }
    }

    pub(crate) fn with_confirmer(self, confirmer: Option<Confirmer>) -> Self {
        Self { confirmer, ..self }
    }

    /// What the callers of scratch tiles share with this thread.
    pub(crate) fn scratch(&self) -> Option<Arc<scratch::ScratchArea>> {
        self.scratch.as_ref().map(|scratch| scratch.area.clone())
    }

    /// Works until it is closed or something fails; the trainer's present or next request gets the error, and who waits for a scratch tile.
    pub(crate) fn run(mut self, messages: &Receiver<Message<H>>) -> Result<(), SwapperError> {
        let error = match self.work(messages) {
            Ok(in_order) => {
                self.end_scratch(None);
                return self.end(in_order);
            }
            Err(error) => Arc::new(self.with_devices(error)),
        };
        self.end_scratch(Some(&error));
        tracing::debug!(%error, state = self.core.describe(), "the swapper stops");
        if let Some(confirmer) = &self.confirmer {
            confirmer.give_up(&error);
        }
        self.core.on_event(Event::Failed, &mut self.actions);
        while !self.asked {
            match messages.recv() {
                Ok(Message::Request { .. }) => self.asked = true,
                // The trainer has not seen the error yet: `close` returns it.
                Ok(Message::Close { in_order: true }) => return Err(SwapperError::told(error)),
                Ok(Message::Close { in_order: false }) | Err(_) => return Ok(()),
                Ok(_) => {}
            }
        }
        // A trainer that has gone needs no answer.
        let _ = self.replies.send(Reply::Failed(SwapperError::told(error)));
        Ok(())
    }

    fn end_scratch(&self, failure: Option<&Arc<SwapperError>>) {
        if let Some(scratch) = &self.scratch {
            scratch.area.end(failure.cloned());
        }
    }

    /// Returns `true` when it was closed in order.
    fn work(&mut self, messages: &Receiver<Message<H>>) -> Result<bool, SwapperError> {
        loop {
            let mut idle = true;
            loop {
                match messages.try_recv() {
                    Ok(Message::Close { in_order }) => return Ok(in_order),
                    Ok(message) => self.handle(message)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(false),
                }
                idle = false;
            }
            let completed = self.completions()?;
            self.lend();
            self.start_scratch()?;
            if completed || !idle {
                continue;
            }
            match &mut self.arena {
                Arena::Memory(_) => match messages.recv() {
                    Ok(Message::Close { in_order }) => return Ok(in_order),
                    Ok(message) => {
                        self.handle(message)?;
                        self.lend();
                    }
                    Err(_) => return Ok(false),
                },
                Arena::Session(session) => {
                    // Completions were polled just before, so a suspended process is not mistaken for a stall.
                    let inflight = self.inflight.len() + scratch_inflight(&self.scratch);
                    self.stall.check(inflight, Instant::now())?;
                    let waits = inflight > 0 || self.commit_begun.is_some();
                    if let Some(waited) = self.stall.news().filter(|_| waits) {
                        for trouble in session.device_trouble() {
                            tracing::warn!(
                                "no tile has moved for {} s: {trouble}",
                                waited.as_secs()
                            );
                        }
                    }
                    let round = self.stall.round();
                    session.wait(round).map_err(client("waiting for tiles"))?;
                }
            }
        }
    }

    /// Adds the daemon's report about its devices to a stall.
    fn with_devices(&self, mut error: SwapperError) -> SwapperError {
        if let (SwapperError::Stalled { devices, log, .. }, Arena::Session(session)) =
            (&mut error, &self.arena)
        {
            *log = session.log();
            *devices = session.device_trouble();
            if devices.is_empty() {
                let known = session.info().devices.iter().filter(|device| !device.left);
                let paths: Vec<String> = known.map(|d| d.path.display().to_string()).collect();
                devices.push(format!(
                    "the daemon names none that hangs, the store is on {}",
                    paths.join(", ")
                ));
            }
        }
        error
    }

    fn end(self, in_order: bool) -> Result<(), SwapperError> {
        match self.arena {
            Arena::Session(session) if in_order => {
                session.close().map_err(client("closing the session"))
            }
            _ => Ok(()),
        }
    }

    fn handle(&mut self, message: Message<H>) -> Result<(), SwapperError> {
        match message {
            Message::Plan { ops, keep, blob } => {
                self.blobs.extend(blob);
                self.event(match keep {
                    true => Event::Pass(ops),
                    false => Event::Plan(ops),
                })
            }
            Message::Request {
                request,
                hyper,
                blob,
            } => {
                self.asked = true;
                self.blobs.extend(blob);
                if let Some(hyper) = hyper {
                    self.steps += 1;
                    self.hypers.push_back((self.steps, hyper));
                }
                self.event(Event::Request(request))
            }
            Message::Returned(all) => {
                for lent in all {
                    let range = lent.range;
                    self.put_back(lent);
                    self.event(Event::Returned { range })?;
                }
                Ok(())
            }
            Message::Updated {
                lent,
                worker,
                start,
                end,
            } => {
                let range = lent.range;
                self.put_back(lent);
                self.record(|layout| Span {
                    unit: Some(layout.ranges()[range as usize].unit),
                    elems: layout.ranges()[range as usize].elems.clone(),
                    worker,
                    end,
                    ..Span::since(SpanKind::Update, start)
                });
                self.updating_count -= 1;
                if self.updating_count == 0 {
                    self.io.update_ns += self.updating_since.elapsed().as_nanos() as u64;
                }
                self.event(Event::Updated { range })
            }
            Message::UpdatePanicked { range, message } => {
                let range = &self.layout.ranges()[range as usize];
                Err(SwapperError::UpdatePanicked {
                    unit: range.unit,
                    elems: range.elems.clone(),
                    message,
                })
            }
            Message::Scratch(operation) => {
                let scratch = self.scratch.as_mut().expect("only with an area");
                scratch.push(operation);
                Ok(())
            }
            Message::Record(recording) => {
                self.recording = recording;
                self.spans = Spans::default();
                Ok(())
            }
            Message::StallMax(stall_max) => {
                self.stall = Stall::new(stall_max);
                Ok(())
            }
            Message::Confirmable(generation) => self.confirm(generation?),
            Message::Cancel { why } => Err(SwapperError::Cancelled { why }),
            Message::Close { .. } => unreachable!("ends the loop it is received in"),
        }
    }

    /// Polls the session's completions. Returns whether there were any.
    fn completions(&mut self) -> Result<bool, SwapperError> {
        let Arena::Session(session) = &mut self.arena else {
            return Ok(false);
        };
        let mut done = std::mem::take(&mut self.done);
        session
            .poll(&mut done)
            .map_err(client("taking completions"))?;
        let committed = self.commit_begun.and_then(|_| session.poll_commit());
        let any = !done.is_empty() || committed.is_some();
        for one in done.drain(..) {
            self.moved(one)?;
        }
        self.done = done;
        if let Some(committed) = committed {
            self.committed(committed.map_err(client("committing"))?)?;
        }
        Ok(any)
    }

    /// Ends a commit, or asks whether all nodes have prepared it.
    fn committed(&mut self, committed: CommittedGeneration) -> Result<(), SwapperError> {
        if let (false, Some(confirmer)) = (committed.confirmed, &self.confirmer) {
            reach(Point::Prepared);
            confirmer.ask(committed.generation);
            return Ok(());
        }
        reach(Point::Committed);
        if let Some(start) = self.commit_begun.take() {
            self.record(|_| Span::since(SpanKind::Commit, start));
        }
        self.io.generation = committed.generation.0;
        self.event(Event::Committed)
    }

    /// Confirms a generation that is prepared on every node.
    fn confirm(&mut self, generation: Generation) -> Result<(), SwapperError> {
        let Arena::Session(session) = &mut self.arena else {
            panic!("a commit without a store");
        };
        reach(Point::Confirming);
        session
            .begin_confirm(generation)
            .map_err(client("confirming a commit"))
    }

    /// Begins what the caller wants to move of its own tiles.
    fn start_scratch(&mut self) -> Result<(), SwapperError> {
        let (Some(scratch), Arena::Session(session)) = (&mut self.scratch, &mut self.arena) else {
            return Ok(());
        };
        let was_idle = self.inflight.is_empty() && scratch.inflight_count() == 0;
        if scratch.start(session)? && was_idle {
            self.stall.moved(Instant::now());
        }
        Ok(())
    }

    fn moved(&mut self, done: EndedOperation) -> Result<(), SwapperError> {
        if let Some(scratch) = self.scratch.as_mut().filter(|area| area.has(done.tile)) {
            self.stall.moved(Instant::now());
            self.io.count_scratch(done.verb, scratch.ended(done));
            return Ok(());
        }
        let Moving {
            tile,
            slot,
            since: start,
            ..
        } = self
            .inflight
            .remove(&done.tile)
            .expect("only what is in flight completes");
        self.stall.moved(Instant::now());
        let reading = done.verb == Verb::SwapIn;
        match done.result {
            Ok(moved) => {
                let (bytes, count) = match reading {
                    true => (&mut self.io.read_bytes, &mut self.io.read_count),
                    false => (&mut self.io.written_bytes, &mut self.io.written_count),
                };
                *bytes += u64::from(moved.bytes);
                *count += 1;
                if tile.kind == Kind::Grad {
                    let grads = match reading {
                        true => &mut self.io.grad_read_bytes,
                        false => &mut self.io.grad_written_bytes,
                    };
                    *grads += u64::from(moved.bytes);
                }
                let kind = if reading {
                    SpanKind::Read
                } else {
                    SpanKind::Write
                };
                self.record(|layout| Span {
                    unit: Some(layout.ranges()[tile.range as usize].unit),
                    tile: Some(tile.kind),
                    elems: layout.ranges()[tile.range as usize].elems.clone(),
                    bytes: u64::from(moved.bytes),
                    ..Span::since(kind, start)
                });
                self.slots[tile.kind][slot.0 as usize] = Some(done.slot);
                self.event(Event::Moved { tile })
            }
            Err(source) => {
                let range = &self.layout.ranges()[tile.range as usize];
                Err(SwapperError::Tile {
                    doing: if reading { "reading" } else { "writing" },
                    kind: tile.kind,
                    unit: range.unit,
                    elems: range.elems.clone(),
                    source,
                })
            }
        }
    }

    fn event(&mut self, event: Event) -> Result<(), SwapperError> {
        let mut actions = std::mem::take(&mut self.actions);
        self.core.on_event(event, &mut actions);
        for action in actions.drain(..) {
            self.act(action)?;
        }
        self.actions = actions;
        Ok(())
    }

    fn act(&mut self, action: Action) -> Result<(), SwapperError> {
        match action {
            Action::Read { tile, slot, wanted } => {
                let swap = if wanted {
                    Session::swap_in_wanted
                } else {
                    Session::swap_in
                };
                self.start(swap, tile, slot)
            }
            Action::Promote { tile } => {
                let index = self.index(tile);
                let Arena::Session(session) = &mut self.arena else {
                    panic!("{tile:?} moves without a store");
                };
                match self.inflight.get(&index) {
                    Some(moving) => session
                        .promote(moving.ticket)
                        .map_err(client("hastening a tile")),
                    // The operation has ended, and the core will get the event.
                    None => Ok(()),
                }
            }
            Action::Write { tile, slot } => {
                reach(Point::Writing);
                self.start(Session::swap_out, tile, slot)
            }
            Action::Update { range, slots, step } => {
                let lent = self.lease(range, slots);
                while self.hypers.front().is_some_and(|(of, _)| *of < step) {
                    self.hypers.pop_front();
                }
                let (of, hyper) = self.hypers.front().expect("a step brings its hyper");
                assert_eq!(*of, step, "each step brings one hyper");
                let hyper = hyper.clone();
                if self.updating_count == 0 {
                    self.updating_since = Instant::now();
                }
                self.updating_count += 1;
                // A worker that is gone has panicked, and its message will come.
                let _ = self.jobs.send(UpdateJob { lent, hyper });
                Ok(())
            }
            Action::Lend { range, slots } => {
                let lent = self.lease(range, slots);
                self.lending.push(lent);
                Ok(())
            }
            Action::Commit { .. } => {
                let blob = self.blobs.pop_front().expect("a commit has its blob");
                let Arena::Session(session) = &mut self.arena else {
                    panic!("a commit without a store");
                };
                let blob = match &self.confirmer {
                    Some(confirmer) => confirmer.mark(&blob),
                    None => blob,
                };
                reach(Point::Committing);
                self.commit_begun = Some(Instant::now());
                session.begin_commit(blob).map_err(client("committing"))
            }
            Action::Done => {
                self.asked = false;
                let io = self.io;
                let spans = std::mem::take(&mut self.spans);
                self.lend();
                self.reply(Reply::Done { io, spans });
                Ok(())
            }
            Action::Refused { asked, announced } => {
                self.asked = false;
                self.reply(Reply::Failed(SwapperError::OutOfOrder { asked, announced }));
                Ok(())
            }
        }
    }

    /// The daemon's index of a tile.
    fn index(&self, tile: TileId) -> TileIndex {
        match tile.kind {
            Kind::Grad => self.grad_tiles[tile.range as usize]
                .expect("gradients without a scratch tile do not move"),
            kind => TileIndex(self.layout.table_index(kind, tile.range)),
        }
    }

    fn start(&mut self, swap: Swap, tile: TileId, slot: SlotNumber) -> Result<(), SwapperError> {
        let index = self.index(tile);
        let bytes = self.slots[tile.kind][slot.0 as usize]
            .take()
            .expect("the core knows where each slot is");
        let Arena::Session(session) = &mut self.arena else {
            panic!("{tile:?} moves without a store");
        };
        if self.inflight.is_empty() && scratch_inflight(&self.scratch) == 0 {
            self.stall.moved(Instant::now());
        }
        let ticket =
            swap(session, index, bytes).map_err(|(_, source)| client("moving a tile")(source))?;
        let moving = Moving {
            tile,
            slot,
            ticket,
            since: Instant::now(),
        };
        self.inflight.insert(index, moving);
        Ok(())
    }

    fn lease(&mut self, range: u32, slots: ByKind<Option<SlotNumber>>) -> Lease {
        self.away.insert(range, slots);
        let slots = ByKind::new(|kind| {
            slots[kind].map(|slot| {
                self.slots[kind][slot.0 as usize]
                    .take()
                    .expect("the core knows where each slot is")
            })
        });
        Lease { range, slots }
    }

    fn put_back(&mut self, lent: Lease) {
        let slots = self
            .away
            .remove(&lent.range)
            .expect("only what was lent comes back");
        for (kind, bytes) in Kind::ALL.into_iter().zip(lent.slots.0) {
            if let Some(slot) = slots[kind] {
                self.slots[kind][slot.0 as usize] = bytes;
            }
        }
    }

    /// Sends what has been lent since the last reply.
    fn lend(&mut self) {
        if !self.lending.is_empty() {
            let lent = std::mem::take(&mut self.lending);
            self.reply(Reply::Lend(lent));
        }
    }

    fn reply(&self, reply: Reply) {
        // A trainer that has gone needs no answer; its close comes next.
        let _ = self.replies.send(reply);
    }

    fn record(&mut self, span: impl FnOnce(&Layout) -> Span) {
        if self.recording {
            self.spans.push(span(&self.layout));
        }
    }
}

fn scratch_inflight(scratch: &Option<ScratchQueue>) -> usize {
    scratch.as_ref().map_or(0, ScratchQueue::inflight_count)
}

fn client(doing: &'static str) -> impl FnOnce(offload_client::ClientError) -> SwapperError {
    move |source| SwapperError::Client {
        doing: doing.into(),
        source,
    }
}
