"""Memory that a script holds from before `prepare`: what is said of it, and what is not held. What its use does: the theme of semantics/idioms.py."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offloadd
from offloadd._held import HeldMemory
from test_runs import needs_daemon
from test_weights import prepared

HELD = "of memory that parameters had before offloadd.prepare stay beside the tiles: the script holds that of "


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_memory_that_stays_beside_the_tiles_is_said(tmp_path, capfd):
    model = net()
    state = model.state_dict()
    run, _ = prepared(model, tmp_path / "one")
    assert f"warning: 32.5 KiB {HELD}0.weight" in capfd.readouterr().err
    run.close(keep=True)
    del state, run
    run, _ = prepared(model, tmp_path / "two")
    run.close()
    assert HELD not in capfd.readouterr().err


def test_a_closed_run_has_no_memory_of_its_model(tmp_path, capfd):
    model = net()
    first, _ = prepared(model, tmp_path / "one")
    first.close(keep=True)
    memory = StorageWeakRef(model[0].weight.untyped_storage())
    second, _ = prepared(model, tmp_path / "two")
    assert memory.expired() and HELD not in capfd.readouterr().err
    first.close()
    second.close()


def test_what_a_script_drops_later_is_free(tmp_path):
    model = net()
    kept, memory = model.state_dict(), StorageWeakRef(model[0].weight.untyped_storage())
    run, _ = prepared(model, tmp_path / "run")
    del kept
    assert memory.expired()
    run.close()


def test_what_locals_gave_a_script_stays(tmp_path):
    model = net()
    kept, own = model.state_dict(), locals()
    run, _ = prepared(model, tmp_path / "run")
    assert own["model"] is model and own["kept"] is kept
    run.close()


@needs_daemon
def test_a_resumed_run_refuses_what_was_held_at_once(tmp_path):
    for committed in (False, True):
        model = net()
        held = model[0].weight.data
        run, optimizer = prepared(model, tmp_path, device="nvme")
        if committed:
            with pytest.raises(offloadd.NotSupported, match="read them again"):
                held.sum()
        else:
            held.sum()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        run.close()


def test_garbage_holds_nothing(tmp_path, capfd):
    model = net()
    garbage = [model[0].weight.data]
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        run, _ = prepared(model, tmp_path / "run")
    finally:
        gc.enable()
    run.close()
    assert HELD not in capfd.readouterr().err


def test_nothing_is_looked_for_where_nobody_holds_anything(monkeypatch, tmp_path):
    """What looks at all objects of a process takes a second with transformers."""
    monkeypatch.setattr(HeldMemory, "_find_tensors", None)
    run, _ = prepared(net(), tmp_path / "run")
    run.close()
    torch.save(net().state_dict(), tmp_path / "weights")
    model = net()
    # Memory of a file's is nobody's array.
    model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
    run, _ = prepared(model, tmp_path / "other")
    run.close()


def test_what_a_refusal_has_found_stays_as_it_was(tmp_path):
    model = net()
    model[1].requires_grad_(False)
    frozen, array = model[1].weight.detach().numpy(), model[0].weight.detach().numpy()
    with pytest.raises(offloadd.NotSupported, match=r"an array of numpy of shape \(64, 64\) has the memory of 0.weight"):
        prepared(model, tmp_path / "run")
    frozen[:] = 1
    assert (model[1].weight == 1).all() and array is not None
