"""Hugging Face's Trainer on nodes that share no directory (checkpoint.use_node_local_storage)."""

import os
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.trainer  # noqa: E402

from test_each_node import Machines, mount, mounts  # noqa: E402, F401
from test_hf import DEEPSPEED, server  # noqa: E402
from test_nodes import drives, equal, state  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import randomize  # noqa: E402

pytestmark = needs_daemon


def with_trainer(rank, ranks, path, machines, device, stop_at):
    """Trains with Hugging Face's Trainer up to a step, from its newest checkpoint if there is one. Returns the step at which it begins, its log,
    the checkpoints of this machine and the weights at the end, which are those of the checkpoint with the highest loss, the first one."""
    transformers.logging.set_verbosity_error()
    mount(path / f"machine-{machines[rank]}", path / "out")
    # torch.distributed is initialized already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    settings = {**config(device, drives(path, f"{machines[rank]}")), **DEEPSPEED, "checkpoint": {"use_node_local_storage": True}}
    torch.manual_seed(0)
    sizes = dict(n_embd=256, n_layer=2, n_head=2, vocab_size=997, n_positions=16, resid_pdrop=0.1)
    model = randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 997, (32, 12), generator=torch.Generator().manual_seed(2))]

    begun = []

    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)
            if state.global_step == 0:
                # Ranks draw different numbers, and node 1 resumes with its own.
                torch.manual_seed(100 + rank)

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == stop_at

    args = transformers.TrainingArguments(
        str(path / "out"), deepspeed=settings, per_device_train_batch_size=2, max_steps=6, learning_rate=1e-3, logging_steps=1, seed=5,
        save_steps=2, save_total_limit=2, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss", greater_is_better=True,
        load_best_model_at_end=stop_at == 6, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=True)
    log = [(entry["step"], entry[kind]) for entry in trainer.state.log_history for kind in ("loss", "eval_loss") if kind in entry]
    kept = sorted(one.name for one in (path / "out").glob("checkpoint-*"))
    found = state(trainer.model)
    trainer.model_wrapped.run.close()
    return begun[0], log, kept, found


@pytest.mark.parametrize("device, starts", [("cpu", [(1, 2), (0, 4), (None, 6)]), ("nvme", [(0, 2), (None, 6)])])
def test_the_trainer_resumes_with_the_same_bits_after_any_node_was_lost(tmp_path, device, starts, mounts):
    def train(machines, stop_at):
        told = machines.told([0, 1], device, stop_at, work=with_trainer, start=server("deepspeed").start)
        assert not any(isinstance(one, Exception) for one in told), told
        return told

    machines, unbroken = Machines(tmp_path), Machines(tmp_path / "unbroken")
    before = 0
    for lost, stop_at in starts:
        found = train(machines, stop_at)
        assert [one[0] for one in found] == [before] * 2
        before = stop_at
        if lost is not None:
            shutil.rmtree(machines.dir(lost))
            shutil.rmtree(tmp_path / f"drive-{lost}")
    for (_, log, kept, weights), (_, expected, names, same) in zip(found, train(unbroken, 6)):
        assert len(log) == 9 and log == expected and equal(weights, same)
        assert kept == names == ["checkpoint-2", "checkpoint-6"]
