"""Runs one child with everything it starts, watches its memory, and ends all of it when its time is over."""

import os
import pathlib
import signal
import subprocess
import threading
import time

# Of a child that was asked to end: commits and unmaps.
END_WAIT_S = 15.0

# A sample walks page tables and holds a lock the process may want: at most this share of the time.
SAMPLE_SHARE = 0.1

# Where AMD's driver says how much memory of a GPU is in use.
DRM = pathlib.Path("/sys/class/drm")


class Watched:
    """What a child said and took. `first_step_s` is the time from its start until `first_line` had its first line."""

    def __init__(self):
        self.status, self.timed_out, self.said = None, False, ""
        self.host_bytes, self.gpu_bytes, self.first_line_at = 0, 0, None

    def sample_host(self, session):
        self.host_bytes = max(self.host_bytes, sum(map(pss_bytes, members(session))))

    def sample_gpu(self, before):
        self.gpu_bytes = max(self.gpu_bytes, gpu_bytes() - before)


def run(command, *, log, timeout_s, env=None, first_line=None, enough=None):
    """Runs `command` until it ends, its time is over, or the file of `enough` has as many lines as it says: then it is killed, so that
    it saves nothing. Its output goes to `log`."""
    watched, began = Watched(), time.monotonic()
    gpu_before = gpu_bytes()
    with open(log, "wb") as out:
        # A session of its own: signals reach all of it, and nothing outlives it.
        child = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        try:
            samples = (watched.sample_host, child.pid), (watched.sample_gpu, gpu_before)
            samplers = [threading.Thread(target=repeat, args=(child, *one), daemon=True) for one in samples]
            for sampler in samplers:
                sampler.start()
            while child.poll() is None:
                if watched.first_line_at is None and first_line and has_line(first_line):
                    watched.first_line_at = time.monotonic() - began
                if enough and has_line(*enough):
                    # The samplers may have been slow, and it takes the most now.
                    watched.sample_host(child.pid)
                    watched.sample_gpu(gpu_before)
                    send(child.pid, signal.SIGKILL)
                    break
                if time.monotonic() - began > timeout_s:
                    watched.timed_out = True
                    break
                time.sleep(0.02)
        finally:
            end(child)
            for sampler in samplers:
                sampler.join()
    watched.status = child.returncode
    watched.said = pathlib.Path(log).read_text(errors="replace")
    return watched


def has_line(path, count=1):
    try:
        return path.read_bytes().count(b"\n") >= count
    except FileNotFoundError:
        return False


def end(child):
    """Asks the session to end, then makes it."""
    for wish in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            send(child.pid, wish)
        deadline = time.monotonic() + END_WAIT_S
        while time.monotonic() < deadline and (child.poll() is None or members(child.pid)):
            time.sleep(0.05)
            if child.poll() is not None and wish == signal.SIGKILL:
                send(child.pid, wish)
        if child.poll() is not None and not members(child.pid):
            return
    child.wait()


def send(session, wish):
    for pid in [session, *members(session)]:
        try:
            os.kill(pid, wish)
        except ProcessLookupError:
            pass


def members(session):
    """Pids of the session and of the sessions that it started, as torchrun does for each of its processes, without zombies."""
    found, others = [], {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # After the name, which may hold anything: state, parent, group, session.
            words = pathlib.Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] in "ZX":
            continue
        if int(words[3]) == session:
            found.append(int(entry))
        else:
            others.setdefault(int(words[1]), []).append(int(entry))
    for pid in found:
        found += others.pop(pid, ())
    return found


def repeat(child, sample, argument):
    """Samples about once a second, less often where a sample takes long: that of 200 GB of host memory takes seconds."""
    while child.poll() is None:
        since = time.monotonic()
        sample(argument)
        took = time.monotonic() - since
        until = time.monotonic() + max(1.0, took / SAMPLE_SHARE)
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)


def pss_bytes(pid):
    """What the process holds of memory, shared pages divided by those who share them."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def gpu_bytes():
    """In use on all GPUs together, as nvidia-smi and AMD's driver say; 0 without one. A machine may have both, one of them in its processor."""
    amd = {path.resolve() for path in DRM.glob("card*/device/mem_info_vram_used")}
    amd_bytes = sum(int(path.read_text()) for path in amd)
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return amd_bytes
    return amd_bytes + sum(int(line) << 20 for line in done.stdout.split() if line.isdigit())
