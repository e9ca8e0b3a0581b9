//! The table of DeepSpeed's keys as Markdown: `docs/coming-from-deepspeed.md`.

use std::fmt::Write;

use super::auto::AUTO;
use super::table::{Key, KeySupport, SECTIONS};
use super::{OLD_SPELLINGS, each_used};
use crate::reader::Reader;

const HEAD: &str = "# Coming from DeepSpeed

Generated from the program by `make docs`; a test keeps it current.

A Python script that uses DeepSpeed can stay as it is: [`offloadd-run`](pytorch.md#first-run) starts it with the Python package, which reads the same
file. The native trainer needs no script. Both read DeepSpeed's keys with the same code; the tables below have a column for each.

## What both do with a file

- Keys that are used have DeepSpeed's meaning. A refused key is accepted if it switches its feature off (false, null, 0, `enabled` false).
- All wrong and refused keys are reported at once, and keys without effect when a run starts.
- Comments, trailing commas, numbers such as 5e8 and older spellings are read as DeepSpeed reads them: `bfloat16` as `bf16`, `zero_optimization = true` as
  stage 1, `cpu_offload = true` as `offload_optimizer.device = \"cpu\"`.
- A key that is not in these tables is ignored and reported if DeepSpeed ignores it (at the top level and in some tables), and refused if DeepSpeed
  refuses it (in `zero_optimization`, the precisions, the monitors, `optimizer.params`, `scheduler.params`).

Look at these keys first if results differ from those that you know:

| key | difference |
|---|---|
| `offload_param.device`, `offload_optimizer.device` | left out, or none: the package keeps the optimizer's state and gradients in host memory, and parameters whole on each rank: [devices](pytorch.md#devices) |
| `gradient_clipping` | left out: 1.0 in the trainer and with `initialize`, as in DeepSpeed since June 2026 |
| `bf16`, `data_types.grad_accum_dtype` | gradients of several micro-batches are added in fp32; the package adds in bf16 if `grad_accum_dtype` says so |
| `bf16_master_weights_and_grads`, `bf16_optimizer_states` | rounded stochastically, not to the nearest |
| `bf16.check_grad_overflow` | left out: the trainer stops at a gradient that is not finite |
| `weight_decay` | the trainer does not apply it to norms |
| `optimizer`, `scheduler` | left out: the trainer takes Hugging Face's rates and says so |
| `wandb`, `comet` | refused unless they are off |

DeepSpeed features that this project does not plan to support: 1-bit Adam, LAMB, ZeRO++ quantization, compression, random-LTD, Windows; pipeline and
tensor parallelism (Megatron-LM, torchtitan); serving (vLLM, SGLang); ONNX (Optimum).

## A script, with the Python package

1. `python -m offloadd plan ds_config.json --model NAME` says what the run needs.
2. Start the script with `offloadd-run` in place of `deepspeed`: [first run](pytorch.md#first-run).

| with DeepSpeed | here |
|---|---|
| `deepspeed --num_gpus 2 train.py` | `offloadd-run --nproc 2 train.py` (on two GPUs 1.8 times as fast as FSDP2; DeepSpeed was [not measured](benchmarks.md#more-of-training)) |
| `--include localhost:1,3` | `CUDA_VISIBLE_DEVICES=1,3` before the command |
| `--hostfile`, `--num_nodes`, `--master_port` | `offloadd-run -- torchrun --nnodes 2 ... train.py` on each node: [several nodes](pytorch-details.md#several-nodes) |
| a checkpoint of DeepSpeed | is not read, nor does DeepSpeed read ours: take its weights, as in step 4 below, or ours of `engine.save_16bit_model` |

## A run file, with the trainer

1. Write a run file with the settings that DeepSpeed leaves to your script: `model.path`, `data.files`, `train.steps`, `train.seq_len`, `train.run_dir`
   (`configs/deepspeed.toml` is an example).
2. `trainer plan run.toml --deepspeed ds_config.json` reads your JSON unchanged, and lists each key without effect with the reason.
3. `trainer train run.toml --deepspeed ds_config.json`. A value in the run file, or in `--set`, replaces an \"auto\" in the JSON; two different values are refused.
   `trainer launch --nproc N` starts several processes; the environment variables that torchrun sets work too.
4. Weights come from a model directory. Make one from a DeepSpeed checkpoint: run `python zero_to_fp32.py . DIR --safe_serialization` in its directory, and copy
   the model's `config.json` and tokenizer files to `DIR`. Optimizer state is not imported.
";

/// Formats the page.
fn page() -> String {
    let mut text = HEAD.to_owned();
    text += "\n## \"auto\"\n
In the Python package \"auto\" counts as left out: Hugging Face's Trainer and Accelerate replace it before. In the trainer, a value in the run file or in
`--set` replaces \"auto\". Without one, \"auto\" becomes what Hugging Face's Trainer fills in by default, and the trainer prints the choice. Any other key that
is \"auto\" counts as left out.

| key | value of \"auto\" |
|---|---|
";
    for (key, _, what) in AUTO {
        let _ = writeln!(text, "| `{key}` | {what} |");
    }
    for (title, keys) in SECTIONS {
        let _ = write!(
            text,
            "\n## {title}\n\n| key | trainer | Python package |\n|---|---|---|\n"
        );
        // Keys with the same two answers share a row.
        let mut rows: Vec<(String, [String; 2])> = Vec::new();
        for key in *keys {
            let trainer = cell(key, Reader::Trainer);
            let package = match cell(key, Reader::Package) {
                same if same == trainer => "the same".to_owned(),
                own => own,
            };
            let cells = [trainer, package];
            match rows.iter_mut().find(|(_, others)| *others == cells) {
                Some((others, _)) => *others += &format!("; {}", names(key)),
                None => rows.push((names(key), cells)),
            }
        }
        for (names, [trainer, package]) in rows {
            let _ = writeln!(text, "| {names} | {trainer} | {package} |");
        }
    }
    text += OWN;
    each_used(Reader::Package, &mut |path, field| {
        if let Some(name) = path.strip_prefix("offloadd.") {
            let _ = writeln!(
                text,
                "| `{name}` | {} | {} | {} |",
                field.kind.words,
                field.default,
                field.what()
            );
        }
    });
    text
}

/// The package's own keys.
const OWN: &str = "\n## The package's own keys: `offloadd`\n
They stand in the same file, in a table `offloadd`. An unknown key in it is refused.

| key | type | default | meaning |
|---|---|---|---|
";

/// What `reader` does with a key, and why or how.
fn cell(key: &Key, reader: Reader) -> String {
    let (support, why) = key.in_column(reader);
    let is_older =
        |(old, _): &(&str, &str)| key.path.strip_prefix("zero_optimization.") == Some(*old);
    match OLD_SPELLINGS.iter().any(is_older) {
        true => format!("used: {why}"),
        false => format!("{}: {why}", words(support)),
    }
}

fn words(support: KeySupport) -> String {
    match support {
        KeySupport::Used => "used".to_owned(),
        KeySupport::Unused => "without effect".to_owned(),
        KeySupport::Refused => "refused".to_owned(),
        KeySupport::RefusedBut(values) => format!("refused unless {}", values.join(" or ")),
    }
}

fn names(key: &Key) -> String {
    match (key.below, key.below.contains(' ')) {
        ("", _) => format!("`{}`", key.path),
        ("*", _) => format!("`{}` and all below", key.path),
        (below, false) => format!("`{}.{below}`", key.path),
        (below, true) => {
            let names: Vec<String> = below.split(' ').map(|name| format!("`{name}`")).collect();
            format!("`{}`: {}", key.path, names.join(", "))
        }
    }
}

#[test]
fn the_page_in_docs_is_current() {
    docs_test::assert_page("docs/coming-from-deepspeed.md", &page());
}
