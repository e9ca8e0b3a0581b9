"""Signals that come within a step: their handlers may raise, and what has begun is finished first."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Callable, Iterator, Optional

from ._errors import Error


class Interrupts:
    """Signals whose handlers end waits within a step: the step is finished first."""

    def __init__(self) -> None:
        self._raised: Optional[BaseException] = None

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

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Lets handlers of signals wait for the end of what is within, where nothing may be left out."""
        if threading.current_thread() is not threading.main_thread():
            # Handlers run in the main thread.
            yield
            return
        came: list[tuple[int, Any]] = []
        handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
        try:
            for number in handlers:
                signal.signal(number, lambda number, frame: came.append((number, frame)))
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
