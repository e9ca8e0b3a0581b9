"""`offloadd-run`: runs a script, or a command that starts scripts, in processes where offloadd answers to `import deepspeed`."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Optional, Sequence

from . import _finder

_EXAMPLES = """\
examples:
  offloadd-run train.py --model_name_or_path gpt2 --output_dir out --deepspeed ds_config.json
  offloadd-run --nproc 2 train.py --deepspeed ds_config.json
  offloadd-run -- accelerate launch --config_file zero3.yaml sft.py
  offloadd-run -- torchrun --nproc-per-node 2 train.py

Nothing named deepspeed is installed or needed. What the interface has: docs/pytorch.md, "Scripts that use DeepSpeed".
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Becomes the script or the command; returns 2 for wrong arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="offloadd-run",
        usage="offloadd-run [--nproc N] SCRIPT [ARGUMENT ...]\n       offloadd-run -- COMMAND [ARGUMENT ...]",
        description="Runs a script that uses DeepSpeed with offloadd in its place.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to start on this machine (1)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a Python script and its arguments")
    if given[:1] == ["--"]:
        command = given[1:]
        if not command:
            parser.error("name a command after --, such as accelerate launch train.py")
        return _become(command, {})
    options = parser.parse_args(given)
    if not options.rest:
        parser.error("name a script, or a command after --")
    script, *rest = options.rest
    if options.nproc < 1:
        parser.error(f"--nproc {options.nproc}: must be at least 1")
    if not Path(script).is_file():
        why = f"for a command write: offloadd-run -- {script} ..." if shutil.which(script) else "no such file"
        parser.error(f"{script}: {why}")
    if options.nproc == 1:
        return _become([sys.executable, script, *rest], _alone())
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc)]
    return _become([sys.executable, *ranks, script, *rest], {})


def _become(command: list[str], more: dict[str, str]) -> int:
    before = os.environ.get("PYTHONPATH")
    hook = str(Path(__file__).with_name("_site"))
    paths = hook if not before else f"{hook}{os.pathsep}{before}"
    environment = {**os.environ, **more, "PYTHONPATH": paths, _finder.VARIABLE: "1"}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"offloadd-run: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 2


def _alone() -> dict[str, str]:
    """The environment that a launcher gives to the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


if __name__ == "__main__":
    sys.exit(main())
