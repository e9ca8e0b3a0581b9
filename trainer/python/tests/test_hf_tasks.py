"""Scripts as Hugging Face's run_glue, run_mlm, run_clm and run_summarization: final weights are those of the same script without offload."""

import random

import pytest
import torch

from test_runs import needs_daemon

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: make test-tools")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
pytest.importorskip("peft", reason="peft is not installed: make test-tools")
from test_accelerate import EPS, everywhere, weights  # noqa: E402

import offloadd.hf  # noqa: E402

T = transformers
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(60)]
SIZES = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, vocab_size=len(SPECIAL) + len(WORDS))


def tokenizer_of():
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], SPECIAL))
    return T.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", bos_token="[CLS]", **names)


def texts(count, seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(count)]


def spread(model):
    """The same weights each time, away from their usual zeros and ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.05)
    return model


def glue(tokenizer):
    """Classifies sentences of several lengths, and evaluates the accuracy after each epoch."""
    model = T.BertForSequenceClassification(T.BertConfig(**SIZES, num_labels=3))

    def dataset(count, seed):
        return [{**tokenizer(text), "labels": len(text) % 3} for text in texts(count, seed)]

    accuracy = lambda prediction: {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
    return model, T.Trainer, dataset, dict(data_collator=T.DataCollatorWithPadding(tokenizer), compute_metrics=accuracy), {}


def mlm(tokenizer):
    """Predicts words that the collator masks by random numbers."""
    model = T.RobertaForMaskedLM(T.RobertaConfig(**SIZES, max_position_embeddings=64, pad_token_id=0))

    def dataset(count, seed):
        return [tokenizer(text) for text in texts(count, seed)]

    return model, T.Trainer, dataset, dict(data_collator=T.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)), {}


def clm(tokenizer):
    """Predicts the next word in blocks of one long text."""
    model = T.GPT2LMHeadModel(T.GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=4, n_head=2, n_positions=16))
    model.gradient_checkpointing_enable()

    def dataset(count, seed):
        ids = [one for text in texts(3 * count, seed) for one in tokenizer(text)["input_ids"]]
        return [{"input_ids": ids[at : at + 16], "labels": ids[at : at + 16]} for at in range(0, 16 * count, 16)]

    return model, T.Trainer, dataset, dict(data_collator=T.default_data_collator), {}


def summarization(tokenizer):
    """Writes each second word; the evaluation generates."""
    sizes = dict(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=3)
    model = T.T5ForConditionalGeneration(T.T5Config(vocab_size=SIZES["vocab_size"], **sizes))

    def dataset(count, seed):
        return [{**tokenizer(text), "labels": tokenizer(" ".join(text.split()[::2]))["input_ids"]} for text in texts(count, seed)]

    def score(prediction):
        return {"tokens": float(prediction.predictions.sum())}

    given = dict(data_collator=T.DataCollatorForSeq2Seq(tokenizer, model=model), compute_metrics=score)
    return model, T.Seq2SeqTrainer, dataset, given, dict(predict_with_generate=True, generation_max_length=8)


@needs_daemon
@pytest.mark.parametrize("task", [glue, mlm, clm, summarization], ids=lambda task: task.__name__)
def test_a_task_of_hugging_faces_ends_with_the_same_weights(tmp_path, task):
    evaluations = []

    def train(settings, run_dir):
        T.set_seed(3)
        model, trainer_class, dataset, given, more = task(tokenizer_of())
        arguments = T.Seq2SeqTrainingArguments if trainer_class is T.Seq2SeqTrainer else T.TrainingArguments
        args = arguments(
            str(tmp_path / f"out-{run_dir and run_dir.name}"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_train_epochs=2, learning_rate=1e-3, adam_epsilon=EPS, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine", seed=5,
            eval_strategy="epoch", save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, report_to=[], **more,
        )  # fmt: skip
        trainer = trainer_class(spread(model), args, train_dataset=dataset(32, 1), eval_dataset=dataset(8, 2), **given)
        run = offloadd.hf.attach(trainer, settings, run_dir=run_dir) if settings is not None else None
        try:
            trainer.train()
            figures = ("eval_loss", "eval_accuracy", "eval_tokens")
            evaluations.append([log[key] for log in trainer.state.log_history for key in figures if key in log])
            assert run is None or run.steps_done == trainer.state.global_step == 8
            return weights(model)
        finally:
            if run is not None:
                run.close()

    everywhere(train, tmp_path)
    plain, *ours = evaluations
    assert len(plain) >= 2 and ours[0] == pytest.approx(plain, rel=1e-6)
    assert ours[1:] == [ours[0]] * 2
