"""What scripts do with Hugging Face's Trainer: each habit runs with the Trainer alone, attached, and with a configuration of DeepSpeed's."""

import os

import accelerate
import torch
import transformers as T
from torch import nn

import habits
import offloadd.hf

torch.set_num_threads(1)
T.logging.set_verbosity_error()
PROGRAM = os.environ.get("OFFLOADD_PROGRAM")
AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
CONFIGURED = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}

# Where the engine moves the schedule on, the Trainer logs the rate of the next step, as with DeepSpeed.
NEXT_RATE = ("learning_rate",)


def gpt2(seed=0, dropout=0.1):
    torch.manual_seed(seed)
    sizes = dict(n_embd=16, n_layer=3, n_head=2, vocab_size=37, n_positions=16, attn_pdrop=0.0)
    model = T.GPT2LMHeadModel(T.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def data(count=22, seed=2):
    generator = torch.Generator().manual_seed(seed)
    length = lambda: int(torch.randint(4, 12, (), generator=generator))
    return [{"input_ids": torch.randint(1, 37, (length(),), generator=generator)} for _ in range(count)]


def collate(rows):
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Script(habits.Script):
    def __init__(self, way, directory):
        super().__init__(way, directory)
        self.begin()

    def begin(self):
        """Begins as a process does."""
        self.run = self.trainer = None
        for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
            state._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        T.integrations.deepspeed.unset_hf_deepspeed_config()

    def config(self, **more):
        where = {"stage": 3, "offload_param": {"device": "cpu"}}
        return {"zero_optimization": where, **({} if PROGRAM is None else {"offloadd": {"program": PROGRAM}}), **more}

    def arguments(self, config=(), without=(), **more):
        given = dict(
            per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2, adam_epsilon=1e-3, logging_steps=1, save_strategy="no", disable_tqdm=True,
            report_to=[], seed=5, output_dir="out", use_cpu=self.way != "deepspeed",
        )  # fmt: skip
        if self.way == "deepspeed":
            given["deepspeed"] = self.config(**{**{key: value for key, value in AUTO.items() if key not in without}, **dict(config)})
        return T.TrainingArguments(**{**given, **more})

    def make(self, kind=T.Trainer, model=None, given=(), config=(), **more):
        """A Trainer, attached where that is the way."""
        args = self.arguments(config, **more)
        given = {"train_dataset": data(), "eval_dataset": data(6, 3), "data_collator": collate, **dict(given)}
        if "model_init" not in given:
            given["model"] = gpt2() if model is None else model
        self.trainer = kind(args=args, **given)
        if self.way == "attach":
            self.run = offloadd.hf.attach(self.trainer, self.config())
        return self.trainer

    def train(self, *args, but=(), **more):
        """Trains, and compares what was logged, `but` some of it, and the weights."""
        self.trainer.train(*args, **more)
        others = ("runtime", "per_second", "flos", "time", *but)
        for entry in self.trainer.state.log_history:
            self.note({key: value for key, value in sorted(entry.items()) if not any(part in key for part in others)})
        self.note(dict(self.trainer.model.state_dict()))

    def end(self):
        if self.run is not None:
            self.run.close()
        if self.way == "deepspeed" and self.trainer is not None:
            for model in self.trainer.accelerator._models:
                if hasattr(model, "destroy"):
                    model.destroy()
            self.trainer.accelerator.free_memory()


table = habits.Table(Script, ["attach", "deepspeed"])

# Losses and batches


@table.habit("accumulation whose last step has fewer batches, smoothed labels, batches by length, NEFTune")
def _(s):
    s.make(
        gradient_accumulation_steps=4, label_smoothing_factor=0.1, train_sampling_strategy="group_by_length", neftune_noise_alpha=5, torch_empty_cache_steps=2,
        include_num_input_tokens_seen="all", average_tokens_across_devices=True, gradient_checkpointing=True, eval_on_start=True, logging_first_step=True,
    )  # fmt: skip
    s.train()


class OwnLoss(T.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


@table.habit("a loss of the script's own, data without a length, evaluated in parts")
def _(s):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data())

    s.make(
        OwnLoss, given={"train_dataset": Rows()}, max_steps=4, gradient_accumulation_steps=4, eval_strategy="steps", eval_steps=1, eval_accumulation_steps=1,
        per_device_eval_batch_size=2, bf16_full_eval=s.way != "deepspeed", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-3},
    )  # fmt: skip
    s.train()


