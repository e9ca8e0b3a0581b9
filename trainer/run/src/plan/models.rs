//! Memory and space that known models need in each tier, as a Markdown page: `docs/models.md`.

use std::fmt::Write;
use std::path::Path;

use super::figures::Seconds;
use super::outlook::PrefixedNumber;
use super::places::{Place, PlaceReport};
use super::question::{Question, RunLength, read_model};
use super::{Hardware, Overrides, Plan};
use crate::accelerator::without_torch;
use crate::config::{ActivationsChoice, GradientsChoice, RunSettings};
use crate::model::ModelConfig;
use offload_support::units::ApproxBytes;

/// Run that every row describes: 8,192 tokens in a step on one GPU.
const QUESTION: Question = Question {
    seq_len: 2048,
    micro_batch: 4,
    micro_batches: 1,
    fp32: false,
    ranks: 1,
    length: RunLength::Steps(1),
};

/// Longest sequence of GPT-2; its row has the same number of tokens in shorter sequences.
const SEQ_LEN_SHORT: u64 = 1024;

/// Settings with the lowest needs: everything is recomputed, and the update runs on the processor.
const LEAST: [&str; 2] = [
    "train.activation_checkpointing=full",
    "offload.optimizer_device=cpu",
];

/// More memory than any model needs: the table shows needs, not whether a machine satisfies them.
const ENDLESS_BYTES: u64 = 1 << 50;

/// Forward and backward on a fast consumer GPU, in 10^12 operations per second.
const TFLOPS: f64 = 150.0;

/// Model of the table of ranks, and their numbers.
const MODEL_OF_RANKS: &str = "Llama-2-7B";
const RANKS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Row of the table: a model with its state in GPU memory, in host memory, on drives, and on drives with the
/// lowest needs.
struct Row {
    name: String,
    parameters: u64,
    places: [PlaceReport; 4],
}

/// The run that a row describes, and a machine with room for it.
fn run_and_machine(model: &ModelConfig, ranks: u32) -> (RunSettings, Hardware) {
    let mut question = Question { ranks, ..QUESTION };
    if (model.max_position_embeddings as u64) < question.seq_len {
        question.micro_batch *= question.seq_len / SEQ_LEN_SHORT;
        question.seq_len = SEQ_LEN_SHORT;
    }
    let settings = question.settings(model, &LEAST.map(String::from)).unwrap();
    let machine = Overrides {
        host_memory_bytes: Some(ENDLESS_BYTES),
        gpu_memory_bytes: Some(ENDLESS_BYTES),
        cores: Some(16),
        tflops: Some(TFLOPS),
        drives_count: Some(1),
        ..Overrides::default()
    };
    let hardware = Hardware::new(&settings, &machine, without_torch);
    (settings, hardware)
}

fn planned(place: Place, settings: &RunSettings, hardware: &Hardware) -> PlaceReport {
    PlaceReport::new(place, &Plan::new(settings, hardware.clone()).unwrap())
}

fn row(name: String, model: &ModelConfig) -> Row {
    let (settings, hardware) = run_and_machine(model, QUESTION.ranks);
    let report = |place: Place| planned(place, &place.apply_to(&settings), &hardware);
    let mut farthest = Place::Drives.apply_to(&settings);
    farthest.offload.gradients = GradientsChoice::Nvme;
    farthest.offload.activations = ActivationsChoice::Cpu;
    Row {
        places: [
            report(Place::Gpu),
            report(Place::Host),
            report(Place::Drives),
            planned(Place::Drives, &farthest, &hardware),
        ],
        parameters: model.params_count() as u64,
        name,
    }
}

/// A cell with the bytes in each of some tiers.
fn tiers(tiers: &[u64]) -> String {
    let bytes = tiers.iter().map(|&bytes| ApproxBytes(bytes).to_string());
    bytes.collect::<Vec<_>>().join(", ")
}

