"""Trains a small model on the processor's path and on a GPU's, with the state in every tier, and says whether bits differ."""

import contextlib
import ctypes
import io
import itertools
import json
import os
import pathlib
import sys
import types

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import offloadd  # noqa: E402
from offloadd._memory import gpu_weight_bytes  # noqa: E402
from toy import Net, randomize  # noqa: E402

torch.set_num_threads(1)
directory, program = pathlib.Path(sys.argv[1]), sys.argv[2]
numbers = itertools.count()


def train(dtype, gradients, device, **own):
    """Losses, norms and weights. A frozen block, micro-batches, evaluations within a step, with all weights in memory too, clipping, other weights,
    memory that is given back, and orders that change."""
    torch.manual_seed(0)
    model = randomize(Net(6)).to(dtype)
    model.blocks[4].requires_grad_(False)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    run_dir = directory / f"run-{next(numbers)}"
    run_dir.mkdir()
    config = {
        "zero_optimization": {"offload_param": {"device": device, "nvme_path": str(run_dir)}},
        "offloadd": {"program": program, **own},
        "data_types": {"grad_accum_dtype": gradients},
    }
    found = []
    with offloadd.prepare(model, optimizer, config, run_dir=run_dir / "run") as run:
        for step in range(6):
            for part in range(1 + step % 2):
                x = torch.randn(4, 8, generator=generator).to(dtype)
                loss = model(x, order=[3, 1, 5] if step == 3 else None, checkpointing="activations" in own).square()
                loss.backward()
                found.append(loss.detach())
                with torch.no_grad(), run.gathered() if step == 2 else contextlib.nullcontext():
                    found += [model(x) for _ in range(1 + step % 3)]
                if step == 4:
                    run.release()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                trained = {name for name, param in model.named_parameters() if param.requires_grad}
                halves = {name: value.clone() / 2 for name, value in model.state_dict().items() if name in trained}
                model.load_state_dict(halves, strict=False)
        # The order of the last passes is a known one: it is announced at once, units come ahead.
        found += [value.clone() for value in model.state_dict().values()]
        ahead = run.engine.gathering.memory.ahead
        stays = run.engine.residency is not None and own["gpu_resident_fraction"] != 0
        assert run.resident_bytes > 0 if stays else run.resident_bytes == 0, "not the weights stay that are asked for"
        if "activations" in own:
            activations = run.engine.activations
            assert activations.moved_bytes == 30 * 4 * 8 * dtype.itemsize, "inputs of blocks did not leave"
            assert own["activations"] == "nvme" or activations.copies.left == activations.copies.came == 30
            assert own["activations"] == "cpu" or activations.pool.nbytes == 0 and not activations.copies.under_way
    return found, ahead


def weights_ahead():
    """The highest bytes of units in a GPU's memory, and those that are planned."""
    model = randomize(Net(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "offloadd": {"compute_device": "cuda:0", "gpu_resident_fraction": 0}}
    found = []
    with offloadd.prepare(model, optimizer, config, run_dir=directory / "ahead") as run:
        gathering = run.engine.gathering
        expect = gathering.memory.expect

        def count(unit):
            expect(unit)
            found.append(sum(one.flat.untyped_storage().nbytes() for one in gathering.units))

        gathering.memory.expect = count
        for _ in range(4):
            model(torch.randn(4, 8)).square().backward()
            optimizer.step()
            optimizer.zero_grad()
        planned = gpu_weight_bytes(gathering.units, {unit.index: module for module, units in gathering.of_module.items() for unit in units})
        # A block of this model reads another one's weights, too.
        return max(found), planned + max(unit.bytes for unit in gathering.units)


def streams_follow():
    """What a stream has enqueued while it had a unit that stays is done before another one computes with it."""
    driver = ctypes.CDLL(os.environ["KERNELS_FAKE"])
    marks, (first, second, mark) = ctypes.create_string_buffer(b"done"), (ctypes.c_size_t() for _ in range(3))
    for handle in (first, second):
        driver.cuStreamCreateWithPriority(ctypes.byref(handle), 0, 0)
    driver.cuMemAlloc_v2(ctypes.byref(mark), ctypes.c_size_t(4))
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "offloadd": {"compute_device": "cuda:0", "gpu_resident_fraction": 1}}
    with offloadd.prepare(Net(4), None, config, run_dir=directory / "streams") as run:
        gathering, gpu = run.engine.gathering, run.plan.gpu
        unit = gathering.units[0]
        gpu.stream = lambda: first.value
        gathering.gather(unit)
        # As the ranks' parts of the unit come.
        driver.cuMemcpyHtoDAsync_v2(mark, marks, ctypes.c_size_t(4), first)
        gathering.release(unit)
        gpu.stream = lambda: second.value
        gathering.gather(unit)
        driver.cuStreamSynchronize(second)
        return ctypes.string_at(mark.value, 4)


