"""Each mechanism of the hooks is switched off in turn, and a test notices."""

import os
import pathlib
import sys
import tempfile
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import pytest
import torch
from torch.utils._pytree import tree_flatten

import forks
import test_engine
import test_random_models
import test_residency
import test_runs
from offloadd import _engine, _native, _reading, _released, _residency, _watch
from offloadd._engine import Engine
from offloadd._gathering import Gathering
from offloadd._gradients import Gradients
from offloadd._order import Order
from offloadd._residency import Residency
from offloadd._storage import Access
from offloadd._watch import Watch
from test_runs import lines_of


def random_models(first, last):
    """A check: all seeds have plain PyTorch's bits."""

    def check(tmp_path):
        for seed in range(first, last):
            test_random_models.compare(seed)

    return check


def named(test):
    """A check: a test of this suite."""
    return lambda tmp_path: test(tmp_path) if "tmp_path" in test.__code__.co_varnames[: test.__code__.co_argcount] else test()


def residency(test, *args):
    """A check: a test of the units that stay, with the margin of small models."""

    def check(tmp_path):
        _residency._MARGIN_BYTES = test_residency.MARGIN
        test(*args, *[None] * ("margin" in test.__code__.co_varnames[: test.__code__.co_argcount]))

    return check


def companions(patch):
    """Units gathered for another unit's forward are not brought to its backward."""
    original = Engine._after_forward

    def after_forward(self, units, root, *rest):
        gathered = list(self.forwards[-1].companions)
        self.forwards[-1].companions.clear()
        result = original(self, units, root, *rest)
        for unit in gathered:
            if torch._C._current_graph_task_id() == -1 and not unit.root:
                self.gathering.release(unit)
        return result

    patch.setattr(Engine, "_after_forward", after_forward)


def returned_weights(patch):
    """A weight that a block returns is released with the block."""
    patch.setattr(_engine, "returned", lambda unit, output: False)


def outside_uses(patch):
    """A released parameter that is used outside of any forward is used itself, and not a copy of it."""
    patch.setattr(_reading, "on_copies", lambda reader, params, func, args, kwargs: func(*args, **kwargs))


def writes(patch):
    """Nobody compares versions of parameters when they are released."""
    patch.setattr(Gathering, "_note_written", lambda self, unit, replaced=(): unit.watch.end() and None)


def data_of_writes(patch):
    """What `param.data` gives while a parameter is in memory is forgotten."""
    patch.setattr(Watch, "gave", lambda self, param, data: None)
    sums(patch)


def sums(patch):
    """The bits of parameters are never compared."""
    patch.setattr(_watch, "_SUMMED_TIMES", 0)


def below_torch_function(patch):
    """Functions that take tensors below `__torch_function__` get released parameters."""
    patch.setattr(_native, "_has_released", lambda one: False)


def addresses(patch):
    """A copy whose address was asked for goes at once."""
    patch.setattr(_released, "_ADDRESSED_MAX", 0)


def values_of_gradients(patch):
    """Gradients that a script has changed in place stay as they were."""
    patch.setattr(Gradients, "settle_changes", lambda self, given: None)


def guarded_root(patch):
    """The root's parameters, which stay between forward and backward, are used unseen."""
    original = Gathering.guard
    patch.setattr(Gathering, "guard", lambda self, unit: original(self, unit) if unit.flat.untyped_storage().size() == 0 else None)


def origin(patch):
    """Tensors that a block hands through bring it to backward too."""
    original = Engine._hook_made
    patch.setattr(Engine, "_hook_made", lambda self, output, number, units, first: original(self, output, -1, units, first))


def outputs(patch):
    """Outputs are looked into as far as PyTorch's pytree does."""
    patch.setattr(_engine, "tensors_in", lambda output: [one for one in tree_flatten(output)[0] if isinstance(one, torch.Tensor)])


def settle_early(patch):
    """A unit's backward is taken to be over when another one's begins."""
    original = Engine._before_backward
    patch.setattr(Engine, "_before_backward", lambda self, units, made, first, grad: original(self, units, -1, first, grad))


def settle_late(patch):
    """A unit's backward is taken to be over when all of it is."""
    original = Engine._before_backward
    patch.setattr(Engine, "_before_backward", lambda self, units, made, first, grad: original(self, units, 1 << 60, first, grad))


def inner_tasks_end_outer(patch):
    """A backward within another one ends the outer one's uses."""
    original = Engine._before_backward

    def before_backward(self, *args):
        task = torch._C._current_graph_task_id()
        for uses in self._active.values():
            uses[:] = [use for use in uses if use[0] == task]
        original(self, *args)

    patch.setattr(Engine, "_before_backward", before_backward)


