"""Tests of the Python half. They need the built extension (`make python`), torch and transformers; without them they are skipped."""

import pathlib
import signal
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

torch = pytest.importorskip("torch", reason="torch is not installed: make test-tools")
torch.set_num_threads(1)

# Tests interrupt themselves. A shell starts programs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    """What runs remember of mount points is not this user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def groups_end():
    """A process group that a test begins, as `deepspeed.zero.Init` does, ends with it: in one, other tests are other tests."""
    had = torch.distributed.is_available() and torch.distributed.is_initialized()
    yield
    if not had and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that is given back belongs to somebody else: whoever still reads it finds no numbers, or other bytes."""
    # Where the extension is not built, conftest.py is read all the same.
    from offloadd._memory import HostMemory

    plain = HostMemory.release

    def release(self, unit):
        if unit.here or unit.kept:
            unit.access.allow()
            with torch.no_grad():
                if unit.flat.is_floating_point():
                    unit.flat.fill_(float("nan"))
                else:
                    unit.flat.view(torch.uint8).fill_(0x7F)
        plain(self, unit)

    monkeypatch.setattr(HostMemory, "release", release)
