"""Runs at the start of each interpreter below `offloadd-run`: `import deepspeed` is answered by offloadd there, and an error of offloadd's
ends in one message.

It is found because `offloadd-run` puts this directory first in PYTHONPATH. Another sitecustomize runs after it.
"""

import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _others():
    """The next sitecustomize in the path."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.origin:
        _load("sitecustomize", spec.origin)


# By its path: the package may lie in a directory that a script adds later.
_finder = _load("offloadd._finder", os.path.join(os.path.dirname(_here), "_finder.py"))
if os.environ.get(_finder.VARIABLE) == "1":
    _finder.install()
    _load("offloadd._ending", os.path.join(os.path.dirname(_here), "_ending.py")).install()
_others()
