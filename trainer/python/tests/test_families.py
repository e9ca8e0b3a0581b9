"""Losses and gradients of transformers' model families have plain PyTorch's bits."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
T = transformers
T.logging.set_verbosity_error()

from cases import ALL_CASES  # noqa: E402
from toy import Offloaded, randomize, same_gradients  # noqa: E402

VOCAB = 211
SIZES = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, vocab_size=VOCAB)


def tokens():
    ids = torch.randint(4, VOCAB, (2, 17))
    return dict(input_ids=ids, labels=ids.clone())


def classes():
    return dict(input_ids=torch.randint(4, VOCAB, (2, 17)), labels=torch.tensor([0, 1]))


def image():
    return dict(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1]))


def sound():
    return dict(input_features=torch.randn(2, 8, 100), labels=torch.randint(4, VOCAB, (2, 17)))


def encoder_decoder(**more):
    return dict(
        vocab_size=VOCAB, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, **more,
    )  # fmt: skip


FAMILIES = {
    "bert": (T.BertForMaskedLM, lambda: T.BertConfig(**SIZES), tokens),
    "roberta": (T.RobertaForSequenceClassification, lambda: T.RobertaConfig(**SIZES, max_position_embeddings=64), classes),
    "distilbert": (T.DistilBertForSequenceClassification, lambda: T.DistilBertConfig(dim=64, n_layers=3, n_heads=4, hidden_dim=96, vocab_size=VOCAB), classes),
    "deberta-v2": (
        T.DebertaV2ForSequenceClassification,
        lambda: T.DebertaV2Config(
            **SIZES, relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"], max_position_embeddings=64,
            norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, max_relative_positions=-1,
        ),
        classes,
    ),
    "bart": (T.BartForConditionalGeneration, lambda: T.BartConfig(**encoder_decoder(max_position_embeddings=64)), tokens),
    "t5": (
        T.T5ForConditionalGeneration,
        lambda: T.T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0),
        tokens,
    ),
    "gpt2": (T.GPT2LMHeadModel, lambda: T.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64), tokens),
    "llama": (T.LlamaForCausalLM, lambda: T.LlamaConfig(**SIZES, num_key_value_heads=2), tokens),
    "qwen3-moe": (
        T.Qwen3MoeForCausalLM,
        lambda: T.Qwen3MoeConfig(**SIZES, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
        tokens,
    ),
    "mixtral": (T.MixtralForCausalLM, lambda: T.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4), tokens),
    "vit": (
        T.ViTForImageClassification,
        lambda: T.ViTConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8, num_labels=4
        ),
        image,
    ),
    "albert": (
        T.AlbertForMaskedLM,
        lambda: T.AlbertConfig(vocab_size=VOCAB, embedding_size=32, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96),
        tokens,
    ),
    "whisper": (
        T.WhisperForConditionalGeneration,
        lambda: T.WhisperConfig(
            **encoder_decoder(
                max_source_positions=50, max_target_positions=64, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        sound,
    ),
}  # fmt: skip

# Plain PyTorch cannot run them: ALBERT has no checkpointing; relative embeddings that are normed once are in several graphs.
CANNOT = {("albert", "reentrant"), ("albert", "not reentrant"), ("deberta-v2", "reentrant")}


def make(name, checkpointing):
    model_class, config, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = randomize(model_class(config()).train())
    if checkpointing:
        reentrant = checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
        if reentrant and name != "vit":
            model.enable_input_require_grads()
    return model


# Those that a push trains with two micro-batches: a tied head, an encoder and a decoder, experts that not every batch uses.
ACCUMULATED = ("gpt2", "t5", "qwen3-moe")


@pytest.mark.parametrize("name, micro_batches", [(name, count) for name in FAMILIES for count in (1, 2) if count == 1 or ALL_CASES or name in ACCUMULATED])
@pytest.mark.parametrize("checkpointing", [None, "not reentrant", "reentrant"])
def test_gradients_have_plain_pytorchs_bits(name, checkpointing, micro_batches):
    if (name, checkpointing) in CANNOT:
        with pytest.raises((ValueError, RuntimeError)):
            model = make(name, checkpointing)
            model(**FAMILIES[name][2]()).loss.backward()
        return
    plain, ours = make(name, checkpointing), make(name, checkpointing)
    offloaded = Offloaded(ours)
    assert len(offloaded.engine.gathering.units) > 2 or name == "albert", "nothing is moved in parts"
    torch.manual_seed(1)
    for step in range(3):
        plain.zero_grad()
        for number in range(micro_batches):
            batch = FAMILIES[name][2]()
            torch.manual_seed(10 * step + number)
            expected = plain(**batch).loss
            expected.backward()
            torch.manual_seed(10 * step + number)
            loss = ours(**batch).loss
            assert torch.equal(loss, expected)
            loss.backward()
            assert not offloaded.live(), "a unit stays after backward"
        assert not same_gradients(plain, offloaded.take_gradients())
    # The first pass is announced one by one, later ones at once.
    assert offloaded.engine.gathering.order.deviations == 0
