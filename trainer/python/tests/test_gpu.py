"""Models on GPUs, without one: the engine's side on a fake driver, tensors of the processor as the GPU's memory."""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess

import pytest
import torch

import forks
import offloadd
from offloadd._config import settings_of
from offloadd._memory import HostMemory, gpu_of
from offloadd._nodes import Topology
from offloadd._plan import engine_plan
from offloadd._units import units_of
from ranks import on_ranks
from test_engine import pair
from test_only_optimizer_ranks import train as sharded
from test_runs import PROGRAM, config, needs_daemon
from toy import Mixture, randomize, same_gradients

HERE = pathlib.Path(__file__).resolve().parent
FAKE = HERE.parents[2] / "kernels" / "tests" / "gpu" / "fake"
COMPILER = os.environ.get("CXX", "c++")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed: the fake driver cannot be built")


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """A server of forks on a fake driver."""
    directory = tmp_path_factory.mktemp("fake")
    compiled = [COMPILER, "-std=c++17", "-O1", "-fPIC", "-c", "-DFAKE_EAGER", f'-DKERNEL_HEADER="{FAKE / "kernel.h"}"']
    subprocess.run([*compiled, str(FAKE / "driver.cc"), "-o", str(directory / "driver.o")], check=True)
    for name in ("libcuda.so.1", "libnvrtc.so.13"):
        subprocess.run([COMPILER, "-shared", f"-Wl,-soname,{name}", str(directory / "driver.o"), "-o", str(directory / name)], check=True)
    # Before torch brings the real ones: a library is found by the name under which it was loaded first.
    libraries = [directory / "libcuda.so.1", directory / "libnvrtc.so.13"]
    return forks.Server({"KERNELS_FAKE": str(libraries[0]), "LD_LIBRARY_PATH": str(directory)}, libraries), libraries[0]


def start(fake, script, *args, environment=(), **more):
    server, driver = fake
    script = HERE / "scripts" / script
    environment = {**dict(environment), "KERNELS_FAKE": str(driver)}
    return server.start(HERE / "scripts" / "on_fake_gpu.py", driver, script, *args, environment=environment, **more)


@needs_daemon
@needs_compiler
def test_a_gpus_path_has_the_bits_of_the_processors_wherever_the_state_lives(fake, tmp_path):
    process = start(fake, "gpu_tiers.py", tmp_path, PROGRAM)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    cases = [json.loads(line) for line in out.splitlines()]
    assert len(cases) == 18
    assert not [case["case"] for case in cases if not case["same"]]


@needs_compiler
def test_a_gpus_kernels_convert_to_8_bits_as_pytorchs_operators_do(fake):
    process = start(fake, "fp8_on_gpu.py")
    out, errors = process.communicate()
    assert process.returncode == 0 and out == "same bits\n", errors


@needs_daemon
@needs_compiler
def test_a_script_on_a_gpu_that_is_killed_resumes_with_the_same_bits(fake, tmp_path):
    def run(name, kill_at=None):
        (tmp_path / name).mkdir(exist_ok=True)
        settings = config("nvme", tmp_path / name, compute_device="cuda:0")
        process = start(fake, "train.py", tmp_path / name / "run", json.dumps(settings))
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("step") and kill_at == len(lines):
                process.kill()
        errors = process.stderr.read()
        assert process.wait() == (-signal.SIGKILL if kill_at else 0), errors
        return lines

    whole = run("whole")
    cut = run("cut", kill_at=12)
    resumed = run("cut")
    assert resumed[1] != "resumed 0"
    assert resumed[-1] == whole[-1]
    assert set(cut[2:]) | set(resumed[2:]) == set(whole[2:])


