"""Hugging Face's Trainer, attached and by `--deepspeed`: the losses, metrics and best weights it has without this library, and a kill
in the middle of an evaluation that changes no bit."""

import functools
import json
import pickle
import types

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")

import transformers  # noqa: E402

import forks  # noqa: E402
import offloadd.hf  # noqa: E402
from offloadd._state import random_state  # noqa: E402
from offloadd.hf import write_random_state  # noqa: E402
from test_entry_points import below_offloadd_run  # noqa: E402
from test_runs import HERE, config, lines_of, needs_daemon  # noqa: E402

# transformers fills in the Trainer's arguments. Without a section `optimizer`, the Trainer makes its own: no decay of biases and norms.
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


@functools.cache
def server(way):
    return forks.Server(below_offloadd_run()) if way == "deepspeed" else forks._server()


def start(way, output_dir, settings, *more):
    script = [HERE / "scripts" / "hf_trainer.py", output_dir, json.dumps(settings), *(["--deepspeed"] if way == "deepspeed" else []), *more]
    return server(way).start(*script, imports=["transformers.trainer", "transformers.models.bert.modeling_bert"])


def numbers(lines, kind):
    return {line.split()[1]: [float(one) for one in line.split()[2:]] for line in lines if line.startswith(kind + " ")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Lines and final weights without this library."""
    output_dir = tmp_path_factory.mktemp("plain") / "out"
    lines = lines_of(start("attach", output_dir, None))
    return lines, torch.load(output_dir / "final.pt")


@needs_daemon
@pytest.mark.parametrize("way", ["attach", "deepspeed"])
def test_trainer_has_the_losses_of_plain_pytorch_and_kills_in_evaluations_change_no_bit(tmp_path, plain, way):
    settings = {**config("nvme", tmp_path), **DEEPSPEED} if way == "deepspeed" else config("nvme", tmp_path, loss_chunks=3)
    expected, weights = plain
    whole = lines_of(start(way, tmp_path / "whole", settings))
    for kind, count in (("loss", 12), ("metric", 6)):
        found, without = numbers(whole, kind), numbers(expected, kind)
        assert len(found) == count and found.keys() == without.keys()
        for step, values in without.items():
            assert found[step] == pytest.approx(values, rel=1e-5), step
    for kind in ("early", "kept"):
        assert [line for line in whole if line.startswith(kind)] == [line for line in expected if line.startswith(kind)] != []
    ours = torch.load(tmp_path / "whole" / "final.pt")
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        if name.endswith("key.bias"):
            # Their true gradient is zero: Adam turns rounding into steps.
            continue
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)

    # At the end of the first epoch, and in the middle of the second.
    for last in (6, 10):
        process = start(way, tmp_path / "killed", settings)
        for line in process.stdout:
            if line == f"evaluates {last}\n":
                process.kill()
                break
        process.communicate()
    end = lines_of(start(way, tmp_path / "killed", settings))
    resumed = next(int(line.split()[1]) for line in end if line.startswith("resumed "))
    # The commit of the step is ordered when the evaluation begins, and the kill may come before its end.
    assert resumed in (last - 1, last)
    for kind in ("loss", "metric"):
        unbroken = numbers(whole, kind)
        assert numbers(end, kind) == {step: unbroken[step] for step in unbroken if int(step) > resumed - (kind == "metric")}
    for kind in ("early", "kept", "done"):
        assert [line for line in end if line.startswith(kind)] == [line for line in whole if line.startswith(kind)]


@pytest.mark.parametrize("skipped, begins_with", [(0, "step"), (3, "epoch")])
def test_a_resumed_epoch_has_the_order_it_had_after_a_second_resume_too(tmp_path, skipped, begins_with):
    randoms = {name: (torch.manual_seed(seed), random_state())[1] for seed, name in enumerate(("epoch", "step", "now"))}
    trainer = types.SimpleNamespace(_run_epoch=lambda **given: torch.get_rng_state(), _tr_loss=0.0, _total_loss_scalar=0.0)
    kept = offloadd.hf.TrainerProgress(trainer)
    kept.load_state_dict({"scheduler": {}, "loss": 0.0, "logged": 0, "asked": [], "epoch_random": randoms["epoch"]})
    kept.catch_up(types.SimpleNamespace(commits=types.SimpleNamespace(resumed_random=randoms["step"])), tmp_path)
    drawn_with = trainer._run_epoch(epoch=1, epochs_trained=1, steps_trained_in_current_epoch=skipped)
    assert torch.equal(drawn_with, randoms[begins_with]["torch"])
    assert torch.equal(kept._epoch_random["torch"], drawn_with)


@needs_daemon
@pytest.mark.parametrize(
    "way, device, last_line, resumed", [("deepspeed", "cpu", "evaluates 6", 4), ("attach", "cpu", "evaluates 6", 4), ("deepspeed", "nvme", "resumed 0", 0)]
)
def test_a_run_without_a_committed_step_resumes_from_the_newest_checkpoint(tmp_path, plain, way, device, last_line, resumed):
    settings = {**config(device, tmp_path), **(DEEPSPEED if way == "deepspeed" else {})}
    killed = start(way, tmp_path / "out", settings)
    for line in killed.stdout:
        if line == last_line + "\n":
            killed.kill()
            break
    assert killed.wait() == -9
    end = lines_of(start(way, tmp_path / "out", settings))
    found, expected = numbers(end, "loss"), numbers(plain[0], "loss")
    assert f"resumed {resumed}" in end and len(found) == 12 - resumed
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-5), step


def test_a_configuration_of_deepspeed_lets_muon_train_the_blocks(tmp_path, plain):
    muon = {"type": "Muon", "params": {"lr": "auto", "muon_lr": 2e-3, "weight_decay": "auto", "ns_steps": 4}}
    found = numbers(lines_of(start("deepspeed", tmp_path / "out", {**config("cpu", tmp_path), **DEEPSPEED, "optimizer": muon})), "loss")
    expected = numbers(plain[0], "loss")
    assert found.keys() == expected.keys() and found["1"] == pytest.approx(expected["1"], rel=1e-5) and found["12"] != pytest.approx(expected["12"], rel=1e-3)
    weights = torch.load(tmp_path / "out" / "final.pt")
    assert all(one.isfinite().all() for one in weights.values() if one.is_floating_point())


@needs_daemon
def test_a_second_train_goes_on_with_the_weights_and_moments_of_the_first(tmp_path):
    expected = lines_of(start("attach", tmp_path / "plain", None, "--twice"))
    found = lines_of(start("deepspeed", tmp_path / "ours", {**config("nvme", tmp_path), **DEEPSPEED}, "--twice"))
    found, expected = (numbers(lines[lines.index("again") :], "loss") for lines in (found, expected))
    assert len(expected) == 12 and found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5), step


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["NOT_DISTRIBUTED", "DISTRIBUTED"])
def test_random_numbers_of_gpus_are_written_as_the_trainer_reads_them(tmp_path, monkeypatch, mode, ranks):
    # DISTRIBUTED is also the mode of one process with DeepSpeed's configuration.
    from transformers.trainer_pt_utils import set_rng_state_for_device
    from transformers.training_args import ParallelMode

    of_gpus = [torch.full((16,), number, dtype=torch.uint8) for number in range(3)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    met = types.SimpleNamespace(count=ranks, rank=ranks - 1, meet=lambda what: None)
    args = types.SimpleNamespace(parallel_mode=ParallelMode[mode])
    write_random_state(tmp_path, {**random_state(), "cuda": of_gpus}, met, args)
    written = torch.load(tmp_path / ("rng_state.pth" if ranks == 1 else "rng_state_1.pth"), weights_only=False)
    found = {}
    setter = types.SimpleNamespace(set_rng_state=lambda state: found.update({1: state}), set_rng_state_all=lambda states: found.update(enumerate(states)))
    set_rng_state_for_device("CUDA", types.SimpleNamespace(random=setter), written, mode == "DISTRIBUTED")
    assert sorted(found) == ([0, 1] if mode == "DISTRIBUTED" else [1])
    assert all(torch.equal(state, of_gpus[index]) for index, state in found.items())


def tiny():
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=31, max_position_embeddings=16)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def test_a_trainer_with_arguments_that_keep_its_model_in_place_does_not_move_it(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", lambda self, model, device: moved.append(device))
    args = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[])
    transformers.Trainer(tiny(), args)
    assert len(moved) == 1
    kept = offloadd.hf.keep_in_place(args)
    assert isinstance(kept, transformers.TrainingArguments) and kept.to_dict() == args.to_dict()
    transformers.Trainer(tiny(), kept)
    assert len(moved) == 1
    assert type(pickle.loads(pickle.dumps(kept))) is transformers.TrainingArguments, "checkpoints are read without this library"


def test_trl_loads_a_model_that_is_given_by_its_name_into_host_memory(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="trl is not installed: make test-tools")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")
    from transformers.quantizers.auto import AutoHfQuantizer

    kept = offloadd.hf.keep_in_place(trl.SFTConfig(tmp_path, use_cpu=True, report_to=[], model_init_kwargs={"dtype": "bfloat16"}))
    assert kept.model_init_kwargs == {"device_map": {"": "cpu"}, "dtype": "bfloat16"}
    # Where there is a GPU, a quantizer chooses it for a model without a place.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for bits in ("load_in_4bit", "load_in_8bit"):
        quantizer = AutoHfQuantizer.from_config(transformers.BitsAndBytesConfig(**{bits: True}))
        assert quantizer.update_device_map(None) == {"": 0}
        assert quantizer.update_device_map(kept.model_init_kwargs["device_map"]) == {"": "cpu"}


@pytest.mark.parametrize("own, expected", [({}, "cuda:0"), ({"compute_device": "cpu"}, "cpu")])
def test_an_attached_model_computes_where_the_trainer_brings_its_batches(tmp_path, monkeypatch, own, expected):
    args = transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[])
    trainer = transformers.Trainer(tiny(), offloadd.hf.keep_in_place(args))
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda", 0))
    found = []
    monkeypatch.setattr(offloadd.hf, "prepare", lambda model, optimizer, settings, **more: found.append(settings) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offloadd.hf.attach(trainer, config("cpu", tmp_path, **own))
    assert found[0].compute_device == expected and found[0].micro_batches == 1
