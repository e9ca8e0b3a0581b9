//! Traces of the core: one line for each daemon that a test starts, with a hash of every event, every action of the answer, and the visible state
//! after each event.
//!
//! For changes that must change no decision: `OFFLOADD_TRACES=before cargo test -p offloadd --test simulation` writes the lines to the file `before`.
//! The sorted lines of two builds are equal if every daemon made the same decisions in the same order.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hasher};
use std::io::Write;

use offloadd::core::{Action, Core, Event, Viewer};
use offloadd::io::Buffer;
use test_hooks::random::SimRandom;

/// The trace of one daemon; its line is written when it is dropped.
pub(crate) struct Trace(Option<Open>);

struct Open {
    file: File,
    /// Text of the whole trace, if requested.
    text: Option<File>,
    test: String,
    begins_with: SimRandom,
    event_count: u64,
    hash: DefaultHasher,
}

impl Trace {
    /// Begins a trace if the environment asks for traces.
    pub(crate) fn new(random: &SimRandom) -> Self {
        let open = |path| OpenOptions::new().append(true).create(true).open(path);
        let Some(path) = std::env::var_os("OFFLOADD_TRACES") else {
            return Self(None);
        };
        let text = std::env::var_os("OFFLOADD_TRACE_TEXT");
        let thread = std::thread::current();
        Self(Some(Open {
            file: open(path).expect("a file for traces"),
            text: text.map(|path| open(path).expect("a file for a trace's text")),
            test: thread.name().unwrap_or("crashes").to_owned(),
            begins_with: random.clone(),
            event_count: 0,
            hash: DefaultHasher::new(),
        }))
    }

    pub(crate) fn event(&mut self, event: &Event) {
        let Some(open) = &mut self.0 else { return };
        open.event_count += 1;
        open.add(&format!("{event:?}\n"));
        if let Event::IoDone {
            read: Some(read), ..
        } = event
        {
            open.hash.write(read.as_slice());
        }
    }

    pub(crate) fn action(&mut self, action: &Action) {
        let Some(open) = &mut self.0 else { return };
        open.add(&format!("  {action:?}\n"));
        if let Action::Io {
            buffer: Buffer::Meta(bytes),
            ..
        } = action
        {
            open.hash.write(bytes.as_slice());
        }
    }

    /// Adds the visible state of the core.
    pub(crate) fn state(&mut self, core: &Core) {
        let Some(open) = &mut self.0 else { return };
        let mut seen = format!(
            "  = {:?} {:?} {:?} {} {} {:?} {}",
            core.device_states(),
            core.job_states(Viewer::All),
            core.moves(),
            core.moved_bytes(),
            core.copied_bytes(),
            core.arena_used(),
            core.inflight_count(),
        );
        if core.is_quiet() {
            write!(seen, " {:?}", core.hand_over()).expect("a string takes all");
        }
        open.add(&seen);
    }
}

impl Open {
    fn add(&mut self, text: &str) {
        self.hash.write(text.as_bytes());
        if let Some(file) = &mut self.text {
            file.write_all(text.as_bytes())
                .expect("a file for a trace's text");
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let Some(open) = &mut self.0 else { return };
        let line = format!(
            "{} {:?} {} {:016x}\n",
            open.test,
            open.begins_with,
            open.event_count,
            open.hash.finish()
        );
        // One write per line: several tests append at the same time.
        let _ = open.file.write_all(line.as_bytes());
    }
}
