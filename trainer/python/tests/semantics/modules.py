"""Modules of all sorts, changes of a model, utilities of torch.nn, and compiled models."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from table import CLASSES, EQUAL, EVERYWHERE, MEMORY, Block, Net, Theme, net, randomized

modules = Theme("modules")


def _trains(name, make, steps=(0, 1, 2), devices=MEMORY, evaluates=True):
    """A line that trains a model, looks at its state and evaluates it."""

    @modules.equal(name, devices=devices)
    def _(s):
        s.begin(make())
        s.step(*steps)
        s.note(s.model.state_dict())
        if evaluates:
            s.model.eval()
            with torch.no_grad():
                s.note(s.model(s.x(7)))
            s.model.train()


def _blocks(make, blocks=4):
    """A model whose blocks are `make()`."""

    def made():
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return randomized(Net(block=make, blocks=blocks))

    return made


def _layer(make, forward=lambda layer, x: layer(x)):
    """A model with a layer of another kind in each block."""

    class Other(Block):
        def __init__(self):
            super().__init__()
            self.layer = make()

        def forward(self, x):
            return super().forward(x) + forward(self.layer, x)

    return _blocks(Other)


def _sequence(layer, x):
    """An output of a recurrent layer over four steps."""
    return layer(x[:, None].expand(-1, 4, -1))[0][:, -1]


def _packed(x):
    return nn.utils.rnn.pack_padded_sequence(x[:, None].expand(-1, 4, -1), [4, 3, 2, 1], batch_first=True)


class Words(Net):
    """Embeds numbers made of the input, by a layer that `make` returns."""

    def __init__(self, make, forward=lambda layer, ids: layer(ids).mean(1)):
        super().__init__()
        self.words, self.embed = make(), forward

    def forward(self, x):
        h = self.embed(self.words, (x * 7).long().abs() % 50) + self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def _words(*args):
    return lambda: randomized(Words(*args))


_trains("Embedding", _words(lambda: nn.Embedding(50, 16)), devices=EVERYWHERE)
_trains("Embedding with `padding_idx`", _words(lambda: nn.Embedding(50, 16, padding_idx=0)))
_trains("Embedding with `scale_grad_by_freq`", _words(lambda: nn.Embedding(50, 16, scale_grad_by_freq=True)))
_trains("EmbeddingBag", _words(lambda: nn.EmbeddingBag(50, 16, mode="sum"), lambda layer, ids: layer(ids)))
_trains("BatchNorm1d", _layer(lambda: nn.BatchNorm1d(16)))
_trains("BatchNorm1d with its own momentum", _layer(lambda: nn.BatchNorm1d(16, momentum=None)))
_trains("GroupNorm, RMSNorm", _layer(lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.RMSNorm(16))))
_trains("LSTM", _layer(lambda: nn.LSTM(16, 16, batch_first=True), _sequence))
_trains(
    "LSTM of two layers and directions with dropout",
    _layer(lambda: nn.LSTM(16, 8, 2, batch_first=True, dropout=0.1, bidirectional=True), _sequence),
)
_trains("GRU, RNN", _layer(lambda: nn.GRU(16, 16, batch_first=True), _sequence))
_trains("LSTMCell", _layer(lambda: nn.LSTMCell(16, 16), lambda layer, x: layer(x)[0]))
_trains(
    "LSTM and `flatten_parameters`",
    _layer(lambda: nn.LSTM(16, 16, batch_first=True), lambda layer, x: [layer.flatten_parameters(), _sequence(layer, x)][1]),
)
_trains(
    "LSTM over packed sequences",
    _layer(lambda: nn.LSTM(16, 16, batch_first=True), lambda layer, x: layer(_packed(x))[1][0][-1]),
)
_trains("MultiheadAttention", _layer(lambda: nn.MultiheadAttention(16, 2, batch_first=True), lambda layer, x: layer(x[None], x[None], x[None])[0][0]))
_trains(
    "MultiheadAttention with weights and other key sizes",
    _layer(lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=8), lambda layer, x: layer(x[:, None], x[:, None, :8], x[:, None, 8:])[0][:, 0]),
)
_trains("TransformerEncoderLayer", _layer(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda layer, x: layer(x[None])[0]))
_trains(
    "TransformerEncoder",
    _layer(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), lambda layer, x: layer(x[None])[0]),
)
_trains(
    "TransformerDecoder",
    _layer(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1), lambda layer, x: layer(x[None], x[None])[0]),
)
_trains(
    "Conv1d, Conv2d, ConvTranspose2d",
    _layer(lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3, padding=1), nn.ConvTranspose2d(2, 1, 1), nn.Flatten())),
)
_trains(
    "Conv2d in `channels_last`",
    _layer(lambda: nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten()).to(memory_format=torch.channels_last)),
)
_trains("Bilinear, PReLU", _layer(lambda: nn.ModuleList([nn.Bilinear(16, 16, 16), nn.PReLU(16)]), lambda layer, x: layer[1](layer[0](x, x))))
_trains(
    "ParameterList",
    _layer(lambda: nn.ParameterList([torch.randn(16, 16) * 0.1 for _ in range(2)]), lambda layer, x: sum(x @ one for one in layer)),
)
_trains(
    "ParameterDict",
    _layer(lambda: nn.ParameterDict({"a": torch.randn(16, 16) * 0.1, "b": torch.zeros(16)}), lambda layer, x: x @ layer["a"] + layer["b"]),
)
_trains("a parameter of no dimension", _layer(lambda: nn.ParameterList([torch.tensor(0.3)]), lambda layer, x: x * layer[0]))
_trains(
    "a parameter without elements",
    _layer(lambda: nn.ParameterList([torch.zeros(0, 16), torch.ones(16)]), lambda layer, x: x * layer[1] + layer[0].sum()),
)
_trains(
    "a parameter that is not contiguous",
    _layer(lambda: nn.ParameterList([nn.Parameter(torch.randn(16, 16).t() * 0.1)]), lambda layer, x: x @ layer[0]),
)
_trains(
    "an expanded parameter",
    _layer(lambda: nn.ParameterList([nn.Parameter(torch.full((1,), 0.1).expand(16).clone())]), lambda layer, x: x * layer[0]),
)
_trains("dropout of several kinds", _layer(lambda: nn.Sequential(nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.GELU())))
_trains(
    "`nn.Sequential` as the model",
    lambda: randomized(nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(4)], nn.Linear(16, 5))),
    devices=EVERYWHERE,
)
_trains("a model without blocks", lambda: randomized(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))), devices=EVERYWHERE)
_trains("a single layer", lambda: randomized(nn.Linear(8, 5)))
_trains("weights tied across modules", lambda: _tied())
_trains("a block that several lists share", lambda: _shared())
_trains("a model with buffers that change", lambda: _counting())
_trains("a lazy layer that was run", lambda: _lazy())
_trains("parameters in `ModuleDict`", lambda: _dict_of_modules())
_trains("hundreds of small parameters", lambda: _many())
_trains("blocks of several sizes", lambda: _sizes())


def _tied():
    model = net()
    model.blocks[3].up.weight = model.blocks[0].up.weight
    model.blocks[2].down.bias = model.blocks[2].norm.bias
    return model


def _shared():
    model = net()
    model.again = nn.ModuleList([model.blocks[1], model.blocks[2], model.blocks[1]])
    forward = model.forward
    model.forward = lambda x: forward(x) + model.last(model.again[2](model.again[0](model.first(x))))
    return model


def _counting():
    class Counts(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("hidden", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.count += 1
            self.hidden = self.hidden + x.detach().mean()
            return super().forward(x) / self.count

    return net(block=Counts)


def _lazy():
    class Lazy(Block):
        def __init__(self):
            super().__init__()
            self.lazy = nn.LazyLinear(16)

        def forward(self, x):
            return super().forward(x) + self.lazy(x)

    torch.manual_seed(3)
    model = Net(block=Lazy)
    model(torch.ones(1, 8))
    return randomized(model)


def _dict_of_modules():
    class Chosen(Block):
        def __init__(self):
            super().__init__()
            self.kinds = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})

        def forward(self, x):
            return super().forward(x) + self.kinds["a" if self.training else "b"](x)

    return net(block=Chosen)


def _many():
    class Many(Block):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(16) for _ in range(20)])

        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return super().forward(x)

    return net(block=Many)


def _sizes():
    class Sized(Block):
        made = 0

        def __init__(self):
            super().__init__()
            Sized.made += 1
            self.inner = nn.Sequential(nn.Linear(16, 8 * Sized.made), nn.GELU(), nn.Linear(8 * Sized.made, 16))

        def forward(self, x):
            return super().forward(x) + self.inner(x)

    return net(block=Sized)


@modules.refused("a lazy layer that was not run", "lazy")
def _(s):
    s.continues = False
    s.begin(nn.Sequential(nn.LazyLinear(16), *[Block() for _ in range(3)]))


@modules.refused("parameters of a subclass", "plain torch.nn.Parameter")
def _(s):
    class Own(nn.Parameter):
        pass

    model = net()
    model.last.weight = Own(model.last.weight.detach())
    s.continues = False
    s.begin(model)


@modules.refused("complex parameters", "it can be float32, bfloat16 or float16")
def _(s):
    model = net()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    s.continues = False
    s.begin(model)


@modules.equal("TransformerEncoder with a padding mask, in training and evaluation")
def _(s):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
            self.last = nn.Linear(16, CLASSES)

        def forward(self, x):
            h = self.first(x)[:, None].expand(-1, 3, -1)
            mask = torch.tensor([[False, False, True]]).expand(len(x), -1)
            return self.last(self.encoder(h, src_key_padding_mask=mask)[:, 0])

    torch.manual_seed(2)
    s.begin(randomized(Encoder()))
    s.step(0, 1)
    s.model.eval()
    with torch.no_grad():
        s.note([round(value, 4) for value in s.model(s.x(3)).flatten().tolist()])
    s.model.train()


@modules.equal("a block's forward called without `__call__`")
def _(s):
    s.loss_of = lambda m, x, y: F.cross_entropy(m.last.forward(m.blocks[1].forward(m.blocks[0].forward(m.first.forward(x)))), y)
    s.step(0, 1)


@modules.equal("`model.forward(x)` called without `__call__`")
def _(s):
    s.loss_of = lambda m, x, y: F.cross_entropy(m.forward(x), y)
    s.step(0, 1)


@modules.equal("a method of the model that is not forward")
def _(s):
    class Encodes(Net):
        def encode(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    s.begin(randomized(Encodes()))
    s.loss_of = lambda m, x, y: F.cross_entropy(m.last(m.encode(x)), y)
    s.step(0, 1)
    return s.model.encode(s.x(2))


@modules.equal("parts of the model called by a loop")
def _(s):
    def loss(model, x, y):
        x = model.first(x)
        for block in reversed(model.blocks):
            x = block(x)
        return F.cross_entropy(model.last(x), y)

    s.loss_of = loss
    s.step(0, 1)


@modules.equal("`F.linear` with a block's weight, outside of it")
def _(s):
    s.loss_of = lambda m, x, y: F.cross_entropy(m(x) + F.linear(F.linear(m.first(x), m.blocks[3].up.weight), m.blocks[2].up.weight.t())[:, :5], y)
    s.step(0, 1)


@modules.equal("weights of one block used by another")
def _(s):
    class Uses(Block):
        def forward(self, x):
            return super().forward(x) + x @ model.blocks[0].up.weight[:16]

    model = net(block=Uses)
    s.begin(model)
    s.step(0, 1)


@modules.equal("a weight made of two parameters")
def _(s):
    class Adapted(Block):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(32, 2) * 0.1), nn.Parameter(torch.randn(2, 16) * 0.1)

        def forward(self, x):
            return super().forward(x) + self.down(F.linear(x, self.up.weight + self.a @ self.b))

    s.begin(net(block=Adapted))
    s.step(0, 1)


@modules.equal("a block that returns a dict, a tuple, a dataclass")
def _(s):
    import dataclasses

    @dataclasses.dataclass
    class Out:
        hidden: torch.Tensor
        more: dict

    class Returns(Block):
        def forward(self, x):
            x = x.hidden if isinstance(x, Out) else x
            return Out(super().forward(x), {"kept": (x,)})

    model = net(block=Returns)
    last = model.last.forward
    model.last.forward = lambda out: last(out.hidden + out.more["kept"][0])
    s.begin(model)
    s.step(0, 1)


@modules.equal("a block that returns its weight")
def _(s):
    class Returns(Block):
        def forward(self, x):
            x, weight = x if isinstance(x, tuple) else (x, None)
            x = super().forward(x)
            return x if weight is None else x @ weight.t() @ weight * 0.1, self.up.weight

    model = net(block=Returns)
    last = model.last.forward
    model.last.forward = lambda out: last(out[0])
    s.begin(model)
    s.step(0, 1)


@modules.equal("keyword arguments, None and strings as inputs")
def _(s):
    class Takes(Block):
        def forward(self, x, mask=None, mode="a", **more):
            return super().forward(x) * (0.5 if mode == "b" else 1.0)

    model = net(block=Takes)

    def forward(x):
        x = model.first(x)
        for block in model.blocks:
            x = block(x=x, mask=None, mode="b", other=[1, {"a": None}])
        return model.last(x)

    model.forward = forward
    s.begin(model)
    s.step(0, 1)


@modules.equal("inputs that require gradients")
def _(s):
    x, y = s.batch()
    x.requires_grad_()
    F.cross_entropy(s.model(x), y).backward()
    s.optimizer.step()
    return x.grad


@modules.equal("an autograd function of a script's own")
def _(s):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w, grad.t() @ x

    class Uses(Block):
        def forward(self, x):
            return super().forward(x) + self.down(Square.apply(x, self.up.weight))

    s.begin(net(block=Uses))
    s.step(0, 1)


@modules.equal("evaluation of one block in `no_grad` within training")
def _(s):
    class Half(Block):
        def forward(self, x):
            with torch.no_grad():
                target = super().forward(x)
            return super().forward(x) + 0.1 * target

    s.begin(net(block=Half))
    s.step(0, 1)


@modules.equal("early exits and stochastic depth")
def _(s):
    class Skips(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                if self.training and torch.rand(()) < 0.5:
                    continue
                x = block(x)
            return self.last(x)

    s.begin(randomized(Skips()))
    s.step(0, 1, 2, 3)


@modules.equal("a recurrent use of the whole model")
def _(s):
    s.loss_of = lambda m, x, y: F.cross_entropy(m(x) + m(F.pad(m(x), (0, 3))), y)
    s.step(0, 1)


modes = Theme("modes and names")

modes.equal("`train`, `eval`, `training`", lambda s: [s.model.eval().training, s.model.train().training, s.model.blocks[0].training, s.step()][:3])
modes.equal(
    "evaluation under `no_grad`",
    lambda s: [s.step(0), s.model.eval(), torch.no_grad()(lambda: s.loss(1))(), s.model.train(), s.step(2)][2],
    devices=EVERYWHERE,
)
modes.equal(
    "evaluation under `inference_mode`",
    lambda s: [s.step(0), s.model.eval(), torch.inference_mode()(lambda: s.loss(1).item())(), s.model.train(), s.step(2)][2],
)
modes.equal("a first forward under `inference_mode`", lambda s: [s.model, torch.inference_mode()(lambda: s.loss(1).item())(), s.step(2)][1])
modes.equal("weights read under `inference_mode`, then a step", lambda s: [s.model, torch.inference_mode()(lambda: s.w.sum().item())(), s.step(2)][1])
modes.equal("evaluation with gradients enabled", lambda s: [s.step(0), s.model.eval(), s.loss(1).detach(), s.model.train(), s.step(2)][2])
modes.equal(
    "evaluation in the middle of an accumulation",
    lambda s: [s.backward(0), torch.no_grad()(lambda: s.loss(1))(), s.backward(2), s.optimizer.step()][1],
)
modes.equal(
    "`named_parameters`, `parameters` in their order",
    lambda s: [[n for n, _ in s.model.named_parameters()], [list(p.shape) for p in s.model.parameters()]],
)
modes.equal(
    "`named_modules`, `named_buffers`, `children`",
    lambda s: [[n for n, _ in s.model.named_modules()], [n for n, _ in s.model.named_buffers()], [type(m).__name__ for m in s.model.children()]],
)
modes.equal(
    "`named_parameters(remove_duplicate=False)`",
    lambda s: [s.begin(_tied()), [n for n, _ in s.model.named_parameters(remove_duplicate=False)]][1],
)
modes.equal("`model.apply` that reads", lambda s: (lambda seen: [s.model.apply(lambda m: seen.append(type(m).__name__)), seen][1])([]))
modes.equal(
    "`dir(model)`, `vars(model)` have the usual names",
    lambda s: [name in dir(s.model) for name in ("forward", "blocks", "state_dict", "zero_grad")],
)
modes.equal("the model's class", lambda s: [type(s.model) is Net, isinstance(s.model, nn.Module), type(s.model.blocks[0]) is Block])
modes.differs("`type(optimizer) is AdamW`", "a subclass of the same name; `isinstance` is True", lambda s: type(s.optimizer) is torch.optim.AdamW)
modes.equal("the optimizer's class", lambda s: [isinstance(s.optimizer, torch.optim.AdamW), s.optimizer.__class__.__name__])
modes.equal("`inspect.signature` of forward", lambda s: str(__import__("inspect").signature(s.model.forward)))
modes.equal(
    "`optimizer.param_groups` has the parameters",
    lambda s: [len(s.optimizer.param_groups[0]["params"]), s.optimizer.param_groups[0]["params"][0] is s.model.first.weight],
)
modes.equal("`optimizer.defaults`", lambda s: s.optimizer.defaults)
modes.equal("`requires_grad_(False)` for a discriminator's turn", lambda s: _turns(s))
modes.equal(
    "`hasattr`, attributes set on modules",
    lambda s: [setattr(s.model, "epoch", 3), setattr(s.model.blocks[0], "tag", "x"), s.step(), s.model.epoch, s.model.blocks[0].tag][3:],
)
modes.equal(
    "a buffer registered later",
    lambda s: [s.step(0), s.model.register_buffer("later", torch.ones(2)), s.step(1), s.model.state_dict()["later"]][3],
)
modes.equal("a module of no parameters added later", lambda s: [s.step(0), s.model.blocks[1].add_module("extra", nn.Identity()), s.step(1)])
modes.equal("a block replaced by `Identity`", lambda s: [s.step(0), s.model.blocks.__setitem__(2, nn.Identity()), s.step(1)])
modes.equal("a block removed", lambda s: [s.step(0), s.model.blocks.__delitem__(3), s.step(1)])
modes.equal("blocks in another order", lambda s: [s.step(0), setattr(s.model, "blocks", nn.ModuleList(reversed(s.model.blocks))), s.step(1)])
modes.equal("`forward` replaced by a function", lambda s: _new_forward(s))
modes.equal("a new head that is not trained", lambda s: _new_head(s))
modes.refused("a new head in a group of its own", "add_param_group after offloadd.prepare", lambda s: _new_head(s, trained=True))
modes.refused("an adapter added later, in a group of its own", "add_param_group after offloadd.prepare", lambda s: _late_adapter(s))
modes.equal("a weight replaced by another parameter", lambda s: _replaced(s))


def _turns(s):
    for number in range(3):
        s.model.blocks.requires_grad_(number != 1)
        s.step(number)
    s.model.blocks.requires_grad_(True)


def _new_forward(s):
    s.step(0)
    plain = s.model.forward
    s.model.forward = lambda x: plain(x) * 0.5
    s.step(1)


def _new_head(s, trained=False):
    s.step(0)
    torch.manual_seed(9)
    s.model.last = nn.Linear(16, CLASSES)
    if trained:
        s.optimizer.add_param_group({"params": list(s.model.last.parameters())})
    s.step(1, 2)


def _late_adapter(s):
    s.step(0)
    torch.manual_seed(9)
    extra = nn.Linear(16, 16)
    s.model.blocks[1].extra = extra
    s.model.blocks[1].register_forward_hook(lambda module, args, out: out + extra(args[0]))
    s.optimizer.add_param_group({"params": list(extra.parameters())})
    s.step(1, 2)


def _replaced(s):
    s.step(0)
    s.model.blocks[1].up.weight = nn.Parameter(torch.ones(32, 16) * 0.01)
    s.step(1, 2)


utilities = Theme("utilities of torch.nn")

utilities.equal(
    "`parametrizations.weight_norm` before `prepare`",
    lambda s: _before(s, lambda m: [parametrizations.weight_norm(b.up) for b in m.blocks]),
)
utilities.equal("`weight_norm`, the old one, before `prepare`", lambda s: _before(s, lambda m: [nn.utils.weight_norm(b.up) for b in m.blocks]))
utilities.equal(
    "`parametrizations.spectral_norm` before `prepare`",
    lambda s: _before(s, lambda m: [parametrizations.spectral_norm(b.up) for b in m.blocks]),
)
utilities.equal("`spectral_norm`, the old one, before `prepare`", lambda s: _before(s, lambda m: [nn.utils.spectral_norm(b.up) for b in m.blocks]))
utilities.equal(
    "`parametrizations.orthogonal` before `prepare`",
    lambda s: _before(s, lambda m: [parametrizations.orthogonal(b.up, orthogonal_map="householder") for b in m.blocks]),
)
utilities.equal(
    "a parametrization of a script's own",
    lambda s: _before(s, lambda m: [parametrize.register_parametrization(b.up, "weight", Symmetric()) for b in m.blocks]),
)
utilities.equal("`parametrize.cached`", lambda s: _cached(s))
utilities.equal(
    "`prune.l1_unstructured` before `prepare`",
    lambda s: _before(s, lambda m: [prune.l1_unstructured(b.up, "weight", 0.3) for b in m.blocks]),
)
utilities.equal(
    "`prune.remove` before `prepare`",
    lambda s: _before(s, lambda m: [prune.remove(prune.random_unstructured(b.up, "weight", 0.3), "weight") for b in m.blocks]),
)
utilities.equal("`prune` after `prepare`", lambda s: [s.step(0), prune.l1_unstructured(s.model.blocks[1].up, "weight", 0.3), s.step(1)])
utilities.refused(
    "`weight_norm` after `prepare`",
    "before offloadd.prepare",
    lambda s: [s.step(0), parametrizations.weight_norm(s.model.blocks[1].up), s.step(1)],
    none=EQUAL,
)
utilities.equal(
    "`prune.CustomFromMask.apply` of the gradient's mask by a hook",
    lambda s: [s.w.register_hook(lambda grad: grad * (torch.arange(16) % 2)), s.step(0, 1)],
)
utilities.equal("`parameters_to_vector` after a step", lambda s: [s.step(0), nn.utils.parameters_to_vector(s.model.parameters())][1])
utilities.equal("`fuse_linear_bn_eval` of layers", lambda s: _fused(s))
utilities.equal("`skip_init`", lambda s: s.begin(_skipped()) and s.step(0))
utilities.equal(
    "`convert_conv2d_weight_memory_format` before `prepare`",
    lambda s: _before(s, lambda m: nn.utils.convert_conv2d_weight_memory_format(m, torch.channels_last)),
)
utilities.equal("the profiler", lambda s: _profiled(s))
utilities.equal(
    "`remove_spectral_norm` before `prepare`",
    lambda s: _before(s, lambda m: [nn.utils.remove_spectral_norm(nn.utils.spectral_norm(m.blocks[0].up))]),
)
utilities.equal("`torch.utils.data.DataLoader` and `default_collate`", lambda s: _loader(s))
utilities.equal("the number of bytes of a model, by hand", lambda s: sum(p.numel() * p.element_size() for p in s.model.parameters()))
utilities.equal("sparsity of all weights", lambda s: sum(int((p == 0).sum()) for p in s.model.parameters()))
utilities.equal("whether two models are equal", lambda s: all(torch.equal(a, b) for a, b in zip(s.model.parameters(), net().parameters())))
utilities.equal(
    "`torch.testing.assert_close` with another model",
    lambda s: [torch.testing.assert_close(a, b) for a, b in zip(s.model.parameters(), net().parameters())],
)
utilities.equal("a quantile of all weights", lambda s: torch.cat([p.detach().flatten() for p in s.model.parameters()]).quantile(0.9))
utilities.equal("a norm's parameters gathered by type", lambda s: [m.weight.mean() for m in s.model.modules() if isinstance(m, nn.LayerNorm)])
utilities.refused(
    "`quantize_dynamic`, which copies the model",
    "before offloadd.prepare",
    lambda s: torch.ao.quantization.quantize_dynamic(s.model, {nn.Linear}),
)
utilities.equal("LoRA merged by hand, outside of training", lambda s: (s.w + 0.1 * torch.ones(32, 2) @ torch.ones(2, 16)).sum())


def _profiled(s):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        s.step(0, 1)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight - weight.mean(0, keepdim=True)


def _before(s, change):
    model = net()
    torch.manual_seed(4)
    change(model)
    s.begin(model)
    s.step(0, 1, 2)
    s.note(s.model.state_dict())
    s.model.eval()
    s.note(s.loss(3).detach())
    s.model.train()


def _cached(s):
    model = net()
    for block in model.blocks:
        parametrize.register_parametrization(block.up, "weight", Symmetric())
    s.begin(model)
    with parametrize.cached():
        s.backward(0)
    s.optimizer.step()


def _fused(s):
    norm = nn.BatchNorm1d(32).eval()
    s.step(0)
    s.model.eval()
    of_norm = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    fused = nn.utils.fusion.fuse_linear_bn_weights(s.w, s.model.blocks[1].up.bias, *of_norm)
    s.model.train()
    return [one.detach() for one in fused]


def _skipped():
    model = net()
    model.last = nn.utils.skip_init(nn.Linear, 16, 5)
    with torch.no_grad():
        for param in model.last.parameters():
            param.fill_(0.1)
    return model


def _loader(s):
    data = torch.utils.data.TensorDataset(*[torch.cat(parts) for parts in zip(*[s.batch(n) for n in range(3)])])
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        loss = F.cross_entropy(s.model(x), y)
        loss.backward()
        s.note(loss)
        s.optimizer.step()
        s.optimizer.zero_grad()


compiled = Theme("compiled")


def _compiles(name, change, devices=MEMORY):
    """A line with a model whose parts are compiled before `prepare`."""

    @compiled.equal(name, devices=devices)
    def _(s):
        torch._dynamo.reset()
        model = net(dropout=0.0, blocks=3)
        change(model)
        s.begin(model)
        s.step(0, 1)
        s.model.eval()
        with torch.no_grad():
            s.note(s.loss(2))
        s.model.train()


_compiles("blocks, backend `eager`", lambda m: [b.compile(backend="eager") for b in m.blocks])
_compiles("blocks, backend `aot_eager`", lambda m: [b.compile(backend="aot_eager") for b in m.blocks])
_compiles("blocks with `fullgraph=True`", lambda m: [b.compile(backend="eager", fullgraph=True) for b in m.blocks])
_compiles("the whole model by `model.compile`", lambda m: m.compile(backend="eager"))


@compiled.equal("`torch.compile(model)` after `prepare`")
def _(s):
    torch._dynamo.reset()
    model = torch.compile(s.begin(net(dropout=0.0, blocks=3)), backend="eager")
    s.loss_of = lambda _, x, y: F.cross_entropy(model(x), y)
    s.step(0, 1)


@compiled.equal("`torch.compile(model)` is prepared")
def _(s):
    torch._dynamo.reset()
    model = torch.compile(net(dropout=0.0, blocks=3), backend="eager")
    s.begin(model)
    s.step(0, 1)


class _Reads(Block):
    """A block that may use weights of another one."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.others = []

    def forward(self, x):
        x = super().forward(x)
        for other in self.others:
            x = x + x @ other.up.weight.t() @ other.up.weight
        return x


