"""Which cases of a table run: those of a push, or all of them, as `make nightly` asks for (docs/contributing.md)."""

import os

ALL_CASES = "OFFLOADD_ALL_CASES" in os.environ
