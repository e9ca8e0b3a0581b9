#!/usr/bin/env python3
"""What paced drives give: reading alone, writing alone, and both at once, past the page cache.

A step reads and writes at the same time, so its bound is taken from the rates of both at once, not from the two paces.

Takes fio where there is one (io_uring, direct, depth 32 each way). Without it threads of this program with preadv and pwritev
do the same; the result's "tool" says which it was. Both are started inside the paced group.

A machine without package registries can be brought one: unpack fio and the libraries that `ldd` misses there, and name the folder
with `--fio FOLDER/fio` (its libraries are looked for in FOLDER/lib):

    mkdir -p fio/lib x && cd x && apt-get download fio libaio1 libnuma1 && for p in *.deb; do dpkg -x $p .; done && cd ..
    cp x/usr/bin/fio fio/ && cp -L x/usr/lib/x86_64-linux-gnu/lib{aio,numa}.so.1 fio/lib/
"""

import json
import mmap
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import paced

DEPTH = 32
THREADS = 8  # each way and drive, without fio: a depth drives reach their rate with at megabytes


def measure(state, blocks_bytes, seconds, fio=None):
    """Bytes a second of all drives together: {"tool", "read_alone", "write_alone", "read", "write"}, the last two at once, with the
    block size of `blocks_bytes` that moves most at once."""
    folders = state["folders"]
    # A second's worth: long enough to leave every cache, short enough to be made quickly.
    largest = max(blocks_bytes)
    size_bytes = max(64 << 20, min(2 << 30, state["write_bps"])) // largest * largest
    files = [(pathlib.Path(folder) / "measure-read", pathlib.Path(folder) / "measure-write") for folder in folders]
    try:
        for pair in files:
            for file in pair:
                fill(file, size_bytes)
        program = find_fio(fio)

        def one(block_bytes, read, write):
            work = {"files": [[str(r), str(w)] for r, w in files], "size_bytes": size_bytes, "block_bytes": block_bytes, "seconds": seconds}
            return with_fio(program, work, read, write) if program else with_threads(work, read, write)

        at_once = {block_bytes: one(block_bytes, True, True) for block_bytes in blocks_bytes}
        block_bytes, (read, write) = max(at_once.items(), key=lambda found: sum(found[1]))
        read_alone, _ = one(block_bytes, True, False)
        _, write_alone = one(block_bytes, False, True)
    finally:
        for pair in files:
            for file in pair:
                file.unlink(missing_ok=True)
    return {
        "tool": "fio" if program else "own threads (no fio here)",
        "block_bytes": block_bytes, "drives": len(state["devices"]),
        "pace_read": state["read_bps"] * len(state["devices"]), "pace_write": state["write_bps"] * len(state["devices"]),
        "read_alone": read_alone, "write_alone": write_alone, "read": read, "write": write, "at_once": at_once,
    }


def find_fio(named):
    if named == "none":
        return None
    if named:
        program = pathlib.Path(named).resolve()
        if not program.is_file():
            raise paced.PacedError(f"--fio {named}: no such program")
        return str(program)
    return shutil.which("fio")


def fill(file, size_bytes):
    """Real bytes: space that was only reserved reads at the speed of memory."""
    piece = os.urandom(8 << 20)
    with open(file, "wb", buffering=0) as out:
        for at in range(0, size_bytes, len(piece)):
            out.write(piece[:size_bytes - at])
        os.fsync(out.fileno())


def with_fio(program, work, read, write):
    jobs = ["[global]", "ioengine=io_uring", "direct=1", f"bs={work['block_bytes']}", f"iodepth={DEPTH}", "time_based=1",
            f"runtime={work['seconds']}", f"size={work['size_bytes']}", "overwrite=1", "fallocate=none", "randrepeat=0", "refill_buffers=0"]
    for index, (read_file, write_file) in enumerate(work["files"]):
        jobs += [f"[read{index}]", f"filename={read_file}", "rw=read"] if read else []
        jobs += [f"[write{index}]", f"filename={write_file}", "rw=write"] if write else []
    lib = pathlib.Path(program).parent / "lib"
    env = {**os.environ, "LD_LIBRARY_PATH": str(lib)} if lib.is_dir() else None
    done = subprocess.run(paced.paced([program, "--output-format=json", "-"]), input="\n".join(jobs), capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise paced.PacedError(f"{program}: {done.stderr.strip() or done.stdout.strip()}")
    found = json.loads(done.stdout[done.stdout.index("{"):])["jobs"]
    return tuple(sum(job[way]["bw_bytes"] for job in found) for way in ("read", "write"))


def with_threads(work, read, write):
    """Starts this file again inside the paced group: the group is the process's."""
    order = json.dumps({**work, "read": read, "write": write})
    done = subprocess.run(paced.paced([sys.executable, __file__, order]), capture_output=True, text=True)
    if done.returncode != 0:
        raise paced.PacedError(f"measuring: {done.stderr.strip()}")
    return tuple(json.loads(done.stdout))


def move(work):
    """Bytes a second (read, written), with threads that each move one block at a time."""
    block_bytes, blocks = work["block_bytes"], work["size_bytes"] // work["block_bytes"]
    moved = {"read": [], "write": []}
    start = threading.Barrier(1 + len(work["files"]) * THREADS * (work["read"] + work["write"]))
    ends = [0.0]

    def go(way, file, first):
        buffer = mmap.mmap(-1, block_bytes)  # page aligned, as direct I/O wants it
        buffer[:] = os.urandom(block_bytes)
        handle = os.open(file, os.O_DIRECT | (os.O_RDONLY if way == "read" else os.O_WRONLY))
        call = os.preadv if way == "read" else os.pwritev
        total, block = 0, first
        start.wait()
        while time.monotonic() < ends[0]:
            total += call(handle, [buffer], block % blocks * block_bytes)
            block += THREADS
        # The last operations end after the time is over: they count with the time they took.
        moved[way].append((total, time.monotonic()))
        os.close(handle)

    threads = []
    for read_file, write_file in work["files"]:
        for way, file in (("read", read_file), ("write", write_file)):
            if work[way]:
                threads += [threading.Thread(target=go, args=(way, file, first)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    ends[0] = began + work["seconds"]
    start.wait()
    for thread in threads:
        thread.join()
    rate = lambda parts: sum(total for total, _ in parts) / (max(end for _, end in parts) - began) if parts else 0
    return rate(moved["read"]), rate(moved["write"])


if __name__ == "__main__":
    print(json.dumps(move(json.loads(sys.argv[1]))))
