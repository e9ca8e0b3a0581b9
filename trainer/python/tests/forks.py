"""Scripts that start without importing PyTorch again: one process imports it, and forks for each start.

`start` behaves as `subprocess.Popen` of `python SCRIPT ARGS...` as far as the tests need it. The server forks while it has a
single thread, and the fork runs the script as `python` does: arguments, environment, traceback, `atexit`, exit code.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pathlib
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback

HERE = pathlib.Path(__file__).resolve().parent
# A script that runs longer is killed.
TIMEOUT_S = 300

# Libraries that start threads when they are imported: those would not live through a fork.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Server:
    """The process that forks. It loads `libraries` before torch."""

    def __init__(self, environment=(), libraries=()):
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, *map(str, libraries)]
        environment = {**os.environ, **_ONE_THREAD, **dict(environment)}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, env=environment)
        theirs.close()
        atexit.register(self._end)

    def start(self, *args, environment=(), imports=()):
        """Starts `python ARGS...`; `imports` names modules beside torch that later starts find imported."""
        stdout, stderr, status = os.pipe(), os.pipe(), os.pipe()
        theirs = [end for _, end in (stdout, stderr, status)]
        request = {"args": [str(arg) for arg in args], "environment": {**os.environ, **dict(environment)}, "imports": imports}
        socket.send_fds(self._requests, [json.dumps(request).encode()], theirs)
        for end in theirs:
            os.close(end)
        return Script(stdout[0], stderr[0], status[0])

    def _end(self):
        self._requests.close()
        self._process.wait()


class Script:
    """A script that runs: `pid`, its outputs, and the `returncode` that `communicate` and `wait` leave."""

    def __init__(self, stdout, stderr, status):
        self.stdout, self.stderr, self._status = open(stdout), open(stderr), open(status)
        self.returncode = None
        started = self._status.readline()
        assert started, "the server of forks has ended: its error stands in this test's captured stderr"
        self.pid = int(started)
        self._timer = threading.Timer(TIMEOUT_S, self.kill)
        self._timer.daemon = True
        self._timer.start()

    def kill(self):
        """Ends the script at once, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def has_ended(self):
        return self.returncode is not None or bool(select.select([self._status], [], [], 0)[0])

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self._status.readline())
            self._timer.cancel()
        return self.returncode

    def communicate(self):
        """Returns the rest of both outputs, when the script has ended."""
        errors = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        out = self.stdout.read()
        reader.join()
        self.wait()
        return out, errors[0]


@functools.cache
def _server():
    return Server()


def start(*args, **more):
    """Starts a script on the server that all tests share."""
    return _server().start(*args, **more)


def _serve(requests):
    """Forks for each request. Returns, in the fork, the request and where its outputs go."""
    # The kernel forgets the forks that wait for a script.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, ends, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            sys.exit(0)
        request = json.loads(request)
        for name in request["imports"]:
            importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread: see _ONE_THREAD"
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            script = os.fork()
            if script == 0:
                return request, ends
            with open(ends[2], "w") as status:
                print(script, file=status, flush=True)
                print(os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]), file=status, flush=True)
                os._exit(0)
        for end in ends:
            os.close(end)


def _become(request, ends):
    """Runs the script of a request and ends the process. What the script made is dropped; the server's modules are not taken down,
    which would take two seconds."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(ends[0], 1)
    os.dup2(ends[1], 2)
    for end in ends:
        os.close(end)
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    # The pool of threads is made again after a fork by whoever asks first; two threads of the autograd engine at once abort.
    torch.set_num_threads(torch.get_num_threads())
    sys.argv = request["args"]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    for library in sys.argv[1:]:
        ctypes.CDLL(library)
    sys.path.insert(1, str(HERE.parent / "python"))
    # The second is imported by the first optimizer that is made.
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401

    import offloadd._run  # noqa: F401

    gc.freeze()
    _become(*_serve(socket.socket(fileno=os.dup(0))))
