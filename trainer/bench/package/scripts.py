#!/usr/bin/env python3
"""Runs the example scripts of transformers unmodified, plain and below `offloadd-run`, and compares losses and saved weights.

    trainer/bench/package/scripts.py --examples transformers/examples/pytorch

Each script trains a tiny model with random weights on made-up data, on the CPU in fp32, 3 epochs of 4 steps: alone; with ZeRO stage 3 and
device `nvme`; and killed with SIGKILL after the first epoch's checkpoint and started again from it. The scripts of the Trainer get
`--deepspeed`, those without it are started by `accelerate launch`. The saved model is loaded with plain transformers. With --nproc 2 each
run has 2 ranks with half a batch each.

Needs torch, transformers, accelerate and datasets, and for images torchvision and pillow. The modules that compute metrics and write curves
(evaluate, nltk, tensorboardX) are replaced by small ones made here, since the scripts load metrics from the network.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy

HERE = pathlib.Path(__file__).resolve()
PACKAGE = HERE.parents[2] / "python/python"
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
WORDS = [f"w{n}" for n in range(60)]
SIZES = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
STEPS_PER_EPOCH, EPOCHS, BATCH = 4, 3, 4
RUN_SECONDS_MAX = 300

# Modules that the scripts import. A score is the fraction of equal items, under the names that the scripts look for.
STAND_INS = {
    "evaluate.py": """
import numpy

class Metric:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(predictions, references)

    def compute(self, predictions=None, references=None, **options):
        pairs = self.pairs if predictions is None else list(zip(predictions, references))
        self.pairs = []
        equal = float(numpy.mean([numpy.array_equal(one, other) for one, other in pairs]))
        return {"accuracy": equal, "score": equal, "rougeL": equal}

def load(*names, **options):
    return Metric()
""",
    "nltk.py": """
class data:
    find = staticmethod(lambda name: name)

sent_tokenize = str.splitlines
""",
    # Two scripts ask for a constant that accelerate removed in 1.0.
    "with_tpu.py": """
import runpy, sys
import accelerate

accelerate.DistributedType.TPU = accelerate.DistributedType.XLA
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
""",
    "tensorboard.py": "raise ModuleNotFoundError('tensorboard')",
    "tensorboardX-2.dist-info/METADATA": "Metadata-Version: 2.1\nName: tensorboardX\nVersion: 2\n",
    "tensorboardX.py": """
import json, os

class SummaryWriter:
    def __init__(self, logdir, **options):
        os.makedirs(logdir, exist_ok=True)
        self.file = open(os.path.join(logdir, "scalars.jsonl"), "a")

    def add_scalar(self, name, value, global_step=None, **options):
        print(json.dumps([name, float(value), global_step]), file=self.file, flush=True)

    def __getattr__(self, name):
        return lambda *arguments, **options: None
