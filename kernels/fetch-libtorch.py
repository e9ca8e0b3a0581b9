#!/usr/bin/env python3
"""Puts the CPU half of libtorch 2.11.0 under DIR (default .libtorch): 545 MB fetched, 410 MB kept.

    python3 kernels/fetch-libtorch.py [DIR]
    python3 kernels/fetch-libtorch.py --nvrtc DIR      NVIDIA's run-time compiler instead (90 MB), for tests without a GPU

No CPU-only libtorch is on PyPI for x86-64, so this takes the CUDA wheel and keeps what a program without
a GPU needs: libtorch_cpu, libc10, OpenMP, the headers, and the two CUDA stubs libtorch_cpu links against.
The libraries find each other by their own relative RUNPATH, so the layout torch/lib beside nvidia/cu13/lib
must stay. A second run does nothing. Needs pip (or the venv module, which brings it)."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

TORCH = "2.11.0"
# (requirement, start of the wheel's sha256, what to keep: (prefix in the wheel, names or None for all))
WHEELS = [
    (
        f"torch=={TORCH}",
        "0f68f4ac",
        [
            ("torch/lib/", ("libtorch_cpu.so", "libtorch.so", "libc10.so", "libgomp", "libshm.so")),
            ("torch/include/", None),
        ],
    ),
    ("nvidia-cuda-runtime==13.0.96", "", [("nvidia/cu13/lib/", ("libcudart",))]),
    ("nvidia-cuda-cupti==13.0.85", "", [("nvidia/cu13/lib/", ("libcupti.so",))]),
]

NVRTC = [
    ("nvidia-cuda-nvrtc==13.0.88", "ad9b6d2e", [("nvidia/cu13/lib/", ("libnvrtc.so.13", "libnvrtc-builtins.so.13"))]),
]


def pip(work):
    """A pip that runs: this Python's, or one in a throw-away environment."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    home = work / "venv"
    if subprocess.run([sys.executable, "-m", "venv", str(home)], capture_output=True).returncode != 0:
        sys.exit("fetching libtorch needs pip: install python3-pip or python3-venv")
    return [str(home / "bin" / "python"), "-m", "pip"]


def keep(wheel, rules, target):
    with zipfile.ZipFile(wheel) as z:
        for item in z.infolist():
            for prefix, names in rules:
                rest = item.filename.removeprefix(prefix)
                if item.is_dir() or rest == item.filename:
                    continue
                if names is not None and not rest.startswith(names):
                    continue
                path = target / item.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with z.open(item) as source, open(path, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)


def main():
    if sys.argv[1:2] == ["--nvrtc"]:
        folder = pathlib.Path(sys.argv[2]).absolute()
        if not (folder / "nvidia").exists():
            print(f"fetching NVRTC (90 MB) into {folder}", flush=True)
            fetch(folder, NVRTC, ["nvidia"])
        return
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".libtorch").absolute()
    marker = folder / "torch" / "build-version"  # torch-sys reads it; written last, so it marks a whole install
    if marker.exists() and marker.read_text().startswith(TORCH):
        return
    print(f"fetching libtorch {TORCH} (545 MB) into {folder}", flush=True)
    fetch(folder, WHEELS, ["torch", "nvidia"])
    marker.write_text(f"{TORCH}\n")


def fetch(folder, wheels_wanted, parts):
    """Puts `parts` of the wheels under `folder`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = pathlib.Path(scratch)
        command = pip(work)
        stage = work / "stage"
        for requirement, sha256, rules in wheels_wanted:
            wheels = work / requirement
            platforms = [f"--platform=manylinux{n}_x86_64" for n in ("_2_28", "_2_27", "_2_25", "_2_24", "_2_17", "_2_12", "2014", "2010")]
            subprocess.run(
                command
                + [
                    "download",
                    "--no-deps",
                    "--only-binary=:all:",
                    "--python-version=312",
                    "--implementation=cp",
                    *platforms,
                    "-q",
                    "-d",
                    str(wheels),
                    requirement,
                ],
                check=True,
            )
            (wheel,) = wheels.glob("*.whl")
            found = (
                hashlib.file_digest(open(wheel, "rb"), "sha256").hexdigest() if sys.version_info >= (3, 11) else hashlib.sha256(wheel.read_bytes()).hexdigest()
            )
            if not found.startswith(sha256):
                sys.exit(f"{wheel.name}: sha256 {found}, expected {sha256}...: the download is not the wheel this was tested with")
            keep(wheel, rules, stage)
            wheel.unlink()
        for part in parts:
            shutil.rmtree(folder / part, ignore_errors=True)
            os.replace(stage / part, folder / part)


main()
