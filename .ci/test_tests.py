#!/usr/bin/env python3
"""Tests of `.ci/tests.py`, with a cargo that says what it is told to, of `.ci/licenses.py`, `.ci/links.py`, `.ci/words.py`
and `.ci/tidy.py`, of the pictures of results, and of the figures in README.md."""

import contextlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import cycles
import licenses
import links
import tests
import tidy
import words

HERE = pathlib.Path(__file__).parent
# Test binaries are those of $HOME/built; the tests say what $HOME/said holds and end with $HOME/status.
CARGO = """#!/bin/sh
echo "$*" >> "$HOME/calls"
case "$*" in *--no-run*) cat "$HOME/built"; exit;; *--doc*|*"--test daemon"*|*"--test rate_limited"*) exit;; esac
cat "$HOME/said"; exit "$(cat "$HOME/status")"
"""
BUILT = [
    {"package_id": "path+file:///r/swapper#0.1.0", "target": {"kind": ["test"], "name": "simulation"}, "executable": "/r/target/debug/deps/simulation-1"},
    {"package_id": "path+file:///r/offloadd#0.1.0", "target": {"kind": ["test"], "name": "simulation"}, "executable": "/r/target/debug/deps/simulation-2"},
    {
        "package_id": "path+file:///r/offloadd/api#offload-api@0.1.0",
        "target": {"kind": ["lib"], "name": "offload_api"},
        "executable": "/r/target/debug/deps/offload_api-3",
    },
]
SIMULATION, API = "tests/simulation/main.rs (target/debug/deps/simulation-1)", "unittests src/lib.rs (target/debug/deps/offload_api-3)"


def target(running, *names, failed=(), output=()):
    """What a target says; `output` is [(test, line)]."""
    tests = [f"test {name} ... {'FAILED' if name in failed else 'ok'}" for name in names]
    said = [line for test, text in output for line in ("", f"---- {test} stdout ----", text)]
    passed = len(names) - len(failed)
    return [f"     Running {running}", *tests, "", "successes:", *said, f"test result: ok. {passed} passed; {len(failed)} failed; 0 ignored; 0 measured"]


