//! Devices, slots, a trainer and an update worker that answer the core in any order, and check its actions.

mod trainer;

use std::collections::VecDeque;
use std::ops::Range;

use swapper::core::{
    Action, ByKind, Core, CoreSettings, Event, Kind, Op, Request, SlotNumber, TileId,
    UPDATES_PER_WORKER,
};
use swapper::{Schedule, StepProgram, resident};

use crate::toy::{Content, Reference, Rng, filled, gradient, revised, rewritten, trained, update};

/// The training job. It stays the same over all incarnations.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) units: Vec<Range<u32>>,
    pub(crate) program: StepProgram,
    /// Whether each range gets gradients.
    pub(crate) trained: Vec<bool>,
    /// Whether the state of each range is revised in each step that updates it, the same for all ranges of a unit.
    pub(crate) revised: Vec<bool>,
    /// Whether each range has parameters alone, which are never written again.
    pub(crate) frozen: Vec<bool>,
    /// Whether each step's gradients overflow. Steps that rewrite have none.
    pub(crate) skipped: Vec<bool>,
    /// Units that each step rewrites; such a step does nothing else.
    pub(crate) rewrites: Vec<Vec<usize>>,
    /// Passes of each step, whose gradients add up.
    pub(crate) passes: Vec<u64>,
    pub(crate) evaluate_every: usize,
    pub(crate) durable: bool,
}

impl Job {
    pub(crate) fn ranges(&self) -> usize {
        self.trained.len()
    }

    /// Units whose states are revised.
    pub(crate) fn revised_units(&self) -> Vec<usize> {
        let units = 0..self.units.len();
        units
            .filter(|&unit| self.revised[self.units[unit].start as usize])
            .collect()
    }

    /// Ranges with a tile of `kind`.
    pub(crate) fn with(&self, kind: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranges()).filter(move |&range| kind == 0 || !self.frozen[range])
    }

    /// Which ranges' tiles of `kind` stay in host memory; of `external` ones none does.
    pub(crate) fn residents(&self, kind: usize, fraction: f64, external: &[bool]) -> Vec<bool> {
        let mut residents = vec![false; self.ranges()];
        let may: Vec<usize> = (self.with(kind))
            .filter(|&range| !external[range])
            .collect();
        for (range, chosen) in may.iter().zip(resident(may.len(), fraction)) {
            residents[*range] = chosen;
        }
        residents
    }

    /// Contents of a range as they are stored.
    fn stored(&self, range: usize, [param, state]: [Content; 2]) -> [Option<Content>; 2] {
        [Some(param), (!self.frozen[range]).then_some(state)]
    }
}

/// Setup of one incarnation of the swapper. The next incarnation may have another.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Whether the trainer has each range's newest content.
    pub(crate) external: Vec<bool>,
    pub(crate) shares: [f64; 3],
    pub(crate) staging: [u32; 3],
    pub(crate) iodepth: u32,
    pub(crate) workers: usize,
    pub(crate) schedule: Schedule,
    pub(crate) commit_every: u64,
    /// Percentage of operations before which the rest of the pass is announced again.
    pub(crate) revisions: usize,
    /// Percentage of steps whose blob comes after their end.
    pub(crate) late_blobs: usize,
    /// Percentage of scatters after which updates begin before the step's end.
    pub(crate) begins: usize,
    /// Relative speeds of trainer, worker, reads, writes and commits.
    pub(crate) speeds: [usize; 5],
    /// Number of the operation that fails, which ends the incarnation.
    pub(crate) fails_at: Option<u64>,
}

/// Content of the devices: the newest content of each tile, and the last generation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    pub(crate) committed: Option<Generation>,
    /// Newest content, by range and kind.
    working: Vec<[Option<Content>; 2]>,
}

#[derive(Clone, Debug)]
pub(crate) struct Generation {
    /// The blob: the last step that the trainer had finished.
    pub(crate) step: u64,
    contents: Vec<[Option<Content>; 2]>,
}

