//! Runs whole steps of every form of model. The activation checkpointing, the groups of micro-batches, the number of weight
//! buffers and the place of state and inputs must not change a bit of a loss, a gradient norm or an updated weight. All
//! weights are random, including norms and biases; there are more blocks than buffers; released weights are
//! overwritten with NaN.
//!
//! Errors that this finds: something kept from forward to backward refers to a unit's buffer that another
//! unit has taken over; weights are released before their last use, or used before they have arrived.
//!
//! The steps run on the processor, computed as a GPU computes, with one rank and with two, and on a GPU if
//! there is one. `runs::parity` tests two ranks on GPUs.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::adamw::init_tile;
use kernels::gpu::Gpu;
use kernels_torch::collective::{Comm, TensorExchange};
use kernels_torch::{CUBLAS_WORKSPACE, CUBLAS_WORKSPACES};
use serde_json::{Value, json};
use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{Backing, Daemon, Swapper, UninitTile};
use tempfile::TempDir;
use training_ranks::{Rendezvous, Timeouts, World};

mod sequence;

use super::inputs::InputPlace;
use super::mover::{self, Muon, Shards, TilesIn};
use super::step::{Stepper, hyper};
use crate::compute::{ComputeDevice, Engine, set_up};
use training_run::computation::{ActivationCheckpointing, Checkpointing};
use training_run::config::{Interval, RunSettings, Stage, check};
use training_run::data::{Corpus, Data, Frame};
use training_run::model::init::splitmix64;
use training_run::plan::{Hardware, InputsIn, Overrides, Plan};
use training_run::weights::Weights;
use training_run::without_torch;
use training_state::backend::{Both, GpuBackend, TileBackend};
use training_state::fingerprint::Fingerprint;
use training_state::trace::Trace;
use training_state::update::{ByGroup, CpuUpdate};

/// Settings of activation checkpointing. An MLP computed in chunks is always recomputed.
fn keeps(tiles: usize) -> &'static [Checkpointing] {
    const fn with_more(level: ActivationCheckpointing, more_blocks: usize) -> Checkpointing {
        Checkpointing { level, more_blocks }
    }
    // Of five blocks.
    const ALL: &[Checkpointing] = &[
        with_more(ActivationCheckpointing::Matmuls, 0),
        with_more(ActivationCheckpointing::Attention, 0),
        with_more(ActivationCheckpointing::Full, 0),
        with_more(ActivationCheckpointing::Attention, 2),
        with_more(ActivationCheckpointing::Full, 3),
    ];
    if tiles > 1 { &ALL[..1] } else { ALL }
}

/// More blocks than buffers, of which a GPU or several ranks have three.
const LAYERS: u64 = 5;

