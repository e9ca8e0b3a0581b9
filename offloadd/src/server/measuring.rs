//! Measures a device of a served store again (`offloadd device calibrate`).
//!
//! The core lends free space on the device, which is written and read here on a thread that may block. The core flushes the device and
//! stores the result. If the caller disconnects, the space is returned all the same, unless writes to it may still be under way.

use std::sync::Arc;
use std::time::Duration;

use offload_api::fault::{Fault, FaultKind};
use tokio::sync::Mutex;

use super::grpc::ended_unanswered;
use crate::core::{Call, Measuring, Peer, Reply};
use crate::driver::DriverHandle;
use crate::engine::EngineChoice;
use crate::measure::{Flusher, MeasureError, measure_in};
use crate::metrics::MovedBeside;
use crate::store::format::MeasuredRates;

/// Interval of retries while the inbox or the catalog's queue is full.
const AGAIN: Duration = Duration::from_millis(50);

/// The result.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) was: Measuring,
    pub(super) now: MeasuredRates,
    pub(super) busy: bool,
}

/// Reason why a measurement failed.
struct Failed {
    fault: Fault,
    /// Whether all operations have ended; see [`Call::EndMeasuring`].
    all_ended: bool,
}

/// A fault before anything was written.
impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        let all_ended = true;
        Self { fault, all_ended }
    }
}

/// Measures the device at `path`. `turns` lets one measurement run at a time.
pub(super) async fn measure_again(
    driver: DriverHandle,
    turns: Arc<Mutex<()>>,
    peer: Peer,
    path: String,
    engine: EngineChoice,
) -> Result<Measured, Fault> {
    let work = async move {
        let _turn = turns.lock().await;
        let ask = async |call| {
            let answer = driver.call(peer, call)?;
            answer.await.unwrap_or_else(|_| Err(ended_unanswered()))
        };
        let path_named = path.clone();
        let Reply::BeginMeasuring(was) = ask(Call::BeginMeasuring { path }).await? else {
            unreachable!("the core answered another call");
        };
        let found = run(&driver, peer, was, path_named, engine).await;
        let rates = found.as_ref().ok().copied();
        let all_ended = found.as_ref().map_or_else(|f| f.all_ended, |_| true);
        let ended = until_taken(|| ask(Call::EndMeasuring { rates, all_ended })).await;
        let now = found.map_err(|failed| failed.fault)?;
        let Reply::EndMeasuring { busy, .. } = ended? else {
            unreachable!("the core answered another call");
        };
        Ok(Measured { was, now, busy })
    };
    // In a task of its own, which continues if the caller disconnects.
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(ended_unanswered()))
}

/// Repeats a call until the inbox accepts it: the space stays lent until the core is told.
async fn until_taken<F>(mut ask: impl FnMut() -> F) -> Result<Reply, Fault>
where
    F: Future<Output = Result<Reply, Fault>>,
{
    loop {
        match ask().await {
            Err(fault) if fault.kind == FaultKind::TooMany => tokio::time::sleep(AGAIN).await,
            answer => return answer,
        }
    }
}

async fn run(
    driver: &DriverHandle,
    peer: Peer,
    was: Measuring,
    path: String,
    engine: EngineChoice,
) -> Result<MeasuredRates, Failed> {
    let file = driver.file(was.device)?.await;
    let file = file.map_err(|_| ended_unanswered())?;
    let Some(file) = file else {
        let what = format!("{path} has left the store");
        return Err(Fault::new(FaultKind::NotFound, what).into());
    };
    let counting = driver.clone();
    let measured = tokio::task::spawn_blocking(move || {
        let mut moved = MovedBeside::default();
        let mut flush = || {
            let answer = counting.call(peer, Call::FlushMeasured)?;
            let answer = answer.blocking_recv();
            answer.unwrap_or_else(|_| Err(ended_unanswered())).map(drop)
        };
        let flusher = Flusher::Daemon(&mut flush);
        let found = measure_in(&file, &path, was.area, engine, flusher, &mut moved);
        counting.moved_beside(was.device, moved);
        found
    });
    let measured = measured.await.map_err(|_| Failed {
        fault: ended_unanswered(),
        all_ended: false,
    })?;
    measured.map_err(|error| failed(&error))
}

fn failed(error: &MeasureError) -> Failed {
    let all_ended = error.all_ended();
    let mut what = error.to_string();
    if !all_ended {
        what.push_str(
            "; this space stays reserved, and its device in the store, until offloadd is restarted",
        );
        // The caller may have disconnected.
        tracing::error!("{what}");
    }
    let kind = match error {
        MeasureError::Flush(fault) => fault.kind,
        _ => FaultKind::Io,
    };
    let fault = Fault::new(kind, what);
    Failed { fault, all_ended }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use offload_api::ids::DeviceIndex;

    use super::*;
    use crate::io::IoOp;

    #[tokio::test]
    async fn the_end_is_told_until_it_is_taken() {
        let refused = |kind| Err(Fault::new(kind, ""));
        let taken = || {
            let (device, busy) = (DeviceIndex(1), false);
            Ok(Reply::EndMeasuring { device, busy })
        };
        let much = FaultKind::TooMany;
        let mut answers = VecDeque::from([refused(much), refused(much), taken(), taken()]);
        let answer = until_taken(|| std::future::ready(answers.pop_front().unwrap())).await;
        assert!(
            matches!(answer, Ok(Reply::EndMeasuring { .. })),
            "{answer:?}"
        );
        assert_eq!(answers.len(), 1);

        // What is no better the next time is told.
        let mut answers = VecDeque::from([refused(FaultKind::Stopping), taken()]);
        let answer = until_taken(|| std::future::ready(answers.pop_front().unwrap())).await;
        assert_eq!(answer.unwrap_err().kind, FaultKind::Stopping);
        assert_eq!(answers.len(), 1);
    }

    #[test]
    fn operations_left_behind_are_told_with_what_that_means() {
        let lost = || MeasureError::Operation {
            path: "/dev/slow".into(),
            op: IoOp::Write,
            offset: 4096,
            what: "no answer in 60 s".into(),
        };
        let failed_whole = failed(&lost());
        assert!(failed_whole.all_ended);
        let left = failed(&MeasureError::LeftBehind {
            source: Box::new(lost()),
            count: 3,
            offset: 4096,
            end: 8192,
        });
        assert!(!left.all_ended);
        let told = left.fault.message;
        for said in [
            "/dev/slow",
            "no answer in 60 s",
            "3 operations",
            "bytes 4096 to 8192",
            "restarted",
        ] {
            assert!(told.contains(said), "{said}: {told}");
        }
    }
}
