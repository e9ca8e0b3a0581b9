#!/usr/bin/env python3
"""Trains on two nodes that are network namespaces of one machine with two GPUs, and compares with one node that has both, bit for bit.

    trainer/bench/nodes_gpu.py --rate 1GB/s package native

Each node has one GPU, and NCCL connects them over sockets as it does two machines. The native trainer runs with its state in host memory
and on drives, with a copy of the parameters on each node and without, and with the link limited to each --rate beside the bound; the
Python package with its state in host memory and on drives. Needs root, iproute2, torch with CUDA and transformers, the extension (`make
python`), and the programs in --bin.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

import link

HERE = pathlib.Path(__file__).resolve().parent

RUN = """
train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = {accumulate}
gradient_clipping = 1.0
optimizer = {{ type = "AdamW", params = {{ lr = 1e-3 }} }}
bf16.enabled = true
offload.shard = "{shard}"
[model]
hidden_size = 1024
intermediate_size = 2816
num_hidden_layers = {layers}
num_attention_heads = 8
num_key_value_heads = 8
[data]
files = ["{text}"]
[train]
steps = 8
seq_len = 512
log_every = 1
run_dir = "{dir}/run"
checkpoint_every = 0
[zero_optimization]
stage = 3
offload_param = {{ {device} }}
offload_optimizer = {{ {device} }}
"""

# Tier, order of updates, type and shard of the Python package's runs.
PACKAGE_CASES = (
    ("cpu", "immediate", "float32", "auto"), ("cpu", "deferred", "bfloat16", "auto"), ("cpu", "deferred", "bfloat16", "all"),
    ("nvme", "deferred", "bfloat16", "auto"),
)  # fmt: skip

# A run's time, with its start.
TIMEOUT_S = 150


def ended(processes, logs, what):
    """Waits for processes of a run; its failure ends this script with the logs' ends."""
    try:
        failed = [process.wait(timeout=TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        failed = [True]
    if any(failed):
        for process in processes:
            process.kill()
        raise SystemExit(f"{what} failed:\n" + "\n".join(log.read_text()[-1500:] for log in logs))


def on_node(nodes, node, command, log, **variables):
    """Starts a command on a node that sees the GPU of its number."""
    apart = {"CUDA_VISIBLE_DEVICES": str(node), "NCCL_HOSTID": f"node{node}", "NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "eth0"}
    env = os.environ | nodes.variables | apart | variables
    return subprocess.Popen(["ip", "netns", "exec", nodes.names[node], *map(str, command)], stdout=open(log, "w"), stderr=subprocess.STDOUT, env=env)


class Native:
    """Runs of the native trainer in one directory."""

    def __init__(self, args):
        self.trainer, self.out, self.shape = args.bin / "trainer", args.out, {"accumulate": args.accumulate, "layers": args.layers}
        self.text = args.out / "text"
        self.text.write_bytes(b"".join(path.read_bytes() for path in sorted(HERE.parent.glob("src/**/*.rs"))))

    def train(self, name, tier, shard="auto", nodes=None):
        """The metrics of each step."""
        directory = self.out / name
        directory.mkdir()

        def write(of):
            drive = directory / of
            drive.mkdir()
            device = f'device = "{tier}"' + (f', nvme_path = "{drive}"' if tier == "nvme" else "")
            file = directory / f"{of}.toml"
            file.write_text(RUN.format(text=self.text, dir=directory, device=device, shard=shard, **self.shape))
            return file

        if nodes is None:
            log = directory / "log"
            command = [self.trainer, "launch", "--nproc", "2", write("node0")]
            ended([subprocess.Popen(list(map(str, command)), stdout=open(log, "w"), stderr=subprocess.STDOUT)], [log], name)
        else:
            launch = [self.trainer, "launch", "--nnodes", "2", "--nproc", "1", "--rendezvous", "10.78.0.1:29400", "--node-rank"]
            logs = [directory / f"log{node}" for node in (0, 1)]
            ended([on_node(nodes, node, [*launch, node, write(f"node{node}")], logs[node]) for node in (1, 0)], logs, name)
        return [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]

    def bound_s(self, name, rate):
        """The network's term of the bound on two nodes."""
        plan = [self.trainer, "plan", self.out / name / "node0.toml", "--nodes", "2", "--gpus", "1", "--network", f"{rate:.0f}B/s", "--json"]
        return json.loads(subprocess.run(list(map(str, plan)), check=True, capture_output=True).stdout)["bound"]["network_s"]


def native(args, nodes):
    runs = Native(args)
    results = lambda lines: [(line["loss"], line["grad_norm"]) for line in lines]
    step_s = lambda lines: statistics.median(line["step_s"] for line in lines[3:])
    expected = runs.train("one", "cpu")
    print(f"native, one node with two GPUs: {step_s(expected):.3f} s a step", flush=True)
    for tier, shard, rate in [
        ("cpu", "auto", 0),
        ("cpu", "all", 0),
        ("nvme", "auto", 0),
        *(("cpu", shard, rate) for rate in args.rate for shard in ("auto", "all")),
    ]:
        if rate:
            nodes.limit(rate)
        name = f"two-{tier}-{shard}-{rate:.0f}"
        found = runs.train(name, tier, shard, nodes)
        same = "same bits" if results(found) == results(expected) else f"OTHER BITS: {results(found)[:2]} and {results(expected)[:2]}"
        bound = f", {rate / 1e9:g} GB/s: bound of the network {runs.bound_s(name, rate):.3f} s" if rate else ""
        print(f"native, two nodes, {tier}, shard {shard}{bound}: {step_s(found):.3f} s a step, {same}", flush=True)


def package(args, nodes):
    started = lambda rank, where: [sys.executable, __file__, "--out", args.out, "--bin", args.bin, "--rank-of", where]
    of = lambda rank, local: {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local), "MASTER_PORT": "29655"}
    logs = [args.out / f"one-{rank}.log" for rank in (0, 1)]
    one = [
        subprocess.Popen(list(map(str, started(rank, "one"))), stdout=open(logs[rank], "w"), stderr=subprocess.STDOUT,
                         env=os.environ | of(rank, 2) | {"MASTER_ADDR": "127.0.0.1"})
        for rank in (0, 1)
    ]  # fmt: skip
    ended(one, logs, "the package on one node")
    logs = [args.out / f"two-{rank}.log" for rank in (0, 1)]
    ended([on_node(nodes, rank, started(rank, "two"), logs[rank], MASTER_ADDR="10.78.0.1", **of(rank, 1)) for rank in (0, 1)], logs, "the package on two nodes")
    read = lambda where, rank: json.loads((args.out / f"{where}-{rank}.json").read_text())
    for index, case in enumerate(PACKAGE_CASES):
        pairs = [(read("one", rank)[index], read("two", rank)[index]) for rank in (0, 1)]
        results = lambda run: [run[key] for key in ("losses", "norms", "digest")]
        same = all(results(one) == results(two) for one, two in pairs)
        copies = "a copy on each node" if pairs[0][1]["node_copies"] else "no copies"
        print(f"package, two nodes, {', '.join(case)}: {copies}, {'same bits' if same else f'OTHER BITS: {pairs}'}", flush=True)


def rank_of(args):
    """One rank of the package's runs: losses, weights, and whether the node keeps a copy."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.path[:0] = [str(HERE / "package"), str(HERE.parent / "python/python")]
    import gpu_check
    import torch

    torch.use_deterministic_algorithms(True)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    checks = gpu_check.Checks(args.out, args.bin, "cuda")
    found = [
        checks.batches(rank, 2, f"{args.rank_of}-{index}", tier, step, 0.0, "auto", dtype, halves=True, shard=shard)
        for index, (tier, step, dtype, shard) in enumerate(PACKAGE_CASES)
    ]
    (args.out / f"{args.rank_of}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "target/release", help="where trainer and offloadd are")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/nodes-gpu"), help="where runs and logs go; it is emptied")
    parser.add_argument("--rate", type=link.bytes_per_s, action="append", default=[], help="of the link in each direction, for example 1GB/s")
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="micro-batches of a step of the native trainer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="blocks of its model (default: %(default)s)")
    parser.add_argument("parts", nargs="*", metavar="PART", help="package, native; both if none is named")
    parser.add_argument("--rank-of", choices=["one", "two"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.bin, args.out = args.bin.resolve(), args.out.resolve()
    if args.rank_of:
        return rank_of(args)
    parts = {"package": package, "native": native}
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(unknown)}")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    with link.Nodes() as nodes:
        for name in args.parts or parts:
            parts[name](args, nodes)


if __name__ == "__main__":
    main()
