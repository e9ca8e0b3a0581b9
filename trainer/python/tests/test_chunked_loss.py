"""Cross entropy without logits: losses and gradients of plain PyTorch, logits for those who read them, and never all of them otherwise."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offloadd
from offloadd._chunked_loss import Head, Logits
from test_runs import config, needs_daemon
from toy import Offloaded

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")

WORDS, CHUNK = 211, 8
SIZES = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3, vocab_size=WORDS)


def model_of(name):
    config = {
        "Llama": lambda: transformers.LlamaConfig(**SIZES),
        "Llama, tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **SIZES),
        "Gemma2": lambda: transformers.Gemma2Config(head_dim=16, final_logit_softcapping=5.0, **SIZES),
        "Granite": lambda: transformers.GraniteConfig(logits_scaling=4.0, **SIZES),
        "GPT2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=WORDS, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "Bert": lambda: transformers.BertConfig(is_decoder=True, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES),
        "T5": lambda: transformers.T5Config(
            d_model=32, d_ff=64, d_kv=16, num_layers=3, num_heads=2, vocab_size=WORDS, decoder_start_token_id=0, dropout_rate=0
        ),
    }[name]()
    classes = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel", "T5": "T5ForConditionalGeneration"}
    torch.manual_seed(0)
    return getattr(transformers, classes.get(name, f"{name.split(',')[0]}ForCausalLM"))(config).train()


class Largest(TorchDispatchMode):
    """The most rows of logits that an operation makes."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            # The head's weight and its gradient have 32 rows.
            if isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[-1] == WORDS and one.shape[0] != 32:
                self.rows = max(self.rows, one.numel() // WORDS)
        return result


@contextlib.contextmanager
def chunked(plain):
    """A prepared copy of a model, whose loss is computed in chunks."""
    ours = Offloaded(copy.deepcopy(plain))
    head = Head(ours.model, CHUNK)
    yield ours
    head.close()


def compare(plain, work, rows=CHUNK, rtol=1e-5):
    with chunked(plain) as ours:
        for _ in range(2):
            ids = torch.randint(WORDS, (3, 17))
            plain.zero_grad()
            expected = work(plain, ids)
            with Largest() as largest:
                found = work(ours.model, ids)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
            gradients = ours.take_gradients()
            for name, param in plain.named_parameters():
                if param.requires_grad:
                    assert (param.grad is None) == (gradients[name] is None), name
                    if param.grad is not None:
                        torch.testing.assert_close(gradients[name], param.grad, rtol=rtol, atol=rtol / 100, msg=name)
            assert largest.rows <= rows


def backward(loss):
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", ["Llama", "Llama, tied", "Gemma2", "Granite", "GPT2", "Bert", "T5"])
def test_losses_and_gradients_are_those_of_plain_pytorch(name):
    compare(model_of(name), lambda model, ids: backward(model(input_ids=ids, labels=ids).loss))


def with_padding(model, ids):
    labels = ids.masked_fill(ids % 3 == 0, -100)
    labels[0] = -100
    return backward(model(input_ids=ids, labels=labels).loss)


def all_ignored(model, ids):
    """Not a number, as without chunks, from the mean; nothing from a sum."""
    labels = torch.full_like(ids, -100)
    assert model(input_ids=ids, labels=labels).loss.isnan()
    return backward(model(input_ids=ids, labels=labels, num_items_in_batch=7).loss)


def of_a_trainer(model, ids):
    """Two micro-batches of which each knows the tokens of both."""
    count = torch.tensor(float(2 * 16 + 16))
    return sum(backward(model(input_ids=part, labels=part, num_items_in_batch=count).loss) for part in (ids[:2], ids[2:]))


def shifted_before(model, ids):
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return backward(model(input_ids=ids, labels=ids, shift_labels=shifted).loss)


def mixed_precision(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return backward(model(input_ids=ids, labels=ids).loss)


def checkpointed(model, ids):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    loss = backward(model(input_ids=ids, labels=ids).loss)
    model.gradient_checkpointing_disable()
    return loss


@pytest.mark.parametrize("work", [with_padding, all_ignored, of_a_trainer, shifted_before, mixed_precision, checkpointed], ids=lambda work: work.__name__)
def test_ways_to_count_tokens_are_those_of_plain_pytorch(work):
    # In 16 bits, gradients of the head are rounded in each chunk.
    compare(model_of("Llama"), work, rtol=3e-2 if work is mixed_precision else 1e-5)


def reads(model, ids):
    """Logits beside the loss, for a metric."""
    out = model(input_ids=ids, labels=ids)
    with torch.no_grad():
        found = [out.logits.argmax(-1), out.logits[:, -1].float(), out.logits.max(), torch.cat([out.logits, out.logits], 1).sum()]
    values = out.logits.detach()
    found += [values.softmax(-1), torch.from_numpy(values.numpy()), out.logits.shape[-1] + torch.zeros(1), copy.deepcopy(values)]
    found.append(backward(out.loss))
    return found


def reads_after_autocast(model, ids):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=ids, labels=ids)
    found = out.logits.detach()
    assert found.dtype is torch.bfloat16
    return [found, backward(out.loss)]


def another_loss(model, ids):
    """A second loss of the same logits, whose gradient goes the same way."""
    out = model(input_ids=ids, labels=ids)
    return backward(out.loss + 0.1 * out.logits.float().logsumexp(-1).square().mean())


def smoothed(model, ids):
    """A loss of the script's own."""
    out = model(input_ids=ids, labels=ids)
    return backward(torch.nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1), label_smoothing=0.1))


