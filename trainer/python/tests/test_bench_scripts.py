"""The scripts of trainer/bench: each answers --help with its purpose and an example, and trainer/bench/README.md lists both."""

import os
import pathlib
import re
import subprocess
import sys

import forks

ROOT = pathlib.Path(__file__).resolve().parents[3]
BENCH = ROOT / "trainer/bench"
# What several of them import, which takes seconds.
IMPORTS = ("transformers", "transformers.models.llama.modeling_llama", "peft")


def help_of(path):
    """Returns what a script prints when it is asked for help."""
    if path.suffix == ".py":
        script = forks.start(path, "--help", environment={"COLUMNS": "200"}, imports=IMPORTS)
        out, errors = script.communicate()
    else:
        script = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHON": sys.executable})
        out, errors = script.stdout, script.stderr
    assert script.returncode == 0, f"{path}: {out}{errors}"
    return out


def row_of(path, text):
    """Returns the line of README.md: the first sentence of a help, and its first example, which names the script from the repository's directory."""
    purpose = re.search(r"^[A-Z].*?\.(?= |$)", text, re.MULTILINE)
    example = re.search(rf"^ +(\S.*?)?{re.escape(str(path.relative_to(ROOT)))}(?: ?\S)*", text, re.MULTILINE)
    assert purpose, f"{path}: no sentence says what it is for:\n{text}"
    assert example, f"{path}: no example:\n{text}"
    name = path.relative_to(BENCH)
    return f"| [{name}]({name}) | {purpose[0].removesuffix('.')} | `{example[0].strip()}` |"


def test_every_script_says_what_it_measures_and_the_readme_lists_it():
    scripts = [path for path in sorted(BENCH.rglob("*")) if path.suffix in (".py", ".sh") and os.access(path, os.X_OK)]
    modules = [path for path in BENCH.rglob("*.py") if path not in scripts and not path.with_suffix(".sh").exists()]
    startable = [path for path in modules if "ArgumentParser" in path.read_text()]
    assert not startable, f"chmod +x {startable}"
    listed = [line for line in (BENCH / "README.md").read_text().splitlines() if line.startswith("| [")]
    expected = [row_of(path, help_of(path)) for path in scripts]
    assert sorted(listed) == sorted(expected), "\n".join(["README.md of trainer/bench needs these lines:", *sorted(set(expected) - set(listed))])
