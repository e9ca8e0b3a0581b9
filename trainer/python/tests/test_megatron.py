"""`offloadd.optim` below Megatron-Core's DistributedDataParallel, which moves each gradient to a buffer: `param.grad` is None, and
`param.main_grad` a part of the buffer, in fp32 also where the parameter is bf16."""

import contextlib
import re
from unittest import mock

import pytest
import torch

import offloadd
from offloadd import _param_units
from offloadd.optim import clip_grad_norm_
from ranks import on_ranks
from test_only_optimizer_ranks import llama, loader, snippet
from test_runs import PROGRAM, batches, model_of, needs_daemon

STEPS = 6


@contextlib.contextmanager
def on_processor():
    """Lets Megatron have its buffers, which lie on the current GPU, on the processor. Gives what it wants to know of a model."""
    # Its import takes seconds, and other tests do not need it.
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        yield TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def wrapped(model, **more):
    """The model as Megatron wraps it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with on_processor() as config:
        return DistributedDataParallel(config, DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **more}), model)


def backward(model, x, rank, ranks, finish=True):
    """The gradients of a step of two micro-batches on each rank, summed over the ranks."""
    model.zero_grad_buffer()
    for part in x.chunk(2 * ranks)[2 * rank : 2 * rank + 2]:
        model(part.to(next(model.parameters()).dtype)).square().backward()
    if finish:
        model.finish_grad_sync()


def optimizer_of(params, dir=None, kind=offloadd.optim.AdamW, **more):
    return kind(params, lr=1e-2, directory=dir, options={"program": PROGRAM, **({"gradients": "nvme"} if dir else {})}, **more)


def train(rank, ranks, dtype, dir=None, steps=STEPS, overlap=False, kind="AdamW", **more):
    """The parameters, the optimizer's masters of them, and the masters of torch's optimizer of this name, which gets the same gradients in fp32."""
    _param_units.UNIT_ELEMS = 48
    module = model_of(dtype)
    model = wrapped(module, overlap_grad_reduce=overlap)
    named = {name: param for name, param in module.named_parameters() if kind != "Muon" or param.ndim == 2}
    optimizer = optimizer_of(named.items(), dir, getattr(offloadd.optim, kind), **more)
    first = optimizer.resume()
    masters = {name: torch.nn.Parameter(param.detach().float()) for name, param in model_of(dtype).named_parameters() if name in named}
    plain = getattr(torch.optim, kind)(masters.values(), lr=1e-2)
    for x in batches(steps)[first:]:
        backward(model, x, rank, ranks)
        came = {name: param.main_grad.clone() for name, param in named.items()}
        assert all(param.grad is None and param.main_grad.dtype == torch.float32 for param in module.parameters())
        norm = clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        for name, master in masters.items():
            master.grad = came[name]
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(masters.values(), 0.5), rtol=1e-5, atol=0)
        for name, param in named.items():
            torch.testing.assert_close(param.main_grad, masters[name].grad, rtol=1e-5, atol=1e-7)
        plain.step()
    state = optimizer.state_dict()["state"]
    found = {name: param.detach().clone() for name, param in named.items()}
    kept = {name: state[index].get("master_param", found[name]) for index, name in enumerate(found)}
    optimizer.close()
    return found, kept, {name: master.detach() for name, master in masters.items()}


def cells(rank, ranks, dir):
    """What `train` finds with each type of parameters and with Muon, and in a run that is closed and resumed. Bf16 masters, frozen parameters and
    the page's example run too."""
    found = {(dtype, "AdamW"): train(rank, ranks, dtype, overlap=dtype == torch.bfloat16) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    found[torch.bfloat16, "Muon"] = train(rank, ranks, torch.bfloat16, kind="Muon")
    first = train(rank, ranks, torch.bfloat16, dir / "bf16-master", 3, master="bf16", moments="8bit")
    assert not torch.equal(first[0]["head.weight"], model_of(torch.bfloat16).head.weight)
    train(rank, ranks, torch.bfloat16, dir / "drive", 3)
    frozen = model_of()
    model, optimizer = wrapped(frozen), optimizer_of(frozen.named_parameters())
    frozen.head.weight.requires_grad_(False)
    optimizer.resume()
    frozen.head.bias.requires_grad_(False)
    backward(model, batches(1)[0], rank, ranks)
    optimizer.step()
    before, now = dict(model_of().named_parameters()), dict(frozen.named_parameters())
    assert {name for name in now if torch.equal(now[name], before[name])} == {"head.weight", "head.bias"}, "zeros of the buffer are no gradient"
    optimizer.close()
    with on_processor() as config:
        page = snippet(7, dir, {"config": config, "module": llama(), "loader": loader()})
    assert page["optimizer"].steps_done == 4 and not torch.equal(page["module"].lm_head.weight, llama().lm_head.weight)
    page["optimizer"].close()
    return found, train(rank, ranks, torch.bfloat16, dir / "drive")


@needs_daemon
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_have_the_values_of_torchs_optimizers_on_the_fp32_gradients(tmp_path, ranks):
    told = on_ranks(ranks, tmp_path / "store", cells, tmp_path)
    for found, resumed in told:
        for (dtype, _), (params, kept, expected) in found.items():
            for name, master in expected.items():
                torch.testing.assert_close(kept[name], master, rtol=0, atol=2e-6)
                assert torch.equal(params[name], kept[name].to(dtype)), name
        alike = torch.bfloat16, "AdamW"
        for name, param in found[alike][0].items():
            assert torch.equal(resumed[0][name], param), "the run that is resumed has the bits of the one in host memory"
            assert torch.equal(told[0][0][alike][0][name], param), "all ranks have the same parameters"


def refused(rank, ranks):
    """The errors of what cannot be served."""
    told, made_here = {}, []

    def expect(name, call):
        with pytest.raises(offloadd.NotSupported) as raised:
            call()
        told[name] = str(raised.value)

    def adamw(module, **more):
        # All ranks close theirs at the same time, which is the end.
        made_here.append(optimizer_of(module.named_parameters(), **more))
        return made_here[-1]

    def made(**more):
        module = model_of(torch.bfloat16)
        return module, wrapped(module, **more)

    x = batches(1)[0]
    for name, more, finish in (("sharded", {"use_distributed_optimizer": True}, True), ("unfinished", {}, False)):
        module, model = made(**more)
        backward(model, x, rank, ranks, finish)
        optimizer = adamw(module)
        expect(name, optimizer.step)
        expect(name + ", clipped", lambda: clip_grad_norm_(optimizer, 1.0))
    module, model = made()
    backward(model, x, rank, ranks)
    expect("overlap", adamw(module, overlap_backward=True).resume)
    expect("begun", lambda: adamw(module).update_in_backward().__enter__())
    module.head.bias.grad = torch.zeros_like(module.head.bias)
    expect("both", adamw(module).step)
    module.head.bias.grad = None
    module.head.bias.main_grad = module.head.bias.main_grad.half()
    expect("type", adamw(module).step)
    late = model_of(torch.bfloat16)
    optimizer = adamw(late)
    optimizer.resume()
    backward(wrapped(late), x, rank, ranks)
    expect("late", optimizer.step)
    alone = model_of()
    alone(x.chunk(ranks)[rank]).backward()
    expect("not averaged", adamw(alone).step)
    return told


@needs_daemon
def test_what_cannot_be_served_is_refused_by_name(tmp_path):
    whole = "weight differs between ranks . and ., and the parameter is whole on each of them: "
    expected = {
        "sharded": whole + "call finish_grad_sync.*use_distributed_optimizer=False",
        "unfinished": whole + "call finish_grad_sync",
        "overlap": "overlap_backward with blocks.0.linear.weight, whose gradient Megatron's",
        "begun": r"update_in_backward\(\) with blocks.0.linear.weight, whose gradient Megatron's",
        "both": "head.bias has gradients in grad and in main_grad",
        "type": "head.bias is torch.bfloat16, and its main_grad torch.float16",
        "late": "is torch.float32, and the parameter torch.bfloat16.*before the optimizer's first call",
        "not averaged": whole + "average gradients",
    }
    for told in on_ranks(2, tmp_path / "store", refused):
        assert isinstance(told, dict), told
        for name, message in told.items():
            assert re.search(expected[name.partition(",")[0]], message), (name, message)
