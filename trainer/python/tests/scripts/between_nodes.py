"""A rank whose node is a network namespace trains until the run fails: `between_nodes.py NAMESPACE DIRECTORY`."""

import pathlib
import sys

import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parents[1] / "python")]

from test_connections import inside  # noqa: E402
from test_nodes import one_step, prepared  # noqa: E402

namespace, directory = sys.argv[1:]
torch.set_num_threads(1)
with inside(namespace):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer, run = prepared(pathlib.Path(directory), rank, "cpu")
    with run:
        while True:
            one_step(model, optimizer, rank, 2, run.steps_done)
            if run.steps_done == 2:
                print("step 2", flush=True)