/// Tiles that an incarnation moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    /// Tiles read and written, by kind.
    pub(crate) reads: [u64; 3],
    pub(crate) writes: [u64; 3],
    /// Passes begun and ended: each may have made read-ahead useless.
    pub(crate) passes: u64,
    /// Passes that continued a step.
    pub(crate) further: u64,
    /// Times that updates began before the end of their step.
    pub(crate) begun: u64,
    /// Steps whose last updates joined those that had begun.
    pub(crate) joined: u64,
    /// External ranges that were copied.
    pub(crate) copies: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    holds: Option<(u32, Option<Content>)>,
    /// Whether the slot is with the kernel, the trainer or the worker.
    away: bool,
}

#[derive(Clone, Copy, Debug)]
enum Io {
    Read(TileId, SlotNumber),
    Write(TileId, SlotNumber),
}

#[derive(Clone, Debug)]
enum Call {
    Plan(Vec<Op>, Option<u64>),
    /// A plan that keeps the step's gradients.
    Pass(Vec<Op>, Option<u64>),
    /// A request that lets updates begin; whether others of its step have begun before.
    Begin(Request, bool),
    /// A plan that rewrites units.
    Rewrite(Vec<Op>, Option<u64>),
    /// All units are rewritten: a step is over.
    Rewritten,
    Request(Request, Option<u64>),
}

/// One incarnation of the swapper, from its start to its end or first failure.
pub(crate) struct Incarnation<'a> {
    job: &'a Job,
    reference: &'a Reference,
    setup: &'a Setup,
    store: &'a mut Store,
    rng: &'a mut Rng,
    core: Core,
    actions: Vec<Action>,
    slots: ByKind<Vec<Slot>>,
    /// Gradients that the update of their step has not used yet, by range.
    grads: Vec<Option<Content>>,
    /// Newest content of external ranges.
    held: Vec<Option<[Content; 2]>>,
    /// Scatters of each range in the present step.
    sums: Vec<u64>,
    /// Gradients on this incarnation's scratch tiles.
    scratch: Vec<Option<Content>>,
    ios: Vec<Io>,
    io_number: u64,
    updates: VecDeque<(u32, ByKind<Option<SlotNumber>>, u64)>,
    lent: VecDeque<(u32, ByKind<Option<SlotNumber>>)>,
    committing: Option<u64>,
    /// Blobs of commits planned and not begun.
    blobs: VecDeque<u64>,

    // The trainer.
    calls: VecDeque<Call>,
    /// Operation that the trainer waits for; `None` while it computes.
    asked: Option<Op>,
    waiting: bool,
    step: u64,
    /// Steps of this incarnation whose hyper was sent, by the core's count.
    hypers: Vec<u64>,
    /// Whether updates of the step after `step` have begun.
    begun: bool,
    pending: Vec<usize>,
    uncommitted: u64,
    ending: bool,
    /// Generation of each step's tiles, according to the trainer's calls; and the acknowledged generation.
    generation: u64,
    generation_of: Vec<u64>,
    acknowledged: u64,
    moves: Moves,
}

/// How an incarnation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished,
    Failed,
}

