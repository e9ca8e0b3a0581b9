"""Which optimizers are taken, and what the user of another one is told."""

import contextlib
import inspect
import types

import pytest
import torch
from torch import nn

import offloadd
import offloadd.hf
import transformers
from offloadd._supported_optimizers import check_optimizer, rule_named, rule_of
from offloadd._trainer import patch_arguments
from offloadd.hf import keep_in_place

PARAMS = [nn.Parameter(torch.zeros(4, 4))]

# Every optimizer that torch has, with the arguments that it needs.
TORCHS = {
    name: one for name, one in vars(torch.optim).items() if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
}
TAKEN = [
    ("Adam", {}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "weight_decay": 0.3}),
    ("AdamW", {"lr": torch.tensor(1e-3)}),
    ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),
]
OPTIONS = [
    ("AdamW", {"amsgrad": True}, "torch.optim.AdamW with amsgrad=True: leave it out"),
    ("AdamW", {"maximize": True}, "torch.optim.AdamW with maximize=True: leave it out"),
    ("AdamW", {"differentiable": True}, "torch.optim.AdamW with differentiable=True: leave it out"),
    ("Adam", {"weight_decay": 0.1}, "torch.optim.Adam with weight_decay adds the decay to the gradient, .*use torch.optim.AdamW"),
]

ADAMW = r'use torch.optim.AdamW \(a Trainer makes it with optim="adamw_torch"\)'
MUON = "use offloadd.optim.Muon, whose groups with use_muon=False are for all but the matrices of blocks and are updated by AdamW"
LION = r'use lion_pytorch.Lion \(a Trainer makes it with optim="lion_32bit"\)'
BYTES = r', whose moments take {} bytes a parameter, {} with offloadd.moments = "bf16" and {} with "8bit", in host memory or on drives and none on a GPU'
# Those are not installed: classes with the modules and names of the real ones.
OTHERS = {
    **dict.fromkeys(
        [
            "bitsandbytes.optim.adamw.AdamW8bit",
            "bitsandbytes.optim.adamw.PagedAdamW",
            "bitsandbytes.optim.adamw.PagedAdamW8bit",
            "torchao.optim.adam.AdamW4bit",
            "torchao.optim.adam.AdamW8bit",
            "torchao.optim.adam.AdamWFp8",
            "torchao.optim.cpu_offload.CPUOffloadOptimizer",
            "galore_torch.adamw.AdamW",
            "galore_torch.adamw8bit.AdamW8bit",
            "apollo_torch.apollo.AdamW",
            "lomo_optim.adalomo.AdaLomo",
            "transformers.trainer_pt_utils.LayerWiseDummyOptimizer",
            "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
        ],
        ADAMW + BYTES.format(8, 4, 2) + '; those of optim="lion_32bit" take half',
    ),
    **dict.fromkeys(["muon.MuonWithAuxAdam", "muon.SingleDeviceMuonWithAuxAdam", "dion.muon.Muon"], MUON),
    **dict.fromkeys(
        ["bitsandbytes.optim.lion.Lion", "bitsandbytes.optim.lion.Lion8bit", "pytorch_optimizer.optimizer.lion.Lion"], LION + BYTES.format(4, 2, 1)
    ),
    **dict.fromkeys(
        [
            "bitsandbytes.optim.adamw.AdamW",
            "bitsandbytes.optim.ademamix.AdEMAMix",
            "transformers.optimization.Adafactor",
            "apex.optimizers.fused_adam.FusedAdam",
            "schedulefree.adamw_schedulefree.AdamWScheduleFree",
            "grokadamw.grokadamw.GrokAdamW",
            "optimi.stableadamw.StableAdamW",
            "prodigyopt.prodigy.Prodigy",
            "dadaptation.dadapt_adam.DAdaptAdam",
            "heavyball.foreach_soap.ForeachSOAP",
            "pytorch_optimizer.optimizer.sam.SAM",
        ],
        ADAMW + "$",
    ),
}


