"""A user's script with Hugging Face's Trainer: masked language modelling of random words, evaluated in between.

`hf_trainer.py OUTPUT_DIR JSON` attaches the engine, or leaves it out where the JSON is null; `hf_trainer.py OUTPUT_DIR JSON --deepspeed`
says deepspeed and nothing of the engine. `--twice` trains on after that.
"""

import hashlib
import json
import pathlib
import sys

import torch
import transformers

torch.set_num_threads(1)
# Ranks share it, and each word would be written for itself.
sys.stdout.reconfigure(write_through=False, line_buffering=True)
transformers.logging.set_verbosity_error()
output_dir, config, says_deepspeed = sys.argv[1], json.loads(sys.argv[2]), "--deepspeed" in sys.argv
torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, vocab_size=211, max_position_embeddings=64)
model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
with torch.no_grad():
    for param in model.parameters():
        param.add_(torch.randn_like(param) * 0.05)
generator = torch.Generator().manual_seed(2)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 211, (48, 12), generator=generator)]


class Tell(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print("resumed", state.global_step, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print("loss", state.global_step, logs["loss"], logs["grad_norm"], flush=True)

    def on_prediction_step(self, args, state, control, **kwargs):
        print("evaluates", state.global_step, flush=True)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print("metric", state.global_step, metrics["eval_loss"], flush=True)


args = transformers.TrainingArguments(
    output_dir, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=3e-3, warmup_steps=3,
    weight_decay=0.1, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=4, save_total_limit=2, metric_for_best_model="loss",
    # Its order is drawn from the random numbers of all.
    load_best_model_at_end="--twice" not in sys.argv, train_sampling_strategy="group_by_length",
    per_device_eval_batch_size=4, use_cpu=not says_deepspeed, disable_tqdm=True, report_to=[], seed=5,
    restore_callback_states_from_checkpoint=True, deepspeed=config if says_deepspeed else None,
)  # fmt: skip
early = transformers.EarlyStoppingCallback(early_stopping_patience=4)
trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=[Tell(), early])
if config is not None and not says_deepspeed:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
    import offloadd.hf

    offloadd.hf.attach(trainer, config)
# A first start has nothing to resume from.
trainer.train(resume_from_checkpoint=True if config is not None else None)
if "--twice" in sys.argv:
    print("again", flush=True)
    trainer.train()
# A resumed Trainer makes callbacks anew.
early = next(one for one in trainer.callback_handler.callbacks if isinstance(one, transformers.EarlyStoppingCallback))
print("early stopping counts", early.early_stopping_patience_counter, "best", trainer.state.best_global_step)
print("kept", *sorted(one.name for one in pathlib.Path(output_dir).glob("checkpoint-*")))
model.save_pretrained(output_dir + "/final")
digest = hashlib.sha256()
saved = transformers.BertForMaskedLM.from_pretrained(output_dir + "/final").state_dict()
for name, value in saved.items():
    digest.update(name.encode() + value.numpy().tobytes())
torch.save(saved, output_dir + "/final.pt")
print("done", digest.hexdigest(), flush=True)
