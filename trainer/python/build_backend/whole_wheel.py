"""Builds the wheel for pip (PEP 517) as `make wheel` does: with the package and all programs."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel in `wheel_directory` and returns its name. `PROFILE=dev` in the environment compiles sooner."""
    wheels = pathlib.Path(wheel_directory).absolute()
    before = set(wheels.glob("*.whl"))
    make = ["make", "-C", str(ROOT), "wheel", f"PYTHON={sys.executable}", f"WHEELS={wheels}", "MATURIN=maturin"]
    # In pip's build environment `python3` imports no torch. make fetches what the programs are linked with; they start with the
    # libraries of the torch that is installed beside the package.
    environment = {name: value for name, value in os.environ.items() if name != "LIBTORCH_USE_PYTORCH"}
    # pip shows standard output only if the build fails.
    try:
        ended = subprocess.run(make, env={**environment, "MAKEFLAGS": ""}).returncode
    except FileNotFoundError:
        sys.exit("building offloadd needs make, a C++ compiler and Rust (https://rustup.rs): make was not found")
    if ended != 0:
        sys.exit(f"`{' '.join(make)}` failed with status {ended}: its output is above")
    (wheel,) = set(wheels.glob("*.whl")) - before
    return wheel.name
