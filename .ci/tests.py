#!/usr/bin/env python3
"""Runs every test once and judges the run.

    .ci/tests.py --jobs 2 --log target/test.log     runs all tests
    .ci/tests.py --beside trainer/python/test.sh    runs pytest's tests beside them, whose failure fails the run
    .ci/tests.py --record                           writes .ci/test-counts

A run fails when a test fails, when a test is skipped that `.ci/expected-skips` does not expect on this machine, when that file names a
test that did not run, or when a target ran fewer tests than `.ci/test-counts` records. A failed test is never run again.
The output ends with the skipped tests, the slowest targets and the slowest tests; pytest's tests too, where they run beside.
"""

import argparse
import collections
import fnmatch
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
SLOWEST_MAX = 10
SLOWEST_TESTS_MAX = 20

# pytest's tests run in parts, each by a lane that has run its own commands: so both lanes end at about the same time, on any machine. A test is in
# the first part whose words its name has (pytest's option -k), or in the last part. The longest part comes first.
PARTS = ("each_node", "test_gpu or test_ranks", "test_plan or test_residency or test_muon", "semantics")

# Test binaries tell the time of each test only if they take the compiler for a nightly one. The variable is set for them alone: cargo would
# build crates again that look at it.
RUNNER = {"CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER": "env RUSTC_BOOTSTRAP=1"}
TIMES = ["-Zunstable-options", "--report-time"]

# Test targets that compare times: they run first, and nothing beside them.
ALONE = {"rate_limited"}

# Test targets that wait more than they compute: they run in a lane of their own, beside the others.
WAITING = {"commands", "daemon", "keeper", "nodes", "with_daemon"}


class Target:
    """One test binary, or the documentation tests of one crate."""

    def __init__(self, name):
        self.name = name
        self.tests = set()  # names of those that passed or failed
        self.skips = []  # (test, its line)
        self.count = 0
        self.wall_s = self.cpu_s = 0.0
        self.times = []  # (seconds, test)


class Run:
    """What cargo's lines say, target by target."""

    def __init__(self, names):
        self.names = names  # of each test binary
        self.targets = []
        self.beside = Target("beside")  # pytest's tests, which are in no target of cargo's
        self.test = None  # whose output follows

    def read_line(self, line):
        """Reads one line. Returns whether a target starts with it."""
        if running := re.match(r"\s+Running .*\((.+)\)$", line):
            self.targets.append(Target(self.names.get(os.path.basename(running[1]), running[1])))
        elif documented := re.match(r"\s+Doc-tests (\S+)$", line):
            self.targets.append(Target(f"{documented[1].replace('_', '-')}/doc"))
        elif timed := re.match(r"(\d+\.\d+)s (?:call|setup|teardown) +(\S.*)$", line):
            self.beside.times.append((float(timed[1]), timed[2]))
            return False
        elif not self.targets:
            return False
        elif result := re.match(r"test result: .* (\d+) passed; (\d+) failed;", line):
            self.targets[-1].count += int(result[1]) + int(result[2])
            self.test = None
            return False
        elif output := re.match(r"---- (.+) stdout ----$", line):
            self.test = output[1]
            return False
        elif test := re.search(r"\btest (.+?)(?: - should panic)? \.\.\. (?:ok|FAILED)(?: <(\d+\.\d+)s>)?$", line):
            self.targets[-1].tests.add(test[1])
            if test[2]:
                self.targets[-1].times.append((float(test[2]), f"{self.targets[-1].name}::{test[1]}"))
            return False
        elif line.startswith("skipped: "):
            self.targets[-1].skips.append((self.test or "?", line))
            return False
        else:
            return False
        self.test = None
        return True


