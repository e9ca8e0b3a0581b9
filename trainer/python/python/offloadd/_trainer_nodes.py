"""Checkpoints of Hugging Face's Trainer on nodes that share no directory (checkpoint.use_node_local_storage): every node keeps all of them.

OUTPUT_DIR/checkpoint-N/TAG, latest      see `_checkpoint`
OUTPUT_DIR/checkpoint-N/rng_state_N.pth  random numbers of each rank, which nodes exchange
OUTPUT_DIR/checkpoint-N/...              weights and the Trainer's state, which it writes on each node (save_on_each_node)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Optional, Union

from ._checkpoint import LATEST, age, check_room, latest_tag, restore_here
from ._config import Settings
from ._console import say
from ._each_node import Files, copy, described, on_files, separate
from ._ranks import Ranks

_STATE = "trainer_state.json"


def bring_checkpoints(trainer: Any, settings: Settings, resumes: bool, checkpoint: Union[str, bool, None]) -> tuple[bool, Union[str, bool, None]]:
    """Lets `trainer` keep checkpoints on each node, and copies those from which it resumes to nodes that lack them. `resumes`: this node has
    its part of the run. Returns whether all nodes have theirs, and otherwise the checkpoint to load. All ranks must call it."""
    ranks = Ranks()
    ranks.open(0)
    try:
        output_dir = Path(trainer.args.output_dir)
        if ranks.topology.nodes == 1:
            return resumes, checkpoint
        trainer.args.save_on_each_node = separate(ranks, output_dir)
        if not trainer.args.save_on_each_node:
            return resumes, checkpoint
        _exchange_random_states(trainer)
        have = ranks.meet("look for the run's parts", bytes([resumes]))
        if all(told[0] for told in have):
            return resumes, checkpoint
        if checkpoint is True:
            lacking = [str(ranks.topology.node_of(rank)) for rank in ranks.topology.first_ranks if not have[rank][0]]
            if len(lacking) < ranks.topology.nodes:
                say(f"nodes without a part of the run ({', '.join(lacking)}): training resumes from the newest checkpoint")
            path = _newest(ranks, output_dir)
        else:
            path = Path(checkpoint) if checkpoint else None
        if path is None:
            return False, None
        _restore_on_nodes(ranks, settings, path)
        best = json.loads((path / _STATE).read_text()).get("best_model_checkpoint") if (path / _STATE).exists() else None
        if best is not None and Path(best).name != path.name:
            _restore_on_nodes(ranks, settings, path.with_name(Path(best).name))
        return False, str(path)
    finally:
        ranks.meetings.close()


def _exchange_random_states(trainer: Any) -> None:
    """Gives every node the files with random numbers of all ranks."""
    plain = type(trainer)._save_rng_state

    def save(output_dir: str) -> None:
        plain(trainer, output_dir)
        ranks, directory = trainer.model_wrapped.run.ranks, Path(output_dir)
        ranks.meet("write the Trainer's random numbers")
        names = [f"rng_state_{rank}.pth" for rank in ranks.topology.local]
        files = lambda: Files(directory, [], [described(directory, name) for name in names])
        copy(ranks, "copy the Trainer's random numbers", directory, lambda: on_files(directory, files))

    trainer._save_rng_state = save


def _newest(ranks: Ranks, output_dir: Path) -> Optional[Path]:
    """The newest checkpoint that any node has whole."""
    ages = {path.parent.name: age(path.parent, latest_tag(path.parent)) for path in output_dir.glob(f"checkpoint-*/{_STATE}")}
    newest = max(ages, key=lambda name: ages[name], default=None)
    told = [one for one in ranks.by_node("compare the newest checkpoints", [newest, ages.get(newest)]) if one[0] is not None]
    return output_dir / max(told, key=lambda one: one[1])[0] if told else None


def _restore_on_nodes(ranks: Ranks, settings: Settings, path: Path) -> None:
    """Copies a checkpoint to nodes that lack it or have another one of this name."""
    names = _names(path)
    listed = [[name, (path / name).stat().st_size] for name in names]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    own = [age(path, latest_tag(path)), _STATE in names, digest, sum(size for _, size in listed)]
    told = ranks.by_node("compare the Trainer's checkpoints", own)
    source = max(range(len(told)), key=lambda node: (told[node][:2], -node))
    restore_here(settings, ranks, path, None)
    if all(one[0] == told[source][0] and one[2] == told[source][2] for one in told):
        return
    lacks = ranks.first_of_node and ranks.topology.node != source
    room = lambda: check_room(path, told[source][3]) if lacks else None
    ranks.on_all_ranks("make room for the Trainer's files", lambda: on_files(path, room), ends=False)
    sent = names if ranks.topology.node == source else []
    files = lambda: Files(path, [], [described(path, name) for name in sent])
    copy(ranks, "copy the Trainer's files", path, lambda: on_files(path, files), receives=lacks)


def _names(path: Path) -> list[str]:
    """The Trainer's own files in a checkpoint, its state last: with it, a checkpoint counts."""
    tag = latest_tag(path)
    below = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    names = [str(name) for name in below if name.parts[0] not in (LATEST, tag)]
    return sorted(names, key=lambda name: (name == _STATE, name))
