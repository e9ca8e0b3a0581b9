//! The daemon's decisions, without a clock, thread, file or async code: events in, actions out.

mod event;

pub use event::*;
