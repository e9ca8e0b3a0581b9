"""A core in plain Python, and models."""

import ctypes
import itertools
import pathlib

import torch
from torch import nn

from offloadd._engine import Engine
from offloadd._experts import Experts
from offloadd._memory import GpuBytes
from offloadd._residency import Residency
from offloadd._units import units_of


def tensor_at(address, elems, dtype):
    """The memory at an address as a tensor."""
    bytes_ = elems * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * bytes_).from_address(address), dtype=dtype)


class Residual(nn.Module):
    """Two matrices around a tanh, and a residual."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Three blocks and a head."""

    def __init__(self, width, outputs):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual(width) for _ in range(3)), nn.Linear(width, outputs)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FakeCore:
    """Keeps units in tensors and refuses whatever was not announced, as the engine's core does."""

    def __init__(self, units):
        self.units = units
        self.params = [unit.flat.clone() for unit in units]
        self.gradients = {}
        self.announced = []
        self.announcements = 0
        self.done = []
        # Most units that were here at once.
        self.here_max = 0

    def phase(self, phase):
        pass

    def announce(self, ops):
        self.announced = list(ops)
        self.announcements += 1

    def begin_step(self):
        self.gradients.clear()
        self.announced = []

    def _next(self, op):
        assert self.announced and self.announced[0] == op, f"{op} was not announced: {self.announced[:3]}"
        self.announced.pop(0)
        self.done.append(op)

    def gather(self, unit, address):
        self._next((False, unit))
        tensor_at(address, self.units[unit].elems, self.params[unit].dtype).copy_(self.params[unit])
        self.here_max = max(self.here_max, 1 + sum(one.here for one in self.units if one.index != unit))

    def scatter(self, unit, address):
        self._next((True, unit))
        came = tensor_at(address, self.units[unit].elems, self.params[unit].dtype).clone()
        before = self.gradients.get(unit)
        self.gradients[unit] = came if before is None else before + came
        return self._square_sums(unit)

    def read_gradients(self, unit, address):
        self._next((True, unit))
        tensor_at(address, self.units[unit].elems, self.params[unit].dtype).copy_(self.gradients[unit])

    def write_gradients(self, unit, address):
        self._next((True, unit))
        self.gradients[unit] = tensor_at(address, self.units[unit].elems, self.params[unit].dtype).clone()
        return self._square_sums(unit)

    def _square_sums(self, unit):
        parts = zip(self.units[unit].params, self.units[unit].offsets)
        return [float(self.gradients[unit][at : at + param.numel()].double().square().sum()) for param, at in parts]


class SimulatedGpu:
    """What a GPU tells of its memory, where units are in the processor's. No other run is on it."""

    numbers = itertools.count()
    # A tensor of the script's.
    OWN_BYTES = 64

    def __init__(self, units, size=1 << 40):
        self.index, self.units, self.size, self.used_max = next(self.numbers), units, size, 0
        # What the script holds.
        self.own_bytes = self.OWN_BYTES

    @property
    def used(self):
        return self.own_bytes + sum(unit.flat.untyped_storage().nbytes() for unit in self.units)

    def memory(self):
        self.compute(0)
        return GpuBytes(self.used, self.used_max, self.size - self.used)

    def forget_peak(self):
        self.used_max = 0

    def compute(self, size):
        """Takes so much memory beside units for a moment."""
        self.used_max = max(self.used_max, self.used + size)


def let_stay(engine, fraction, size=1 << 40):
    """Lets a fraction of a model's units stay, as on a GPU with so much memory, which is returned; None: as many as have room."""
    gpu = SimulatedGpu(engine.gathering.units, size)
    engine.residency = Residency(engine.gathering, gpu, fraction, pathlib.Path("run"))
    return gpu


class Offloaded:
    """A model whose units a FakeCore keeps, of which a fraction stays in memory."""

    def __init__(self, model, wanted=None, trains=True, unit_bytes_max=None, resident=0):
        self.model = model
        experts = Experts(model, wanted, unit_bytes_max)
        units, modules = units_of(model, wanted, trains=trains, apart=experts.apart)
        experts.know(units, modules)
        for unit in units:
            unit.flatten()
        experts.free_wholes()
        self.core = FakeCore(units)
        self.engine = Engine(model, units, modules, self.core, keep=False, experts=experts)
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.engine.gathering.release_all()
        self.gpu = let_stay(self.engine, resident)

    def take_gradients(self):
        """Name to gradient of this step, None where none came; ends the step."""
        found = {}
        for unit in self.engine.gathering.units:
            flat = self.core.gradients.get(unit.index)
            for param, at in zip(unit.params, unit.offsets):
                came = id(param) in self.engine.gradients.square_sums
                found[self.names[id(param)]] = unit.view_of(flat, param, at).clone() if came else None
        self.core.begin_step()
        self.engine.updated()
        self.engine.step_ended()
        self.engine.forget_gradients()
        return found

    def live(self):
        """Units whose memory is held."""
        return [unit.name for unit in self.engine.gathering.units if unit.here]


def randomize(model, seed=0):
    """Gives every parameter a value of its own: fresh norms and biases hide faults."""
    torch.manual_seed(17 + seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def same_gradients(plain, found, equal=torch.equal):
    """Names of the parameters whose gradients are not `equal` to the plain model's."""
    different = []
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            continue
        ours = found[name]
        if (param.grad is None) != (ours is None) or ours is not None and not equal(param.grad, ours):
            different.append(name)
    return different


class Block(nn.Module):
    """A block that may use the weight of another one."""

    def __init__(self, width=8, other=None):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.other = [other]

    def forward(self, x):
        y = torch.tanh(self.linear(self.norm(x)))
        other = self.other[0]
        return y if other is None else y @ other.linear.weight.t()


class Net(nn.Module):
    """Blocks in an order that each call says; the third uses the first one's weight."""

    def __init__(self, blocks=4, width=8):
        super().__init__()
        self.blocks = nn.ModuleList()
        for number in range(blocks):
            self.blocks.append(Block(width, self.blocks[0] if number == 2 else None))
        self.head = nn.Linear(width, 1)

    def forward(self, x, order=None, checkpointing=False):
        for number in order if order is not None else range(len(self.blocks)):
            block = self.blocks[number]
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
        return self.head(x).sum()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class Routed(nn.Module):
    """A block as models outside of transformers have them: each expert is a module, which is called if it has tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(16), nn.Linear(16, 6)
        self.experts = nn.ModuleList(Mlp() for _ in range(6))

    def forward(self, x):
        weights, chosen = self.gate(self.norm(x)).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, self.experts[number](x[row]) * weights[row, place, None])
        return x + out


class Mixture(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Routed() for _ in range(layers)), nn.Linear(16, 1)

    def forward(self, x, checkpointing=False):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
        return self.head(x).square().sum()
