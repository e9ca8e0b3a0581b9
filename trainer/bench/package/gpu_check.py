#!/usr/bin/env python3
"""Checks the Python package on a machine with a GPU, in one command, and leaves a log.

    trainer/bench/package/gpu_check.py bits tiers

Without names all parts but speed, and ranks only where there are two GPUs:

bits        losses, gradients and norms against plain PyTorch's on the GPU, deterministic algorithms, equal bits
pressure    a GPU that lags behind the host, orders that change: memory that is used again too early shows as other bits
tiers       none, cpu, nvme, immediate and deferred: equal losses and weights
resident    weights that stay on the GPU, all of them and where only some have room: the same bits, and fewer units come
inputs      inputs of checkpointed blocks that wait in host memory: the same bits, and less GPU memory
chunks      MLPs in chunks of tokens: the same bits wherever the state is, losses near those of whole MLPs, and less GPU memory
fp8         products of Linear layers in 8 bits: the same bits wherever the state is, losses near bf16's, and milliseconds of wide layers
muon        matrices of blocks by Muon: the same bits wherever the state is, losses near torch.optim.Muon's
scaler      autocast with fp16 and GradScaler, the same with and without offload
habits      weights and gradients that a script reads and changes, the optimizer's state saved and loaded, random numbers of a loop that skips
            by itself, a model that is given back
accelerate  Accelerate's bf16 and fp16 with a prepared model: the losses, and the time and memory, of Accelerate without
resume      a script that is killed and started again ends with the bits of an unbroken one
ranks       two processes on two GPUs: the bits of one where their batches are equal, close to one where each has half of a batch, killed
            and resumed, one that is lost, and orders that differ
hf_trainer  Hugging Face's Trainer with a DeepSpeed JSON below `offloadd-run --nproc N` on all GPUs, killed and resumed: the same bits
speed       rows of trainer/bench/table.py: this package, the native trainer, FSDP2, DeepSpeed, in host memory and on drives (root)

Needs torch with CUDA and transformers, the extension (`make python`), and the programs in --bin: offloadd; for speed also trainer and
bench-io.
"""

import argparse
import contextlib
import copy
import gc
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

# Before CUDA starts: deterministic products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/python"), str(HERE.parent)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import offloadd  # noqa: E402
import watch  # noqa: E402
from offloadd import _residency  # noqa: E402

SPEED_ROWS = (
    "host-checkpointed", "client-host", "client-host-compiled", "fsdp-cpu-prefetch", "deepspeed-cpu", "deepspeed-cpu-zero2",
    "nvme1", "client-nvme1", "deepspeed-nvme1", "nvme4", "client-nvme4", "client-nvme4-compiled", "deepspeed-nvme4",
)  # fmt: skip


class Failed(Exception):
    """What differs."""


def check(holds, what):
    if not holds:
        raise Failed(what)


