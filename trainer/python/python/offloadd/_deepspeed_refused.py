"""Names of `import deepspeed` that are not answered, and what to use instead of each."""

from __future__ import annotations

from typing import Any, Callable

from ._errors import NotSupported

_DOC = 'see "Scripts that use DeepSpeed" in docs/pytorch.md'

# What to use instead of each missing name.
_INFERENCE = "only training is done here: call the model itself"
_PIPELINE = "pipelines are not supported: train the model as one module"
_EXPERTS = "expert parallelism is not supported: use the experts of the model itself"
_RANKS = "all ranks compute the whole model, each on its part of a batch: leave it out"
_WHOLE_DATA = "the data comes in the order of the script's loader, whole: leave it out"
_ADAM = "the engine updates with Adam or AdamW: use torch.optim.AdamW"
_LION = 'name it in the configuration ("optimizer": {"type": "Lion"}), or use lion_pytorch.Lion'
_KERNELS = "the model computes with its own modules: build it without DeepSpeed's layers"
_DRIVES = 'offloadd moves state by itself: set zero_optimization.offload_param.device = "nvme"; to measure a drive use bench-io'
_INSTEAD = {
    "pipe": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "moe": _EXPERTS,
    "MoE": _EXPERTS,
    "split_params_into_different_moe_groups_for_optimizer": _EXPERTS,
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "module_inject": _INFERENCE,
    "replace_transformer_layer": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "sparse_attention": "attention is the model's own: leave it out",
    "domino": _RANKS,
    "sequence": _RANKS,
    "tp_model_init": "tensor parallelism is not supported: leave tensor_parallel out of the configuration",
    "sequence_parallel": "sequences on several ranks need UlyssesSPAttentionHF.register_with_transformers and UlyssesSPDataLoaderAdapter alone",
    "TiledFusedLogitsLoss": "use sequence_tiled_compute, or the model's loss_function",
    "groups": "groups of ranks are those of sequences (_get_sequence_parallel_group)",
    "compression": "it changes weights: leave it out",
    "data_pipeline": _WHOLE_DATA,
    "compile": "compile blocks in the script, as in `for block in model.layers: block.compile()`",
    "OnebitAdam": "gradients are not compressed: use AdamW",
    "OnebitLamb": "gradients are not compressed: use AdamW",
    "DeepSpeedCPUAdagrad": _ADAM,
    "DeepSpeedCPULion": _LION,
    "FusedLamb": _ADAM,
    "FusedLion": _LION,
    "fused_optimizer": _ADAM,
    "unfused_optimizer": _ADAM,
    "op_builder": "nothing is compiled: leave it out",
    "AsyncIOBuilder": _DRIVES,
    "GDSBuilder": _DRIVES,
    "aio": _DRIVES,
    "nvme": _DRIVES,
    "zero_to_fp32": "checkpoints have a format of their own: write weights with engine.save_16bit_model or model.save_pretrained",
    "autotuning": "python -m offloadd plan says what fits and how fast it can be",
    "monitor": "set tensorboard or csv_monitor in the configuration",
    "profiling": "metrics.jsonl in the run's directory has the times of each step",
}


class NoAttribute(NotSupported, AttributeError):
    """A name that is not answered; `hasattr` sees that it is missing."""


class NoModule(NotSupported, ModuleNotFoundError):
    """A module that is not answered; `except ImportError` sees that it is missing."""


def refusal(name: str) -> str:
    what = next((_INSTEAD[part] for part in reversed(name.split(".")) if part in _INSTEAD), "leave it out, or run the script without offloadd-run")
    return f"{name} is not supported by offloadd, which answers to `import deepspeed` here: {what}; {_DOC}"


class OpBuilder:
    """Stands for a class that compiles DeepSpeed's optimizer, which scripts have done before they train. The engine updates."""

    def load(self, verbose: bool = True) -> "OpBuilder":
        return self

    def __getattr__(self, name: str) -> Any:
        raise NoAttribute(refusal(f"deepspeed.ops.op_builder.{name}"))


_ENGINES_INSTEAD = {
    **dict.fromkeys(
        ("set_train_batch_size", "set_train_micro_batch_size"), "set train_micro_batch_size_per_gpu and gradient_accumulation_steps in the configuration"
    ),
    "train_batch": _PIPELINE,
    "eval_batch": _PIPELINE,
    "monitor": _INSTEAD["monitor"],
}


def missing_of_engine(name: str, model: str) -> AttributeError:
    """The error for an attribute that neither an engine nor its model has."""
    what = _ENGINES_INSTEAD.get(name, "leave it out, or use DeepSpeed")
    return NoAttribute(f"the engine has no {name!r} here, and neither has its model, {model}: {what}; {_DOC}")


def refused_attribute(name: str) -> AttributeError:
    """The error for an object's attribute that is not answered."""
    return NoAttribute(refusal(name))


def refused_when_called(name: str) -> Callable:
    """A name that scripts import, and use only for what is not supported."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported(refusal(name))

    call.__name__ = name.rpartition(".")[2]
    return call
