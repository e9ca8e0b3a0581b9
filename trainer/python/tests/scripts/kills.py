"""Lets a script end with SIGKILL at a named point of this library: `kill_at("sealing", 3)` when it is reached for the third time."""

import os
import signal

import offloadd._commits
import offloadd._engine
import offloadd._layout
import offloadd._run
import offloadd._state

RUN, COMMITS, ENGINE = offloadd._run.Run, offloadd._commits.Commits, offloadd._engine.Engine
GATHERING, GRADIENTS = offloadd._engine.Gathering, offloadd._engine.Gradients

# Name to the owner of a function, its name, and whether the kill comes before or after it.
POINTS = {
    # The tiles are there and have no content.
    "opened": (COMMITS, "note_step", "before"),
    # The first content is committed, and the file that tells the layout is not written.
    "initialized": (offloadd._layout, "write_private", "before"),
    "forward": (ENGINE, "_before_forward", "after"),
    "gathering": (GATHERING, "gather", "before"),
    "backward": (ENGINE, "_before_backward", "after"),
    "handing over": (GRADIENTS, "hand_over", "before"),
    "handed over": (GRADIENTS, "hand_over", "after"),
    # The update is ordered, and nothing of the step is noted.
    "stepped": (COMMITS, "note_step", "before"),
    # Between the step and what is committed with it.
    "noted": (COMMITS, "note_step", "after"),
    "sealing": (offloadd._commits, "to_blob", "before"),
    "state written": (os, "replace", "before"),
    "state named": (os, "replace", "after"),
    "sealed": (COMMITS, "seal", "after"),
    "closing": (RUN, "close", "before"),
    "closed": (RUN, "close", "after"),
}


def kill_at(point: str, number: int) -> None:
    """Arms a point."""
    owner, name, when = POINTS[point]
    original, calls = getattr(owner, name), [0]

    def reached(*args, **kwargs):
        calls[0] += 1
        if calls[0] != number:
            return original(*args, **kwargs)
        if when == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, reached)
