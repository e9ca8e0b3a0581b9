#!/usr/bin/env python3
"""Trains with TRL's trainers and their defaults, plain and below `offloadd-run`, and compares losses, rewards and saved weights.

    trainer/bench/package/trl_trainers.py --nproc 2

Each trainer trains a tiny model with random weights for 4 steps on the CPU in fp32 (tests/scripts/trl_trainers.py): alone; with ZeRO stage
3 and device `nvme`; and killed with SIGKILL after its second step's checkpoint and started again from it. Those that generate gather all
weights for it, TRL's default. With --nproc 2 each run has 2 ranks with half a batch each; with --lora adapters are trained; with --attach the
model is taken over by `offloadd.hf.attach`. Arguments are the trainer's own, such as `-- --num_iterations 2`.
"""

import argparse
import json
import os
import pathlib
import runpy
import shutil
import sys

from scripts import HERE, PACKAGE, apart, report, run_or_kill

SCRIPT = HERE.parents[2] / "python/tests/scripts" / "trl_trainers.py"
STEPS, BATCH = 4, 8
# What a trainer logs at each step that is the same for the same training.
LOGGED = ("loss", "grad_norm", "reward", "objective/kl", "completions/mean_length", "num_tokens")


class Case:
    """One trainer with its runs."""

    def __init__(self, options, name):
        self.name, self.nproc, self.models, self.work = name, options.nproc, options.work / "models", options.work / name
        self.attach, self.more = options.attach, ["--lora"] * options.lora + options.arguments
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "nvme").mkdir(parents=True)
        auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(self.work / "nvme")}}
        settings = {**dict.fromkeys(auto, "auto"), "zero_optimization": offload}
        program = HERE.parents[3] / "target" / "debug" / "offloadd"
        if program.exists():
            settings["offloadd"] = {"program": str(program)}
        (self.work / "ds.json").write_text(json.dumps(settings))

    def run(self, out, offloaded, resume=False, kill=False):
        """Runs the trainer with its output in `out`."""
        checkpoint = out / "checkpoint-2"
        given = [self.name, self.models, *self.more, "--output_dir", out, "--per_device_train_batch_size", BATCH // self.nproc]
        given += ["--resume_from_checkpoint", checkpoint] if resume else []
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", self.nproc] if self.nproc > 1 else []
        if offloaded and not self.attach:
            command = ["-m", "offloadd.launch", "--nproc", self.nproc, SCRIPT, *given, "--deepspeed", self.work / "ds.json"]
        else:
            command = [*ranks, SCRIPT, *given, "--use_cpu", *(["--attach", self.work / "ds.json"] if offloaded else [])]
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        more |= {"HF_DATASETS_CACHE": str(self.work / "cache"), "TOKENIZERS_PARALLELISM": "false"}
        log = self.work / f"{out.name}{'-resumed' if resume else ''}.log"
        run_or_kill([sys.executable, *map(str, command)], more, log, self.work, [checkpoint / "trainer_state.json"] if kill else [])

    def logged(self, out, but=()):
        history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
        return {f"{entry['step']} {name}": entry[name] for entry in history if "loss" in entry for name in LOGGED if name in entry and name not in but}

    def weights(self, out):
        from safetensors.torch import load_file

        return load_file(next(out.glob("*model.safetensors")))


def check(case):
    """Returns the row of the table: what was found, or where the trainer failed."""
    cells, stage = [], "plain"
    try:
        plain, whole, broken = (case.work / name for name in ("plain", "offloaded", "killed"))
        case.run(plain, offloaded=False)
        stage = "offloaded"
        case.run(whole, offloaded=True)
        cells.append(f"logged {apart(case.logged(plain), case.logged(whole)):.1e}")
        cells.append(f"weights {apart(case.weights(plain), case.weights(whole)):.1e}")
        stage = "killed"
        case.run(broken, offloaded=True, kill=True)
        stage = "resumed"
        # Some of TRL's trainers count from the start of the process.
        but = ("num_tokens",)
        case.run(broken, offloaded=True, resume=True)
        cells.append(f"resumed: logged {apart(case.logged(whole, but), case.logged(broken, but)):.1e}")
        cells.append(f"weights {apart(case.weights(whole), case.weights(broken)):.1e}")
    except (RuntimeError, OSError, ValueError) as error:
        cells.append(f"FAILED {stage}: {error}")
    return cells


def main():
    made = runpy.run_path(str(SCRIPT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("target/trl"), metavar="DIR", help="models and output")
    parser.add_argument("--only", nargs="+", choices=made["TRAINERS"], default=list(made["TRAINERS"]), metavar="NAME", help="some of the trainers")
    parser.add_argument("--nproc", type=int, default=1, choices=[1, 2], metavar="N", help="ranks of each run (1)")
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--attach", action="store_true", help="offloadd.hf.attach in place of offloadd-run")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the trainer")
    options = parser.parse_args()
    options.work = options.work.resolve()
    shutil.rmtree(options.work / "models", ignore_errors=True)
    made["make_models"](options.work / "models")
    return report(options.only, lambda name: check(Case(options, name)))


if __name__ == "__main__":
    sys.exit(main())
