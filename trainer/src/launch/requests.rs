//! Requests to end: signals, and lines from a launcher on another machine that started this one.
//!
//! Signals do not cross a remote shell, so a remote launcher reads its standard input: the job token in the first line,
//! then a line for each signal. The input's end means that the other launcher is gone.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, channel};

use kernels_torch::collective::{CollectiveError, JobToken};
use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::LaunchError;

/// Lines that stand for signals.
const INTERRUPT: &str = "interrupt";
const TERMINATE: &str = "terminate";

/// Longest line.
const LINE_BYTES_MAX: u64 = 256;

/// Requests that have not been handled.
pub(super) struct Requests {
    signals: Signals,
    lines: Option<Receiver<Signal>>,
}

impl Requests {
    /// Receives SIGTERM and SIGINT from now on.
    pub(super) fn new() -> Result<Requests, LaunchError> {
        Ok(Requests {
            signals: Signals::new([SIGTERM, SIGINT]).map_err(LaunchError::Signals)?,
            lines: None,
        })
    }

    /// Also follows the lines of standard input. Returns the job token, which is the first one.
    pub(super) fn follow_input(&mut self) -> Result<JobToken, LaunchError> {
        let mut input = BufReader::new(std::io::stdin());
        let line = |input: &mut BufReader<_>| {
            let mut text = String::new();
            let read = input.by_ref().take(LINE_BYTES_MAX).read_line(&mut text);
            read.ok()
                .filter(|&bytes| bytes > 0)
                .map(|_| text.trim_end().to_owned())
        };
        let no_token = CollectiveError::Token {
            problem: "is not the first line of standard input, which --controlled expects",
        };
        let token = JobToken::new(&line(&mut input).ok_or(no_token)?)?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            loop {
                let request = match line(&mut input).as_deref() {
                    Some(INTERRUPT) => Signal::INT,
                    Some(TERMINATE) => Signal::TERM,
                    Some(_) => continue,
                    None => break,
                };
                if sender.send(request).is_err() {
                    return;
                }
            }
            // The launcher that started this one is gone.
            let _ = sender.send(Signal::TERM);
        });
        self.lines = Some(lines);
        Ok(token)
    }

    /// Requests since the last call.
    pub(super) fn pending(&mut self) -> Vec<Signal> {
        let signals = self.signals.pending().map(|signal| match signal {
            SIGINT => Signal::INT,
            _ => Signal::TERM,
        });
        let mut pending: Vec<Signal> = signals.collect();
        pending.extend(self.lines.iter().flat_map(Receiver::try_iter));
        pending
    }
}

/// Line that asks a remote launcher for `signal`.
pub(super) fn line(signal: Signal) -> String {
    let name = if signal == Signal::INT {
        INTERRUPT
    } else {
        TERMINATE
    };
    format!("{name}\n")
}