/// Formats the page about every `NAME.json` in `dir`, small models first.
fn page(dir: &Path) -> String {
    let paths = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let configs = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let mut rows: Vec<Row> = configs
        .map(|path| {
            let name = path.file_stem().unwrap().to_string_lossy();
            row(name.into_owned(), &read_model(&path).unwrap())
        })
        .collect();
    rows.sort_by(|a, b| (a.parameters, &a.name).cmp(&(b.parameters, &b.name)));
    let mut text = format!(
        "# Memory and space that models need in each tier

Generated from the plans of `configs/models` by `make docs`; a test keeps it current. bf16 with AdamW, one process,
{} tokens a step, all activations recomputed, the update on the CPU, gradients in host memory unless all is on the
GPU. *GPU* and *host* are what the process takes of that memory, *drives* is room for both generations.
*Least* has gradients on drives too (`offload.gradients = \"nvme\"`) and block inputs in host memory (`offload.activations = \"cpu\"`): the minimum that a
machine needs. `trainer plan --model config.json` plans for another machine.

| model | parameters | state on the GPU: GPU | in host memory: GPU, host | on drives: GPU, host, drives | on drives, least: GPU, host, drives |
|---|---|---|---|---|---|
",
        QUESTION.seq_len * QUESTION.micro_batch
    );
    let on_drives =
        |place: &PlaceReport| tiers(&[place.gpu_bytes, place.host_bytes, place.device_bytes]);
    for row in &rows {
        let [gpu, host, drives, least] = &row.places;
        let cells = [
            row.name.clone(),
            PrefixedNumber(row.parameters as f64).to_string(),
            tiers(&[gpu.gpu_bytes]),
            tiers(&[host.gpu_bytes, host.host_bytes]),
            on_drives(drives),
            on_drives(least),
        ];
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text + &section_of_steps(&rows) + &section_of_ranks(dir)
}

/// Formats what a step with state on a drive moves, and how long it takes.
fn section_of_steps(rows: &[Row]) -> String {
    let mut text = format!(
        "
## A step with state on one drive

Bytes that a step moves, and its bound on a drive of 6.2 GB/s read and 3.2 written, a GPU of {TFLOPS:.0} TFLOPS and 16 cores. A drive that limits the step is
written 276 TB a day.

| model | read | written | step | step with the least memory |
|---|---|---|---|---|
"
    );
    for row in rows {
        let [.., drives, least] = &row.places;
        let cells = [
            row.name.clone(),
            ApproxBytes(drives.step_read_bytes as u64).to_string(),
            ApproxBytes(drives.step_written_bytes as u64).to_string(),
            Seconds(drives.step_s).to_string(),
            Seconds(least.step_s).to_string(),
        ];
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Formats what each rank takes of a model that more and more ranks divide, beside what the stages of ZeRO take.
fn section_of_ranks(dir: &Path) -> String {
    let model = read_model(&dir.join(MODEL_OF_RANKS).with_extension("json")).unwrap();
    let mut text = format!(
        "
## More ranks

{MODEL_OF_RANKS}, as above, each rank with {} tokens a step. Parameters, gradients and state are always divided, as in stage 3 of ZeRO, and each rank takes:

| ranks | state on the GPU: GPU | in host memory: GPU, host | ZeRO-1 (formula, no activations) | ZeRO-2 | ZeRO-3 |
|---|---|---|---|---|---|
",
        QUESTION.seq_len * QUESTION.micro_batch
    );
    for ranks in RANKS {
        let (settings, hardware) = run_and_machine(&model, ranks);
        let [gpu, host] = [Place::Gpu, Place::Host]
            .map(|place| planned(place, &place.apply_to(&settings), &hardware));
        let parameters = model.params_count() as u64;
        // Bytes of a parameter, its gradient and its state, of which a stage divides the state, the gradient too, or all: Rajbhandari et al.
        // 2020, figure 1.
        let stage =
            |whole: u64, divided: u64| parameters * whole + parameters * divided / u64::from(ranks);
        let of_host = [host.gpu_bytes, host.host_bytes / u64::from(ranks)];
        let cells = [
            tiers(&[gpu.gpu_bytes]),
            tiers(&of_host),
            tiers(&[stage(4, 12)]),
            tiers(&[stage(2, 14)]),
            tiers(&[stage(0, 16)]),
        ];
        let _ = writeln!(text, "| {ranks} | {} |", cells.join(" | "));
    }
    text
}

#[test]
fn the_table_of_models_in_docs_is_current() {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/models");
    docs_test::assert_page("docs/models.md", &page(Path::new(models)));
}
