"""`import offloadd.as_deepspeed`, before transformers and accelerate: from then on `import deepspeed` in this process is answered by
offloadd. What it answers to is in docs/pytorch.md; everything else raises `offloadd.NotSupported` by name."""

from . import _finder
from ._errors import Error

_refusal = _finder.install()
if _refusal:
    raise Error(_refusal)
