"""The table of PyTorch's behaviour: what a line is, how it is run, and what is compared.

A line is a script, a function of a `Script`. It runs plain and with its model prepared, each from the same random numbers:

    plain     script -> values -> a further step -> its loss and all weights
                          |                            |
                       compared                     compared
                          |                            |
    prepared  script -> values -> a further step -> its loss and all weights

Before an optimizer's first step values are equal in each bit; after it within `TOLERANCE`, since torch's AdamW rounds in
another order. A line that is refused names a phrase of the error's message, and the run goes on after it. A line that differs on
purpose says how.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import gc
import io
import os
import pathlib
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import offloadd

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("OFFLOADD_PROGRAM") or next(
    (str(path) for kind in ("debug", "release") if (path := HERE.parents[3] / "target" / kind / "offloadd").exists()), shutil.which("offloadd")
)

# Largest difference of values after an update, relative and absolute.
TOLERANCE = 1e-5

# Where the state is: in host memory, with parameters that are released ("cpu") or stay with the model ("none"), and on drives as well.
MEMORY = ("cpu", "none")
EVERYWHERE = (*MEMORY, "nvme")

# What a line says of "none" if values are equal there and not elsewhere.
EQUAL = object()

# The error of "none" for models that nothing trains.
ONLY_MOVED = "without an optimizer parameters are only moved"

# Seconds after which a line is taken to hang.
LINE_S = 120

WIDTH, INPUTS, CLASSES, BLOCKS = 16, 8, 5, 4


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Net(nn.Module):
    """Blocks between two layers that belong to none; `block` makes one of them."""

    def __init__(self, block=Block, blocks=BLOCKS, **more):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(block(**more) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def randomized(model, seed=0):
    """Gives every parameter values of its own: fresh norms and biases hide faults."""
    generator = torch.Generator().manual_seed(17 + seed)
    with torch.no_grad():
        for param in model.parameters():
            # Numbers of 8 bits have no arithmetic.
            if param.is_floating_point() and param.element_size() > 1:
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.05)
    return model


def net(seed=0, **more):
    """A model with random numbers that depend on `seed` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return randomized(Net(**more), seed)


def adamw(params, lr=1e-2, **more):
    """An optimizer whose epsilon keeps rounding errors of tiny gradients small."""
    return torch.optim.AdamW(params, lr=lr, eps=1e-4, **more)


