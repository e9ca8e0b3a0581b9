"""Rate-limited drives for the table's rows: created, entered and destroyed by `bench-io testdrives`, whose help says how exact they are.

`program` is where bench-io lies; table.py sets it from --bin.
"""

import json
import pathlib
import re
import subprocess

program = pathlib.Path(__file__).resolve().parents[2] / "target/release/bench-io"


class DriveError(Exception):
    """What could not be done, and what a person can do about it."""


UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def number(text):
    """Bytes of "96GiB", or bytes a second of "6.2GB/s"."""
    found = re.fullmatch(r"([0-9.]+) *([KMGT]?i?B?)(?:/s)?", text)
    try:
        return int(float(found[1]) * UNITS[found[2]])
    except (TypeError, KeyError, ValueError):
        raise DriveError(f"{text}: expected a size such as 96GiB or a rate such as 620MB/s") from None


def bench_io(*words):
    """What bench-io prints; its complaint is the error."""
    try:
        done = subprocess.run([str(program), *map(str, words)], capture_output=True, text=True)
    except OSError as error:
        raise DriveError(f"{program}: {error}; `make build` makes it") from None
    if done.returncode != 0:
        raise DriveError(done.stderr.strip() or f"{program}: status {done.returncode}")
    return done.stdout


def create(count, size_bytes, read_bps, write_bps, raid0=False, loop_devices=1):
    """Makes the drives. Returns their directories, one for all with `raid0`; on failure nothing is left."""
    words = ["--loop-devices", loop_devices, *(["--raid0"] if raid0 else [])]
    try:
        return bench_io("testdrives", "create", count, size_bytes, read_bps, write_bps, *words).split()
    except DriveError:
        raise
    except BaseException:
        # We are stopped, and it with us, in the middle.
        subprocess.run([str(program), "testdrives", "destroy"], capture_output=True)
        raise


def read_state():
    """What `create` made: its directories, devices, and the limit of each."""
    sets = json.loads(bench_io("testdrives", "show", "--json"))
    return next(one["state"] for one in sets if one["name"] == "")


def enter(command):
    """`command` as a command that runs under the drives' limits, with everything it starts."""
    return [str(program), "testdrives", "exec", "--", *map(str, command)]


def destroy():
    """Destroys what `create` made."""
    bench_io("testdrives", "destroy")
