//! Memory and space that known models need in each tier, as a Markdown page: `trainer plan --table DIR`
//! prints it.

use std::fmt;
use std::path::{Path, PathBuf};

use super::outlook::Count;
use super::places::{Place, PlaceReport};
use super::question::{Length, Question, QuestionError, read_model};
use super::text::{Digits, Seconds};
use super::{Hardware, Overrides, Plan};
use crate::config::{ActivationsChoice, GradientsChoice, RunSettings};
use crate::model::ModelConfig;
use offload_support::units::ApproxBytes;

/// Largest number of models in the table.
const MODELS_MAX: usize = 1000;

/// Run that every row describes: 8,192 tokens in a step on one GPU.
const QUESTION: Question = Question {
    seq_len: 2048,
    micro_batch: 4,
    micro_batches: 1,
    fp32: false,
    ranks: 1,
    length: Length::Steps(1),
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

/// Error of making the table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("cannot list the configurations in {}: {message}", dir.display())]
    Dir { dir: PathBuf, message: String },
    #[error(transparent)]
    Question(#[from] QuestionError),
    #[error("{model}: {source}")]
    Plan {
        model: String,
        source: Box<super::PlanError>,
    },
}

/// Row of the table: a model with its state in GPU memory, in host memory, on drives, and on drives with the
/// lowest needs.
struct Row {
    name: String,
    parameters: u64,
    places: [PlaceReport; 4],
}

/// Page about every `NAME.json` in a directory, small models first.
pub struct ModelsTable(Vec<Row>);

impl ModelsTable {
    /// Plans each model in each tier.
    ///
    /// # Errors
    /// The directory cannot be listed or is empty; a file in it does not describe a supported model.
    pub fn new(dir: &Path) -> Result<Self, TableError> {
        let mut rows: Vec<Row> = configs(dir)?
            .iter()
            .map(|path| {
                let name = path.file_stem().unwrap_or_default().to_string_lossy();
                row(name.into_owned(), &read_model(path)?)
            })
            .collect::<Result<_, _>>()?;
        rows.sort_by(|a, b| (a.parameters, &a.name).cmp(&(b.parameters, &b.name)));
        Ok(Self(rows))
    }
}

fn configs(dir: &Path) -> Result<Vec<PathBuf>, TableError> {
    let wrong = |message: String| TableError::Dir {
        dir: dir.to_owned(),
        message,
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| wrong(error.to_string()))? {
        let path = entry.map_err(|error| wrong(error.to_string()))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            paths.push(path);
        }
    }
    match paths.len() {
        0 => Err(wrong("it contains no .json files".into())),
        1..=MODELS_MAX => Ok(paths),
        count => Err(wrong(format!(
            "it contains {count} .json files, but at most {MODELS_MAX} are supported"
        ))),
    }
}

fn row(name: String, model: &ModelConfig) -> Result<Row, TableError> {
    let mut question = QUESTION;
    if (model.max_position_embeddings as u64) < question.seq_len {
        question.micro_batch *= question.seq_len / SEQ_LEN_SHORT;
        question.seq_len = SEQ_LEN_SHORT;
    }
    let settings = question.settings(model, &LEAST.map(String::from))?;
    let machine = Overrides {
        host_memory_bytes: Some(ENDLESS_BYTES),
        gpu_memory_bytes: Some(ENDLESS_BYTES),
        cores: Some(16),
        tflops: Some(TFLOPS),
        drives_count: Some(1),
        ..Overrides::default()
    };
    let hardware = Hardware::new(&settings, &machine);
    let planned = |place: Place, settings: &RunSettings| -> Result<PlaceReport, TableError> {
        let plan = Plan::new(settings, hardware.clone());
        let plan = plan.map_err(|source| TableError::Plan {
            model: name.clone(),
            source: Box::new(source),
        })?;
        Ok(PlaceReport::new(place, &plan))
    };
    let report = |place: Place| planned(place, &place.of(&settings));
    let mut farthest = Place::Drives.of(&settings);
    farthest.offload.gradients = GradientsChoice::Nvme;
    farthest.offload.activations = ActivationsChoice::Cpu;
    Ok(Row {
        places: [
            report(Place::Gpu)?,
            report(Place::Host)?,
            report(Place::Drives)?,
            planned(Place::Drives, &farthest)?,
        ],
        parameters: model.params_count() as u64,
        name,
    })
}

impl fmt::Display for ModelsTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Memory and space that models need in each tier

Made by `trainer plan --table configs/models`; `make docs` writes this page, and a test keeps it current. bf16 with AdamW, one process,
{} tokens a step, nothing of a block kept for backward, the update on the processor, all gradients in host memory unless the
state is on drives. *GPU* and *host* are what the process takes of that memory, *drives* is room for both generations,
*read* and *written* what a step moves. The step is the bound on one drive of 6.2 GB/s read and 3.2 written, a GPU of {TFLOPS:.0}
TFLOPS and 16 cores; *wear* is the writes at that rate. *Least* has gradients on drives too (`offload.gradients = \"nvme\"`) and
block inputs in host memory (`offload.activations = \"cpu\"`): the minimum that a machine needs. `trainer plan --model config.json` plans for another machine.

| model | parameters | all on the GPU | host: GPU | host | drives: GPU | host | drives | read | written | step | tokens/s | wear a day | least: GPU | host | drives | step |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            QUESTION.seq_len * QUESTION.micro_batch
        )?;
        for row in &self.0 {
            let [gpu, host, drives, least] = &row.places;
            let cells = [
                row.name.clone(),
                Count(row.parameters as f64).to_string(),
                ApproxBytes(gpu.gpu_bytes).to_string(),
                ApproxBytes(host.gpu_bytes).to_string(),
                ApproxBytes(host.host_bytes).to_string(),
                ApproxBytes(drives.gpu_bytes).to_string(),
                ApproxBytes(drives.host_bytes).to_string(),
                ApproxBytes(drives.device_bytes).to_string(),
                ApproxBytes(drives.step_read_bytes as u64).to_string(),
                ApproxBytes(drives.step_written_bytes as u64).to_string(),
                Seconds(drives.step_s).to_string(),
                format!("{:.0}", drives.tokens_per_s),
                format!("{} TB", Digits(drives.outlook.written_bytes_per_day / 1e12)),
                ApproxBytes(least.gpu_bytes).to_string(),
                ApproxBytes(least.host_bytes).to_string(),
                ApproxBytes(least.device_bytes).to_string(),
                Seconds(least.step_s).to_string(),
            ];
            writeln!(f, "| {} |", cells.join(" | "))?;
        }
        Ok(())
    }
}
