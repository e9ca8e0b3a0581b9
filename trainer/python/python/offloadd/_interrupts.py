"""Signals that come within a step: their handlers may raise, and what has begun is finished first."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Callable, Iterator, Optional

from ._errors import Error


class _Came(BaseException):
    """A signal has come that ends a wait."""


class Interrupts:
    """Signals whose handlers end waits within a step: the step is finished first."""

    def __init__(self) -> None:
        self._raised: Optional[BaseException] = None
        # Whether a signal ends the wait that is under way.
        self._ends_wait = False

    def note(self, call: Callable[[], Any]) -> bool:
        """Makes a call. Returns whether an interrupt has ended it."""
        try:
            call()
        except Error:
            raise
        except BaseException as error:
            self._raised = error
            return True
        return False

    def repeat(self, call: Callable[[], Any]) -> None:
        """Makes a call until nothing interrupts it. What is no interrupt comes again."""
        errors = 0
        while self.note(call):
            errors += isinstance(self._raised, Exception)
            if errors > 1:
                raise self._raised

    def finish(self, call: Callable[..., Any], *args: Any) -> None:
        """Makes a call of the engine within `later` that a signal ends as soon as it waits: the engine does the rest all the same. Python looks for signals at
        calls of functions of its own, and there is none before the engine's, which must have begun."""
        self._ends_wait = True
        try:
            call(*args)
        except _Came:
            pass
        finally:
            self._ends_wait = False

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Lets handlers of signals wait for the end of what is within, where nothing may be left out."""
        if threading.current_thread() is not threading.main_thread():
            # Handlers run in the main thread.
            yield
            return
        came: list[tuple[int, Any]] = []
        handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}

        def note(number: int, frame: Any) -> None:
            came.append((number, frame))
            if self._ends_wait:
                raise _Came

        try:
            for number in handlers:
                signal.signal(number, note)
            yield
        finally:
            try:
                # The handler of Ctrl-C may raise as soon as it is back.
                for number in sorted(handlers, key=lambda number: number == signal.SIGINT):
                    signal.signal(number, handlers[number])
            finally:
                for number, frame in came:
                    self.note(lambda: handlers[number](number, frame))

    def end(self) -> None:
        """Raises the last interrupt."""
        if self._raised is not None:
            raise self._raised
