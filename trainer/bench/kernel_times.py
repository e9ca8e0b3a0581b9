#!/usr/bin/env python3
"""Shows how long each class of GPU kernels takes in a step of any program: the program runs unchanged, and CUPTI records its kernels.

    trainer/bench/kernel_times.py -- target/release/trainer train run.toml
    trainer/bench/kernel_times.py -- python3 trainer/bench/plain_pytorch.py --steps 8

A step is the time from one loss kernel to that of the next step; the step of median length among the later half is shown. Needs gcc, and CUPTI
with its headers, which torch's wheels for CUDA and NVIDIA's toolkit bring. Recording costs about 1 % of a step. A program whose end takes long may be
ended by `timeout -s KILL 60` before it.
"""

import argparse
import collections
import glob
import os
import pathlib
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

# Classes of kernels by their names; the first that matches.
CLASSES = {
    "copies to the GPU": r"^copy to GPU",
    "copies from the GPU": r"^copy from GPU",
    "copies and fills within the GPU": r"^copy$|^fill$|direct_copy|CatArray",
    "attention": r"cudnn|flash|fmha|attention|mha_",
    "products": r"gemm|cutlass|nvjet|xmma|gemv|splitK",
    "loss": r"cross_entropy|softmax|nll_loss",
    "optimizer and clipping": r"adam|multi_tensor|square|lp_norm|add_chunks",
    "norms": r"rms_norm|sum_parts|layer_norm|rsqrt|norm",
    "positions": r"rotary|_cos|_sin|fused_.*cat",
    "gated activation": r"gated|silu",
}
# How many of the longest gaps to show.
GAPS = 8
REST = "other elementwise kernels"
LOSS = re.compile(CLASSES["loss"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=25, help="how many kernels to list")
    parser.add_argument("--out", type=pathlib.Path, help="where to put what is printed, too")
    parser.add_argument("command", nargs="+", help="the program, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prefix = os.path.join(directory, "times")
        env = {**os.environ, "CUDA_INJECTION64_PATH": build(directory), "KERNEL_TIMES_OUT": prefix}
        status = subprocess.run(args.command, env=env).returncode
        records = max((read(path) for path in glob.glob(f"{prefix}.*")), key=len, default=[])
    steps = steps_of(records)
    if len(steps) < 2:
        sys.exit(f"the program ended with status {status}, and {len(steps)} steps were recorded: two are needed")
    text = "\n".join(report(records, steps, args.top))
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def build(directory):
    """Compiles the library that records, and returns its path."""
    roots = [*glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "*")), "/usr/local/cuda/extras/CUPTI", "/usr/local/cuda"]
    includes = [f"-I{path}" for root in roots if os.path.isdir(path := os.path.join(root, "include"))]
    found = [path for root in roots for path in sorted(glob.glob(os.path.join(root, "lib*", "libcupti.so*")))]
    if not found:
        sys.exit(f"no libcupti.so in {', '.join(roots)}: install the package nvidia-cuda-cupti of pip")
    library = os.path.join(directory, "record.so")
    linked = [found[0], f"-Wl,-rpath,{os.path.dirname(found[0])}"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", *includes, "-o", library, str(HERE / "kernel_times" / "record.c"), *linked], check=True)
    return library


def read(path):
    """Returns [(begin, end, name)] of a process, in seconds and in order."""
    records = []
    with open(path) as lines:
        for line in lines:
            words = line.rstrip("\n").split(" ", 3)
            # The last line of a program that was killed may be cut.
            if len(words) == 4:
                records.append((int(words[0]) * 1e-9, int(words[1]) * 1e-9, words[3]))
    return sorted(records)


def steps_of(records):
    """Returns (begin, end) of the steps: from the first loss kernel of each to that of the next."""
    begins = [begin for begin, _, name in records if LOSS.search(name)]
    gaps = [after - before for before, after in zip(begins, begins[1:])]
    # A head in several chunks has several loss kernels a step. The first steps may wait for a compiler.
    least = max(gaps[len(gaps) // 2 :], default=0.0) / 3
    firsts = begins[:1] + [after for after, gap in zip(begins[1:], gaps) if gap > least]
    return list(zip(firsts, firsts[1:]))


def report(records, steps, top):
    """Returns the lines of the table of one step."""
    later = steps[len(steps) // 2 :]
    begin, end = sorted(later, key=lambda step: step[1] - step[0])[len(later) // 2]
    within = [(max(b, begin), min(e, end), name) for b, e, name in records if e > begin and b < end]
    step = end - begin
    by_class, by_name, counts = collections.Counter(), collections.Counter(), collections.Counter()
    for b, e, name in within:
        of_class = next((one for one, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), REST)
        by_class[of_class] += e - b
        by_name[name] += e - b
        counts[name] += 1
    busy, last, before, gaps = 0.0, begin, "", []
    for b, e, name in within:
        busy += max(0.0, e - max(b, last))
        gaps.append((b - last, before, name))
        last, before = max((last, before), (e, name))
    seconds = [f"{b - a:.4f}" for a, b in steps]
    lines = [f"steps (s): {' '.join(seconds)}; median {statistics.median(b - a for a, b in later):.4f}", f"{'class':34} {'ms':>9} {'of the step':>12}"]
    lines += [f"{name:34} {1e3 * time:9.2f} {time / step:12.1%}" for name, time in by_class.most_common()]
    lines.append(f"{'no kernel at all':34} {1e3 * (step - busy):9.2f} {(step - busy) / step:12.1%}")
    lines.append(f"{'the step':34} {1e3 * step:9.2f}")
    lines.append(f"{'ms':>9} {'calls':>6}  kernel")
    lines += [f"{1e3 * time:9.2f} {counts[name]:6}  {name[:200]}" for name, time in by_name.most_common(top)]
    lines += [f"{1e3 * gap:9.2f} nothing runs between {one[:60]} and {other[:60]}" for gap, one, other in sorted(gaps, reverse=True)[:GAPS]]
    return lines


if __name__ == "__main__":
    main()
