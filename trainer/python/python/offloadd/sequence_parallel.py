"""Sequences whose parts lie on several ranks, in a loop of one's own.

run = offloadd.prepare(model, optimizer, {"sequence_parallel_size": 2, ...})
for batch in run.batches(sequence_parallel.Loader(loader)):
    logits = model(**batch).logits
    loss = model.loss_function(logits=logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=model.config.vocab_size)
    sequence_parallel.mean(loss, batch["shift_labels"]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from ._sequence_attention import paused
from ._sequence_loader import Loader
from ._sequence_mean import mean

__all__ = ["Loader", "mean", "paused"]