class Tests(unittest.TestCase):
    def outcome(self, lines, status=0, skips="", counts="", more=()):
        with tempfile.TemporaryDirectory() as home:
            folder = pathlib.Path(home)
            built = "".join(json.dumps({**one, "profile": {"test": True}}) + "\n" for one in BUILT)
            for name, text in (
                ("cargo", CARGO),
                ("built", built),
                ("said", "\n".join(lines) + "\n"),
                ("status", str(status)),
                ("skips", skips),
                ("counts", counts),
            ):
                (folder / name).write_text(text)
            (folder / "cargo").chmod(0o755)
            files = ["--log", folder / "log", "--expected-skips", folder / "skips", "--counts", folder / "counts"]
            done = subprocess.run(
                [HERE / "tests.py", "--cargo", folder / "cargo", *files, *more],
                env={"HOME": home, "PATH": "/usr/bin:/bin:/usr/local/bin"},
                capture_output=True,
                text=True,
                check=False,
            )
            self.counts = (folder / "counts").read_text()
            return done.returncode, done.stdout + done.stderr, (folder / "calls").read_text().splitlines()

    def test_targets_that_wait_run_beside_the_others_with_the_program_named_and_those_that_compare_times_before(self):
        more = [
            {"package_id": "path+file:///r/offloadd#0.1.0", "target": {"kind": ["test"], "name": name}, "executable": f"/r/target/debug/deps/{name}-4"}
            for name in ("daemon", "rate_limited")
        ]
        built = [*BUILT, *more]
        with unittest.mock.patch(f"{__name__}.BUILT", built):
            code, out, calls = self.outcome(target(SIMULATION, "a"), more=["--beside", "/bin/true"])
            self.assertEqual(code, 0, out)
            run = [call for call in calls if "--no-run" not in call]
            self.assertEqual(sorted("--test daemon" in call for call in run), [False, False, False, True], run)
            self.assertEqual(["--test rate_limited" in call for call in run], [True, False, False, False], run)
            self.assertTrue(any("--lib --bins --test simulation --" in call for call in run), run)
            code, out, _ = self.outcome(target(SIMULATION, "a"), more=["--beside", "/bin/false"])
            self.assertEqual(code, 1, out)

    def test_pytests_parts_have_every_test_once_and_either_lane_takes_them(self):
        for name in ("test_each_node.py::test_ranks", "test_gpu.py::test_a_plan", "test_ranks.py::a", "semantics/test_semantics.py::a_line", "test_hf.py::a"):
            found = [part for part in tests.parts() if eval(re.sub(r"\b(?!not|and|or)(\w+)", rf"('\\1' in {name!r})", part))]
            self.assertEqual(len(found), 1, (name, found))
        shown, either = [], tests.collections.deque(["echo", str(part)] for part in range(6))
        lanes = [tests.Lane([["sleep", "0.4"]], {}, shown.append, either), tests.Lane([], {}, shown.append, either)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        self.assertEqual(sorted(shown), [f"{part}\n" for part in range(6)])
        self.assertTrue(all(lane.passed for lane in lanes) and not either)

    def test_each_test_runs_once_and_what_fails_has_failed(self):
        code, out, calls = self.outcome(target(SIMULATION, "a", "b", failed=["b"]), status=101)
        self.assertEqual(code, 1, out)
        self.assertEqual(len(calls), 3, calls)
        self.assertEqual(self.outcome(target(SIMULATION, "a", "b"))[0], 0)

    def test_what_does_not_compile_failed(self):
        self.assertEqual(self.outcome(["error: could not compile `kernels`"], status=101)[0], 1)

    def test_a_skip_that_nobody_expects_fails(self):
        code, out, _ = self.outcome(target(SIMULATION, "a", output=[("a", "skipped: a: no fio")]))
        self.assertEqual(code, 1, out)
        self.assertIn("swapper/simulation::a was skipped, which skips does not expect on this machine: a: no fio", out)

    def test_a_skip_is_expected_on_its_kind_of_machine_only(self):
        said = target(SIMULATION, "a", output=[("a", "skipped: a: no fio")])
        code, out, _ = self.outcome(said, skips="no fio: true\n  swapper/simulation::a *no fio\n")
        self.assertEqual(code, 0, out)
        self.assertIn("swapper/simulation::a: a: no fio (no fio)", out)
        for other in ("no fio: false\n  swapper/simulation::a *no fio\n", "no GPU: true\n  swapper/simulation::a *no GPU\n"):
            self.assertEqual(self.outcome(said, skips=other)[0], 1, other)

    def test_a_skip_is_expected_of_the_named_test_only(self):
        said = target(SIMULATION, "a", "b", output=[("b", "skipped: no fio")])
        self.assertEqual(self.outcome(said, skips="no fio: true\n  swapper/simulation::a no fio\n")[0], 1)

    def test_a_test_that_may_skip_and_runs_is_fine(self):
        code, out, _ = self.outcome(target(SIMULATION, "a"), skips="# why\n\nno fio: true\n  swapper/simulation::a no fio\n")
        self.assertEqual(code, 0, out)

    def test_a_test_that_may_skip_and_is_gone_fails(self):
        code, out, _ = self.outcome(target(SIMULATION, "a"), skips="no fio: false\n  swapper/simulation::gone no fio\n")
        self.assertEqual(code, 1, out)
        self.assertRegex(out, "skips:2: swapper/simulation::gone did not run")

    def test_tests_that_vanish_fail(self):
        said = target(SIMULATION, "a", "b")
        self.assertEqual(self.outcome(said, counts="# why\nswapper/simulation 2\n")[0], 0)
        code, out, _ = self.outcome(said, counts="swapper/simulation 3\n")
        self.assertEqual(code, 1, out)
        self.assertIn("swapper/simulation ran 2 tests, counts records 3", out)

    def test_targets_that_vanish_fail_and_equal_names_are_told_apart(self):
        code, out, _ = self.outcome(target(SIMULATION, "a"), counts="swapper/simulation 1\noffloadd/simulation 1\n")
        self.assertEqual(code, 1, out)
        self.assertIn("offloadd/simulation ran 0 tests", out)

    def test_two_programs_of_a_package_are_told_apart(self):
        programs = [
            {"package_id": "path+file:///r/offloadd#0.1.0", "target": {"kind": ["bin"], "name": name}, "executable": f"/r/target/debug/deps/{name}-5"}
            for name in ("a", "b")
        ]
        first, second = (f"unittests src/{name}.rs (target/debug/deps/{name}-5)" for name in ("a", "b"))
        counts = "offloadd/bin:a 2\noffloadd/bin:b 1\n"
        with unittest.mock.patch(f"{__name__}.BUILT", [*BUILT, *programs]):
            for lines in ([*target(first, "x", "y"), *target(second, "x")], [*target(second, "x"), *target(first, "x", "y")]):
                code, out, calls = self.outcome(lines, counts=counts)
                self.assertEqual(code, 0, out)
                self.assertFalse(any("--test bin" in call for call in calls), calls)
            code, out, _ = self.outcome([*target(first, "x", "y"), *target(second)], counts=counts)
            self.assertEqual(code, 1, out)
            self.assertIn("offloadd/bin:b ran 0 tests", out)

    def test_more_tests_than_recorded_are_a_note(self):
        code, out, _ = self.outcome([*target(API, "a", "b"), *target(SIMULATION, "a")], counts="offload-api/lib 1\nswapper/simulation 1\n")
        self.assertEqual(code, 0, out)
        self.assertIn("Note: more tests than counts records (`make test-counts` writes it): offload-api/lib\n", out)

    def test_the_slowest_targets_are_named(self):
        _, out, _ = self.outcome(target(API, "a"))
        self.assertTrue(re.search(r"^ +\d+\.\d +\d+\.\d +1  offload-api/lib$", out, re.MULTILINE), out)

    def test_the_slowest_tests_of_cargo_and_of_pytest_are_named(self):
        said = [
            line.replace("test b ... ok", "test b ... ok <61.250s>").replace("test a ... ok", "test a - should panic ... ok <0.001s>")
            for line in target(API, "a", "b")
        ]
        beside = """#!/bin/sh
case "$*" in "--durations=20 -k not ("*) echo "12.50s call     tests/test_x.py::test_y[a b]";; "--durations=20 -k (semantics)"*) echo "0.50s setup    tests/semantics/x.py::z";;
"--durations=20 -k ("*) ;; *) exit 2;; esac
"""
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "pytest"
            program.write_text(beside)
            program.chmod(0o755)
            code, out, calls = self.outcome(said, counts="offload-api/lib 2\n", more=["--beside", program])
        self.assertEqual(code, 0, out)
        self.assertEqual(
            out.split("Slowest tests: seconds\n")[1].splitlines(),
            ["     61.2  offload-api/lib::b", "     12.5  tests/test_x.py::test_y[a b]", "      0.5  tests/semantics/x.py::z", "      0.0  offload-api/lib::a"],
        )
        self.assertEqual([("--report-time" in call, "--doc" in call) for call in calls if "--no-run" not in call], [(True, False), (False, True)])

    def test_counts_are_recorded(self):
        lists = [
            "     Running " + API,
            "a: test",
            "b: test",
            "",
            "2 tests, 0 benchmarks",
            "   Doc-tests offload_api",
            "1 test, 0 benchmarks",
            "     Running " + SIMULATION,
            "0 tests, 0 benchmarks",
        ]
        code, out, calls = self.outcome(lists, more=["--record"])
        self.assertEqual(code, 0, out)
        self.assertEqual(self.counts.splitlines()[1:], ["offload-api/doc 1", "offload-api/lib 2"])
        self.assertTrue(calls[1].endswith("--list"), calls)


class Licenses(unittest.TestCase):
    def test_an_expression_is_met_by_allowed_licenses_only(self):
        allowed = licenses.allowed_of('[licenses]\nallow = [\n    "MIT",\n    "Zlib",\n]\n[bans]\nother = ["GPL-3.0"]\n')
        self.assertEqual(allowed, {"MIT", "Zlib"})
        for expression in ("MIT", "MIT/Apache-2.0", "Apache-2.0 WITH LLVM-exception OR MIT", "(GPL-3.0 OR MIT) AND Zlib"):
            self.assertTrue(licenses.is_allowed(expression, allowed), expression)
        for expression in ("", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR Apache-2.0) AND Zlib", "MIT WITH LLVM-exception"):
            self.assertFalse(licenses.is_allowed(expression, allowed), expression)

    def test_a_package_from_elsewhere_is_named(self):
        package = {"name": "a", "version": "1.0.0", "license": "MIT", "source": "git+https://example.org/a"}
        self.assertEqual(licenses.faults([package], {"MIT"}), ["a 1.0.0: from git+https://example.org/a, not from crates.io"])
        self.assertEqual(licenses.faults([{**package, "source": None}], {"MIT"}), [])

    def test_texts_are_those_of_linked_packages_each_once(self):
        def package(name, source=licenses.CRATES_IO):
            manifest = directory / name / "Cargo.toml"
            manifest.parent.mkdir()
            return {"id": name, "name": name, "version": "1.0.0", "license": "MIT", "source": source, "authors": ["Ada"], "manifest_path": str(manifest)}

        def needs(name, *others, kind=None):
            return {"id": name, "deps": [{"pkg": other, "dep_kinds": [{"kind": kind}]} for other in others]}

        with tempfile.TemporaryDirectory() as temporary:
            directory = pathlib.Path(temporary)
            packages = [package("ours", None), package("a"), package("b"), package("c"), package("tested")]
            for name in ("a", "b", "tested"):
                (directory / name / "LICENSE-MIT").write_text("Permission is hereby granted\n")
            nodes = [needs("ours", "a", "c"), needs("a", "b"), needs("b", "tested", kind="dev"), needs("c"), needs("tested")]
            linked = licenses.linked({"packages": packages, "resolve": {"nodes": nodes}}, ["ours"])
            self.assertEqual([one["name"] for one in linked], ["a", "b", "c"])
            text = licenses.texts(linked)
        self.assertEqual(text.count("Permission"), 1)
        self.assertIn("a 1.0.0 (MIT)\nb 1.0.0 (MIT)\n\nPermission", text)
        self.assertIn("c 1.0.0 (MIT), by Ada", text)


class Links(unittest.TestCase):
    def faults(self, text):
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root)
            (folder / "docs").mkdir()
            (folder / "README.md").write_text(text)
            (folder / "docs" / "a.md").write_text("# A page\n\n## One `thing`\n\n[back](../README.md)\n")
            return links.faults(folder)

    def test_a_link_to_a_missing_file_or_heading_is_named(self):
        self.assertEqual(
            self.faults("[a](docs/b.md) ![a](b.svg) [a](docs/a.md#two)"),
            [
                "README.md: docs/b.md: no such file",
                "README.md: b.svg: no such file",
                "README.md: docs/a.md#two: no such heading",
            ],
        )

    def test_links_that_lead_somewhere_and_code_are_fine(self):
        self.assertEqual(self.faults("[a](docs/a.md) [a](docs/a.md#one-thing) [a](https://example.org/x) `[a](b.md)`\n```\n[a](b.md)\n```\n"), [])

    def test_a_path_that_is_gone_is_named(self):
        self.assertEqual(self.faults("`docs/a.md` `docs/` `docs/b.rs` `docs/{a,b}.md`\n"), ["README.md: docs/b.rs: no such file"])

    def test_a_test_that_is_gone_is_named(self):
        source = "mod cuts {\n    fn power_fails_at_once() {}\n}\n"
        self.assertEqual(
            links.stale_tests(self.written({"a/b.rs": source}), "`cuts::*` `cuts::power_fails_...` `cuts::gone` `old::*`"), ["cuts::gone", "old::*"]
        )

    def written(self, files):
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    def test_a_repository_without_documents_is_a_fault(self):
        with tempfile.TemporaryDirectory() as root:
            self.assertEqual(len(links.faults(pathlib.Path(root))), 1)


