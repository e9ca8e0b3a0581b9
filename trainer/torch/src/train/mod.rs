//! Trains a run: opens it, steps until it is done or asked to stop (`training.rs`), and leaves it so that the
//! next start resumes it.

mod clock;
mod error;
mod gpu_timeline;
mod groups;
mod inputs;
mod mover;
mod peer_watchdog;
mod progress;
mod show;
mod step;
mod step_order;
mod stop;
#[cfg(test)]
mod tests;
mod training;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::gpu::Gpu;
use kernels_torch::collective::{Comm, GpuComm, TensorExchange};
use training_ranks::CollectiveError;

pub use error::TrainError;

use crate::compute::{self, ComputeError, Engine};
use crate::ranks::{check_same_settings, connect, first_ranks_of, nodes_of, ranks_of};
use crate::torch_support::torch_support;
use inputs::InputPlace;
use mover::{Memory, Muon, NodeRanks, Shards, TilesIn};
use offload_support::outln;
use offload_support::paths::Word;
use peer_watchdog::PeerWatchdog;
use step::Stepper;
use stop::Stop;
use training::{StepsEnd, Training};
use training_run::config::RunSettings;
use training_run::data::{Corpus, Data, Frame};
use training_run::evaluations::Evaluations;
use training_run::export::{Export, OwnExport, SHARD_BYTES, copy_weights, export};
use training_run::open::{
    EachNode, ExistingRun, PreparedRun, Site, StartPoint, check_drives, remember_drives, repair,
};
use training_state::metrics::MetricsFile;
use training_state::ranks::Ranks;
use training_state::run::{CheckpointName, node_dir, resolved};
use training_state::trace::Trace;

/// Time to wait for the news that a rank has died; a few heartbeats, which is enough on a busy machine.
/// Launchers wait twice as long.
const DEATH_WAIT: Duration = Duration::from_secs(4);

/// Interval between checks for a dead rank.
const DEATH_POLL: Duration = Duration::from_millis(20);

/// Trains until `settings.train.stop_after`, SIGTERM, SIGINT or SIGHUP. Returns the exit status: 0 when the run is
/// done, 128 plus the signal's number when a signal asked it to stop earlier. Prints the whole plan and all settings
/// if `verbose`.
///
/// # Errors
/// Any failure to start the run, and any failure that ended it. States that were committed or saved before
/// are kept.
pub fn train(
    settings: RunSettings,
    start: &StartPoint,
    trace: &Trace,
    verbose: bool,
) -> Result<u8, TrainError> {
    let stop = Stop::register().map_err(TrainError::Signals)?;
    trace.check()?;
    let comm = connect()?;
    let result = as_rank(settings, start, trace, verbose, &stop, &comm);
    let result = end(&comm, result);
    match trace.write() {
        Ok(Some(path)) if comm.world().rank == 0 => {
            outln!("timeline: {}, for ui.perfetto.dev", path.display());
        }
        Ok(_) => {}
        // The run's own error says more.
        Err(error) if result.is_err() => outln!("note: {error}"),
        Err(error) => return Err(error.into()),
    }
    result
}

/// Trains with the settings of this rank's node.
fn as_rank(
    mut settings: RunSettings,
    start: &StartPoint,
    trace: &Trace,
    verbose: bool,
    stop: &Stop,
    comm: &Arc<Comm>,
) -> Result<u8, TrainError> {
    let ranks = ranks_of(comm)?;
    check_same_settings(comm, &ranks, &settings)?;
    let whole_dir = resolved(&settings.train.run_dir);
    settings.train.run_dir = node_dir(&whole_dir, ranks.node());
    settings.local_ranks = ranks.local().len() as u32;
    ranks.on_all_ranks::<_, TrainError>("looking for the run's drives", || {
        Ok(check_drives(&settings)?)
    })?;
    let is_fresh = *start == StartPoint::Fresh;
    if !is_fresh {
        ranks.by_first_of_node::<_, TrainError>("looking for the run", || {
            Ok(repair(&settings, &mut |note| outln!("note: {note}"))?)
        })?;
    }
    let each_node = match settings.train.checkpoints_on_each_node && ranks.nodes() > 1 {
        true => EachNode::open(&ranks, first_ranks_of(comm, &ranks)?, &whole_dir, &settings)?,
        false => None,
    };
    let found = ranks.by_first("looking for the run", || {
        ExistingRun::in_dir(&whole_dir, is_fresh)
    })?;
    let site = Site {
        nodes: nodes_of(comm, &ranks, found.run())?,
        ranks,
        whole_dir,
        each_node,
        found,
        torch: torch_support,
    };
    let (start, note) = match start {
        StartPoint::Newest => site.newest(&settings)?,
        start => (start.clone(), None),
    };
    if let Some(note) = note {
        outln!("{note}");
    }
    if let Some(each_node) = &site.each_node {
        each_node.restore(&site.ranks, &start, settings.train.checkpoint_best)?;
    }
    let result = run_to_its_end(settings.clone(), &start, trace, verbose, stop, comm, &site);
    result.map_err(|error| error.of_run(&settings))
}

