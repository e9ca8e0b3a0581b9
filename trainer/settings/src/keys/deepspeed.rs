//! The table of DeepSpeed's keys as Markdown: `docs/coming-from-deepspeed.md`.

use std::fmt::Write;

use super::auto::AUTO;
use super::each_used;
use super::table::{Key, KeySupport, SECTIONS};
use crate::reader::Reader;

const HEAD: &str = "# Coming from DeepSpeed

Generated from the program by `make docs`; a test keeps it current.

## Moving a run

A Python script that uses DeepSpeed can stay as it is: [`offloadd-run`](pytorch.md#first-run) starts it with the Python package, which reads the same
file. The native trainer needs no script. Both read DeepSpeed's keys with the same code; the tables below have a column for each.

With the trainer:

1. Write a run file with the settings that DeepSpeed leaves to your script: `model.path`, `data.files`, `train.steps`, `train.seq_len`, `train.run_dir`
   (`configs/deepspeed.toml` is an example).
2. `trainer plan run.toml --deepspeed ds_config.json` reads your JSON unchanged, including comments, trailing commas and numbers such as 5e8. It lists each key
   without effect with the reason, and refuses keys that ask for an unsupported feature. All refused keys are reported at once.
3. `trainer train run.toml --deepspeed ds_config.json`. A value in the run file, or in `--set`, replaces an \"auto\" in the JSON; two different values are refused.
4. Weights come from a model directory. Make one from a DeepSpeed checkpoint: run `python zero_to_fp32.py . DIR --safe_serialization` in its directory, and copy
   the model's `config.json` and tokenizer files to `DIR`. Optimizer state is not imported.

What changes: `trainer launch --nproc N` starts the processes; the environment variables that torchrun sets work too. Buffers, buckets and thresholds are sized by the plan. Checkpoints
can be resumed with any number of ranks. State on drives is committed while training continues, so a crash costs at most the steps since the last commit.

What both do with a file:

- Keys that are used have the same meaning as in DeepSpeed. A refused key is accepted if it switches its feature off (false, null, 0, `enabled` false).
- All wrong and refused keys are reported at once.
- Comments, trailing commas, numbers such as 5e8 and older spellings are read as DeepSpeed reads them: `bfloat16` as `bf16`, `zero_optimization = true` as
  stage 1, `cpu_offload = true` as `offload_optimizer.device = \"cpu\"`.
- A key that is not in these tables is ignored and reported if DeepSpeed ignores it (at the top level and in some tables), and refused if DeepSpeed
  refuses it (in `zero_optimization`, the precisions, the monitors, `optimizer.params`, `scheduler.params`).

DeepSpeed features that this project does not plan to support: 1-bit Adam, LAMB, ZeRO++ quantization, compression, random-LTD, Windows; pipeline and
tensor parallelism (Megatron-LM, torchtitan); serving (vLLM, SGLang); ONNX (Optimum).
";

/// Formats the page.
fn page() -> String {
    let mut text = HEAD.to_owned();
    for (title, keys) in SECTIONS {
        let _ = write!(
            text,
            "\n## {title}\n\n| key | trainer | Python package | explanation |\n|---|---|---|---|\n"
        );
        for key in *keys {
            let (support, why) = key.in_column(Reader::Trainer);
            let (package, own) = key.in_column(Reader::Package);
            let name = names(key);
            let explanation = match why == own {
                true => why.to_owned(),
                false => format!("trainer: {why}<br>package: {own}"),
            };
            let _ = writeln!(
                text,
                "| {name} | {} | {} | {explanation} |",
                words(support),
                words(package)
            );
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
    text += "\n## \"auto\"\n
In the Python package \"auto\" counts as left out: Hugging Face's Trainer and Accelerate replace it before. In the trainer, a value in the run file or in `--set` replaces \"auto\". Without one, \"auto\" becomes what Hugging Face's Trainer fills in
by default, and the trainer prints the choice. Any other key that is \"auto\" counts as left out.

| key | value of \"auto\" |
|---|---|
";
    for (key, _, what) in AUTO {
        let _ = writeln!(text, "| `{key}` | {what} |");
    }
    text
}

/// The package's own keys.
const OWN: &str = "\n## The package's own keys: `offloadd`\n
They stand in the same file, in a table `offloadd`. An unknown key in it is refused.

| key | type | default | meaning |
|---|---|---|---|
";

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
