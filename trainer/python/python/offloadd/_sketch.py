"""A model without memory, of which a plan is made: by its name or its size, with layers that are quantized and adapters beside them."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional

from ._errors import Error
from ._packed import stand_in
from ._units import blocks_of

# Bits of a number by their name.
BITS = {"nf4": 4, "int8": 8}


def by_name(name: str) -> nn.Module:
    """A model of transformers by its directory or name, without its weights."""
    try:
        import transformers
    except ImportError:
        raise Error("a plan of a model needs transformers: install it, or give --params") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        # Its other lines are advice on the library's own settings.
        why = str(error).partition("\n")[0]
        raise Error(
            f"no config.json of the model {name}: {why}; give a directory that has one, or a name that transformers finds in its cache or on the Hub"
        ) from None
    architecture = (config.architectures or [None])[0]
    if architecture is None and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_config(config)
    model_class = getattr(transformers, architecture or "", None)
    if model_class is None:
        # Another class of its family has other layers, such as no head.
        what = f"the class {architecture}, which transformers does not have" if architecture else "no class"
        raise Error(f"the config.json of {name} names {what} (architectures): plan it with offloadd.prepare(..., plan_only=True)")
    return model_class(config)


def by_size(params: int, units: int) -> nn.Module:
    """A model of so many parameters in so many blocks."""
    if params < units or units < 1:
        raise Error(f"--params {params} --units {units}: each unit needs a parameter: give more parameters or fewer units, at least one")
    blocks = nn.ModuleList()
    for _ in range(max(units, 3)):
        block = nn.Module()
        # A matrix, as most of a block's parameters are in.
        block.weight = nn.Parameter(torch.empty(1, params // max(units, 3)))
        blocks.append(block)
    model = nn.Module()
    model.blocks = blocks
    return model


def quantize(model: nn.Module, wanted: Optional[str]) -> bool:
    """Lets the weights of linear layers take the bytes of quantized ones, where they are `wanted`, or the model's configuration says so. Returns
    whether they are."""
    kept = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    kept = kept if isinstance(kept, dict) else kept.to_dict()
    if kept and wanted is None:
        wanted = "nf4" if kept.get("load_in_4bit") else "int8" if kept.get("load_in_8bit") else None
        if wanted is None:
            raise Error(
                f"--model is quantized by {kept.get('quant_method', 'another library')}: plan it with offloadd.prepare(model, None, config, plan_only=True)"
            )
    if wanted is None:
        return False
    # As transformers leaves them.
    skipped = kept.get("llm_int8_skip_modules") or []
    linear = [one for name, one in _layers(model) if isinstance(one, nn.Linear) and name.rpartition(".")[2] not in skipped]
    if not linear:
        raise Error(f"--quantize {wanted}: the model has no linear layers; give --model")
    for one in linear:
        one.weight = stand_in(one.weight.shape, BITS[wanted])
        # A class of its own and no forward of its own: of that nothing knows what it mixes.
        one.__class__ = _QuantizedLinear
    return True


def adapt(model: nn.Module, rank: int) -> None:
    """Freezes the model, and gives its linear layers adapters of LoRA, as PEFT does it with `target_modules="all-linear"`."""
    if rank < 1:
        raise Error(f"--lora {rank}: a rank of 1 at least")
    model.requires_grad_(False)
    layers = _layers(model)
    if not layers:
        raise Error(f"--lora {rank}: the model has no linear layers; give a model's directory, or --trainable")
    for name, layer in layers:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, _AdaptedLayer(layer, rank))


def freeze(model: nn.Module, trainable: int, wanted: Optional[Sequence]) -> None:
    """Freezes the model, and gives its blocks `trainable` parameters together."""
    model.requires_grad_(False)
    blocks = [module for _, module in blocks_of(model, wanted)] or [model]
    if trainable < len(blocks):
        raise Error(f"--trainable {trainable}: each of the model's {len(blocks)} blocks trains a parameter at least")
    for block in blocks:
        block.register_parameter("trained_beside", nn.Parameter(torch.empty(trainable // len(blocks))))


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Brings a model to a type, but for adapters, which PEFT makes in float32."""
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, _AdaptedLayer):
            module.down.float(), module.up.float()


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that are products with a matrix, but for the head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"]
    return [(name, one) for name, one in found if one is not head]


class _AdaptedLayer(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        wide, high = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)
        self.layer, self.down, self.up = layer, nn.Linear(wide, rank, bias=False), nn.Linear(rank, high, bias=False)

    @property
    def weight(self) -> nn.Parameter:
        """What models look at to know a type."""
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        # Scaled, as PEFT does.
        return (result + self.up(self.down(x.to(self.down.weight.dtype))) * 2.0).to(result.dtype)


class _QuantizedLinear(nn.Linear):
    """A layer of packed bytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _DequantizedProduct.apply(x, self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _DequantizedProduct(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in forward and in backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, high: int) -> torch.Tensor:
        ctx.wide = x.shape[-1]
        return functional.linear(x, x.new_empty(high, ctx.wide))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ grad.new_empty(grad.shape[-1], ctx.wide), None