def weighted(model, ids):
    """A loss of a kind that is not computed in chunks."""
    out = model(input_ids=ids, labels=ids)
    weight = torch.linspace(0.5, 1.5, WORDS)
    return backward(torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), ids, weight=weight))


def without_labels(model, ids):
    logits = model(input_ids=ids).logits
    assert type(logits) is torch.Tensor
    return backward(torch.nn.functional.cross_entropy(logits.view(-1, WORDS), ids.view(-1)))


def evaluated(model, ids):
    model.eval()
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
    assert type(out.logits) is torch.Tensor
    model.train()
    return [out.loss, out.logits, backward(model(input_ids=ids, labels=ids).loss)]


@pytest.mark.parametrize("work", [reads, reads_after_autocast, another_loss, smoothed, weighted, without_labels, evaluated], ids=lambda work: work.__name__)
def test_a_script_that_reads_logits_gets_them(work):
    compare(model_of("Llama"), work, rows=CHUNK if work is smoothed else 102, rtol=3e-2 if work is reads_after_autocast else 1e-5)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["q_proj"]])
def test_adapters_of_the_head_train_as_in_plain_pytorch(targets):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    model = peft.get_peft_model(model_of("Llama"), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    compare(model, lambda model, ids: backward(model(input_ids=ids, labels=ids).loss))


def test_logits_that_would_be_wrong_are_refused():
    plain = model_of("Llama")
    with chunked(plain) as ours:
        ids = torch.randint(WORDS, (2, 9))
        out = ours.model(input_ids=ids, labels=ids)
        assert isinstance(out.logits, Logits) and "computed when they are read" in repr(out.logits)
        in_place = [lambda: out.logits.__setitem__(0, 0.0), lambda: out.logits.div_(2)]
        for read in (lambda: out.logits.retain_grad(), lambda: out.logits.register_hook(print), lambda: out.logits.data, *in_place):
            with pytest.raises(offloadd.NotSupported, match="leave offloadd.loss_chunk_tokens out"):
                read()
        out = ours.model(input_ids=ids, labels=ids)
        out.loss.backward()
        torch.testing.assert_close(out.logits.detach(), plain(input_ids=ids).logits.detach(), rtol=1e-6, atol=1e-6)
        out = ours.model(input_ids=ids, labels=ids)
        out.loss.backward()
        ours.take_gradients()
        with pytest.raises(offloadd.Error, match="after a step has changed the model's head"):
            out.logits.sum()


@needs_daemon
def test_a_run_computes_its_loss_in_chunks_and_gives_the_head_back(tmp_path):
    def train(name, **own):
        model = model_of("Llama, tied")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        with offloadd.prepare(model, optimizer, config("cpu", tmp_path, **own), run_dir=tmp_path / name):
            losses = []
            for _ in range(3):
                ids = torch.randint(WORDS, (2, 17), generator=generator)
                with Largest() as largest:
                    out = model(input_ids=ids, labels=ids)
                    out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(out.loss.item())
            # The embedding is the head: its gradient has its shape.
            assert (largest.rows <= CHUNK) == bool(own)
        assert "forward" not in vars(model.lm_head) and type(model(input_ids=ids, labels=ids).logits) is torch.Tensor
        return losses

    assert train("chunks", loss_chunk_tokens=CHUNK) == pytest.approx(train("whole"), rel=1e-5)


def test_a_model_without_a_head_is_refused_before_anything_is_made(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(offloadd.NotSupported, match="Sequential has no linear layer that its get_output_embeddings"):
        offloadd.prepare(model, optimizer, config("cpu", tmp_path, loss_chunk_tokens=8), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(offloadd.Error, match="offloadd.loss_chunk_tokens"):
        offloadd.prepare(model, optimizer, config("cpu", tmp_path, loss_chunk_tokens=0), run_dir=tmp_path / "run")
