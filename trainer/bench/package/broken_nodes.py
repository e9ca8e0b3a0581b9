#!/usr/bin/env python3
"""Breaks a training of two nodes with the Python package at random moments, again and again: the network between them, or a rank.

After each failure both nodes must end within 10 s and name the other's rank. Each start must resume at the last step that both have reported, or
one before. The losses of all steps must be those of one undisturbed run, bit for bit. Nodes are network namespaces joined by a veth pair; so it
needs root and iproute2, and no network.

    make python && trainer/bench/package/broken_nodes.py --count 50
"""

import argparse
import faulthandler
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python/python"))
WIDTH, BLOCKS, BATCH = 256, 6, 4
# Time in which both nodes must end, and after which one that hangs says where.
END_S, HANG_S = 10, 40


def rank_main(home, steps):
    """A rank: prints the step after which it resumes, and each step's loss."""
    import torch
    import torch.distributed as dist

    import offloadd

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, drive = dist.get_rank(), home / f"drive-{dist.get_rank()}"
    drive.mkdir(exist_ok=True)
    torch.manual_seed(0)
    block = lambda: torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(*(block() for _ in range(BLOCKS)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = HERE.parents[2] / "target/debug/offloadd"
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(drive)}},
        **({"offloadd": {"program": str(program)}} if program.exists() else {}),
    }
    with offloadd.prepare(model, optimizer, config, run_dir=home / "run") as run:
        print("resumed", run.steps_done, flush=True)
        while run.steps_done < steps:
            batch = torch.randn(2, BATCH, 8, WIDTH, generator=torch.Generator().manual_seed(run.steps_done))[rank]
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", run.steps_done, loss.item().hex(), flush=True)


class Nodes:
    def __init__(self):
        self.names = [f"offloadd-broken-{os.getpid()}-{node}" for node in (0, 1)]

    def __enter__(self):
        for name in self.names:
            call("ip", "netns", "add", name)
        call("ip", "-n", self.names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.names[1])
        for node, name in enumerate(self.names):
            call("ip", "-n", name, "address", "add", f"10.80.0.{node + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def link(self, state):
        call("ip", "-n", self.names[1], "link", "set", "eth0", state)

    def start(self, home, steps):
        """Both ranks, with files for what they say."""
        started = []
        for node, name in enumerate(self.names):
            places = {"MASTER_ADDR": "10.80.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": "2", "RANK": str(node)}
            places |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(steps), "--home", str(home)]
            out, errors = (open(home / f"{what}-{node}", "w") for what in ("out", "errors"))
            started.append(subprocess.Popen(command, env=os.environ | places, stdout=out, stderr=errors))
            out.close(), errors.close()
        return started


def call(*command):
    subprocess.run(command, check=True)


def said(home, node):
    """The step after which a rank has resumed, if it has, and the losses of its steps."""
    lines = [line.split() for line in (home / f"out-{node}").read_text().splitlines()]
    resumed = [int(words[1]) for words in lines if words[0] == "resumed"]
    return (resumed or [None])[0], {int(words[1]): words[2] for words in lines if words[0] == "step" and len(words) == 3}


def failed(home):
    return "a rank failed:\n" + "\n".join((home / f"errors-{node}").read_text()[-3000:] for node in (0, 1))


def whole(nodes, home, steps):
    """Trains to the end. Returns the step after which it resumed, and each rank's losses."""
    codes = [rank.wait() for rank in nodes.start(home, steps)]
    if codes != [0, 0]:
        raise SystemExit(failed(home))
    return [said(home, node) for node in (0, 1)]


def broken(nodes, home, steps, kind, after_s):
    """Trains until a failure. Returns what both ranks said, or None if they had trained to the end before."""
    ranks = nodes.start(home, steps)
    while said(home, 1)[0] is None or said(home, 0)[0] is None:
        if any(rank.poll() for rank in ranks):
            raise SystemExit(failed(home))
        time.sleep(0.05)
    time.sleep(after_s)
    if all(rank.poll() == 0 for rank in ranks):
        return None
    began = time.monotonic()
    if kind == "partition":
        nodes.link("down")
    else:
        ranks[int(kind[-1])].kill()
    while any(rank.poll() is None for rank in ranks) and time.monotonic() - began < HANG_S:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    hung = [rank for rank in ranks if rank.poll() is None]
    for rank in hung:
        rank.send_signal(signal.SIGUSR1)
        time.sleep(1)
        rank.kill()
    nodes.link("up")
    for node, rank in enumerate(ranks):
        errors = (home / f"errors-{node}").read_text()
        other = f"rank {1 - node} "
        if rank in hung or (rank.wait() != -9 and other not in errors) or seconds > END_S:
            raise SystemExit(f"{kind}: rank {node} ended after {seconds:.1f} s with {rank.poll()}:\n{errors[-6000:]}")
    print(f"{kind}: both ended after {seconds:.1f} s", flush=True)
    return [said(home, node) for node in (0, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, metavar="N", help="failures (10)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments and kinds (1)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        faulthandler.register(signal.SIGUSR1)
        return rank_main(options.home, options.rank)
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("network namespaces need root and iproute2")
    steps, choose, count = 20 * options.count, random.Random(options.seed), 0
    with Nodes() as nodes, tempfile.TemporaryDirectory() as work:
        home = pathlib.Path(work) / "broken"
        home.mkdir()
        found, done, repeated = [{}, {}], 0, 0
        for _ in range(options.count):
            kind = choose.choice(["partition", "partition", "kill of rank 0", "kill of rank 1"])
            told = broken(nodes, home, steps, kind, choose.uniform(0, 3))
            if told is None:
                break
            count += 1
            repeated += judge(told, found, done)
            done = min(max(losses, default=resumed) for resumed, losses in told)
        steps = done + 3
        told = whole(nodes, home, steps)
        repeated += judge(told, found, done)
        fresh = pathlib.Path(work) / "fresh"
        fresh.mkdir()
        if [losses for _, losses in whole(nodes, fresh, steps)] != found:
            raise SystemExit("the losses differ from those of an undisturbed run")
    print(f"{count} failures in {steps} steps, {repeated} starts repeated a step: losses equal an undisturbed run's, bit for bit")


def judge(told, found, done):
    """Adds the losses of a start to those of earlier ones. Returns whether it repeated a step."""
    for (resumed, losses), known in zip(told, found):
        if resumed not in (done - 1, done, done + 1):
            raise SystemExit(f"resumed after step {resumed}: both ranks had reported step {done}")
        if any(known.get(step, loss) != loss for step, loss in losses.items()):
            raise SystemExit(f"a repeated step has another loss: {losses}, before: {known}")
        known.update(losses)
    return told[0][0] < done


if __name__ == "__main__":
    main()