@table.habit("compute_loss_func, batches that are left out, no clipping")
def _(s):
    def loss(outputs, labels, num_items_in_batch=None):
        found = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return found / (num_items_in_batch if num_items_in_batch is not None else (labels >= 0).sum())

    s.make(given={"compute_loss_func": loss}, dataloader_drop_last=True, gradient_accumulation_steps=2, max_grad_norm=0.0)
    s.train()


@table.habit("clipping that the configuration does not name")
def _(s):
    s.make(max_grad_norm=0.05, without=("gradient_clipping",))
    s.train()


# Optimizers and rates


@table.habit("ReduceLROnPlateau, and a stop by a callback")
def _(s):
    class Stops(T.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    s.make(given={"callbacks": [Stops()]}, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "mode": "max"},
           num_train_epochs=5, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_loss")  # fmt: skip
    s.train()


class Rates(T.TrainerCallback):
    def __init__(self, when):
        setattr(self, when, self.change)

    def change(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (2 + state.global_step)


@table.habit("a callback that sets rates, an optimizer and a schedule of the script's")
def _(s):
    model = gpt2()
    optimizer = torch.optim.AdamW([{"params": model.transformer.parameters(), "lr": 2e-3}], lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    s.make(model=model, given={"optimizers": (optimizer, schedule), "callbacks": [Rates("on_step_begin")]}, num_train_epochs=1)
    s.train()
    s.train()


class Layerwise(T.Trainer):
    """Makes an optimizer at each call, as for rates of their own by layer."""

    def create_optimizer(self, *args):
        first = [param for name, param in self.model.named_parameters() if ".h.0." in name]
        others = [param for param in self.model.parameters() if all(param is not one for one in first)]
        self.optimizer = torch.optim.AdamW([{"params": first, "lr": 1e-3}, {"params": others}], lr=1e-2, eps=1e-3)
        return self.optimizer


@table.habit("create_optimizer overridden, the script's optimizer without a schedule")
def _(s):
    s.make(Layerwise, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 2}, warmup_steps=2, max_steps=6)
    s.train()


@table.habit("the configuration's optimizer, and the Trainer's schedule", only=["deepspeed"])
def _(s):
    s.make(config={"optimizer": CONFIGURED}, lr_scheduler_type="cosine", warmup_steps=2, gradient_accumulation_steps=2)
    s.train(but=NEXT_RATE)


@table.habit("the configuration's optimizer, after an evaluation", only=["deepspeed"])
def _(s):
    model = gpt2()
    # One weight decay for all, which the Trainer's own does not have.
    own = {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.5), None)} if s.way is None else {}
    s.make(model=model, given=own, config={"optimizer": CONFIGURED}, weight_decay=0.5)
    s.note(s.trainer.evaluate()["eval_loss"])
    s.train(but=NEXT_RATE)


