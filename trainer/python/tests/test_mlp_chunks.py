"""MLPs in chunks of tokens: the bits of the same chunks by hand, the results of whole MLPs within 1e-6, and refusals of what mixes tokens."""

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
T = transformers
T.logging.set_verbosity_error()

import offloadd  # noqa: E402
import offloadd.optim  # noqa: E402
from offloadd import _fp8  # noqa: E402
from offloadd._config import settings_of  # noqa: E402
from offloadd._gpu_plan import computed  # noqa: E402
from offloadd._mlp_chunks import MlpChunks, is_rowwise  # noqa: E402
from offloadd._units import units_of  # noqa: E402
from test_activations import Moved  # noqa: E402
from test_plan import kept_on_the_cpu  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import Offloaded, randomize, same_gradients  # noqa: E402

VOCAB, CHUNKS = 99, 4
SIZES = dict(hidden_size=32, intermediate_size=80, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3, vocab_size=VOCAB, head_dim=16)
PLAIN = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
EXPERTS = dict(SIZES, moe_intermediate_size=32, num_experts_per_tok=2)
GPT = dict(n_embd=32, n_layer=3, n_head=2, n_positions=64, vocab_size=VOCAB)
NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)

# Configurations of families whose MLPs are computed in chunks.
FAMILIES = {
    "cohere2": lambda: T.Cohere2Config(**SIZES),
    "falcon": lambda: T.FalconConfig(**PLAIN, ffn_hidden_size=80),
    "gemma": lambda: T.GemmaConfig(**SIZES),
    "gemma3": lambda: T.Gemma3TextConfig(**SIZES),
    "glm4": lambda: T.Glm4Config(**{**SIZES, "pad_token_id": 0}),
    "gpt2": lambda: T.GPT2Config(**GPT, **NO_DROPOUT),
    "gpt-neox": lambda: T.GPTNeoXConfig(**PLAIN),
    "gptj": lambda: T.GPTJConfig(**GPT, **NO_DROPOUT, rotary_dim=8),
    "granite": lambda: T.GraniteConfig(**SIZES),
    "llama": lambda: T.LlamaConfig(**SIZES),
    "mistral": lambda: T.MistralConfig(**SIZES),
    "nemotron": lambda: T.NemotronConfig(**SIZES),
    "olmo2": lambda: T.Olmo2Config(**SIZES),
    "phi": lambda: T.PhiConfig(**PLAIN),
    "phi3": lambda: T.Phi3Config(**{**SIZES, "pad_token_id": 0}),
    "qwen2": lambda: T.Qwen2Config(**SIZES),
    "qwen3": lambda: T.Qwen3Config(**SIZES),
    "smollm3": lambda: T.SmolLM3Config(**{**SIZES, "pad_token_id": 0}),
    "stablelm": lambda: T.StableLmConfig(**SIZES),
    "starcoder2": lambda: T.Starcoder2Config(**SIZES),
}

# Those that are refused, and how.
REFUSED = {
    "bert": (lambda: T.BertConfig(**PLAIN, is_decoder=True), "the blocks of BertLMHeadModel have no module mlp"),
    "bloom": (lambda: T.BloomConfig(hidden_size=32, n_layer=3, n_head=2, vocab_size=VOCAB), "a BloomMLP, is given hidden_states, residual"),
    "deepseek-v3": (
        lambda: T.DeepseekV3Config(**EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16),
        "layers.1.mlp, a DeepseekV3MoE, has a ",
    ),
    "gpt-oss": (lambda: T.GptOssConfig(**{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}), "layers.0.mlp, a GptOssMLP, has a "),
    "mixtral": (lambda: T.MixtralConfig(**SIZES, num_local_experts=4), "mixtures of experts choose for each token"),
    "opt": (lambda: T.OPTConfig(**PLAIN, ffn_dim=80, word_embed_proj_dim=32), "have no module mlp"),
    "qwen3-moe": (lambda: T.Qwen3MoeConfig(**EXPERTS, num_experts=4), "layers.0.mlp, a Qwen3MoeSparseMoeBlock, has a "),
    "t5": (lambda: T.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=3, num_heads=2, vocab_size=VOCAB), "have no module mlp"),
}