/// Closes the connection to the other ranks: together after success; after an error it tells them the reason
/// first.
fn end<T>(comm: &Comm, result: Result<T, TrainError>) -> Result<T, TrainError> {
    match result {
        Ok(ended) => {
            comm.barrier()?;
            comm.give_up("it had finished");
            Ok(ended)
        }
        Err(error) => {
            let error = attribute(comm, error);
            comm.give_up(&error.to_string());
            Err(error)
        }
    }
}

/// Adds the rank that died to `error` if its death may be the cause. Heartbeats report a death later than the
/// operations that it breaks.
fn attribute(comm: &Comm, error: TrainError) -> TrainError {
    let until = Instant::now() + DEATH_WAIT;
    while comm.world().ranks > 1
        && error.may_follow_a_death(comm.world().local_rank == 0)
        && Instant::now() < until
    {
        match comm.gone() {
            Some(death @ CollectiveError::Died { .. }) => {
                let error = Box::new(error);
                return TrainError::AfterDeath { death, error };
            }
            // The rank is alive and reports its own error.
            Some(_) => break,
            None => std::thread::sleep(DEATH_POLL),
        }
    }
    error
}

fn run_to_its_end(
    settings: RunSettings,
    start: &StartPoint,
    trace: &Trace,
    verbose: bool,
    stop: &Stop,
    comm: &Arc<Comm>,
    site: &Site,
) -> Result<u8, TrainError> {
    let ranks = &site.ranks;
    let (corpus, data, prepared) = prepare(&settings, start, comm, site)?;
    let settings = prepared.settings.clone();
    ranks.by_first("checking train.export_to", || {
        refuse_existing_export(&settings, start)
    })?;
    let mut report = Vec::new();
    if ranks.is_first() {
        let text = corpus.as_ref().zip(data.as_ref());
        report = show::plan(&prepared.settings, &prepared.plan, text, verbose);
    }
    start_threads(settings.train.threads)?;
    // Called by all ranks at once, so outside `together`. A machine may have fewer GPUs than ranks.
    let computes = prepared.gpu.as_ref().map_or("the processor", |_| "a GPU");
    comm.same_everywhere("what computes (train.device)", computes)?;
    let gpus = match &prepared.gpu {
        Some(gpu) if ranks.count() > 1 => Some(Arc::new(GpuComm::connect(comm, gpu)?)),
        _ => None,
    };
    let keeps_copy = prepared.plan.copy_bytes > 0;
    comm.same_everywhere(
        "whether nodes keep a copy of the parameters (offload.shard)",
        &keeps_copy.to_string(),
    )?;
    let group = prepared.plan.micro_batch_group.to_string();
    comm.same_everywhere(
        "the group of micro-batches (train.micro_batch_group)",
        &group,
    )?;
    let sequence = connect_sequence(&settings, comm, prepared.gpu.as_ref())?;
    let node = keeps_copy.then(|| NodeRanks::connect(comm, prepared.gpu.as_ref()));
    let node = node.transpose()?;
    let (mut stepper, memory) = ranks.on_all_ranks("taking memory to compute in", || {
        let (stepper, memory) = take_memory(&settings, &prepared, comm, gpus, node)?;
        Ok::<_, TrainError>((stepper.in_sequence(sequence), memory))
    })?;

    let first = ranks.is_first();
    let (run, resumed) = prepared.open(start, &copy_weights, &mut |note| {
        if first {
            outln!("{note}");
        }
    })?;
    if first {
        show::opened(&run, resumed, verbose);
        show::keep_report(run.dir.path(), &report);
    }
    if ranks.is_first_of_node() {
        remember_drives(&settings);
    }
    let run = run.with_backend(|backend| memory.attach(backend));
    stepper.attach_scratch(run.backend.scratch())?;
    let canceller = run.backend.canceller().filter(|_| ranks.count() > 1);
    let peer_watchdog = canceller.map(|canceller| PeerWatchdog::start(comm.clone(), canceller));
    let shared = (comm.clone(), ranks.clone());
    let mut training = Training::new(settings.clone(), data, stepper, run, shared)?;
    training.record(trace)?;
    let result = training.run_steps(stop);
    match &result {
        // The tiles still hold the state of the step before, which is worth keeping. All ranks have reached
        // the same decision.
        Ok(_) | Err(TrainError::Diverged { .. } | TrainError::LeastScale { .. }) => {
            training.keep(stop)?;
        }
        // Reported before this rank's session and its private daemon end, so that the others do not take that
        // for the cause.
        Err(error) => {
            comm.give_up(&error.to_string());
            trace.add(training.run.backend.take_spans());
        }
    }
    // Other ranks may end from here on without being taken for dead.
    drop(peer_watchdog);
    match result {
        Ok(ended) => {
            let step = training.run.state.step;
            let exported = training.exported_checkpoint();
            training.end(ended)?;
            let is_complete = ended == StepsEnd::Stalled || step >= settings.train.steps;
            if is_complete {
                let on_nodes = ranks.nodes() > 1 && settings.placement.has_store();
                ranks.by_first("exporting the weights", || {
                    export_result(&settings, (step, exported), on_nodes)
                })?;
            }
            Ok(if ended == StepsEnd::Asked {
                stop.status()
            } else {
                0
            })
        }
        Err(diverged @ (TrainError::Diverged { .. } | TrainError::LeastScale { .. })) => {
            training.run.close()?;
            Err(diverged)
        }
        Err(error) => Err(error),
    }
}

