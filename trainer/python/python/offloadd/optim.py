"""Optimizers whose state lies in host memory or on drives, for any training loop: parameters and gradients stay where they are.

    optimizer = offloadd.optim.AdamW(model.parameters(), lr=2e-5, directory="/mnt/nvme0/run")
    first = optimizer.resume()                            # steps that an earlier start has committed; 0 at first
    for batch in itertools.islice(loader, first, None):
        model(**batch).loss.backward()
        offloadd.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

Each step ends committed: a script that is killed goes on with the same bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional, Sequence, Union

import torch

from . import _lion, _muon
from ._config import Settings, settings_of
from ._errors import Error, NotSupported
from ._moments import check_room
from ._optimizer_run import NoStates, OptimizerRun, OptimizerStates, open_run
from ._param_units import grad_of
from ._prepared_optimizer import PreparedOptimizer
from ._state_copies import StateCopies

__all__ = ["AdamW", "Lion", "Muon", "clip_grad_norm_"]

Directory = Union[str, os.PathLike]

# Those of this process, to find the one that has a parameter.
_optimizers: "weakref.WeakSet[_Alone]" = weakref.WeakSet()
_numbers = itertools.count()


class _Alone(PreparedOptimizer):
    """What the optimizers here have in common: all but the update."""

    def _init(
        self,
        directory: Union[None, Directory, Sequence[Directory]],
        socket: Optional[Directory],
        moments: str,
        master: str,
        commit_every: int,
        overlap_backward: bool,
        overlap_commit: bool,
        options: Optional[Mapping[str, Any]],
        changing: Mapping[str, bool],
    ) -> None:
        """What comes before that of torch.optim. `changing` has options that change the update."""
        self._run: Optional[OptimizerRun] = None
        self._state_copies = StateCopies("optimizer")
        self._number, self._overlap_backward, self._overlap_commit = next(_numbers), overlap_backward, overlap_commit
        directories = [Path(one).absolute() for one in ([directory] if isinstance(directory, (str, os.PathLike)) else directory or ())]
        self._directory = directories[0] if directories else None
        own = {"moments": moments, "master": master, "commit_every": commit_every}
        self._settings = _settings(directories, socket, {**own, **(options or {})})
        given = {"directory": directories, "socket": socket, "overlap_backward": overlap_backward, "overlap_commit": overlap_commit, "options": options}
        usual = {"moments": "fp32", "master": "fp32", "commit_every": 1}
        # The arguments that say where the state lies and how it is committed.
        self._given = [name for name, value in given.items() if value] + [name for name, value in own.items() if value != usual[name]]
        if any(changing.values()):
            raise NotSupported(f"{', '.join(changing)} change the update: leave them out")

    # The run

    def _open(self, resume: bool, track: Sequence[Any] = ()) -> OptimizerRun:
        if self._run is None:
            self._run = open_run(self, self._settings, self._directory, resume, track, self._overlap_backward, self._overlap_commit)
        return self._run

    def check_bare(self) -> None:
        """Refuses what `offloadd.prepare` cannot take over: an optimizer that has begun, or whose arguments say where its state is."""
        if self._run is not None:
            raise NotSupported("offloadd.prepare with an optimizer of offloadd.optim that has begun: pass one that has made no step and loaded no state")
        if self._given:
            raise NotSupported(
                f"offloadd.prepare with {', '.join(self._given)} of an optimizer of offloadd.optim: leave them out, the configuration says where the state lies"
            )

    def resume(self, track: Sequence[Any] = ()) -> int:
        """Continues where the last step ended that an earlier start has committed in `directory`: with its parameters, moments, parameter groups and
        random numbers. Returns how many steps were made; 0 where there is nothing to continue. To be called before the first step.

        `track` has objects with `state_dict` and `load_state_dict`, such as schedulers, which are committed with each step and come back as they
        were when `step` ended: a scheduler that the loop moves on after `step` is to be moved on next."""
        if self._run is not None:
            raise Error("resume() after the optimizer has begun: call it before the first step and before load_state_dict")
        return self._open(resume=True, track=track).steps_done

    @property
    def steps_done(self) -> int:
        """Steps that were made, those of earlier starts included."""
        return 0 if self._run is None else self._run.steps_done

    def commit(self) -> None:
        """Commits the last step now, where `commit_every` has not."""
        if self._run is not None:
            self._run.drain()

    def close(self) -> None:
        """Commits the last step, unless another one has begun in backward, and gives the tiles back, as the end of the script does. State in host memory
        is lost. Parameters keep their values."""
        if self._run is not None:
            self._run.close()

    @property
    def grad_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, before clipping."""
        return None if self._run is None else self._run.commits.reports.grad_norm

    @contextlib.contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Begins the next step in the backward that runs within: each unit is updated as soon as its gradients are complete, with the settings that the
        groups have at the beginning. `step` must follow, which brings the parameters back, with the same bits.

            loss = model(**batch).loss
            with optimizer.update_in_backward():  # the last backward of the step
                loss.backward()
            optimizer.step()

        For steps whose gradients nothing changes after backward: what is begun cannot be undone, and clipping, `GradScaler`, a second backward and whatever
        else would change the step are refused by name."""
        with self._open(resume=False).updating_in_backward():
            yield

    # torch.optim

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have gradients, and commits."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # What schedulers look at.
        self._opt_called = True
        self._state_copies.refuse_writes()
        with torch.no_grad():
            self._open(resume=False).step()
        return loss

    step = torch.compiler.disable(torch.optim.Optimizer.profile_hook_step(step))
    # PyTorch need not wrap it again, neither for hooks nor for a scheduler.
    step.hooked = step._wrapped_by_lr_sched = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim."""
        if self._run is not None:
            self._run.forget_gradients()
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim, before the optimizer has begun."""
        if self._run is not None:
            raise NotSupported("add_param_group after the optimizer has begun: its tiles have moments for the parameters of then. Add all groups before")
        torch.optim.Optimizer.add_param_group(self, param_group)

    @property
    def state(self) -> Mapping:
        """The moments of each parameter, read from tiles when somebody asks for them."""
        if self._loading:
            return {}
        if self._run is None:
            return NoStates()
        self._run.check_none_begun("optimizer.state")
        return OptimizerStates(self._run)

    @state.setter
    def state(self, value: Any) -> None:
        if self._run is not None or value:
            PreparedOptimizer.state.fset(self, value)

    def state_dict(self) -> dict[str, Any]:
        """`state_dict` of the optimizer in PyTorch, with all of this rank's moments in host memory, and the fp32 master of 16-bit parameters that have
        one, as `master_param`."""
        if self._run is not None:
            self._run.check_none_begun("optimizer.state_dict()")
            check_room(self._run.moment_bytes, "optimizer.state_dict() with all moments")
        return self._guarded(torch.optim.Optimizer.state_dict(self))

    def _load_states(self, states: dict[int, dict[str, Any]]) -> None:
        if states or self._run is not None:
            self._open(resume=False).load(states)

    def _check_loadable(self) -> None:
        """A script may load any state at any time, as with torch.optim."""


class AdamW(_Alone, torch.optim.AdamW):
    """`torch.optim.AdamW` with masters and moments in host memory or, with `directory`, in files there: on one drive, or on those of a list,
    in whose first directory the run lies. `socket` names a running daemon that has the drives instead.

    `moments` is "fp32", "bf16" or "8bit", as bitsandbytes has them. `master` is "fp32" or "bf16": "bf16" keeps no masters beside bfloat16 parameters,
    and rounds these stochastically. A step is committed each `commit_every` steps. `overlap_backward` takes gradients to tiles while
    backward makes others, from the second step on, or from the first one after `resume`. With `overlap_commit` a step returns before its tiles are on
    the drives; it is committed while the next forward and backward run. `options` has further keys of the section "offloadd" of a configuration, such as
    `resident_fraction`.

    Nothing is opened before `resume`, `load_state_dict` or the first `step`. Without `resume` they begin anew, and replace what an earlier start has
    left in the directory. With several ranks, all must make the same calls.
    """

    plain = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: Union[float, torch.Tensor] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        directory: Union[None, Directory, Sequence[Directory]] = None,
        socket: Optional[Directory] = None,
        moments: str = "fp32",
        master: str = "fp32",
        commit_every: int = 1,
        overlap_backward: bool = False,
        overlap_commit: bool = False,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        changing = {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        self._init(directory, socket, moments, master, commit_every, overlap_backward, overlap_commit, options, changing)
        # How torch would compute changes nothing here.
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        _optimizers.add(self)


class Lion(_Alone, _lion.Lion):
    """Lion with its state where `AdamW` has it: masters and one moment. The first arguments are those of `lion_pytorch.Lion`, whose state is loaded
    too, the others those of `AdamW`."""

    plain = _lion.Lion

    def __init__(
        self,
        params: Any,
        lr: Union[float, torch.Tensor] = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        directory: Union[None, Directory, Sequence[Directory]] = None,
        socket: Optional[Directory] = None,
        moments: str = "fp32",
        master: str = "fp32",
        commit_every: int = 1,
        overlap_backward: bool = False,
        overlap_commit: bool = False,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self._init(directory, socket, moments, master, commit_every, overlap_backward, overlap_commit, options, {})
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        _optimizers.add(self)


class Muon(_Alone, _muon.MuonWithAdamW):
    """`torch.optim.Muon` with its state where `AdamW` has it: masters and one momentum, in fp32. The first arguments are those of `torch.optim.Muon`,
    which needs torch 2.9, the others those of `AdamW`. A matrix that is divided over ranks is gathered for its update, and each rank computes the
    direction of all of it.

    Muon is for the matrices of blocks. A group with `use_muon=False`, as the reference implementation has it, is updated as `torch.optim.AdamW`
    does, with its `lr`, `betas`, `eps` and `weight_decay`, and committed with the same step: for embeddings, the head, biases and norms.

    `offloadd.prepare` takes it too, without the arguments that say where its state is."""

    plain = _muon.MuonWithAdamW

    def __init__(
        self,
        params: Any,
        lr: Union[float, torch.Tensor] = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Optional[str] = None,
        *,
        directory: Union[None, Directory, Sequence[Directory]] = None,
        socket: Optional[Directory] = None,
        commit_every: int = 1,
        overlap_backward: bool = False,
        overlap_commit: bool = False,
        options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self._init(directory, socket, "fp32", "fp32", commit_every, overlap_backward, overlap_commit, options, {})
        given = dict(momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        super().__init__(params, lr=lr, weight_decay=weight_decay, **given)
        _optimizers.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim, before the optimizer has begun. A group with `use_muon=False` has what `torch.optim.AdamW` has where it says nothing."""
        super().add_param_group(_muon.completed(param_group))


