"""Products of Linear layers in 8 bits: exact where 8 bits hold the numbers, the same bits wherever the state lies, and refused by name elsewhere."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import offloadd
import offloadd.optim
from offloadd import _fp8
from offloadd._errors import Error, NotSupported
from offloadd._fp8 import Fp8Layers
from test_runs import config, needs_daemon
from toy import randomize

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False), nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x))) + self.narrow(x).sum(-1, keepdim=True) / 64


class Net(nn.Module):
    """With more blocks than come ahead, and a head outside of them."""

    def __init__(self, reentrant=None, blocks=6, width=32):
        super().__init__()
        self.blocks, self.head, self.reentrant = nn.ModuleList(Block(width) for _ in range(blocks)), nn.Linear(width, 16), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).float().square().mean()


@pytest.fixture
def small_layers(monkeypatch):
    """Processors multiply 8-bit numbers too, slowly, and layers of tests are small."""
    monkeypatch.setattr(_fp8, "why_not", lambda device: None)
    monkeypatch.setattr(_fp8, "SIDE_MIN", 16)


def net(**how):
    torch.manual_seed(0)
    return randomize(Net(**how)).to(BF16)


def inputs(count, rows=5):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, rows, 32, generator=generator).to(BF16).requires_grad_() for _ in range(count)]


def trained(model, optimizer, micro_batches=1):
    losses = []
    for number, x in enumerate(inputs(6), 1):
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
        if number % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def integers(*shape):
    """Small ones, which both formats hold, as are their products and sums in bf16."""
    return (torch.arange(torch.Size(shape).numel()) * 7 % 9 - 4).reshape(shape).to(BF16)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (5, 32), (16, 32), (2, 3, 7, 32)])
@pytest.mark.parametrize("trains", ["all", "x", "weights"])
def test_products_of_numbers_that_8_bits_hold_are_exact(shape, trains):
    layer = nn.Linear(32, 48, dtype=BF16)
    x = integers(*shape) * 0.25
    grad = integers(*shape[:-1], 48) * 2**-12
    with torch.no_grad():
        layer.weight.copy_(integers(48, 32) * 8)
        layer.bias.copy_(integers(48))
    plain, eight = copy.deepcopy(layer), layer
    found = []
    for one, call in ((plain, plain), (eight, lambda x: _fp8._forward(eight, x))):
        one.requires_grad_(trains != "x")
        own = x.clone().requires_grad_(trains != "weights")
        out = call(own)
        out.backward(grad)
        found.append([out, own.grad, one.weight.grad, one.bias.grad])
    for a, b in zip(*found):
        assert (a is None and b is None) or torch.equal(a, b)


def test_other_memory_layouts_and_autocast_are_as_a_linear_layer_has_them():
    layer = nn.Linear(32, 48, dtype=BF16)
    with torch.no_grad():
        layer.weight.copy_(integers(48, 32))
        layer.bias.zero_()
    x = integers(32, 6).t()
    assert torch.equal(_fp8._forward(layer, x), layer(x))
    assert _fp8._forward(layer, torch.empty(0, 32, dtype=BF16)).shape == (0, 48)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(_fp8._forward(layer, x.float()), layer(x))
    with pytest.raises(RuntimeError, match="dtype"):
        _fp8._forward(layer, x.float())
    expanded = _fp8._forward(layer, x.requires_grad_())
    expanded.sum().backward()
    assert torch.equal(x.grad, layer.weight.sum(0).expand(6, 32))


def test_kernels_read_plain_matrices_in_bf16_only():
    x = torch.ones(32, 16, dtype=BF16)
    assert _fp8._is_plain(x) and _fp8._is_plain(nn.Parameter(x))
    assert not any(map(_fp8._is_plain, (x.float(), x.half(), x.t(), x[:, ::2], x.expand(2, 32, 16), torch.ones(32, 16, dtype=BF16).as_subclass(Named))))
    seen = []
    torch.func.grad(lambda x: seen.append(_fp8._is_plain(x)) or x.sum())(x)
    assert seen == [False]


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["x", "weight", "grad"])
def test_a_number_that_is_not_finite_is_seen(wrong, where):
    layer = nn.Linear(32, 48, dtype=BF16)
    x, grad = torch.ones(16, 32, dtype=BF16), torch.ones(16, 48, dtype=BF16)
    with torch.no_grad():
        {"x": x, "weight": layer.weight, "grad": grad}[where][3, 5] = wrong
    x.requires_grad_()
    out = _fp8._forward(layer, x)
    out.backward(grad)
    assert out.isnan().any() == (where != "grad")
    assert x.grad.isnan().any() == (where != "x") and layer.weight.grad.isnan().any() == (where != "weight")


def test_small_and_large_numbers_keep_their_scale():
    layer = nn.Linear(32, 48, bias=False, dtype=BF16)
    for size in (1e-30, 1e-6, 1.0, 1e6, 1e30):
        x = (torch.randn(16, 32) * size).to(BF16)
        found, plain = _fp8._forward(layer, x).double(), layer(x).double()
        apart = (found - plain).norm() / plain.norm()
        assert 0.001 < apart < 0.08, size
    assert not _fp8._forward(layer, torch.zeros(16, 32, dtype=BF16)).any()


@needs_daemon
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_state_changes_no_bit(tmp_path, small_layers, reentrant, micro_batches):
    found = {}
    for device in ("none", "cpu", "nvme"):
        model = net(reentrant=reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        dir = tmp_path / device
        dir.mkdir()
        with offloadd.prepare(model, optimizer, config(device, dir, matmuls="fp8"), run_dir=dir / "run") as run:
            found[device] = trained(model, optimizer, micro_batches), {name: value.clone() for name, value in run.weights()}
    losses, weights = found.pop("none")
    for others, its_weights in found.values():
        assert others == losses and all(torch.equal(its_weights[name], value) for name, value in weights.items())
    # The first loss is plain PyTorch's with the same layers in 8 bits, and not that of bf16.
    plain = net(reentrant=reentrant)
    first = inputs(1)[0]
    in_bf16 = plain(first).item()
    layers = Fp8Layers(plain, torch.device("cpu"))
    layers.begin()
    assert plain(first).item() == losses[0] != in_bf16 and abs(losses[0] / in_bf16 - 1) < 0.02


def frozen_blocks(model):
    model.blocks[:3].requires_grad_(False)


def only_the_head(model):
    model.blocks.requires_grad_(False)


def only_biases(model):
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))


@needs_daemon
@pytest.mark.parametrize("freeze", [frozen_blocks, only_the_head, only_biases])
@pytest.mark.parametrize("own", [{}, {"units": ["Block", "head"]}])
def test_what_is_trained_and_moved_changes_no_layer(tmp_path, small_layers, freeze, own, capfd):
    found, said = [], []
    for device in ("none", "cpu"):
        model = net()
        freeze(model)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        dir = tmp_path / device
        dir.mkdir()
        with offloadd.prepare(model, optimizer, config(device, dir, matmuls="fp8", **own), run_dir=dir / "run"):
            assert "forward" not in model.head.__dict__
            found.append(trained(model, optimizer))
        said.append("12 Linear layers multiply in 8 bits" in capfd.readouterr().err)
    assert found[0] == found[1] and said == [True, True]


class Other(Block):
    pass


def test_the_blocks_that_a_script_names_compute_in_8_bits(small_layers):
    model = net(blocks=2)
    with pytest.raises(NotSupported, match=r"\(there is none\)"):
        Fp8Layers(model, torch.device("cpu"))
    assert len(Fp8Layers(model, torch.device("cpu"), ["Block"])._layers) == 4
    # Blocks of two classes are not found, and the layers of a head are no blocks.
    model.blocks.append(Other(32).to(BF16))
    model.head = nn.Sequential(*(nn.Linear(32, 32, dtype=BF16) for _ in range(3)))
    with pytest.raises(NotSupported, match=r"\(there is none\)"):
        Fp8Layers(model, torch.device("cpu"))
    found = Fp8Layers(model, torch.device("cpu"), ["Block", "Other", "head"])._layers
    assert {layer.in_features * layer.out_features for layer in found} == {32 * 64, 32 * 32} and len(found) == 9


@needs_daemon
def test_a_forward_that_was_wrapped_meanwhile_is_plain_after_the_run(tmp_path, small_layers):
    model = net()
    before = model(inputs(1)[0]).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    run = offloadd.prepare(model, optimizer, config("cpu", tmp_path, matmuls="fp8"), run_dir=tmp_path / "run")
    layer = model.blocks[1].up
    ours = layer.forward
    layer.forward = lambda x: ours(x)
    assert model(inputs(1)[0]).item() != before
    run.close(keep=True)
    assert model(inputs(1)[0]).item() == before


def test_factors_of_other_memory_layouts_are_what_matrix_units_take():
    with FakeTensorMode():
        layer = nn.Linear(32, 48, dtype=BF16, device="cuda")
        layer.weight = nn.Parameter(torch.empty(32, 48, dtype=BF16, device="cuda").t())
        # As a convolution before it gives them.
        x = torch.empty(1, 32, 16, dtype=BF16, device="cuda").transpose(1, 2)
        with torch.no_grad():
            assert _fp8._forward(layer, x).shape == (1, 16, 48)
        saved = SimpleNamespace(saved_tensors=(x[0].contiguous(), layer.weight.detach()), needs_input_grad=(True, True, False))
        grads = _fp8._Linear.backward(saved, torch.empty(48, 16, dtype=BF16, device="cuda").t())
        assert [None if grad is None else grad.shape for grad in grads] == [(16, 32), (48, 32), None]


@needs_daemon
def test_layers_that_compute_in_8_bits_are_said_and_plain_again_at_the_end(tmp_path, small_layers, capfd):
    model = net()
    before = model(inputs(1)[0]).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    run = offloadd.prepare(model, optimizer, config("cpu", tmp_path, matmuls="fp8"), run_dir=tmp_path / "run")
    assert "12 Linear layers multiply in 8 bits; left out: 6 with a side below 16" in capfd.readouterr().err
    assert model(inputs(1)[0]).item() != before
    run.close(keep=True)
    assert model(inputs(1)[0]).item() == before
    assert not any("forward" in module.__dict__ for module in model.modules())


@needs_daemon
def test_a_run_that_goes_on_with_other_products_says_so(tmp_path, small_layers, capfd):
    said = []
    for matmuls in ("dtype", "fp8", "fp8", "dtype"):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path, matmuls=matmuls), run_dir=tmp_path / "run", resume=True):
            trained(model, optimizer)
        notes = [line for line in capfd.readouterr().err.splitlines() if "note: " in line]
        said.append([line.partition("note: ")[2] for line in notes])
    was = "offloadd.matmuls was {} up to step {}, and is {} from now on"
    assert said == [[], [was.format("dtype", 6, "fp8")], [], [was.format("fp8", 18, "dtype")]]


@needs_daemon
def test_adapters_over_frozen_layers_in_8_bits(tmp_path, small_layers):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(net(), peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False), autocast_adapter_dtype=False)

    found = []
    for device in ("none", "cpu"):
        model = adapted()
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        dir = tmp_path / device
        dir.mkdir()
        with offloadd.prepare(model, optimizer, config(device, dir, matmuls="fp8"), run_dir=dir / "run"):
            layer = model.base_model.model.blocks[0].up
            assert "forward" in layer.base_layer.__dict__ and "forward" not in layer.lora_A["default"].__dict__
            found.append(trained(model, optimizer))
    assert found[0] == found[1] and len(set(found[0])) > 1


def test_compiled_blocks_have_the_bits_of_eager_ones(small_layers):
    found = []
    for compiled in (False, True):
        model = net()
        Fp8Layers(model, torch.device("cpu")).begin()
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        loss = model(inputs(1)[0])
        loss.backward()
        found.append([loss.detach(), *(param.grad for param in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_quantized_layers_are_left_out(small_layers):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: make test-tools")
    model = net()
    quantization.quantize_(model.blocks[0], quantization.Int8WeightOnlyConfig())
    assert Fp8Layers(model, torch.device("cpu"))._left_out.startswith("3 quantized")


def refused(tmp_path, model, device="none", **own):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises((Error, NotSupported)) as found:
        offloadd.prepare(model, optimizer, config(device, tmp_path, **own), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(found.value)


def test_what_cannot_compute_in_8_bits_is_refused_by_name(tmp_path, monkeypatch):
    assert "cannot be computed in 8 bits: the model does not compute on a GPU" in refused(tmp_path, net(), matmuls="fp8")
    assert 'offloadd.matmuls: "fp16": use "dtype" or "fp8"' in refused(tmp_path, net(), matmuls="fp16")
    monkeypatch.setattr(_fp8, "why_not", lambda device: None)
    assert "no Linear layer of the model's blocks can compute in 8 bits (18 with a side below 1024)" in refused(tmp_path, net(), matmuls="fp8")
    assert "(18 not in bfloat16)" in refused(tmp_path, net().float(), matmuls="fp8")
    with pytest.raises(Error, match="options has matmuls"):
        offloadd.optim.AdamW(net().parameters(), options={"matmuls": "fp8"})