/// Checks the run and reads its data.
fn prepare(
    settings: &RunSettings,
    start: &StartPoint,
    comm: &Comm,
    site: &Site,
) -> Result<(Option<Corpus>, Option<Data>, PreparedRun), TrainError> {
    let ranks = &site.ranks;
    let (corpus, mut prepared) = ranks.on_all_ranks::<_, TrainError>("checking the run", || {
        // A run without steps exists to be exported or resumed from.
        let corpus = match settings.train.steps {
            0 => None,
            _ => Some(Corpus::find(
                &settings.data,
                &Frame::from_settings(settings),
            )?),
        };
        let prepared = PreparedRun::new(settings.clone(), start, site.clone())?;
        Ok((corpus, prepared))
    })?;
    prepared.agree()?;
    if ranks.nodes() == 1 {
        // It depends on the files' times, which copies on other nodes do not share.
        let fingerprint = corpus.as_ref().map_or(0, Corpus::fingerprint);
        comm.same_everywhere("the text's fingerprint", &format!("{fingerprint:016x}"))?;
    }
    ranks.by_first_of_node("checking the weights", || prepared.check_weights())?;
    let data = corpus
        .as_ref()
        .map(|corpus| read_data(settings, corpus, ranks));
    let data = data.transpose()?;
    if let Some(data) = &data {
        let tokens = format!("{:016x}", data.fingerprint());
        comm.same_everywhere("the fingerprint of the tokens", &tokens)?;
        prepared.train_on(data)?;
    }
    Ok((corpus, data, prepared))
}

/// Refuses a run that would find its weights' directory taken when it is complete.
fn refuse_existing_export(settings: &RunSettings, start: &StartPoint) -> Result<(), TrainError> {
    let Some(out) = &settings.train.export_to else {
        return Ok(());
    };
    let (train, run_dir) = (&settings.train, &settings.train.run_dir);
    let has_stalled = || {
        let past = Evaluations::from_steps_and_losses(&MetricsFile::evaluations(run_dir, None));
        past.has_stalled(train.early_stopping_patience)
    };
    let was_complete = *start == StartPoint::GoOn
        && (MetricsFile::last_step(run_dir) >= train.steps || has_stalled());
    let is_own = OwnExport::read(run_dir).is_some_and(|own| own.is_at(out));
    if out.symlink_metadata().is_ok() && !was_complete && !is_own {
        return Err(TrainError::ExportExists { out: out.clone() });
    }
    Ok(())
}