class Script:
    """What a line's script works with. `device` is None in the plain run."""

    def __init__(self, device, dir):
        self.device, self.dir = device, pathlib.Path(dir)
        self.notes, self.runs, self.trained, self._exact = [], [], [], True
        # The last model that nothing trains.
        self.used = None
        # Set by scripts whose model computes its loss in another way, or that leave no model to train.
        self.loss_of = lambda model, x, y: F.cross_entropy(model(x), y)
        self.continues = True

    # Models

    def begin(self, model=None, optimizer=None, **more):
        """Makes a model and an optimizer where none are given, and prepares them unless the run is the plain one."""
        model = net() if model is None else model
        optimizer = adamw(param for param in model.parameters() if param.requires_grad) if optimizer is None else optimizer
        self.trained.append((model, optimizer))
        if self.device is not None:
            self.runs.append(offloadd.prepare(model, optimizer, self.config(), **{"run_dir": self.dir / f"run-{len(self.runs)}", **more}))
        return model

    def use(self, model=None):
        """A model that nothing trains, prepared unless the run is the plain one."""
        self.used = net() if model is None else model
        if self.device is not None:
            self.runs.append(offloadd.prepare(self.used, None, self.config(), run_dir=self.dir / f"run-{len(self.runs)}"))
        return self.used

    def twice(self, model):
        """Prepares a model again."""
        return offloadd.prepare(model, None, self.config(), run_dir=self.dir / "again") if self.device is not None else None

    def config(self):
        store = {"device": self.device, **({"nvme_path": str(self.dir)} if self.device == "nvme" else {})}
        return {"zero_optimization": {"stage": 3, "offload_param": store}, "offloadd": {"program": PROGRAM}}

    @property
    def run(self):
        """The last run, None in the plain one."""
        return self.runs[-1] if self.runs else None

    @property
    def model(self):
        return self.trained[-1][0] if self.trained else self.begin()

    @property
    def optimizer(self):
        self.model
        return self.trained[-1][1]

    @property
    def w(self):
        """A matrix in a block."""
        return self.model.blocks[1].up.weight

    @property
    def b(self):
        """A vector in a block."""
        return self.model.blocks[2].down.bias

    @property
    def root(self):
        """A matrix in no block."""
        return self.model.last.weight

    # Training

    @staticmethod
    def batch(number=0):
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(4, INPUTS, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)

    def x(self, number=0):
        return self.batch(number)[0]

    def loss(self, number=0, model=None):
        return self.loss_of(self.model if model is None else model, *self.batch(number))

    def backward(self, *numbers):
        """Adds the gradients of batches up."""
        for number in numbers or (0,):
            loss = self.loss(number)
            loss.backward()
            self.note(loss)

    def step(self, *numbers, zero=True):
        """Trains with one batch after another, and notes the losses."""
        for number in numbers or (0,):
            self.backward(number)
            self.optimizer.step()
            if zero:
                self.optimizer.zero_grad()

    def weights(self, model=None):
        """Copies of all parameters and buffers."""
        model = self.model if model is None else model
        return {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}

    # Comparing

    def note(self, value, exact=True):
        """Compares a value with the plain run's, in each bit unless a step was made or it need not be `exact`."""
        self._exact = self._exact and not any(optimizer.state for _, optimizer in self.trained)
        self.notes.append((self._exact and exact, frozen(value)))

    def finish(self):
        """Trains each model a step more: what a script leaves behind shows then."""
        for model, optimizer in self.trained if self.continues else ():
            optimizer.zero_grad()
            loss = self.loss(50, model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.note(["the step after", loss, self.weights(model)])

    def end(self, refused=False):
        """Ends the runs. Of a script that was `refused`, what it has written may be refused again."""
        for run in self.runs:
            with contextlib.suppress(*[offloadd.NotSupported] * refused):
                run.close()


def frozen(value):
    """The value as it is now: tensors become plain copies, and other objects the names of their classes."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            copy = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
            copy = copy.clone()
            return copy.as_subclass(torch.Tensor) if type(copy) is not torch.Tensor else copy
    if isinstance(value, collections.abc.Mapping):
        return {(key if isinstance(key, (str, int, float)) else str(key)): frozen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, collections.abc.Iterator)):
        return [frozen(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else type(value).__name__


def difference(plain, ours, exact, where="value"):
    """A description of the first difference, empty if there is none."""
    if isinstance(plain, torch.Tensor) != isinstance(ours, torch.Tensor) or type(plain) is not type(ours):
        return f"{where}: {short(plain)}, prepared {short(ours)}"
    if isinstance(plain, torch.Tensor):
        if plain.shape != ours.shape or plain.dtype != ours.dtype:
            return f"{where}: {short(plain)}, prepared {short(ours)}"
        if torch.equal(plain, ours) or (exact and plain.is_floating_point() and torch.equal(plain.nan_to_num(), ours.nan_to_num())):
            return ""
        if exact or not plain.is_floating_point() or not torch.allclose(plain.double(), ours.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return f"{where}: {short(plain)}, prepared {short(ours)}: differ by {(plain.double() - ours.double()).abs().max():.3g}"
        return ""
    if isinstance(plain, float):
        same = plain == ours or plain != plain and ours != ours or not exact and abs(plain - ours) <= TOLERANCE * (1 + abs(plain))
        return "" if same else f"{where}: {plain}, prepared {ours}"
    if isinstance(plain, (list, dict)):
        if len(plain) != len(ours) or isinstance(plain, dict) and list(plain) != list(ours):
            return f"{where}: {short(plain)}, prepared {short(ours)}"
        keys = list(plain) if isinstance(plain, dict) else range(len(plain))
        return next(filter(None, (difference(plain[key], ours[key], exact, f"{where}[{key!r}]") for key in keys)), "")
    return "" if plain == ours else f"{where}: {plain!r}, prepared {ours!r}"


def short(value):
    text = f"tensor {tuple(value.shape)} {value.dtype} {value.flatten()[:3].tolist()}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 160 else text[:157] + "..."


@dataclasses.dataclass
class Line:
    theme: "Theme"
    name: str
    script: object
    # A phrase of the error's message, None where the values are equal.
    refused: object = None
    # The class of the error, which an equal line has if plain PyTorch raises one.
    error: type = None
    # How it is otherwise on purpose: the script returns True plain and False prepared.
    differs: object = None
    devices: tuple = MEMORY
    # Of device "none" if it is otherwise there: EQUAL, or the phrase of an error.
    none: object = None

    @property
    def key(self):
        return f"{self.theme.name}: {self.name}"

    @property
    def kind(self):
        """Whether the line is "equal", "refused" or "differs"."""
        return "refused" if self.refused is not None else "differs" if self.differs is not None else "equal"

    def on(self, device):
        """The line as it is with a device."""
        if device != "none" or self.none is None:
            return self
        return dataclasses.replace(self, refused=None if self.none is EQUAL else self.none, error=None, differs=None, none=None)

    def check(self):
        """What is not as the line says, empty if all is. It runs in a process of its own."""
        lines = [(device, self.on(device)) for device in self.devices]
        continues = any(line.refused is None for _, line in lines)
        plain = outcome(self, None, continues)
        if self.refused is None and type(plain.error and plain.error.value) is not (self.error or type(None)):
            return f"the line itself is wrong: {plain.error or 'no error'}"
        if plain.at_end is not None:
            return f"plain: the step after: {plain.at_end}"
        return next(filter(None, (line._compare(device, plain) for device, line in lines)), "")

    def _compare(self, device, plain):
        ours = outcome(self, device)
        error = ours.error
        if self.refused is not None:
            if not isinstance(error and error.value, self.error or offloadd.Error) or self.refused not in str(error.value):
                return f"{device}: not refused with {self.refused!r}, but {error or 'no error'}"
        elif plain.error is not None or error is not None:
            if type(plain.error and plain.error.value) is not type(error and error.value):
                return f"{device}: plain {plain.error or 'no error'}, prepared {error or 'no error'}"
        if ours.at_end is not None:
            return f"{device}: the step after: {ours.at_end}"
        if self.differs is not None:
            found = [outcome.notes[outcome.noted - 1][1] for outcome in (plain, ours)]
            return "" if found == [True, False] else f"{device}: plain {found[0]}, prepared {found[1]}"
        # What comes before an error is compared too, and a refused script continues with other weights.
        pairs = list(zip(plain.notes, ours.notes))[: ours.noted if self.refused is not None else None]
        if self.refused is None and len(plain.notes) != len(ours.notes):
            return f"{device}: {len(plain.notes)} values, prepared {len(ours.notes)}"
        for (exact, one), (_, other) in pairs:
            if found := difference(one, other, exact):
                return f"{device}: plain {found}"
        return ""


class Raised:
    """An error and where it was raised, without the frames."""

    def __init__(self, value):
        self.value = value
        *_, frame = traceback.extract_tb(value.__traceback__) or [None]
        self.where = frame and f"{pathlib.Path(frame.filename).name}:{frame.lineno}"

    def __str__(self):
        return f"{type(self.value).__name__} ({self.where}): {' '.join(str(self.value).split())[:300]}"


@dataclasses.dataclass
class Outcome:
    notes: list
    # Notes before the error.
    noted: int
    error: object
    at_end: object


def outcome(line, device, continues=True):
    """Runs a line's script and, if it `continues`, the step after."""
    with contextlib.ExitStack() as stack:
        dir = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        torch.manual_seed(5)
        script, error, at_end = Script(device, dir), None, None
        script.continues = line.theme.changes
        try:
            result = line.script(script)
            if result is not None:
                script.note(result)
        except (Exception, KeyboardInterrupt) as one:
            error = Raised(one)
        noted = len(script.notes)
        try:
            if continues:
                script.finish()
            script.end(refused=error is not None and not script.continues)
        except (Exception, KeyboardInterrupt) as one:
            at_end = Raised(one)
        return Outcome(script.notes, noted, error, at_end)


THEMES = []


class Theme:
    """Lines of one kind. `devices` are those of its lines, and `none` what they say of device "none", unless a line says otherwise. Without `changes`
    they only look, and make no further step."""

    def __init__(self, name, devices=MEMORY, changes=True, none=None):
        self.name, self.devices, self.changes, self.none, self.lines = name, devices, changes, none, []
        THEMES.append(self)

    def equal(self, name, script=None, **more):
        """Adds a line whose values are plain PyTorch's. Without a script, decorates it."""
        return self._add(name, script, None, more)

    def refused(self, name, phrase, script=None, **more):
        """Adds a line that is refused with an error whose message has the phrase. Without a script, decorates it."""
        return self._add(name, script, phrase, more)

    def differs(self, name, how, script=None, **more):
        """Adds a line that is otherwise on purpose, as `how` tells: the script returns True plain and False prepared."""
        return self._add(name, script, None, {"differs": how, **more})

    def _add(self, name, script, phrase, more):
        if script is None:
            return lambda script: self._add(name, script, phrase, more)
        self.lines.append(Line(self, name, script, phrase, **{"devices": self.devices, "none": self.none, **more}))
        return script


def run(lines):
    """Runs lines one after another in a process, and yields each with what is not as it says, empty if all is. A line that crashes,
    hangs or fails ends its process, and the next one begins in another: it alone is to blame."""
    # Imported by the first optimizer and the first run; a process each would import them again.
    import torch._dynamo  # noqa: F401

    import offloadd._run  # noqa: F401

    gc.freeze()
    lines = list(lines)
    while lines:
        sys.stdout.flush()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            _check_all(lines, writer)
        os.close(writer)
        ended = os.pidfd_open(child)
        with open(reader, "rb", buffering=0) as pipe:
            said = b""
            # What a script has left may hold the pipe open: the process that runs the lines counts.
            while pipe in select.select([pipe, ended], [], [])[0] and (part := pipe.read(1 << 16)):
                said += part
                *whole, said = said.split(b"\0")
                for one in whole:
                    yield lines.pop(0), one.decode()
        os.close(ended)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status:
            yield lines.pop(0), "hangs" if status == -signal.SIGALRM else f"ends with {signal.Signals(-status).name if status < 0 else status}"


def _check_all(lines, writer):
    """Writes what each line says until one is not as it says, and ends the process. A signal that ends it prints where."""
    faulthandler.enable()
    # The pool of threads is made again after a fork by whoever asks first; two threads of the autograd engine at once abort.
    torch.set_num_threads(1)
    for line in lines:
        signal.alarm(LINE_S)
        try:
            said = line.check()
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.replace("\0", "").encode() + b"\0")
        if said:
            break
    os._exit(0)
