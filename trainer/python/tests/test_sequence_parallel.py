"""Sequences whose parts lie on several ranks: losses, norms and weights are those of one rank with the whole."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
transformers.logging.set_verbosity_error()

# Imported once for all ranks.
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.models.opt.modeling_opt  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402
import transformers.models.roberta.modeling_roberta  # noqa: E402
import transformers.trainer  # noqa: E402

import offloadd  # noqa: E402
from offloadd import _sequence_attention as sequence_attention, sequence_parallel  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_hf import DEEPSPEED, server  # noqa: E402
from test_ranks import close, die, equal, state  # noqa: E402
from test_runs import HERE, config, needs_daemon  # noqa: E402

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
pytestmark = needs_daemon

TOKENS, ROWS, STEPS, ACCUMULATED = 16, 2, 2, 4
SIZES = {"vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **HEADS, **more}))


def one_key(**more):
    return llama(num_key_value_heads=1, **more)


def qwen3(**more):
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **HEADS, **sliding, **more))


def gpt2(**more):
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more))


MODELS = {"llama": llama, "one_key": one_key, "qwen3": qwen3, "gpt2": gpt2}


def model_of(name, attention):
    name, _, lora = name.partition("+")
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation=attention)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model if not lora else peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def batches(kind, steps=STEPS):
    """Batches of whole sequences, some tokens of which do not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(ACCUMULATED * steps):
        ids = torch.randint(1, 64, (ROWS, TOKENS), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(TOKENS).expand(ROWS, -1)}
        # Prompts of different lengths: no rank has as many tokens that count as another, and sometimes the first has none.
        batch["labels"][:, : int(torch.randint(1, 7, (), generator=generator)) if number % 3 or "counted" in kind else 10] = -100
        if "documents" in kind:
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]) for cut in (5, 11)])
        if kind == "padding":
            batch["attention_mask"] = torch.ones_like(ids)
            # On the left, where later tokens would see it, and on the right.
            batch["attention_mask"][0, :3], batch["attention_mask"][1, 10:] = 0, 0
            batch["labels"][batch["attention_mask"] == 0] = -100
        found.append(batch)
    return found


def loss_of(model, batch, of_each=False):
    """The mean over the tokens of a part that count, or the loss of each token."""
    logits = model(**{name: value for name, value in batch.items() if name != "shift_labels"}).logits
    if of_each:
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["shift_labels"].clamp(min=0), reduction="none")
    return model.loss_function(logits=logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=64)


def steps(model, optimizer, parts, mean, accumulated, clipping=0.5, of_each=False):
    losses, norms = [], []
    for number, batch in enumerate(parts, 1):
        loss = mean(loss_of(model, batch, of_each), batch["shift_labels"])
        (loss / accumulated).backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def adamw(model):
    # With a small eps, AdamW makes whole steps of gradients that are rounding only.
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)


def whole(name, kind, attention, checkpointed=False, accumulated=ACCUMULATED, clipping=0.5):
    """Losses, norms and weights of plain PyTorch with whole sequences."""
    model = model_of(name, attention)
    if checkpointed:
        model.gradient_checkpointing_enable()
    shifted = [
        {**batch, "shift_labels": torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous(), "use_cache": False}
        for batch in batches(kind)
    ]
    for batch in shifted:
        del batch["labels"]
    losses, norms = steps(model, adamw(model), shifted, lambda loss, labels: loss, accumulated, clipping)
    return losses, norms, state(model)


