"""A model learns from rewards for what it writes itself: all weights are in memory while it writes, and in tiles while it learns.

    python reinforce.py MODEL RUN DRIVE [STEPS [sampler]]     # a directory of a Hugging Face model; RUN is made

With `sampler` another copy of the model writes, as a program such as vLLM does, and gets the weights before. The texts are the same. Kill it at any
time and start it again: it resumes after its last committed step.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import offloadd

if len(sys.argv) < 4:
    sys.exit("usage: python reinforce.py MODEL RUN DRIVE [STEPS [sampler]]")
directory, run_dir, drive = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 20
config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": drive}}}

model = AutoModelForCausalLM.from_pretrained(directory)
sampler = AutoModelForCausalLM.from_pretrained(directory) if sys.argv[5:] == ["sampler"] else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = offloadd.prepare(model, optimizer, config, run_dir=run_dir)


def write(prompts):
    how = dict(max_new_tokens=8, do_sample=True, top_k=0)
    if sampler is None:
        with run.gathered():
            return model.generate(prompts, **how)
    weights = sampler.state_dict()
    for name, value in run.weights():
        weights[name].copy_(value)
    return sampler.generate(prompts, **how)


torch.manual_seed(0)
vocabulary = model.config.vocab_size
data = [torch.randint(4, vocabulary, (4, 6)) for _ in range(steps)]
for prompts in run.batches(data):
    texts = write(prompts)
    run.release()  # the GPU has room for other things now
    written = texts[:, prompts.shape[1] :]
    rewards = torch.tensor([float(len(set(text.tolist()))) for text in written])
    log_probs = model(texts).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1).gather(-1, written[..., None])
    loss = -((rewards - rewards.mean()) * log_probs.mean((1, 2))).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {run.steps_done}: loss {loss.item():.6f}, rewards {rewards.tolist()}", flush=True)
run.close()