impl<'a> Incarnation<'a> {
    pub(crate) fn new(
        job: &'a Job,
        reference: &'a Reference,
        setup: &'a Setup,
        store: &'a mut Store,
        rng: &'a mut Rng,
    ) -> Self {
        let ranges = job.ranges();
        let residents = ByKind::new(|kind| {
            job.residents(kind as usize, setup.shares[kind as usize], &setup.external)
        });
        let core = Core::new(CoreSettings {
            units: job.units.clone(),
            trained: job.frozen.iter().map(|frozen| !frozen).collect(),
            external: setup.external.clone(),
            resident: residents.clone(),
            staging: ByKind(setup.staging),
            iodepth: setup.iodepth,
            workers: setup.workers,
            durable: job.durable,
        });
        let slots = ByKind::new(|kind| {
            let count = residents[kind].iter().filter(|&&r| r).count()
                + setup.staging[kind as usize] as usize;
            vec![
                Slot {
                    holds: None,
                    away: false
                };
                count
            ]
        });
        // Tiles written after the last commit have arbitrary content: an incarnation must never read them.
        store.working = match &store.committed {
            Some(generation) => generation.contents.clone(),
            None => vec![[None; 2]; ranges],
        };
        let step = store.committed.as_ref().map_or(0, |g| g.step);
        let at_start = &reference.0[step as usize];
        let held = (setup.external.iter().zip(at_start))
            .map(|(external, contents)| external.then_some(*contents))
            .collect();
        Self {
            job,
            reference,
            setup,
            store,
            rng,
            core,
            actions: Vec::new(),
            slots,
            grads: vec![None; ranges],
            held,
            sums: vec![0; ranges],
            scratch: vec![None; ranges],
            ios: Vec::new(),
            io_number: 0,
            updates: VecDeque::new(),
            lent: VecDeque::new(),
            committing: None,
            blobs: VecDeque::new(),
            calls: VecDeque::new(),
            asked: None,
            waiting: false,
            step,
            hypers: Vec::new(),
            begun: false,
            pending: Vec::new(),
            uncommitted: 0,
            ending: false,
            generation: 1,
            // Generations of the filled tiles and of an earlier incarnation's: already on devices, or to be filled into generation 1.
            generation_of: vec![1; step as usize + 1],
            acknowledged: 0,
            moves: Moves::default(),
        }
    }

    /// Trains to the last step and visits all tiles.
    pub(crate) fn run(mut self) -> (End, Moves) {
        if self.store.committed.is_none() {
            self.call_fill();
        }
        loop {
            // One of those that can make progress, chosen by speed: the trainer, the worker, reads, writes, the commit.
            let reads = self
                .ios
                .iter()
                .filter(|io| matches!(io, Io::Read(..)))
                .count();
            let writes = self.ios.len() - reads;
            let trainer = !self.lent.is_empty() || !self.waiting;
            let able = [
                trainer,
                !self.updates.is_empty(),
                reads > 0,
                writes > 0,
                self.committing.is_some(),
            ];
            let weights: Vec<usize> = able
                .iter()
                .zip(self.setup.speeds)
                .map(|(&able, speed)| if able { speed } else { 0 })
                .collect();
            let total: usize = weights.iter().sum();
            assert!(
                total > 0,
                "nothing can get on: {}; {:?}",
                self.core.describe(),
                self.setup
            );
            let mut pick = self.rng.below(total);
            let who = weights
                .iter()
                .position(|&weight| {
                    let found = pick < weight;
                    pick = pick.wrapping_sub(weight);
                    found
                })
                .unwrap();
            let failed = match who {
                0 if self.lent.is_empty() => {
                    if !self.next_call() {
                        // Gradients of a skipped step may still be in flight.
                        while let Some(io) = self.ios.first() {
                            let (Io::Read(tile, _) | Io::Write(tile, _)) = io;
                            assert_eq!(tile.kind, Kind::Grad, "{tile:?} moves for nobody");
                            let reading = matches!(io, Io::Read(..));
                            if self.complete_io(reading) {
                                self.fail();
                                return (End::Failed, self.moves);
                            }
                        }
                        self.check_end();
                        return (End::Finished, self.moves);
                    }
                    false
                }
                0 => {
                    self.give_back();
                    false
                }
                1 => {
                    self.update();
                    false
                }
                2 => self.complete_io(true),
                3 => self.complete_io(false),
                _ => self.complete_commit(),
            };
            if failed {
                self.fail();
                return (End::Failed, self.moves);
            }
        }
    }

