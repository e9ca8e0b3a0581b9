"""Attention of a sequence whose parts lie on several ranks: transformers' attention functions, with an exchange before and after them.

    Attached     one model: what its forward is given, and the whole sequence's positions and padding
    _attention   in place of an attention function, for modules of attached models
    _mask        in place of a mask function, within the forward of one: the mask of the whole sequence

A model that mixes tokens otherwise is refused, before it is prepared or in its first forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import weakref
from typing import Any, Callable, Iterator, Optional

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._forwards import in_backward
from ._sequence_groups import SequenceGroup, group_of, heads_for_tokens, tokens_for_heads

# Modules that mix tokens themselves.
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)

# The losses of transformers whose labels are those of the next token; None has no loss, or an older name.
_LOSSES = ("ForCausalLM", "ForConditionalGeneration", None)

# Attention functions, beside those of FlashAttention. What others do with positions and tensors is not known.
_SUPPORTED = ("sdpa", "eager")

# Kinds of rotary embeddings that look at the longest position of a forward, of which a rank has a part.
_LENGTH_ROPES = ("dynamic", "longrope")

# What a forward may not be given, and why.
_REFUSED = {
    "past_key_values": "a rank has a part of the sequence: generate within offloadd.sequence_parallel.paused()",
    "encoder_hidden_states": "attention to another sequence is not divided",
    "inputs_embeds": "pass input_ids",
    "output_attentions": "attention weights are divided by heads: leave it out",
    "logits_to_keep": "the last tokens of each part would be kept: leave it out",
    "output_router_logits": "a router's loss is not linear in tokens, so that parts of a sequence do not add up: leave it out",
}

# Arguments of attention functions that say what position_ids say too.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")

_paused = False


@dataclasses.dataclass
class Options:
    """What models are attached with that are prepared from now on: the attention function that a script names, whether an evaluation
    divides sequences, and whether the script takes those of all models for divided, as DeepSpeed does: other models are refused then."""

    implementation: Optional[str] = None
    in_eval: bool = True
    of_all: bool = False


options = Options()


def attach(model: nn.Module, size: int) -> "SequenceAttachment":
    """Divides the model's sequences among `size` ranks. All ranks must call it. Raises `NotSupported` where the results would be others."""
    found = _transformer_of(model)
    _check(found, model, size, options.implementation)
    before = _attached.get(found)
    attached = SequenceAttachment(found, group_of(size), options.in_eval)
    if before is not None:
        # As a reference so far, in memory.
        before.detach()
    return attached


def take_for_divided(implementation: Optional[str], in_eval: bool) -> None:
    """Refuses all models from now on that are not attached, until the last one is detached: the script takes their sequences for divided."""
    options.implementation, options.in_eval, options.of_all = implementation, in_eval, True
    if implementation in _SUPPORTED:
        _replace(implementation)


def check_divided(what: str, passes: bool) -> None:
    """Raises `Error` where no model divides its sequences now. `passes` asks for one that does in the mode that it has, of training or evaluation."""
    if _paused or not any(one.active or not passes for one in _attached.values()):
        raise Error(
            f"{what}: no model divides its sequences now, so that parts would be texts of their own: within paused(), after the run, "
            "and in an evaluation that is not divided, pass whole sequences"
        )


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within it, models compute whole sequences on each rank by itself, as for an evaluation or `model.generate`."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


