//! Requests to end or to make a checkpoint: signals, and lines from a launcher on another machine that started this one.
//!
//! Signals do not cross a remote shell, so a remote launcher reads its standard input: the job token in the first line,
//! then a line for each signal. The input's end means that the other launcher is gone.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, channel};

use offload_support::signals::is_ignored;
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use training_ranks::{CollectiveError, JobToken};

use super::LaunchError;

/// Forwarded signals, with the lines that stand for them.
const SIGNALS: [(i32, Signal, &str); 4] = [
    (SIGINT, Signal::INT, "interrupt"),
    (SIGTERM, Signal::TERM, "terminate"),
    (SIGHUP, Signal::HUP, "hang up"),
    (SIGUSR1, Signal::USR1, "checkpoint"),
];

/// Longest line.
const LINE_BYTES_MAX: u64 = 256;

/// Requests that have not been handled.
pub(super) struct LaunchRequests {
    signals: Signals,
    lines: Option<Receiver<Signal>>,
}

impl LaunchRequests {
    /// Receives the signals from now on, except SIGHUP if the launcher was made to ignore it, as by nohup.
    pub(super) fn new() -> Result<LaunchRequests, LaunchError> {
        let numbers = SIGNALS.map(|(number, ..)| number).into_iter();
        let numbers = numbers.filter(|&number| number != SIGHUP || !is_ignored(number));
        Ok(LaunchRequests {
            signals: Signals::new(numbers).map_err(LaunchError::Signals)?,
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
            while let Some(word) = line(&mut input) {
                let known = SIGNALS.iter().find(|(.., name)| *name == word);
                let Some(&(_, request, _)) = known else {
                    continue;
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
        let signals = self.signals.pending().filter_map(|number| {
            let known = SIGNALS.iter().find(|(known, ..)| *known == number);
            known.map(|(_, signal, _)| *signal)
        });
        let mut pending: Vec<Signal> = signals.collect();
        pending.extend(self.lines.iter().flat_map(Receiver::try_iter));
        pending
    }
}

/// Line that asks a remote launcher for `signal`.
pub(super) fn line(signal: Signal) -> String {
    let known = SIGNALS.iter().find(|(_, known, _)| *known == signal);
    // A host is also told to end after another one has failed.
    format!("{}\n", known.map_or("terminate", |(.., name)| name))
}