def uses_of_one_unit(patch):
    """Only the last of several uses of a unit counts."""
    original = Engine._before_backward

    def before_backward(self, *args):
        original(self, *args)
        for uses in self._active.values():
            del uses[:-1]

    patch.setattr(Engine, "_before_backward", before_backward)


def separate_release(patch):
    """A unit is released only when all of its gradients have come."""
    original = Engine._settle
    patch.setattr(Engine, "_settle", lambda self, unit: original(self, unit) if len(unit.gradients) == len(unit.params) else None)


def revision(patch):
    """A use that deviates from the order is not announced."""
    original = Order.next

    def next(self, op):
        if self._kind not in self._known:
            return original(self, op)
        self._seen.append(op)

    patch.setattr(Order, "next", next)


def freshness(patch):
    """A unit in memory is taken to be the newest."""
    patch.setattr(Gathering, "refresh", lambda self: None)


def stale_units(patch):
    """Units that are here stay when a step is made."""
    original = Engine.updated

    def updated(self):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Gathering, "release_all", lambda self: None)
            original(self)

    patch.setattr(Engine, "updated", updated)


def order_of_sums(patch):
    """Gradients of one backward are summed before they are added to those of the step."""
    original = Gradients.collect

    def collect(self, unit, param):
        kept, self._summed = self._summed, set()
        original(self, unit, param)
        self._summed = kept | self._summed

    patch.setattr(Gradients, "collect", collect)


def versions(patch):
    """Autograd is not told that a step has changed the weights."""
    patch.setattr(torch.autograd.graph, "increment_version", lambda param: None)


def handles_before_sums(patch):
    """Handles of earlier gradients are taken away when a unit comes, not when its gradient does."""
    patch.setattr(Engine, "_before_gradient", lambda self, unit, param: self.gradients.collect(unit, param))


def dropped(patch):
    """Nobody looks whether the script has dropped gradients."""
    original = Gradients.looked_at
    patch.setattr(Gradients, "looked_at", lambda self: (set(), original(self)[1]))


def stale_gradients(patch):
    """Gradients that a step has used count as gone before the script drops them."""
    patch.setattr(Gradients, "applied", property(lambda self: False, lambda self, value: None), raising=False)


def half_backward(patch):
    """A backward that did not end counts as one."""
    patch.setattr(Gradients, "half_backward", property(lambda self: False))


def interrupts(patch):
    """A forward that an interrupt ended is taken to be under way."""
    patch.setattr(_engine, "calls_of", lambda module: 2)


def memory_that_stays(patch):
    """Memory of units that are to stay is given back."""
    original = Gathering.take_away
    patch.setattr(Gathering, "take_away", lambda self, unit, keep=False: original(self, unit))


def stale_memory(patch):
    """What stays is taken to be the newest."""
    original = Gathering.release
    patch.setattr(Gathering, "release", lambda self, unit: None if unit.kept and unit.resident else original(self, unit))


def written_memory(patch):
    """What a script has written stays."""
    original = Gathering._note_written

    def note_written(self, unit, replaced=()):
        original(self, unit, replaced)
        unit.written = False

    patch.setattr(Gathering, "_note_written", note_written)


def access_to_what_stays(patch):
    """A released unit whose memory stays may be accessed."""
    original = Access.forbid
    patch.setattr(Access, "forbid", lambda self: original(self) if self.storage.nbytes() == 0 else None)


def orders_with_what_stays(patch):
    """Passes with other units in memory are taken to be of one kind."""
    patch.setattr(Gathering, "staying", ())


def larger_inputs(patch):
    """Nobody looks at the inputs of a forward."""
    patch.setattr(_residency, "_numbers_in", lambda args, kwargs: 0)


def gathered_memory(patch):
    """Memory of weights that a script has gathered counts."""
    patch.setattr(Residency, "before_pins", None, raising=False)
    original = Residency._forget_pins

    def forget_pins(self):
        self._gathering.were_pinned = self._gathering.were_pinned and self._baseline_bytes is None
        original(self)

    patch.setattr(Residency, "_forget_pins", forget_pins)


def other_models(patch):
    """A run does not know of others on the GPU."""
    patch.setattr(Residency, "_others", lambda self: [])


def all_of_what_stays(patch):
    """Embedding and head cost nothing where another model's step takes most memory."""
    patch.setattr(Residency, "_alone", lambda self: True)


