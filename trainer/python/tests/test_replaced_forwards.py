"""Features that replace forwards: their order, others' forwards before and after, copies, failures half-way, and a table of which features meet."""

import ast
import copy
import inspect
import io
import itertools
import pickle
import types

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
T = transformers

import offloadd  # noqa: E402
from offloadd import _fp8  # noqa: E402
from offloadd._experts import Experts  # noqa: E402
from offloadd._loss_chunks import LossChunks  # noqa: E402
from offloadd._mlp_chunks import MlpChunks  # noqa: E402
from offloadd._replaced_forwards import Layer, ReplacedForwards, is_given_by_others  # noqa: E402
from test_architecture import PACKAGE  # noqa: E402
from test_mlp_chunks import SIZES, VOCAB, llama, make  # noqa: E402

PRODUCTS, EXPERTS, MLP, LOSS = Layer

# Features of a model, and what becomes of them: the module in which they meet, or that has the modules of all; or why one is refused.
TABLE = {
    (PRODUCTS, EXPERTS): "model.layers.1",
    (PRODUCTS, MLP): "model.layers.1.mlp",
    (PRODUCTS, LOSS): "lm_head",
    (EXPERTS, MLP): "offloadd.mlp_chunks: model.layers.0.mlp, a MixtralSparseMoeBlock, has a ",
    (EXPERTS, LOSS): "",
    (MLP, LOSS): "",
    (PRODUCTS, EXPERTS, LOSS): "",
    (PRODUCTS, MLP, LOSS): "",
}


def layers_of(module):
    """The features that a call of the module meets, the first one first."""
    return tuple(sorted(getattr(vars(module).get("forward"), "functions", ()), reverse=True))


def in_8_bits(model):
    layers = _fp8.Fp8Layers(model, torch.device("cpu"), [*model._no_split_modules, "Head"])
    layers.begin()
    return layers.end


def experts_cut(model):
    experts = Experts(model, None, 4096)
    assert experts.cuts
    return lambda: experts.end(types.SimpleNamespace(param_groups=[], state={}))


# Begins a feature with a model, and returns what ends it.
BEGIN = {
    PRODUCTS: in_8_bits,
    EXPERTS: experts_cut,
    MLP: lambda model: MlpChunks(model, 3).end,
    LOSS: lambda model: LossChunks(model, 3).end,
}


class Head(nn.Sequential):
    """A block of a script around a head, whose layers compute in 8 bits as those of other blocks."""


def model_of(layers):
    mixture = T.MixtralConfig(**{**SIZES, "num_local_experts": 4}, experts_implementation="eager")
    model = make(mixture if EXPERTS in layers else llama())
    model.in_a_block = Head(model.lm_head)
    return model.bfloat16()


def results(model):
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (2, 17))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), model.get_input_embeddings().weight.grad, model.lm_head.weight.grad]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.fixture
def small_layers(monkeypatch):
    monkeypatch.setattr(_fp8, "why_not", lambda device: None)
    monkeypatch.setattr(_fp8, "SIDE_MIN", 16)
    monkeypatch.setattr(_fp8, "_UNIT", 1)


def test_the_table_has_all_pairs():
    assert {pair for pair in TABLE if len(pair) == 2} == set(itertools.combinations(Layer, 2))
    assert all(set(itertools.combinations(three, 2)) <= set(TABLE) for three in TABLE)


@pytest.mark.parametrize("layers", TABLE, ids=lambda layers: "-".join(layer.name for layer in layers))
def test_features_meet_in_one_order_and_leave_in_any(layers, small_layers):
    where = TABLE[layers]
    plain, expected = results(model_of(layers)), None
    for number, order in enumerate(itertools.permutations(layers)):
        model = model_of(layers)
        if where.startswith("offloadd."):
            end = BEGIN[EXPERTS](model)
            with pytest.raises(offloadd.NotSupported) as refused:
                BEGIN[MLP](model)
            assert where in str(refused.value)
            end()
            continue
        ends = [BEGIN[layer](model) for layer in order]
        found = {layer for module in model.get_submodule(where).modules() for layer in layers_of(module)}
        assert found >= set(layers) and all(list(layers_of(module)) == sorted(layers_of(module), reverse=True) for module in model.modules())
        found = results(model)
        expected = expected or found
        assert same(found, expected) and (PRODUCTS not in layers or not same(found, plain))
        # Each end leaves the others.
        for count, end in enumerate(ends if number % 2 else reversed(ends)):
            end()
        assert same(results(model), plain) and not any("forward" in vars(module) for module in model.modules())


def noted(calls, name):
    return lambda below, x: calls.append(name) or below(x)


