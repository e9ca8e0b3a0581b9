"""The wheel's content beside the package's code: the extension's stub, the programs, the tag, the glibc that it is linked with, the container."""

import ast
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from offloadd import _offloadd, _program

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.append(str(HERE.parent))

import wheel_tag  # noqa: E402
from build_backend import whole_wheel  # noqa: E402


def stub_of(path):
    """Name to arguments of a function, to base and members of a class, in a stub."""
    return members(ast.parse(path.read_text()).body)


def members(body):
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            static = any(decorator.id == "staticmethod" for decorator in node.decorator_list)
            found[node.name] = ("static " if static else "", *(arg.arg for arg in node.args.args))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ([base.id for base in node.bases], members(node.body))
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = "attribute"
    return found


def members_of(owner):
    """The same of an extension's module or class."""
    found = {}
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__bases__ if base is not object]
            found[name] = (bases, members_of(value))
        elif inspect.isgetsetdescriptor(value) or isinstance(value, (str, int)):
            found[name] = "attribute"
        else:
            function = getattr(owner, name)
            found[name] = ("static " if isinstance(value, staticmethod) else "", *inspect.signature(function).parameters)
    if isinstance(owner, type) and owner.__text_signature__:
        found["__init__"] = ("", "self", *inspect.signature(owner).parameters)
    return found


def test_the_stub_has_the_names_and_arguments_of_the_extension():
    stub = stub_of(pathlib.Path(_program.__file__).with_name("_offloadd.pyi"))
    extension = members_of(_offloadd)
    assert stub.keys() == extension.keys()
    for name, expected in extension.items():
        assert stub[name] == expected, name