/// Every form of model, as in configuration files. A window is shorter than the sequence, or absent.
fn models() -> Vec<(&'static str, Value)> {
    let sized = |more: Value| {
        let mut model = json!({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": 2});
        let table = model.as_object_mut().expect("a table");
        table.extend(more.as_object().expect("a table").clone());
        model
    };
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "original_max_position_embeddings": 16});
    vec![
        (
            "gpt2",
            json!({"model_type": "gpt2", "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32,
                "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}),
        ),
        (
            "llama with biases",
            sized(json!({"rope_scaling": yarn, "attention_bias": true, "mlp_bias": true})),
        ),
        (
            "llama",
            sized(json!({"num_key_value_heads": 4, "tie_word_embeddings": true})),
        ),
        (
            "mistral",
            sized(json!({"model_type": "mistral", "sliding_window": 9, "head_dim": 16})),
        ),
        (
            "qwen2",
            sized(json!({"model_type": "qwen2", "tie_word_embeddings": true})),
        ),
        (
            "qwen3",
            sized(json!({"model_type": "qwen3", "head_dim": 16})),
        ),
    ]
}

/// How a step is computed.
#[derive(Clone, Copy, Debug)]
struct Way {
    bf16: bool,
    /// Matrices are updated by Muon.
    muon: bool,
    keep: Checkpointing,
    tiles: usize,
    micro_batches: u64,
    /// Micro-batches that are processed together.
    group: usize,
    place: Place,
}

/// Where the weights are and where they are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On the processor; each block has its own buffer from forward to backward.
    Own,
    /// On the processor; blocks take turns in shared buffers.
    Shared,
    /// In the GPU's memory.
    Gpu,
    /// In host memory; a GPU computes.
    Host,
    /// Those of some units in the GPU's memory, those of the others in host memory.
    Both,
    /// Like `Host`, with block inputs in host memory between forward and backward.
    InputsAway,
    /// State on a drive, and block inputs there between forward and backward; on the processor blocks take turns in shared buffers.
    OnDrives,
}

/// Text file and its tokens.
struct Harness {
    drives: OnceCell<Drives>,
    dir: TempDir,
}

/// A daemon with a store for one run at a time.
struct Drives {
    daemon: PrivateDaemon,
    dir: TempDir,
}

/// Bytes of the store's blocks.
const BLOCK: usize = 4096;

/// Name of that run's job.
const JOB: &str = "steps";

impl Drives {
    fn start() -> Self {
        // Direct I/O needs a real drive.
        let programs = std::env::current_exe().unwrap();
        let dir = tempfile::tempdir_in(programs.parent().unwrap()).unwrap();
        let daemon = PrivateDaemon::start(PrivateSettings {
            program: None,
            dir: dir.path().to_owned(),
            devices: vec![(dir.path().join("tiles"), 64 << 20)],
            arena_bytes_max: 64 << 20,
            engine: "auto".into(),
            iodepth_max: 256,
        });
        let daemon = daemon.unwrap();
        Self { daemon, dir }
    }

    /// The device file.
    fn file(&self) -> PathBuf {
        self.dir.path().join("tiles")
    }

    fn drop_job(&self) {
        let daemon = Daemon::connect(self.daemon.socket()).unwrap();
        daemon.drop_job(JOB).unwrap();
    }
}

impl Harness {
    fn new() -> Self {
        // One thread for all of these tests: the models are too small for two, and the setting is global to
        // the process.
        set_up(1).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let words = (0..4000u64).map(|i| (b'a' + (splitmix64(i) % 26) as u8) as char);
        std::fs::write(dir.path().join("text"), words.collect::<String>()).unwrap();
        let drives = OnceCell::new();
        Self { drives, dir }
    }

    fn settings(&self, model: &Value, way: &Way, ranks: u32) -> RunSettings {
        check(self.tree(model, way), "a test", Some(ranks)).unwrap()
    }

    fn tree(&self, model: &Value, way: &Way) -> Value {
        let mut tree = json!({
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": way.micro_batches,
            "bf16": {"enabled": way.bf16},
            "optimizer": {"type": if way.muon { "Muon" } else { "AdamW" }, "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "model": model,
            "data": {"files": [self.dir.path().join("text")], "validation_fraction": 0.1},
            "train": {
                "steps": 2, "seq_len": 16, "seed": 5, "threads": 1, "eval_every": 2, "device": "cpu",
                "run_dir": self.dir.path().join("run")
            },
            "offload": {"tile_elems": 4096}
        });
        if way.place == Place::OnDrives {
            let drives = self.drives.get_or_init(Drives::start);
            for device in ["offload_param", "offload_optimizer"] {
                tree["zero_optimization"][device]["device"] = json!("nvme");
            }
            tree["offload"]["socket"] = json!(drives.daemon.socket());
            tree["offload"]["activations"] = json!("nvme");
        }
        tree
    }

    fn data(&self, settings: &RunSettings) -> Data {
        let corpus = Corpus::find(&settings.data, &Frame::from_settings(settings)).unwrap();
        corpus.prepare(settings, &mut |_| {}).unwrap();
        corpus.open(settings).unwrap()
    }
}

/// Returns a random weight: around one in a norm, around zero in a bias.
fn weight(unit: usize, elem: usize, is_matrix: bool, is_norm: bool) -> f32 {
    let bits = splitmix64(((unit as u64) << 32) + elem as u64);
    let random = (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    match (is_matrix, is_norm) {
        (true, _) => 0.2 * random,
        (false, true) => 1.0 + 0.5 * random,
        (false, false) => 0.5 * random,
    }
}

/// Results of several steps.
struct StepResults {
    /// Loss and gradient norm of each step.
    steps: Vec<[f64; 2]>,
    /// Loss of an evaluation after the steps.
    evaluated: Option<f64>,
    /// Fingerprint of all updated weights.
    fingerprint: u64,
    /// Parameters by their unit and first element, as stored; of those that this rank keeps.
    params: BTreeMap<(usize, u64), Vec<u8>>,
}

impl StepResults {
    fn bits(&self) -> Vec<u64> {
        let numbers = self.steps.iter().flatten().chain(&self.evaluated);
        let bits = numbers.map(|number| number.to_bits());
        bits.chain([self.fingerprint]).collect()
    }
}

/// Checks that the tokens of the step after `step` were read.
fn assert_read_ahead(stepper: &Stepper, settings: &RunSettings, rank: u32, step: u64) {
    let group = rank / settings.batch.sequence_ranks;
    let own = u64::from(group) * settings.batch.samples();
    let next = stepper.next.as_ref().map(|(sample, _)| *sample);
    assert_eq!(next, Some(step * settings.step_samples() + own));
}

/// Checks that the parts of a step were told, with the micro-batches if there are several groups.
fn assert_told(parts: &[String], settings: &RunSettings, way: &Way) {
    let micro_batches = settings.batch.micro_batches;
    let group = match way.group < micro_batches {
        true => format!("micro-batches 1 to {} of {micro_batches}: ", way.group),
        false => String::new(),
    };
    let backward = format!("{group}backward, unit 1 of {}", settings.model.layers + 2);
    assert!(parts.contains(&backward), "{parts:?}");
}

/// Opens the tiles of `plan` in their places.
fn open_tiles(
    plan: &Plan,
    settings: &RunSettings,
    tiles_in: TilesIn,
    gpu: Option<&Gpu>,
) -> TileBackend {
    let formats = plan.formats.clone();
    let groups = training_run::open::backend::param_groups(&plan.units, &settings.optimizer);
    let in_gpu = || {
        let (gpu, layout) = (gpu.unwrap(), plan.kept_in_gpu().cut().unwrap());
        Box::new(GpuBackend::new(gpu, layout, formats.clone(), groups.clone()).unwrap())
    };
    let with_swapper = || {
        let (formats, groups) = (formats.clone(), groups.clone());
        let update = CpuUpdate(ByGroup { formats, groups });
        let (swapper, _) = Swapper::open(plan.streamed(), vec![Box::new(update)]).unwrap();
        Box::new(swapper)
    };
    match tiles_in {
        TilesIn::Gpu => TileBackend::Gpu(in_gpu(), ()),
        TilesIn::Swapper => TileBackend::Swapper(with_swapper(), ()),
        TilesIn::Both => {
            let (swapper, backend) = (with_swapper(), in_gpu());
            TileBackend::Both(Both { swapper, backend }, (), ())
        }
    }
}

/// Opens the run of `settings` with weights given by `first_weights`.
fn opened(
    settings: &RunSettings,
    way: &Way,
    gpu: Option<&Gpu>,
    ranks: &Ranks,
    first_weights: impl Fn(&Plan, usize, Range<usize>, &mut [f32]),
) -> (Stepper, mover::Tiles) {
    let world = *ranks.comm.world();
    let hardware = Hardware::new(settings, &Overrides::default(), without_torch);
    let mut settings_of_group = settings.clone();
    settings_of_group.train.micro_batch_group = Some(way.group);
    let mut plan = Plan::new(&settings_of_group, hardware).unwrap();
    plan.swapper.rank = world.rank;
    if let Backing::Store(store) = &mut plan.swapper.backing {
        store.job = JOB.into();
    }
    if way.place == Place::InputsAway {
        plan.inputs_in = InputsIn::Host;
    }
    let on = gpu.map_or(ComputeDevice::Cpu, |gpu| ComputeDevice::Gpu(gpu.clone()));
    let engine = Engine::on(&on, &settings.model, settings.dtype, settings.batch.seq_len).unwrap();
    let engine = if gpu.is_some() {
        engine
    } else {
        engine.written_out()
    };
    let engine = engine
        .with_checkpointing(way.keep)
        .in_tiles(way.tiles)
        .leaving_out(settings.dropout, settings.train.seed);
    let tiles = &plan.swapper;
    let stage = match way.place {
        Place::Own => Stage::Gradients,
        _ => Stage::Parameters,
    };
    let shards = Shards::new(
        ranks.comm.clone(),
        None,
        &tiles.units,
        tiles.tile_elems,
        stage,
    );
    let stays = |unit: usize| match way.place {
        Place::Gpu => true,
        // More blocks come than there are buffers, and one between them stays.
        Place::Both => unit.is_multiple_of(3),
        Place::Own | Place::Shared | Place::Host | Place::InputsAway | Place::OnDrives => false,
    };
    plan.in_gpu = (0..plan.units.len()).map(stays).collect();
    let tiles_in = TilesIn::from_plan(&plan);
    let mut backend = open_tiles(&plan, settings, tiles_in, gpu);
    let fill = |blanks: &mut [UninitTile]| {
        for blank in blanks {
            let elems = blank.range.elems.start as usize..blank.range.elems.end as usize;
            let mut masters = vec![0f32; elems.len()];
            first_weights(&plan, blank.range.unit, elems, &mut masters);
            blank.param.fill(0);
            blank.state.fill(0);
            init_tile(
                plan.formats.of_tile(blank.range),
                &masters,
                blank.param,
                blank.state,
            );
        }
        Ok::<(), super::TrainError>(())
    };
    backend.initialize(fill, Vec::new()).unwrap();
    let batch = settings.batch;
    let gpu = gpu.cloned();
    let inputs = InputPlace::from_plan(&plan, gpu.as_ref()).unwrap();
    let (batches, master) = (
        (batch, way.group, inputs),
        (plan.formats.master(), Muon::new(settings, &plan)),
    );
    let (stepper, memory) =
        Stepper::new(engine, gpu, batches, master, tiles_in, stage, shards).unwrap();
    let mut stepper = stepper.in_sequence(ranks.sequence.clone());
    let backend = memory.attach(backend);
    stepper.attach_scratch(backend.scratch()).unwrap();
    (stepper, backend)
}

/// Runs all steps of `settings` from weights given by `first_weights`.
fn steps(
    settings: &RunSettings,
    data: &Data,
    way: &Way,
    gpu: Option<&Gpu>,
    ranks: &Ranks,
    first_weights: impl Fn(&Plan, usize, Range<usize>, &mut [f32]),
) -> StepResults {
    let rank = ranks.comm.world().rank;
    let (mut stepper, mut backend) = opened(settings, way, gpu, ranks, first_weights);
    let mut steps = Vec::new();
    for step in 1..=settings.train.steps {
        let first = (step - 1) * settings.step_samples();
        let mut parts = Vec::new();
        let mut begins = |part: &str| parts.push(part.to_owned());
        let off = Trace::off();
        let found = stepper.forward_backward(&mut backend, data, (first, 1.0), &off, &mut begins);
        let found = found.unwrap();
        assert_told(&parts, settings, way);
        assert!(found.loss.is_finite() && found.norm.is_finite(), "{way:?}");
        assert_read_ahead(&stepper, settings, rank, step);
        let update = hyper(settings, step, found.norm, 1.0);
        let directions = stepper.orthogonalize(&mut backend, &update, &off);
        directions.unwrap();
        mover::finish_step(&mut backend, Some(update), Vec::new()).unwrap();
        steps.push([found.loss, found.norm]);
    }
    backend.drain().unwrap();
    let evaluates = settings.train.eval_every != Interval::Never;
    let evaluated = evaluates.then(|| {
        let mut parts = Vec::new();
        let mut begins = |part: &str| parts.push(part.to_owned());
        let loss = stepper.evaluate(&mut backend, data, Some(2), &mut begins);
        assert!(parts[0].starts_with("validation, micro-batches 1 to 2 of 2: "));
        loss.unwrap()
    });
    let (mut fingerprint, mut params) = (Fingerprint::default(), BTreeMap::new());
    backend
        .visit(&mut |range, param, state| {
            params.insert((range.unit, range.elems.start), param.to_vec());
            fingerprint.add(param);
            fingerprint.add(state);
        })
        .unwrap();
    drop(stepper);
    backend.close().unwrap();
    StepResults {
        steps,
        evaluated,
        fingerprint: fingerprint.finish(),
        params,
    }
}

/// Fills `out` with random weights of a unit.
fn random(plan: &Plan, unit: usize, elems: Range<usize>, out: &mut [f32]) {
    for param in &plan.units[unit].params {
        let range = param.range_elems();
        let is_norm = param.name.ends_with("weight");
        for elem in range.start.max(elems.start)..range.end.min(elems.end) {
            out[elem - elems.start] = weight(unit, elem, param.decay, is_norm);
        }
    }
}

/// Returns the bits of two steps of `model` with random weights, and of an evaluation after them.
fn bits(harness: &Harness, model: &Value, way: &Way, gpu: Option<&Gpu>, ranks: &Ranks) -> Vec<u64> {
    let settings = harness.settings(model, way, ranks.comm.world().ranks);
    let data = harness.data(&settings);
    let found = steps(&settings, &data, way, gpu, ranks, random).bits();
    if let (Place::OnDrives, Some(drives)) = (way.place, harness.drives.get()) {
        drives.drop_job();
    }
    found
}

fn alone(harness: &Harness, model: &Value, way: &Way, gpu: Option<&Gpu>) -> Vec<u64> {
    bits(harness, model, way, gpu, &Ranks::alone())
}

/// Compares every way to compute a step with one that keeps nothing and gives each block its own buffer.
fn each_way(mut compare: impl FnMut(&str, &Value, Way)) {
    for (number, (name, model)) in models().iter().enumerate() {
        for (tiles, micro_batches) in [(1, 1), (1, 2), (3, 2)] {
            let way = Way {
                // Rounding is not under test here, so half of the cases use bf16.
                bf16: (number + tiles) % 2 == 0,
                // Biases between matrices in bf16, and norms in fp32.
                muon: number % 3 == 1,
                keep: Checkpointing::default(),
                tiles,
                micro_batches,
                group: micro_batches as usize,
                place: Place::Own,
            };
            compare(name, model, way);
        }
    }
}

#[test]
fn activation_checkpointing_and_shared_buffers_change_no_bit_of_a_step() {
    let harness = Harness::new();
    each_way(|name, model, way| {
        let expected = alone(&harness, model, &way, None);
        for &keep in keeps(way.tiles) {
            for place in [Place::Own, Place::Shared, Place::OnDrives] {
                let way = Way { keep, place, ..way };
                println!("{name}, {way:?}");
                assert_eq!(
                    alone(&harness, model, &way, None),
                    expected,
                    "{name}, {way:?}"
                );
            }
        }
    });
}

/// Micro-batches of a step in tests of groups: with groups of 2 the last one is smaller.
const GROUPED: usize = 3;

/// Compares every size of group with all micro-batches together, for every form of model in both formats.
fn each_group(mut compare: impl FnMut(&str, &Value, Way)) {
    for (name, model) in models() {
        for (bf16, tiles) in [(false, 1), (true, 1), (true, 3)] {
            let way = Way {
                bf16,
                muon: tiles > 1,
                keep: Checkpointing::default(),
                tiles,
                micro_batches: GROUPED as u64,
                group: GROUPED,
                place: Place::Own,
            };
            compare(name, &model, way);
        }
    }
}

#[test]
fn groups_of_micro_batches_change_no_bit_of_a_step() {
    let harness = Harness::new();
    each_group(|name, model, way| {
        let expected = alone(&harness, model, &way, None);
        for group in 1..GROUPED {
            for (number, &keep) in keeps(way.tiles).iter().enumerate() {
                let place = [Place::OnDrives, Place::Own, Place::Shared][(number + group) % 3];
                let way = Way {
                    keep,
                    place,
                    group,
                    ..way
                };
                let found = alone(&harness, model, &way, None);
                assert_eq!(found, expected, "{name}, {way:?}");
            }
        }
    });
}

#[test]
fn a_damaged_input_on_a_drive_is_an_error_that_names_its_tile() {
    let harness = Harness::new();
    let (_, model) = &models()[2];
    let way = Way {
        bf16: false,
        muon: false,
        keep: Checkpointing::default(),
        tiles: 1,
        micro_batches: 1,
        group: 1,
        place: Place::OnDrives,
    };
    let settings = harness.settings(model, &way, 1);
    let data = harness.data(&settings);
    let alone = Ranks::alone();
    let (mut stepper, mut tiles) = opened(&settings, &way, None, &alone, random);
    let file = harness.drives.get().expect("it was started").file();
    let before = std::fs::read(&file).unwrap();
    let mut begins = |part: &str| {
        if !part.starts_with("loss") {
            return;
        }
        // Each block's input takes one tile, and forward writes nothing else.
        let inputs = LAYERS as usize;
        let began = Instant::now();
        let written = loop {
            let now = std::fs::read(&file).unwrap();
            let blocks = before.chunks(BLOCK).zip(now.chunks(BLOCK)).enumerate();
            let written = blocks.filter(|(_, (before, now))| before != now);
            let written: Vec<_> = written
                .map(|(number, (_, now))| (number, now[77]))
                .collect();
            if written.len() == inputs {
                break written;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{written:?}");
        };
        let file = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        for (number, byte) in written {
            file.write_all_at(&[byte ^ 1], (number * BLOCK + 77) as u64)
                .unwrap();
        }
    };
    let off = Trace::off();
    let failed = stepper.forward_backward(&mut tiles, &data, (0, 1.0), &off, &mut begins);
    let said = failed.err().expect("an error").to_string();
    // The last block's input comes back first.
    for part in [
        "offload.activations",
        &format!("reading scratch tile {}: ", LAYERS - 1),
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn ten_explicit_steps_match_hugging_face_with_any_activation_checkpointing() {
    let harness = Harness::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let text = std::fs::read_to_string(fixtures.join("hf/losses.json")).unwrap();
    let library: Value = serde_json::from_str(&text).unwrap();
    let run = &library["run"];
    // Models with an explicit backward; their windows hide nothing, or they have none.
    for name in ["llama", "llama3", "llama_yarn", "qwen3"] {
        let dir = fixtures.join("hf").join(name);
        let tree = json!({
            "train_batch_size": run["batch"],
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": run["gradient_clipping"],
            "optimizer": {"type": "AdamW", "params": {
                "lr": run["lr"], "betas": [run["beta1"], run["beta2"]], "eps": run["eps"],
                "weight_decay": run["weight_decay"]
            }},
            "model": {"path": dir},
            "data": {"files": [fixtures.join("text.txt")]},
            "train": {
                "steps": run["steps"], "seq_len": run["seq_len"], "seed": run["seed"], "threads": 1, "device": "cpu",
                "run_dir": harness.dir.path().join(name)
            }
        });
        let settings = check(tree, "a test", Some(1)).unwrap();
        let data = harness.data(&settings);
        let weights = Weights::open(&dir, &settings.model).unwrap();
        let from_file = |_: &Plan, unit: usize, elems: Range<usize>, out: &mut [f32]| {
            weights.fill(unit, elems, out).unwrap();
        };
        for &keep in keeps(1) {
            let way = Way {
                bf16: false,
                muon: false,
                keep,
                tiles: 1,
                micro_batches: 2,
                group: 2,
                place: Place::Shared,
            };
            let found = steps(&settings, &data, &way, None, &Ranks::alone(), from_file);
            for (which, list) in ["losses", "grad_norms"].into_iter().enumerate() {
                let theirs = library[name]["accumulated"][list].as_array().unwrap();
                assert_eq!((found.steps.len(), theirs.len()), (10, 10));
                for (ours, theirs) in found.steps.iter().zip(theirs) {
                    let (ours, theirs) = (ours[which], theirs.as_f64().unwrap());
                    let off = (ours / theirs - 1.0).abs();
                    assert!(
                        off < 2e-5,
                        "{name}, {keep:?}, {list}: {ours}, the library {theirs}"
                    );
                }
            }
        }
    }
}

/// Environment variables of the rank processes that this test starts from its own binary.
const TEST_RANK: &str = "OFFLOADD_TEST_RANK";
const TEST_RENDEZVOUS_DIR: &str = "OFFLOADD_TEST_RENDEZVOUS_DIR";

#[test]
fn activation_checkpointing_changes_no_bit_of_the_steps_of_two_ranks() {
    if let Some(rank) = test_rank() {
        return activation_checkpointing_changes_no_bit_of_one_of_two_ranks(rank);
    }
    as_ranks(
        "activation_checkpointing_changes_no_bit_of_the_steps_of_two_ranks",
        2,
    );
}

/// The connections of a rank in a test.
struct Ranks {
    comm: Arc<Comm>,
    /// The ranks that divide each sequence.
    sequence: Option<Arc<TensorExchange>>,
}

impl Ranks {
    fn alone() -> Self {
        Self {
            comm: Arc::new(Comm::alone()),
            sequence: None,
        }
    }

    /// Connects rank `rank` of `ranks`, of which each `sequence_ranks` divide sequences.
    fn connect(rank: u32, ranks: u32, sequence_ranks: u32) -> Self {
        let world = World {
            rank,
            ranks,
            local_rank: rank,
            local_ranks: ranks,
        };
        let rendezvous_dir = std::env::var_os(TEST_RENDEZVOUS_DIR).unwrap();
        let at = Rendezvous::Dir(rendezvous_dir.into());
        let comm = Arc::new(Comm::connect(world, &at, Timeouts::default()).unwrap());
        let exchange = || TensorExchange::connect(&comm, sequence_ranks, None).unwrap();
        Self {
            sequence: (sequence_ranks > 1).then(|| Arc::new(exchange())),
            comm,
        }
    }
}

/// Number of the rank that this process is in a test.
fn test_rank() -> Option<u32> {
    let rank = std::env::var_os(TEST_RANK)?;
    Some(rank.to_str().unwrap().parse().unwrap())
}

/// Runs the test `name` of this module in a process for each of `ranks`; all must succeed.
fn as_ranks(name: &str, ranks: u32) {
    let rendezvous_dir = tempfile::tempdir().unwrap();
    let start = |rank: u32| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("train::tests::{name}"), "--nocapture"])
            .env(TEST_RANK, rank.to_string())
            .env(TEST_RENDEZVOUS_DIR, rendezvous_dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..ranks).map(start).collect();
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}\n{err}"
        );
    }
}

fn activation_checkpointing_changes_no_bit_of_one_of_two_ranks(rank: u32) {
    let ranks = Ranks::connect(rank, 2, 1);
    let harness = Harness::new();
    for (name, model) in models() {
        let grouped = |keep, micro_batches, group| Way {
            bf16: false,
            muon: name == "qwen3",
            keep,
            tiles: 1,
            micro_batches,
            group,
            place: Place::Shared,
        };
        let way = |keep, micro_batches| grouped(keep, micro_batches, micro_batches as usize);
        let kept = |keep| bits(&harness, &model, &way(keep, 1), None, &ranks);
        let expected = kept(Checkpointing::default());
        // One process with the same samples rounds sums in another order. The last number is a fingerprint.
        let one = alone(&harness, &model, &way(Checkpointing::default(), 2), None);
        for (one, two) in one.iter().zip(&expected).take(one.len() - 1) {
            let [one, two] = [one, two].map(|bits| f64::from_bits(*bits));
            assert!((one / two - 1.0).abs() < 1e-3, "{name}: {one} and {two}");
        }
        for &keep in keeps(1) {
            assert_eq!(kept(keep), expected, "{name}, {keep:?}");
        }
        let of_group = |group| {
            let way = grouped(keeps(1)[0], GROUPED as u64, group);
            bits(&harness, &model, &way, None, &ranks)
        };
        let together = of_group(GROUPED);
        for group in 1..GROUPED {
            assert_eq!(of_group(group), together, "{name}, groups of {group}");
        }
    }
}

/// Where a run that a GPU computes may have its state and its inputs.
const ON_A_GPU: [Place; 5] = [
    Place::Gpu,
    Place::Host,
    Place::Both,
    Place::InputsAway,
    Place::OnDrives,
];

#[test]
fn activation_checkpointing_and_offloading_change_no_bit_of_a_step_on_a_gpu() {
    let name = "activation_checkpointing_and_offloading_change_no_bit_of_a_step_on_a_gpu";
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_absent() => {
            println!("skipped: {error}: steps on a GPU");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    // In a new process, because cuBLAS reads this variable when it starts, and another test's question about GPUs before torch's GPU half
    // is open would leave torch without one.
    const OWN_PROCESS: &str = "TRAINER_TEST_OWN_PROCESS";
    if std::env::var_os(OWN_PROCESS).is_none() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("train::tests::{name}"), "--nocapture"])
            .env(CUBLAS_WORKSPACE, CUBLAS_WORKSPACES[0])
            .env(OWN_PROCESS, "")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        let err = String::from_utf8_lossy(&child.stderr);
        print!("{said}");
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}\n{err}"
        );
        return;
    }
    let harness = Harness::new();
    each_way(|name, model, way| {
        let place = Place::Gpu;
        let expected = alone(&harness, model, &Way { place, ..way }, Some(&gpu));
        for &keep in keeps(way.tiles) {
            for place in ON_A_GPU {
                let way = Way { keep, place, ..way };
                println!("{name}, {way:?}");
                let found = alone(&harness, model, &way, Some(&gpu));
                assert_eq!(found, expected, "{name}, {way:?}");
            }
        }
    });
    // In turn, because all of them together take minutes.
    let mut places = ON_A_GPU.into_iter().cycle();
    each_group(|name, model, way| {
        let place = Place::Gpu;
        let expected = alone(&harness, model, &Way { place, ..way }, Some(&gpu));
        for group in 1..GROUPED {
            for (&keep, place) in keeps(way.tiles).iter().zip(&mut places) {
                let way = Way {
                    keep,
                    place,
                    group,
                    ..way
                };
                println!("{name}, {way:?}");
                let found = alone(&harness, model, &way, Some(&gpu));
                assert_eq!(found, expected, "{name}, {way:?}");
            }
        }
    });
}
