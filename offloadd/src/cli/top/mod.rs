//! `offloadd top`: what the drives and jobs of a running daemon do, once a second.
//!
//! Rates are differences of two looks at counts that only grow, divided by the daemon's own clock, so that a slow terminal
//! or a busy machine does not bend them.

mod between;
mod fit;
mod json;
mod table;
#[cfg(test)]
mod tests;
mod users;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offload_api::proto;
use offload_api::proto::offload_client::OffloadClient;
use offloadd::config::Config;
use offloadd::metrics::Snapshot;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

use super::connection::{ANSWER_WAIT, connect, refusal, runtime};
use super::print;

/// The screen's other buffer, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// What people may choose.
pub(crate) struct Choice {
    pub(crate) socket: PathBuf,
    /// Whose socket is meant instead.
    pub(crate) config: Option<PathBuf>,
    pub(crate) once: bool,
    pub(crate) json: bool,
    pub(crate) interval: Duration,
}

/// Seconds between two looks.
pub(crate) fn interval(words: &str) -> Result<Duration, String> {
    let seconds: f64 = words.parse().map_err(|_| "it is no number".to_owned())?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("from 0.1 to 3600 seconds".into()),
    }
}

pub(crate) fn run(choice: Choice) -> Result<()> {
    let socket = match &choice.config {
        Some(config) => Config::read(config)?.socket,
        None => choice.socket,
    };
    runtime()?.block_on(async {
        let mut daemon = Daemon::connect(&socket).await?;
        if choice.once {
            let (before, now) = daemon.look_twice(choice.interval).await?;
            let text = if choice.json {
                format!("{}\n", json::json(&before, &now))
            } else {
                lines_of(&table::table(&before, &now).whole())
            };
            return print(&text);
        }
        if choice.json {
            return lines(&mut daemon, choice.interval).await;
        }
        if !std::io::stdout().is_terminal() {
            bail!("this is no terminal: use --once, or --json for a line every interval");
        }
        live(&mut daemon, choice.interval).await
    })
}

/// The connection.
pub(crate) struct Daemon {
    pub(crate) socket: PathBuf,
    pub(crate) client: OffloadClient<Channel>,
}

impl Daemon {
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        Ok(Self {
            client: connect(socket).await?,
            socket: socket.to_owned(),
        })
    }

    pub(crate) async fn look(&mut self) -> Result<Snapshot> {
        let asking = self.client.metrics(proto::MetricsRequest {});
        let answer = tokio::time::timeout(ANSWER_WAIT, asking)
            .await
            .with_context(|| format!("the daemon did not answer in {} s", ANSWER_WAIT.as_secs()))?
            .map_err(|status| refusal(&self.socket, &status))?;
        Ok(answer.into_inner().try_into()?)
    }

    pub(crate) async fn look_twice(&mut self, apart: Duration) -> Result<(Snapshot, Snapshot)> {
        let before = self.look().await?;
        tokio::time::sleep(apart).await;
        Ok((before, self.look().await?))
    }
}

/// A line of JSON every interval, until nobody reads it.
async fn lines(daemon: &mut Daemon, interval: Duration) -> Result<()> {
    let mut before = daemon.look().await?;
    loop {
        tokio::time::sleep(interval).await;
        let now = daemon.look().await?;
        print(&format!("{}\n", json::json(&before, &now)))?;
        before = now;
    }
}

/// Draws over the terminal until Ctrl-C, and leaves it as it was. A daemon that is started anew is waited for.
async fn live(daemon: &mut Daemon, interval: Duration) -> Result<()> {
    let mut before = daemon.look().await?;
    let mut ends = [
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    ];
    let mut stop = signal(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut resized = signal(SignalKind::window_change())?;
    let mut shown = Shown::Looks(Box::new((before.clone(), before.clone())));
    let mut tick = tokio::time::interval(interval);
    // The first is at once: then counts are there and rates are not yet.
    print(ENTER)?;
    let ended = loop {
        let [interrupt, terminate, hangup] = &mut ends;
        let looked = async {
            tick.tick().await;
            daemon.look().await
        };
        // A daemon that hangs keeps nobody here.
        let looked = tokio::select! {
            _ = interrupt.recv() => break Ok(()),
            _ = terminate.recv() => break Ok(()),
            _ = hangup.recv() => break Ok(()),
            _ = stop.recv() => match rest() {
                Ok(()) => continue,
                Err(error) => break Err(error),
            },
            _ = resized.recv() => None,
            looked = looked => Some(looked),
        };
        match looked {
            // The same in another size.
            None => {}
            Some(Ok(now)) => {
                let earlier = std::mem::replace(&mut before, now.clone());
                shown = Shown::Looks(Box::new((earlier, now)));
            }
            // The connection is made anew by the next look.
            Some(Err(error)) => {
                shown = Shown::Trouble(format!("{error:#}\n\nwaiting for a daemon there"));
            }
        }
        if let Err(error) = print(&shown.on_screen(terminal_size())) {
            break Err(error);
        }
    };
    print(LEAVE)?;
    ended
}

/// Ctrl-Z: the terminal is the shell's until it lets us go on.
fn rest() -> Result<()> {
    print(LEAVE)?;
    rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).context("stopping")?;
    print(ENTER)
}

/// What stands on the screen.
enum Shown {
    Looks(Box<(Snapshot, Snapshot)>),
    Trouble(String),
}

impl Shown {
    /// From the top left on, as much as fits; what stood there before goes line by line, so that nothing flickers.
    fn on_screen(&self, [rows, columns]: [usize; 2]) -> String {
        const END: [&str; 2] = ["", "Ctrl-C ends"];
        let mut lines = match self {
            Self::Looks(looks) => table::table(&looks.0, &looks.1).fitting(rows),
            Self::Trouble(words) => words.lines().take(rows).map(str::to_owned).collect(),
        };
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

/// Rows and columns; where nobody says, those of old.
fn terminal_size() -> [usize; 2] {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    let size = size.filter(|size| size.ws_row > 0 && size.ws_col > 0);
    size.map_or([24, 80], |size| [size.ws_row.into(), size.ws_col.into()])
}