class Words(unittest.TestCase):
    def faults(self, files):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return words.faults(pathlib.Path(root), {r"\blookouts?\b": "peer watchdog"})

    def test_a_retired_word_is_named_with_the_word_to_use(self):
        files = {"README.md": "ok\nThe Lookout.\n", "a/src/b.rs": '// lookout\nf("no", "the\nlookouts");\n'}
        self.assertEqual(self.faults(files), ["README.md:2: Lookout: write peer watchdog", "a/src/b.rs:3: lookouts: write peer watchdog"])

    def test_code_that_nobody_reads_is_not_searched(self):
        source = 'let lookout = \'"\'; // "lookout"\n\n#[cfg(test)]\nmod tests {\n    const A: &str = "lookout";\n}\n'
        self.assertEqual(self.faults({"README.md": "", "a/src/b.rs": source, "a/src/b/tests.rs": '"lookout"'}), [])

    def identifier_faults(self, files, allowed=()):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return words.identifier_faults(pathlib.Path(root), dict.fromkeys(allowed, "a reason"))

    def test_two_types_of_one_name_in_a_crate_are_named(self):
        own = {"a/Cargo.toml": "", "a/src/b.rs": "pub struct Job;\n", "a/src/c.rs": "impl D for E {\n    type Job = ();\n}\nenum Job {}\n"}
        other = {"b/Cargo.toml": "", "b/src/lib.rs": "struct Job;\n#[cfg(test)]\nmod tests {}\nstruct Job;\n", "b/tests/job.rs": "struct Job;"}
        package = f"{words.PACKAGE}/"
        python = {f"{package}_a.py": "class Unit:\n", f"{package}_b.py": "class Unit:\n", "trainer/python/tests/toy.py": "class Unit:\n"}
        found = self.identifier_faults(own | other | python)
        self.assertEqual([line.partition(":")[0] for line in found], ["a/src/c.rs", f"{package}_b.py"])
        self.assertTrue(found[0].startswith("a/src/c.rs:4: Job: the name of another type of a (a/src/b.rs:1): "), found[0])

    def test_participles_alone_and_functions_that_say_nothing_are_named(self):
        files = {
            "a/src/b.rs": "struct Opened;\nstruct OpenFile;\nenum Held {}\n// fn of\nimpl OpenFile {\n    pub(crate) const fn of() {}\n    fn of_file() {}\n}\n",
            f"{words.PACKAGE}/_a.py": "class _Kept:\n    def take(self):\n        pass\n",
            "trainer/python/tests/test_a.py": "class Tied:\n    def look(self):\n        pass\n",
            "a/target/c.rs": "fn of() {}",
            "a/src/d.rs": "fn place() {}\nfn places() {}\nfn place_tile() {}\nfn together() {}\n",
        }
        names = [tuple(line.split(": ")[:2]) for line in self.identifier_faults(files)]
        expected = [("a/src/b.rs:1", "Opened"), ("a/src/b.rs:3", "Held"), ("a/src/b.rs:6", "of")]
        expected += [("a/src/d.rs:1", "place"), ("a/src/d.rs:2", "places"), ("a/src/d.rs:4", "together")]
        expected += [(f"{words.PACKAGE}/_a.py:1", "_Kept"), (f"{words.PACKAGE}/_a.py:2", "take"), ("trainer/python/tests/test_a.py:2", "look")]
        self.assertEqual(names, expected)

    def test_an_allowed_name_that_is_gone_leaves_the_list(self):
        self.assertEqual(self.identifier_faults({"a/Cargo.toml": "", "a/src/b.rs": "struct Held;"}, [("a", "Held")]), [])
        gone = self.identifier_faults({"a/Cargo.toml": "", "a/src/b.rs": "struct OpenFile;"}, [("a", "Held")])
        self.assertEqual(gone, [".ci/words.py: a has no Held: take it out of ALLOWED"])


