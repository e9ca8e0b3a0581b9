#!/usr/bin/env python3
"""Every test, and the list of what was skipped.

    .ci/tests.py --jobs 2 --log target/test.log

A few tests set a whole daemon or trainer against the clock of a machine that others use too. Where at most three tests fail, each is
run once more by itself; one that passes then is listed as such, because it still is a fault of the test, or worse.
"""

import argparse
import os
import re
import subprocess
import sys

AGAIN_MAX = 3


def failures(lines):
    """What failed, as [(cargo's words to run that target again, [names of tests])]; no names where a target did not end in order."""
    failed, names, counted = [], [], -1
    for line in lines:
        if re.match(r"\s+(Running|Doc-tests) ", line):
            names, counted = [], -1
        elif test := re.match(r"test (.+?)(?: - should panic)? \.\.\. FAILED$", line):
            names.append(test[1])
        elif result := re.match(r"test result: .* (\d+) failed;", line):
            counted = int(result[1])
        elif target := re.match(r"error: test failed, to rerun pass `(.+)`", line):
            failed.append((target[1].split(), names if counted == len(names) else []))
            names, counted = [], -1
    return failed


def skipped(lines):
    return sorted({line for line in lines if line.startswith("skipped: ")})


def run(command, log):
    """Runs it, shows and writes what it says. Answers whether it passed, and its lines."""
    lines = []
    plain = {**os.environ, "CARGO_TERM_COLOR": "never"}
    with subprocess.Popen(command, env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as child:
        for line in child.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line)
            lines.append(line.rstrip("\n"))
    return child.returncode == 0, lines


def again(failed, cargo, log):
    """Runs what failed once more, each test by itself. Answers what passed then; nothing where something failed again."""
    tests = [(target, name) for target, names in failed for name in names]
    if not failed or not all(names for _, names in failed) or len(tests) > AGAIN_MAX:
        return []
    for target, name in tests:
        print(f"\nOnce more, by itself: {name}")
        passed, lines = run([*cargo, *target, "--", "--show-output", "--exact", name], log)
        if not passed or skipped(lines) or not any(line.startswith("test result: ok. 1 passed") for line in lines):
            return []
    return [name for _, name in tests]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cargo", default="cargo", help="the program to call (default: %(default)s)")
    arguments.add_argument("--jobs", default="2", help="of the compiler, at once (default: %(default)s)")
    arguments.add_argument("--log", required=True, help="all that the tests said")
    arguments = arguments.parse_args()
    cargo = [arguments.cargo, "test", f"-j{arguments.jobs}"]
    with open(arguments.log, "w") as log:
        passed, lines = run([*cargo, "--workspace", "--no-fail-fast", "--", "--show-output"], log)
        late = [] if passed else again(failures(lines), cargo, log)
    print("\nSkipped:", *(skipped(lines) or ["  nothing"]), sep="\n")
    if late:
        print("\nPassed only when run once more, by itself:", *(f"  {name}" for name in late), sep="\n")
    return 0 if passed or late else 1


if __name__ == "__main__":
    sys.exit(main())
