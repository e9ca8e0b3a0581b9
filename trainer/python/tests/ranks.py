"""Ranks as forks of the process that has imported PyTorch."""

import os
import pathlib
import pickle
import sys
import time
import traceback

import forks


class Ended(Exception):
    """A rank ended otherwise than by returning: with this exit code."""


def on_ranks(count, store, work, *args, nodes=1, start=forks.start):
    """The results of `work(rank, count, *args)` on each of `count` ranks, or the exception it raised, or `Ended`. `store` is a file by which
    they find each other. `work` is a function of a module of tests; `start` starts this file. `nodes` has the ranks of each node, or is
    their number: all but the last have one rank then."""
    sizes = nodes if isinstance(nodes, tuple) else (*(1,) * (nodes - 1), count - nodes + 1)
    result_of = [pathlib.Path(f"{store}.{rank}") for rank in range(count)]
    call = pickle.dumps((work, args)).hex()
    scripts = [
        start(
            __file__, store, result, call,
            environment=_place(rank, sizes),
            imports=("ranks", work.__module__),
        )
        for rank, result in enumerate(result_of)
    ]  # fmt: skip
    return [_result(script, result) for script, result in zip(scripts, result_of)]


def _place(rank, sizes):
    local = rank
    for size in sizes:
        if local < size:
            break
        local -= size
    values = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": sum(sizes), "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in values.items()}


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
        if os.environ["LOCAL_WORLD_SIZE"] == str(count):
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        else:
            dist.init_process_group("gloo", store=_over_tcp(dist, pathlib.Path(store), rank), rank=rank, world_size=count)
        found = work(rank, count, *args)
    except Exception as error:
        traceback.print_exc()
        found = error
    pathlib.Path(result).write_bytes(pickle.dumps(found))


def _over_tcp(dist, file, rank):
    """A store as several nodes have it; `file` tells its port."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), is_master=False, wait_for_workers=False)


if __name__ == "__main__":
    _run(*sys.argv[1:])