def divided(rank, ranks, path, cases, size):
    """The same with parts of sequences, for each case."""
    found = {}
    for name, kind, attention, device in cases:
        model = model_of(name, attention)
        if device == "cpu" and "lora" not in name:
            model.gradient_checkpointing_enable()
        optimizer = adamw(model)
        directory = path / f"{name}-{kind}-{attention}-{device}"
        # Each rank's part of the tokens is in chunks, too.
        chunks = {"mlp_chunks": 3, "loss_chunks": 3} if attention == "eager" else {}
        with offloadd.prepare(model, optimizer, {**config(device, path, **chunks), "sequence_parallel_size": size}, run_dir=directory):
            # Each rank's loader has every rank-th batch, as a DistributedSampler's.
            loader = sequence_parallel.Loader(batches(kind)[rank::ranks])
            losses, norms = steps(model, optimizer, loader, sequence_parallel.mean, ACCUMULATED * size // ranks, of_each=name == "gpt2")
            found[name, kind, attention, device] = losses, norms, state(model)
    return found


CASES = [
    ("llama", "plain", "sdpa", "none"),
    ("llama", "documents", "eager", "cpu"),
    ("qwen3", "documents", "sdpa", "cpu"),
    ("qwen3", "padding", "eager", "none"),
    ("one_key", "padding", "sdpa", "none"),
    ("gpt2", "documents", "sdpa", "nvme"),
    ("llama+lora", "plain", "sdpa", "cpu"),
]


def one_batch(**more):
    ids = torch.randint(1, 64, (1, 8), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "position_ids": torch.arange(8)[None], **more}


class Rewards(transformers.LlamaPreTrainedModel):
    """A head of one's own on a model."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = transformers.LlamaModel(config), torch.nn.Linear(32, 1)


def with_head(kind, **more):
    return kind(transformers.LlamaConfig(**{**SIZES, **HEADS, **more}))


def opt(**more):
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "max_position_embeddings": 64}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32, **more))


def roberta():
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return transformers.RobertaForCausalLM(transformers.RobertaConfig(**sizes, is_decoder=True))


def without_a_layer(model):
    """A forward that has all layers, and one that leaves the last out."""
    model(**one_batch())
    del model.model.layers[2]
    model(**one_batch())


def divided_by_nothing(model):
    loss = model(**one_batch()).logits.sum() * 0
    sequence_parallel.mean(loss / 0, torch.full((1, 8), -100))


def in_a_pause(model):
    with sequence_parallel.paused():
        list(sequence_parallel.Loader([one_batch()]))


# What is refused: a part of the message, a model, and what its forward is given or what is done with the model once it is prepared.
REFUSED = [
    ("its 3 attention heads cannot be divided among 2 ranks", lambda: llama(hidden_size=24, num_attention_heads=3, num_key_value_heads=3), None),
    ("its 3 heads of keys and values cannot be divided", lambda: llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=3), None),
    ("type dynamic depend on the longest position", lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), None),
    ("attention in chunks", lambda: changed(llama(), attention_chunk_size=8), None),
    ("layers of the type linear_attention carry", lambda: changed(llama(), layer_types=["full_attention", "linear_attention"]), None),
    ("encoders with decoders", lambda: changed(llama(), is_encoder_decoder=True), None),
    ("it has a Conv1d", lambda: torch.nn.ModuleList([with_conv(llama())]), None),
    ("it has a MultiheadAttention", lambda: torch.nn.ModuleList([llama(), torch.nn.MultiheadAttention(32, 2)]), None),
    ("another model beside it, a GPT2LMHeadModel", lambda: torch.nn.ModuleList([llama(), gpt2()]), None),
    ("its head is not one of a language model", lambda: with_head(transformers.LlamaForSequenceClassification, num_labels=1), None),
    ("its head is not one of a language model", lambda: with_head(transformers.LlamaForTokenClassification), None),
    ("its head is not one of a language model", lambda: with_head(Rewards), None),
    ("it makes positions of its own", roberta, None),
    ("layerdrop", lambda: opt(layerdrop=0.1), None),
    ("attention by mine is not supported", lambda: changed(llama(), _attn_implementation_internal="mine"), None),
    ("no model of transformers", lambda: torch.nn.Linear(4, 4), None),
    ("attention by flex_attention", lambda: changed(llama(), _attn_implementation_internal="flex_attention"), None),
    ("reorder_and_upcast_attn computes", lambda: gpt2(reorder_and_upcast_attn=True, attn_implementation="eager"), None),
    ("2 of 3 layers compute attention by transformers'", lambda: with_mixer(llama()), {}),
    ("2 of 3 layers compute attention by transformers'", llama, without_a_layer),
    ("a part of the model was called", llama, lambda model: model.model(**one_batch())),
    ("position_ids restart beside an attention_mask", llama, {"position_ids": torch.arange(8)[None] % 4, "attention_mask": torch.ones(1, 8)}),
    ("it counts positions without padding", opt, {"attention_mask": torch.arange(8)[None] > 2}),
    ("logits_to_keep: the last tokens of each part", llama, {"logits_to_keep": 1}),
    ("a part has no token that counts, and its loss is divided", llama, divided_by_nothing),
    ("Loader: no model divides its sequences now", llama, in_a_pause),
    ("position_ids is missing", llama, {"position_ids": None}),
    ("labels without shift_labels", llama, {"labels": torch.ones(1, 8, dtype=torch.long)}),
    ("attention_mask must be [batch, tokens]", llama, {"attention_mask": torch.ones(1, 1, 8, 8)}),
    ("generate within offloadd.sequence_parallel.paused()", llama, {"past_key_values": transformers.DynamicCache()}),
    ("output_attentions", llama, {"output_attentions": True}),
    ("cu_seq_lens_q: position_ids say", llama, {"cu_seq_lens_q": torch.arange(3)}),
]


def changed(model, **values):
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def with_conv(model):
    model.model.conv = torch.nn.Conv1d(1, 1, 1)
    return model


class Mixer(torch.nn.Module):
    """Mixes tokens otherwise than by attention."""

    def forward(self, hidden_states, **given):
        return hidden_states.cumsum(1), None


def with_mixer(model):
    model.model.layers[1].self_attn = Mixer()
    return model


def refused(path):
    """The message of each row of the table, and of loaders."""
    attentions, masks = sequence_attention._interfaces()
    found, functions = [], [(dict(one._global_mapping), one) for one in (attentions, masks)]
    for number, (_, make, given) in enumerate(REFUSED):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            with offloadd.prepare(model, optimizer, {**config("none", path), "sequence_parallel_size": 2}, run_dir=path / f"refused-{number}"):
                given(model) if callable(given) else model(**one_batch(**given))
            found.append("nothing")
        except offloadd.Error as error:
            found.append(str(error))
        assert getattr(model, "_offloadd_run", None) is None and not sequence_attention._attached and not sequence_attention._replaced, (
            "the model is a plain one again"
        )
        assert all(one._global_mapping == before for before, one in functions), "transformers has its functions again"
    model, loader = llama(), sequence_parallel.Loader
    with offloadd.prepare(model, adamw(model), {**config("none", path), "sequence_parallel_size": 2}, run_dir=path / "loaders"):
        for own in ([{"input_ids": torch.ones(1, 7)}], [{"input_ids": torch.ones(1, 8)}] * torch.distributed.get_rank(), [torch.ones(1, 8)]):
            found.append(message_of(lambda: list(loader(own))))
    found += [message_of(lambda: list(loader([one_batch()]))), message_of(lambda: sequence_parallel.mean(torch.ones(()), torch.ones(1, 8)))]
    return found


def message_of(call):
    try:
        call()
    except offloadd.Error as error:
        return str(error)


OF_LOADERS = ["sequences of 7 tokens, which 2 ranks cannot divide", "the data of rank 0 of the sequence has ended", "no mapping with input_ids"] + [
    "no model divides its sequences"
] * 2


def flash(module, query, key, value, mask, position_ids=None, **given):
    """Stands for FlashAttention: documents are where positions restart."""
    assert mask is None and position_ids.shape == (1, query.shape[2])
    documents = (position_ids[0] == 0).cumsum(0)
    apart = (documents[:, None] == documents) & torch.ones(len(documents), len(documents), dtype=torch.bool).tril()
    return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, apart[None, None], scaling=given["scaling"])


def evaluated(path):
    """Logits of a part, with SDPA and what stands for FlashAttention; those of a pause, and a text; those of positions that jump."""
    transformers.AttentionInterface.register("flash_attention_2", flash)
    batch = one_batch(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
    part = {name: value.chunk(2, dim=1)[torch.distributed.get_rank()] for name, value in batch.items()}
    found = []
    for implementation in ("sdpa", "flash_attention_2"):
        model = changed(model_of("llama", "sdpa"), _attn_implementation_internal=implementation).eval()
        with offloadd.prepare(model, adamw(model), {**config("cpu", path), "sequence_parallel_size": 2}, run_dir=path / implementation), torch.no_grad():
            found.append(model(**part).logits)
            if implementation == "sdpa":
                with sequence_parallel.paused():
                    found.append(model(**batch, use_cache=False).logits)
                    found.append(model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False))
                skips = {name: value.chunk(2, dim=1)[torch.distributed.get_rank()] for name, value in skipping().items()}
                found.append(model(**skips).logits)
                # A module of another model, that names its arguments.
                states = torch.randn(1, 2, 4, 8)
                attention = transformers.AttentionInterface()["sdpa"]
                plain, _ = transformers.integrations.sdpa_attention.sdpa_attention_forward(torch.nn.Module(), states, states, states, None)
                assert torch.equal(attention(torch.nn.Module(), query=states, key=states, value=states, attention_mask=None)[0], plain)
    return found


def skipping():
    """A text whose positions jump, with a mask whose numbers do not fit into a byte: its tokens are one document."""
    mask = torch.full((1, 8), 256)
    mask[0, 7] = 0
    return one_batch(position_ids=torch.tensor([[0, 1, 2, 3, 20, 21, 22, 23]]), attention_mask=mask)


def committed(rank, ranks, path, killed_at=None):
    """The steps that were made before, and losses and weights, of a run on drives that may be killed in a backward."""
    model = model_of("qwen3", "sdpa")
    optimizer, losses = adamw(model), []
    with offloadd.prepare(model, optimizer, {**config("nvme", path), "sequence_parallel_size": 2}, run_dir=path / "run") as run:
        before = run.steps_done
        for number, batch in enumerate(run.batches(sequence_parallel.Loader(batches("documents", 3)[rank::ranks])), ACCUMULATED * before + 1):
            loss = sequence_parallel.mean(loss_of(model, batch), batch["shift_labels"])
            if number == killed_at and rank == 1:
                model.model.layers[1].register_full_backward_hook(lambda *_: die())
            loss.backward()
            losses.append(loss.item())
            if number % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
        return before, losses, state(model)


def of_the_page(rank, ranks, path):
    """Norms and weights of the example in docs/pytorch-details.md."""
    _, _, section = (HERE.parents[2] / "docs" / "pytorch-details.md").read_text().partition("## Sequences on several ranks")
    code = section.partition("```python\n")[2].partition("```")[0]
    model = model_of("gpt2", "sdpa")
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda *given: norms.append(float(clip(*given)))
    os.chdir(path)
    try:
        exec(code, {"model": model, "optimizer": adamw(model), "loader": batches("documents")[rank::ranks], "offloadd": offloadd, "torch": torch})
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    return norms, state(model)


def on_two(rank, ranks, path):
    unbroken = path / "unbroken"
    unbroken.mkdir(exist_ok=True)
    return (divided(rank, ranks, path, CASES, 2), refused(path), evaluated(path), committed(rank, ranks, unbroken), of_the_page(rank, ranks, path))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two ranks tell of all this."""
    path = tmp_path_factory.mktemp("two")
    found = on_ranks(2, path / "store", on_two, path)
    assert not any(isinstance(one, Exception) for one in found), found
    return list(zip(*found))


def test_two_ranks_with_parts_of_a_sequence_are_one_with_the_whole(told):
    one, other = told[0]
    for case in CASES:
        losses, norms, weights = whole(*case[:3], checkpointed=case[3] == "cpu" and "lora" not in case[0])
        found, its_norms, ours = one[case]
        assert found == pytest.approx(losses, rel=1e-6) and its_norms == pytest.approx(norms, rel=1e-5), case
        assert other[case][:2] == (found, its_norms), case
        assert close(ours, weights) and equal(ours, other[case][2]), case


def test_the_example_of_the_page_has_the_results_of_one_rank(told):
    _, norms, weights = whole("gpt2", "documents", "sdpa", accumulated=1, clipping=1.0)
    for found, ours in told[4]:
        assert found == pytest.approx(norms, rel=1e-5) and close(ours, weights)


def test_what_would_be_computed_otherwise_is_refused_by_name(told):
    for messages in told[1]:
        for message, expected in zip(messages, [*(row[0] for row in REFUSED), *OF_LOADERS]):
            assert expected in message, messages
        assert len(messages) == len(REFUSED) + len(OF_LOADERS)


def test_an_evaluation_is_divided_unless_it_is_paused(told):
    batch = one_batch(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
    model = model_of("llama", "sdpa").eval()
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        text = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
        jumping = model(**skipping(), use_cache=False).logits
    for rank, (by_sdpa, paused, generated, jumped, by_flash) in enumerate(told[2]):
        own = logits.chunk(2, dim=1)[rank]
        assert torch.allclose(by_sdpa, own, atol=1e-6) and torch.allclose(by_flash, own, atol=1e-6)
        assert torch.allclose(jumped, jumping.chunk(2, dim=1)[rank], atol=1e-6)
        assert torch.equal(paused, logits) and torch.equal(generated, text)


def test_a_rank_that_is_killed_is_named_and_all_resume_with_the_same_bits(told, tmp_path):
    gone, killed = on_ranks(2, tmp_path / "first", committed, tmp_path, 11)
    assert str(killed) == "-9" and isinstance(gone, offloadd.RankGone) and "rank 1" in str(gone), gone
    resumed = on_ranks(2, tmp_path / "second", committed, tmp_path)
    for (before, losses, weights), (_, expected, same) in zip(resumed, told[3]):
        assert before in (1, 2) and losses == expected[ACCUMULATED * before :] and equal(weights, same)


def test_computing_in_tiles_has_the_gradients_of_one():
    from offloadd import _deepspeed_sequence as names

    torch.manual_seed(0)
    layer = transformers.models.llama.modeling_llama.LlamaMLP(transformers.LlamaConfig(**SIZES))
    plain, states = type(layer).forward, torch.randn(2, 7, 32, requires_grad=True)

    def gradients(result):
        result.square().sum().backward()
        found = [states.grad, *(param.grad for param in layer.parameters())]
        states.grad = None
        layer.zero_grad()
        return [one.clone() for one in found]

    tiled = lambda: names.TiledMLP.apply(plain, layer, states, 3, list(layer.parameters()))
    by_tiles = lambda: names.sequence_tiled_compute(layer, 7, 3, {"x": states}, {}, "x", output_reduction=None)
    sums = lambda: names.sequence_tiled_compute(lambda x: layer(x).square().sum(), 7, 3, {"x": states}, {}, "x", None, 0, "sum").sqrt()
    expected = gradients(layer(states))
    for found in (tiled, by_tiles, sums):
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(gradients(found()), expected)), found


def test_two_groups_of_two_ranks_share_the_batches(tmp_path):
    case = ("llama", "documents", "sdpa", "cpu")
    told = [of_rank[case] for of_rank in on_ranks(4, tmp_path / "store", divided, tmp_path, [case], 2)]
    losses, norms, weights = whole(*case[:3], checkpointed=True)
    # Of four batches each group has two.
    for rank, (found, its_norms, ours) in enumerate(told):
        own = [loss for number, loss in enumerate(losses) if number % 4 // 2 == rank // 2]
        assert found == pytest.approx(own, rel=1e-6) and its_norms == pytest.approx(norms, rel=1e-5), rank
        assert close(ours, weights) and equal(ours, told[0][2]), rank


def is_refused_below_deepspeeds_names(path, sp_group, engine):
    """What would be computed otherwise than by DeepSpeed, or than by one rank, says so."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    other = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    with pytest.raises(offloadd.NotSupported, match="its model was not passed to deepspeed.initialize"):
        other(**one_batch())
    with sequence_parallel.paused():
        other(**one_batch())
    loss = torch.ones((), requires_grad=True) * 2
    with pytest.raises(offloadd.NotSupported, match="all_reduce of a loss"):
        deepspeed.comm.all_reduce(loss, group=sp_group)
    deepspeed.comm.all_reduce(loss.detach(), group=sp_group)
    loader = UlyssesSPDataLoaderAdapter([one_batch()], torch.distributed.get_rank(), sp_group, 2, engine.device)
    with pytest.raises(offloadd.Error, match="a batch has no labels"):
        next(loader)


def tutorial(path, settings):
    """Losses and weights of a script that was written for DeepSpeed, as its tutorial has it. It has no number for a rank without counted tokens."""
    import deepspeed
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.runtime.utils import move_to_device
    from deepspeed.utils import groups

    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=True)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=str(path / "model"),
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=ROWS,
        seq_length=TOKENS,
        seq_length_is_variable=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    engine, *_ = deepspeed.initialize(config=settings, model=model, model_parameters=model.parameters(), mpu=mpu)
    sp_group, sp_size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    loader = torch.utils.data.DataLoader(
        batches("counted documents"), batch_size=None, sampler=range(mpu.get_sequence_parallel_rank(), ACCUMULATED * STEPS, sp_size)
    )
    loader = UlyssesSPDataLoaderAdapter(loader, sp_rank=groups._get_sequence_parallel_rank(), sp_group=sp_group, sp_world_size=sp_size, device=engine.device)
    is_refused_below_deepspeeds_names(path, sp_group, engine)
    # One that nothing trains is divided too, as attention is registered for all.
    reference, *_ = deepspeed.initialize(model=transformers.AutoModelForCausalLM.from_pretrained(path / "model"), config={"train_batch_size": 8})
    losses = []
    for batch in loader:
        batch = move_to_device(batch, engine.device)
        outputs, shift_labels = engine(**batch), batch["shift_labels"]
        if not losses:
            assert torch.equal(reference(**batch).logits, outputs.logits)
            reference.destroy()
        loss = engine.module.loss_function(logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=64)
        losses_per_rank = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
        good_tokens = (shift_labels != -100).view(-1).sum()
        good_tokens_per_rank = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
        loss = sum(losses_per_rank[rank] * good_tokens_per_rank[rank] for rank in range(sp_size)) / max(sum(good_tokens_per_rank), 1)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert (len(loader), engine.train_batch_size(), engine.dp_world_size) == (len(losses), ACCUMULATED * ROWS, 1)
    found = losses, engine.get_global_grad_norm(), state(engine.module)
    engine.destroy()
    return found


def rows():
    return [{name: value[row] for name, value in batch.items()} for batch in batches("plain") for row in range(ROWS)]


def trainer_of(path, **more):
    """Hugging Face's Trainer of the saved model, on sequences that count a part of their tokens, with an evaluation of whole sequences."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    args = transformers.TrainingArguments(
        str(path / "out"), per_device_train_batch_size=ROWS, per_device_eval_batch_size=1, max_steps=4, learning_rate=1e-2,
        adam_epsilon=1e-3, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", disable_tqdm=True, report_to=[], seed=5, **more,
    )  # fmt: skip
    return transformers.Trainer(model, args, train_dataset=rows(), eval_dataset=rows()[:4])


def log_of(trainer):
    return [(entry["step"], kind, entry[kind]) for entry in trainer.state.log_history for kind in ("loss", "grad_norm", "eval_loss") if kind in entry]


def with_sequences(path, ranks, stop_at):
    """Trains with Hugging Face's Trainer below the Accelerate configuration of DeepSpeed's sequences, from the last committed step on."""
    import accelerate

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == stop_at

    # torch.distributed is initialized already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sequences = accelerate.ParallelismConfig(sp_backend="deepspeed", sp_size=ranks)
    trainer = trainer_of(path, deepspeed={**config("nvme", path), **DEEPSPEED}, parallelism_config=sequences)
    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=True)
    log, weights = log_of(trainer), state(trainer.model)
    trainer.model_wrapped.run.close()
    return log, weights


