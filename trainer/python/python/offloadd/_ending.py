"""The end of a process below `offloadd-run`: an error of offloadd's is one message, and the exit status says whose error it was.

Only the standard library is imported here: this file runs at the start of each interpreter.
"""

import atexit
import os
import signal
import sys
import sysconfig

# Exit status of a process that ended with an error of offloadd's. An error of the script's own has Python's, 1.
STATUS = 3

# Directories of code that the person who reads the message has not written.
_NOT_THE_SCRIPT = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
_NOT_THE_SCRIPT += (os.path.join(os.path.dirname(os.path.abspath(__file__)), ""), "<")

# Packages also lie in directories of these names elsewhere: the user's, the system's, those of another environment.
_OF_PACKAGES = ("site-packages", "dist-packages")

_ends_with_our_error = False


def install():
    """Changes how an exception that nobody catches ends this process."""
    plain = sys.excepthook

    def hook(kind, error, trace):
        global _ends_with_our_error
        if _is_ours(error):
            sys.stderr.write(f"offloadd: {error}\n{_where(trace)}")
        elif not _ended_below(error, trace):
            plain(kind, error, trace)
            return
        _ends_with_our_error = True

    sys.excepthook = hook
    # The first to be registered is the last to run.
    atexit.register(_end)


def _end():
    if _ends_with_our_error:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS)


def _is_ours(error):
    errors = sys.modules.get("offloadd._errors")
    return errors is not None and isinstance(error, errors.Error)


def _where(trace):
    """The innermost line of the script's own code."""
    found = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_NOT_THE_SCRIPT) and not set(name.split(os.sep)).intersection(_OF_PACKAGES):
            found = f"  in {name}, line {trace.tb_lineno}\n"
        trace = trace.tb_next
    return found


def _ended_below(error, trace):
    """Whether a launcher says by `error` that the processes it started have all ended with errors of offloadd's, which they have told."""
    name = type(error).__name__
    if name == "ChildFailedError":
        # After the first one torchrun ends the others.
        return {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM} == {STATUS}
    while trace.tb_next is not None:
        trace = trace.tb_next
    launcher = trace.tb_frame.f_globals.get("__name__", "").startswith("accelerate.commands.")
    return launcher and name == "CalledProcessError" and error.returncode == STATUS
