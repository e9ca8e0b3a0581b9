"""Models that nothing trains: a reference, a teacher, a reward, beside a model that is trained or alone."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from table import CLASSES, EVERYWHERE, ONLY_MOVED, Block, Theme, net

used = Theme("models that nothing trains", changes=False, none=ONLY_MOVED)
beside = Theme("models that nothing trains, beside one that is trained", none=ONLY_MOVED)


@used.equal("a forward without gradients, several times", devices=EVERYWHERE)
def _(s):
    model = s.use().eval()
    with torch.no_grad():
        return [model(s.x(number)) for number in range(3)]


used.equal("`inference_mode`", lambda s: torch.inference_mode()(s.use().eval().__call__)(s.x()))
used.equal("dropout in training mode", lambda s: [s.use()(s.x()), s.used(s.x())])
used.equal("`state_dict`", lambda s: s.use().state_dict(), devices=EVERYWHERE)
used.equal("each parameter read", lambda s: [param.detach().clone() for param in s.use().parameters()], devices=EVERYWHERE)
used.equal("autocast", lambda s: torch.autocast("cpu", torch.bfloat16)(s.use().eval().__call__)(s.x()))
used.equal("bf16", lambda s: s.use(net().bfloat16()).eval()(s.x().bfloat16()), devices=EVERYWHERE)
used.equal("float64", lambda s: s.use(net().double()).eval()(s.x().double()))
used.equal("`requires_grad` of parameters", lambda s: [param.requires_grad for param in s.use().parameters()])
used.equal("`requires_grad_(False)` and back", lambda s: [s.use().requires_grad_(False).requires_grad_(True).first.weight.requires_grad, s.used.eval()(s.x())])


@used.equal("gradients of the input", devices=EVERYWHERE)
def _(s):
    model, x = s.use().eval().requires_grad_(False), s.x().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, [param.grad for param in model.parameters()]]


@used.equal("gradients of parameters that require them: plain tensors in memory")
def _(s):
    model = s.use().eval()
    for number in range(2):
        s.loss(number, model).backward()
    s.note([param.grad for param in model.parameters()])
    model.zero_grad(set_to_none=False)
    s.note([param.grad for param in model.parameters()])
    model.zero_grad()
    s.note([param.grad for param in model.parameters()])
    s.loss(2, model).backward()
    if s.run:
        s.run.close()
    return [param.grad for param in model.parameters()]


@used.equal("a block computed again in backward")
def _(s):
    from torch.utils.checkpoint import checkpoint

    model, x = s.use().eval(), s.x().requires_grad_()
    y = model.first(x)
    for block in model.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    model.last(y).sum().backward()
    return x.grad


@used.equal("a part of the model called by itself")
def _(s):
    model = s.use().eval()
    with torch.no_grad():
        return [model.blocks[2](torch.ones(2, 16)), model.first(s.x())]


@used.equal("integers among the parameters")
def _(s):
    class Table(Block):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(16, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return super().forward(x) + self.table

    return s.use(net(block=Table)).eval()(s.x())


@used.equal("bytes and float8 among the parameters", devices=EVERYWHERE)
def _(s):
    class Tables(Block):
        def __init__(self):
            super().__init__()
            values = torch.arange(16.0) - 8
            kinds = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64)
            self.tables = nn.ParameterList([nn.Parameter(values.to(kind), requires_grad=False) for kind in kinds])

        def forward(self, x):
            return super().forward(x) + sum(table.float() for table in self.tables)

    return s.use(net(block=Tables)).eval()(s.x())


@used.equal("buffers that a forward updates", devices=EVERYWHERE)
def _(s):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.batch = nn.BatchNorm1d(16)

        def forward(self, x):
            return super().forward(self.batch(x))

    model = s.use(net(block=Normed))
    return [model(s.x()), dict(model.named_buffers())]


@used.equal("`load_state_dict` of the same values")
def _(s):
    model = s.use()
    model.load_state_dict(net().state_dict())
    return model.eval()(s.x())


used.refused("`load_state_dict` of other values", "frozen parameters are written once", lambda s: s.use().load_state_dict(net(3).state_dict()))
used.refused("a parameter changed in place", "whose values are in tiles", lambda s: torch.no_grad()(lambda: s.use().first.weight.mul_(2))())
used.refused("`prepare` of a model that is prepared", "prepared already", lambda s: s.twice(s.use()))
used.refused("`copy.deepcopy`", "cannot be copied", lambda s: copy.deepcopy(s.use()) if s.device else None)
used.refused("`model.half()`", "do it before offloadd.prepare", lambda s: s.use().half() if s.device else None)


@used.refused("an optimizer of torch's that steps", "in tiles")
def _(s):
    model = s.use()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    s.loss(0, model).backward()
    optimizer.step()


@used.refused("a checkpoint of the run", "this run trains nothing")
def _(s):
    s.use()
    return s.run.save_checkpoint(s.dir / "saved") if s.run else None


@used.equal("a plain model after `close`", devices=EVERYWHERE)
def _(s):
    model = s.use()
    if s.run:
        s.run.close()
    s.note([param.detach() for param in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    s.loss(0, model).backward()
    optimizer.step()
    return s.weights(model)


@beside.equal("a teacher in tiles and a student", devices=EVERYWHERE)
def _(s):
    teacher = s.use(net(7)).eval()
    student = s.begin(net(1))
    for number in range(3):
        x = s.x(number)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.note(loss)


@beside.equal("a reference prepared after the model that is trained, of its first weights", devices=EVERYWHERE)
def _(s):
    reference = net(1)
    policy = s.begin(net(1))
    s.use(reference).eval()
    for number in range(3):
        x, y = s.batch(number)
        with torch.no_grad():
            before = reference(x).log_softmax(-1)
        margin = (policy(x).log_softmax(-1) - before).gather(1, y[:, None])
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.note(loss)


@beside.equal("a loss through a model in tiles that is not trained")
def _(s):
    critic, model = s.use(net(5)).eval().requires_grad_(False), s.begin(net(1))
    for number in range(3):
        loss = critic(F.pad(model(s.x(number)), (0, 8 - CLASSES))).square().mean()
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.note(loss)


@beside.equal("the same model as its own reference first, and trained then", devices=EVERYWHERE)
def _(s):
    model = s.use(net(2))
    with torch.no_grad():
        s.note([model.eval()(s.x(number)) for number in range(2)])
    if s.run:
        s.run.close()
    s.begin(model.train())
    s.step(0, 1)


@beside.equal("two teachers in one directory of a drive", devices=EVERYWHERE)
def _(s):
    teachers = [s.use(net(seed)).eval() for seed in (7, 8)]
    student = s.begin(net(1))
    with torch.no_grad():
        target = sum(teacher(s.x()) for teacher in teachers)
    loss = F.mse_loss(student(s.x()), target)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.note(loss)