CHECKS = [
    (memory_that_stays, residency(test_residency.test_frozen_units_that_stay_come_once_and_trained_ones_once_a_step, "adapters", False, 1)),
    (stale_memory, residency(test_residency.test_frozen_units_that_stay_come_once_and_trained_ones_once_a_step, "adapters", False, 1)),
    (written_memory, residency(test_residency.test_a_write_to_a_unit_that_stays_is_named_and_does_not_stay, test_engine.WRITES["in place"])),
    (access_to_what_stays, residency(test_residency.test_a_unit_that_stays_is_released_to_the_script)),
    (orders_with_what_stays, residency(test_residency.test_an_order_with_units_that_stay_is_learned)),
    (larger_inputs, residency(test_residency.test_units_go_before_a_forward_with_larger_inputs_and_come_back_as_far_as_there_is_room)),
    (gathered_memory, residency(test_residency.test_memory_of_weights_that_a_script_has_gathered_is_left_out_of_account)),
    (other_models, residency(test_residency.test_models_on_one_gpu_choose_in_turn)),
    (all_of_what_stays, residency(test_residency.test_models_on_one_gpu_choose_in_turn)),
    (companions, named(test_engine.test_a_weight_used_by_another_block_is_gathered_for_it_and_for_its_backward)),
    (returned_weights, random_models(0, 20)),
    (outside_uses, lambda _: test_engine.test_what_an_operation_returns_outlives_the_parameters_memory(test_engine.READS["chunk"])),
    (writes, lambda _: test_engine.test_a_weight_that_is_changed_in_forward_is_named(test_engine.WRITES["in place"])),
    (data_of_writes, lambda _: test_engine.test_a_weight_that_is_changed_in_forward_is_named(test_engine.WRITES["by data"])),
    (sums, named(test_engine.test_a_weight_that_numpy_changes_in_forward_is_named)),
    (below_torch_function, lambda _: test_engine.test_what_an_operation_returns_outlives_the_parameters_memory(test_engine.READS["new tensor"])),
    (addresses, named(test_engine.test_parameters_have_addresses_of_their_own_until_the_next_step)),
    (values_of_gradients, named(test_engine.test_gradients_can_be_changed_in_place)),
    (stale_gradients, named(test_engine.test_gradients_of_the_last_step_are_not_added_to)),
    (guarded_root, named(test_engine.test_the_roots_weights_are_seen_between_forward_and_backward)),
    (origin, named(test_engine.test_few_units_are_here_at_once_and_each_comes_twice)),
    (outputs, random_models(0, 20)),
    (settle_early, random_models(0, 20)),
    (settle_late, named(test_engine.test_few_units_are_here_at_once_and_each_comes_twice)),
    (inner_tasks_end_outer, random_models(0, 60)),
    (uses_of_one_unit, random_models(0, 20)),
    (separate_release, named(test_engine.test_few_units_are_here_at_once_and_each_comes_twice)),
    (revision, named(test_engine.test_an_order_that_changes_every_step_gives_the_same_bits)),
    (freshness, named(test_runs.test_without_a_device_parameters_are_the_newest_after_each_step)),
    (stale_units, named(test_runs.test_weights_read_after_a_step_are_the_newest)),
    (order_of_sums, random_models(0, 60)),
    (versions, named(test_engine.test_a_graph_of_before_a_step_is_refused_as_plain_pytorch_does)),
    (handles_before_sums, named(test_engine.test_a_gradient_that_comes_before_any_unit)),
    (dropped, named(test_engine.test_gradients_set_to_none_by_hand_are_forgotten)),
    (half_backward, named(test_engine.test_a_forward_and_a_backward_that_fail_leave_nothing_behind)),
    (interrupts, named(test_engine.test_an_interrupt_in_a_forward_leaves_nothing_behind)),
]


def switch_off_each():
    """Runs each check without its mechanism, in a child: a kernel that reads a released weight may end the process. Prints how each ended."""
    for removed, check in CHECKS:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as dir:
                removed(patch)
                try:
                    check(pathlib.Path(dir))
                except BaseException as error:
                    print(removed.__name__, "missed:", type(error).__name__, str(error).replace("\n", " ")[:200], flush=True)
                else:
                    print(removed.__name__, "not missed", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(removed.__name__, "missed: ended with", status, flush=True)


@pytest.fixture(scope="module")
def results():
    return dict(line.split(" ", 1) for line in lines_of(forks.start(__file__)))


@pytest.mark.parametrize("name", [removed.__name__ for removed, _ in CHECKS])
def test_a_mechanism_that_is_switched_off_is_missed(results, name):
    assert results[name].startswith("missed"), results[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    switch_off_each()
