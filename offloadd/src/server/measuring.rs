//! A device of a served store is measured again, beside whatever it does.
//!
//! The core lends free room on it, which is written and read here, on a thread that may block, and flushes the device when that
//! is asked for; then the core keeps what was found. Whoever asked may have gone meanwhile: what was lent is given back all the same, unless it may still be written.

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

/// Much waits, of the driver or of the catalog: it is told again after that.
const AGAIN: Duration = Duration::from_millis(50);

/// What came of it.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) was: Measuring,
    pub(super) now: MeasuredRates,
    pub(super) busy: bool,
}

/// Why there are no figures.
struct Failed {
    fault: Fault,
    /// As of [`Call::EndMeasuring`].
    all_ended: bool,
}

/// Before anything is written.
impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        let all_ended = true;
        Self { fault, all_ended }
    }
}

/// Measures the device at `path`, after whatever else is measured under `turns`.
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
    // Of its own: a caller that goes away ends his call, not this.
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(ended_unanswered()))
}

/// What was lent stays lent until the core has heard of it: nobody else will tell.
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
            "; that room stays taken, and its device in the store, until offloadd is started again",
        );
        // Whoever asked may have gone.
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
            "from 4096 to 8192",
            "started again",
        ] {
            assert!(told.contains(said), "{said}: {told}");
        }
    }
}
