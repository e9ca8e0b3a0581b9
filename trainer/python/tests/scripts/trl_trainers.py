"""Trains a tiny model with one of TRL's trainers and its defaults: `trl_trainers.py NAME MODELS [--lora] [--attach JSON] --output_dir DIR [ARGUMENT ...]`.

The models are written to the directory MODELS unless it is there. The arguments are those of the trainer's configuration, such as --deepspeed.
With offloadd it says at its end how many units were brought while text was generated.
"""

import argparse
import importlib
import pathlib
import random

import datasets
import tokenizers
import torch
import transformers
import trl

STEPS = 4
COMMON = "--per_device_train_batch_size 8 --learning_rate 1e-3 --adam_epsilon 1e-3 --logging_steps 1 --save_steps 2 --disable_tqdm true"
COMMON += f" --max_steps {STEPS} --report_to none --seed 5 --bf16 false"
# Trainers, and the option for the length of what they generate.
TRAINERS = {
    "sft": None,
    "dpo": None,
    "reward": None,
    "kto": None,
    "grpo": "--max_completion_length",
    "rloo": "--max_completion_length",
    "online_dpo": "--max_new_tokens",
    "gkd": "--max_new_tokens",
}
EXPERIMENTAL = ("online_dpo", "gkd")
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
WORDS = [f"w{number}" for number in range(40)]


def make_models(into):
    """Writes a causal model, another one, and one that gives rewards, each with its tokenizer."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, vocab_size=len(vocabulary))
    ids = dict(pad_token_id=0, bos_token_id=2, eos_token_id=3)
    config = transformers.LlamaConfig(**sizes, **ids, max_position_embeddings=64, num_labels=1)
    torch.manual_seed(0)
    kinds = {"causal": transformers.LlamaForCausalLM, "other": transformers.LlamaForCausalLM, "reward": transformers.LlamaForSequenceClassification}
    for name, kind in kinds.items():
        kind(config).save_pretrained(into / name)
        tokenizer.save_pretrained(into / name)


def rows_of(name):
    chance = random.Random(0)
    text = lambda: " ".join(chance.choices(WORDS, k=chance.randint(3, 9)))
    say = lambda role: {"role": role, "content": text()}
    columns = {
        "sft": lambda: {"text": text()},
        "reward": lambda: {"chosen": text(), "rejected": text()},
        "dpo": lambda: {"prompt": text(), "chosen": " " + text(), "rejected": " " + text()},
        "kto": lambda: {"prompt": text(), "completion": " " + text(), "label": chance.random() < 0.5},
        "gkd": lambda: {"messages": [say("user"), say("assistant")]},
    }
    row = columns.get(name, lambda: {"prompt": text()})
    return datasets.Dataset.from_list([row() for _ in range(8 * STEPS)])


def distinct(completions, **columns):
    """A reward that differs between completions of a model with random weights."""
    return [float(len(set(text.split()))) for text in completions]


def trainer_of(name, models, lora, arguments):
    home = importlib.import_module(f"trl.experimental.{name}") if name in EXPERIMENTAL else trl
    named = {one.lower(): one for one in dir(home)}
    config, kind = (getattr(home, named[name.replace("_", "") + last]) for last in ("config", "trainer"))
    lengths = [TRAINERS[name], "8"] if TRAINERS[name] else []
    args = transformers.HfArgumentParser(config).parse_args_into_dataclasses([*COMMON.split(), *lengths, *arguments])[0]
    load = lambda which: transformers.AutoModelForCausalLM.from_pretrained(models / which, dtype=torch.float32)
    given = {}
    if name == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(models / "reward", dtype=torch.float32)
    else:
        model = load("causal")
    if name in ("grpo", "rloo", "online_dpo"):
        given["reward_funcs"] = distinct
    if name == "online_dpo":
        # It would copy the model, which TRL refuses with ZeRO stage 3.
        given["ref_model"] = load("causal")
    if name == "gkd":
        given["teacher_model"] = load("other")
    if lora:
        import peft

        given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "causal")
    return kind(model=model, args=args, train_dataset=rows_of(name), processing_class=tokenizer, **given)


def watch_generation():
    """Counts, in its result, units that are brought while text is generated."""
    from offloadd._memory import HostMemory

    counts, generate, expect = [0, 0], transformers.GenerationMixin.generate, HostMemory.expect

    def counted(*args, **kwargs):
        counts[0] += 1
        try:
            return generate(*args, **kwargs)
        finally:
            counts[0] -= 1

    def expected(self, unit):
        counts[1] += counts[0]
        expect(self, unit)

    transformers.GenerationMixin.generate, HostMemory.expect = counted, expected
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--attach")
    ours, arguments = parser.parse_known_args()
    if not ours.models.exists():
        make_models(ours.models)
    counts = watch_generation() if ours.attach or "--deepspeed" in arguments else None
    trainer = trainer_of(ours.name, ours.models, ours.lora, arguments)
    if ours.attach:
        import offloadd.hf

        offloadd.hf.attach(trainer, ours.attach)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)
    if counts:
        print(f"{counts[1]} units brought while text was generated", flush=True)
