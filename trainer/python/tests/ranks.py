"""Ranks as forks of the process that has imported PyTorch."""

import os
import pathlib
import pickle
import sys
import traceback

import forks


class Ended(Exception):
    """A rank ended otherwise than by returning: with this exit code."""


def on_ranks(count, store, work, *args, start=forks.start):
    """The results of `work(rank, count, *args)` on each of `count` ranks, or the exception it raised, or `Ended`. `store` is a file by which
    they find each other. `work` is a function of a module of tests; `start` starts this file."""
    result_of = [pathlib.Path(f"{store}.{rank}") for rank in range(count)]
    call = pickle.dumps((work, args)).hex()
    scripts = [
        start(
            __file__, store, result, call,
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
            imports=("ranks", work.__module__),
        )
        for rank, result in enumerate(result_of)
    ]  # fmt: skip
    return [_result(script, result) for script, result in zip(scripts, result_of)]


def _result(script, result):
    _, errors = script.communicate()
    sys.stderr.write(errors)
    return pickle.loads(result.read_bytes()) if result.exists() else Ended(script.returncode)


def _run(store, result, call):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    work, args = pickle.loads(bytes.fromhex(call))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        found = work(rank, count, *args)
    except Exception as error:
        traceback.print_exc()
        found = error
    pathlib.Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _run(*sys.argv[1:])
