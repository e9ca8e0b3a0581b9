"""`python -m offloadd generate` and `chat`: the answers of plain transformers, after an interrupt too."""

import io
import json
import os
import pathlib
import random

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: make test-tools")

import forks  # noqa: E402
import offloadd._served  # noqa: E402
from offloadd.__main__ import main  # noqa: E402
from test_runs import PROGRAM, needs_daemon  # noqa: E402
from toy import randomize  # noqa: E402

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
IMPORTS = ["transformers.models.llama.modeling_llama"]
WORDS = [f"w{number}" for number in range(60)]
TEMPLATE = "{% for one in messages %}[{{ one['role'] }}] {{ one['content'] }} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)


def made(into, kind=transformers.LlamaForCausalLM, template=TEMPLATE, **more):
    """Writes a model with random weights and a tokenizer of words."""
    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "[user]", "[assistant]", "[system]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(into)
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **more}, vocab_size=len(vocabulary), pad_token_id=0, bos_token_id=2, eos_token_id=3)
    randomize(kind(config)).save_pretrained(into)
    return into


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"))


def prompts(file, count=7):
    chance = random.Random(3)
    text = lambda: " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))
    rows = [{"id": number, "prompt": text()} if number % 3 else {"messages": [{"role": "user", "content": text()}]} for number in range(count)]
    # A separator of Unicode ends no line of JSON.
    rows[1]["note"] = "one\u2028two\x85three"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return rows