class SequenceAttachment:
    """A model whose sequences are divided among the ranks of a group, until `detach`. `in_eval` says whether they are in evaluation too."""

    def __init__(self, found: nn.Module, group: SequenceGroup, in_eval: bool) -> None:
        self.group, self._in_eval = group, in_eval
        # Weak: the modules' dictionary below holds this object.
        self._model = weakref.ref(found)
        self._name = f"{type(found).__name__} with sequence_parallel_size"
        # Where a forward is: positions and padding of the whole sequence. None outside of one.
        self.whole: Optional[_WholeSequence] = None
        self._names = list(inspect.signature(found.forward).parameters)
        self._computes_loss = "loss_function" not in inspect.unwrap(type(found).forward).__code__.co_names
        text = found.config.get_text_config()
        self._layers = text.num_hidden_layers
        # As OPT's positions.
        embeddings = (one for one in found.modules() if isinstance(one, nn.Embedding))
        self._counts_padding = any("attention_mask" in inspect.signature(one.forward).parameters for one in embeddings)
        for module in found.modules():
            _attached[module] = self
        _replace(text._attn_implementation)
        # The engine's hooks come before: what is refused here ends the forward in order.
        before, after = found.register_forward_pre_hook, found.register_forward_hook
        self._handles = [before(self._before, with_kwargs=True), after(self._after, always_call=True)]

    def detach(self) -> None:
        """The model is a plain one again."""
        for handle in self._handles:
            handle.remove()
        for module in [module for module, attached in _attached.items() if attached is self]:
            del _attached[module]
        if not _attached:
            _restore()

    @property
    def active(self) -> bool:
        """Whether sequences are divided now."""
        model = self._model()
        return not _paused and model is not None and (self._in_eval or model.training)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Optional[tuple[tuple, dict[str, Any]]]:
        if not self.active:
            return None
        given = {**dict(zip(self._names, args)), **kwargs}
        self._check_given(given)
        ids, mask = given["input_ids"], given.get("attention_mask")
        told = self.group.gather_objects((tuple(ids.shape), mask is not None))
        if len(set(told)) > 1:
            raise Error(f"the ranks of a sequence have parts of different shapes: input_ids and whether there is an attention_mask: {told}")
        positions = torch.cat(self.group.gather(given["position_ids"].expand(ids.shape).to(ids.device)), dim=1)
        padding = None if mask is None else torch.cat(self.group.gather((mask != 0).to(ids.device, torch.uint8)), dim=1).bool()
        if padding is not None:
            self._check_positions(positions, padding)
        self.whole = _current.whole = _WholeSequence(positions, padding)
        # With it the model leaves documents to the mask function below, which knows all of the sequence.
        return (), {**given, "attention_mask": torch.ones_like(ids), "use_cache": False}

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        whole, self.whole, _current.whole = self.whole, None, None
        if whole is None or output is None:
            return
        # In each forward: layers that one rank alone leaves out would be exchanged with others.
        if whole.attentions != self._layers:
            raise NotSupported(
                f"{self._name}: {whole.attentions} of {self._layers} layers compute attention by transformers' "
                "attention functions; other layers would see a part of the sequence"
            )

    def _check_positions(self, positions: torch.Tensor, padding: torch.Tensor) -> None:
        """Refuses positions with which the model would compute otherwise on one rank, given an attention_mask."""
        both = padding[:, 1:] & padding[:, :-1]
        if bool((torch.diff(positions, dim=1) <= 0)[both].any()):
            raise NotSupported(
                f"{self._name}: position_ids restart beside an attention_mask, with which transformers does not keep documents apart: leave one of them out"
            )
        if self._counts_padding and bool((positions != padding.cumsum(1) - 1)[padding].any()):
            raise NotSupported(
                f"{self._name}: it counts positions without padding: pass position_ids in the batches (attention_mask.cumsum(1) - 1), or pad on the right"
            )

    def _check_given(self, given: dict[str, Any]) -> None:
        name = self._name
        for key, why in _REFUSED.items():
            one = given.get(key)
            if one is not None and (not isinstance(one, (bool, int)) or one):
                raise NotSupported(f"{name}: {key}: {why}")
        for key in ("input_ids", "position_ids"):
            if given.get(key) is None:
                raise NotSupported(f"{name}: {key} is missing; offloadd.sequence_parallel.Loader divides batches and makes positions")
        mask = given.get("attention_mask")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != given["input_ids"].shape):
            raise NotSupported(f"{name}: attention_mask must be [batch, tokens]: one that the script makes would see a part of the sequence")
        if given.get("labels") is None:
            return
        if given.get("shift_labels") is None:
            raise NotSupported(
                f"{name}: labels without shift_labels: the last label of each part lies on the next rank; "
                "offloadd.sequence_parallel.Loader shifts labels before it divides them"
            )
        if self._computes_loss:
            raise NotSupported(f"{name}: its forward computes the loss itself, and shifts labels: compute it from the logits and shift_labels")