def told_of_a_small_gpu(**section):
    """What a start says where the GPU has no room for the weights that come."""
    config = {"zero_optimization": section, "offloadd": {"compute_device": "cuda:0", "gpu_resident_fraction": 0}}
    gpu, told = type(offloadd._run.gpu_of(types.SimpleNamespace(compute_device="cuda:0"), ())), io.StringIO()
    before, gpu.size = gpu.size, 1000
    model = Net(4)
    with contextlib.redirect_stderr(told), offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config, run_dir=directory / f"small-{next(numbers)}"):
        gpu.size = before
    return told.getvalue()


WEIGHTS = "warning: weights and buffers of gradients take "
assert WEIGHTS in (told := told_of_a_small_gpu(offload_param={"device": "cpu"})) and "offloadd.units" in told, told
assert WEIGHTS in (told := told_of_a_small_gpu(offload_optimizer={"device": "cpu"})) and 'offload_param.device = "cpu"' in told, told
assert streams_follow() == b"done", "a stream does not wait for the one before"
most, planned = weights_ahead()
assert most == planned, f"{most} bytes of units are in memory, {planned} are planned"
# On the GPU.
STAY = itertools.cycle((0, 0.5, 1, "auto"))
ROUNDED = {"master": "bf16", "moments": "bf16"}
cases = (
    (torch.float32, "fp32", {}),
    (torch.bfloat16, "fp32", {}),
    (torch.bfloat16, "bf16", {}),
    (torch.float16, "fp32", {}),
    (torch.bfloat16, "fp32", ROUNDED),
)
for dtype, gradients, stored in cases:
    expected, ahead = train(dtype, gradients, "cpu", **stored)
    assert ahead == 0
    for device, step, updates in (
        ("none", "deferred", "auto"), ("cpu", "immediate", "auto"), ("cpu", "deferred", "gpu"), ("cpu", "deferred", "cpu"), ("nvme", "deferred", "auto"),
    ):  # fmt: skip
        if device == "nvme" and (dtype, gradients, stored) != cases[1] or stored and updates != "gpu":
            continue
        # Inputs of blocks in host memory, and on the drive of the state.
        away = {"none": {"activations": "cpu"}, "nvme": {"activations": "nvme", "activations_bytes": 1 << 20}}.get(device, {})
        stay = next(STAY)
        on_gpu = {"compute_device": "cuda:0", "gpu_resident_fraction": stay}
        found, ahead = train(dtype, gradients, device, optimizer_step=step, optimizer_device=updates, **on_gpu, **away, **stored)
        assert ahead > 0, "the processor's path ran"
        # Norms are summed in another order.
        same = [torch.equal(a, b) or a.dim() == 0 and torch.allclose(a, b, rtol=1e-6) for a, b in zip(expected, found)]
        print(
            json.dumps({"case": f"{dtype} {gradients} {device} {step} {updates} {stay} {stored}", "same": all(same) and len(expected) == len(found)}),
            flush=True,
        )
