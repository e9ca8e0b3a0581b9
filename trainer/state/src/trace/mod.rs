//! A timeline of some steps for ui.perfetto.dev or chrome://tracing: when units were computed, moved and
//! waited for.
//!
//! ```text
//!   trainer thread   spans as it goes ─┐
//!   swapper          spans with a step ┼─▶ Trace ── at the end ──▶ file.rs: lanes, JSON
//!   a GPU's events   times afterwards ─┘
//! ```
//!
//! All times are from one clock, [`Instant`]. Only some steps are recorded, so that the file stays small. The
//! first two of a start are skipped, because they are not typical.

mod file;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use swapper::{Kind, Span, SpanKind, Spans};

/// Steps at the beginning of a start that are skipped if others follow: nothing is prefetched for the first,
/// and memory is touched.
const STEPS_SKIPPED: u64 = 2;

/// Default number of recorded steps.
pub const STEPS_DEFAULT: u64 = 5;

/// Largest number of events. Their file has about 150 MB, the most that viewers accept.
const EVENTS_MAX: usize = 1 << 20;

/// Error of writing the file.
#[derive(Debug, thiserror::Error)]
#[error("--trace: cannot write {}: {source}", path.display())]
pub struct TraceError {
    path: PathBuf,
    source: std::io::Error,
}

/// Row of the timeline. Overlapping events get additional rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Track {
    /// Whole steps.
    Step,
    /// Forward and backward of units.
    Compute,
    /// Gathers, scatters and waits of the computing thread.
    Move,
    /// Copies between host and GPU memory.
    Copy,
    /// Collective operations of ranks.
    Collective,
    /// Reads of tiles from devices.
    Read,
    /// Writes of tiles to devices.
    Write,
    /// Updates by the optimizer.
    Update,
    /// Commits of generations.
    Commit,
}

#[derive(Clone, Debug, PartialEq)]
struct Event {
    track: Track,
    name: String,
    start: Instant,
    end: Instant,
    /// Bytes moved; 0 if bytes are not counted.
    bytes: u64,
    /// Elements of the tile, for events of one tile.
    tile: Option<std::ops::Range<u64>>,
}

/// Records events for a file, or nothing. Clones record into the same file.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<Arc<Recorder>>);

#[derive(Debug)]
struct Recorder {
    path: PathBuf,
    /// Rank of this process.
    rank: u32,
    zero: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Steps finished since the start.
    finished: u64,
    /// Steps to record.
    steps: std::ops::Range<u64>,
    events: Vec<Event>,
    dropped_count: u64,
}

impl State {
    fn recording(&self) -> bool {
        self.steps.contains(&self.finished)
    }

    fn push(&mut self, event: Event) {
        if self.events.len() < EVENTS_MAX {
            self.events.push(event);
        } else {
            self.dropped_count += 1;
        }
    }
}

impl Trace {
    /// Records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Records `steps` steps of rank `rank` for the file `path`. Other ranks than the first write to
    /// `path.1`, `path.2` and so on.
    pub fn new(path: &Path, steps: u64, rank: u32) -> Self {
        let path = if rank == 0 {
            path.to_path_buf()
        } else {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{rank}"));
            name.into()
        };
        Self(Some(Arc::new(Recorder {
            path,
            rank,
            zero: Instant::now(),
            state: Mutex::new(State {
                steps: 0..steps,
                ..State::default()
            }),
        })))
    }