/// Exports the weights of a run that is complete at `step` to `train.export_to` if it is set: those of the checkpoint of step
/// `checkpoint`, or the last ones. An export that the run made at an earlier step is renamed; any other is kept. With `on_nodes`, only a checkpoint
/// can be exported. Prints what to do with the weights.
fn export_result(
    settings: &RunSettings,
    (step, checkpoint): (u64, Option<u64>),
    on_nodes: bool,
) -> Result<(), TrainError> {
    let run_dir = &settings.train.run_dir;
    let Some(out) = &settings.train.export_to else {
        let checkpoint = match (on_nodes, checkpoint) {
            (false, _) => String::new(),
            (true, Some(step)) => format!(" --checkpoint {step}"),
            (true, None) => return Ok(()),
        };
        outln!(
            "next      trainer export {}{checkpoint} --out DIR     writes a directory that Hugging Face's libraries load",
            Word(run_dir)
        );
        return Ok(());
    };
    let failed = |error| TrainError::Export {
        out: out.clone(),
        error: Box::new(error),
    };
    OwnExport::set_aside(run_dir, out, step).map_err(failed)?;
    if out.symlink_metadata().is_err() {
        OwnExport::keep(run_dir, out, step).map_err(failed)?;
        let exported = export(&Export {
            run_dir: run_dir.clone(),
            checkpoint: checkpoint.map(CheckpointName::Step),
            out: out.clone(),
            numbers: None,
            shard_bytes: SHARD_BYTES,
        });
        let exported = exported.map_err(failed)?;
        outln!("{exported}");
    }
    outln!(
        "next      transformers.AutoModelForCausalLM.from_pretrained(\"{}\")     loads the weights in Python",
        out.display()
    );
    Ok(())
}

/// Connects the ranks that divide each sequence among themselves, if the settings want it; all ranks must call it.
fn connect_sequence(
    settings: &RunSettings,
    comm: &Comm,
    gpu: Option<&Gpu>,
) -> Result<Option<Arc<TensorExchange>>, TrainError> {
    match settings.batch.sequence_ranks {
        1 => Ok(None),
        ranks => {
            let exchange = TensorExchange::connect(comm, ranks, gpu).map_err(ComputeError::from)?;
            Ok(Some(Arc::new(exchange)))
        }
    }
}

/// Makes the engine, the storage of block inputs and the memory to compute in.
fn take_memory(
    settings: &RunSettings,
    prepared: &PreparedRun,
    comm: &Arc<Comm>,
    gpus: Option<Arc<GpuComm>>,
    node: Option<NodeRanks>,
) -> Result<(Stepper, Memory), TrainError> {
    let gpu = prepared.gpu.clone();
    let on = match &gpu {
        None => compute::ComputeDevice::Cpu,
        Some(gpu) => compute::ComputeDevice::Gpu(gpu.clone()),
    };
    let engine = Engine::on(&on, &settings.model, settings.dtype, settings.batch.seq_len)?
        .with_attention(prepared.plan.attention, settings.train.deterministic)?
        .with_matmuls(settings.train.matmuls)?
        .with_checkpointing(prepared.plan.checkpointing)
        .in_tiles(settings.train.mlp_chunks)
        .leaving_out(settings.dropout, settings.train.seed);
    let tiles_in = TilesIn::from_plan(&prepared.plan);
    let stage = settings.placement.stage;
    let (master, tiles) = (prepared.plan.formats.master(), &prepared.plan.swapper);
    let muon = Muon::new(settings, &prepared.plan);
    let shards =
        Shards::new(comm.clone(), gpus, &tiles.units, tiles.tile_elems, stage).with_copies(node);
    let batch = settings.batch;
    let group_size = prepared.plan.micro_batch_group;
    let inputs = InputPlace::from_plan(&prepared.plan, gpu.as_ref())?;
    let batches = (batch, group_size, inputs);
    Stepper::new(
        engine,
        gpu,
        batches,
        (master, muon),
        tiles_in,
        stage,
        shards,
    )
}

/// Opens the run's tokens: the first rank of each node tokenizes if the cache lacks them, then all read them.
fn read_data(settings: &RunSettings, corpus: &Corpus, ranks: &Ranks) -> Result<Data, TrainError> {
    ranks.by_first_of_node::<_, TrainError>("making the tokens", || {
        let mut say = |note| outln!("{note}");
        Ok(corpus.prepare(settings, &mut say)?)
    })?;
    ranks.on_all_ranks("opening the tokens", || Ok(corpus.open(settings)?))
}

/// Sets the thread counts of torch and of the optimizer, once for the process.
fn start_threads(count: usize) -> Result<(), TrainError> {
    crate::compute::set_up(count)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build_global();
    pool.map_err(|error| TrainError::Threads {
        count,
        message: error.to_string(),
    })
}