def test_every_optimizer_of_torch_is_taken_or_refused_by_its_name():
    for name, options in TAKEN:
        check_optimizer(TORCHS[name](PARAMS, **options))
    for name, options, message in OPTIONS:
        with pytest.raises(offloadd.NotSupported, match=message):
            check_optimizer(TORCHS[name](PARAMS, **options))
    others = sorted(set(TORCHS) - {"Adam", "AdamW", "Muon"})
    assert len(others) > 10
    for name in others:
        with pytest.raises(offloadd.NotSupported, match=f"the optimizer is torch.optim.{name}, and offloadd updates .* only: {ADAMW}"):
            check_optimizer(TORCHS[name](PARAMS))


@pytest.mark.parametrize("name", OTHERS)
def test_the_optimizer_of_another_package_is_named_with_its_module_and_what_to_use(name):
    module, _, kind = name.rpartition(".")
    made = type(kind, (torch.optim.Optimizer,), {"__module__": module})(PARAMS, {})
    with pytest.raises(offloadd.NotSupported, match=f"the optimizer is {name}, and offloadd .*{OTHERS[name]}"):
        check_optimizer(made)


def lion(**more):
    """As the real one, which is not installed, has its class and its attributes."""
    kind = type("Lion", (torch.optim.Optimizer,), {"__module__": "lion_pytorch.lion_pytorch"})
    made = kind(PARAMS, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0})
    made.decoupled_wd = more.pop("decoupled_wd", False)
    made.param_groups[0].update(more)
    return made


def test_the_lion_of_lion_pytorch_is_taken_unless_its_options_change_the_update():
    check_optimizer(lion())
    check_optimizer(lion(weight_decay=0.3))
    assert [rule_of(one) for one in (lion(), torch.optim.Adam(PARAMS), torch.optim.AdamW(PARAMS))] == ["Lion", "AdamW", "AdamW"]
    for options, message in [({"decoupled_wd": True}, "decoupled_weight_decay=True: .* divide weight_decay"), ({"cautious_factor": 0.5}, "cautious_factor")]:
        with pytest.raises(offloadd.NotSupported, match=f"lion_pytorch.lion_pytorch.Lion with {message}"):
            check_optimizer(lion(**options))


