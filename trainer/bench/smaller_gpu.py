"""A GPU with less memory than it has: another process holds the rest, so that nothing can take it, whatever it plans."""

import contextlib
import subprocess
import sys

# The process says when it holds all but so much, and ends when nobody writes to it any more.
HOLDER = """
import sys, torch
held = []
for number in range(torch.cuda.device_count()):
    device = torch.device("cuda", number)
    torch.zeros(1, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    left = int(sys.argv[1])
    if free < left:
        sys.exit(f"GPU {number} has {free / 2**30:.1f} GiB free, less than the {left / 2**30:.1f} GiB asked for")
    held.append(torch.empty(free - left, dtype=torch.uint8, device=device))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def left_with(size_bytes):
    """Leaves each visible GPU with `size_bytes` of free memory while it is entered; with None, with all that it has."""
    if size_bytes is None:
        yield
        return
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(size_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "held\n":
            raise SystemExit(f"the GPU's memory could not be held: status {holder.wait()}")
        yield
    finally:
        holder.stdin.close()
        holder.wait()
