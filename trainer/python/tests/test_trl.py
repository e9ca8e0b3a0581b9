"""trl's own scripts, unmodified, and a trainer that generates: the losses and weights they have without this library, after a kill too."""

import json
import pathlib
import random
import socket
import time
import zipfile

import pytest
import torch

trl = pytest.importorskip("trl", reason="trl is not installed: make test-tools")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: make test-tools")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: make test-tools")

from test_hf import DEEPSPEED, server  # noqa: E402
from test_runs import HERE, config, lines_of, needs_daemon  # noqa: E402

SCRIPTS = pathlib.Path(trl.__file__).parent / "scripts"
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
WORDS = [f"w{number}" for number in range(40)]
COMMON = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 1 --learning_rate 1e-3 --adam_epsilon 1e-3 --logging_steps 1 "
COMMON += "--save_steps 2 --disable_tqdm true --report_to none --seed 5 --bf16 false"
STEPS = 6


def make_model_and_data(into):
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    tokenizer.save_pretrained(into / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, vocab_size=len(vocabulary))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=64, pad_token_id=0)).save_pretrained(into / "model")
    chance = random.Random(0)
    text = lambda: " ".join(chance.choices(WORDS, k=chance.randint(4, 9)))
    for name, columns in (("sft", ["text"]), ("dpo", ["prompt", "chosen", "rejected"])):
        (into / name).mkdir()
        rows = [json.dumps({column: " " + text() for column in columns}) for _ in range(8 * STEPS)]
        (into / name / "train.json").write_text("\n".join(rows))


