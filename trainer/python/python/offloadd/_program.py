"""The console scripts `offloadd`, `bench-io` and `trainer`: programs that the wheel brings."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NoReturn, Optional

BIN = Path(__file__).with_name("bin")

# PyTorch's C++ interface changes with each version.
TRAINERS_TORCH = "2.11"


def offloadd() -> NoReturn:
    """Becomes the daemon's program."""
    _become("offloadd")


def bench_io() -> NoReturn:
    """Becomes `bench-io`."""
    _become("bench-io")


def trainer() -> NoReturn:
    """Becomes `trainer`, which finds its libraries in the installed torch."""
    torch = _torch()
    if torch is None:
        sys.exit(f"trainer: torch is not installed in this Python: pip install 'torch=={TRAINERS_TORCH}.*'")
    version = _version(torch)
    if not version.startswith(f"{TRAINERS_TORCH}."):
        sys.exit(
            f"trainer: linked with torch {TRAINERS_TORCH}, and torch {version} is installed in {torch}: pip install "
            f"'torch=={TRAINERS_TORCH}.*' in an environment of its own, or train from Python, which works with torch {version}"
        )
    paths = [str(torch / "lib"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    _become("trainer")


def _become(name: str) -> NoReturn:
    program = BIN / name
    try:
        os.execv(program, [str(program), *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: {program} cannot be started: {error.strerror}")


def _torch() -> Optional[Path]:
    """The directory of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None


def _version(torch: Path) -> str:
    found = re.search(r"__version__ = ['\"](.+?)['\"]", (torch / "version.py").read_text())
    return found[1] if found else "of unknown version"