@needs_daemon
@needs_compiler
def test_two_ranks_with_gpus_have_the_bits_of_two_without(fake, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        of = lambda gpu, **more: on_ranks(2, tmp_path / f"store-{dtype}-{gpu}", work_of_gpus, tmp_path / f"{dtype}-{gpu}", dtype, gpu, **more)
        expected = of(None)
        found = of("cuda:0", start=functools.partial(start, fake))
        assert not [one for one in (*expected, *found) if isinstance(one, Exception)]
        for (losses, norms, weights, ahead, left), (plain_losses, plain_norms, plain_weights, *_) in zip(found, expected):
            assert ahead > 0 and left > 0 and losses == plain_losses and norms == pytest.approx(plain_norms, rel=1e-6)
            assert all(torch.equal(weights[name], value) for name, value in plain_weights.items())


def work_of_gpus(rank, ranks, path, dtype, gpu):
    """Losses, norms and weights of a model of which each rank has some tiles, in two micro-batches a step. On a GPU, inputs of checkpointed layers leave."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(4)), torch.nn.Linear(400, 1)).to(dtype)
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses, norms = [], []
    stay = 0.5 if dtype == torch.bfloat16 else "auto"
    own = {"compute_device": gpu, "units": ["Linear"], "activations": "cpu" if gpu else "gpu", **({"gpu_resident_fraction": stay} if gpu else {})}
    with offloadd.prepare(model, optimizer, config("cpu", path, **own), run_dir=path / "run") as run:
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(4, 400, generator=generator).to(dtype)
                if gpu:
                    for layer in model:
                        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                loss = (x if gpu else model(x)).square().mean()
                loss.backward()
                losses.append(loss.item())
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
            optimizer.step()
            optimizer.zero_grad()
        left = run.engine.activations.copies.left if gpu else 0
        assert bool(run.resident_bytes) == bool(gpu)
        return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}, run.engine.gathering.memory.ahead, left


@needs_daemon
@needs_compiler
def test_experts_have_the_bits_of_the_processors_and_few_are_there_at_once(fake, tmp_path):
    losses, weights, _ = mixture_on(0, 1, tmp_path / "cpu", None)
    ((found, on_gpu, most),) = on_ranks(1, tmp_path / "store", mixture_on, tmp_path / "gpu", "cuda:0", start=functools.partial(start, fake))
    assert found == losses and all(torch.equal(on_gpu[name], value) for name, value in weights.items())
    # 18 would be all: one is computed with, one waits, and two come ahead.
    assert most <= 5


def mixture_on(rank, ranks, path, gpu):
    """Losses and weights of a run whose passes have many rows and few, in turns, and the most experts that were in memory or on their way."""
    torch.manual_seed(0)
    model, most = randomize(Mixture()), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", path, compute_device=gpu, unit_bytes_max=8_000), run_dir=path / "run") as run:
        gathering, losses = run.engine.gathering, []
        expect = gathering.memory.expect

        def counted(unit):
            nonlocal most
            expect(unit)
            most = max(most, sum(one.apart and (one.here or one.expected) for one in gathering.units) + unit.apart)

        gathering.memory.expect = counted
        generator = torch.Generator().manual_seed(1)
        for step in range(8):
            losses.append(model(torch.randn(1 if step % 2 else 24, 16, generator=generator), checkpointing=step > 3))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [model(torch.randn(1, 16, generator=generator)) for _ in range(3)]
        return [loss.item() for loss in losses], {name: value.clone() for name, value in model.state_dict().items()}, most


@needs_daemon
@needs_compiler
def test_an_optimizer_alone_has_the_bits_of_the_processors(fake, tmp_path):
    def run(name, gpu=True, **options):
        kill, place = options.pop("kill", (0, None)), {"compute_device": "cuda:0"} if gpu else {}
        early = {name: options.pop(name) for name in ("overlap_backward", "in_backward") if name in options}
        given = {"dtype": "bfloat16", "kill": kill, **early, "options": {"program": PROGRAM, "gradients": "nvme", **place, **options}}
        begin = functools.partial(start, fake, "only_optimizer.py") if gpu else functools.partial(forks.start, HERE / "scripts" / "only_optimizer.py")
        process = begin(tmp_path / name, json.dumps(given))
        out, errors = process.communicate()
        assert process.returncode == (-signal.SIGKILL if kill[0] else 0), errors
        return out.splitlines()[1:]

    whole = run("cpu", gpu=False)
    assert run("gpu", optimizer_device="gpu") == whole
    assert run("early", overlap_backward=True) == whole
    assert run("begun", in_backward=True) == run("not-clipped", gpu=False, in_backward=False)
    cut = run("cut", kill=(6, "seal"))
    assert len(cut) == 6 and cut[:5] + run("cut") == whole
    expected = on_ranks(2, tmp_path / "store", sharded, "offloadd", None, torch.bfloat16)
    found = on_ranks(
        2, tmp_path / "store-gpu", sharded, "offloadd", None, torch.bfloat16, "fsdp2", 6, None, "cuda:0", True, start=functools.partial(start, fake)
    )
    for (_, losses, norms, weights), (_, our_losses, our_norms, ours) in zip(expected, found):
        assert our_losses == losses and our_norms == pytest.approx(norms, rel=1e-6)
        assert all(torch.equal(ours[name], value) for name, value in weights.items())


@needs_daemon
@needs_compiler
def test_muon_has_the_bits_of_the_processors(fake, tmp_path):
    gpu = {"compute_device": "cuda:0"}
    for script, lines, *others in (
        ("muon.py", 10, {"options": {**gpu, "optimizer_device": "gpu"}, "overlap_backward": True}),
        ("prepared_muon.py", 7, {"own": {**gpu, "optimizer_device": "gpu"}}, {"own": {**gpu, "optimizer_device": "cpu", "resident_fraction": 0.5}}),
    ):
        found = []
        for number, given in enumerate(({}, *others)):
            make = functools.partial(start, fake, script) if given else functools.partial(forks.start, HERE / "scripts" / script)
            process = make(tmp_path / f"{script}-{number}", json.dumps(given))
            out, errors = process.communicate()
            assert process.returncode == 0, errors
            found.append(out.splitlines())
            assert len(found[0]) == lines and found[0] == found[-1]


class Ahead(HostMemory):
    """Brings units ahead, in the calling thread."""

    ahead = 2

    def __init__(self, core, units):
        super().__init__(core, units)
        self.in_memory, self.in_memory_max, self.in_memory_bytes_max, self.units = [], 0, 0, units

    def expect(self, unit):
        assert unit.index not in self.in_memory, "it is here"
        self.in_memory.append(unit.index)
        self.in_memory_max = max(self.in_memory_max, len(self.in_memory))
        self.in_memory_bytes_max = max(self.in_memory_bytes_max, sum(self.units[index].bytes for index in self.in_memory))
        super().expect(unit)

    def release(self, unit):
        self.in_memory.remove(unit.index)
        super().release(unit)


def test_units_come_ahead_once_the_order_is_known():
    plain, ours = pair()
    memory = ours.engine.gathering.memory = Ahead(ours.core, ours.engine.gathering.units)
    for _ in range(6):
        ours.core.done, before = [], ours.core.announcements
        plain.zero_grad()
        batch = torch.randn(4, 8)
        plain(batch).backward(), ours.model(batch).backward()
        assert not same_gradients(plain, ours.take_gradients())
        assert not ours.live() and not memory.in_memory
    assert ours.core.announcements == before + 1, "an order with units ahead was not learned"
    # Block 2 uses block 0's weight; 4 is the root. Each block of the backward comes before the gradients of the one before leave.
    gathers, gradients = [(False, unit) for unit in range(5)], [(True, unit) for unit in range(5)]
    forward = [gathers[unit] for unit in (4, 0, 1, 2, 0, 3)]
    backward = [gathers[2], gathers[3], gathers[0], gradients[3], gathers[1], gradients[2], gathers[0], *gradients[1::-1], gradients[4]]
    assert ours.core.done == forward + backward


def test_a_model_on_a_gpu_needs_a_driver():
    settings = settings_of({"offloadd": {"compute_device": "cuda:0"}})
    if not torch.cuda.is_available():
        with pytest.raises(offloadd.Error, match="cuda:0, which cannot be used"):
            gpu_of(settings, [torch.zeros(1)])
    with pytest.raises(offloadd.NotSupported, match="to the CPU or to a CUDA GPU"):
        gpu_of(settings_of({"offloadd": {"compute_device": "mps"}}), [torch.zeros(1)])


def test_updates_run_where_the_model_computes_unless_drives_are_the_bound():
    def updaters(gpu, device="cpu", **own):
        settings = settings_of({"zero_optimization": {"offload_param": {"device": device, "nvme_path": "."}}, "offloadd": own})
        found = engine_plan(settings, pathlib.Path("run"), units_of(torch.nn.Linear(1, 1), None)[0], Topology(), gpu)
        return found["update_threads"], found["update_gpu"]

    threads = updaters(None)[0]
    assert threads >= 1 and updaters(None) == (threads, None)
    on_gpu = updaters(1)
    assert on_gpu[0] >= 1 and on_gpu[1] == 1
    assert updaters(1, "nvme") == (on_gpu[0], None)
    assert updaters(1, "nvme", optimizer_device="shared", update_threads=3) == (3, 1)
    assert updaters(1, optimizer_device="gpu") == (0, 1)
    with pytest.raises(offloadd.Error, match="does not compute on a GPU"):
        updaters(None, optimizer_device="shared")
    with pytest.raises(offloadd.Error, match='"tpu": use "auto"'):
        settings_of({"offloadd": {"optimizer_device": "tpu"}})
