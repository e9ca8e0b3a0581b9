#!/usr/bin/env python3
"""What `.ci/tests.py` makes of failures, with a cargo that says what it is told to."""

import pathlib
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent
# All tests fail with what $HOME/said holds; one test passes unless its name is in $HOME/bad.
CARGO = """#!/bin/sh
case "$*" in *--workspace*) cat "$HOME/said"; exit 101;; esac
echo "$*" >> "$HOME/calls"
for name; do :; done
if grep -qx "$name" "$HOME/bad"; then echo "test $name ... FAILED"; exit 101; fi
[ "$name" = skips ] && echo "skipped: skips: no fio"
echo "test result: ok. 1 passed; 0 failed; 0 ignored"
"""


def said(*names, target="-p kernels --test cpu"):
    running = "     Running tests/cpu/main.rs (target/debug/deps/cpu-1)"
    tests = [f"test {name} ... FAILED" for name in names]
    result = f"test result: FAILED. 1 passed; {len(names)} failed; 0 ignored; 0 measured"
    return [running, "test fine ... ok", "skipped: it: no fio", *tests, result, f"error: test failed, to rerun pass `{target}`"]


class Tests(unittest.TestCase):
    def outcome(self, lines, bad=()):
        with tempfile.TemporaryDirectory() as home:
            folder = pathlib.Path(home)
            for name, text in (("cargo", CARGO), ("said", "\n".join(lines) + "\n"), ("bad", "\n".join(bad)), ("calls", "")):
                (folder / name).write_text(text)
            (folder / "cargo").chmod(0o755)
            command = [HERE / "tests.py", "--cargo", folder / "cargo", "--log", folder / "log"]
            done = subprocess.run(command, env={"HOME": home, "PATH": "/usr/bin:/bin:/usr/local/bin"}, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout, (folder / "calls").read_text().splitlines()

    def test_what_passes_by_itself_is_listed(self):
        code, out, calls = self.outcome([*said("a::b", "c - should panic"), *said("d", target="-p swapper --lib")])
        self.assertEqual(code, 0, out)
        self.assertTrue(out.endswith("by itself:\n  a::b\n  c\n  d\n"), out)
        self.assertIn("Skipped:\nskipped: it: no fio\n", out)
        self.assertEqual(calls[1], "test -j2 -p kernels --test cpu -- --show-output --exact c")
        self.assertEqual(calls[2], "test -j2 -p swapper --lib -- --show-output --exact d")

    def test_what_fails_twice_failed(self):
        code, out, _ = self.outcome(said("a", "b"), bad=["b"])
        self.assertEqual(code, 1, out)
        self.assertNotIn("Passed only", out)

    def test_many_failures_are_no_accident(self):
        code, _, calls = self.outcome(said("a", "b", "c", "d"))
        self.assertEqual((code, calls), (1, []))

    def test_a_target_that_ends_without_words_failed(self):
        code, _, calls = self.outcome([*said("a"), *said()])
        self.assertEqual((code, calls), (1, []))

    def test_a_target_that_crashed_after_a_failure_failed(self):
        lines = [line for line in said("a") if not line.startswith("test result")]
        code, _, calls = self.outcome(lines)
        self.assertEqual((code, calls), (1, []))

    def test_what_only_skips_by_itself_failed(self):
        self.assertEqual(self.outcome(said("skips"))[0], 1)

    def test_what_does_not_compile_failed(self):
        self.assertEqual(self.outcome(["error: could not compile `kernels`"])[0], 1)


if __name__ == "__main__":
    unittest.main()