def plain_answers(model, rows, batch, **how):
    """What transformers answers, which computes the same batches."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    found = []
    for start in range(0, len(rows), batch):
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True) if "messages" in row else row["prompt"]
            for row in rows[start : start + batch]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        torch.manual_seed(how.get("seed", 0) * 1_000_003 + start)
        sampling = {"do_sample": False} if "seed" not in how else {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.95}
        out = plain.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, **sampling)
        found += [tokenizer.decode(row[inputs["input_ids"].shape[1] :], skip_special_tokens=True) for row in out]
    return found


@pytest.fixture(autouse=True)
def program(monkeypatch):
    """The daemon that was built, and no GPU."""
    plain = offloadd._served.settings_of
    monkeypatch.setattr(
        offloadd._served, "settings_of", lambda config: plain({**config, "offloadd": {**config["offloadd"], "program": PROGRAM, "compute_device": "cpu"}})
    )


@needs_daemon
def test_answers_are_those_of_transformers_and_an_interrupted_command_goes_on(tmp_path, model, monkeypatch, capfd):
    rows = prompts(tmp_path / "x.jsonl")
    command = ["generate", str(model), "--prompts", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "y.jsonl"), "--max-new-tokens", "6", "--batch", "2"]
    command += ["--nvme", str(tmp_path), "--temperature", "0.9", "--top-p", "0.95", "--seed", "5"]
    with monkeypatch.context() as patch:
        plain, calls = offloadd._served.ServedModel.generate, []

        def generate(*args, **more):
            calls.append(0)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return plain(*args, **more)

        patch.setattr(offloadd._served.ServedModel, "generate", generate)
        assert main(command) == 130
    assert not (tmp_path / "y.jsonl").exists() and "the same command goes on" in capfd.readouterr().err
    # As after a kill in the middle of a write.
    with open(tmp_path / "y.jsonl.part", "a") as file:
        file.write('{"id": 4, "prom')
    assert main([*command[:-1], "6"]) == 1 and "seed was 5 and is 6" in capfd.readouterr().err
    assert main(command) == 0
    said = capfd.readouterr().err
    assert "has 4 answers: goes on after them" in said and "has the weights that an earlier start wrote" in said
    assert "7 of 7 prompts; " in said and " tokens/s; bound " in said
    found = [json.loads(line) for line in open(tmp_path / "y.jsonl", encoding="utf-8")]
    assert found == [{**row, "completion": text} for row, text in zip(rows, plain_answers(model, rows, 2, seed=5))]
    assert len({row["completion"] for row in found}) > 1 and not (tmp_path / "y.jsonl.part").exists()
    assert main(command) == 1 and "y.jsonl exists: remove it" in capfd.readouterr().err


KINDS = {
    "its own embedding": (transformers.LlamaForCausalLM, {}),
    "a tied embedding": (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "another layout": (transformers.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 5, "n_head": 4}),
    # Its checkpoints have other names than its modules.
    "experts": (transformers.MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_of_a_model_with(tmp_path, kind):
    cls, more = KINDS[kind]
    model = made(tmp_path / "model", cls, **more)
    rows = prompts(tmp_path / "x.jsonl")
    assert main(["generate", str(model), "--prompts", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "y.jsonl"), "--max-new-tokens", "6"]) == 0
    found = [json.loads(line)["completion"] for line in open(tmp_path / "y.jsonl", encoding="utf-8")]
    assert found == plain_answers(model, rows, 16)


def test_what_cannot_be_answered_is_refused_before_anything_is_loaded(tmp_path, model, capfd):
    def said(name, text):
        (tmp_path / "x.jsonl").write_text(text)
        assert main(["generate", str(name), "--prompts", str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "y.jsonl")]) == 1
        return capfd.readouterr().err

    assert "x.jsonl: line 2 has neither" in said(model, '{"prompt": "w1"}\n{"text": "w1"}\n')
    assert "x.jsonl: line 1 is not valid JSON" in said(model, "w1\n")
    assert "x.jsonl has no prompts" in said(model, "\n")
    one = '{"prompt": "w1"}\n'
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "settings.toml").touch()
    assert f"`trainer export {tmp_path}/native --out {tmp_path}/native-model`" in said(tmp_path / "native", one)
    (tmp_path / "out" / "offloadd").mkdir(parents=True)
    (tmp_path / "out" / "offloadd" / "store.json").touch()
    assert 'trainer.save_model("out")' in said(tmp_path / "out", one)
    (tmp_path / "out" / "checkpoint-9").mkdir()
    (tmp_path / "out" / "checkpoint-10").mkdir()
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / "out" / name / "config.json").touch()
    assert "such as " + str(tmp_path / "out" / "checkpoint-10") in said(tmp_path / "out", one)
    (tmp_path / "empty").mkdir()
    assert "is no model: it has no config.json" in said(tmp_path / "empty", one)


def test_a_conversation_has_the_answers_of_transformers(tmp_path, model, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw3\n/new\nw3\n\n"))
    assert main(["chat", str(model), "--temperature", "0", "--max-new-tokens", "6", "--system", "w9"]) == 0
    out, said = capfd.readouterr()
    messages, answers = [{"role": "system", "content": "w9"}], []
    for text in ("w1 w2", "w3"):
        messages.append({"role": "user", "content": text})
        answers += plain_answers(model, [{"messages": messages}], 1)
        messages.append({"role": "assistant", "content": answers[-1]})
    answers += plain_answers(model, [{"messages": [messages[0], {"role": "user", "content": "w3"}]}], 1)
    assert out.split() == " ".join(answers).split() and answers[1] != answers[2]
    assert said.count("tokens/s; bound ") == 3


def test_a_model_without_a_chat_template_continues_lines(tmp_path, monkeypatch, capfd):
    model = made(tmp_path / "model", template=None)
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\n"))
    assert main(["chat", str(model), "--temperature", "0", "--max-new-tokens", "6"]) == 0
    out, said = capfd.readouterr()
    assert out.split() == plain_answers(model, [{"prompt": "w1 w2"}], 1)[0].split() and "has no chat template" in said


@needs_daemon
def test_the_example_of_a_teacher_that_is_killed_ends_as_it_does_unbroken(tmp_path, model):
    teacher = made(tmp_path / "teacher", hidden_size=64, intermediate_size=96)
    (tmp_path / "drive").mkdir()
    environment = {"PATH": f"{pathlib.Path(PROGRAM).parent}:{os.environ['PATH']}"}
    begin = lambda runs: forks.start(
        EXAMPLES / "distill.py", teacher, model, tmp_path / runs, tmp_path / "drive", "8", environment=environment, imports=IMPORTS
    )
    whole, killed = begin("whole"), begin("killed")
    for line in killed.stdout:
        if line.startswith("step 3:"):
            killed.kill()
            break
    assert killed.wait() == -9
    expected, errors = whole.communicate()
    assert expected.count("step ") == 8, errors
    found, said = begin("killed").communicate()
    assert "killed/teacher: the run trains nothing and has the weights that an earlier start wrote" in said
    assert 0 < len(found) < len(expected) and expected.endswith(found)


@needs_daemon
def test_the_example_that_writes_and_learns_has_the_texts_of_another_program_with_its_weights_and_resumes(tmp_path, model):
    (tmp_path / "drive").mkdir()
    environment = {"PATH": f"{pathlib.Path(PROGRAM).parent}:{os.environ['PATH']}"}
    begin = lambda run, *more: forks.start(
        EXAMPLES / "reinforce.py", model, tmp_path / run, tmp_path / "drive", "5", *more, environment=environment, imports=IMPORTS
    )
    whole, sampler, killed = begin("whole"), begin("sampler", "sampler"), begin("killed")
    for line in killed.stdout:
        if line.startswith("step 3:"):
            killed.kill()
            break
    assert killed.wait() == -9
    expected, errors = whole.communicate()
    assert expected.count("step ") == 5 and len(set(expected.split("rewards")[1:])) > 1, errors
    assert sampler.communicate()[0] == expected
    found, _ = begin("killed").communicate()
    assert 0 < len(found) < len(expected) and expected.endswith(found)
