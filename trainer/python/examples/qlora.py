"""Trains adapters (QLoRA) on a base in 4 bits, whose packed bytes are on a drive and come to the GPU a block at a time.

    python qlora.py MODEL TEXT RUN DRIVE [STEPS]     # MODEL: a directory or name of Hugging Face; RUN is made, and has the adapters at the end

Kill it at any time and start it again: it resumes after its last committed step.
"""

import sys
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import offloadd

if len(sys.argv) < 5:
    sys.exit("usage: python qlora.py MODEL TEXT RUN DRIVE [STEPS]")
name, text, run_dir, drive = sys.argv[1:5]
steps = int(sys.argv[5]) if len(sys.argv) > 5 else 20
compute = "cuda:0" if torch.cuda.is_available() else "cpu"
config = {
    "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": drive}},
    "offloadd": {"compute_device": compute},
}

# Quantized in host memory, a tensor at a time: the model need not fit on the GPU.
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=nf4, dtype=torch.bfloat16, device_map={"": "cpu"})
model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
torch.manual_seed(0)
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()
optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=2e-4)
run = offloadd.prepare(model, optimizer, config, run_dir=run_dir)

ids = AutoTokenizer.from_pretrained(name)(Path(text).read_text(), return_tensors="pt").input_ids[0]
length = min(512, len(ids))
data = [ids.roll(-length * step)[None, :length] for step in range(steps)]
for batch in run.batches(data):
    batch = batch.to(compute)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {run.steps_done}: loss {loss.item():.6f}", flush=True)
model.save_pretrained(Path(run_dir) / "adapters")
run.close()
