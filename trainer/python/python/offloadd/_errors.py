"""Errors, each of which says what to do."""

from ._offloadd import DaemonGone, Damaged, DeviceFailed, Error, LayoutChanged, NoSpace, RankGone


class NotSupported(Error):
    """The script asks for something this library does not do; the message names the alternative."""

    __module__ = "offloadd"


class OrderDiffers(Error):
    """The ranks do not make the same calls in the same order; the message says where each of them is."""

    __module__ = "offloadd"


__all__ = ["DaemonGone", "Damaged", "DeviceFailed", "Error", "LayoutChanged", "NoSpace", "NotSupported", "OrderDiffers", "RankGone"]