def test_python_files_of_another_build_are_refused_by_name(tmp_path):
    ours = pathlib.Path(_program.__file__).parent
    package = tmp_path / "offloadd"
    package.mkdir()
    for file in ("__init__.py", pathlib.Path(_offloadd.__file__).name):
        (package / file).symlink_to(ours / file)
    importing = [sys.executable, "-c", "import offloadd._offloadd"]
    for stub, refused in (((ours / "_offloadd.pyi").read_text() + "def more() -> None: ...\n", True), ((ours / "_offloadd.pyi").read_text(), False)):
        (package / "_offloadd.pyi").write_text(stub)
        found = subprocess.run(importing, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert (found.returncode != 0) == refused, found.stderr
        assert not refused or f"ImportError: {package}/__init__.py: the extension _offloadd beside it was built for other Python files" in found.stderr


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A directory of a torch of version 2.11.0, and what is run in the end."""
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("__all__ = ['__version__']\n__version__ = '2.11.0+cu130'\n")
    ran = []
    monkeypatch.setattr(_program, "_torch", lambda: torch)
    monkeypatch.setattr(os, "execv", lambda program, args: ran.append((str(program), args[1:], os.environ.get("LD_LIBRARY_PATH"))))
    monkeypatch.setattr(sys, "argv", ["name", "--help"])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    return torch, ran


def test_the_trainer_is_run_with_the_libraries_of_the_installed_torch(installed):
    torch, ran = installed
    _program.trainer()
    assert ran == [(str(_program.BIN / "trainer"), ["--help"], f"{torch / 'lib'}:/before")]
    _program.bench_io()
    assert ran[1][0] == str(_program.BIN / "bench-io")


def test_the_trainer_names_the_torch_that_it_needs(installed, monkeypatch):
    torch, ran = installed
    (torch / "version.py").write_text("__version__ = '2.4.1'\n")
    with pytest.raises(SystemExit, match=r"linked with torch 2.11, and torch 2.4.1 is installed in .*: pip install 'torch==2.11.\*'"):
        _program.trainer()
    monkeypatch.setattr(_program, "_torch", lambda: None)
    with pytest.raises(SystemExit, match="torch is not installed"):
        _program.trainer()
    assert not ran


def test_the_trainers_torch_is_the_one_it_is_linked_with():
    assert f'\nTORCH = "{_program.TRAINERS_TORCH}.' in (ROOT / "kernels" / "fetch-libtorch.py").read_text()


def test_a_program_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(_program, "BIN", tmp_path)
    with pytest.raises(SystemExit, match=f"offloadd: {tmp_path}/offloadd cannot be started: No such file"):
        _program.offloadd()


def test_pip_builds_the_wheel_without_a_torch_in_its_environment(tmp_path, monkeypatch):
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(
        "#!/bin/sh\nfor given; do case $given in MATURIN=*) export GIVEN_$given;; WHEELS=*) wheels=${given#WHEELS=};; esac; done; env > $wheels/built.whl\n"
    )
    make.chmod(0o755)
    monkeypatch.setenv("PATH", f"{make.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LIBTORCH_USE_PYTORCH", "1")
    monkeypatch.setenv("LIBTORCH", "/elsewhere/torch")
    (tmp_path / "wheels").mkdir()
    assert whole_wheel.build_wheel(tmp_path / "wheels") == "built.whl"
    environment = (tmp_path / "wheels" / "built.whl").read_text().splitlines()
    # The program of pip's environment, which is beside no Python.
    assert "GIVEN_MATURIN=maturin" in environment
    assert "LIBTORCH=/elsewhere/torch" in environment
    assert not any(line.startswith("LIBTORCH_USE_PYTORCH") for line in environment), "pip's environment has no torch to import"


def test_pips_environment_has_the_modules_that_the_build_runs():
    required = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    by_make = re.findall(r"\$\(PYTHON\) -m (\w+)", (ROOT / "Makefile").read_text())
    for_zig = re.findall(r'sys\.executable, "-m", "(\w+)"', (HERE.parent / "old_glibc" / "old_glibc.py").read_text())
    assert by_make and for_zig and {*by_make, *for_zig} <= set(re.findall(r'"(\w+)', required))


@pytest.mark.parametrize(
    "versions, expected",
    [
        (["GLIBC_2.2.5", "GLIBC_2.17"], 28),
        (["GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"], 28),
        (["GLIBC_2.34", "GLIBC_2.4"], 34),
        (["GLIBC_2.28", "GLIBCXX_3.4.29"], 34),
        (["GLIBC_2.28", "CXXABI_1.3.12"], 31),
    ],
)
def test_a_wheels_tag_follows_from_the_newest_symbols(tmp_path, versions, expected):
    (tmp_path / "old").write_bytes(b"\0GLIBC_2.2.5\0")
    (tmp_path / "program").write_bytes(b"\x7fELF\0" + b"\0".join(version.encode() for version in versions) + b"\0")
    assert wheel_tag.tag([tmp_path / "old", tmp_path / "program"]) == f"manylinux_2_{expected}"


@pytest.fixture
def old_glibc():
    """What `make wheel` links with."""
    directory = ROOT / "target" / "glibc-2.28"
    if not (directory / "made-from").exists():
        pytest.skip(f"there is no {directory}: make test-tools")
    return directory


@pytest.mark.parametrize("optimized", ["-O0", "-O2"])
def test_a_program_linked_with_the_old_glibc_runs_on_systems_that_have_it(old_glibc, tmp_path, optimized):
    program = tmp_path / "check"
    compiled = ["c++", "-std=c++17", "-Wall", optimized, str(HERE.parent / "old_glibc" / "check.cpp"), "-pthread", "-o", str(program)]
    linked = [f"-B{old_glibc}", f"-L{old_glibc}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(compiled + linked, check=True)
    assert wheel_tag.tag([program]) == "manylinux_2_28"
    subprocess.run([program], check=True)


def symbols(files, defined):
    """Names of dynamic symbols, each with its version. A program does without an undefined weak one."""
    listed = subprocess.run(["objdump", "-T", *files], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines() if re.match(r"[0-9a-f]{16} ", line)]
    if defined:
        return {(line[-1], line[-2].strip("()")) for line in lines if "*UND*" not in line}
    return {(line[-1], line[-2].strip("()")) for line in lines if "*UND*" in line and line[1] != "w"}


def test_every_symbol_that_a_wheel_needs_is_in_the_old_glibc(old_glibc):
    """Of the programs that are built here: `make wheel` would fail where this does, or compute a newer tag."""
    built = [ROOT / "target" / "debug" / name for name in ("offloadd", "trainer", "trainer-with-torch", "bench-io", "lib_offloadd.so")]
    needed = symbols([file for file in built if file.exists()], defined=False)
    assert len(needed) > 100
    libraries = sorted(old_glibc.glob("lib*.so.[0-9]")) + [old_glibc / "ld-linux-x86-64.so.2"]
    archives = subprocess.run(["nm", "-A", *old_glibc.glob("*.a")], capture_output=True, text=True, check=True).stdout
    has = {name for name, _ in symbols(libraries, defined=True)} | set(re.findall(r" [TVWRB] (\S+)$", archives, re.M))
    newer = set()
    for name, version in needed:
        library, _, number = version.partition("_")
        newest = {"GLIBC": "2.28", "GLIBCXX": wheel_tag.ALLOWED[28][0], "CXXABI": wheel_tag.ALLOWED[28][1]}.get(library)
        if newest and wheel_tag.numbers(number) > wheel_tag.numbers(newest) and name not in has:
            newer.add(f"{name} {version}")
    assert not newer, "define them in trainer/python/old_glibc, or do without them"


def test_the_dockerfile_has_no_faults():
    hadolint = shutil.which("hadolint", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: make test-tools")
    done = subprocess.run([hadolint, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_has_the_projects_compiler_and_torch():
    text = (ROOT / "Dockerfile").read_text()
    compiler = (ROOT / "rust-toolchain.toml").read_text().split('channel = "')[1].split('"')[0]
    assert f"FROM rust:{compiler}-" in text and f"RUSTUP_TOOLCHAIN={compiler}\n" in text
    assert f"torch=={_program.TRAINERS_TORCH}." in text