class Kind:
    """A kind of machine, and what is skipped there: [(glob of the test, glob of its line, line of the file)]."""

    def __init__(self, name, probe):
        self.name = name
        self.probe = probe
        self.entries = []

    def is_here(self):
        return subprocess.run(["sh", "-c", self.probe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE.parent, check=False).returncode == 0


def read_kinds(path):
    kinds = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split(None, 1)
        if not words or line.startswith("#"):
            continue
        if not line.startswith(" "):
            name, _, probe = line.partition(": ")
            kinds.append(Kind(name, probe))
        elif not kinds or len(words) < 2:
            sys.exit(f"{path}:{number}: expected a test and what it says, under a kind of machine")
        else:
            kinds[-1].entries.append((words[0], words[1], number))
    return kinds


def judge_skips(targets, kinds, path):
    """Returns the skips that are expected here, as lines, and what is wrong."""
    ran = {f"{target.name}::{test}" for target in targets for test in target.tests}
    here = [kind for kind in kinds if kind.is_here()]
    wrong = [f"{path}:{number}: {pattern} did not run" for kind in kinds for pattern, _, number in kind.entries if not fnmatch.filter(ran, pattern)]
    expected = set()
    for target in targets:
        for test, line in target.skips:
            name, says = f"{target.name}::{test}", line.removeprefix("skipped: ")
            known = [kind.name for kind in here for pattern, text, _ in kind.entries if fnmatch.fnmatchcase(name, pattern) and fnmatch.fnmatchcase(says, text)]
            if known:
                expected.add(f"{name}: {says} ({known[0]})")
            else:
                wrong.append(f"{name} was skipped, which {path.name} does not expect on this machine: {says}")
    return sorted(expected), wrong


def read_counts(path):
    return {name: int(count) for name, count in (line.split() for line in path.read_text().splitlines() if not line.startswith("#"))}


def judge_counts(targets, recorded, path):
    """Returns notes, and what is wrong."""
    counts = {target.name: target.count for target in targets}
    wrong = [f"{name} ran {counts.get(name, 0)} tests, {path.name} records {count}" for name, count in recorded.items() if counts.get(name, 0) < count]
    more = [name for name, count in counts.items() if count > recorded.get(name, 0)]
    return [f"more tests than {path.name} records (`make test-counts` writes it): {', '.join(more)}"] if more else [], wrong


def test_binaries(cargo):
    """{file name of a test binary: PACKAGE/TARGET}; builds them."""
    done = subprocess.run([*cargo, "--no-run", "--message-format=json"], stdout=subprocess.PIPE, text=True, check=False)
    names = {}
    for line in done.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("profile", {}).get("test") and message.get("executable"):
            # "path+file:///DIRECTORY/PACKAGE#VERSION", or with "#PACKAGE@VERSION" where the directory has another name.
            place, _, version = message["package_id"].partition("#")
            package = version.partition("@")[0] if "@" in version else place.rpartition("/")[2]
            kind, name = message["target"]["kind"][0], message["target"]["name"]
            # A package may have several programs; no name of cargo's has a colon.
            target = {"test": name, "bin": f"bin:{name}"}.get(kind, "lib")
            names[os.path.basename(message["executable"])] = f"{package}/{target}"
    return names if done.returncode == 0 else None


def waited_cpu_s(pid):
    """Processor seconds, user and system, of the ended children of a process and of theirs."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class Lane(threading.Thread):
    """Commands that run one after the other: its own, then those of `shared` that no other lane has taken."""

    def __init__(self, commands, names, show, shared=()):
        super().__init__()
        self.commands, self.shared, self.names, self.show = commands, shared, names, show
        self.passed, self.targets, self.times = True, [], []

    def next_commands(self):
        yield from self.commands
        while self.shared:
            try:
                yield self.shared.popleft()
            except IndexError:
                return

    def run(self):
        plain = {**os.environ, **RUNNER, "CARGO_TERM_COLOR": "never"}
        for command in self.next_commands():
            run = Run(self.names)
            with subprocess.Popen(command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as child:
                since, cpu_s = time.monotonic(), 0.0
                for line in self.lines(child):
                    if line is None or re.match(r"\s+(Running|Doc-tests) ", line):
                        now, now_cpu_s = time.monotonic(), waited_cpu_s(child.pid)
                        if run.targets:
                            run.targets[-1].wall_s, run.targets[-1].cpu_s = now - since, now_cpu_s - cpu_s
                        since, cpu_s = now, now_cpu_s
                    if line is not None:
                        self.show(line)
                        run.read_line(line.rstrip("\n"))
            self.passed &= child.returncode == 0
            self.targets += run.targets
            self.times += [timed for target in (*run.targets, run.beside) for timed in target.times]

    @staticmethod
    def lines(child):
        """The lines of a process, and None at its end."""
        yield from child.stdout
        yield None


def parts():
    """pytest's expressions for each part: every test is in one."""
    rest = [" and ".join(f"not ({words})" for words in PARTS[:number]) for number in range(len(PARTS) + 1)]
    return [" and ".join(filter(None, (f"({words})", before))) for words, before in zip(PARTS, rest)] + rest[-1:]


def lanes(cargo, names, beside):
    """Commands that run all tests: those that run alone, two lanes, and what either lane runs then."""
    tests = sorted({target for name in names.values() if (target := name.rpartition("/")[2]) != "lib" and not target.startswith("bin:")})

    def command(*which, times=TIMES):
        return [*cargo, "--no-fail-fast", *which, "--", "--show-output", *times]

    def named(chosen):
        return [word for test in chosen for word in ("--test", test)]

    def command_if_any(chosen):
        chosen = [test for test in tests if test in chosen]
        return [command(*named(chosen))] if chosen else []

    first = [command("--lib", "--bins", *named(test for test in tests if test not in ALONE | WAITING)), command("--doc", times=[])]
    either = [[beside, f"--durations={SLOWEST_TESTS_MAX}", "-k", part] for part in parts()] if beside else []
    return command_if_any(ALONE), first, command_if_any(WAITING), collections.deque(either)


def run(cargo, names, beside, log):
    """Runs all tests, shows and writes what they print: the second lane's lines after the first's. Returns whether they passed, the targets, and
    (seconds, test) of each test whose time is known."""
    later = []

    def show(line):
        sys.stdout.write(line)
        sys.stdout.flush()
        log.write(line)

    alone, first, second, either = lanes(cargo, names, beside)
    alone, first, second = Lane(alone, names, show), Lane(first, names, show, either), Lane(second, names, later.append, either)
    alone.run()
    first.start(), second.start()
    first.join(), second.join()
    for line in later:
        show(line)
    all_lanes = [alone, first, second]
    targets, times = ([one for lane in all_lanes for one in getattr(lane, name)] for name in ("targets", "times"))
    return all(lane.passed for lane in all_lanes), targets, times


def record(cargo, path):
    """Counts the tests of each target."""
    names = test_binaries(cargo)
    if names is None:
        return 1
    done = subprocess.run([*cargo, "--", "--list"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        return 1
    found = Run(names)
    for line in done.stdout.splitlines():
        if not found.read_line(line) and (count := re.match(r"(\d+) tests?, ", line)):
            found.targets[-1].count = int(count[1])
    counts = sorted(f"{target.name} {target.count}" for target in found.targets if target.count)
    path.write_text("# Tests of each target: `make test` fails when fewer ran. `make test-counts` writes this file.\n" + "\n".join(counts) + "\n")
    print(f"{path}: {sum(target.count for target in found.targets)} tests")
    return 0


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cargo", default="cargo", help="the program to call (default: %(default)s)")
    arguments.add_argument("--jobs", default="2", help="of the compiler, at once (default: %(default)s)")
    arguments.add_argument("--log", type=pathlib.Path, default=HERE.parent / "target/test.log", help="all that the tests said (default: %(default)s)")
    arguments.add_argument("--expected-skips", type=pathlib.Path, default=HERE / "expected-skips")
    arguments.add_argument("--counts", type=pathlib.Path, default=HERE / "test-counts")
    arguments.add_argument("--beside", metavar="PROGRAM", help="runs pytest's tests, with its options; its failure fails the run")
    arguments.add_argument("--record", action="store_true", help="count the tests, write --counts and end")
    arguments = arguments.parse_args()
    cargo = [arguments.cargo, "test", f"-j{arguments.jobs}", "--workspace"]
    if arguments.record:
        return record(cargo, arguments.counts)
    kinds, recorded = read_kinds(arguments.expected_skips), read_counts(arguments.counts)
    names = test_binaries(cargo)
    if names is None:
        return 1
    with open(arguments.log, "w") as log:
        passed, targets, times = run(cargo, names, arguments.beside, log)
    skipped, unexpected = judge_skips(targets, kinds, arguments.expected_skips)
    notes, vanished = judge_counts(targets, recorded, arguments.counts)
    print("\nSkipped, as expected on this machine:", *(skipped or ["nothing"]), sep="\n  ")
    print("\nSlowest targets: seconds, processor seconds, tests")
    for target in sorted(targets, key=lambda target: -target.wall_s)[:SLOWEST_MAX]:
        print(f"  {target.wall_s:7.1f} {target.cpu_s:7.1f} {target.count:5}  {target.name}")
    print(f"  {sum(target.wall_s for target in targets):7.1f} {sum(target.cpu_s for target in targets):7.1f} {sum(target.count for target in targets):5}  all")
    print("\nSlowest tests: seconds")
    for seconds, test in sorted(times, reverse=True)[:SLOWEST_TESTS_MAX]:
        print(f"  {seconds:7.1f}  {test}")
    for note in notes:
        print(f"\nNote: {note}")
    wrong = [*unexpected, *vanished]
    if wrong:
        print("\nFailed:", *wrong, sep="\n  ")
    return 0 if passed and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