@pytest.mark.parametrize(
    "layers", [layers for count in (2, 3) for layers in itertools.permutations(Layer, count)], ids=lambda layers: "-".join(map(str, layers))
)
def test_one_module_calls_its_features_from_the_highest_down(layers):
    module, calls, x = nn.Linear(3, 3), [], torch.ones(2, 3)
    begun = {layer: ReplacedForwards(layer, {module: noted(calls, layer)}) for layer in layers}
    while begun:
        calls.clear()
        assert torch.equal(module(x), nn.Linear.forward(module, x))
        assert calls == sorted(begun, reverse=True) == list(layers_of(module))
        begun.pop(next(iter(begun))).end()
    assert "forward" not in vars(module) and layers_of(module) == ()


def over(module, calls):
    """What another library puts over the forward that is there."""
    below = module.forward
    module.forward = lambda x: calls.append("other") or below(x)
    return module.forward


@pytest.mark.parametrize("layer", Layer)
def test_forwards_of_others(layer):
    module, calls, x = nn.Linear(3, 3), [], torch.ones(2, 3)
    theirs = over(module, calls)
    assert is_given_by_others(module)
    with pytest.raises(offloadd.NotSupported, match="forward of a Linear was replaced already"):
        ReplacedForwards(layer, {module: noted(calls, "ours")})
    assert module.forward is theirs
    del module.forward
    ours = ReplacedForwards(layer, {module: noted(calls, "ours")})
    before, theirs = module.forward, over(module, calls)
    module(x)
    ours.end()
    module(x)
    assert calls == ["other", "ours", "other"] and module.forward is theirs
    # As Accelerate takes its hooks off: what was there before is there again, and nothing of the feature.
    module.forward = before
    again = ReplacedForwards(layer, {module: noted(calls, "again")})
    module(x)
    again.end()
    assert calls[3:] == ["again"] and "forward" not in vars(module)


def test_a_feature_that_fails_half_way_has_replaced_nothing():
    modules, calls = [nn.Linear(3, 3) for _ in range(3)], []
    first = ReplacedForwards(PRODUCTS, {modules[0]: noted(calls, 1)})
    for spoil in (lambda: over(modules[2], calls), lambda: ReplacedForwards(MLP, {modules[2]: noted(calls, 2)})):
        vars(modules[2]).pop("forward", None)
        spoil()
        with pytest.raises(offloadd.NotSupported, match="replaced already"):
            ReplacedForwards(MLP, {module: noted(calls, 3) for module in modules})
        assert layers_of(modules[0]) == (PRODUCTS,) and "forward" not in vars(modules[1])
    first.end()


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded], ids=["deepcopy", "pickle", "torch.save"]
)
def test_copies_are_plain(copied):
    model, calls, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [], torch.ones(2, 3)
    ours = ReplacedForwards(LOSS, {model[0]: noted(calls, "ours")})
    twin = copied(model)
    assert torch.equal(twin(x), model(x)) and calls == ["ours"]
    with torch.no_grad():
        twin[0].weight.zero_(), twin[0].bias.zero_()
    assert not twin(x).any() and layers_of(twin[0]) == () and not is_given_by_others(twin[0])
    # Others load it without this library.
    assert b"offloadd" not in pickle.dumps(model).replace(__name__.encode(), b"")
    # A feature may begin with it, and ends by itself.
    of_twin = ReplacedForwards(LOSS, {twin[0]: noted(calls, "twin")})
    ours.end()
    twin(x), model(x)
    of_twin.end()
    assert calls == ["ours", "twin"] and "forward" not in vars(twin[0])


def test_others_see_the_arguments_and_compilers_the_operations():
    module, calls = nn.Linear(3, 3), []
    ours = ReplacedForwards(PRODUCTS, {module: lambda below, x: below(x) * 2})
    assert inspect.signature(module.forward) == inspect.signature(nn.Linear(3, 3).forward)
    torch._dynamo.reset()
    compiled, x = torch.compile(module, backend="eager", fullgraph=True), torch.ones(2, 3)
    assert torch.equal(compiled(x), nn.Linear.forward(module, x) * 2)
    ours.end()
    assert torch.equal(compiled(x), nn.Linear.forward(module, x)) and not calls


def test_no_other_file_replaces_forwards():
    found = []
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in targets:
                name = target.attr if isinstance(target, ast.Attribute) else getattr(getattr(target, "slice", None), "value", None)
                found += [path.name] * (name == "forward")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                found += [path.name] * any(getattr(one, "value", None) == "forward" for one in node.args)
    assert found == ["_replaced_forwards.py"]


def test_a_bound_method_is_plain_only_if_it_is_the_forward_of_the_class():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for forward, given in ((module.forward, False), (types.MethodType(lambda self, x: x, module), True), (other.forward, True)):
        module.forward = forward
        assert is_given_by_others(module) == given


def test_a_shallow_copy_shares_the_forward_of_the_module():
    module = nn.Linear(2, 2)
    ReplacedForwards(PRODUCTS, {module: lambda below, x: below(x) + 1})
    shallow = copy.copy(module)
    assert shallow.forward is module.forward and torch.equal(shallow(torch.ones(1, 2)), module(torch.ones(1, 2)))
