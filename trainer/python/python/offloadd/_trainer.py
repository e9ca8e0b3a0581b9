"""Hugging Face's Trainer in a process where offloadd answers to `import deepspeed`."""

from typing import Any


def patch_trainer(module: Any) -> None:
    """Called after `transformers.trainer` was imported."""