def _reads(name, compiles):
    @compiled.equal(f"{name}, one of which reads a weight of another")
    def _(s):
        torch._dynamo.reset()
        model = net(block=_Reads, blocks=3)
        model.blocks[2].others.append(model.blocks[0])
        s.begin(model)
        called = compiles(model)
        s.loss_of = lambda _, x, y: F.cross_entropy(called(x), y)
        s.step(0, 1, 2)


_reads("blocks", lambda model: [block.compile(backend="eager") for block in model.blocks] and model)
_reads("blocks within a compiled model", lambda model: torch.compile(model, backend="eager"))


@compiled.equal("a compiled loss")
def _(s):
    torch._dynamo.reset()
    loss = torch.compile(F.cross_entropy, backend="eager")
    s.loss_of = lambda model, x, y: loss(model(x), y)
    s.step(0, 1)


@compiled.equal("a compiled step of the optimizer")
def _(s):
    torch._dynamo.reset()
    s.begin(net(dropout=0.0, blocks=3))
    s.backward(0)
    torch.compile(lambda: s.optimizer.step(), backend="eager")()
    s.optimizer.zero_grad()


@compiled.equal("a compiled function that reads weights")
def _(s):
    torch._dynamo.reset()
    w = s.w
    norm = torch.compile(lambda: w.norm() + w[0].sum(), backend="eager")
    return [norm(), s.step(0), norm()][::2]


