#!/usr/bin/env bash
# Checks and measures offloadd on a machine of your own, and leaves one file to send back. In a clone:
#
#   trainer/bench/owner.sh --directory /mnt/nvme0      a GPU and a drive; without --directory, the GPU alone
#   trainer/bench/owner.sh --help
#
# Says first what it will do, how long that takes at most and what it writes, and asks. PYTHON names the Python with torch
# (default: .python/bin/python of the clone, or python3).
set -euo pipefail
case ${PYTHON:-} in
    /*) ;;
    */*) PYTHON=$PWD/$PYTHON ;;
esac
cd "$(dirname "$0")/../.."
called_in=$OLDPWD

python=${PYTHON:-.python/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3

if ! "$python" -c 'import sys, importlib.util as find; sys.exit(not all(map(find.find_spec, ("torch", "transformers"))))'; then
    cat >&2 <<EOF
owner.sh: $python has no torch with transformers. Install them, for example in a venv:
  NVIDIA or no GPU    pip install 'torch==2.11.*' transformers
  AMD                 ROCm's torch 2.11, with the command that https://pytorch.org/get-started/locally gives for ROCm; then pip install transformers
PYTHON=PATH names another Python.
EOF
    exit 2
fi
exec "$python" trainer/bench/owner.py --called-in "$called_in" "$@"