class Checks:
    def __init__(self, out, programs, device):
        self.out, self.programs, self.device = out, programs, device

    def config(self, tier, gradients=None, **own):
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.out, prefix=f"{tier}-"))
        return {
            "zero_optimization": {"offload_param": {"device": tier, "nvme_path": str(directory)}},
            "offloadd": {"program": str(self.programs / "offloadd"), **own},
            **({"data_types": {"grad_accum_dtype": gradients}} if gradients else {}),
        }, directory / "run"

    def prepare(self, model, optimizer, tier, **own):
        config, run_dir = self.config(tier, **own)
        return offloadd.prepare(model, optimizer, config, run_dir=run_dir)

    def llama(self, dtype, checkpointing=None, dropout=0.0, width=256):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=2048,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=6,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
            use_cache=False,
            attention_dropout=dropout,
            attn_implementation="eager",
        )
        model = LlamaForCausalLM(config).to(self.device, dtype).train()
        if checkpointing:
            reentrant = checkpointing == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        return model

    def tokens(self, number, rows=4):
        generator = torch.Generator().manual_seed(number)
        length = 128 if self.device == "cuda" else 16
        return torch.randint(0, 2048, (rows, length), generator=generator).to(self.device)

    def bits(self):
        for dtype in (torch.float32, torch.bfloat16):
            for checkpointing in (None, "not reentrant", "reentrant"):
                plain = self.llama(dtype, checkpointing)
                ours = self.llama(dtype, checkpointing)
                names = {id(param): name for name, param in ours.named_parameters()}
                with self.prepare(ours, torch.optim.AdamW(ours.parameters()), "cpu") as run:
                    memory, units, came = run.engine.gathering.memory, run.engine.gathering.units, {}
                    gradient_buffer, hand_over = memory.gradient_buffer, memory.hand_over

                    def buffer_of(unit):
                        came[unit.index] = gradient_buffer(unit)
                        return came[unit.index]

                    def hand_over_and_keep(unit):
                        came[unit.index] = came[unit.index].clone()
                        hand_over(unit)

                    memory.gradient_buffer, memory.hand_over = buffer_of, hand_over_and_keep
                    for step in range(4):
                        batch = self.tokens(step)
                        plain.zero_grad(), ours.zero_grad()
                        torch.manual_seed(step)
                        expected = plain(input_ids=batch, labels=batch).loss
                        expected.backward()
                        torch.manual_seed(step)
                        loss = ours(input_ids=batch, labels=batch).loss
                        loss.backward()
                        where = f"{dtype}, checkpointing {checkpointing}, step {step}"
                        check(torch.equal(loss, expected), f"{where}: loss {loss.item()} and {expected.item()}")
                        gradients = {name: param.grad for name, param in plain.named_parameters()}
                        for unit in units:
                            for param, offset in zip(unit.params, unit.offsets):
                                found, wanted = unit.view_of(came[unit.index], param, offset), gradients[names[id(param)]]
                                check(torch.equal(found, wanted.to(found.dtype)), f"{where}: gradient of {names[id(param)]}")
                                square_sum = run.engine.gradients.square_sums[id(param)]
                                close = abs(square_sum - wanted.double().square().sum().item()) <= 1e-9 * square_sum
                                check(close, f"{where}: sum of squares of {names[id(param)]}")
                        check(not [unit.name for unit in units if unit.here or unit.expected], f"{where}: units stay")
                    print(f"  {where}: same bits; deviations {run.engine.gathering.order.deviations}", flush=True)

    def pressure(self):
        """Blocks that take the GPU 5 ms, while the host runs on; each product of stale or overwritten weights has other bits."""

        class Slow(nn.Module):
            def __init__(self, device):
                super().__init__()
                self.linear = nn.Linear(1024, 1024, device=device)

            def forward(self, x):
                if x.is_cuda:
                    torch.cuda._sleep(10_000_000)
                return torch.tanh(self.linear(x))

        class Net(nn.Module):
            def __init__(self, device):
                super().__init__()
                self.blocks = nn.ModuleList(Slow(device) for _ in range(8))
                self.head = nn.Linear(1024, 1, device=device)

            def forward(self, x, order):
                for number in order:
                    x = self.blocks[number](x)
                return self.head(x).sum()

        for fraction in (0, 0.5, 1, "auto"):
            self.press(Net, fraction)

    def press(self, make, fraction):
        """Trains a model of which so much stays on the GPU."""
        torch.manual_seed(3)
        kept = make(self.device)
        moved = copy.deepcopy(kept)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (kept, moved)]
        rng = random.Random(4)
        # The same update on both sides: AdamW's sums differ in their last bits from PyTorch's, and these losses double that each step.
        with self.prepare(kept, optimizers[0], "none"), self.prepare(moved, optimizers[1], "cpu", gpu_resident_fraction=fraction) as run:
            for step in range(40):
                order = list(range(8)) if step % 4 else [rng.randrange(8) for _ in range(rng.randrange(1, 10))]
                losses = []
                for model, optimizer in zip((kept, moved), optimizers):
                    torch.manual_seed(step)
                    x = torch.randn(64, 1024, device=self.device)
                    # The host is ahead of the GPU by the whole pass here.
                    loss = model(x, order)
                    loss.backward()
                    losses.append(loss.detach())
                    optimizer.step()
                    optimizer.zero_grad()
                check(torch.equal(*losses), f"{fraction} stays, step {step}: {losses[1].item()}, and {losses[0].item()} with device none")
            peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
            print(f"  {fraction} stays: 40 steps, peak {peak >> 20} MiB, deviations {run.engine.gathering.order.deviations}", flush=True)

    def muon(self):
        def train(model, optimizers):
            found = []
            for step in range(6):
                batch = self.tokens(step)
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                found.append(loss.item())
            return found

        def parts(model):
            matrices = [param for name, param in model.named_parameters() if "layers" in name and param.dim() == 2]
            return matrices, [param for param in model.parameters() if all(param is not one for one in matrices)]

        for dtype in (torch.float32, torch.bfloat16):
            plain = self.llama(dtype, "not reentrant")
            matrices, rest = parts(plain)
            expected = train(plain, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)])
            found = {}
            for tier, own in (
                ("none", {}), ("cpu", {"gpu_resident_fraction": 0}), ("cpu", {"gpu_resident_fraction": 0.5}), ("nvme", {"optimizer_step": "deferred"}),
            ):  # fmt: skip
                ours = self.llama(dtype, "not reentrant")
                matrices, rest = parts(ours)
                optimizer = offloadd.optim.Muon([{"params": rest, "use_muon": False, "lr": 1e-3}, {"params": matrices}], lr=1e-2)
                with self.prepare(ours, optimizer, tier, **own):
                    found[f"{tier} {own}"] = train(ours, [optimizer]), digest(ours)
            first = next(iter(found.values()))
            check(all(one == first for one in found.values()), f"{dtype}: other bits: {found}")
            apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(first[0], expected))
            check(apart < (1e-3 if dtype == torch.float32 else 1e-2), f"{dtype}: losses are {apart:.1e} apart: {first[0]} and {expected}")
            print(f"  {dtype}: same bits in {len(found)} places, losses {apart:.1e} from torch.optim.Muon's", flush=True)

    def trained(self, tier, dtype, steps=8, **own):
        model = self.llama(dtype, "not reentrant", dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        with self.prepare(model, optimizer, tier, **own):
            torch.manual_seed(9)
            for step in range(steps):
                for part in range(1 + step % 2):
                    batch = self.tokens(10 * step + part)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    found.append(loss.item())
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            return found, digest(model)

    def ranks(self):
        if self.device == "cuda":
            check(torch.cuda.device_count() > 1, f"{torch.cuda.device_count()} GPU; two ranks need two")
        tiers = (
            ("none", "immediate", 0.0, 0), ("cpu", "immediate", 0.0, 0), ("cpu", "deferred", 0.5, "auto"), ("nvme", "immediate", 0.5, 0.5),
            ("nvme", "deferred", 0.0, 1),
        )  # fmt: skip
        for dtype in ("float32", "bfloat16"):
            ((one,),) = self.found_by(1, "work_batches", [(*tiers[0], dtype, False)])
            cases = [(*tier, dtype, halves) for tier in tiers for halves in (False, True)]
            lefts, rights = self.found_by(2, "work_batches", cases)
            for case, left, right in zip(cases, lefts, rights):
                where, halves = ", ".join(map(str, case[:5])), case[5]
                check(left["norms"] == right["norms"] and left["digest"] == right["digest"], f"{where}: the ranks differ")
                if not halves:
                    check(left["losses"] == one["losses"] and left["digest"] == one["digest"], f"{where}: other bits than one rank: {left} and {one}")
                    continue
                # With device none.
                first = lefts[1]
                check((left["losses"], left["digest"]) == (first["losses"], first["digest"]), f"{where}: other bits than with device none")
                means = [(a + b) / 2 for a, b in zip(left["losses"], right["losses"])]
                apart = max(abs(a - b) / b for a, b in zip(means, one["losses"]))
                check(apart < (1e-5 if dtype == "float32" else 1e-2), f"{where}: losses of halves are {apart:.1e} apart")
                print(f"  {where}: two ranks have the bits of one; halves {apart:.1e} apart", flush=True)
        self.ranks_resume()
        self.ranks_apart()

    def habits(self):
        def close(found, expected, what):
            check(torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-6), f"{what}: {(found - expected).abs().max()} apart")

        reads = (lambda w: w.chunk(2)[1], lambda w: list(w)[3], lambda w: w.t() @ w, lambda w: w.detach().cpu(), lambda w: torch.sort(w)[0])
        plain, ours = self.llama(torch.float32), self.llama(torch.float32)
        theirs, optimizer = (torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3) for model in (plain, ours))
        run = self.prepare(ours, optimizer, "cpu")
        for step in range(4):
            for model in (plain, ours):
                batch = self.tokens(step)
                model(input_ids=batch, labels=batch).loss.backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                model.lm_head.weight.grad[5:9].mul_(0.5)
            for name, param in plain.named_parameters():
                close(ours.get_parameter(name).grad.clone(), param.grad, f"gradient of {name}")
            for one in (theirs, optimizer):
                one.step()
                one.zero_grad()
            weights = [model.model.layers[3].mlp.up_proj.weight for model in (plain, ours)]
            for number, read in enumerate(reads):
                close(*(read(weight) for weight in reversed(weights)), f"reading {number}")
        for param, state in theirs.state.items():
            name = next(name for name, one in plain.named_parameters() if one is param)
            close(optimizer.state[ours.get_parameter(name)]["exp_avg_sq"].to(self.device), state["exp_avg_sq"], f"variance of {name}")
        saved = [ours.state_dict(), optimizer.state_dict()]
        batch = self.tokens(9)

        def losses(model, optimizer):
            found = []
            for _ in range(3):
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        expected = losses(ours, optimizer)
        again = self.llama(torch.float32)
        loaded = torch.optim.AdamW(again.parameters(), lr=1e-3, eps=1e-3)
        with self.prepare(again, loaded, "nvme") as other:
            again.load_state_dict(saved[0])
            loaded.load_state_dict(saved[1])
            check(losses(again, loaded) == expected, "a state that was saved and loaded goes on with other losses")
            other.close(keep=False)
        run.close()
        check(all(type(param) is nn.Parameter for param in ours.parameters()), "a closed run leaves its parameters")
        moved = ours.to(self.device)
        for state in optimizer.state.values():
            state.update({name: value.to(self.device) for name, value in state.items() if name != "step"})
        check(all(map(math.isfinite, losses(moved, optimizer))), "a model that was given back")
        torch.func.grad(lambda x: plain(inputs_embeds=x).logits.sum())(plain.get_input_embeddings()(batch).detach())
        self.skipping()

    def skipping(self):
        """A loop that skips by `run.steps_done`, with dropout on the GPU."""

        def train(run_dir, config, until):
            torch.manual_seed(1)
            model = self.llama(torch.float32, dropout=0.1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
            found = []
            with offloadd.prepare(model, optimizer, config, run_dir=run_dir) as run:
                for number in range(run.steps_done, until):
                    batch = self.tokens(number)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.item())
                run.close(keep=False)
            return found

        whole = train(*reversed(self.config("nvme")), 6)
        config, run_dir = self.config("nvme")
        began = train(run_dir, config, 3)
        torch.rand(99, device=self.device)
        check(began + train(run_dir, config, 6) == whole, "a loop that skips by itself draws other numbers")

    def accelerate(self):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from transformers import LlamaConfig, LlamaForCausalLM

        wide = self.device == "cuda"
        config = LlamaConfig(
            vocab_size=8192 if wide else 64,
            hidden_size=2048 if wide else 32,
            intermediate_size=5504 if wide else 64,
            num_hidden_layers=8 if wide else 3,
            num_attention_heads=16 if wide else 4,
            use_cache=False,
        )
        for precision in ("bf16", "fp16"):
            rows = {}
            for offload in (False, True):
                AcceleratorState._reset_state(True)
                torch.manual_seed(0)
                accelerator = Accelerator(mixed_precision=precision, cpu=not wide)
                model = LlamaForCausalLM(config).to(self.device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-5)
                run = self.prepare(model, optimizer, "cpu") if offload else None
                wrapped, stepping = accelerator.prepare(model, optimizer)
                found, times = [], []
                for number in range(8):
                    batch = torch.randint(0, config.vocab_size, (8, 1024 if wide else 16), generator=torch.Generator().manual_seed(number)).to(self.device)
                    began = time.perf_counter()
                    loss = wrapped(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    stepping.step()
                    stepping.zero_grad()
                    found.append(loss.item())
                    times.append(time.perf_counter() - began)
                memory = torch.cuda.max_memory_allocated() / 2**30 if wide else 0.0
                rows[offload] = found, sorted(times)[len(times) // 2], memory
                if run is not None:
                    run.close(keep=False)
                del model, wrapped, stepping, optimizer, accelerator, run
                gc.collect()
                if wide:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
            apart = max(abs(a - b) / abs(b) for a, b in zip(rows[True][0], rows[False][0]))
            told = ", ".join(f"{name} {rows[key][1]:.3f} s a step, {rows[key][2]:.1f} GiB" for key, name in ((False, "plain"), (True, "offloaded")))
            check(apart < 5e-3, f"{precision}: losses are {apart:.1e} apart: {rows[True][0]} and {rows[False][0]}")
            print(f"  {precision}: {told}; losses {apart:.1e} apart", flush=True)

    def ranks_apart(self):
        """A rank that is lost, and orders that differ."""
        began = time.monotonic()
        (status, _), (lost, _) = self.on_ranks(2, "work_lose", log="lost")
        check(status not in (0, -signal.SIGKILL) and lost == -signal.SIGKILL, f"a lost rank: {status}, {lost}")
        text = (self.out / "lost-0.log").read_text()
        check("rank 1 (process" in text, f"it does not name the lost rank: {text[-400:]}")
        print(f"  a lost rank is named, and the other one ended; {time.monotonic() - began:.1f} s with the start", flush=True)
        found = self.on_ranks(2, "work_differ", log="differ")
        check(all(status not in (0, None) for status, _ in found), f"orders that differ: {found}")
        for rank in range(2):
            text = (self.out / f"differ-{rank}.log").read_text()
            check("OrderDiffers" in text and "forward without gradients" in text, f"rank {rank} is not told: {text[-400:]}")
        print("  ranks whose orders differ are told so", flush=True)

    def found_by(self, count, work, *words):
        """What each rank has found, all of which must end in order."""
        ended = self.on_ranks(count, work, *words)
        check(all(status == 0 for status, _ in ended), f"{work}: exit statuses {[status for status, _ in ended]}")
        return [found for _, found in ended]

    def ranks_resume(self):
        whole, _ = self.found_by(2, "work_killed", "ranks-whole", 0)
        cut = self.on_ranks(2, "work_killed", "ranks-cut", 7)
        check([status for status, _ in cut] == [-signal.SIGKILL] * 2, f"killed ranks: {cut}")
        resumed, _ = self.found_by(2, "work_killed", "ranks-cut", 0)
        check(resumed["began"] in (5, 6), f"it resumes after step {resumed['began']}")
        check(resumed["digest"] == whole["digest"], "other bits after resuming")
        print(f"  killed in step 7, resumed after step {resumed['began']}: same bits", flush=True)

    def on_ranks(self, count, work, *words, log=None):
        """The exit statuses of ranks that did `work`, and what each has found."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(count):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            result = self.out / f"rank-{rank}.json"
            result.unlink(missing_ok=True)
            command = [sys.executable, __file__, "--out", self.out, "--bin", self.programs, "--work", json.dumps([work, *words])]
            with open(self.out / f"{log}-{rank}.log", "w") if log else open(os.devnull) as told:
                children.append(subprocess.Popen([str(word) for word in command], env=env, stderr=told if log else None))
        found = []
        for rank, child in enumerate(children):
            try:
                child.wait(timeout=240)
            except subprocess.TimeoutExpired:
                child.kill()
                raise Failed(f"{work}: rank {rank} hangs") from None
            result = self.out / f"rank-{rank}.json"
            found.append((child.returncode, json.loads(result.read_text()) if result.exists() else None))
        return found

    def work(self, work, *words):
        """One rank's part of `on_ranks`."""
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        found = getattr(self, work)(rank, count, *words)
        (self.out / f"rank-{rank}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()

    def shared_config(self, rank, tier, name, **own):
        """The same on all ranks."""
        directory = self.out / name
        if rank == 0:
            directory.mkdir(exist_ok=True)
        torch.distributed.barrier()
        return {
            "zero_optimization": {"offload_param": {"device": tier, "nvme_path": str(directory)}},
            "offloadd": {"program": str(self.programs / "offloadd"), **own},
        }, directory / "run"

    def work_batches(self, rank, count, cases):
        """Losses, norms and weights of each case."""
        return [self.batches(rank, count, f"batches-{case[4]}-{count}-{index}", *case) for index, case in enumerate(cases)]

    def batches(self, rank, count, name, tier, step, fraction, stay, dtype, halves, **own):
        """Six steps of one or two micro-batches each, of which a rank has its part (`halves`) or the whole. `own` are further settings."""
        config, run_dir = self.shared_config(rank, tier, name, optimizer_step=step, resident_fraction=fraction, gpu_resident_fraction=stay, **own)
        model = self.llama(getattr(torch, dtype), "not reentrant")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        losses, norms = [], []
        with offloadd.prepare(model, optimizer, config, run_dir=run_dir, resume=False) as run:
            for number in range(6):
                for part in range(1 + number % 2):
                    batch = self.tokens(10 * number + part)
                    batch = batch.chunk(count)[rank] if halves else batch
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    losses.append(loss.item())
                # Sums of squares differ in their last bits with the number of ranks: nothing is clipped.
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
                optimizer.step()
                optimizer.zero_grad()
            return {"losses": losses, "norms": norms, "digest": digest(model), "node_copies": run.ranks.transfers.copies is not None}

    def work_killed(self, rank, count, name, kill_in):
        """Trains with dropout of each rank's own; all ranks end at once in the backward of step `kill_in`."""
        config, run_dir = self.shared_config(rank, "nvme", name)
        model = self.llama(torch.bfloat16, "not reentrant", dropout=0.2)
        number = 0
        model.model.layers[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if number + 1 == kill_in else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(rank)
        with offloadd.prepare(model, optimizer, config, run_dir=run_dir) as run:
            began = run.steps_done
            for number in run.batches(range(12)):
                batch = self.tokens(2 * number + rank)
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return {"began": began, "digest": digest(model)}

    def work_lose(self, rank, count):
        """The second rank dies in its third forward; the first is in a collective operation on the GPU or before one."""
        return self.diverge(rank, "ranks-lose", lambda step: os.kill(os.getpid(), signal.SIGKILL) if (rank, step) == (1, 2) else None)

    def work_differ(self, rank, count):
        """The second rank evaluates a batch that the first one does not."""

        def evaluate(step, model):
            if (rank, step) == (1, 2):
                with torch.no_grad():
                    model(input_ids=self.tokens(0))

        return self.diverge(rank, "ranks-differ", lambda step: None, evaluate)

    def diverge(self, rank, name, in_forward, before=lambda step, model: None):
        config, run_dir = self.shared_config(rank, "cpu", name)
        model, step = self.llama(torch.bfloat16), 0
        model.model.layers[3].register_forward_hook(lambda *_: in_forward(step))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with offloadd.prepare(model, optimizer, config, run_dir=run_dir):
            for step in range(5):
                before(step, model)
                batch = self.tokens(step)
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    def tiers(self):
        for dtype, gradients in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "bf16"), (torch.float16, None)):
            expected = self.trained("none", dtype, optimizer_step="immediate", gradients=gradients)
            for tier, step, fraction, stay in (
                ("cpu", "immediate", 0.0, 0), ("cpu", "deferred", 0.0, 0.5), ("nvme", "immediate", 0.5, 1), ("nvme", "deferred", 0.0, "auto"),
            ):  # fmt: skip
                found = self.trained(tier, dtype, optimizer_step=step, resident_fraction=fraction, gpu_resident_fraction=stay, gradients=gradients)
                where = f"{dtype}, gradients {gradients or 'fp32'}, {tier}, {step}, resident {fraction}, on the GPU {stay}"
                first = next((i for i, (a, b) in enumerate(zip(expected[0], found[0])) if a != b), None)
                check(found == expected, f"{where}: number {first} of losses and norms, or the weights, differ: {expected[0][:8]} and {found[0][:8]}")
                print(f"  {where}: same bits", flush=True)

    def resident(self):
        """A GPU on which only some blocks have room: they stay, and go when batches become larger."""
        on_gpu = self.device == "cuda"
        # Of a small model.
        margin, _residency._MARGIN_BYTES = _residency._MARGIN_BYTES, 96 << 20
        try:
            for frozen in (False, True):
                kind, plain, most = "frozen" if frozen else "trained", self.stays(frozen, "none", 0), None
                for fraction in (0, 1, "auto"):
                    found = self.stays(frozen, "cpu", fraction)
                    self.compare_stays(f"{kind}, {fraction}", plain, found)
                    # Without units that stay: the first fraction's.
                    most = most or found["came"][2]
                    fewer = found["came"][2] < (12 if frozen else 2 * most // 3) if fraction else True
                    check(fewer or not on_gpu, f"{kind}, {fraction} stays: units that came in steps: {found['came']}")
                if on_gpu:
                    # Less and less room, because what the allocator keeps between tensors is known only when it does.
                    for blocks in range(4, -3, -1):
                        left_bytes = found["peak_bytes"] + found["engine_bytes"] + (96 << 20) + blocks * found["block_bytes"]
                        scarce = self.stays(frozen, "cpu", "auto", left_bytes)
                        self.compare_stays(f"{kind}, auto in room for {blocks} blocks", plain, scarce)
                        levels = scarce["levels"]
                        if some_stay := 0 < levels[2] < found["levels"][2] and levels[-1] < levels[2]:
                            break
                    check(some_stay, f"{kind}: in no room did some blocks stay, and fewer with larger inputs; at last {levels}")
        finally:
            _residency._MARGIN_BYTES = margin

    @staticmethod
    def compare_stays(where, plain, found):
        check(found["losses"] == plain["losses"], f"{where}: {found['losses']} and {plain['losses']} with device none")
        print(f"  {where}: same bits; levels {found['levels']}, units that came {found['came']}", flush=True)

    def stays(self, frozen, tier, fraction, left_bytes=None):
        """What seven steps of two batches find, the last two of them larger: losses, the level after each step, and the units that came in it. The GPU
        has `left_bytes` for it, or all."""
        # Blocks that are larger than the pieces in which PyTorch asks for memory.
        model = self.llama(torch.bfloat16, "not reentrant", width=1024 if self.device == "cuda" else 256)
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or "norm" in name)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3, eps=1e-3)
        losses, levels, came, peak_bytes, engine_bytes, ballast = [], [], [], 0, 0, None
        # What PyTorch does not have.
        others_bytes = lambda: -torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        with self.prepare(model, optimizer, tier, gpu_resident_fraction=fraction) as run:
            gathering, residency = run.engine.gathering, run.engine.residency
            expect = gathering.memory.expect
            gathering.memory.expect = lambda unit: (came.__setitem__(-1, came[-1] + 1), expect(unit))
            before = run.plan.gpu.memory() if run.plan.gpu else None
            others_before = others_bytes() if before else 0
            if left_bytes:
                ballast = torch.empty(before.free_bytes - left_bytes, dtype=torch.uint8, device=self.device)
            for step in range(7):
                came.append(0)
                for part in range(2):
                    batch = self.tokens(10 * step + part, rows=12 if step > 4 else 4)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    losses.append(loss.item())
                if step == 0 and before:
                    peak_bytes = run.plan.gpu.memory().used_max_bytes - before.used_bytes
                optimizer.step()
                optimizer.zero_grad()
                if step == 4 and before:
                    engine_bytes = others_bytes() - others_before
                levels.append(residency.level if residency else 0)
            block_bytes = max(unit.bytes for unit in gathering.units if not unit.root)
        del ballast
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {"losses": losses, "levels": levels, "came": came, "peak_bytes": peak_bytes, "engine_bytes": engine_bytes, "block_bytes": block_bytes}

    def inputs(self):
        """Inputs of checkpointed blocks that wait in host memory and on drives: the same bits, and less GPU memory."""
        for checkpointing in ("not reentrant", "reentrant"):
            kept = self.peaked(checkpointing, "cpu", activations="gpu")
            for tier, own in (("cpu", {"activations": "cpu"}), ("nvme", {"activations": "nvme", "activations_bytes": "1GiB"})):
                moved, what = self.peaked(checkpointing, tier, **own), f"{checkpointing}, {tier}"
                check(moved[0] == kept[0], f"{what}: losses, norms and weights {moved[0]} and {kept[0]} with inputs on the GPU")
                check(moved[1] < kept[1] or self.device == "cpu", f"{what}: a peak of {moved[1]} bytes, and {kept[1]} with inputs on the GPU")
                print(f"  {what}: same bits; peak {moved[1]:,} of {kept[1]:,} bytes", flush=True)

    def chunks(self):
        """MLPs and losses in chunks of tokens: the same bits wherever the state is and each time, losses near those without, and less GPU memory."""
        whole = self.peaked(None, "cpu")
        for key in ("mlp_chunks", "loss_chunks"):
            own = {key: 8}
            found = {tier: self.peaked(None, tier, **own) for tier in ("none", "cpu", "nvme")}
            if key == "mlp_chunks":
                for checkpointing in ("not reentrant", "reentrant"):
                    found[checkpointing] = self.peaked(checkpointing, "cpu", activations="cpu", **own)
            for name, one in found.items():
                check(one[0] == found["none"][0], f"{key}, {name}: losses, norms and weights {one[0]} and {found['none'][0]} without offload")
            near = max(abs(a / b - 1) for a, b in zip(found["none"][0][:-1], whole[0]))
            check(near < 0.02, f"{key}: losses and norms {found['none'][0]} in chunks and {whole[0]} without")
            check(found["cpu"][1] < whole[1] or self.device == "cpu", f"{key}: a peak of {found['cpu'][1]} bytes, and {whole[1]} without")
            print(f"  {key}: same bits; losses and norms within {near:.2%} of those without; peak {found['cpu'][1]:,} of {whole[1]:,} bytes", flush=True)

    def peaked(self, checkpointing, tier, **own):
        """Losses, norms and weights of some steps, and the peak of GPU memory."""
        model = self.llama(torch.bfloat16, checkpointing, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found, peak = [], 0
        with self.prepare(model, optimizer, tier, gpu_resident_fraction=0, **own):
            torch.manual_seed(9)
            for step in range(5):
                if self.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                for part in range(1 + step % 2):
                    batch = self.tokens(10 * step + part, rows=64 if self.device == "cuda" else 4)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    found.append(loss.item())
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
                peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
            found.append(digest(model))
        return found, peak

    def fp8(self):
        """Products in 8 bits: the same bits wherever the state is and each time, losses near those of bf16; and how long a wide layer takes."""
        from offloadd import _fp8

        _fp8.SIDE_MIN = 16
        if self.device == "cpu":
            _fp8.why_not = lambda device: None
        found = {}
        for name, tier, matmuls in (
            ("bf16", "none", "dtype"),
            ("none", "none", "fp8"),
            ("again", "none", "fp8"),
            ("PyTorch's operators", "none", "fp8"),
            ("cpu", "cpu", "fp8"),
            ("nvme", "nvme", "fp8"),
        ):
            model = self.llama(torch.bfloat16, "not reentrant")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            converters = mock.patch.object(_fp8, "_converter_for", lambda x: None) if "PyTorch" in name else contextlib.nullcontext()
            with converters, self.prepare(model, optimizer, tier, matmuls=matmuls):
                losses = []
                for step in range(5):
                    batch = self.tokens(step)
                    loss = model(input_ids=batch, labels=batch).loss
                    loss.backward()
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
                found[name] = losses, digest(model)
        own = found.pop("bf16")[0]
        for name, (losses, weights) in found.items():
            check((losses, weights) == found["none"], f"{name}: {losses}, and {found['none'][0]} without offload")
        near = [abs(a / b - 1) for a, b in zip(found["none"][0], own)]
        check(max(near) < 0.05 and found["none"][0] != own, f"losses in 8 bits {found['none'][0]} and in bf16 {own}")
        print(f"  same bits; losses within {max(near):.2%} of bf16", flush=True)
        if self.device == "cuda":
            self.fp8_speed(_fp8)

    def fp8_speed(self, fp8):
        """Milliseconds of forward and backward of a layer, eager and compiled."""
        for width in (2048, 4096, 8192):
            layer = torch.nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16, device="cuda")
            x = torch.randn(16384, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            line = []
            for name, call in (
                ("bf16", layer),
                ("fp8", lambda x, layer=layer: fp8._forward(layer, x)),
                ("fp8, compiled", torch.compile(lambda x, layer=layer: fp8._forward(layer, x))),
            ):
                grad = torch.randn_like(call(x))
                for _ in range(3):
                    call(x).backward(grad)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(10):
                    call(x).backward(grad)
                end.record()
                torch.cuda.synchronize()
                line.append(f"{name} {begin.elapsed_time(end) / 10:.2f} ms")
            print(f"  16,384 x {width} x {4 * width}: {', '.join(line)}", flush=True)

    def scaler(self):
        def run(tier):
            model = self.llama(torch.float32, "not reentrant")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            scaler, losses = torch.amp.GradScaler(self.device), []
            with self.prepare(model, optimizer, tier):
                for _ in range(6):
                    batch = self.tokens(0)
                    with torch.autocast(self.device, dtype=torch.float16):
                        loss = model(input_ids=batch, labels=batch).loss
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                return losses, digest(model)

        expected, found = run("none"), run("cpu")
        check(found == expected, f"{expected} and {found}")
        check(expected[0][-1] < expected[0][0], f"it does not learn: {expected[0]}")

    def resume(self):
        def start(name):
            command = [sys.executable, __file__, "--out", self.out, "--bin", self.programs, "--train", self.out / name]
            return subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)

        def lines(name, kill_at=None):
            process, found = start(name), []
            for line in process.stdout:
                found.append(line.strip())
                if len(found) == kill_at:
                    process.send_signal(signal.SIGKILL)
            check(process.wait() == (-signal.SIGKILL if kill_at else 0), f"status {process.returncode}: {found[-3:]}")
            return found

        whole = lines("whole")
        found = []
        for kill_at in (7, 9, None):
            found.append(lines("cut", kill_at))
            print(f"  {found[-1][0]}, then {len(found[-1]) - 1} lines", flush=True)
        check(found[-1][0] != "resumed 0", "it did not resume")
        check(found[-1][-1] == whole[-1], f"weights differ: {found[-1][-1]} and {whole[-1]}")
        different = set(sum((part[1:] for part in found), [])) - set(whole)
        check(not different, f"steps with other losses: {sorted(different)[:4]}")

    def train(self, directory):
        """The script of `resume`: dropout draws from the GPU's generator."""
        directory.mkdir(exist_ok=True)
        model = self.llama(torch.bfloat16, "not reentrant", dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config, _ = self.config("nvme")
        config["zero_optimization"]["offload_param"]["nvme_path"] = str(directory)
        with offloadd.prepare(model, optimizer, config, run_dir=directory / "run", track=[scheduler]) as run:
            print("resumed", run.steps_done, flush=True)
            for number in run.batches(range(24)):
                batch = self.tokens(number)
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                print("step", run.steps_done, loss.item().hex(), flush=True)
            print("weights", digest(model), flush=True)

    def hf_trainer(self):
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        script = HERE.parents[1] / "python/tests/scripts/hf_trainer.py"
        python = str(HERE.parents[1] / "python/python")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [python, os.environ.get("PYTHONPATH")]))}

        def lines(name, kill_at=None):
            directory = self.out / name
            directory.mkdir(exist_ok=True)
            config = {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(directory)}},
                "offloadd": {"program": str(self.programs / "offloadd")},
            }
            command = [sys.executable, "-m", "offloadd.launch", "--nproc", count, script, directory, json.dumps(config), "--deepspeed"]
            child = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
            found = set()
            for line in child.stdout:
                found.add(line.strip())
                if line.strip() == kill_at:
                    # The ranks are sessions of their own below torchrun.
                    for pid in watch.members(child.pid):
                        os.kill(pid, signal.SIGKILL)
            status = child.wait()
            check(status == (-signal.SIGKILL if kill_at else 0), f"status {status}: {sorted(found)[-5:]}")
            return found

        whole = lines("hf-trainer-whole")
        lines("hf-trainer-cut", "step 5")
        resumed = lines("hf-trainer-cut")
        began = [line for line in resumed if line.startswith("resumed")]
        check(began and began != ["resumed 0"], f"it did not resume: {began}")
        last = lambda found: sorted(line for line in found if line.startswith("done"))
        check(len(last(whole)) == 1 and last(resumed) == last(whole), f"weights differ: {last(whole)} and {last(resumed)}")
        different = {line for line in resumed if line.startswith("loss")} - whole
        check(not different, f"steps with other losses: {sorted(different)[:4]}")
        print(f"  {count} processes: {began[0]}, then the same losses and weights", flush=True)

    def speed(self):
        command = [sys.executable, HERE.parent / "table.py", "--bin", self.programs, "--out", self.out / "table", *SPEED_ROWS]
        check(subprocess.run([str(word) for word in command]).returncode == 0, f"rows without a figure: see {self.out / 'table'}")