@compiled.equal("`torch.compiler.disable` around a block")
def _(s):
    torch._dynamo.reset()
    model = net(dropout=0.0, blocks=3)
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    for block in model.blocks:
        block.compile(backend="eager")
    s.begin(model)
    s.step(0, 1)


@compiled.refused("`torch.compile(model, fullgraph=True)`", "leave fullgraph=True out", error=RuntimeError)
def _(s):
    torch._dynamo.reset()
    model = torch.compile(s.begin(net(dropout=0.0, blocks=3)), backend="eager", fullgraph=True)
    model(s.x())


@compiled.refused("`torch.jit.trace` of the model", "before offloadd.prepare")
def _(s):
    return torch.jit.trace(s.begin(net(dropout=0.0)), s.x())(s.x(1))


class _Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


@compiled.refused("blocks of `torch.jit.script`", "pass the module of which it was made")
def _(s):
    s.begin(net(block=lambda: torch.jit.script(_Tanh())))


@compiled.equal("blocks of `torch.jit.trace`")
def _(s):
    s.begin(net(block=lambda: torch.jit.trace(_Tanh(), torch.ones(1, 16))))
    s.step(0)


@compiled.refused("`torch.jit.script` of a block", "after close() of its run")
def _(s):
    model = net(block=_Tanh)
    s.begin(model)
    s.step(0)
    return torch.jit.script(model.blocks[0])(torch.ones(1, 16))


@compiled.equal("`torch.fx.symbolic_trace`")
def _(s):
    traced = torch.fx.symbolic_trace(s.begin(net(block=_Tanh)))
    return [traced(s.x()), s.step(0), traced(s.x())][::2]


@compiled.refused("`torch.export`", "before offloadd.prepare")
def _(s):
    return torch.export.export(s.begin(net(dropout=0.0)), (s.x(),)).module()(s.x(1))