    /// Checks that the file can be created.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn check(&self) -> Result<(), TraceError> {
        let Some(recorder) = &self.0 else {
            return Ok(());
        };
        file::probe(&recorder.path).map_err(|source| TraceError {
            path: recorder.path.clone(),
            source,
        })
    }

    /// Chooses which of the next `steps_left` steps are recorded.
    pub fn begin(&self, steps_left: u64) {
        if let Some(mut state) = self.state() {
            let skipped = if steps_left > STEPS_SKIPPED {
                STEPS_SKIPPED
            } else {
                0
            };
            let count = state.steps.end;
            state.steps = skipped..skipped.saturating_add(count);
        }
    }

    /// Returns whether the current step is recorded.
    pub fn recording(&self) -> bool {
        self.state().is_some_and(|state| state.recording())
    }

    /// Returns whether the next step is the first recorded one. Called before a step is finished, because the
    /// swapper's later work belongs to the next step.
    pub fn begins_after(&self) -> bool {
        self.state()
            .is_some_and(|state| !state.recording() && state.steps.contains(&(state.finished + 1)))
    }

    /// Returns whether the last step to record is finished.
    pub fn has_ended(&self) -> bool {
        self.state()
            .is_some_and(|state| state.finished == state.steps.end)
    }

    /// Records from now until the guard is dropped.
    pub fn span(&self, track: Track, name: impl FnOnce() -> String) -> Guard<'_> {
        let open = self.recording().then(|| (name(), Instant::now()));
        Guard {
            trace: self,
            track,
            open,
            bytes: 0,
        }
    }

    /// Records a copy of `bytes` bytes from now until the guard is dropped.
    pub fn copy(&self, bytes: usize, name: impl FnOnce() -> String) -> Guard<'_> {
        let mut guard = self.span(Track::Copy, name);
        guard.bytes = bytes as u64;
        guard
    }

    /// Records an event with known times.
    pub fn record(&self, track: Track, name: String, start: Instant, end: Instant) {
        self.push(Event {
            track,
            name,
            start,
            end,
            bytes: 0,
            tile: None,
        });
    }

    /// Ends step number `number`, which began at `start`, and adds the swapper's spans.
    pub fn finish_step(&self, number: u64, start: Instant, spans: Spans) {
        if self.recording() {
            self.record(Track::Step, format!("step {number}"), start, Instant::now());
            self.add(spans);
        }
        if let Some(mut state) = self.state() {
            state.finished += 1;
        }
    }

    /// Adds the swapper's spans of a recorded step.
    pub fn add(&self, spans: Spans) {
        for span in spans.list {
            self.push(event_of(span));
        }
        if let Some(mut state) = self.state() {
            state.dropped_count += spans.dropped_count;
        }
    }

    /// Writes the file atomically and returns its path; `None` if nothing is recorded.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self) -> Result<Option<&Path>, TraceError> {
        let Some(recorder) = &self.0 else {
            return Ok(None);
        };
        let mut state = self.state().expect("a trace with a file has a recorder");
        let events = std::mem::take(&mut state.events);
        let written = file::write(
            &recorder.path,
            recorder.rank,
            recorder.zero,
            events,
            state.dropped_count,
        );
        written.map_err(|source| TraceError {
            path: recorder.path.clone(),
            source,
        })?;
        Ok(Some(&recorder.path))
    }

    fn push(&self, event: Event) {
        if let Some(mut state) = self.state()
            && state.recording()
        {
            state.push(event);
        }
    }

    fn state(&self) -> Option<MutexGuard<'_, State>> {
        let recorder = self.0.as_ref()?;
        // Events of a thread that panicked are valid.
        Some(
            recorder
                .state
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

/// Records a span that ends when it is dropped.
#[must_use = "the span ends when the guard is dropped"]
pub struct Guard<'a> {
    trace: &'a Trace,
    track: Track,
    open: Option<(String, Instant)>,
    bytes: u64,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some((name, start)) = self.open.take() {
            self.trace.push(Event {
                track: self.track,
                name,
                start,
                end: Instant::now(),
                bytes: self.bytes,
                tile: None,
            });
        }
    }
}

/// Converts a swapper's span to an event.
fn event_of(span: Span) -> Event {
    let kind = match span.tile {
        Some(Kind::Param) => "param ",
        Some(Kind::State) => "state ",
        Some(Kind::Grad) => "grad ",
        None => "",
    };
    let (track, verb) = match span.kind {
        SpanKind::Read => (Track::Read, "read"),
        SpanKind::Write => (Track::Write, "write"),
        SpanKind::Update => (Track::Update, "update"),
        SpanKind::Commit => (Track::Commit, "commit"),
        SpanKind::Gather => (Track::Move, "gather"),
        SpanKind::Scatter => (Track::Move, "scatter"),
        SpanKind::Wait => (Track::Move, "wait"),
    };
    let unit = span
        .unit
        .map_or(String::new(), |unit| format!("unit {unit}"));
    Event {
        track,
        name: format!("{verb} {kind}{unit}").trim_end().to_owned(),
        start: span.start,
        end: span.end,
        bytes: span.bytes,
        tile: (!span.elems.is_empty()).then_some(span.elems),
    }
}

#[cfg(test)]
mod tests;