# What `optim` may be in TrainingArguments: the rule that updates, or the name that a message gives instead.
AS_ADAMW, AS_LION = ["adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit"], ["lion_32bit", "paged_lion_32bit"]
# With moments as bitsandbytes has them.
EIGHT_BITS = {**dict.fromkeys(["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"], "AdamW"), **dict.fromkeys(["lion_8bit", "paged_lion_8bit"], "Lion")}
OPTIM = {**dict.fromkeys(AS_ADAMW, "AdamW"), **dict.fromkeys(AS_LION, "Lion"), **EIGHT_BITS}
# None of these has the update of AdamW, or moments that are served.
OPTIM.update(dict.fromkeys(["adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit"], "adamw_torch"))
OPTIM.update(
    dict.fromkeys(["ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "grokadamw", "stable_adamw", "lomo", "adalomo"], "adamw_torch")
)
OPTIM.update(dict.fromkeys(["sgd", "adagrad", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"], "adamw_torch"))
OPTIM.update(dict.fromkeys(["galore_adamw", "galore_adamw_8bit", "galore_adafactor"], "adamw_torch"))
OPTIM.update(dict.fromkeys(["galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"], "adamw_torch"))
OPTIM.update(dict.fromkeys(["schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise"], "adamw_torch"))
# Names of other versions of transformers.
OPTIM.update(dict.fromkeys(["muon", "adamw_hf", "adamw_apex_fused"], "adamw_torch"))


def test_every_optimizer_that_a_trainer_names_is_served_or_refused_before_a_model_is_loaded():
    names = {one.value for one in transformers.training_args.OptimizerNames}
    assert names <= OPTIM.keys(), "say of each name what becomes of it"
    for name, expected in OPTIM.items():
        # What is needed for some of them is not installed.
        args = types.SimpleNamespace(optim=name)
        if expected in ("AdamW", "Lion"):
            assert rule_named(name) == expected
            continue
        count = 4 if expected == "lion_32bit" else 8
        with pytest.raises(
            offloadd.NotSupported, match=f'optim="{name}" is not supported: use optim="{expected}"' + BYTES.format(count, count // 2, count // 4)
        ):
            keep_in_place(args)
    with pytest.raises(
        offloadd.NotSupported, match='; a DeepSpeed configuration with optimizer.type = "Muon", or, passed to the Trainer, offloadd.optim.Muon, whose groups'
    ):
        rule_named("muon")


def trainer_of(tmp_path, optim, own=None, **more):
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), optim=optim, use_cpu=True, max_steps=2, report_to=[], save_strategy="no", learning_rate=1e-3, **more
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.forward = lambda x: {"loss": model[1](model[0](x)).square().mean()}
    trainer = transformers.Trainer(model, args, train_dataset=[{"x": torch.full((4,), float(number))} for number in range(32)])
    offloadd.hf.attach(trainer, {"zero_optimization": {"offload_optimizer": {"device": "none"}}, "offloadd": own or {}})
    return trainer


@pytest.mark.parametrize("optim, like", [("paged_adamw_32bit", "adamw_torch"), ("adamw_torch_fused", "adamw_torch"), ("paged_lion_32bit", "lion_32bit")])
def test_an_optimizer_of_another_package_with_the_same_update_is_served(tmp_path, optim, like):
    found = []
    for name in (optim, like):
        trainer = trainer_of(tmp_path, name, weight_decay=0.1)
        trainer.train()
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.1
        found.append([param.detach().clone() for param in trainer.model.parameters()])
        trainer.model._offloadd_run.close()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("optim, like", [("paged_adamw_8bit", "adamw_torch"), ("lion_8bit", "lion_32bit")])
def test_an_optimizer_of_bitsandbytes_has_moments_in_8_bits_unless_the_configuration_says_others(tmp_path, capfd, optim, like):
    found = []
    for name, own in [(optim, {}), (like, {"moments": "8bit"}), (optim, {"moments": "fp32"}), (like, {})]:
        trainer = trainer_of(tmp_path, name, own)
        trainer.train()
        assert (f'optim="{optim}": moments in 8 bits as offloadd.moments = "8bit" has them' in capfd.readouterr().err) == (name == optim and not own)
        found.append([value.clone() for state in trainer.optimizer.state_dict()["state"].values() for value in state.values()])
        trainer.model._offloadd_run.close()
    eight, same, given, wide = found
    assert all(map(torch.equal, eight, same)) and all(map(torch.equal, given, wide)) and not all(map(torch.equal, eight, wide))


def test_the_arguments_of_a_script_below_offloadd_run_are_refused_when_they_are_made(monkeypatch):
    kind = type("TrainingArguments", (), {"__post_init__": lambda self: None})
    patch_arguments(types.SimpleNamespace(TrainingArguments=kind))
    for name, config, refused in [
        ("adafactor", {}, True),
        ("adafactor", {"optimizer": {"type": "AdamW"}}, False),
        ("adamw_torch", {}, False),
        ("sgd", None, False),
    ]:
        args = kind()
        args.optim, args.deepspeed, args.hf_deepspeed_config = name, config is not None, types.SimpleNamespace(config=config)
        with pytest.raises(offloadd.NotSupported, match="adafactor") if refused else contextlib.nullcontext():
            args.__post_init__()


def test_what_is_no_optimizer_or_has_a_step_of_its_own_is_named():
    class Own(torch.optim.AdamW):
        pass

    with pytest.raises(
        offloadd.NotSupported, match=r"test_optimizers\.\S+Own, .* use torch.optim.AdamW itself, since a subclass's own step would not be called"
    ):
        check_optimizer(Own(PARAMS))
    with pytest.raises(offloadd.Error, match="the optimizer is a builtins.list, which is no torch.optim.Optimizer"):
        check_optimizer([])


def test_prepare_asks_before_it_makes_anything(tmp_path):
    with pytest.raises(offloadd.NotSupported, match="the optimizer is torch.optim.SGD"):
        offloadd.prepare(nn.Linear(4, 4), torch.optim.SGD(PARAMS), {}, run_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())