def _settings(directories: Sequence[Path], socket: Optional[Directory], own: Mapping[str, Any]) -> Settings:
    """The checked settings of an optimizer."""
    if socket is not None and not directories:
        raise Error("socket= says which daemon has the tiles, and directory= where the run lies: name a directory")
    for directory in directories:
        # Its parent must be there: a drive that is not mounted has none.
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise Error(f"{directory} cannot be made: {error.strerror}; make it, or name another directory") from None
    device = {"device": "nvme" if directories else "cpu", "nvme_path": list(map(str, directories))}
    place = {} if socket is None else {"socket": os.fspath(socket)}
    # Updates come with the parameters, while the next ones are read.
    kept = ("activations", "activations_bytes", "mlp_chunks", "loss_chunks")
    if ignored := {"optimizer_step", "run_dir", "units", "matmuls", "gpu_resident_fraction", *kept}.intersection(own):
        raise Error(f"options has {', '.join(sorted(ignored))}, which an optimizer alone has no use for: leave it out")
    own = {**own, **place, "optimizer_step": "deferred"}
    return settings_of({"zero_optimization": {"offload_optimizer": device}, "offloadd": own}, schedules=False)


def clip_grad_norm_(
    parameters: Union[_Alone, torch.Tensor, Iterable[torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: Optional[bool] = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for an optimizer of this module, or for parameters of one: returns the norm of all gradients, over all
    ranks, and scales them. They go to tiles once, for the norm and for the step, whose tiles have them unscaled and are multiplied by the same factor."""
    if float(norm_type) != 2.0:
        raise NotSupported(f"clip_grad_norm_ with norm_type={norm_type}: use torch.nn.utils.clip_grad_norm_")
    if isinstance(parameters, torch.optim.Optimizer):
        params = [param for group in parameters.param_groups for param in group["params"]]
    else:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_optimizer: dict[_Alone, list[torch.Tensor]] = {}
    # Where several had a parameter, the newest counts. `prepare` changes the class of one that it takes.
    alone = (one for one in _optimizers if isinstance(one, _Alone))
    made = sorted((one for one in alone if one._run is None or not one._run.closed), key=lambda one: one._number)
    of_param = {id(param): one for one in made for group in one.param_groups for param in group["params"]}
    for param in params:
        if grad_of(param, f"a parameter of shape {tuple(param.shape)}") is None:
            continue
        if id(param) not in of_param:
            raise NotSupported(
                f"a parameter of shape {tuple(param.shape)} is in no optimizer of offloadd.optim: call torch.nn.utils.clip_grad_norm_, which takes any parameters"
            )
        by_optimizer.setdefault(of_param[id(param)], []).append(param)
    runs = {one._open(resume=False): of_one for one, of_one in by_optimizer.items()}
    norm = math.sqrt(sum(run.square_sum(of_run) for run, of_run in runs.items()))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped; error_if_nonfinite=False scales them all the same")
    # As torch does.
    factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else max_norm / norm
    for run, of_run in runs.items():
        run.scale(of_run, factor)
    return torch.tensor(norm, dtype=torch.float32, device=params[0].device if params else "cpu")
