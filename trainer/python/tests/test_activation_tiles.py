"""Inputs of checkpointed blocks on drives, as scratch tiles of a daemon: the bits of plain PyTorch, and of a run whose inputs stay."""

import copy
import ctypes
import os
import signal
import time

import pytest
import torch

import offloadd
from offloadd import _activations
from offloadd._activations import _open
from offloadd._tile_copies import TileCopies
from ranks import on_ranks
from test_activations import WAYS, Moved, Net, compare, compare_family, family
from test_errors import daemon_of, interrupted_within_a_second, stopped
from test_runs import config, needs_daemon
from toy import randomize

pytestmark = needs_daemon

# 512 tiles, and 32 slots.
AREA = 2 << 20


class Drives(TileCopies):
    """Copies to the tiles of an open run. What has left is overwritten, as is what comes before it has come."""

    def __init__(self, of_run):
        self.__dict__.update(of_run.__dict__)
        self.left = self.came = self.pins = 0
        self.under_way, self._forgotten = {}, {}

    def leave(self, one, buffer):
        self.left += 1
        found = super().leave(one, buffer)
        wait, data = found.wait, one.data

        def poisoned():
            wait()
            ctypes.memset(data.data_ptr(), 0xFF, data.nbytes)

        found.wait = poisoned
        return found

    def bring_back(self, buffer, form):
        self.came += 1
        empty = torch.empty_strided

        def poisoned(*args, **kwargs):
            one = empty(*args, **kwargs)
            ctypes.memset(one.data_ptr(), 0xFF, one.nbytes)
            return one

        torch.empty_strided = poisoned
        try:
            return super().bring_back(buffer, form)
        finally:
            torch.empty_strided = empty

    def close(self):
        """The run has them still."""


class OnDrives(Moved):
    """A model whose blocks' inputs wait on drives."""

    def __init__(self, tiles, model):
        super().__init__(model)
        self.engine.activations.close()
        self.copies = Drives(tiles)
        self.engine.move_activations(self.copies)
        self.pool = self.engine.activations.pool

    def is_empty(self):
        return self.pool.nbytes == 0 and self.copies.under_way.keys() == self.copies._forgotten.keys() and len(self.copies.under_way) < 10

    def close(self):
        self.engine.activations.close()


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """The area of a run, for other models."""
    path = tmp_path_factory.mktemp("tiles")
    model = randomize(Net(False))
    own = config("nvme", path, activations="nvme", activations_bytes=AREA)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), own, run_dir=path / "run") as run:
        # Its own model is not trained.
        _open.clear()
        _activations._give_calls_back()
        yield run.engine.activations.copies


@pytest.fixture
def pair(tiles):
    made = []

    def make(reentrant, **more):
        plain = randomize(Net(reentrant, **more))
        made.append(OnDrives(tiles, copy.deepcopy(plain)))
        return plain, made[-1]

    yield make
    for ours in made:
        ours.close()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_have_the_bits_of_plain_pytorch_and_no_tile_stays(pair, reentrant, way):
    plain, ours = pair(reentrant)
    compare(plain, ours, work=way)


@pytest.mark.parametrize("blocks, rows", [(40, 4), (3, 1000)], ids=["more inputs than slots", "an input larger than all slots"])
def test_what_does_not_fit_into_the_slots_passes_through_them(pair, tiles, blocks, rows):
    plain, ours = pair(False, blocks=blocks)
    tile = tiles.tiles.tile_bytes
    assert 2 * (blocks - 1) > 32 * (blocks == 40) and (blocks == 40 or rows * 6 * 16 * 4 > 32 * tile)
    compare(plain, ours, steps=1, work=lambda model, x: model(torch.ones(rows // 4, 1, 1, 1).mul(x).flatten(0, 1)).backward())
    assert ours.copies.left == ours.copies.came == blocks - 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_blocks_have_the_bits_of_plain_pytorch(pair, reentrant):
    torch._dynamo.reset()
    plain, ours = pair(reentrant, blocks=3)
    for model in (plain, ours.model):
        model.eval()
        for block in model.blocks:
            block.compile(backend="aot_eager")
    compare(plain, ours, steps=2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_family_of_transformers_has_the_bits_of_plain_pytorch(tiles, reentrant):
    compare_family(family("Llama"), reentrant, lambda model: OnDrives(tiles, model), use_cache=True)


def test_a_full_area_is_an_error_that_names_it_and_the_next_step_is_whole(pair):
    plain, ours = pair(False, blocks=8)
    with pytest.raises(
        offloadd.NoSpace, match=r"offloadd.activations_bytes: .* of 2097152 bytes are in use, and 768000 more are needed: set it to at least 2310144"
    ):
        ours.model(torch.randn(2000, 6, 16)).backward()
    assert ours.is_empty()
    ours.model.zero_grad()
    compare(plain, ours)


def test_ctrl_c_ends_a_forward_that_waits_for_drives_and_the_next_one_is_whole(tmp_path):
    model, x = randomize(Net(False, blocks=40)), torch.randn(4, 6, 16)
    plain, begun = copy.deepcopy(model), []
    # Drives have nothing else to do.
    own = config("nvme", tmp_path, activations="nvme", activations_bytes=AREA, gradients="cpu", resident_fraction=1.0)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), own, run_dir=tmp_path / "run") as run:
        handles = [block.register_forward_pre_hook(lambda *_: begun.append(1)) for block in model.blocks]
        with stopped(daemon_of(tmp_path / "run")), interrupted_within_a_second():
            model(x)
        # Of 39 inputs 32 are in slots, and no block has waited for more than one.
        assert 33 <= len(begun) <= 36
        for handle in handles:
            handle.remove()
        state = torch.get_rng_state()
        loss = model(x)
        loss.backward()
        torch.set_rng_state(state)
        with torch.no_grad():
            assert torch.equal(plain(x), loss)
        assert run.engine.activations.pool.nbytes == 0 and not run.engine.activations.copies.under_way, "nothing of the first forward is kept"


def test_damaged_bytes_are_a_typed_error_in_backward(tmp_path):
    model, inputs, found = randomize(Net(False)), [], 0
    own = config("nvme", tmp_path, activations="nvme", activations_bytes=AREA)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), own, run_dir=tmp_path / "run"):
        model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().numpy().tobytes()))
        loss = model(torch.randn(4, 6, 16))
        (file,) = tmp_path.glob("*.tiles")
        began = time.monotonic()
        while not found:
            assert time.monotonic() < began + 20, "the input is not on the drive"
            found = file.read_bytes().find(inputs[0]) + 1
        with open(file, "r+b") as device:
            device.seek(found - 1 + 77)
            device.write(bytes([inputs[0][77] ^ 1]))
        with pytest.raises(offloadd.Damaged, match="reading scratch tile"):
            loss.backward()
        # Neither a tile nor a slot is lost.
        del loss
        model.zero_grad()
        model(torch.randn(4, 6, 16)).backward()


