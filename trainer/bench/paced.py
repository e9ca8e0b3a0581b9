#!/usr/bin/env python3
"""Drives of a known speed on any Linux machine, as root: file systems on loop devices over memory, paced by the block cgroup.

    paced.py up N SIZE READ WRITE     N drives of SIZE (8G), each READ and WRITE bytes a second (6.2G, 620M); prints their folders
             [--raid0]                one folder over all of them (btrfs), for programs that take a single path
    paced.py run COMMAND...           runs COMMAND at their pace; anything started otherwise is not paced
    paced.py measure [--block 4M]     what they give: each direction alone, and both at once (see mixed.py for the tool it takes)
    paced.py down                     takes them away

SIZE and rates take K, M, G: 1024-based for sizes, 1000-based for rates.

How it is exact, and where not:
- The kernel charges a request on a raw loop device twice when it must be split (more than 128 segments, 1 MiB of 4 KiB pages),
  which halves the rate. Files on ext4 were exact at 512 KiB, 1 MiB and 4 MiB, so each drive gets an ext4 without a journal.
- The pace is kept in slices of 100 ms: rates over a second are right, latencies are not.
- A copying thread a device does the moving. At 6 GB/s both directions at once can be less than the two paces: `measure` says
  what this machine gives, and a bound is taken from that.
- Memory is written before use: an untouched page costs seconds a GiB on machines that get their memory lazily.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

STATE = pathlib.Path("/run/paced-drives")
GROUP_NAME = "paced-drives"
CGROUP2 = pathlib.Path("/sys/fs/cgroup")
BLKIO1 = pathlib.Path("/sys/fs/cgroup/blkio")

# A process with an io_uring keeps its files open for some 0.1 s after it has ended.
RELEASE_WAIT_S = 10.0


class PacedError(Exception):
    """What could not be done, and what a person can do about it."""


def number(text, base):
    """Bytes of "8G" or "6.2G"; `base` is 1024 for sizes and 1000 for rates."""
    power = {"K": 1, "M": 2, "G": 3, "T": 4}.get(text[-1:].upper())
    try:
        return int(float(text[:-1] if power else text) * base ** (power or 0))
    except ValueError:
        raise PacedError(f"{text}: a number of bytes, as 8G or 620M") from None


def missing():
    """What this machine lacks for paced drives, or None."""
    if os.geteuid() != 0:
        return "root"
    for tool in ("losetup", "mkfs.ext4", "mount"):
        if not shutil.which(tool):
            return tool
    if not pathlib.Path("/dev/loop-control").exists():
        return "loop devices"
    if group_folder() is None:
        return "the block cgroup (io.max or blkio.throttle)"
    return None


def group_folder():
    """Where the paced group lies, or None where the kernel has no such controller."""
    controllers = CGROUP2 / "cgroup.controllers"
    if controllers.exists() and "io" in controllers.read_text().split():
        return CGROUP2 / GROUP_NAME
    if (BLKIO1 / "cgroup.procs").exists():
        return BLKIO1 / GROUP_NAME
    return None


def call(*command):
    """Runs a tool to its end; its words are in the error."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise PacedError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def read_state():
    """What `up` wrote, or None."""
    try:
        return json.loads((STATE / "state.json").read_text())
    except FileNotFoundError:
        return None


def write_state(state):
    (STATE / "state.json").write_text(json.dumps(state, indent=1))


