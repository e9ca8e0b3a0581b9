//! The shared pages of a session.
//!
//! To be drawn and written: header, submission ring, completion ring.

pub mod entry;