def train(rank, ranks, path, where, micro_batches=1, compiled=False, killed=None, steps=5):
    """Losses by step, and weights at the end. `killed` is the step in whose backward the process dies."""
    torch.manual_seed(0)
    model = randomize(Net(rank == 0 and micro_batches > 1))
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    own = {"activations": where, **({"activations_bytes": "256KiB"} if where == "nvme" else {})}
    with offloadd.prepare(model, optimizer, config("nvme", path, **own), run_dir=path / "run") as run:
        model.blocks[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if run.steps_done + 1 == killed else None)
        for step in range(run.steps_done + 1, steps + 1):
            x = torch.randn(2 * ranks, 6, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
            found = [model(part) for part in x.chunk(micro_batches)]
            sum(found).backward()
            with torch.no_grad():
                model.eval()(x)
                model.train()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = [one.item() for one in found]
        activations = run.engine.activations
        assert (where == "gpu") == (activations is None) and (activations is None or activations.moved_bytes and not activations.pool.nbytes)
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks, more", [(1, {"micro_batches": 2}), (2, {}), (1, {"compiled": True})], ids=["micro-batches", "two ranks", "compiled blocks"])
def test_a_run_has_the_bits_of_one_whose_inputs_stay(tmp_path, ranks, more):
    found = {}
    for where in ("gpu", "nvme"):
        (tmp_path / where).mkdir()
        found[where] = (
            on_ranks(ranks, tmp_path / f"store-{where}", train, tmp_path / where, where, *more.values())
            if ranks > 1
            else [train(0, 1, tmp_path / where, where, **more)]
        )
    for (losses, weights), (wanted, stayed) in zip(found["nvme"], found["gpu"]):
        assert losses == wanted and all(torch.equal(weights[name], value) for name, value in stayed.items())


def test_a_run_that_was_killed_in_a_backward_resumes_with_the_same_bits(tmp_path):
    (tmp_path / "whole").mkdir(), (tmp_path / "killed").mkdir()
    wanted, weights = train(0, 1, tmp_path / "whole", "gpu")
    # It begins without the area, for which the files grow.
    assert train(0, 1, tmp_path / "killed", "gpu", steps=1)[0] == {1: wanted[1]}
    (ended,) = on_ranks(1, tmp_path / "store", train, tmp_path / "killed", "nvme", 1, False, 4)
    assert str(ended) == "-9"
    losses, found = train(0, 1, tmp_path / "killed", "nvme")
    assert losses == {step: wanted[step] for step in losses} and min(losses) <= 4
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_graph_that_outlives_its_run_says_so(tmp_path):
    model = randomize(Net(False))
    own = config("nvme", tmp_path, activations="nvme", activations_bytes=AREA)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), own, run_dir=tmp_path / "run"):
        loss = model(torch.randn(4, 6, 16))
    with pytest.raises(offloadd.Error, match="the run is closed"):
        loss.backward()


REFUSED = {
    "nothing is on drives": ("cpu", {"activations": "nvme", "activations_bytes": 1 << 20}, 'offload_param.device = "nvme"'),
    "no size": ("nvme", {"activations": "nvme"}, "set offloadd.activations_bytes"),
    "no space": (
        "nvme",
        {"activations": "nvme", "activations_bytes": 1 << 42},
        "free some space, name directories on more drives, or keep more in host memory; offloadd.activations_bytes of each process takes 4.0 TiB",
    ),
    "too large": ("nvme", {"activations": "nvme", "activations_bytes": 1 << 60}, "scratch tiles: at most"),
    "no bytes": ("nvme", {"activations": "nvme", "activations_bytes": "many"}, "offloadd.activations_bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_wait_on_drives_is_refused_before_anything_is_made(tmp_path, what):
    device, own, words = REFUSED[what]
    model = randomize(Net(False))
    with pytest.raises(offloadd.Error) as error:
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config(device, tmp_path, **own), run_dir=tmp_path / "run")
    assert words in str(error.value), error.value
    assert not list(tmp_path.iterdir())