class Tidy(unittest.TestCase):
    def test_python_that_nothing_names_outside_of_tests_is_dead(self):
        texts = {
            ".ci/a.py": "class A:\n    def used(self):\n        pass\n    def alone(self):\n        pass\n    def test_it(self):\n        pass\nA().used\n",
            "b.sh": "python -c 'import a; a.by_a_shell()'",
            f"{tidy.PACKAGE}/c.py": "def by_a_shell():\n    pass\ndef of_a_test():\n    pass\n",
            "trainer/python/tests/test_c.py": "c.of_a_test()\ndef alone():\n    pass\n",
        }
        self.assertEqual([line.split(": ")[:2] for line in tidy.dead_python(texts)], [[".ci/a.py:4", "alone"], [f"{tidy.PACKAGE}/c.py:3", "of_a_test"]])

    def test_names_that_others_call_are_listed_as_long_as_there_are_some(self):
        name = f"{tidy.PACKAGE}/lightning.py"
        self.assertEqual(tidy.dead_python({name: "class Strategy:\n    pass\n"}), [])
        self.assertEqual([line.split(": ")[1] for line in tidy.dead_python({name: "def _helper():\n    pass\n"})], ["_helper", "lightning"])

    def test_public_rust_is_named_by_another_file(self):
        own = "pub fn used() {}\n// pub fn old() {}\npub const fn alone() {}\n    pub static mut LAST: u8 = 0;\npub struct Inferred;\nfn private() {}\n"
        texts = {"a/src/b.rs": own, "a/src/c.rs": "// alone\nfn d() { super::b::used() }", "a/tests/e.rs": "pub fn of_a_test() {}"}
        self.assertEqual([line.split(": ")[:2] for line in tidy.public_rust(texts)], [["a/src/b.rs:3", "alone"], ["a/src/b.rs:4", "LAST"]])

    def test_a_comment_and_a_docstring_have_a_width_and_a_text_has_none(self):
        wide = "x" * 30
        texts = {
            "a.py": f'"""{wide}"""\ny = "{wide}"\n# {wide}\ndef f():\n    """A\n    {wide}"""\n',
            "b.rs": f'/// {wide}\nlet x = "{wide}";\n',
            "c.toml": f"# {wide}\nd = '{wide}'\n",
        }
        self.assertEqual([line.split(": ")[0] for line in tidy.wide_comments(texts, 25)], ["a.py:1", "a.py:3", "a.py:6", "b.rs:1", "c.toml:1"])

    def test_a_long_function_of_python_is_named(self):
        body = "    pass\n"
        texts = {"a.py": f"def f():\n{body * tidy.FUNCTION_LINES_MAX}def g():\n{body * (tidy.FUNCTION_LINES_MAX - 1)}"}
        self.assertEqual([line.split(": ")[:2] for line in tidy.long_functions(texts)], [["a.py:1", "f"]])


