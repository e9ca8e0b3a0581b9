"""Tables of what scripts do with another library: each habit runs with that library alone and in the ways that offloadd serves it, and must give the same
values within `TOLERANCE`, or be refused with an error that says what to do.

A script of this directory fills a table and calls `run`, which prints a JSON list for each habit and way that is not as it says.
"""

import contextlib
import gc
import io
import json
import os
import pathlib
import sys
import tempfile
import traceback
import warnings

import torch

# Largest difference of values, relative and absolute.
TOLERANCE = 1e-6


class Table:
    """Habits: functions of a `script(way, directory)`, where None is the way without offloadd."""

    def __init__(self, script, ways):
        self._script, self._ways, self._habits = script, ways, []

    def habit(self, name, only=None, **refused):
        """Decorates a habit. By the ways of `refused` it is refused with an error that has the phrase there, by the others (those of `only`, if given) its
        values are those without offloadd."""

        def note(habit):
            self._habits.append((name, habit, self._ways if only is None else only, refused))
            return habit

        return note

    def run(self):
        """Runs the habits that have one of the arguments in their names, or all of them."""
        for name, habit, ways, refused in self._habits:
            if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
                continue
            expected, failed = self._notes(habit, None) if set(ways) - set(refused) else ([], None)
            for way in ways:
                found, error = self._notes(habit, way)
                if way in refused:
                    said = "" if refused[way] in str(error) else text(error) or "is not refused"
                else:
                    said = text(failed) or text(error) or difference(expected, found)
                print(json.dumps([name, way, said]), flush=True)

    def _notes(self, habit, way):
        """What a habit notes, and its error."""
        # Accelerate collects garbage at each start of a training, which need not look at libraries.
        gc.collect()
        gc.freeze()
        here = pathlib.Path.cwd()
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            os.chdir(directory)
            stack.callback(os.chdir, here)
            torch.manual_seed(5)
            script = self._script(way, pathlib.Path(directory))
            stack.callback(script.end)
            try:
                habit(script)
                return script.notes, None
            except Exception as error:
                return script.notes, error


class Script:
    """What a habit works with."""

    def __init__(self, way, directory):
        self.way, self.directory, self.notes = way, directory, []

    def note(self, *values):
        """Compares values with those without offloadd."""
        self.notes += [copied(one) for one in values]

    def end(self):
        pass


def text(error):
    """An error with the lines that raised it; empty for None."""
    return "" if error is None else "".join(traceback.format_exception(error))


def copied(value):
    """The value as it is now."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, (list, tuple)) else value


def difference(expected, found, where="notes"):
    """The first difference of two values, empty if there is none."""
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        return "" if abs(expected - found) <= TOLERANCE * (1 + abs(expected)) else f"{where}: {found}, not {expected}"
    if type(expected) is not type(found):
        return f"{where}: {found!r}, not {expected!r}"
    if isinstance(expected, torch.Tensor):
        if expected.shape == found.shape and expected.dtype == found.dtype and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return ""
        return f"{where}: {found.flatten()[:3].tolist()}, not {expected.flatten()[:3].tolist()}"
    if isinstance(expected, (list, dict)):
        keys = list(range(len(expected))) if isinstance(expected, list) else list(expected)
        others = list(range(len(found))) if isinstance(found, list) else list(found)
        if keys != others:
            return f"{where}: has {others}, not {keys}"
        return next(filter(None, (difference(expected[key], found[key], f"{where}[{key!r}]") for key in keys)), "")
    return "" if expected == found else f"{where}: {found!r}, not {expected!r}"
