"""Measures rate-limited drives: reading alone, writing alone, and both at once, past the page cache.

A step reads and writes at the same time, so its bound is taken from the rates of both at once, not from the two limits.

Takes fio where there is one (io_uring, direct, depth 32 each way). Without it `bench-io run` on the same files does the same, one
for each way; the result's "tool" says which it was. Both are started under the drives' limits.

A machine without package registries can be brought one from a machine that has it, with all its libraries but libc's (Debian's fio has
sixty), and named with `--fio DIR/fio` (its libraries are looked for in DIR/lib):

    mkdir -p fio/lib && cp "$(command -v fio)" fio/
    ldd fio/fio | awk '/=>/ {print $3}' | grep -vE '/(libc|libm|libdl|libpthread|librt)\\.so' | xargs -I{} cp -L {} fio/lib/
"""

import json
import os
import pathlib
import shutil
import subprocess

import testdrives

DEPTH = 32


def measure(state, blocks_bytes, seconds, fio=None):
    """Bytes a second of all drives together: {"tool", "read_alone", "write_alone", "read", "write"}, the last two at once, with the
    block size of `blocks_bytes` that moves most at once."""
    directories = state["dirs"]
    # A second's worth: long enough to leave every cache, short enough to be made quickly.
    largest = max(blocks_bytes)
    size_bytes = max(64 << 20, min(2 << 30, state["write_bps"])) // largest * largest
    files = [(pathlib.Path(directory) / "measure-read", pathlib.Path(directory) / "measure-write") for directory in directories]
    try:
        for pair in files:
            for file in pair:
                fill(file, size_bytes)
        program = find_fio(fio)

        def one(block_bytes, read, write):
            work = {"files": [[str(r), str(w)] for r, w in files], "size_bytes": size_bytes, "block_bytes": block_bytes, "seconds": seconds}
            return with_fio(program, work, read, write) if program else with_bench_io(work, read, write)

        both = {block_bytes: one(block_bytes, True, True) for block_bytes in blocks_bytes}
        block_bytes, (read, write) = max(both.items(), key=lambda found: sum(found[1]))
        read_alone, _ = one(block_bytes, True, False)
        _, write_alone = one(block_bytes, False, True)
    finally:
        for pair in files:
            for file in pair:
                file.unlink(missing_ok=True)
    return {
        "tool": "fio" if program else "bench-io (no fio here)",
        "block_bytes": block_bytes,
        "drives": len(state["devices"]),
        "limit_read": state["read_bps"] * len(state["devices"]),
        "limit_write": state["write_bps"] * len(state["devices"]),
        "read_alone": read_alone,
        "write_alone": write_alone,
        "read": read,
        "write": write,
        "both_by_block_bytes": both,
    }


def find_fio(named):
    if named == "none":
        return None
    if named:
        program = pathlib.Path(named).resolve()
        if not program.is_file():
            raise testdrives.DriveError(f"--fio {named}: no such program")
        return str(program)
    return shutil.which("fio")


def fill(file, size_bytes):
    """Real bytes: space that was only reserved reads at the speed of memory."""
    piece = os.urandom(8 << 20)
    with open(file, "wb", buffering=0) as out:
        for at in range(0, size_bytes, len(piece)):
            out.write(piece[: size_bytes - at])
        os.fsync(out.fileno())


def with_fio(program, work, read, write):
    jobs = [
        "[global]",
        "ioengine=io_uring",
        "direct=1",
        f"bs={work['block_bytes']}",
        f"iodepth={DEPTH}",
        "time_based=1",
        f"runtime={work['seconds']}",
        f"size={work['size_bytes']}",
        "overwrite=1",
        "fallocate=none",
        "randrepeat=0",
        "refill_buffers=0",
    ]
    for index, (read_file, write_file) in enumerate(work["files"]):
        jobs += [f"[read{index}]", f"filename={read_file}", "rw=read"] if read else []
        jobs += [f"[write{index}]", f"filename={write_file}", "rw=write"] if write else []
    lib = pathlib.Path(program).parent / "lib"
    env = {**os.environ, "LD_LIBRARY_PATH": str(lib)} if lib.is_dir() else None
    done = subprocess.run(testdrives.enter([program, "--output-format=json", "-"]), input="\n".join(jobs), capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise testdrives.DriveError(f"{program}: {done.stderr.strip() or done.stdout.strip()}")
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return tuple(sum(job[way]["bw_bytes"] for job in found) for way in ("read", "write"))


def with_bench_io(work, read, write):
    """One process for each way, on all drives, both at the same time."""
    running = []
    for way, wanted, files in (("read", read, [r for r, _ in work["files"]]), ("write", write, [w for _, w in work["files"]])):
        if wanted:
            command = [
                testdrives.program,
                "run",
                "--target=device",
                f"--rw={way}",
                "--overwrite",
                f"--bs={work['block_bytes']}",
                f"--iodepth={DEPTH * len(files)}",
                f"--runtime={work['seconds']}",
                "--json",
                *(f"--filename={file}" for file in files),
            ]
            running.append((way, subprocess.Popen(testdrives.enter(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    rates = {"read": 0, "write": 0}
    for way, process in running:
        said, complaint = process.communicate()
        if process.returncode != 0:
            raise testdrives.DriveError(f"measuring: {complaint.strip()}")
        rates[way] = json.loads(said)[way]["bytes_per_s"]
    return rates["read"], rates["write"]