class Cycles(unittest.TestCase):
    CRATE = {
        "a/Cargo.toml": "",
        "a/src/lib.rs": "mod b;\nmod c;\nmod d;\n",
        "a/src/b.rs": "use crate::{d, c::{self, One}};\n",
        "a/src/c/mod.rs": "mod inner;\nuse inner::Two;\n",
        "a/src/c/inner.rs": "fn f() { crate::b::g() } // use super::d::X;\n",
        "a/src/d.rs": "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::b::G;\n}\n",
    }

    def faults(self, known, **files):
        with tempfile.TemporaryDirectory() as root:
            for name, text in (self.CRATE | files).items():
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return cycles.faults(pathlib.Path(root), known)

    def test_files_in_one_direction_are_no_circle(self):
        self.assertEqual(self.faults({}), [])

    def test_files_that_import_each_other_in_turn_are_named(self):
        back = {"a/src/d.rs": "use super::c::inner;\n", "a/src/c/inner.rs": "use super::super::b;\n"}
        self.assertEqual(self.faults({}, **back), ["a: these files import each other in turn: b, c::inner, d"])
        self.assertEqual(self.faults({"a": [{"b", "c::inner", "d"}]}, **back), [])

    def test_a_circle_that_is_gone_leaves_the_list(self):
        self.assertEqual(self.faults({"a": [{"b", "d"}]}), ["a: no longer a circle, take it out of KNOWN: b, d"])