def make(settings, checkpointing=None):
    torch.manual_seed(0)
    auto = T.AutoModelForSeq2SeqLM if settings.is_encoder_decoder else T.AutoModelForCausalLM
    model = randomize(auto.from_config(settings).train())
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    return model


def by_hand(model, count=CHUNKS):
    """Lets a plain model compute its MLPs for one chunk of all tokens after the other, and keep everything."""

    def chunks_of(forward):
        def chunks(states):
            rows = states.flatten(0, 1)[None]
            return torch.cat([forward(part) for part in rows.split(-(-rows.shape[1] // count), 1)], 1).view_as(states)

        return chunks

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.forward = chunks_of(module.forward)
    return model


def step(model, seed, length=17):
    """The loss of a step, whose gradients are computed."""
    torch.manual_seed(seed)
    ids = torch.randint(VOCAB, (2, length))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def near(one, other):
    return torch.allclose(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


def distance(plain, found):
    """The norm of the difference of all gradients, of that of the gradients."""
    pairs = [(param.grad, found[name]) for name, param in plain.named_parameters()]
    norm = lambda tensors: sum(float(one.double().square().sum()) for one in tensors) ** 0.5
    return norm(one - other for one, other in pairs) / norm(one for one, _ in pairs)


CHECKPOINTING = (None, "not reentrant", "reentrant")


@pytest.mark.parametrize("number, name", list(enumerate(FAMILIES)), ids=str)
def test_families_have_the_bits_of_chunks_by_hand_and_the_results_of_whole_mlps(number, name):
    checkpointing = CHECKPOINTING[number % 3]
    whole, hand, ours = (make(FAMILIES[name](), checkpointing) for _ in range(3))
    by_hand(hand)
    chunks = MlpChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    for seed in range(2):
        for one in (whole, hand):
            one.zero_grad()
        expected, of_hand, found = (step(one, seed) for one in (whole, hand, ours))
        gradients = offloaded.take_gradients()
        assert torch.equal(found, of_hand) and torch.allclose(found, expected, rtol=1e-6, atol=0)
        assert not same_gradients(hand, gradients)
        assert not same_gradients(whole, gradients, near) and distance(whole, gradients) < 1e-6
        assert not offloaded.live()
    chunks.end()
    assert not any("forward" in vars(module) for module in ours.modules())


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_mix_tokens_or_have_no_mlp_are_refused(name):
    settings, told = REFUSED[name]
    model = make(settings())
    with pytest.raises(offloadd.NotSupported, match="offloadd.mlp_chunks.*leave .* out") as refused:
        MlpChunks(model, CHUNKS)
    assert told in str(refused.value)
    assert not any("forward" in vars(module) for module in model.modules())


def llama(**more):
    return T.LlamaConfig(**{**SIZES, **more})


class OwnMlp(nn.Module):
    """An MLP of a script, whose tokens meet."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(x) + x.mean(1, keepdim=True)


def own_mlp(model):
    model.model.layers[1].mlp = OwnMlp()


# Layers of kinds that compute each row by itself unless they are told otherwise.
OF_OTHER_ROWS = {
    "Softmax": lambda: nn.Softmax(1),
    "LogSoftmax": nn.LogSoftmax,
    "GLU": lambda: nn.GLU(1),
    "PReLU": lambda: nn.PReLU(CHUNKS),
    "Softmax2d": nn.Softmax2d,
    "MultiheadAttention": lambda: nn.MultiheadAttention(80, 4),
    "LayerNorm": lambda: nn.LayerNorm((CHUNKS, 80)),
    "RMSNorm": lambda: nn.RMSNorm((CHUNKS, 80)),
}


def test_layers_that_compute_along_tokens_are_not_rowwise():
    assert [name for name, make_layer in OF_OTHER_ROWS.items() if is_rowwise(make_layer()) or type(make_layer()).__name__ != name] == []
    assert all(map(is_rowwise, (nn.Softmax(-1), nn.GLU(), nn.PReLU(), nn.LayerNorm(80), nn.RMSNorm((80,)), nn.SiLU(), nn.Dropout())))


def norm_over_tokens(model):
    model.model.layers[1].mlp.act_fn = nn.BatchNorm1d(80)


def eight_bits(model):
    # As bitsandbytes calls it.
    model.model.layers[1].mlp.up_proj.__class__ = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})


@pytest.mark.parametrize(
    "change, told",
    [
        (own_mlp, "model.layers.1.mlp is a OwnMlp, which is not an MLP of transformers"),
        (norm_over_tokens, "has a BatchNorm1d (act_fn)"),
        (eight_bits, "has a Linear8bitLt (up_proj)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layers_that_are_not_known_are_refused(change, told):
    model = make(llama())
    change(model)
    with pytest.raises(offloadd.NotSupported) as refused:
        MlpChunks(model, CHUNKS)
    assert told in str(refused.value)


def hooked_within(model):
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)


def hooked_within_backward(model):
    model.model.layers[1].mlp.act_fn.register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize("hook", [hooked_within, hooked_within_backward], ids=lambda hook: hook.__name__)
def test_hooks_within_an_mlp_are_refused(hook):
    model = make(llama())
    hook(model)
    MlpChunks(model, CHUNKS)
    with pytest.raises(offloadd.NotSupported, match=r"model.layers.1.mlp.\w+ has a hook or is a unit of its own"):
        step(model, 0)


def test_units_within_an_mlp_are_refused_and_mlps_may_be_units():
    model = make(llama())
    MlpChunks(model, CHUNKS)
    Offloaded(model, wanted=["Linear"])
    with pytest.raises(offloadd.NotSupported, match="is a unit of its own"):
        step(model, 0)
    hand, ours = by_hand(make(llama())), make(llama())
    MlpChunks(ours, CHUNKS)
    offloaded = Offloaded(ours, wanted=["LlamaMLP"])
    assert torch.equal(step(ours, 0), step(hand, 0))
    assert not same_gradients(hand, offloaded.take_gradients()) and not offloaded.live()


def test_hooks_of_an_mlp_see_all_tokens():
    hand, ours = by_hand(make(llama(), "reentrant")), make(llama(), "reentrant")
    MlpChunks(ours, CHUNKS)
    seen = []
    for model in (hand, ours):
        mlp = model.model.layers[1].mlp
        mlp.register_forward_hook(lambda _, args, output: seen.append((args[0].shape, output.shape)) or output * 2)
        mlp.register_full_backward_hook(lambda _, given, of_output: seen.append((given[0].shape, of_output[0].shape)))
    offloaded = Offloaded(ours)
    assert torch.equal(step(ours, 0), step(hand, 0))
    assert not same_gradients(hand, offloaded.take_gradients())
    assert len(seen) == 6 and set(seen) == {((2, 17, 32), (2, 17, 32))}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_dropout_draws_for_each_chunk_and_the_same_again_in_backward(checkpointing):
    hand, ours = (make(T.GPT2Config(**GPT), checkpointing) for _ in range(2))
    by_hand(hand)
    MlpChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    for seed in range(2):
        hand.zero_grad()
        assert torch.equal(step(hand, seed), step(ours, seed))
        assert not same_gradients(hand, offloaded.take_gradients())


@pytest.mark.parametrize("checkpointing", ["not reentrant", "reentrant"])
def test_adapters_in_mlps_and_inputs_of_blocks_in_host_memory(checkpointing):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")

    def adapted():
        model = make(llama(attention_dropout=0.1), checkpointing)
        model.enable_input_require_grads()
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1))

    moved = []
    for chunked in (False, True):
        hand, ours = adapted(), adapted()
        ours.load_state_dict(hand.state_dict())
        if chunked:
            by_hand(hand)
            MlpChunks(ours, CHUNKS)
        ours = Moved(ours)
        try:
            expected = step(hand, 0)
            assert torch.equal(expected, step(ours.model, 0))
            assert not same_gradients(hand, ours.take_gradients()) and ours.is_empty()
            moved.append(ours.engine.activations.moved_bytes)
        finally:
            ours.close()
    assert moved[0] == moved[1] > 0


def test_weights_in_4_bits_have_the_bits_of_chunks_by_hand():
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")

    def quantized():
        model = make(llama(hidden_size=64, intermediate_size=128))
        for layer in model.model.layers:
            for name, linear in list(layer.mlp.named_children())[:3]:
                packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=packed)
                setattr(layer.mlp, name, packed.to("cpu"))
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))

    hand, ours = by_hand(quantized()), quantized()
    MlpChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    assert torch.equal(step(hand, 0), step(ours, 0))
    assert not same_gradients(hand, offloaded.take_gradients())


def test_products_in_8_bits_have_scales_of_their_own_for_each_chunk(monkeypatch):
    monkeypatch.setattr(_fp8, "why_not", lambda device: None)
    monkeypatch.setattr(_fp8, "SIDE_MIN", 16)
    hand, ours = by_hand(make(llama()).bfloat16()), make(llama(), "not reentrant").bfloat16()
    MlpChunks(ours, CHUNKS)
    for model in (hand, ours):
        _fp8.Fp8Layers(model, torch.device("cpu")).begin()
    offloaded = Offloaded(ours)
    assert torch.equal(step(hand, 0), step(ours, 0))
    assert not same_gradients(hand, offloaded.take_gradients())


def test_parts_of_a_block_that_is_not_checkpointed_stay():
    ours = make(llama())
    MlpChunks(ours, CHUNKS)
    ours = Moved(ours)
    try:
        step(ours.model, 0)
        ours.take_gradients()
        assert not ours.copies.left
    finally:
        ours.close()


def test_compiled_blocks_have_the_gradients_of_whole_mlps():
    torch._dynamo.reset()
    whole, ours = make(llama()), make(llama())
    MlpChunks(ours, CHUNKS)
    offloaded = Offloaded(ours)
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager")
    assert torch.allclose(step(whole, 0), step(ours, 0), rtol=1e-6)
    assert not same_gradients(whole, offloaded.take_gradients(), near)


def test_passes_without_gradients_generation_and_copies():
    whole, ours = make(llama()).eval(), make(llama()).eval()
    chunks = MlpChunks(ours, CHUNKS)
    calls = []
    mlp = type(ours.model.layers[0].mlp)
    plain, mlp.forward = mlp.forward, lambda self, x: calls.append((id(self), x.shape[:2])) or plain(self, x)
    try:
        chunks.end()
        chunks = MlpChunks(ours, CHUNKS)
        ids = torch.randint(VOCAB, (2, 17))
        with torch.no_grad():
            assert torch.allclose(ours(ids).logits, whole(ids).logits, rtol=1e-6, atol=1e-6)
        of_first = [size for one, size in calls if one == id(ours.model.layers[0].mlp)]
        assert of_first == [(1, 9), (1, 9), (1, 9), (1, 7)]
        calls.clear()
        generated = [model.generate(ids[:, :1], max_new_tokens=3, do_sample=False, pad_token_id=0) for model in (ours, whole)]
        # The tokens of a step of generation are not divided.
        assert torch.equal(*generated) and {size for _, size in calls} == {(2, 1)}
        calls.clear()
        twin = copy.deepcopy(ours)
        twin(ids)
        assert {one for one, _ in calls} == {id(layer.mlp) for layer in twin.model.layers}
    finally:
        mlp.forward = plain


def test_transforms_of_torch_compute_whole_mlps():
    whole, ours = make(llama()).model.layers[0].mlp, make(llama())
    MlpChunks(ours, CHUNKS)
    states = torch.randn(3, 2, 17, 32)
    per_sample = [torch.func.vmap(torch.func.grad(lambda x, mlp=mlp: mlp(x).square().sum()))(states) for mlp in (whole, ours.model.layers[0].mlp)]
    assert torch.equal(*per_sample)
    assert torch.equal(ours.model.layers[0].mlp(states[0, 0, 0]), whole(states[0, 0, 0]))


def test_forwards_that_others_have_put_into_mlps_are_refused():
    for put_into in (lambda mlp: mlp, lambda mlp: mlp.act_fn):
        model = make(llama())
        module = put_into(model.model.layers[1].mlp)
        own = module.forward
        # Each token has something of the others.
        module.forward = lambda x, own=own: own(x) + x.mean(1, keepdim=True)
        with pytest.raises(offloadd.NotSupported, match=r"layers.1.mlp.* was given a forward of its own"):
            MlpChunks(model, CHUNKS)


def test_a_forward_that_another_library_has_put_over_ours_is_whole_at_the_end():
    model = make(llama())
    mlp, called = model.model.layers[1].mlp, []
    chunks = MlpChunks(model, CHUNKS)
    ours = mlp.forward
    mlp.forward = later = lambda x: ours(x)
    chunks.end()
    mlp.act_fn.register_forward_hook(lambda module, given, result: called.append(result.shape[:2]))
    with torch.no_grad():
        model(torch.randint(VOCAB, (2, 17)))
    assert called == [(2, 17)] and mlp.forward is later and "forward" not in vars(model.model.layers[2].mlp)


def test_blocks_may_share_an_mlp():
    def shared():
        model = make(llama())
        model.model.layers[2].mlp = model.model.layers[0].mlp
        return model

    whole, ours = shared(), shared()
    chunks = MlpChunks(ours, CHUNKS)
    assert torch.allclose(step(whole, 0), step(ours, 0), rtol=1e-6)
    chunks.end()
    assert not any("forward" in vars(module) for module in ours.modules())


def memory(count, shape=(2, 4096)):
    with torch.device("meta"):
        model = T.AutoModelForCausalLM.from_config(llama(intermediate_size=1024, vocab_size=8))
    return computed(model, units_of(model, None)[0], shape, True, mlp_chunks=count)


def test_the_plan_counts_one_chunk():
    tokens, whole, quarters = 2 * 4096, memory(1), memory(CHUNKS)
    # What a Llama's MLP keeps for its backward: the gate, its activation, the other factor and their product.
    kept = 4 * tokens * 1024 * 4
    assert whole.kept.kept_bytes - quarters.kept.kept_bytes == pytest.approx(3 * kept, rel=0.01)
    assert whole.checkpointed.peak_bytes - quarters.checkpointed.peak_bytes > 0.7 * kept
    model = T.AutoModelForCausalLM.from_config(llama(intermediate_size=1024, vocab_size=8))
    MlpChunks(model, CHUNKS)
    assert memory(CHUNKS, (2, 48)).kept.kept_bytes == pytest.approx(kept_on_the_cpu(model, torch.randint(8, (2, 48))), rel=0.1)
    # The outputs of the chunks and what they are put together in, beside a chunk.
    assert quarters.checkpointed.peak_bytes < whole.checkpointed.peak_bytes / 2.5


@needs_daemon
def test_a_run_trains_in_chunks_until_it_ends(tmp_path):
    def trained(model, name, device, **own):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config(device, tmp_path, **own), run_dir=tmp_path / name):
            losses = [[step(model, seed).item(), optimizer.step(), optimizer.zero_grad()][0] for seed in range(3)]
            assert all("forward" in vars(layer.mlp) for layer in model.model.layers)
        return losses, model.state_dict()

    losses, weights = trained(by_hand(make(llama())), "hand", "none")
    for checkpointing, device in (("reentrant", "cpu"), ("not reentrant", "nvme")):
        ours = make(llama(), checkpointing)
        found, of_ours = trained(ours, device, device, mlp_chunks=CHUNKS)
        assert found == losses and all(torch.equal(value, weights[name]) for name, value in of_ours.items())
        assert not any("forward" in vars(layer.mlp) for layer in ours.model.layers)
    refused = make(REFUSED["mixtral"][0]())
    with pytest.raises(offloadd.NotSupported, match="offloadd.mlp_chunks"):
        offloadd.prepare(refused, torch.optim.AdamW(refused.parameters()), config("cpu", tmp_path, mlp_chunks=2), run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    step(refused, 0)
    # Nothing of the start that was refused later is left either.
    with pytest.raises(offloadd.LayoutChanged):
        other = make(llama(hidden_size=16))
        offloadd.prepare(other, torch.optim.AdamW(other.parameters()), config("nvme", tmp_path, mlp_chunks=2), run_dir=tmp_path / "nvme")
    assert not any("forward" in vars(module) for module in other.modules())


def test_the_key_is_a_number_of_chunks():
    assert settings_of({}).mlp_chunks == 1 and settings_of({"offloadd": {"mlp_chunks": 8}}).mlp_chunks == 8
    with pytest.raises(offloadd.Error, match="offloadd.mlp_chunks: 0: must be at least 1"):
        settings_of({"offloadd": {"mlp_chunks": 0}})
    with pytest.raises(offloadd.Error, match="options has mlp_chunks"):
        offloadd.optim.AdamW(make(llama()).parameters(), options={"mlp_chunks": 2})
