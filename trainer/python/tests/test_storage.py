"""Memory of a released unit: native code that reaches for it gets an error, and the memory comes back as it was."""

import torch

from offloadd import _storage
from offloadd._storage import Access


def refused(read):
    try:
        read()
    except RuntimeError as error:
        return str(error)
    return ""


def test_any_view_of_a_storage_is_refused_until_access_is_allowed():
    flat = torch.arange(8.0)
    views = {"itself": flat, "a view": flat.view(2, 4).t(), "a slice": flat[3:], "detached": flat.detach()}
    reads = {"sum": torch.Tensor.sum, "add_": lambda one: one.add_(1), "numpy": lambda one: one.numpy(), "address": torch.Tensor.data_ptr}
    access = Access(flat.untyped_storage(), "blocks.3")
    assert _storage.can_forbid()
    for _ in range(2):
        access.forbid()
        for name, view in views.items():
            for read in reads.values():
                found = refused(lambda: read(view))
                assert "memory of blocks.3" in found and "clone()" in found, (name, found)
        access.allow()
        assert torch.equal(flat, torch.arange(8.0)) and not refused(flat.numpy)


def test_memory_that_is_given_back_can_be_taken_again():
    storage = torch.arange(8.0).untyped_storage()
    access = Access(storage, "blocks.3")
    storage.resize_(0)
    access.forbid()
    assert storage.nbytes() == 0 and refused(storage.data_ptr) and not storage.is_shared()
    access.allow()
    storage.resize_(32)
    assert torch.empty(0).set_(storage, 0, (8,)).fill_(2).sum() == 16
    assert torch.empty(0).share_memory_().untyped_storage().is_shared(), "an empty one may be"


def test_a_version_of_torch_without_the_flags_is_told_once(monkeypatch):
    told = []
    monkeypatch.setattr(_storage, "say", told.append)
    flat = torch.arange(8.0)
    for other in (None, lambda storage, message: None):
        _storage._flag_offsets.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_set_storage_data_ptr_access_error_msg", other)
            assert not _storage.can_forbid()
            access = Access(flat.untyped_storage(), "blocks.3")
            access.forbid()
            access.forbid()
        assert flat.sum() == 28, "nothing is refused"
    _storage._flag_offsets.cache_clear()
    assert len(told) == 2 and all("torch" in line and "crashes" in line for line in told), told