class _WholeSequence:
    """Positions of the whole sequence and its attention_mask, within one forward. As in transformers, documents are not looked for beside one."""

    def __init__(self, positions: torch.Tensor, padding: Optional[torch.Tensor]) -> None:
        self.positions = positions
        self.padding = None if padding is None or bool(padding.all()) else padding
        # Calls of mask and attention functions.
        self.masks = self.attentions = 0
        starts = torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1
        documents = starts.cumsum(1)
        self.documents = documents if padding is None and bool(documents[:, -1].any()) else None


class _Current:
    """The forward of an attached model that is under way in this process."""

    whole: Optional[_WholeSequence] = None


_current = _Current()
_attached: "weakref.WeakKeyDictionary[nn.Module, SequenceAttachment]" = weakref.WeakKeyDictionary()
# transformers' own attention and mask functions, by their names, while ours are in their place.
_replaced: dict[str, tuple[Optional[Callable], Callable]] = {}


def _replace(implementation: str) -> None:
    """Puts our functions in place of transformers' of this name. Those of other models are called through them."""
    if implementation in _replaced:
        return
    attentions, masks = _interfaces()
    inner, mask = None if implementation == "eager" else attentions[implementation], masks[implementation]
    _replaced[implementation] = inner, mask
    type(attentions).register(implementation, functools.partial(_attention, implementation, inner))
    type(masks).register(implementation, functools.partial(_mask, implementation, mask))


def _restore() -> None:
    """Gives transformers its functions back."""
    options.of_all = False
    attentions, masks = _interfaces()
    for implementation, (inner, mask) in _replaced.items():
        type(masks).register(implementation, mask)
        if inner is None:
            del type(attentions)._global_mapping[implementation]
        else:
            type(attentions).register(implementation, inner)
    _replaced.clear()


def _interfaces() -> tuple[Any, Any]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _mask(implementation: str, plain: Callable, **given: Any) -> Any:
    """The mask of the whole sequence within a forward of an attached model, and otherwise the plain one."""
    whole = _current.whole
    if whole is None:
        return plain(**given)
    from transformers import masking_utils

    if not given.get("allow_is_causal_skip", True):
        raise NotSupported("sequence_parallel_size: the model makes a mask of its own, not causal or of a sliding window: it would see a part of the sequence")
    whole.masks += 1
    tokens, rule, skips = whole.positions.shape[1], given["mask_function"], whole.documents is None
    if whole.documents is not None:
        rule = masking_utils.and_masks(rule, masking_utils.packed_sequence_mask_function(whole.documents))
        if _is_flash(implementation) and len(whole.positions) > 1:
            raise NotSupported(f"{implementation} with sequence_parallel_size: several documents in several rows: use sdpa")
    sizes = {"q_length": tokens, "kv_length": tokens, "q_offset": 0, "kv_offset": 0}
    return plain(**{**given, **sizes, "mask_function": rule, "attention_mask": whole.padding, "allow_is_causal_skip": skips})


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation and not implementation.startswith("paged")


# Some models name their arguments: they are called as transformers'.
def _attention(
    implementation: str, plain: Optional[Callable], module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **given: Any
) -> Any:
    """Attention of an attached model's module on the whole sequence with a part of the heads, and of others as it is."""
    # The eager function is in the file of each model.
    plain = plain or sys.modules[type(module).__module__].eager_attention_forward
    attached = _attached.get(module)
    if attached is None and options.of_all and not _paused and (options.in_eval or module.training):
        raise NotSupported(
            f"{type(module).__name__}: its model was not passed to deepspeed.initialize, so that its attention would see a part of the sequence: "
            "pass it too (a configuration without an optimizer is enough), or call it on whole sequences within offloadd.sequence_parallel.paused()"
        )
    if attached is None or not attached.active:
        return plain(module, query, key, value, attention_mask, *args, **given)
    return _divided(implementation, plain, attached, module, query, key, value, attention_mask, *args, **given)


