"""Answers `import deepspeed` in this process with `offloadd._deepspeed`, of which nothing is installed, and changes modules of others
when they are imported.

Only the standard library is imported here: with `offloadd-run` this file runs at the start of each interpreter.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys

NAME = "deepspeed"

# Version of the interface, which Hugging Face's libraries compare with what they need.
VERSION = "0.18.2"

# Set by `offloadd-run` for the processes it starts.
VARIABLE = "OFFLOADD_AS_DEEPSPEED"

# Lightning is the same under two names.
_LIGHTNING = ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed")

# Modules of others that functions of ours change: by their name, our module and the function.
_PATCHES = {
    "accelerate.accelerator": ("offloadd._accelerate", "patch"),
    "accelerate.state": ("offloadd._trainer", "patch_state"),
    **dict.fromkeys(_LIGHTNING, ("offloadd.lightning", "patch_strategy")),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("offloadd._wrappers", "patch_fsdp"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("offloadd._wrappers", "patch_fsdp"),
    "transformers.trainer": ("offloadd._trainer", "patch_trainer"),
    "transformers.training_args": ("offloadd._trainer", "patch_arguments"),
}


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a package that is not installed."""

    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return os.path.join(os.path.dirname(__file__), path)


class _DeepspeedLoader(importlib.abc.Loader):
    """Makes a module of the names that `offloadd._deepspeed` gives it."""

    def create_module(self, spec):
        return importlib.import_module("offloadd._deepspeed").Answer(spec.name)

    def exec_module(self, module):
        module.fill()


def _patch(name):
    where, function = _PATCHES[name]
    getattr(importlib.import_module(where), function)(sys.modules[name])


class _Patching(importlib.abc.Loader):
    """Another loader, and a function of ours after it."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _patch(module.__name__)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class Patcher(importlib.abc.MetaPathFinder):
    """Finds the modules named in it as the other finders do, and patches them when they are imported."""

    def __init__(self):
        self.names = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self.names.discard(fullname)
                spec.loader = _Patching(spec.loader)
                return spec
        return None


_patcher = Patcher()
_patched = set()


def patch(*names):
    """Changes these modules of others once: now if they are imported, otherwise as soon as they are."""
    for name in names:
        if name in _patched:
            continue
        _patched.add(name)
        if name in sys.modules:
            _patch(name)
        else:
            _patcher.names.add(name)
    if _patcher.names and _patcher not in sys.meta_path:
        sys.meta_path.insert(0, _patcher)


class Finder(importlib.abc.MetaPathFinder):
    """Finds `deepspeed`, its submodules and its metadata."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != NAME and not fullname.startswith(NAME + "."):
            return None
        if fullname != NAME:
            importlib.import_module("offloadd._deepspeed").check_module(fullname)
        return importlib.machinery.ModuleSpec(fullname, _DeepspeedLoader(), is_package=True)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        return [_Distribution()] if context.name in (None, NAME) else []


def answers():
    """Whether `import deepspeed` is answered here."""
    return any(isinstance(one, Finder) for one in sys.meta_path)


def install():
    """Puts the finder before all others, once. Returns why it cannot, or None."""
    if answers():
        return None
    if NAME in sys.modules:
        return "deepspeed is imported already: import offloadd.as_deepspeed before it"
    for name in ("accelerate", "transformers"):
        if name in sys.modules:
            return f"{name} is imported already and has looked for deepspeed: import offloadd.as_deepspeed before it"
    sys.meta_path.insert(0, Finder())
    patch("accelerate.accelerator", "accelerate.state", "transformers.trainer", "transformers.training_args", *_LIGHTNING)
    return None
