//! `offloadd top`: throughput and latency of a running daemon's drives and jobs.
//!
//! A rate is the difference of a counter in two snapshots, divided by the time between them on the daemon's clock, so that a slow
//! terminal or a busy machine does not distort it.

mod between;
mod json;
mod table;
#[cfg(test)]
mod tests;
mod users;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use offloadd::metrics::Snapshot;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use super::connection::{Daemon, runtime};
use super::print;
use super::store_access::WhichStore;

/// Switches to the terminal's alternate screen and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Undoes [`ENTER`].
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

#[derive(Args)]
pub(crate) struct TopOptions {
    #[command(flatten)]
    store: WhichStore,
    /// Print one table and exit
    #[arg(long)]
    once: bool,
    /// Print JSON: one line per interval, or one line with --once
    #[arg(long)]
    json: bool,
    /// Seconds between two updates, from 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("must be from 0.1 to 3600 seconds".into()),
    }
}

pub(crate) fn run(options: TopOptions) -> Result<()> {
    let socket = options.store.socket()?;
    runtime()?.block_on(async {
        let mut daemon = Daemon::connect(&socket).await?;
        if options.once {
            let (before, now) = daemon.two_snapshots(options.interval).await?;
            let text = if options.json {
                format!("{}\n", json::json(&before, &now))
            } else {
                lines_of(&table::table(&before, &now))
            };
            return print(&text);
        }
        if options.json {
            return lines(&mut daemon, options.interval).await;
        }
        if !std::io::stdout().is_terminal() {
            bail!(
                "standard output is not a terminal: use --once, or --json for one line per interval"
            );
        }
        live(&mut daemon, options.interval).await
    })
}

/// Prints a line of JSON per interval until the reader closes the pipe.
async fn lines(daemon: &mut Daemon, interval: Duration) -> Result<()> {
    let mut before = daemon.snapshot().await?;
    loop {
        tokio::time::sleep(interval).await;
        let now = daemon.snapshot().await?;
        print(&format!("{}\n", json::json(&before, &now)))?;
        before = now;
    }
}

/// Redraws the terminal until Ctrl-C, then restores it. Waits while the daemon is restarted.
async fn live(daemon: &mut Daemon, interval: Duration) -> Result<()> {
    let mut before = daemon.snapshot().await?;
    let mut ends = [
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    ];
    let mut stop = signal(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut resized = signal(SignalKind::window_change())?;
    let mut shown = TopContent::Snapshots(Box::new((before.clone(), before.clone())));
    let mut tick = tokio::time::interval(interval);
    // The first tick is immediate: it shows the counters, without rates.
    print(ENTER)?;
    let ended = loop {
        let [interrupt, terminate, hangup] = &mut ends;
        let snapshot = async {
            tick.tick().await;
            daemon.snapshot().await
        };
        // Ctrl-C works even while a hung daemon does not answer.
        let event = tokio::select! {
            _ = interrupt.recv() => break Ok(()),
            _ = terminate.recv() => break Ok(()),
            _ = hangup.recv() => break Ok(()),
            _ = stop.recv() => match suspend() {
                Ok(()) => continue,
                Err(error) => break Err(error),
            },
            _ = resized.recv() => None,
            snapshot = snapshot => Some(snapshot),
        };
        match event {
            // Resized: draw the same snapshots again.
            None => {}
            Some(Ok(now)) => {
                let earlier = std::mem::replace(&mut before, now.clone());
                shown = TopContent::Snapshots(Box::new((earlier, now)));
            }
            // The next call reconnects.
            Some(Err(error)) => {
                shown =
                    TopContent::Trouble(format!("{error:#}\n\nwaiting for the daemon to return"));
            }
        }
        if let Err(error) = print(&shown.on_screen(terminal_size())) {
            break Err(error);
        }
    };
    print(LEAVE)?;
    ended
}

/// Handles Ctrl-Z: restores the terminal, stops, and takes the terminal again when continued.
fn suspend() -> Result<()> {
    print(LEAVE)?;
    rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).context("stopping")?;
    print(ENTER)
}

pub(super) use json::numbers;
pub(super) use users::{quota_columns, quota_titles};

enum TopContent {
    Snapshots(Box<(Snapshot, Snapshot)>),
    Trouble(String),
}

impl TopContent {
    /// Returns the text that redraws the screen in place. Each line is cleared as it is written, which avoids flicker.
    fn on_screen(&self, [rows, columns]: [usize; 2]) -> String {
        const END: [&str; 2] = ["", "Ctrl-C ends"];
        let mut lines = match self {
            Self::Snapshots(both) => table::table(&both.0, &both.1),
            Self::Trouble(words) => words.lines().map(str::to_owned).collect(),
        };
        if lines.len() > rows {
            let left_out = lines.len() + 1 - rows;
            lines.truncate(rows - 1);
            lines.push(format!("and {left_out} more lines: offloadd top --once"));
        }
        if lines.len() + END.len() <= rows {
            lines.extend(END.map(str::to_owned));
        }
        let lines = lines.iter().map(|line| {
            let line: String = line.chars().take(columns).collect();
            format!("\x1b[K{line}")
        });
        let lines: Vec<String> = lines.collect();
        format!("\x1b[H{}\x1b[J", lines.join("\r\n"))
    }
}

fn lines_of(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Rows and columns; 24 by 80 if the terminal does not tell.
fn terminal_size() -> [usize; 2] {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    let size = size.filter(|size| size.ws_row > 0 && size.ws_col > 0);
    size.map_or([24, 80], |size| [size.ws_row.into(), size.ws_col.into()])
}