@torch.compiler.disable
def _divided(
    implementation: str,
    plain: Callable,
    attached: SequenceAttachment,
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *args: Any,
    **given: Any,
) -> Any:
    """Attention on the whole sequence with a part of the heads, of all heads on a part of the sequence. The exchange is between compiled parts."""
    group, tokens, name = attached.group, query.shape[2] * attached.group.size, type(module).__name__
    positions = given.get("position_ids")
    if attached.whole is not None:
        attached.whole.attentions += 1
        if not attached.whole.masks:
            raise NotSupported(f"{name} with sequence_parallel_size: the model makes its masks without transformers' functions: they would see a part")
    elif not in_backward():
        # Where a checkpoint computes again, the forward has checked.
        raise NotSupported(f"{name} with sequence_parallel_size: a part of the model was called, with positions and masks of a part: call the model itself")
    _check_attention(name, query, key, value, attention_mask, tokens)
    given = _known(name, plain, given)
    if _is_flash(implementation):
        if positions is None:
            raise NotSupported(f"{name} with sequence_parallel_size: {implementation} gets no position_ids, which say where documents begin: use sdpa")
        # Also where a checkpoint computes again, outside of the model's forward.
        given["position_ids"] = torch.cat(group.gather(positions), dim=1)
    shared = max(1, group.size // key.shape[1])
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    query, key, value = (heads_for_tokens(states, group) for states in (query, key, value))
    with _groups_of(module, query.shape[1] // key.shape[1]):
        output, _ = plain(module, query, key, value, attention_mask, *args, **given)
    return tokens_for_heads(output, group), None


@contextlib.contextmanager
def _groups_of(module: nn.Module, queries: int) -> Iterator[None]:
    """Within it, the module has as many queries for each key as this rank."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == queries:
        yield
        return
    module.num_key_value_groups = queries
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _check_attention(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, tokens: int) -> None:
    """Refuses what attention on a part of the heads would compute otherwise."""
    group_tokens = query.shape[2]
    if key.shape[2] != group_tokens or value.shape[2] != group_tokens:
        raise NotSupported(f"{name} with sequence_parallel_size: attention to {key.shape[2]} tokens of {group_tokens}: a cache or another sequence")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape[-1] != tokens or mask.ndim == 4 and mask.shape[-2] != tokens):
        raise NotSupported(f"{name} with sequence_parallel_size: a mask that is not one of the whole sequence")
    if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
        raise NotSupported(f"{name} with sequence_parallel_size: a mask for each head")


def _known(name: str, plain: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """What is given to an attention function, without tensors that pass through to other layers and losses. Refuses those that it would use."""
    used = _used_by(plain)
    for key, one in given.items():
        if key in used and isinstance(one, torch.Tensor) and one.numel() > 1:
            why = "position_ids say where documents begin: leave it out" if key in _BOUNDARIES else "it is for all heads, or for a part of the tokens"
            raise NotSupported(f"{name} with sequence_parallel_size: {key}: {why}")
    return {key: one for key, one in given.items() if key in used or not isinstance(one, torch.Tensor)}


@functools.lru_cache(maxsize=None)
def _used_by(plain: Callable) -> frozenset[str]:
    """Names that an attention function has for what it is given, beside positions."""
    return frozenset({*inspect.signature(plain).parameters, *_BOUNDARIES} - {"position_ids"})


# Before a model is prepared


def _transformer_of(model: nn.Module) -> nn.Module:
    """The model of transformers, in PEFT's or another wrapper."""
    import transformers

    found = next((one for one in model.modules() if isinstance(one, transformers.PreTrainedModel)), None)
    if found is None:
        raise NotSupported(f"{type(model).__name__} with sequence_parallel_size: it is no model of transformers, whose attention functions are replaced")
    return found


def _check(model: nn.Module, whole: nn.Module, size: int, implementation: Optional[str]) -> None:
    """Refuses a model whose results would be others, as far as its configuration and modules tell."""
    name, config = type(model).__name__, model.config
    text = config.get_text_config()
    refuse = lambda why: NotSupported(f"{name} with sequence_parallel_size = {size}: {why}")
    has = text._attn_implementation
    if implementation is not None and implementation != has:
        raise Error(f"{name} computes attention by {has}, and {implementation} was named: load the model with attn_implementation={implementation!r}")
    if has not in _SUPPORTED and not _is_flash(has):
        raise refuse(f"attention by {has} is not supported: load the model with attn_implementation='sdpa'")
    if has == "eager" and getattr(text, "reorder_and_upcast_attn", False):
        raise refuse("reorder_and_upcast_attn computes attention in the model itself: load it with attn_implementation='sdpa'")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("encoders with decoders are not supported")
    if getattr(text, "attention_chunk_size", None) or "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise refuse("attention in chunks is not supported")
    recurrent = sorted({kind for kind in getattr(text, "layer_types", None) or () if "attention" not in kind or "linear" in kind})
    if recurrent:
        raise refuse(f"layers of the type {', '.join(recurrent)} carry their state along the sequence")
    if getattr(text, "layerdrop", 0):
        raise refuse("layerdrop in its configuration: each rank would leave out other layers; set it to 0")
    _check_modules(model, whole, refuse)
    ropes = _rope_types(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
    if ropes & set(_LENGTH_ROPES):
        raise refuse(f"rotary embeddings of the type {', '.join(sorted(ropes & set(_LENGTH_ROPES)))} depend on the longest position of a part")
    asked = next((key for key in ("output_attentions", "output_router_logits") if getattr(text, key, False)), None)
    if asked is not None:
        raise refuse(f"{asked} in its configuration: {_REFUSED[asked]}")
    if any(getattr(one, "is_prompt_learning", False) for one in (getattr(whole, "peft_config", None) or {}).values()):
        raise refuse("prompts that are learned come before each part")
    _check_heads(text, size, refuse)


def _check_modules(model: nn.Module, whole: nn.Module, refuse: Callable[[str], Exception]) -> None:
    """Refuses modules in and around the model that would see a part of the sequence."""
    import transformers

    mixer = next((type(one).__name__ for one in whole.modules() if isinstance(one, _MIXERS)), None)
    if mixer is not None:
        raise refuse(f"it has a {mixer}, which mixes tokens or images")
    below = set(model.modules())
    other = next((type(one).__name__ for one in whole.modules() if isinstance(one, transformers.PreTrainedModel) and one not in below), None)
    if other is not None:
        raise refuse(f"there is another model beside it, a {other}, that would see a part of the sequence: prepare each by itself")
    if model.loss_type not in _LOSSES or model.loss_type is None and model.base_model is not model and model.get_output_embeddings() is None:
        raise refuse("its head is not one of a language model: it would take tokens of each part, or labels that are not those of the next token")
    if any(hasattr(one, "create_position_ids_from_input_ids") for one in below):
        raise refuse("it makes positions of its own from the tokens, of which a rank has a part")
    if any(hasattr(one, "sinks") for one in below):
        raise refuse("attention sinks of each head are not divided")


def _rope_types(parameters: Any) -> set[str]:
    """The types of rotary embeddings in a configuration, which may have one for each type of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters[key] for key in ("rope_type", "type") if isinstance(parameters.get(key), str)}
    return own.union(*(_rope_types(one) for one in parameters.values()))


def _check_heads(text: Any, size: int, refuse: Callable[[str], Exception]) -> None:
    queries = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or queries
    if queries % size:
        raise refuse(f"its {queries} attention heads cannot be divided among {size} ranks")
    if keys % size and size % keys:
        raise refuse(f"its {keys} heads of keys and values cannot be divided among {size} ranks: one number must be a multiple of the other")