def up(count, size_bytes, read_bps, write_bps, raid0=False, parts=1):
    """Makes the drives. Returns their folders, one for all with `raid0`; on failure nothing is left.

    A loop device copies with one thread, some 5 GB/s both ways together: `parts` of them, each at its share of the pace, stand for one
    faster drive.
    """
    count, size_bytes, read_bps, write_bps = count * parts, -(-size_bytes // parts), read_bps // parts, write_bps // parts
    lacking = missing()
    if lacking:
        raise PacedError(f"paced drives need {lacking}")
    if STATE.exists():
        raise PacedError(f"{STATE} exists: there are drives already, take them away with `paced.py down`")
    try:
        return make(count, size_bytes, read_bps, write_bps, raid0)
    except BaseException:
        down()
        raise


def make(count, size_bytes, read_bps, write_bps, raid0):
    ram = STATE / "ram"
    ram.mkdir(parents=True)
    group = group_folder()
    state = {"group": str(group), "devices": [], "folders": [], "read_bps": read_bps, "write_bps": write_bps}
    write_state(state)
    # A loop device copies with one thread, faster from large pages. Kernels without them refuse the option.
    size = f"size={count * size_bytes + (64 << 20)}"
    try:
        call("mount", "-t", "tmpfs", "-o", f"{size},huge=always", "paced-drives", ram)
    except PacedError:
        call("mount", "-t", "tmpfs", "-o", size, "paced-drives", ram)
    if group.parent == CGROUP2:
        (CGROUP2 / "cgroup.subtree_control").write_text("+io")
    group.mkdir(exist_ok=True)
    files = [ram / f"drive{index}" for index in range(count)]
    touch(files, size_bytes)
    for file in files:
        state["devices"].append(attach(file))
        write_state(state)
    devices = state["devices"]
    for index, group_of in enumerate([devices] if raid0 else [[device] for device in devices]):
        folder = STATE / f"drive{index}"
        folder.mkdir()
        if raid0:
            call("mkfs.btrfs", "-q", "-f", "-K", "-d", "raid0", "-m", "raid0", *group_of)
            call("mount", "-o", "noatime,nodatacow", group_of[0], folder)
        else:
            # Few inodes and no lazy work later: this file system holds two or three large files.
            call("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "64", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=0", *group_of)
            call("mount", "-o", "noatime", group_of[0], folder)
        state["folders"].append(str(folder))
        write_state(state)
    for device in devices:
        pace(group, device, read_bps, write_bps)
    return state["folders"]


def touch(files, size_bytes):
    """Writes every page of the files, in parallel: memory that was never used comes slowly from the host."""
    piece = memoryview(bytes(8 << 20))
    workers = min(8, os.cpu_count() or 1)
    jobs = [(file, at) for file in files for at in range(0, size_bytes, 1 << 30)]
    lock, failures = threading.Lock(), []

    def work():
        while True:
            with lock:
                if not jobs or failures:
                    return
                file, start = jobs.pop()
            try:
                handle = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    for at in range(start, min(start + (1 << 30), size_bytes), len(piece)):
                        os.pwrite(handle, piece[:size_bytes - at], at)
                finally:
                    os.close(handle)
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise PacedError(f"filling {files[0].parent}: {failures[0]}; is there enough memory?")


def attach(file):
    """A loop device over `file`; past the page cache where the kernel can."""
    try:
        return call("losetup", "-f", "--show", "-b", "4096", "--direct-io=on", file)
    except PacedError:
        return call("losetup", "-f", "--show", "-b", "4096", file)


def pace(group, device, read_bps, write_bps):
    numbers = pathlib.Path(f"/sys/block/{pathlib.Path(device).name}/dev").read_text().strip()
    if group.parent == CGROUP2:
        (group / "io.max").write_text(f"{numbers} rbps={read_bps} wbps={write_bps}")
    else:
        (group / "blkio.throttle.read_bps_device").write_text(f"{numbers} {read_bps}")
        (group / "blkio.throttle.write_bps_device").write_text(f"{numbers} {write_bps}")


def paced(command):
    """`command` as a command that runs at the drives' pace, with everything it starts."""
    return [sys.executable, str(pathlib.Path(__file__).resolve()), "run", *map(str, command)]


def enter_and_become(command):
    state = read_state()
    if state is None:
        raise PacedError("no drives: make some with `paced.py up`")
    (pathlib.Path(state["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    os.execvp(command[0], command)


def down():
    """Takes away whatever `up` made, also after half of it failed. Waits a little for files that are about to be closed."""
    state = read_state()
    if state is None:
        shutil.rmtree(STATE, ignore_errors=True)
        return
    trouble = []
    for folder in state["folders"]:
        trouble += retried("umount", folder)
    for device in state["devices"]:
        trouble += retried("losetup", "-d", device)
    if os.path.ismount(STATE / "ram"):
        trouble += retried("umount", STATE / "ram")
    group = pathlib.Path(state["group"])
    deadline = time.monotonic() + RELEASE_WAIT_S
    while group.exists():
        try:
            group.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                pids = (group / "cgroup.procs").read_text().split()
                trouble.append(f"{group}: {error}; processes in it: {' '.join(pids)}")
                break
            time.sleep(0.1)
    if trouble:
        raise PacedError("; ".join(trouble) + "; end what uses them and call `paced.py down` again")
    shutil.rmtree(STATE)


def retried(*command):
    deadline = time.monotonic() + RELEASE_WAIT_S
    while True:
        try:
            call(*command)
            return []
        except PacedError as error:
            # What an earlier `down` took away already is no trouble.
            if any(words in str(error) for words in ("not mounted", "No such device", "no mount point")):
                return []
            if time.monotonic() > deadline:
                return [str(error)]
            time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("up")
    for name, kind in (("count", int), ("size", str), ("read", str), ("write", str)):
        one.add_argument(name, type=kind)
    one.add_argument("--raid0", action="store_true")
    commands.add_parser("run").add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--block", default="1M", help="bytes of an operation: the run's tiles")
    measuring.add_argument("--seconds", type=float, default=4.0, help="for each of the three measurements")
    measuring.add_argument("--fio", help="the program, when it is not in PATH; or \"none\"")
    args = parser.parse_args()
    if args.command == "up":
        for folder in up(args.count, number(args.size, 1024), number(args.read, 1000), number(args.write, 1000), args.raid0):
            print(folder)
    elif args.command == "run":
        enter_and_become(args.words)
    elif args.command == "down":
        down()
    else:
        import mixed

        state = read_state()
        if state is None:
            raise PacedError("no drives: make some with `paced.py up`")
        print(json.dumps(mixed.measure(state, number(args.block, 1024), args.seconds, args.fio), indent=1))


if __name__ == "__main__":
    try:
        main()
    except PacedError as error:
        sys.exit(f"paced.py: {error}")
