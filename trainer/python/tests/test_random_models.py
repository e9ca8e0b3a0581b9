"""Random module trees, run in random ways: the bits of plain PyTorch.

`OFFLOADD_RANDOM=FIRST..LAST` names other seeds than the suite's; a failure names its seed.
"""

import contextlib
import os
import random

import pytest
import torch

import offloadd
from random_models import act, draw_step, make
from test_runs import config, needs_daemon
from toy import Offloaded, let_stay, same_gradients

STEPS = 4


def seeds(default):
    first, last = (int(one) for one in os.environ.get("OFFLOADD_RANDOM", default).split(".."))
    return range(first, last)


def same(one, other):
    """Whether both have the same bits, or are both none."""
    return one is None and other is None or one is not None and other is not None and torch.equal(one, other)


def compare(seed):
    """Runs a seed's model plain and on a core in Python; raises where they differ."""
    rng = random.Random(seed)
    plain, wanted = make(seed)
    ours = Offloaded(make(seed)[0], wanted, resident=(0, 0.5, 1)[seed % 3])
    for step in range(STEPS):
        plain.zero_grad()
        for what, plans, number in draw_step(rng, plain):
            expected, found = act(plain, what, plans, number), act(ours.model, what, plans, number)
            assert len(expected) == len(found) and all(map(same, expected, found)), f"seed {seed}, step {step}: {what} differs"
            if what not in ("only forward", "inference", "evaluate", "read"):
                assert not ours.live(), f"seed {seed}, step {step}: {ours.live()} stay after {what}"
        different = same_gradients(plain, ours.take_gradients())
        assert not different, f"seed {seed}, step {step}: gradients of {different} differ"


@pytest.mark.parametrize("first", list(seeds("0..60"))[::10])
def test_random_models_have_plain_pytorchs_losses_and_gradients(first):
    for seed in range(first, min(first + 10, seeds("0..60").stop)):
        try:
            compare(seed)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def weights_after(seed, tmp_path, device, resident=0, **own):
    """Losses and weights of a run, a fraction of whose units stays in memory; of torch's own AdamW without a device."""
    rng = random.Random(seed)
    model, wanted = make(seed)
    # A large eps: gradients that are rounding only become no steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    run = contextlib.nullcontext()
    if device:
        dir = tmp_path / f"{device}-{seed}"
        dir.mkdir()
        run = offloadd.prepare(model, optimizer, config(device, dir, **own), run_dir=dir / "run", units=wanted)
    results = []
    with run:
        if resident:
            let_stay(run.engine, resident)
        for _ in range(STEPS):
            for what, plans, number in draw_step(rng, model):
                results += act(model, what, plans, number)
            optimizer.step()
            optimizer.zero_grad()
        return results, {name: value.clone() for name, value in model.state_dict().items()}


@needs_daemon
@pytest.mark.parametrize("seed", seeds("100..106"))
def test_random_models_end_with_the_same_weights_wherever_the_state_lives(tmp_path, seed):
    expected, weights = weights_after(seed, tmp_path, "none", optimizer_step="immediate")
    for device in ("cpu", "nvme") if seed % 3 == 0 else ("cpu",):
        own = {"optimizer_step": ("immediate", "deferred")[seed % 2], "resident_fraction": (0.0, 0.5, 1.0)[seed % 3]}
        found, ours = weights_after(seed, tmp_path, device, (0.5, 1)[seed % 2], **own)
        assert len(found) == len(expected) and all(map(same, found, expected)), f"seed {seed}: a loss on {device} differs"
        different = [name for name, value in weights.items() if not torch.equal(value, ours[name])]
        assert not different, f"seed {seed}: {different} on {device} differ"
    plain, weights = weights_after(seed, tmp_path, None)
    for name, value in weights.items():
        if name.endswith("in_proj_bias"):
            # The true gradient of a key's bias is zero.
            continue
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4, msg=lambda text: f"seed {seed}, {name}: {text}")
