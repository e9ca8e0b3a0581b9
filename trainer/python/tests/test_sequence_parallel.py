"""Sequences whose parts lie on several ranks: losses, norms and weights are those of one rank with the whole."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
transformers.logging.set_verbosity_error()

import offloadd  # noqa: E402
from offloadd import sequence_parallel  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_hf import DEEPSPEED, server  # noqa: E402
from test_ranks import close, equal, state  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402

pytestmark = needs_daemon

TOKENS, ROWS, STEPS, ACCUMULATED = 16, 2, 3, 4
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
    torch.manual_seed(0)
    model = MODELS[name](attn_implementation=attention)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def batches(kind):
    """Batches of whole sequences, some tokens of which do not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(ACCUMULATED * STEPS):
        ids = torch.randint(1, 64, (ROWS, TOKENS), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(TOKENS).expand(ROWS, -1)}
        # Prompts of different lengths: no rank has as many tokens that count as another.
        batch["labels"][:, : int(torch.randint(1, 7, (), generator=generator))] = -100
        if kind == "documents":
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]) for cut in (5, 11)])
        if kind == "padding":
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, 10:] = 0
            batch["labels"][0, 10:] = -100
        found.append(batch)
    return found


def loss_of(model, batch):
    """The mean over the tokens of a part that count."""
    logits = model(**{name: value for name, value in batch.items() if name != "shift_labels"}).logits
    return model.loss_function(logits=logits, labels=None, shift_labels=batch["shift_labels"], vocab_size=64)


def steps(model, optimizer, parts, mean, accumulated):
    losses, norms = [], []
    for number, batch in enumerate(parts, 1):
        loss = mean(loss_of(model, batch), batch["shift_labels"])
        (loss / accumulated).backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def adamw(model):
    # With a small eps, AdamW makes whole steps of gradients that are rounding only.
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)


def whole(name, kind, attention, checkpointed=False):
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
    losses, norms = steps(model, adamw(model), shifted, lambda loss, labels: loss, ACCUMULATED)
    return losses, norms, state(model)


def divided(rank, ranks, path, cases, size):
    """The same with parts of sequences, for each case."""
    found = {}
    for name, kind, attention, device in cases:
        model = model_of(name, attention)
        if device == "cpu":
            model.gradient_checkpointing_enable()
        optimizer = adamw(model)
        directory = path / f"{name}-{kind}-{attention}-{device}"
        with offloadd.prepare(model, optimizer, {**config(device, path), "sequence_parallel_size": size}, run_dir=directory):
            # Each rank's loader has every rank-th batch, as a DistributedSampler's.
            loader = sequence_parallel.Loader(batches(kind)[rank::ranks])
            losses, norms = steps(model, optimizer, loader, sequence_parallel.mean, ACCUMULATED * size // ranks)
            found[name, kind, attention, device] = losses, norms, state(model)
    return found


CASES = [
    ("llama", "plain", "sdpa", "none"),
    ("llama", "documents", "eager", "cpu"),
    ("qwen3", "documents", "sdpa", "cpu"),
    ("qwen3", "padding", "eager", "none"),
    ("one_key", "padding", "sdpa", "none"),
    ("gpt2", "documents", "sdpa", "nvme"),
]


def test_two_ranks_with_parts_of_a_sequence_are_one_with_the_whole(tmp_path):
    one, other = on_ranks(2, tmp_path / "store", divided, tmp_path, CASES, 2)
    for case in CASES:
        losses, norms, weights = whole(*case[:3], checkpointed=case[3] == "cpu")
        found, its_norms, ours = one[case]
        assert found == pytest.approx(losses, rel=1e-6) and its_norms == pytest.approx(norms, rel=1e-5), case
        assert other[case][:2] == (found, its_norms), case
        assert close(ours, weights) and equal(ours, other[case][2]), case


def test_two_groups_of_two_ranks_share_the_batches(tmp_path):
    case = ("llama", "documents", "sdpa", "cpu")
    told = [of_rank[case] for of_rank in on_ranks(4, tmp_path / "store", divided, tmp_path, [case], 2)]
    losses, norms, weights = whole(*case[:3], checkpointed=True)
    # Of four batches each group has two.
    for rank, (found, its_norms, ours) in enumerate(told):
        own = [loss for number, loss in enumerate(losses) if number % 4 // 2 == rank // 2]
        assert found == pytest.approx(own, rel=1e-6) and its_norms == pytest.approx(norms, rel=1e-5), rank
        assert close(ours, weights) and equal(ours, told[0][2]), rank


def tutorial(path, settings):
    """Losses and weights of a script that was written for DeepSpeed, as its tutorial has it."""
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
    loader = torch.utils.data.DataLoader(batches("documents"), batch_size=None, sampler=range(mpu.get_sequence_parallel_rank(), 12, sp_size))
    loader = UlyssesSPDataLoaderAdapter(loader, sp_rank=groups._get_sequence_parallel_rank(), sp_group=sp_group, sp_world_size=sp_size, device=engine.device)
    losses = []
    for batch in loader:
        batch = move_to_device(batch, engine.device)
        outputs, shift_labels = engine(**batch), batch["shift_labels"]
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


def written_for_deepspeed(rank, ranks, path, settings):
    import accelerate

    # torch.distributed is initialized already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    found = tutorial(path, settings)
    sequences = accelerate.ParallelismConfig(sp_backend="deepspeed", sp_size=ranks)
    trainer = trainer_of(path, deepspeed={**config("cpu", path), **DEEPSPEED}, parallelism_config=sequences)
    trainer.train()
    log, weights = log_of(trainer), state(trainer.model)
    trainer.model_wrapped.run.close()
    return (*found, log, weights)


def test_scripts_that_were_written_for_deepspeed_have_the_results_of_one_rank(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
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
    losses, norms, weights = whole("llama", "documents", "sdpa")
    trainer = trainer_of(tmp_path, use_cpu=True)
    trainer.train()
    for found, norm, ours, log, by_trainer in told:
        assert found == pytest.approx(losses, rel=1e-6) and norm == pytest.approx(norms[-1], rel=1e-5)
        assert close(ours, weights) and equal(ours, told[0][2])
        expected = log_of(trainer)
        assert [one[:2] for one in log] == [one[:2] for one in expected]
        assert [one[2] for one in log] == pytest.approx([one[2] for one in expected], rel=1e-4)
        assert close(by_trainer, state(trainer.model))
