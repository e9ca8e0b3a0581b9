"""Sizes of the Python package's runs for scripts that make drives for them or compare with bytes that move: the plan knows them."""

import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python/python"))

# A test drive has more than the plan says: a file has an eighth more than its part of the tiles, and a file system needs some of it.
_DRIVE_SLACK, _DRIVE_SLACK_BYTES = 1.2, 1 << 30


def device_bytes(model, optimizer=None, own=None):
    """Bytes on drives of a run of `model`, which may be on the meta device, trained by `optimizer` or not at all. `own` has keys of the section `offloadd`."""
    import offloadd

    with tempfile.TemporaryDirectory() as drive:
        config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": drive}}, "offloadd": own or {}}
        return offloadd.prepare(model, optimizer, config, run_dir=pathlib.Path(drive) / "run", plan_only=True).figures["device_bytes"]


def drive_bytes(bytes_, count):
    """The size of each of `count` test drives that hold so many bytes together."""
    return int(bytes_ / count * _DRIVE_SLACK) + _DRIVE_SLACK_BYTES


def update_bytes(plan):
    """Bytes of host memory that a step's update reads and writes, by a run's plan: tiles and gradients are read, and tiles are written."""
    figures = plan.figures
    return 2 * (figures["resident_bytes"] + figures["written_bytes"]) + figures["grad_bytes"]
