#!/usr/bin/env python3
"""Measures steps of two nodes over a rate-limited link, with a copy of the parameters on each node and without, beside the planned bound.

The bound is that of `trainer plan --network`. The nodes are network namespaces joined by a veth pair, whose rate `tc` limits in each direction; so it
needs root and iproute2, and no network. Each node has one rank on the CPU and keeps its state in host memory.

    trainer/bench/link.py --trainer target/release/trainer --rate 12.5MB/s --rate 50MB/s
"""

import argparse
import itertools
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import tempfile

RUN = """
train_micro_batch_size_per_gpu = 1
optimizer = {{ type = "AdamW", params = {{ lr = 1e-3 }} }}
[model]
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
[data]
files = ["{text}"]
[train]
steps = {steps}
seq_len = 16
run_dir = "{dir}"
device = "cpu"
threads = 1
checkpoint_every = 0
[zero_optimization]
stage = 3
offload_param = {{ device = "none" }}
offload_optimizer = {{ device = "none" }}
"""


class Nodes:
    """Two namespaces with the addresses 10.78.0.1 and 10.78.0.2."""

    def __init__(self):
        self.names = [f"offloadd-link-{os.getpid()}-{node}" for node in (0, 1)]
        self.variables = {"OFFLOADD_JOB_TOKEN": secrets.token_hex(16), "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def __enter__(self):
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        one, two = self.names
        run("ip", "-n", one, "link", "add", "eth0", "mtu", "9000", "type", "veth", "peer", "name", "eth0", "mtu", "9000", "netns", two)
        for node, name in enumerate(self.names):
            run("ip", "-n", name, "address", "add", f"10.78.0.{node + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            run("ip", "netns", "delete", name)

    def limit(self, bytes_per_s):
        for name in self.names:
            rate = f"{int(bytes_per_s * 8)}bit"
            run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128k", "limit", "16m")

    def sent_bytes(self, node):
        """Bytes that a node has sent on the link so far, headers included."""
        link = ["ip", "-n", self.names[node], "-s", "-j", "link", "show", "dev", "eth0"]
        told = subprocess.run(link, check=True, capture_output=True).stdout
        return json.loads(told)[0]["stats64"]["tx"]["bytes"]

    def start(self, node, *command):
        command = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | self.variables)


def run(*command):
    subprocess.run(command, check=True)


def bytes_per_s(text):
    units = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
    for unit, factor in units.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise argparse.ArgumentTypeError(f"{text}: expected a rate such as 12.5MB/s")


def measure(nodes, options, rate, shard, home):
    """Returns the plan, the metrics of all steps but the first two, and the bytes that a node has sent in a step."""
    text = home / "text"
    text.write_bytes(bytes(97 + i * i % 26 for i in range(100_000)))
    file = home / f"{rate:.0f}-{shard}.toml"
    out = home / f"{rate:.0f}-{shard}"
    shard = ["--set", f"offload.shard={shard}"]
    shape = {"hidden": options.hidden, "intermediate": 4 * options.hidden, "layers": options.layers}
    file.write_text(RUN.format(text=text, dir=out, steps=options.steps + 2, **shape))
    nodes.limit(rate)
    launch = [options.trainer, "launch", "--nnodes", "2", "--nproc", "1", "--rendezvous", "10.78.0.1:29400"]
    sent = nodes.sent_bytes(1)
    started = [nodes.start(node, *launch, "--node-rank", str(node), file, *shard) for node in (1, 0)]
    if any([node.wait() for node in started]):
        raise SystemExit("a node failed")
    sent = (nodes.sent_bytes(1) - sent) / (options.steps + 2)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][2:]
    plan = [options.trainer, "plan", file, *shard, "--nodes", "2", "--gpus", "1", "--network", f"{rate:.0f}B/s", "--json"]
    plan = json.loads(subprocess.run(plan, check=True, capture_output=True).stdout)
    return plan, lines, sent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, default="target/release/trainer")
    parser.add_argument("--rate", type=bytes_per_s, action="append", required=True, help="rate in each direction, for example 12.5MB/s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    options.trainer = options.trainer.resolve()
    print(
        "| link, in each direction | parameters | sent by a node in a step: planned, measured | bound | forward and backward | update | step (median) | bound / step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with Nodes() as nodes, tempfile.TemporaryDirectory() as home:
        for rate, shard in itertools.product(options.rate, ("auto", "all")):
            plan, lines, measured = measure(nodes, options, rate, shard, pathlib.Path(home))
            step_s = statistics.median(line["step_s"] for line in lines)
            compute_s = statistics.median(line["forward_s"] + line["backward_s"] for line in lines)
            update_s = statistics.median(line["update_s"] for line in lines)
            planned, bound_s = plan["step"]["network_bytes"], plan["bound"]["s"]
            held = "a copy on each node" if plan["host"]["node_copy_bytes"] else "divided over all nodes"
            sent = f"{planned / 1e6:.1f} MB, {measured / 1e6:.1f} MB"
            print(
                f"| {rate / 1e6:g} MB/s | {held} | {sent} | {bound_s:.3f} s | {compute_s:.3f} s | {update_s:.3f} s | {step_s:.3f} s | {bound_s / step_s:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
