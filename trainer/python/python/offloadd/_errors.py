"""Errors, each of which says what to do."""

from ._offloadd import Damaged, DeviceFailed, Error, LayoutChanged


class NotSupported(Error):
    """The script asks for something this library does not do; the message names the alternative."""


__all__ = ["Damaged", "DeviceFailed", "Error", "LayoutChanged", "NotSupported"]
