"""A user's script with Hugging Face's Trainer: masked language modelling of random words; `plain` leaves the engine out."""

import hashlib
import json
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import offloadd.hf  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
output_dir, config = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, vocab_size=211, max_position_embeddings=64)
model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
with torch.no_grad():
    for param in model.parameters():
        param.add_(torch.randn_like(param) * 0.05)
generator = torch.Generator().manual_seed(2)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(4, 211, (48, 12), generator=generator)]


class Tell(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print("loss", state.global_step, logs["loss"], logs["grad_norm"], flush=True)


args = transformers.TrainingArguments(
    output_dir, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-3, warmup_steps=3,
    weight_decay=0.1, logging_steps=1, save_steps=7, save_total_limit=1, use_cpu=True, disable_tqdm=True, report_to=[], seed=5,
)  # fmt: skip
trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[Tell()])
if config is not None:
    run = offloadd.hf.attach(trainer, config)
    print("resumed", run.steps_done, flush=True)
trainer.train()
model.save_pretrained(output_dir + "/final")
digest = hashlib.sha256()
saved = transformers.BertForMaskedLM.from_pretrained(output_dir + "/final").state_dict()
for name, value in saved.items():
    digest.update(name.encode() + value.numpy().tobytes())
torch.save(saved, output_dir + "/final.pt")
print("done", digest.hexdigest(), flush=True)
