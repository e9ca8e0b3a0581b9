"""Losses without logits: those of whole logits within 1e-6 with their gradients, refusals of what needs logits, and one chunk of them in memory."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
T = transformers
convert_to_fp32 = pytest.importorskip("accelerate.utils.operations", reason="accelerate is not installed: make test-tools").convert_to_fp32

import offloadd  # noqa: E402
import offloadd.optim  # noqa: E402
from offloadd._config import settings_of  # noqa: E402
from offloadd._gpu_plan import computed, gpu_plan_in_place  # noqa: E402
from offloadd._loss_chunks import Logits, LossChunks  # noqa: E402
from offloadd._mlp_chunks import MlpChunks  # noqa: E402
from offloadd._units import units_of  # noqa: E402
from test_activations import Moved  # noqa: E402
from test_mlp_chunks import CHECKPOINTING, CHUNKS, EXPERTS, PLAIN, SIZES, VOCAB, distance, llama, make, near  # noqa: E402
from test_mlp_chunks import FAMILIES as MLP_FAMILIES  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import Offloaded, same_gradients  # noqa: E402

# Heads with a bias, logits that are scaled, soft-capped, converted and sliced, losses of a model's own code, a share of the experts' balance.
FAMILIES = {
    **MLP_FAMILIES,
    "bert": lambda: T.BertConfig(**PLAIN, is_decoder=True),
    "bloom": lambda: T.BloomConfig(hidden_size=32, n_layer=3, n_head=2, vocab_size=VOCAB),
    "cohere": lambda: T.CohereConfig(**SIZES, logit_scale=0.25),
    "falcon-h1": lambda: T.FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, lm_head_multiplier=0.5),
    "gemma2": lambda: T.Gemma2Config(**SIZES, final_logit_softcapping=1.5),
    "granite-scaled": lambda: T.GraniteConfig(**SIZES, logits_scaling=4.0),
    "mixtral": lambda: T.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1),
    "opt": lambda: T.OPTConfig(**PLAIN, ffn_dim=80, word_embed_proj_dim=32),
    "qwen3-moe": lambda: T.Qwen3MoeConfig(**EXPERTS, num_experts=4),
    "tied": lambda: T.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "t5": lambda: T.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=3, num_heads=2, vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0),
}


def made(count, **more):
    """A model, as it is with one chunk."""
    model = make(llama(**more))
    if count > 1:
        LossChunks(model, count)
    return model


def batch(seed=0, rows=2, length=17, ignored=5):
    torch.manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length))
    labels = ids.clone()
    labels[0, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, seed=0, **more):
    """The loss of a step, whose gradients are computed."""
    given = batch(seed)
    torch.manual_seed(seed)
    loss = model(**given, **more).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("number, name", list(enumerate(FAMILIES)), ids=str)
def test_families_have_the_loss_and_the_gradients_of_whole_logits(number, name):
    checkpointing = CHECKPOINTING[number % 3]
    whole, ours = (make(FAMILIES[name](), checkpointing) for _ in range(2))
    chunks = LossChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    for seed, more in ((0, {}), (1, {"num_items_in_batch": torch.tensor(50)} if number % 2 else {})):
        if name in ("bert", "opt", "t5"):
            more = {}
        whole.zero_grad()
        expected, found = step(whole, seed, **more), step(ours, seed, **more)
        gradients = offloaded.take_gradients()
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)
        assert not same_gradients(whole, gradients, near) and distance(whole, gradients) < 1e-6
        assert not offloaded.live()
    chunks.end()
    assert not any("forward" in vars(module) for module in ours.modules())


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes most rows of a tensor with a number for each word."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[-1] == VOCAB:
                self.rows = max(self.rows, one.untyped_storage().nbytes() // (4 * VOCAB))
        return result


def test_logits_of_one_chunk_are_there_and_no_others():
    # More than weights have.
    given, found = batch(length=200), []
    for count in (1, CHUNKS):
        model = made(count)
        with Largest() as largest:
            model(**given).loss.backward()
        found.append(largest.rows)
    assert found == [400, 100]


def own_loss(model, **options):
    """The loss that a script computes from the outputs."""
    given = batch(ignored=5 * ("ignore_index" not in options))
    logits = model(input_ids=given["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), given["labels"][:, 1:].flatten(), **options)


OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"label_smoothing": 0.2},
    {"reduction": "none"},
    {"reduction": "none", "label_smoothing": 0.2, "ignore_index": 3},
]
HEADS = {"with the model": None, "a unit of its own": ["LlamaDecoderLayer", "lm_head"]}


@pytest.mark.parametrize("units", HEADS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_script_may_compute_the_loss_itself(options, units):
    whole, ours = make(llama(), "not reentrant"), make(llama(), "not reentrant")
    LossChunks(ours, CHUNKS)
    offloaded = Offloaded(ours, HEADS[units])
    for _ in range(2):
        whole.zero_grad()
        expected, found = own_loss(whole, **options), own_loss(ours, **options)
        weights = torch.rand(expected.shape)
        for loss in (expected, found):
            (loss * weights).sum().backward()
        gradients = offloaded.take_gradients()
        assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-6)
        assert not same_gradients(whole, gradients, near) and distance(whole, gradients) < 1e-6
        assert not offloaded.live()


@pytest.mark.parametrize("units", HEADS)
def test_micro_batches_and_passes_without_gradients_between_them(units):
    whole, ours = make(llama(), "reentrant"), make(llama(), "reentrant")
    LossChunks(ours, CHUNKS)
    offloaded = Offloaded(ours, HEADS[units])
    for seed in range(3):
        assert torch.allclose(step(whole, seed), step(ours, seed), rtol=1e-6)
        with torch.no_grad():
            assert torch.equal(*(model(batch()["input_ids"]).logits for model in (whole, ours)))
    gradients = offloaded.take_gradients()
    assert not same_gradients(whole, gradients, near) and distance(whole, gradients) < 1e-6 and not offloaded.live()


def test_batches_without_a_token_that_counts():
    found = []
    for count in (1, CHUNKS):
        model = made(count)
        loss = model(**batch(ignored=17, rows=1)).loss
        loss.backward()
        found.append((loss, [param.grad for param in model.parameters()]))
    assert found[0][0].isnan() and found[1][0].isnan()
    assert all(torch.equal(a, b) and not a.any() for a, b in zip(found[0][1], found[1][1]))
    # sequence_parallel.mean takes a division for one whose gradient is no number.
    assert not loss.grad_fn.name().startswith("Div")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types_and_autocast(dtype):
    whole, ours = make(llama()).to(dtype), make(llama()).to(dtype)
    LossChunks(ours, CHUNKS)
    tolerance = {"rtol": 1e-6 if dtype == torch.bfloat16 else 1e-7}
    assert torch.allclose(step(whole), step(ours), **tolerance)
    for options in OPTIONS[:3]:
        # As a script has them that converts nothing.
        logits = [model(batch()["input_ids"]).logits.flatten(0, 1) for model in (whole, ours)]
        expected, found = (functional.cross_entropy(one, batch()["labels"].flatten(), **options) for one in logits)
        assert found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-7)
    if dtype == torch.bfloat16:
        whole, ours = whole.float(), ours.float()
        for model in (whole, ours):
            model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            expected, found = step(whole), step(ours)
        assert found.dtype == expected.dtype and torch.allclose(found, expected, rtol=1e-6)
        gradients = {name: param.grad for name, param in ours.named_parameters()}
        assert distance(whole, gradients) < 0.02


# What models and scripts do with logits before the loss.
KNOWN = {
    "scaled": lambda logits: (logits * 0.5 / torch.tensor(3.0)).view(-1, VOCAB),
    "scaled from the left": lambda logits: (2.0 * logits).reshape(34, -1),
    "soft-capped": lambda logits: (torch.tanh(logits / 2) * 2).flatten(0, 1),
    "soft-capped by a function": lambda logits: (3 * functional.tanh(torch.div(logits, 3))).flatten(end_dim=1),
    "another type": lambda logits: logits.bfloat16().to(torch.float64).flatten(0, 1),
    "moved": lambda logits: logits.to("cpu", torch.float32).contiguous().view((34, VOCAB)),
    "words": lambda logits: logits[..., :90].reshape(-1, 90),
    "tokens": lambda logits: logits[:, 1:-1].flatten(0, 1),
    "rows and tokens": lambda logits: logits[1:, 2:, 3:][..., :-4, :].flatten(0, 1),
    "accelerate": lambda logits: convert_to_fp32({"logits": logits.bfloat16()})["logits"].flatten(0, 1),
}


@pytest.mark.parametrize("what", KNOWN)
def test_what_is_done_to_logits_before_the_loss_is_done_to_each_chunk(what):
    found = []
    for count in (1, CHUNKS):
        model = made(count)
        logits = KNOWN[what](model(batch()["input_ids"]).logits)
        loss = functional.cross_entropy(logits, torch.arange(len(logits)))
        loss.backward()
        found.append((logits.shape, logits.dtype, logits.device, logits.requires_grad, loss.dtype, loss, model))
    whole, ours = found
    assert whole[:5] == ours[:5] and torch.allclose(whole[5], ours[5], rtol=1e-6)
    assert distance(whole[-1], {name: param.grad for name, param in ours[-1].named_parameters()}) < (1e-6 if loss.dtype == torch.float32 else 1e-2)


def test_transforms_of_torch_have_whole_logits():
    whole, ours = make(llama()).lm_head, make(llama())
    LossChunks(ours, CHUNKS)
    states = torch.randn(3, 2, 17, 32)
    per_sample = [torch.func.vmap(torch.func.grad(lambda x, head=head: head(x).square().sum()))(states) for head in (whole, ours.lm_head)]
    assert torch.equal(*per_sample)


NEEDS_VALUES = {
    "argmax": lambda logits: logits.argmax(-1),
    "log_softmax": lambda logits: functional.log_softmax(logits, -1),
    "detach": lambda logits: logits.detach(),
    "add": lambda logits: logits + 1,
    "index_add": lambda logits: torch.zeros(2, 17, VOCAB).index_add_(0, torch.tensor([0, 1]), logits),
    "mul with": lambda logits: logits * torch.ones(VOCAB),
    "mul of two": lambda logits: logits * logits,
    "mul_": lambda logits: logits.mul_(2),
    "__getitem__ with": lambda logits: logits[0],
    "__getitem__ with anything": lambda logits: logits[..., ...],
    "view of words": lambda logits: logits.view(-1, 3),
    "cross_entropy with weight": lambda logits: functional.cross_entropy(logits.view(-1, VOCAB), torch.zeros(34, dtype=torch.long), weight=torch.ones(VOCAB)),
    "cross_entropy of anything": lambda logits: functional.cross_entropy(logits.transpose(1, 2), torch.zeros(2, 17, dtype=torch.long)),
    "cross_entropy of chances": lambda logits: functional.cross_entropy(logits.view(-1, VOCAB), torch.zeros(34, VOCAB)),
    "tolist": lambda logits: logits.tolist(),
    "numpy": lambda logits: logits.numpy(),
    "deepcopy": copy.deepcopy,
    "stack": lambda logits: torch.stack([logits, logits]),
    "save": lambda logits: torch.save(logits, "/dev/null"),
    "bool": lambda logits: bool(logits[0, 0, 0] > 0),
}


@pytest.mark.parametrize("what", NEEDS_VALUES)
def test_what_needs_logits_is_refused_by_name(what):
    model = made(CHUNKS)
    logits = model(**batch()).logits
    assert logits.shape == (2, 17, VOCAB) and logits.dtype == torch.float32 and "without values" in repr(logits) and len(logits) == 2
    with pytest.raises(offloadd.NotSupported, match="offloadd.loss_chunks: logits of a training forward have no values, and .*leave offloadd.loss_chunks out"):
        NEEDS_VALUES[what](logits)


def test_wrong_labels_have_the_errors_of_pytorch():
    model = made(CHUNKS)
    logits = model(**batch()).logits.view(-1, VOCAB)
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits, torch.zeros(33, dtype=torch.long))
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(logits, torch.full((34,), VOCAB))
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        functional.cross_entropy(logits, torch.zeros(34, dtype=torch.long), reduction="middle")


def test_indices_that_are_too_many_have_the_error_of_pytorch():
    found = []
    for count in (1, CHUNKS):
        with pytest.raises(IndexError) as refused:
            made(count)(batch()["input_ids"]).logits[:, :, :5, :]
        found.append(str(refused.value))
    assert found[0] == found[1]


def test_the_name_of_a_type_is_that_of_pytorch():
    assert made(1)(batch()["input_ids"]).logits.type() == made(CHUNKS)(batch()["input_ids"]).logits.type() == "torch.FloatTensor"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_and_numbers_of_many_tokens_are_in_fp32(dtype):
    """As on GPUs: the sum of the losses is more than fp16 has, and the number of tokens more than bf16 counts."""
    torch.manual_seed(0)
    states, labels = torch.randn(70001, 32, dtype=dtype), torch.randint(VOCAB, (70001,))
    head = made(CHUNKS).lm_head.to(dtype)
    with torch.no_grad():
        expected = functional.cross_entropy(nn.functional.linear(states, head.weight).float(), labels)
    found = functional.cross_entropy(head(states), labels)
    assert (
        found.dtype == dtype
        and torch.allclose(found.float(), expected, rtol=torch.finfo(dtype).eps)
        and expected * len(labels) > torch.finfo(torch.float16).max
    )
    found.backward()
    assert head.weight.grad.isfinite().all()


def test_a_head_with_more_arguments_has_whole_logits():
    model = adapted(make(llama()), target_modules=["lm_head"])
    LossChunks(model, CHUNKS)
    head, states = model.base_model.model.lm_head, torch.ones(2, 3, 32)
    names = ["default", "__base__"]
    logits = head(states, adapter_names=names)
    assert type(logits) is torch.Tensor and not torch.equal(*logits)


def test_a_unit_within_a_head_is_refused():
    model = adapted(make(llama()), target_modules=["lm_head"])
    LossChunks(model, CHUNKS)
    Offloaded(model, ["LlamaDecoderLayer", "*lm_head.base_layer"])
    with pytest.raises(offloadd.NotSupported, match="lm_head.base_layer has a hook or is a unit of its own, and would see chunks"):
        step(model)


def test_evaluation_and_generation_have_the_bits_of_whole_logits():
    whole, ours = make(llama()).eval(), make(llama()).eval()
    chunks = LossChunks(ours, CHUNKS)
    for passes in (torch.no_grad, torch.enable_grad):
        with passes():
            expected, found = (model(**batch()) for model in (whole, ours))
            assert torch.equal(expected.loss, found.loss) and torch.equal(expected.logits, found.logits)
    prompt = batch()["input_ids"][:, :4]
    for model in (whole, ours):
        model.train()
    generated = [model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (whole, ours)]
    assert torch.equal(*generated)
    twin = copy.deepcopy(ours)
    assert type(twin(prompt).logits) is torch.Tensor and type(ours(prompt).logits) is not torch.Tensor
    chunks.end()
    assert torch.equal(ours(prompt).logits, whole(prompt).logits)


def test_a_loss_after_the_end_is_refused_and_a_backward_is_not():
    whole, ours = make(llama()), make(llama())
    chunks = LossChunks(ours, CHUNKS)
    logits, loss = ours(batch()["input_ids"]).logits, ours(**batch()).loss
    chunks.end()
    with pytest.raises(offloadd.NotSupported, match="offloadd.loss_chunks: the run has ended"):
        functional.cross_entropy(logits.view(-1, VOCAB), batch()["labels"].flatten())
    loss.backward()
    step(whole)
    assert distance(whole, {name: param.grad for name, param in ours.named_parameters()}) < 1e-6


class OwnHead(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


def own_head(model):
    model.lm_head = OwnHead(32, VOCAB)


def own_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x)


def eight_bits(model):
    model.lm_head.__class__ = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})


@pytest.mark.parametrize(
    "change, told",
    [
        (own_head, "lm_head is a OwnHead, which is not known to compute each token by itself"),
        (own_forward, "lm_head was given a forward of its own"),
        (eight_bits, "lm_head is a Linear8bitLt"),
        (lambda model: setattr(model, "lm_head", None), "LlamaForCausalLM has no head of a language model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_heads_that_are_not_known_are_refused(change, told):
    model = make(llama())
    change(model)
    before = [module for module in model.modules() if "forward" in vars(module)]
    with pytest.raises(offloadd.NotSupported, match="offloadd.loss_chunks.*leave .* out") as refused:
        LossChunks(model, CHUNKS)
    assert told in str(refused.value)
    assert [module for module in model.modules() if "forward" in vars(module)] == before


def test_hooks_of_a_head_are_refused():
    model = made(CHUNKS)
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(offloadd.NotSupported, match="lm_head has a hook, and would see chunks"):
        step(model)


def adapted(model, **how):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **how))


def frozen_head(model):
    model.lm_head.requires_grad_(False)
    return model


def frozen_but_one_layer(model):
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    return model


def four_bits(model):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")
    head = model.lm_head
    packed = bitsandbytes.nn.Linear4bit(head.in_features, head.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(head.weight.data, requires_grad=False, quant_type="nf4", module=packed)
    model.lm_head = packed.to("cpu")
    return adapted(model, target_modules=["q_proj", "down_proj"])


CHANGED = {
    "LoRA of the head": lambda model: adapted(model, target_modules=["lm_head", "q_proj"]),
    "a head that is trained whole": lambda model: adapted(model, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "a frozen head": frozen_head,
    "a frozen head and layers": frozen_but_one_layer,
    "4 bits": four_bits,
}


@pytest.mark.parametrize("name", CHANGED)
def test_heads_with_adapters_frozen_and_quantized_ones(name):
    whole, ours = (CHANGED[name](make(llama(hidden_size=64))) for _ in range(2))
    LossChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    for seed in range(2):
        whole.zero_grad()
        assert torch.allclose(step(whole, seed), step(ours, seed), rtol=1e-6)
        gradients = offloaded.take_gradients()
        trained = [one for one, param in whole.named_parameters() if param.requires_grad]
        assert all(near(whole.get_parameter(one).grad, gradients[one]) for one in trained) and len(trained) > 1
        assert not offloaded.live()


def test_a_head_that_computes_nothing_yet_draws_no_random_numbers():
    model = adapted(make(llama()), target_modules=["lm_head"], lora_dropout=0.5)
    LossChunks(model, CHUNKS)
    ids, before = batch()["input_ids"], torch.get_rng_state()
    assert "without values" in repr(model(ids).logits) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checkpointing", ["not reentrant", "reentrant"])
def test_inputs_of_blocks_in_host_memory_and_mlps_in_chunks(checkpointing):
    moved = []
    for count in (1, CHUNKS):
        whole, ours = make(llama(), checkpointing), make(llama(), checkpointing)
        MlpChunks(ours, CHUNKS)
        LossChunks(ours, count)
        ours = Moved(ours)
        try:
            assert torch.allclose(step(whole), step(ours.model), rtol=1e-6)
            gradients = ours.take_gradients()
            assert not same_gradients(whole, gradients, near) and distance(whole, gradients) < 1e-6 and ours.is_empty()
            moved.append(ours.engine.activations.moved_bytes)
        finally:
            ours.close()
    # Rows of the head's input stay.
    assert moved[0] == moved[1] > 0


class Between:
    """A model of one kind, with one chunk or more, and what a script does between its forward, its loss and its backward."""

    def __init__(self, count, adapters=False):
        self.model = make(llama())
        if adapters:
            self.model = adapted(self.model, target_modules=["lm_head", "q_proj"])
            self.model.add_adapter("other", peft_of("LoraConfig")(r=4, init_lora_weights=False, target_modules=["lm_head", "q_proj"]))
        if count > 1:
            LossChunks(self.model, count)
            MlpChunks(self.model, count)
        self.temperature = torch.tensor(2.0)

    def logits(self, **more):
        return self.model(batch()["input_ids"], **more).logits

    def loss(self, logits):
        return functional.cross_entropy(logits.view(-1, VOCAB), batch()["labels"].flatten())

    def given(self):
        """Other weights, as sharpness-aware steps have them."""
        return {name: (1.5 * param.detach()).requires_grad_() for name, param in self.model.named_parameters()}


def peft_of(name):
    return getattr(pytest.importorskip("peft", reason="peft is not installed: make test-tools"), name)


def call_with_other_weights(s):
    return s.loss(torch.func.functional_call(s.model, s.given(), (batch()["input_ids"],)).logits)


def loss_with_other_weights(s):
    return torch.func.functional_call(s.model, s.given(), (), batch()).loss


def step_between(s):
    optimizer = torch.optim.SGD(s.model.parameters(), 50.0)
    s.model(**batch()).loss.backward()
    logits = s.logits()
    optimizer.step()
    return s.loss(logits)


def without_adapter(s):
    with s.model.disable_adapter():
        logits = s.logits()
    return s.loss(logits)


def another_adapter(s):
    logits = s.logits()
    s.model.set_adapter("other")
    return s.loss(logits)


def one_backward_of_two_adapters(s):
    loss = s.model(**batch()).loss
    s.model.set_adapter("other")
    return loss + s.model(**batch()).loss


def scale_of_an_adapter(s):
    loss = s.model(**batch()).loss
    s.model.base_model.model.lm_head.scaling["default"] = 7.0
    return loss


def trained_number(s):
    number = torch.tensor(2.0, requires_grad=True)
    logits = s.logits() / number
    with torch.no_grad():
        number.fill_(50.0)
    return s.loss(logits)


def hidden_states(s):
    out = s.model(batch()["input_ids"], output_hidden_states=True)
    with torch.no_grad():
        out.hidden_states[-1].zero_()
    return s.loss(out.logits)


def activation(s):
    loss = s.model(**batch()).loss
    s.model.model.layers[0].mlp.act_fn = nn.ReLU()
    return loss


# Changes after which the head or an MLP would compute another result than in the forward.
DEPENDS = {
    "functional_call, the loss after it": (call_with_other_weights, "lm_head.weight is another tensor than in the forward, as in torch.func.functional_call"),
    "functional_call of the loss": (loss_with_other_weights, "is another tensor than in the forward, as in torch.func.functional_call"),
    "a step": (step_between, "lm_head.weight was changed after the forward"),
    "an adapter that was off": (without_adapter, "_disable_adapters was True in the forward and is False"),
    "another adapter": (another_adapter, "_active_adapter was "),
    "two adapters in one backward": (one_backward_of_two_adapters, "_active_adapter was "),
    "an adapter's scale": (scale_of_an_adapter, "scaling was "),
    "a trained number": (trained_number, "a number given to div was changed after the forward"),
    "the head's input": (hidden_states, "its input was changed after the forward"),
    "an MLP's activation": (activation, "act_fn was a SiLUActivation in the forward and is a ReLU"),
}


@pytest.mark.parametrize("what", DEPENDS)
def test_what_the_result_depends_on_may_not_change_before_it_is_computed(what):
    change, told = DEPENDS[what]
    s = Between(CHUNKS, adapters="adapter" in what)
    with pytest.raises(offloadd.NotSupported, match=f"offloadd.(loss|mlp)_chunks: .* is computed in chunks.*{told}"):
        change(s).backward()


def autocast_left(s):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = s.logits()
    return s.loss(logits)


def autocast_entered(s):
    logits = s.logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.loss(logits)


def number_written(s):
    logits = s.logits() / s.temperature
    if isinstance(logits, Logits):
        # Plain PyTorch refuses the backward.
        s.temperature.fill_(50.0)
    return s.loss(logits)


def evaluated(s):
    logits = s.logits()
    s.model.eval()
    loss = s.loss(logits)
    s.model.train()
    return loss


def later_in_the_step(s):
    first = s.logits()
    s.loss(s.logits()).backward()
    return s.loss(first)


def other_weights_and_their_end(s):
    with torch.nn.utils.stateless._reparametrize_module(s.model, s.given()):
        loss = s.model(**batch()).loss
        loss.backward()
    return s.model(**batch()).loss


# What a script may do, with the result of plain PyTorch.
KEEPS = [autocast_left, autocast_entered, number_written, evaluated, later_in_the_step, other_weights_and_their_end]


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the types of the products with a number for each word."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func) and result.shape[-1] == VOCAB and result.numel():
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("between", KEEPS, ids=lambda one: one.__name__)
def test_what_happens_between_forward_and_loss_has_the_results_of_pytorch(between):
    found = []
    for count in (1, CHUNKS):
        s = Between(count)
        with Products() as products:
            loss = between(s)
        loss.backward()
        found.append((products.dtypes, loss.dtype, loss.detach(), s.model))
    (*whole, expected, plain), (*ours, loss, model) = found
    assert whole == ours and torch.allclose(loss, expected, rtol=1e-6 if loss.dtype == torch.float32 else 1e-2)
    assert distance(plain, {name: param.grad for name, param in model.named_parameters()}) < (1e-2 if torch.bfloat16 in whole[0] else 1e-6)


def whole_model(model):
    model.forward = torch.compile(model.forward, backend="aot_eager")


def blocks(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def head(model):
    model.lm_head.compile(backend="aot_eager")


@pytest.mark.parametrize("compiled", [blocks, whole_model, head], ids=lambda what: what.__name__)
def test_compiled_models_have_the_same_results(compiled):
    torch._dynamo.reset()
    whole, ours = make(llama()), make(llama())
    LossChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    compiled(ours)
    with warnings.catch_warnings():
        # What a compiler cannot look into, it does not try to.
        warnings.filterwarnings("error", "Dynamo does not know")
        assert torch.allclose(step(whole), step(ours), rtol=1e-6)
    assert not same_gradients(whole, offloaded.take_gradients(), near)


def memory(count, shape=(2, 4096)):
    with torch.device("meta"):
        model = T.AutoModelForCausalLM.from_config(llama(vocab_size=4096))
    return computed(model, units_of(model, None)[0], shape, True, loss_chunks=count)


def test_the_plan_counts_one_chunk():
    logits, whole, eighths = 2 * 4096 * 4096 * 4, memory(1), memory(8)
    # Logits, their float copies and gradients.
    assert whole.checkpointed.logits_bytes >= 2 * logits
    assert eighths.checkpointed.logits_bytes <= 3.1 * logits / 8 and eighths.kept.logits_bytes <= 3.1 * logits / 8
    assert eighths.checkpointed.peak_bytes < whole.checkpointed.peak_bytes / 3


ADVISED = {
    "llama": (llama, {"mlp_chunks", "loss_chunks"}),
    # The model adds a bias to its logits.
    "bart": (lambda **more: T.BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, **more), set()),
    "opt": (lambda **more: T.OPTConfig(**{**PLAIN, **more}, ffn_dim=80, word_embed_proj_dim=32), {"loss_chunks"}),
}


@pytest.mark.parametrize("name", ADVISED)
def test_a_plan_advises_what_the_model_can_do(name):
    make_config, can = ADVISED[name]
    settings = make_config(vocab_size=512)
    with torch.device("meta"):
        model = (T.AutoModelForSeq2SeqLM if settings.is_encoder_decoder else T.AutoModelForCausalLM).from_config(settings)
    units = units_of(model, None)[0]
    of_step = computed(model, units, (2, 256), True)
    warning = gpu_plan_in_place(of_step, units, True, 1 << 10).warning
    assert of_step.can_chunk == can and ("take --loss-chunks 4 (logits" in warning) == ("loss_chunks" in can)


@needs_daemon
def test_a_run_trains_in_chunks_until_it_ends(tmp_path):
    def trained(model, name, device, **own):
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3), []
        with offloadd.prepare(model, optimizer, config(device, tmp_path, **own), run_dir=tmp_path / name):
            for number in range(3):
                losses += [step(model, 2 * number + micro).item() for micro in range(2)]
                optimizer.step()
                optimizer.zero_grad()
            assert ("forward" in vars(model.lm_head)) == bool(own)
        return losses, model.state_dict()

    losses, weights = trained(make(llama(tie_word_embeddings=True)), "whole", "none")
    for checkpointing, device, own in (
        ("reentrant", "cpu", {"mlp_chunks": 2}),
        ("not reentrant", "nvme", {}),
        (None, "cpu", {"units": ["LlamaDecoderLayer", "lm_head"]}),
    ):
        ours = make(llama(tie_word_embeddings=True), checkpointing)
        found, of_ours = trained(ours, device + str(checkpointing), device, loss_chunks=CHUNKS, **own)
        assert found == pytest.approx(losses, rel=1e-6) and all(torch.allclose(value, weights[name], atol=1e-6) for name, value in of_ours.items())
        assert not any("forward" in vars(module) for module in ours.modules())
    refused = T.LlamaForSequenceClassification(llama())
    with pytest.raises(offloadd.NotSupported, match="offloadd.loss_chunks = 2: LlamaForSequenceClassification has no head"):
        both = config("cpu", tmp_path, mlp_chunks=2, loss_chunks=2)
        offloadd.prepare(refused, torch.optim.AdamW(refused.parameters()), both, run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists() and not any("forward" in vars(module) for module in refused.modules())


def loads(run, optimizer, loss):
    run.load_state_dict({"lm_head.weight": torch.ones(VOCAB, 32)}, strict=False)
    return loss()


def goes_back(run, optimizer, loss):
    run.load_checkpoint(run.run_dir.parent / "kept")
    return loss()


def steps(run, optimizer, loss):
    run.model(**batch()).loss.backward()
    optimizer.step()
    return loss()


def moves(run, optimizer, loss):
    moved = {name: param * 1.5 for name, param in run.model.named_parameters()}
    torch.func.functional_call(run.model, moved, (), batch()).loss.backward()


@pytest.mark.parametrize(
    "key, does", [("loss_chunks", loads), ("loss_chunks", goes_back), ("loss_chunks", steps), ("loss_chunks", moves), ("mlp_chunks", moves)]
)
def test_what_changes_in_a_run_before_it_is_computed_is_refused(tmp_path, key, does):
    model = make(llama())
    optimizer = torch.optim.AdamW(model.parameters())
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path, **{key: CHUNKS}), run_dir=tmp_path / "run") as run:
        run.save_checkpoint(tmp_path / "kept")
        logits = model(batch()["input_ids"]).logits
        with pytest.raises(
            offloadd.NotSupported, match=f"offloadd.{key}: .* is computed in chunks.* (was changed after|is another tensor than in) the forward"
        ):
            does(run, optimizer, lambda: functional.cross_entropy(logits.view(-1, VOCAB), batch()["labels"].flatten()))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        one = batch(index, rows=1, ignored=index)
        return {name: value[0] for name, value in one.items()}


def trainer(tmp_path, model, **more):
    how = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-3, adam_epsilon=1e-3, logging_steps=1, seed=5)
    evaluated = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    args = T.TrainingArguments(tmp_path / "out", use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", **how, **evaluated, **more)
    right = lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}
    return T.Trainer(model, args, train_dataset=Data(), eval_dataset=Data(), compute_metrics=right)


def test_the_trainer_of_transformers_counts_tokens_over_micro_batches(tmp_path):
    found = []
    for count in (1, CHUNKS):
        one = trainer(tmp_path, made(count))
        one.train()
        found.append([entry[name] for entry in one.state.log_history for name in ("loss", "grad_norm", "eval_loss", "eval_right") if name in entry])
    assert len(found[0]) == 12 and found[0] == pytest.approx(found[1], rel=1e-5)
    model = made(CHUNKS)
    with pytest.raises(offloadd.NotSupported, match="offloadd.loss_chunks: logits of a training forward have no values, and log_softmax needs them"):
        trainer(tmp_path, model, label_smoothing_factor=0.1).train()


def test_the_key_is_a_number_of_chunks():
    assert settings_of({}).loss_chunks == 1 and settings_of({"offloadd": {"loss_chunks": 8}}).loss_chunks == 8
    with pytest.raises(offloadd.Error, match="offloadd.loss_chunks: 0: must be at least 1"):
        settings_of({"offloadd": {"loss_chunks": 0}})
    with pytest.raises(offloadd.Error, match="options has loss_chunks"):
        offloadd.optim.AdamW(make(llama()).parameters(), options={"loss_chunks": 2})