def losses(out, steps=STEPS, names=("loss",)):
    history = json.loads((out / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    return {(entry["step"], name): entry[name] for entry in history if "loss" in entry for name in names if name in entry}


def start(out, command, *more, environment=()):
    imports = ["datasets", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "transformers.models.llama.modeling_llama"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out.parent / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    return server("deepspeed").start(*command, "--output_dir", out, *more, environment={**offline, **dict(environment)}, imports=imports)


def start_ranks(count, out, command, *more):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of = lambda rank: {name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
    return [start(out, command, *more, environment=of(rank) if count > 1 else ()) for rank in range(count)]


def is_whole(checkpoint, ranks):
    """Whether each rank has written all of its part."""
    state = checkpoint / "trainer_state.json"
    randoms = [checkpoint / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth") for rank in range(ranks)]
    return state.exists() and state.read_text().endswith("}\n") and all(map(zipfile.is_zipfile, randoms))


def plain_and_killed(tmp_path, command, ranks=1, **own):
    """Runs a script in `plain`, and in `ours` with a kill after its first checkpoint and again from it. Returns the first rank's lines of that."""
    (tmp_path / "ds.json").write_text(json.dumps({**config("nvme", tmp_path, **own), **DEEPSPEED}))
    for script in start_ranks(ranks, tmp_path / "plain", command, "--use_cpu"):
        lines_of(script)
    deepspeed = ["--deepspeed", tmp_path / "ds.json"]
    killed, first = start_ranks(ranks, tmp_path / "ours", command, *deepspeed), tmp_path / "ours" / "checkpoint-2"
    while not killed[0].has_ended() and not is_whole(first, ranks):
        time.sleep(0.005)
    for script in killed:
        script.kill()
    assert killed[0].wait() == -9, killed[0].communicate()
    again = start_ranks(ranks, tmp_path / "ours", command, *deepspeed, "--resume_from_checkpoint", first)
    return [lines_of(script) for script in again][0]


@needs_daemon
@pytest.mark.parametrize("name, lora", [("sft", False), ("dpo", True)])
def test_a_script_that_is_killed_and_resumed_has_the_losses_and_weights_of_plain_pytorch(tmp_path, name, lora):
    make_model_and_data(tmp_path)
    # The reference is the model without its adapters, before anything is trained.
    adapters = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj --precompute_ref_log_probs true".split() if lora else []
    data = ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / name]
    # SFT multiplies with the head's weight itself.
    chunks = {"loss_chunks": 3} if name == "sft" else {}
    plain_and_killed(tmp_path, [SCRIPTS / f"{name}.py", *COMMON.split(), *adapters, *data], **chunks)

    expected = losses(tmp_path / "plain")
    assert len(expected) == STEPS and losses(tmp_path / "ours") == pytest.approx(expected, rel=1e-6)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    weights, ours = (safetensors.load_file(tmp_path / out / file) for out in ("plain", "ours"))
    assert ours.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)
    if not lora:
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in ours.items())


def said_and_losses(tmp_path, name, *more):
    """What a trainer with its defaults says, and its losses, with the model and those it does not train in tiles, and the losses without."""
    (tmp_path / "ds.json").write_text(json.dumps({**config("nvme", tmp_path), **DEEPSPEED}))
    command = [HERE / "scripts" / "trl_trainers.py", name, tmp_path / "models"]
    lines_of(start(tmp_path / "plain", command, *more, "--use_cpu"))
    script = start(tmp_path / "ours", command, *more, "--deepspeed", tmp_path / "ds.json")
    out, errors = script.communicate()
    assert script.returncode == 0, errors
    return errors, losses(tmp_path / "ours", 4), losses(tmp_path / "plain", 4)


@needs_daemon
@pytest.mark.parametrize(
    "name, more",
    [
        ("dpo", ["--sync_ref_model", "true", "--ref_model_sync_steps", "2"]),
        ("dpo", ["--precompute_ref_log_probs", "true"]),
        ("rloo", ["--num_iterations", "2"]),
        ("gkd", []),
    ],
    ids=["reference that follows", "reference computed before", "reference of samples", "teacher"],
)
def test_what_a_trainer_does_not_train_lies_in_tiles_beside_what_it_trains(tmp_path, name, more):
    said, found, expected = said_and_losses(tmp_path, name, *more)
    assert len(expected) == 4 and found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # One that follows is written anew in steps 2 and 4.
    assert said.count(f"{tmp_path}/ours/offloadd-frozen: the run trains nothing and writes the weights") == (3 if "--sync_ref_model" in more else 1)
    assert f"{tmp_path}/ours/offloadd: the run begins" in said
    assert len(list(tmp_path.glob("*.tiles"))) == 2


# What a trainer logs at each step, if it does.
LOGGED = ("loss", "grad_norm", "reward", "rewards/chosen", "rewards/rejected", "kl", "completions/mean_length", "num_tokens")


def same_as_plain(tmp_path):
    expected = losses(tmp_path / "plain", 4, LOGGED)
    assert {step for step, _ in expected} == {1, 2, 3, 4} and losses(tmp_path / "ours", 4, LOGGED) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    return {name for _, name in expected}


@needs_daemon
def test_ranks_that_generate_and_are_killed_have_the_completions_and_losses_of_plain_pytorch(tmp_path):
    lines = plain_and_killed(tmp_path, [HERE / "scripts" / "trl_trainers.py", "grpo", tmp_path / "models", "--num_iterations", "2"], ranks=2)
    assert {"reward", "completions/mean_length"} <= same_as_plain(tmp_path)
    assert lines[-1] == "0 units brought while text was generated"


@needs_daemon
@pytest.mark.parametrize(
    "name, way, more",
    [("rloo", "--attach", ["--lora", "--num_iterations", "2"]), ("kto", "--attach", []), ("kto", "--deepspeed", ["--lora"])],
)
def test_a_trainer_has_the_rewards_and_losses_of_plain_pytorch(tmp_path, name, way, more):
    (tmp_path / "ds.json").write_text(json.dumps({**config("nvme", tmp_path), **DEEPSPEED}))
    command = [HERE / "scripts" / "trl_trainers.py", name, tmp_path / "models", *more]
    lines_of(start(tmp_path / "plain", command, "--use_cpu"))
    lines = lines_of(start(tmp_path / "ours", command, way, tmp_path / "ds.json", *(["--use_cpu"] if way == "--attach" else [])))
    assert {"reward", "rewards/chosen"} & same_as_plain(tmp_path)
    assert lines[-1] == "0 units brought while text was generated"