def digest(model):
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (
        "bits", "pressure", "tiers", "resident", "inputs", "chunks", "fp8", "muon", "scaler", "habits", "accelerate", "resume", "ranks", "hf_trainer", "speed",
    )  # fmt: skip
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/gpu-check"), help="where files and the log go")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[2] / "target/debug", help="where the programs are")
    parser.add_argument("--cpu", action="store_true", help="tries this script itself on the processor's path")
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    device = "cpu" if args.cpu or os.environ.get("GPU_CHECK_ON_CPU") else "cuda"
    if device == "cpu":
        os.environ["GPU_CHECK_ON_CPU"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("gpu_check.py: torch finds no GPU here; --cpu tries the script itself")
    torch.use_deterministic_algorithms(True)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    checks = Checks(args.out, args.bin.resolve(), device)
    if args.train:
        return checks.train(args.train)
    if args.work:
        return checks.work(*args.work)
    # Everything that is printed here and by children goes to the log too.
    log = subprocess.Popen(["tee", str(args.out / "log.txt")], stdin=subprocess.PIPE)
    os.dup2(log.stdin.fileno(), 1), os.dup2(log.stdin.fileno(), 2)
    name = torch.cuda.get_device_name() if device == "cuda" else "the processor"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    failed = []
    alone = device == "cuda" and torch.cuda.device_count() < 2
    for part in args.parts or [part for part in parts[:-1] if part != "ranks" or not alone]:
        print(f"== {part}", flush=True)
        began = time.monotonic()
        try:
            getattr(checks, part)()
        except Exception as error:
            if not isinstance(error, Failed):
                traceback.print_exc()
            print(f"  FAILED: {error}", flush=True)
            failed.append(part)
        else:
            print(f"  passed in {time.monotonic() - began:.1f} s", flush=True)
        for left in args.out.glob("*-*/"):
            shutil.rmtree(left, ignore_errors=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    os.close(1), os.close(2), log.stdin.close()
    log.wait()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
