//! A device of a served store is measured again, beside whatever it does.
//!
//! The core lends free room on it, which is written and read here, on a thread that may block; then the core keeps what was
//! found. Whoever asked may have gone meanwhile: what was lent is given back all the same.

use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use tokio::sync::Mutex;

use super::grpc::ended_unanswered;
use crate::core::{Call, Measuring, Peer, Reply};
use crate::driver::DriverHandle;
use crate::engine::EngineChoice;
use crate::measure::measure_in;
use crate::store::format::MeasuredRates;

/// What came of it.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) was: Measuring,
    pub(super) now: MeasuredRates,
    pub(super) busy: bool,
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
        let found = run(&driver, was, path_named, engine).await;
        let rates = found.as_ref().ok().copied();
        let ended = ask(Call::EndMeasuring { rates }).await;
        let now = found?;
        let Reply::EndMeasuring { busy, .. } = ended? else {
            unreachable!("the core answered another call");
        };
        Ok(Measured { was, now, busy })
    };
    // Of its own: a caller that goes away ends his call, not this.
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|_| Err(ended_unanswered()))
}

async fn run(
    driver: &DriverHandle,
    was: Measuring,
    path: String,
    engine: EngineChoice,
) -> Result<MeasuredRates, Fault> {
    let file = driver.file(was.device)?.await;
    let file = file.map_err(|_| ended_unanswered())?;
    let Some(file) = file else {
        let what = format!("{path} has left the store");
        return Err(Fault::new(FaultKind::NotFound, what));
    };
    let measured =
        tokio::task::spawn_blocking(move || measure_in(&file, &path, was.area, engine)).await;
    let measured = measured.map_err(|_| ended_unanswered())?;
    measured.map_err(|error| Fault::new(FaultKind::Io, error.to_string()))
}