    fn event(&mut self, event: Event) {
        self.core.on_event(event, &mut self.actions);
        for action in std::mem::take(&mut self.actions) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Read { tile, slot, .. } => {
                assert!(self.job.durable);
                for io in &self.ios {
                    let (Io::Read(other, _) | Io::Write(other, _)) = io;
                    assert_ne!(*other, tile, "two operations on one tile");
                }
                assert!(
                    tile.kind != Kind::Grad || self.grads[tile.range as usize].is_some(),
                    "gradients are read that nobody wants"
                );
                self.claim(tile.kind, tile.range, slot);
                self.moves.reads[tile.kind as usize] += 1;
                self.ios.push(Io::Read(tile, slot));
                self.check_iodepth();
            }
            Action::Promote { tile } => {
                let reading = |io: &Io| matches!(io, Io::Read(other, _) if *other == tile);
                assert!(
                    self.ios.iter().any(reading),
                    "{tile:?} is not on its way in"
                );
            }
            Action::Write { tile, slot } => {
                assert!(self.job.durable);
                let content = self.borrow_slot(tile.kind, tile.range, slot);
                self.moves.writes[tile.kind as usize] += 1;
                self.ios.push(Io::Write(tile, slot));
                self.check_iodepth();
                if tile.kind == Kind::Grad {
                    return;
                }
                // A range without gradients in this run is copied as it is.
                let is_old = self.setup.external[tile.range as usize]
                    && !self.job.trained[tile.range as usize];
                let generation = match is_old {
                    true => self.acknowledged + 1,
                    // What is revised belongs to the generation of its update.
                    false => (self.generation_of.get(content.step as usize).copied())
                        .unwrap_or(self.generation),
                };
                assert_eq!(
                    generation,
                    self.acknowledged + 1,
                    "{tile:?} of step {} is written in the wrong generation",
                    content.step
                );
                assert!(self.committing.is_none(), "a write during a commit");
            }
            Action::Update { range, slots, step } => {
                let external = self.setup.external[range as usize];
                assert_eq!(slots[Kind::Grad].is_none(), external);
                for kind in Kind::ALL {
                    match slots[kind] {
                        Some(slot) if external => self.claim(kind, range, slot),
                        Some(slot) => drop(self.borrow_slot(kind, range, slot)),
                        None => {}
                    }
                }
                self.updates
                    .push_back((range, slots, self.hypers[step as usize - 1]));
                assert!(
                    self.updates.len() <= self.setup.workers * UPDATES_PER_WORKER,
                    "the workers have a short queue"
                );
            }
            Action::Lend { range, slots } => self.lend(range, slots),
            Action::Commit { generation } => {
                assert!(self.committing.is_none(), "two commits at once");
                assert_eq!(generation, self.acknowledged + 1);
                let writing = |io: &Io| matches!(io, Io::Write(tile, _) if tile.kind != Kind::Grad);
                assert!(
                    !self.ios.iter().any(writing),
                    "a commit while tiles are written"
                );
                let blob = self.blobs.pop_front().expect("a commit nobody planned");
                self.committing = Some(blob);
            }
            Action::Done => {
                assert!(self.waiting && self.lent.is_empty());
                // The gradients of a skipped step are not used.
                let skipped = |step: u64| self.job.skipped[step as usize - 1];
                for grad in &mut self.grads {
                    *grad = grad.filter(|grad| grad.step > self.step || !skipped(grad.step));
                }
                self.waiting = false;
                self.asked = None;
            }
            Action::Refused { asked, announced } => panic!("{asked:?} refused for {announced:?}"),
        }
    }

    fn lend(&mut self, range: u32, slots: ByKind<Option<SlotNumber>>) {
        let first = self.sums[range as usize] == 0;
        let empty = match self.asked {
            Some(Op::Fill { .. }) => true,
            Some(Op::Scatter { .. }) => first,
            _ => false,
        };
        for kind in Kind::ALL {
            let Some(slot) = slots[kind] else {
                continue;
            };
            if empty {
                self.claim(kind, range, slot);
            } else {
                self.borrow_slot(kind, range, slot);
            }
        }
        let grad = slots[Kind::Grad].is_some();
        let has_grads = matches!(self.asked, Some(Op::Scatter { .. } | Op::Revise { .. }));
        assert_eq!(grad, has_grads);
        assert!(
            !grad || self.updates.iter().all(|(updated, ..)| *updated != range),
            "gradients are overwritten while an update reads them"
        );
        self.lent.push_back((range, slots));
    }

    /// Takes a slot into use for new content of `range`. Its old content must be on its device or unused.
    fn claim(&mut self, kind: Kind, range: u32, slot: SlotNumber) {
        let holder = self.slots[kind][slot.0 as usize];
        assert!(!holder.away, "{slot:?} is in use");
        if let Some((held, Some(content))) = holder.holds {
            let safe = match kind {
                Kind::Grad => {
                    self.grads[held as usize] != Some(content)
                        || self.scratch[held as usize] == Some(content)
                }
                _ => {
                    // What a commit lacks of the trainer's content shows when it ends.
                    held == range
                        || self.setup.external[held as usize]
                        || self.store.working[held as usize][kind as usize]
                            .is_some_and(|on| on == content || on.step > content.step)
                }
            };
            assert!(safe, "the newest content of range {held} is lost");
        }
        self.slots[kind][slot.0 as usize] = Slot {
            holds: Some((range, None)),
            away: true,
        };
    }

    /// Takes a slot into use, which must hold the content of `range`.
    fn borrow_slot(&mut self, kind: Kind, range: u32, slot: SlotNumber) -> Content {
        let slot = &mut self.slots[kind][slot.0 as usize];
        assert!(!slot.away, "a slot is used twice");
        slot.away = true;
        let Some((held, Some(content))) = slot.holds else {
            panic!("range {range} was lent a slot without content");
        };
        assert_eq!(held, range, "a slot holds another range");
        content
    }

    fn check_iodepth(&self) {
        assert!(
            self.ios.len() <= self.setup.iodepth as usize,
            "iodepth exceeded"
        );
    }

    fn give_back(&mut self) {
        let (range, slots) = self.lent.pop_front().unwrap();
        let index = range as usize;
        let op = self.asked.expect("lent for something");
        // Every use sees all finished steps applied, and nothing of the current one.
        let finished = self.step;
        for kind in Kind::STORED {
            let Some(slot) = slots[kind] else { continue };
            let slot = &mut self.slots[kind][slot.0 as usize];
            assert!(std::mem::take(&mut slot.away));
            if let Op::Fill { .. } = op {
                slot.holds = Some((range, Some(filled(kind as usize, index))));
            }
            let (_, content) = slot.holds.unwrap();
            assert_eq!(
                content,
                Some(self.reference.0[finished as usize][index][kind as usize]),
                "{op:?} sees range {range} otherwise than after step {finished}"
            );
            if let Op::Revise { .. } = op {
                let grad = self.grads[index].expect("a revision has gradients").value;
                slot.holds = Some((range, Some(revised(finished + 1, content.unwrap(), grad))));
            }
            if let Op::Rewrite { .. } = op {
                let content = rewritten(finished + 1, kind as usize, content.unwrap());
                slot.holds = Some((range, Some(content)));
            }
        }
        if let Some(slot) = slots[Kind::Grad] {
            let param = self.reference.0[self.step as usize][index][0];
            let step = self.step + 1;
            let (_, sum) = self.slots[Kind::Grad][slot.0 as usize].holds.unwrap();
            assert_eq!(
                sum,
                self.grads[index].filter(|grad| grad.step == step),
                "a stale sum"
            );
            let mut grad = sum;
            if let Op::Scatter { .. } = op {
                self.sums[index] += 1;
                grad = Some(Content {
                    value: gradient(step, index, param, self.sums[index]),
                    step,
                });
                self.grads[index] = grad;
            }
            self.slots[Kind::Grad][slot.0 as usize] = Slot {
                holds: Some((range, grad)),
                away: false,
            };
        }
        self.event(Event::Returned { range });
    }

    /// Updates the content of external ranges, as the trainer does before it ends a step.
    pub(crate) fn update_external(&mut self, step: u64) {
        for range in 0..self.job.ranges() {
            if let Some(held) = &mut self.held[range]
                && self.job.trained[range]
            {
                let copies = |&(copied, ..): &(u32, _, _)| copied as usize == range;
                assert!(
                    !self.updates.iter().any(copies),
                    "content that is being copied changes"
                );
                *held = trained(self.job, step, range, *held);
            }
        }
    }

    fn update(&mut self) {
        // Any update with a worker may end first.
        let at = self.rng.below(self.updates.len().min(self.setup.workers));
        let (range, slots, step) = self.updates.remove(at).unwrap();
        let index = range as usize;
        if let Some(held) = self.held[index] {
            self.moves.copies += 1;
            for kind in Kind::STORED {
                let slot = slots[kind].expect("both are copied");
                let slot = &mut self.slots[kind][slot.0 as usize];
                assert!(std::mem::take(&mut slot.away));
                slot.holds = Some((range, Some(held[kind as usize])));
            }
            return self.event(Event::Updated { range });
        }
        let slots = ByKind::new(|kind| slots[kind].expect("an update needs all"));
        let [param, state, grad] = Kind::ALL.map(|kind| {
            let (_, content) = self.slots[kind][slots[kind].0 as usize].holds.unwrap();
            content.unwrap()
        });
        assert_eq!(
            self.grads[index].take(),
            Some(grad),
            "the newest gradients of range {range} are used, once"
        );
        assert_eq!(grad.step, step, "gradients and hyper are of one step");
        self.slots[Kind::Grad][slots[Kind::Grad].0 as usize].away = false;
        let after = update(step, [param, state], grad.value);
        for kind in Kind::STORED {
            let slot = &mut self.slots[kind][slots[kind].0 as usize];
            assert!(std::mem::take(&mut slot.away));
            slot.holds = Some((range, Some(after[kind as usize])));
        }
        self.event(Event::Updated { range });
    }

    /// Ends one of the operations of a direction, in any order. Returns `true` when it fails.
    fn complete_io(&mut self, reading: bool) -> bool {
        let of_direction: Vec<usize> = (0..self.ios.len())
            .filter(|&at| matches!(self.ios[at], Io::Read(..)) == reading)
            .collect();
        let at = of_direction[self.rng.below(of_direction.len())];
        let io = self.ios.remove(at);
        self.io_number += 1;
        if self.setup.fails_at == Some(self.io_number) {
            return true;
        }
        let (Io::Read(tile, slot) | Io::Write(tile, slot)) = io;
        let on_device = match tile.kind {
            Kind::Grad => &mut self.scratch[tile.range as usize],
            _ => &mut self.store.working[tile.range as usize][tile.kind as usize],
        };
        let slot = &mut self.slots[tile.kind][slot.0 as usize];
        assert!(std::mem::take(&mut slot.away));
        match io {
            Io::Read(..) => {
                assert!(on_device.is_some(), "{tile:?} was never written");
                slot.holds = Some((tile.range, *on_device));
            }
            Io::Write(..) => *on_device = slot.holds.unwrap().1,
        }
        self.event(Event::Moved { tile });
        false
    }

    fn complete_commit(&mut self) -> bool {
        let step = self.committing.take().unwrap();
        self.io_number += 1;
        if self.setup.fails_at == Some(self.io_number) {
            return true;
        }
        for (range, contents) in self.store.working.iter().enumerate() {
            let expected = self.reference.0[step as usize][range];
            let expected = self.job.stored(range, expected);
            assert_eq!(
                *contents, expected,
                "generation of step {step} has range {range} otherwise"
            );
        }
        self.store.committed = Some(Generation {
            step,
            contents: self.store.working.clone(),
        });
        self.acknowledged += 1;
        self.event(Event::Committed);
        false
    }

    /// After a failure the core starts nothing, whatever completes.
    fn fail(&mut self) {
        self.core.on_event(Event::Failed, &mut self.actions);
        for io in std::mem::take(&mut self.ios) {
            let (Io::Read(tile, _) | Io::Write(tile, _)) = io;
            self.core.on_event(Event::Moved { tile }, &mut self.actions);
        }
        for (range, ..) in std::mem::take(&mut self.updates) {
            self.core
                .on_event(Event::Updated { range }, &mut self.actions);
        }
        assert_eq!(self.actions, [], "something is started after a failure");
    }

    fn check_end(&self) {
        assert!(self.ios.is_empty() && self.updates.is_empty() && self.committing.is_none());
        assert!(self.slots.0.iter().flatten().all(|slot| !slot.away));
        assert!(self.blobs.is_empty());
        if self.job.durable {
            let generation = self.store.committed.as_ref().expect("a drain commits");
            assert_eq!(generation.step, self.job.skipped.len() as u64);
        }
    }
}
