"""Random module trees and random ways to run them, from a seed: the same for a plain model and for one on the engine."""

import dataclasses
import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toy import randomize

WIDTH = 8


@dataclasses.dataclass
class Out:
    """An output that PyTorch's pytree does not look into."""

    hidden: torch.Tensor
    aux: object = None


class Part(nn.Module):
    """A block: `compute` returns its result and a value that the loss may use or not; `form` says in what they are returned."""

    def __init__(self, rng):
        super().__init__()
        self.form = rng.choice(["tensor", "tensor", "tuple", "dict", "dataclass", "object"])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, flag):
        hidden, aux = self.compute(self.norm(x), flag)
        if self.form == "tuple":
            return hidden, None, [aux]
        if self.form == "dict":
            return {"hidden": hidden, "more": {"aux": aux}}
        if self.form == "dataclass":
            return Out(hidden, Out(aux))
        if self.form == "object":
            return SimpleNamespace(hidden=hidden, aux=aux)
        return hidden


def opened(out):
    """Result and second value of a Part."""
    if isinstance(out, tuple):
        return out[0], out[2][0]
    if isinstance(out, dict):
        return out["hidden"], out["more"]["aux"]
    if isinstance(out, Out):
        return out.hidden, out.aux.hidden
    return (out, None) if isinstance(out, torch.Tensor) else (out.hidden, out.aux)


class Mlp(Part):
    """Has a scalar, an empty and an unused parameter."""

    def __init__(self, rng):
        super().__init__(rng)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)
        self.gain, self.nothing, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.2)

    def compute(self, x, flag):
        middle = torch.tanh(self.up(x)) * self.gain
        return x + self.drop(self.down(middle)), middle.square().mean()


class Chooses(Part):
    """One of its two linears has no gradient."""

    def __init__(self, rng):
        super().__init__(rng)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def compute(self, x, flag):
        chosen = self.one if flag else self.other
        return torch.sin(chosen(x)), chosen(x).mean()


class InPlace(Part):
    """Changes tensors in place, and what it returns is changed by others."""

    def __init__(self, rng):
        super().__init__(rng)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, x, flag):
        y = self.linear(x)
        y[:, 0] += 1
        y.add_(x)
        return y, y[:, :3].sum()


class Returns(Part):
    """Returns a view of its weight, which the caller computes with."""

    def __init__(self, rng):
        super().__init__(rng)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, x, flag):
        return torch.tanh(self.linear(x)), self.linear.weight.t() if flag else self.linear.weight


class Uses(Part):
    """Uses the weight of another block, or calls it."""

    def __init__(self, rng, other):
        super().__init__(rng)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other, self.calls = [other], rng.random() < 0.5

    def compute(self, x, flag):
        y = torch.tanh(self.linear(x))
        if self.calls:
            return y + opened(self.other[0](y, flag))[0], None
        return y * self.other[0].norm.weight + self.other[0].norm.bias, y.sum()


class Attention(Part):
    def __init__(self, rng):
        super().__init__(rng)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True)

    def compute(self, x, flag):
        y = self.layer(x[None])[0]
        return y, y.std()


class Recurrent(Part):
    def __init__(self, rng):
        super().__init__(rng)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def compute(self, x, flag):
        y, (h, _) = self.lstm(x[None])
        return y[0], h.sum()


class Parametrized(Part):
    def __init__(self, rng):
        super().__init__(rng)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def compute(self, x, flag):
        return torch.tanh(self.linear(x)), None


class Convolves(Part):
    """Has a weight whose strides are not those of its shape."""

    def __init__(self, rng):
        super().__init__(rng)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.batch_norm = nn.BatchNorm2d(2)

    def compute(self, x, flag):
        y = self.batch_norm(self.conv(x.reshape(len(x), 2, 2, 2))).reshape(x.shape)
        return y, y.mean()


class Shares(Part):
    """Holds a module that other blocks hold too."""

    def __init__(self, rng, shared):
        super().__init__(rng)
        self.shared, self.linear = shared, nn.Linear(WIDTH, WIDTH)

    def compute(self, x, flag):
        return self.shared(torch.tanh(self.linear(self.shared(x)))), None