class Readme(unittest.TestCase):
    def test_the_rows_of_what_fits_are_those_of_the_models_page(self):
        cells = lambda line: [cell.strip() for cell in line.strip("| ").split("|")]
        page = (HERE.parent / "docs/models.md").read_text().partition("\n## ")[0]
        models = {row[0]: row for row in map(cells, page.splitlines())}
        readme = map(cells, (HERE.parent / "README.md").read_text().splitlines())
        rows = [row for row in readme if row[0] in models and len(row) == 5 and row[0] not in ("model", "---")]
        self.assertGreaterEqual(len(rows), 4)
        for name, *places in rows:
            self.assertEqual(places, models[name][2:], name)

    def test_the_readme_is_short(self):
        lines = (HERE.parent / "README.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 130)
        self.assertEqual([line for line in lines if len(line) > 160], [])


class Architecture(unittest.TestCase):
    def test_the_table_of_crates_has_all_dependencies(self):
        source = (HERE.parent / "trainer/tests/architecture.rs").read_text()
        source = source.split("const ARROWS")[1].split("\n];")[0].split("= &[", 1)[1]
        arrows = {name: re.findall(r'"([\w-]+)"', uses) for name, uses in re.findall(r'\(\s*"([\w-]+)",\s*&\[(.*?)\]', source, re.DOTALL)}
        page = (HERE.parent / "docs/architecture.md").read_text().split("## Crates")[1].split("\n## ")[0]
        named = {}
        for row in re.findall(r"^\| (`.*) \|$", page, re.MULTILINE):
            crates, _, uses, _ = row.split("|")[:4]
            first, *others = re.findall(r"`([\w-]+)`", re.sub(r"\(.*?\)", "", crates))
            named |= {name: [] for name in others} | {first: re.findall(r"`([\w-]+)`", uses)}
        self.assertEqual({name: sorted(uses) for name, uses in named.items()}, {name: sorted(uses) for name, uses in arrows.items()})


class Recipes(unittest.TestCase):
    def test_the_title_of_a_recipe_has_the_number_of_files_that_its_list_names(self):
        page = (HERE.parent / "docs/contributing.md").read_text().split("## How to add ...")[1].split("**Anything else**")[0]
        recipes = re.findall(r"^\*\*(An? .*?)\*\*(.*?)(?=^\*\*An? |\Z)", page, re.MULTILINE | re.DOTALL)
        self.assertGreaterEqual(len(recipes), 4)
        for title, text in recipes:
            listed = "".join(re.findall(r"^(?:\d+\. |   ).*\n", text, re.MULTILINE)) or text
            files = {one for one in re.findall(r"`([\w/-]+[./][\w./-]*)`", listed) if one.startswith("src/") or (HERE.parent / one).exists()}
            files |= set(re.findall(r"\]\(([\w/-]+\.md)", listed))
            self.assertTrue(text.startswith(f" (at most {len(files)} files)"), f"{title}: its list names {len(files)} files: {sorted(files)}")


class Picture(unittest.TestCase):
    def test_the_pictures_of_results_are_current(self):
        sys.path.insert(0, str(HERE.parent / "trainer/bench"))
        import picture

        for name, drawn in picture.current().items():
            self.assertEqual((picture.PICTURES / name).read_text(), drawn, "run `make docs`")


class Figures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sys.path.insert(0, str(HERE.parent / "trainer/bench"))
        import readme

        cls.readme, cls.stored = readme, readme.stored()

    def faults(self, *, readme=None, results=None, benchmarks=None, sources=None):
        given = (readme, results, benchmarks, sources)
        return self.readme.faults(*(kept if one is None else one for one, kept in zip(given, (*self.stored, self.readme.SOURCES))))

    def test_every_figure_of_the_readme_was_measured(self):
        self.assertEqual(self.faults(), [])

    def test_a_figure_that_is_changed_added_or_left_out_by_hand_is_named(self):
        page = self.stored[0]
        begin = page.index("| where the state is |")
        end = page.index("\n\n", begin)
        changed = 0
        for line in page[begin:end].splitlines()[2:]:
            label, cells = line[1:].split("|", 1)
            for match in re.finditer(r"(?<![\w.-])\d+(\.\d+)?(?![\w.])", cells):
                for other in (str(int(match[0].replace(".", "")) + 9000), match[0] + " to 999", ""):
                    text = f"|{label}|{cells[: match.start()]}{other}{cells[match.end() :]}"
                    found = self.faults(readme=page.replace(line, text))
                    self.assertEqual(len(found), 1, text)
                    self.assertIn(f'README.md, "{label.strip()}"', found[0])
                changed += 1
        self.assertEqual(changed, sum(len(cell) for row in self.readme.SOURCES.values() for cell in row))

    def test_a_source_that_is_gone_is_named(self):
        readme, results, benchmarks = self.stored
        for found, names in (
            (self.faults(results=[row for row in results if row["row"] != "nvme1"]), ["results.json has no row `nvme1`"]),
            (
                self.faults(benchmarks=benchmarks.replace("### Smaller GPUs", "### Smaller")),
                [f'0 rows "6.74 G, {size} GiB; ' for size in (80, 24)],
            ),
            (self.faults(readme=readme.replace("| one drive |", "| a drive |")), ["no row of SOURCES", 'no row "one drive"']),
        ):
            self.assertEqual(len(found), len(names), found)
            for one, name in zip(found, names):
                self.assertIn(name, one)


class Chart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sys.path.insert(0, str(HERE.parent / "trainer/bench/io"))
        import draw

        cls.draw = draw

    def test_the_pictures_of_stored_results_are_current(self):
        for path, picture in self.draw.stored().items():
            self.assertEqual(path.read_text(), picture, "run `make docs`")

    def test_an_axis_has_few_round_numbers_and_reaches_the_highest_point(self):
        for top, step in ((1, 0.2), (3.1, 1), (6, 1), (6.1, 2), (24, 5), (26, 5), (448, 100), (0.003, 0.0005)):
            self.assertAlmostEqual(self.draw.tick_step(top) / step, 1, msg=top)
        drawn = self.draw.svg("title", "GB/s", [], [("read", [(self.draw.SCALE[0], [(1, 12.4), (2, 24.6)])])])
        for part in (">25</text>", ">0</text>", ">GB/s</text>", ">drives</text>"):
            self.assertIn(part, drawn)
        self.assertNotIn(">30</text>", drawn)
        # Two points and the legend.
        self.assertEqual(drawn.count(self.draw.CIRCLE), 3)

    def test_lines_about_a_picture_stand_above_its_panels_and_fit(self):
        def drawn(about):
            return self.draw.svg("title", "GB/s", about, [("read", [(self.draw.SCALE[0], [(1, 2)])])])

        def size(of, about):
            return float(re.search(f' {of}="([0-9.]+)"', drawn(about))[1])

        lines = ["first", "second & third"]
        self.assertEqual(size("height", lines) - size("height", lines[:1]), self.draw.LINE_HEIGHT)
        self.assertIn("second &amp; third", drawn(lines))
        self.assertIn(f'd="M{self.draw.MARGIN} {self.draw.HEAD + 2 * self.draw.LINE_HEIGHT} V', drawn(lines))
        self.assertEqual(size("width", ["x" * 300]), 300 * self.draw.LETTER_WIDTH + 2 * self.draw.MARGIN)

    def test_what_is_no_report_is_refused(self):
        for text in ("[]", "{}", '{"rows": []}', "no JSON"):
            with tempfile.TemporaryDirectory() as directory:
                path = pathlib.Path(directory) / "it.json"
                path.write_text(text)
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    self.assertEqual(self.draw.main([str(path)]), 1)
                self.assertIn(str(path), said.getvalue())


if __name__ == "__main__":
    unittest.main()
