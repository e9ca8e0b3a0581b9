"""What scripts do with Accelerate: each habit runs with Accelerate alone, with its DeepSpeed plugin, which offloadd answers, and alone with a model that
`offloadd.prepare` has prepared."""

import copy
import os

import accelerate
import safetensors.torch
import torch
import transformers
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler, GradientAccumulationPlugin, ProjectConfiguration
from torch import nn
from torch.optim import lr_scheduler

import habits
import offloadd

torch.set_num_threads(1)
PROGRAM = os.environ.get("OFFLOADD_PROGRAM")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(seed=0):
    """A model with random numbers that depend on `seed` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.05)
    return model


def adamw(params, lr=1e-2, **more):
    """An optimizer whose epsilon keeps rounding errors of tiny gradients small."""
    return torch.optim.AdamW(params, lr=lr, eps=1e-3, **more)


def halving(optimizer):
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def data(count=22):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(3))


class Script(habits.Script):
    """A script of Accelerate's. `model` and what goes with it are there once they are prepared."""

    def __init__(self, way, directory):
        super().__init__(way, directory)
        self.plugin, self.device = way == "plugin", "cpu"
        self.begin()

    def begin(self):
        """Begins as a process does."""
        self.begun, self.runs = [], []
        for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
            state._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()

    def config(self, **more):
        where = {"stage": 3, "offload_param": {"device": self.device}}
        program = {} if PROGRAM is None else {"offloadd": {"program": PROGRAM}}
        return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": where, **program, **more}

    def accelerate(self, steps=1, clip=0.0, config=(), **given):
        """An Accelerator that accumulates `steps` batches; norms are clipped at `clip`, which the plugin's configuration says too."""
        more = {} if "gradient_accumulation_plugin" in given else {"gradient_accumulation_steps": steps}
        if self.plugin:
            settings = self.config(**{"gradient_accumulation_steps": steps, "gradient_clipping": clip, **dict(config)})
            self.accelerator = Accelerator(**{"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=settings), **more, **given})
        else:
            self.accelerator = Accelerator(cpu=True, **more, **given)
        self.clip = clip
        self.begun.append(self.accelerator)
        return self.accelerator

    def prepare(self, model=None, optimizer=None, scheduler=None, loader=None):
        """Prepares a model, its optimizer and a loader; `scheduler` makes one of the optimizer."""
        model = net() if model is None else model
        optimizer = adamw(model.parameters()) if optimizer is None else optimizer
        loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True) if loader is None else loader
        made = [] if scheduler is None else [scheduler(optimizer)]
        self.prepare_alone(model, optimizer)
        self.model, self.optimizer, self.loader, *made = self.accelerator.prepare(model, optimizer, loader, *made)
        self.scheduler = made[0] if made else None

    def prepare_alone(self, model, optimizer):
        """Prepares a model for Accelerate, where that is the way."""
        if self.way == "prepare":
            config = {"zero_optimization": self.config()["zero_optimization"]}
            self.runs.append(offloadd.prepare(model, optimizer, config, run_dir=self.directory / f"run-{len(self.runs)}", resume=False))

    def step(self, x):
        """One batch, as most scripts have it."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean()
            self.accelerator.backward(loss)
            if self.clip and self.accelerator.sync_gradients:
                self.note(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)))
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.note(loss, self.accelerator.sync_gradients, self.optimizer.param_groups[0]["lr"])

    def train(self, epochs=2, batches=None):
        for _ in range(epochs):
            for x in self.loader if batches is None else batches:
                self.step(x)
        self.note(self.weights())

    def weights(self):
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def end(self):
        for accelerator in self.begun:
            for model in accelerator._models:
                if hasattr(model, "destroy"):
                    model.destroy()
            accelerator.free_memory()
        for run in self.runs:
            run.close()


table = habits.Table(Script, ["plugin", "prepare"])

# Steps and their schedules


@table.habit("accumulation whose last step has fewer batches, clipped, with a schedule")
def _(s):
    s.accelerate(4, clip=0.05)
    s.prepare(scheduler=halving)
    s.train()


@table.habit("accumulation over the end of an epoch, without a change of the schedule")
def _(s):
    s.accelerate(4, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False, adjust_scheduler=False))
    s.prepare(scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=8))
    s.train()


@table.habit("a schedule that moves with each batch, batches that are split")
def _(s):
    s.accelerate(2, step_scheduler_with_optimizer=False, dataloader_config=DataLoaderConfiguration(split_batches=True))
    s.prepare(scheduler=halving)
    s.train()


@table.habit("a schedule that is prepared by itself")
def _(s):
    s.accelerate(2)
    s.prepare()
    s.scheduler = s.accelerator.prepare(halving(s.optimizer.optimizer))
    s.train()


@table.habit("ReduceLROnPlateau, and a rate that the script sets")
def _(s):
    s.accelerate()
    s.prepare()
    s.plateau = s.accelerator.prepare(lr_scheduler.ReduceLROnPlateau(s.optimizer, factor=0.5, patience=0))
    for epoch in range(4):
        s.train(1)
        s.plateau.step(float(epoch))
    s.optimizer.param_groups[0]["lr"] = 3e-3
    s.train(1)


@table.habit("step and zero_grad where gradients are synchronized only, groups of parameters")
def _(s):
    accelerator = s.accelerate(2)
    model = net()
    s.prepare(model, adamw([{"params": model.blocks.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "weight_decay": 0.0}]))
    for x in s.loader:
        with accelerator.accumulate(s.model), accelerator.autocast():
            accelerator.backward(s.model(x).square().mean(), retain_graph=True)
        if accelerator.sync_gradients:
            s.optimizer.step()
            s.optimizer.zero_grad()
    s.note(s.weights())


@table.habit("batches that are skipped, a trigger, an epoch that is left early")
def _(s):
    accelerator = s.accelerate(2)
    s.prepare()
    for number, x in enumerate(accelerator.skip_first_batches(s.loader, 1)):
        s.step(x)
        if number == 2:
            accelerator.set_trigger()
        s.note(triggered := accelerator.check_trigger())
        if triggered:
            break
    s.train(1)


# Optimizers and schedules of the configuration


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-3}}


def dummy(s, params, **more):
    return DummyOptim(params, lr=1e-2, **more) if s.plugin else torch.optim.AdamW(params, lr=1e-2, eps=1e-3, **more)


@table.habit("DummyOptim with groups, DummyScheduler with a function")
def _(s):
    s.accelerate(2, config={"optimizer": ADAMW})
    model = net()
    groups = [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters()), "weight_decay": 0.0}]
    optimizer = dummy(s, groups, weight_decay=0.1)
    s.prepare(model, optimizer, (lambda optimizer: DummyScheduler(optimizer, lr_scheduler_callable=halving)) if s.plugin else halving)
    s.train()


@table.habit("DummyOptim and DummyScheduler with the configuration's schedule")
def _(s):
    schedule = {"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")}
    schedule["params"]["warmup_type"] = "linear"
    s.accelerate(config={"optimizer": ADAMW, "scheduler": schedule})
    model = net()
    # DeepSpeed counts the first step as one of the warm-up.
    rates = lambda step: min(max(0, step - 1) / 4, max(0, (12 - max(0, step - 1)) / 8))
    make = (lambda optimizer: DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)) if s.plugin else lambda one: lr_scheduler.LambdaLR(one, rates)
    s.prepare(model, dummy(s, model.parameters(), weight_decay=0.0), make)
    s.train()


@table.habit("DummyOptim with another rate than the configuration's", only=["plugin"], plugin="lr is 0.01")
def _(s):
    s.accelerate(config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    model = net()
    s.prepare(model, DummyOptim(model.parameters(), lr=1e-2))


@table.habit("DummyOptim with what the configuration does not say", only=["plugin"], plugin="betas is (0.8, 0.9)")
def _(s):
    s.accelerate(config={"optimizer": ADAMW})
    model = net()
    s.prepare(model, DummyOptim(model.parameters(), lr=1e-2, betas=(0.8, 0.9)))


@table.habit("a plugin without a configuration", only=["plugin"])
def _(s):
    given = {"deepspeed_plugin": DeepSpeedPlugin(gradient_accumulation_steps=2, gradient_clipping=0.05, zero_stage=3, offload_param_device="cpu")}
    s.accelerate(2, clip=0.05, **(given if s.plugin else {}))
    s.prepare(scheduler=halving)
    s.train()


class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def offloaded(device="cpu"):
    return {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}


@table.habit("an optimizer that is offloaded, and its schedule after it was loaded")
def _(s):
    s.accelerate(config=offloaded(), clip=0.05)
    s.prepare(scheduler=halving)
    s.train(1)
    s.accelerator.save_state("saved")
    s.train(1)
    s.accelerator.load_state("saved")
    s.train(1)


@table.habit("Adam that is offloaded")
def _(s):
    s.accelerate(config=offloaded())
    model = net()
    s.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-3))
    s.train(1)


for kind in (torch.optim.SGD, torch.optim.RMSprop, Own):

    @table.habit(f"{kind.__name__} that is offloaded", **dict.fromkeys(("plugin", "prepare"), "and offloadd updates with torch.optim.Adam"))
    def _(s, kind=kind):
        s.accelerate(config=offloaded())
        model = net()
        s.prepare(model, kind(model.parameters(), lr=1e-2))


@table.habit("two optimizers of one model", plugin="2 optimizers")
def _(s):
    model = net()
    s.accelerate().prepare(model, adamw(model.blocks.parameters()), adamw(model.head.parameters()))


@table.habit("two schedules of one optimizer", only=["plugin"], plugin="2 schedulers")
def _(s):
    model = net()
    optimizer = adamw(model.parameters())
    s.accelerate().prepare(model, optimizer, halving(optimizer), lr_scheduler.ConstantLR(optimizer))


@table.habit("a step with a closure", plugin="leave the closure out")
def _(s):
    s.accelerate()
    s.prepare()
    x = data(4)

    def closure():
        s.optimizer.zero_grad()
        loss = s.model(x).square().mean()
        s.accelerator.backward(loss)
        return loss

    s.optimizer.step(closure)
    s.note(s.weights())


# Clipping


@table.habit("clipping at another norm than the configuration's", plugin='gradient_clipping": 0.5')
def _(s):
    s.accelerate(clip=1.0)
    s.prepare()
    s.clip = 0.5
    s.train(1)


@table.habit("clipping at another norm than the default", plugin='gradient_clipping": 0.5')
def _(s):
    s.accelerate(config={"gradient_clipping": "auto"})
    s.prepare()
    s.clip = 0.5
    s.train(1)


@table.habit("clipping by another kind of norm", plugin="norm_type")
def _(s):
    s.accelerate(clip=1.0)
    s.prepare()
    s.accelerator.backward(s.model(data(4)).square().mean())
    s.accelerator.clip_grad_norm_(s.model.parameters(), 1.0, norm_type=float("inf"))


@table.habit("clipping by value", plugin="do not support `clip_grad_value_`")
def _(s):
    s.accelerate()
    s.prepare()
    s.accelerator.backward(s.model(data(4)).square().mean())
    s.accelerator.clip_grad_value_(s.model.parameters(), 1e-2)
    s.optimizer.step()
    s.note(s.weights())


@table.habit("a norm that is asked for without clipping")
def _(s):
    s.accelerate()
    s.prepare()
    for x in s.loader:
        s.accelerator.backward(s.model(x).square().mean())
        s.note(float(s.accelerator.clip_grad_norm_(s.model.parameters(), float("inf"))))
        s.optimizer.step()
        s.optimizer.zero_grad()


# Accumulation by hand


@table.habit("accumulation by hand, below no_sync", plugin="accelerator.accumulate")
def _(s):
    s.accelerate()
    s.prepare()
    for number, x in enumerate(s.loader, 1):
        with s.accelerator.no_sync(s.model):
            s.accelerator.backward(s.model(x).square().mean() / 2)
        if number % 2 == 0:
            s.optimizer.step()
            s.optimizer.zero_grad()


@table.habit("two losses before a step", plugin="add the losses")
def _(s):
    s.accelerate()
    s.prepare()
    for x in s.loader:
        s.accelerator.backward(s.model(x).square().mean())
        s.accelerator.backward(s.model(x).abs().mean())
        s.optimizer.step()
        s.optimizer.zero_grad()


@table.habit("another number of batches to accumulate, later", plugin="gradient_accumulation_steps")
def _(s):
    s.accelerate(2)
    s.prepare()
    s.train(1)
    s.accelerator.gradient_accumulation_steps = 3
    s.train(1)


@table.habit("another number of batches, later, by which the script divides", only=["plugin"])
def _(s):
    s.accelerate(2)
    s.prepare()
    s.accelerator.gradient_accumulation_steps = 3
    for x in s.loader:
        with s.accelerator.accumulate(s.model):
            loss = s.model(x).square().mean()
            if s.plugin:
                s.accelerator.backward(loss / 3, scale_wrt_gas=False)
            else:
                s.accelerator.backward(loss)
            s.optimizer.step()
            s.optimizer.zero_grad()
    s.note(s.weights())


@table.habit("zero_grad within an accumulation", plugin="call it after optimizer.step()")
def _(s):
    s.accelerate(2)
    s.prepare()
    for x in s.loader:
        with s.accelerator.accumulate(s.model):
            s.optimizer.zero_grad()
            s.accelerator.backward(s.model(x).square().mean())
            s.optimizer.step()


def head_of(s):
    return s.accelerator.unwrap_model(s.model).head


def change(what):
    """A script that does something between backward and step."""

    def habit(s):
        s.accelerate()
        s.prepare()
        s.accelerator.backward(s.model(data(4)).square().mean())
        what(s)
        s.optimizer.step()

    return habit


table.habit("gradients that are scaled before the step", plugin="gradients were changed")(change(lambda s: head_of(s).weight.grad.mul_(0.5)))
table.habit("gradients that are replaced before the step", plugin="gradients were changed")(
    change(lambda s: setattr(head_of(s).weight, "grad", torch.zeros(1, 8)))
)
table.habit("gradients that are read before the step", plugin="accelerator.backward() already")(change(lambda s: float(head_of(s).weight.grad.abs().max())))
table.habit("gradients that are dropped before the step", plugin="call it after optimizer.step()")(change(lambda s: s.optimizer.zero_grad()))
table.habit("a rate that is changed before the step", plugin="settings of parameter groups")(change(lambda s: s.optimizer.param_groups[0].update(lr=1e-3)))


@table.habit("loss.backward in place of the Accelerator's", plugin="accelerator.backward(loss)")
def _(s):
    s.accelerate()
    s.prepare()
    for x in s.loader:
        s.model(x).square().mean().backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.note(s.weights())


table.habit("a second step with the same gradients", plugin="accelerator.backward(loss)", prepare="twice for one backward")(
    change(lambda s: s.optimizer.step())
)


@table.habit("no zero_grad between steps", plugin="zero_grad()", prepare="zero_grad()")
def _(s):
    s.accelerate()
    s.prepare()
    for x in s.loader:
        s.accelerator.backward(s.model(x).square().mean())
        s.optimizer.step()


@table.habit("zero_grad before each batch")
def _(s):
    s.accelerate()
    s.prepare()
    for x in s.loader:
        s.optimizer.zero_grad()
        s.accelerator.backward(s.model(x).square().mean())
        s.optimizer.step()
    s.note(s.weights())


# Several models


@table.habit("a second model that is trained", plugin="an Accelerator of its own")
def _(s):
    s.accelerate()
    s.prepare()
    s.prepare(net(1))


@table.habit("a model that is prepared again after an error and free_memory")
def _(s):
    model = net()
    s.accelerate(2)
    for number in range(2):
        s.prepare(model)
        try:
            for x in s.loader:
                s.step(x)
                if number == 0 and len(s.notes) > 6:
                    s.model(x).square().mean() + data(3)[:, :1] @ x
        except RuntimeError:
            s.note("an error")
        s.model, s.optimizer = s.accelerator.free_memory(s.model, s.optimizer)
        for run in s.runs:
            run.close()
    s.note(dict(model.state_dict()))


@table.habit("moments that the script saves, changes and loads")
def _(s):
    s.accelerate(2)
    s.prepare()
    s.train(1)
    # In plain PyTorch its tensors would be those of the optimizer.
    kept = copy.deepcopy(s.optimizer.state_dict())
    s.note(kept["state"])
    s.train(1)
    s.optimizer.load_state_dict(kept)
    s.train(1)


@table.habit("a model after another, with the memory of the first freed")
def _(s):
    s.accelerate(2)
    for seed in range(2):
        s.prepare(net(seed))
        s.train(1)
        s.model, s.optimizer = s.accelerator.free_memory(s.model, s.optimizer)


def plugins(s):
    """Two plugins, of which the second trains nothing."""
    learner, teacher = (DeepSpeedPlugin(hf_ds_config=s.config(gradient_accumulation_steps=1)) for _ in range(2))
    return {"deepspeed_plugin": {"student": learner, "teacher": teacher}} if s.plugin else {}


@table.habit("a student and a teacher, each with a plugin")
def _(s):
    for first in ("student", "teacher"):
        s.begin()
        accelerator = s.accelerate(**plugins(s))

        def prepare(name):
            if s.plugin:
                accelerator.state.select_deepspeed_plugin(name)
            if name == "student":
                s.prepare()
            else:
                s.teacher = accelerator.prepare(net(1).eval())

        for name in dict.fromkeys((first, "student", "teacher")):
            prepare(name)
        for x in data(12).split(4):
            with torch.no_grad():
                wanted = s.teacher(x)
            loss = (s.model(x) - wanted).square().mean()
            accelerator.backward(loss)
            s.optimizer.step()
            s.optimizer.zero_grad()
            s.note(loss)
        s.end()


@table.habit("a generator and a critic, each with an Accelerator")
def _(s):
    first = s.accelerate()
    s.prepare()
    model, optimizer = s.model, s.optimizer
    second = Accelerator() if s.plugin else Accelerator(cpu=True)
    s.begun.append(second)
    critic = net(1)
    critic, of_critic = second.prepare(critic, adamw(critic.parameters()))
    for x in data(12).split(4):
        loss = critic(x).mean() - critic(x * model(x).detach()).mean()
        second.backward(loss)
        of_critic.step()
        of_critic.zero_grad()
        making = critic(x * model(x)).mean()
        first.backward(making)
        optimizer.step()
        optimizer.zero_grad()
        of_critic.zero_grad()
        s.note(loss, making)


# State


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@table.habit("state that is saved by number and loaded, with objects of the script's")
def _(s):
    accelerator = s.accelerate(2, project_config=ProjectConfiguration(str(s.directory / "project"), automatic_checkpoint_naming=True, total_limit=2))
    s.prepare(scheduler=halving)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for _ in range(3):
        s.train(1)
        counter.count += 1
        accelerator.save_state()
    s.train(1)
    counter.count += 1
    accelerator.load_state()
    s.note(counter.count, sorted(one.name for one in (s.directory / "project" / "checkpoints").iterdir()))
    s.train(1)


@table.habit("state that is saved within an epoch, and loaded by another process's objects")
def _(s):
    s.accelerate(2)
    s.prepare(scheduler=halving)
    for number, x in enumerate(s.loader):
        s.step(x)
        if number == 3:
            s.accelerator.save_state("saved")
    s.end()
    s.begin()
    s.accelerate(2)
    s.prepare(net(7), scheduler=halving)
    s.accelerator.load_state("saved")
    for x in s.accelerator.skip_first_batches(s.loader, 4):
        s.step(x)
    s.train(1)


@table.habit("state that Accelerate alone has saved", only=["plugin"], plugin="pytorch_model")
def _(s):
    s.plugin = False
    s.accelerate()
    s.prepare()
    s.accelerator.save_state("saved")
    s.plugin = True
    s.begin()
    s.accelerate()
    s.prepare()
    s.accelerator.load_state("saved")


@table.habit("weights that are saved, and those of the model below its wrapper")
def _(s):
    accelerator = s.accelerate(2)
    s.prepare()
    s.train(1)
    accelerator.save_model(s.model, "model")
    bare = accelerator.unwrap_model(s.model)
    accelerator.save({name: value.clone() for name, value in bare.state_dict().items()}, "weights.bin")
    s.note(type(bare) is Net, safetensors.torch.load_file("model/model.safetensors"), torch.load("weights.bin"))
    other = net(7)
    accelerate.load_checkpoint_in_model(other, "model")
    s.note(other.state_dict())
    s.train(1)


@table.habit("weights that stay in memory, saved and loaded")
def _(s):
    s.device = "none"
    s.accelerate(2)
    s.prepare(scheduler=halving)
    s.train(1)
    s.accelerator.save_model(s.model, "model")
    s.accelerator.save_state("saved")
    s.note({name: value.clone() for name, value in safetensors.torch.load_file("model/model.safetensors").items()})
    s.train(1)
    s.accelerator.load_state("saved")
    s.train(1)


@table.habit("weights that are saved after the run", only=["prepare"])
def _(s):
    accelerator = s.accelerate(2)
    s.prepare()
    s.train(1)
    bare = accelerator.unwrap_model(s.model)
    s.end()
    accelerator.save_model(bare, "model")
    s.note(safetensors.torch.load_file("model/model.safetensors"))


@table.habit("evaluation whose last batch is smaller, with what is gathered and reduced")
def _(s):
    accelerator = s.accelerate()
    s.prepare()
    evaluation = accelerator.prepare(torch.utils.data.DataLoader(data(10), batch_size=4))
    for _ in range(2):
        s.train(1)
        s.model.eval()
        for x in evaluation:
            with torch.no_grad():
                found = s.model(x)
            s.note(accelerator.gather_for_metrics(found), accelerator.gather(found), accelerator.reduce(found, "mean"), accelerator.pad_across_processes(found))
        s.model.train()


@table.habit("local SGD", plugin="LocalSGD is supported only for CPUs and GPUs")
def _(s):
    s.accelerate()
    s.prepare()
    LocalSGD(s.accelerator, s.model, 2)


# Models that are built within zero.Init, and precision


@table.habit("a model of transformers that is loaded in zero.Init")
def _(s):
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=31, max_position_embeddings=16, num_labels=1)
    torch.manual_seed(2)
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained("built")
    s.accelerate(2)
    model = transformers.AutoModelForSequenceClassification.from_pretrained("built")
    # More random numbers are drawn within it.
    torch.manual_seed(2)
    ids = torch.randint(0, 31, (10, 6))
    s.prepare(model, loader=torch.utils.data.DataLoader(ids, batch_size=4))
    for ids in s.loader:
        with s.accelerator.accumulate(s.model):
            loss = s.model(input_ids=ids, labels=torch.zeros(len(ids))).loss
            s.accelerator.backward(loss)
            s.optimizer.step()
            s.optimizer.zero_grad()
        s.note(loss)
    s.note(s.weights())


@table.habit("a step of fp16 that overflows, and its schedule")
def _(s):
    # The values are what a scaler does: the step is skipped, and the schedule waits.
    s.accelerate(**({"config": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}, "mixed_precision": "fp16"} if s.plugin else {}))
    s.prepare(scheduler=halving)
    for number in range(4):
        before = s.weights()
        loss = s.model(data(4).half() if s.plugin else data(4)).square().mean()
        if number != 2 or s.plugin:
            s.accelerator.backward(loss * (1e6 if number == 2 else 1))
            s.optimizer.step()
            s.scheduler.step()
            s.optimizer.zero_grad()
        skipped = s.accelerator.optimizer_step_was_skipped if s.plugin else number == 2
        s.note(skipped, all(torch.equal(before[name], value) for name, value in s.weights().items()), s.optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    table.run()
