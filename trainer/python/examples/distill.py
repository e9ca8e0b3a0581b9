"""A small model learns from a large one, whose weights are on a drive, and answers then.

    python distill.py TEACHER STUDENT RUNS DRIVE [STEPS]     # directories of two Hugging Face models with one vocabulary; RUNS is made

Kill it at any time and start it again: the teacher's weights are found on the drive, and the student resumes after its last committed step.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import offloadd

if len(sys.argv) < 5:
    sys.exit("usage: python distill.py TEACHER STUDENT RUNS DRIVE [STEPS]")
teacher_dir, student_dir, runs, drive = sys.argv[1:5]
steps = int(sys.argv[5]) if len(sys.argv) > 5 else 20
config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": drive}}}

teacher = AutoModelForCausalLM.from_pretrained(teacher_dir).eval()
student = AutoModelForCausalLM.from_pretrained(student_dir)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
offloadd.prepare(teacher, None, config, run_dir=Path(runs) / "teacher")
run = offloadd.prepare(student, optimizer, config, run_dir=Path(runs) / "student")

torch.manual_seed(0)
vocabulary = student.config.vocab_size
data = [torch.randint(4, vocabulary, (4, 12)) for _ in range(steps)]
for ids in run.batches(data):
    with torch.no_grad():
        target = teacher(input_ids=ids).logits.softmax(-1)
    loss = F.kl_div(student(input_ids=ids).logits.log_softmax(-1), target, reduction="batchmean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {run.steps_done}: loss {loss.item():.6f}", flush=True)
student.eval()
print("answers", student.generate(input_ids=data[0][:1], max_new_tokens=8, do_sample=False)[0].tolist())
run.close()