def written_for_deepspeed(rank, ranks, path, settings):
    found = tutorial(path, settings)
    with_sequences(path, ranks, stop_at=3)
    return found


def resumed(rank, ranks, path):
    return with_sequences(path, ranks, stop_at=4)


def test_scripts_that_were_written_for_deepspeed_have_the_results_of_one_rank(tmp_path):
    model_of("llama", "sdpa").save_pretrained(tmp_path / "model")
    settings = {
        **config("cpu", tmp_path, run_dir=str(tmp_path / "run")),
        "train_batch_size": ACCUMULATED * ROWS,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}},
        "sequence_parallel_size": 2,
    }
    told = on_ranks(2, tmp_path / "store", written_for_deepspeed, tmp_path, settings, start=server("deepspeed").start)
    losses, norms, weights = whole("llama", "counted documents", "sdpa")
    for found, norm, ours in told:
        assert found == pytest.approx(losses, rel=1e-6) and norm == pytest.approx(norms[-1], rel=1e-5)
        assert close(ours, weights) and equal(ours, told[0][2])
    told = on_ranks(2, tmp_path / "again", resumed, tmp_path, start=server("deepspeed").start)
    trainer = trainer_of(tmp_path, use_cpu=True)
    trainer.train()
    expected = log_of(trainer)
    for log, by_trainer in told:
        assert [one[:2] for one in log] == [one[:2] for one in expected]
        assert [one[2] for one in log] == pytest.approx([one[2] for one in expected], rel=1e-5)
        assert close(by_trainer, state(trainer.model))
