"""Errors, each of which says what to do."""

from ._offloadd import DaemonGone, Damaged, DeviceFailed, Error, LayoutChanged, NoSpace


class NotSupported(Error):
    """The script asks for something this library does not do; the message names the alternative."""


__all__ = ["DaemonGone", "Damaged", "DeviceFailed", "Error", "LayoutChanged", "NoSpace", "NotSupported"]