""",
}

TEXT = ["--train_file", "{data}/train.txt", "--validation_file", "{data}/valid.txt"]
PAIRS = ["--train_file", "{data}/train.csv", "--validation_file", "{data}/valid.csv"]
SUMMARIES = ["--text_column", "text", "--summary_column", "summary", "--max_source_length", "24", "--max_target_length", "12"]
TRANSLATIONS = ["--train_file", "{data}/train.json", "--validation_file", "{data}/valid.json", "--source_lang", "en", "--target_lang", "ro"]
TRANSLATIONS += ["--max_source_length", "24", "--max_target_length", "12"]
IMAGES = ["--train_dir", "{data}/images/train", "--validation_dir", "{data}/images/valid", "--remove_unused_columns", "False"]
GENERATES = ["--predict_with_generate", "--generation_max_length", "8"]
TWIN_GENERATES = ["--val_max_target_length", "8", "--num_beams", "2"]
# Script, without and with `_no_trainer`: directory, model, arguments of both, arguments of each.
SCRIPTS = {
    "run_glue": ("text-classification", "bert", PAIRS, ["--max_seq_length", "16"], ["--max_length", "16"]),
    "run_mlm": ("language-modeling", "bert_lm", [*TEXT, "--max_seq_length", "16", "--line_by_line", "True"], [], []),
    "run_clm": ("language-modeling", "gpt2", [*TEXT, "--block_size", "8"], ["--max_train_samples", "16"], []),
    "run_summarization": ("summarization", "t5", [*PAIRS, *SUMMARIES], GENERATES, TWIN_GENERATES),
    "run_translation": ("translation", "bart", TRANSLATIONS, GENERATES, TWIN_GENERATES),
    "run_image_classification": ("image-classification", "vit", [], IMAGES, ["--dataset_name", "{data}/images"]),
}


def make_models(into):
    import tokenizers
    import torch
    import transformers as hf

    hf.logging.disable_progress_bar()
    vocabulary = {word: n for n, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    words.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="[CLS]", eos_token="[SEP]", **SPECIAL)
    encoder = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48)
    gpt2 = dict(n_embd=32, n_layer=3, n_head=2, n_positions=64)
    both = dict(d_model=32, decoder_start_token_id=2, **SIZES)
    bart = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    torch.manual_seed(0)
    models = {
        "bert": hf.BertForSequenceClassification(hf.BertConfig(**encoder, **SIZES)),
        "bert_lm": hf.BertForMaskedLM(hf.BertConfig(**encoder, **SIZES)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **SIZES)),
        "t5": hf.T5ForConditionalGeneration(hf.T5Config(d_kv=16, d_ff=48, num_layers=2, num_heads=2, **both)),
        "bart": hf.BartForConditionalGeneration(hf.BartConfig(**bart, **both, forced_eos_token_id=3)),
        "vit": hf.ViTForImageClassification(hf.ViTConfig(**encoder, image_size=16, patch_size=4)),
    }
    for name, model in models.items():
        model.save_pretrained(into / name)
        if name == "vit":
            size = {"height": 16, "width": 16}
            hf.ViTImageProcessor(size=size).save_pretrained(into / name)
        else:
            tokenizer.save_pretrained(into / name)


def make_data(into):
    from PIL import Image

    chance = random.Random(0)
    rows = STEPS_PER_EPOCH * BATCH
    into.mkdir(parents=True)
    for part, count in (("train", rows), ("valid", 6)):
        texts = [chance.choices(WORDS, k=8) for _ in range(count)]
        lines = [" ".join(words) for words in texts]
        # run_clm cuts the text into blocks of 8 tokens; the other scripts see a line with two special tokens.
        (into / f"{part}.txt").write_text("\n".join(lines) + "\n")
        summaries = [" ".join(words[:3]) for words in texts]
        rows_csv = [f"{line},{short},{n % 2}" for n, (line, short) in enumerate(zip(lines, summaries))]
        (into / f"{part}.csv").write_text("\n".join(["text,summary,label", *rows_csv]) + "\n")
        pairs = [{"translation": {"en": line, "ro": short}} for line, short in zip(lines, summaries)]
        (into / f"{part}.json").write_text("\n".join(map(json.dumps, pairs)) + "\n")
        for n in range(count):
            folder = into / "images" / part / ("even" if n % 2 == 0 else "odd")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = numpy.random.default_rng(n).integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(folder / f"{n}.png")


class Case:
    """One script with its model and data, and the runs of it."""

    def __init__(self, options, name):
        twin = name.endswith("_no_trainer")
        directory, model, shared, trainer_only, twin_only = SCRIPTS[name.removesuffix("_no_trainer")]
        self.name, self.twin, self.work, self.nproc = name, twin, options.work / name, options.nproc
        self.script = options.examples / directory / f"{name}.py"
        self.model, self.site = options.work / "models" / model, options.work / "site"
        data = options.work / "data"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        (self.work / "nvme").mkdir()
        settings = {
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "zero_optimization": {
                "stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(self.work / "nvme")},
                "offload_optimizer": {"device": "nvme", "nvme_path": str(self.work / "nvme")},
            },
        }  # fmt: skip
        # The Trainer says how it clips. Without it Accelerate takes "auto" for 1.0, and the plain script does not clip.
        settings |= {} if twin else {"gradient_clipping": "auto"}
        program = HERE.parents[3] / "target" / "debug" / "offloadd"
        if program.exists():
            settings["offloadd"] = {"program": str(program)}
        # Below zero.Init ViT's embeddings draw random numbers, which they do not where transformers loads a model without it: images
        # would be cut differently. The Trainer seeds again before it trains.
        settings["zero_optimization"]["stage"] = 2 if twin and model == "vit" else 3
        zero3 = {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_machines": 1, "machine_rank": 0,
            "num_processes": self.nproc, "use_cpu": False,
            "deepspeed_config": {"deepspeed_config_file": str(self.work / "ds.json"), "zero3_init_flag": True},
        }  # fmt: skip
        (self.work / "ds.json").write_text(json.dumps(settings))
        (self.work / "zero3.yaml").write_text(json.dumps(zero3))  # JSON is YAML
        alone = ["--model_name_or_path", self.model, "--num_train_epochs", EPOCHS, "--learning_rate", "3e-3", "--seed", "7"]
        alone += [argument.format(data=data) for argument in [*shared, *(twin_only if twin else trainer_only)]]
        if twin:
            alone += ["--checkpointing_steps", "epoch", "--with_tracking", "--report_to", "tensorboard"]
        else:
            alone += ["--do_train", "--do_eval", "--logging_steps", 1, "--save_steps", STEPS_PER_EPOCH, "--report_to", "none"]
        self.arguments = [str(argument) for argument in alone]

    def run(self, out, offloaded, resume=False, kill=False):
        """Runs the script with its output in `out`; returns whether it was killed."""
        batch = ["--per_device_train_batch_size", str(BATCH // self.nproc), "--per_device_eval_batch_size", "2"]
        start = [str(self.site / "with_tpu.py")] if "DistributedType.TPU" in self.script.read_text() else []
        script = [*start, str(self.script), *self.arguments, *batch, "--output_dir", str(out)]
        checkpoint = out / ("epoch_0" if self.twin else f"checkpoint-{STEPS_PER_EPOCH}")
        if resume:
            script += ["--resume_from_checkpoint", str(checkpoint)]
        starter = [sys.executable, "-m", "offloadd.launch"]
        if not offloaded:
            ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.nproc)] if self.nproc > 1 else []
            command = [sys.executable, *ranks, *script, *([] if self.twin else ["--use_cpu"])]
        elif self.twin:
            launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(self.work / "zero3.yaml")]
            command = [*starter, "--", *launch, *script]
        else:
            command = [*starter, "--nproc", str(self.nproc), *script, "--deepspeed", str(self.work / "ds.json")]
        paths = [str(self.site), str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        more |= {"HF_DATASETS_CACHE": str(self.site.parent / "cache"), "TOKENIZERS_PARALLELISM": "false"}
        if self.twin and not offloaded:
            more["ACCELERATE_USE_CPU"] = "1"
        log = self.work / f"{out.name}{'-resumed' if resume else ''}.log"
        # The last files that a checkpoint gets.
        last = [f"random_states_{rank}.pkl" for rank in range(self.nproc)] if self.twin else ["trainer_state.json"]
        run_or_kill(command, more, log, self.work, [checkpoint / name for name in last] if kill else [])

    def losses(self, out):
        """Returns the losses by step. The training loss of the scripts without the Trainer is that of the first rank."""
        if not self.twin:
            history = json.loads((out / "trainer_state.json").read_text())["log_history"]
            return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
        scalars = [json.loads(line) for file in out.rglob("scalars.jsonl") for line in file.read_text().splitlines()]
        return {f"{name} {step}": value for name, value, step in scalars if name in ("train_loss", "eval_loss")}

    def weights(self, out):
        """Loads the saved model with plain transformers."""
        import transformers

        config = json.loads((out / "config.json").read_text())
        model = getattr(transformers, config["architectures"][0])
        loaded, report = model.from_pretrained(out, output_loading_info=True)
        if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise RuntimeError(f"loaded with {report}")
        return loaded.state_dict()


def run_or_kill(command, more, log, cwd, last):
    """Runs a command with `more` in its environment and its output in `log`: to its end, or until all of the files `last` exist, when it is killed."""
    with open(log, "w") as output:
        process = subprocess.Popen(command, env={**os.environ, **more}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd)
    deadline = time.monotonic() + RUN_SECONDS_MAX
    while process.poll() is None:
        if last and all(file.exists() for file in last) or time.monotonic() > deadline:
            kill_with_children(process.pid)
            process.wait()
            if last:
                return
            raise RuntimeError(f"no end within {RUN_SECONDS_MAX} s, see {log}")
        time.sleep(0.01)
    if process.returncode or last:
        raise RuntimeError("ended before it was killed" if last and not process.returncode else last_error(log))


def kill_with_children(pid):
    """Kills a process and all below it: the ranks of a launcher have sessions of their own."""
    os.kill(pid, signal.SIGSTOP)
    doomed = [pid]
    for parent in doomed:
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                # After the name, which may have spaces: state, parent.
                if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                    doomed.append(int(stat.parent.name))
            except (FileNotFoundError, ProcessLookupError):
                pass
    for one in reversed(doomed):
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            pass


def last_error(log):
    lines = [line for line in log.read_text().splitlines() if "Error" in line or "offloadd:" in line]
    return f"{lines[-1] if lines else 'no error was printed'} (see {log})"


def apart(ones, others):
    """Returns the largest difference."""
    if set(ones) != set(others) or not ones:
        raise RuntimeError(f"different entries: {sorted(ones)[:20]} and {sorted(others)[:20]}")
    return max(float(numpy.abs(numpy.asarray(ones[key]) - numpy.asarray(others[key])).max()) for key in ones)


def check(case):
    """Returns the row of the table: what was found, or where the script failed."""
    cells, stage = [], "plain"
    try:
        plain, whole, broken = (case.work / name for name in ("plain", "offloaded", "killed"))
        case.run(plain, offloaded=False)
        stage = "offloaded"
        case.run(whole, offloaded=True)
        stage = "compared"
        cells.append(f"losses {apart(case.losses(plain), case.losses(whole)):.1e}")
        cells.append(f"weights {apart(case.weights(plain), case.weights(whole)):.1e}")
        stage = "killed"
        case.run(broken, offloaded=True, kill=True)
        stage = "resumed"
        case.run(broken, offloaded=True, resume=True)
        cells.append(f"resumed: losses {apart(case.losses(whole), case.losses(broken)):.1e}")
        cells.append(f"weights {apart(case.weights(whole), case.weights(broken)):.1e}")
    except (RuntimeError, OSError, ValueError) as error:
        cells.append(f"FAILED {stage}: {error}")
    return cells


def report(names, cells_of):
    """Prints a row for each name. Returns whether one failed."""
    failed = False
    for name in names:
        begun = time.monotonic()
        cells = cells_of(name)
        failed |= cells[-1].startswith("FAILED")
        print(f"{name}: {'; '.join(cells)} ({time.monotonic() - begun:.0f} s)", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=pathlib.Path, required=True, metavar="DIR", help="examples/pytorch of a checkout of transformers")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("target/scripts"), metavar="DIR", help="models, data and output")
    names = [name + kind for name in SCRIPTS for kind in ("", "_no_trainer")]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="some of the scripts")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks of each run (1)")
    options = parser.parse_args()
    options.work, options.examples = options.work.resolve(), options.examples.resolve()
    for made in ("models", "data"):
        shutil.rmtree(options.work / made, ignore_errors=True)
    make_models(options.work / "models")
    make_data(options.work / "data")
    for name, text in STAND_INS.items():
        file = options.work / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return report(options.only, lambda name: check(Case(options, name)))


if __name__ == "__main__":
    sys.exit(main())