for section, params in (("optimizer", {"type": "AdamW"}), ("scheduler", {"type": "WarmupLR"})):

    @table.habit(f"a script's {section} and the configuration's", only=["deepspeed"], deepspeed=f"has a section {section}")
    def _(s, section=section, params=params):
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        s.make(model=model, given={"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))}, config={section: params})
        s.train()


@table.habit("the configuration's optimizer, and ReduceLROnPlateau", only=["deepspeed"], deepspeed="metrics")
def _(s):
    s.make(config={"optimizer": CONFIGURED}, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    s.train()


class Scales(T.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


def before_the_step(callback):
    def habit(s):
        s.make(given={"callbacks": [callback]})
        s.train()

    return habit


table.habit("a callback that scales gradients before a step", deepspeed="gradients were changed")(before_the_step(Scales()))
table.habit("a callback that sets rates before a step", deepspeed="settings of parameter groups")(before_the_step(Rates("on_pre_optimizer_step")))


class OwnStep(T.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


@table.habit("training_step with loss.backward", deepspeed="accelerator.backward(loss)")
def _(s):
    s.make(OwnStep, num_train_epochs=1)
    s.train()


# Models


@table.habit("a training that an error ends, and another one")
def _(s):
    class Fails(T.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and not s.failed:
                s.failed = True
                raise KeyError("a fault of the script's")

    s.failed = False
    s.make(given={"callbacks": [Fails()]}, gradient_accumulation_steps=2, num_train_epochs=1)
    try:
        s.trainer.train()
    except KeyError:
        s.note("an error")
    s.train()


def two_trainers(between):
    """A script that trains one model by two Trainers."""

    def habit(s):
        model = gpt2()
        s.make(model=model, num_train_epochs=1)
        s.train()
        between(s)
        s.make(model=model, num_train_epochs=1, output_dir="again")
        s.train()

    return habit


def end_the_first(s):
    if s.way == "deepspeed":
        s.trainer.model_wrapped.destroy()
    elif s.way == "attach":
        s.run.close()


table.habit("a second Trainer of one model", attach="close() of its run", deepspeed="engine.destroy()")(two_trainers(lambda s: None))
table.habit("a second Trainer of one model, whose first run was ended")(two_trainers(end_the_first))


@table.habit("a callback that evaluates, saves and asks for more")
def _(s):
    class Asks(T.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                s.note(s.trainer.evaluate()["eval_loss"])
                s.trainer.save_model("early")
                control.should_evaluate = True
            control.should_log = state.global_step % 2 == 0

    s.make(given={"callbacks": [Asks()]}, num_train_epochs=1)
    s.train()
    s.note(dict(T.GPT2LMHeadModel.from_pretrained("early").state_dict()))


@table.habit("model_init, and a second training that begins anew", attach="has model_init")
def _(s):
    s.make(given={"model_init": lambda: gpt2()})
    s.train()
    s.train()


@table.habit("two trainings, evaluations between them, and predictions")
def _(s):
    model = gpt2()
    trainer = s.make(model=model, given={"optimizers": (torch.optim.AdamW(model.parameters(), eps=1e-3), None)}, gradient_accumulation_steps=2)
    s.note(trainer.evaluate()["eval_loss"])
    s.train()
    s.note(trainer.evaluate()["eval_loss"])
    s.train()
    s.note(torch.tensor(trainer.predict(data(4, 4)).predictions))
    trainer.save_model("saved")
    s.note(dict(T.GPT2LMHeadModel.from_pretrained("saved").state_dict()))


@table.habit("an evaluation in another type after a training", only=["attach"], attach="before offloadd.prepare")
def _(s):
    s.make(max_steps=1, bf16_full_eval=True)
    s.train()
    s.trainer.evaluate()


class OutOfMemory(T.Trainer):
    """Has memory for two samples only."""

    def compute_loss(self, model, inputs, *args, **more):
        loss = super().compute_loss(model, inputs, *args, **more)
        if len(inputs["input_ids"]) > 2 and model.training:
            raise RuntimeError("CUDA out of memory.")
        return loss


@table.habit("a batch that is made smaller until it fits")
def _(s):
    # The Trainer refuses it at stage 3.
    stage_2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    s.make(OutOfMemory, auto_find_batch_size=True, max_steps=4, per_device_train_batch_size=8, gradient_accumulation_steps=2, config=stage_2)
    s.train()
    assert s.way != "deepspeed" or s.trainer.model_wrapped.run.run_dir == s.directory / "out" / "offloadd"


# Checkpoints


@table.habit("the best weights, in the end", deepspeed="can't be used with `save_only_model`")
def _(s):
    s.make(load_best_model_at_end=True, save_only_model=True, save_strategy="best", save_total_limit=1, eval_strategy="steps", eval_steps=2,
           metric_for_best_model="loss", greater_is_better=True, num_train_epochs=1)  # fmt: skip
    s.train()
    s.note(s.trainer.state.best_global_step)


@table.habit("the best checkpoint, in the end")
def _(s):
    s.make(load_best_model_at_end=True, save_strategy="steps", eval_strategy="steps", save_steps=2, eval_steps=2, metric_for_best_model="loss",
           greater_is_better=True, num_train_epochs=1)  # fmt: skip
    s.train()
    s.note(s.trainer.state.best_global_step)


class Stop(T.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_training_stop = True


def resumed(s, **more):
    """A training that stops after its third step, and another from its checkpoint."""
    more = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "restore_callback_states_from_checkpoint": True, **more}
    s.make(given={"callbacks": [Stop()]}, **more)
    s.train()
    s.end()
    s.begin()
    s.make(model=gpt2(7), **more)
    s.train("out/checkpoint-2")


@table.habit("a checkpoint, from which data are skipped")
def _(s):
    resumed(s)


@table.habit("a checkpoint, from which no data are skipped")
def _(s):
    resumed(s, ignore_data_skip=True)


@table.habit("a checkpoint of the weights alone", deepspeed="Can't find a valid checkpoint")
def _(s):
    resumed(s, save_only_model=True)


if __name__ == "__main__":
    table.run()
