"""Refuses handlers of signals that come back to what they have interrupted: a unit that is half here, or gradients that are half gone.

Python runs a handler in the main thread between any two instructions, those of the engine too. Between such pieces of work a handler may use the model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from types import FrameType
from typing import Any, Callable, Optional, TypeVar

import torch

from ._errors import NotSupported

F = TypeVar("F", bound=Callable[..., Any])

# Code that the engine calls in such work, and that calls it. A handler of a script's own is elsewhere.
_OWN = (os.path.dirname(__file__), os.path.dirname(torch.__file__), contextlib.__file__, "<frozen ")

# The outermost piece of work that is under way in the main thread.
_under_way: Optional[FrameType] = None


def not_reentered(work: F) -> F:
    """Marks a function as work that nobody may interrupt to begin such work."""

    @functools.wraps(work)
    def alone(*args: Any, **kwargs: Any) -> Any:
        global _under_way
        if threading.get_ident() != threading.main_thread().ident:
            # Handlers run in the main thread.
            return work(*args, **kwargs)
        if _is_within(sys._getframe(1)):
            return work(*args, **kwargs)
        _under_way = sys._getframe()
        try:
            return work(*args, **kwargs)
        finally:
            _under_way = None

    return alone


def _is_within(frame: Optional[FrameType]) -> bool:
    """Whether the work that is under way has called the code at `frame`. Refuses what has interrupted it."""
    if _under_way is None:
        return False
    other = None
    while frame is not None and frame is not _under_way:
        other = other if frame.f_code.co_filename.startswith(_OWN) else frame
        frame = frame.f_back
    if frame is None:
        # Work that an interrupt has ended before it was noted.
        return False
    if other is not None:
        raise NotSupported(
            f"{other.f_code.co_name} ({other.f_code.co_filename}:{other.f_lineno}) uses the model or its optimizer, and has interrupted offloadd while it moved "
            "weights or gradients, as handlers of signals may: let the handler only set a flag, which the training loop looks at between steps"
        )
    return True