class Fails(torch.autograd.Function):
    """Raises where its gradient comes."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")


class Tree(nn.Module):
    """Blocks in nested lists, run as each call says."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Linear(3, 3)
        shared = nn.Linear(WIDTH, WIDTH)
        blocks = []
        for _ in range(3 + rng.randrange(5)):
            kind = rng.choice([Mlp, Mlp, Chooses, InPlace, Returns, Attention, Recurrent, Parametrized, Convolves, Shares, Uses])
            if kind is Uses:
                blocks.append(Uses(rng, rng.choice(blocks)) if blocks else Mlp(rng))
            else:
                blocks.append(kind(rng, shared) if kind is Shares else kind(rng))
        self.plain = blocks
        cut = rng.randrange(1, len(blocks))
        self.groups = nn.ModuleList([nn.ModuleList(blocks[:cut]), nn.ModuleDict({"last": nn.ModuleList(blocks[cut:])})])
        linears = [block.linear for block in blocks if type(getattr(block, "linear", None)) is nn.Linear]
        if linears and rng.random() < 0.5:
            self.head.weight = rng.choice(linears).weight
        if len(linears) > 1 and rng.random() < 0.5:
            linears[0].weight = linears[1].weight
        if rng.random() < 0.3:
            rng.choice(blocks).requires_grad_(False)
        self.form = rng.choice(["tensor", "dict", "dataclass", "list"])

    def forward(self, x, plan):
        x = self.entry(x)
        earlier, extra = [x], []
        for indices, how, flag, skip, uses_aux in plan:

            def region(x, indices=indices, flag=flag):
                aux = None
                for index in indices:
                    x, aux = opened(self.plain[index](x, flag))
                return x, aux

            if how == "no_grad":
                with torch.no_grad():
                    y, aux = region(x)
                y = y + x
            elif how in ("reentrant", "not reentrant"):
                y, aux = checkpoint(region, x, use_reentrant=how == "reentrant")
            else:
                y, aux = region(x)
            if skip is not None:
                y = y + earlier[skip % len(earlier)]
            if uses_aux and aux is not None:
                extra.append(aux.square().mean() if aux.dim() < 2 else (y @ aux).mean())
            x = y
            earlier.append(x)
        loss = (self.head(x) * self.scale).square().mean() + sum(extra)
        if self.form == "dict":
            return {"loss": loss}
        if self.form == "dataclass":
            return Out(loss)
        return [x, loss] if self.form == "list" else loss


def loss_of(out):
    """The loss in a Tree's output."""
    if isinstance(out, dict):
        return out["loss"]
    if isinstance(out, list):
        return out[1]
    return out.hidden if isinstance(out, Out) else out


def make(seed):
    """The model of a seed, and the classes that become units."""
    torch.manual_seed(seed)
    model = randomize(Tree(seed))
    names = {type(block).__name__ for block in model.plain}
    # Not always all: what is in no unit belongs to the root.
    wanted = sorted(names) if seed % 3 else sorted(names)[: max(1, len(names) - 1)]
    return model, wanted


def draw_plan(rng, model):
    """The plan of one forward: blocks in any order, some twice, some not, some checkpointed."""
    plan = []
    count = len(model.plain)
    for _ in range(rng.randrange(1, count + 3)):
        indices = [rng.randrange(count) for _ in range(rng.choice([1, 1, 1, 2]))]
        how = rng.choice(["call"] * 4 + ["reentrant", "not reentrant", "no_grad"])
        if how == "reentrant" and any(isinstance(model.plain[index], Returns) for index in indices):
            # Plain PyTorch makes the parameter that is returned part of the graph and never ends.
            how = "not reentrant"
        plan.append((indices, how, rng.random() < 0.5, rng.randrange(8) if rng.random() < 0.4 else None, rng.random() < 0.5))
    return plan


def draw_step(rng, model):
    """The parts of one optimizer step: (what, plans, seed of the random numbers)."""
    fixed = rng.random() < 0.3
    plan = draw_plan(rng, model)
    draw = lambda: plan if fixed else draw_plan(rng, model)
    acts = []
    for _ in range(rng.randrange(1, 4)):
        what = rng.choice(["backward"] * 5 + ["two forwards", "twice", "product", "evaluate", "inference", "only forward", "penalty", "read", "grad"])
        acts.append((what, [draw(), draw()], rng.randrange(1 << 30)))
        if what == "grad":
            # Plain PyTorch refuses the reentrant kind there.
            acts[-1] = (what, [[(indices, "call", *rest) for indices, _, *rest in plan] for plan in acts[-1][1]], acts[-1][2])
    acts.append(("backward", [draw()], rng.randrange(1 << 30)))
    if rng.random() < 0.3:
        acts.append((rng.choice(["evaluate", "read"]), [draw()], rng.randrange(1 << 30)))
    return acts


def act(model, what, plans, seed):
    """Does one act of a step. Returns what both models must agree on."""
    torch.manual_seed(seed)
    batches = [torch.randn(4, WIDTH) for _ in plans]
    forward = lambda number: loss_of(model(batches[number], plans[number]))
    if what in ("evaluate", "inference"):
        model.eval()
        with torch.no_grad() if what == "evaluate" else torch.inference_mode():
            loss = forward(0).clone()
        model.train()
        return [loss]
    if what == "read":
        return [param.detach().clone() for param in model.parameters()]
    if what == "only forward":
        return [forward(0).detach()]
    if what == "grad":
        params = [param for param in model.parameters() if param.requires_grad]
        loss = forward(0)
        return [loss.detach(), *torch.autograd.grad(loss, params, allow_unused=True)]
    if what in ("two forwards", "product"):
        first, second = forward(0), forward(1)
        loss = first + second if what == "two forwards" else first * second
        loss.backward()
        return [loss.detach()]
    loss = forward(0)
    if what == "penalty":
        loss = loss + 0.01 * sum(param.square().sum() for param in list(model.parameters())[::2])
    loss.backward(retain_graph=what == "twice")
    if what == "twice":
        loss.backward()
    return [loss.detach()]
