"""The rows of the table: what each trains, and where its state lives.

A row is named ROW or ROW@N: N processes, one a GPU, each with the same work as the one.
"""

import json
import os
import pathlib

HERE = pathlib.Path(__file__).resolve().parent

# Llama shapes. "tiny" is for trying the script itself, on a processor.
MODELS = {
    "1.3b": {"hidden": 2048, "layers": 24, "heads": 16, "ff": 5504, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    "2.5b": {"hidden": 2560, "layers": 30, "heads": 20, "ff": 6912, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    "4b": {"hidden": 3072, "layers": 34, "heads": 24, "ff": 8192, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    "7b": {"hidden": 4096, "layers": 32, "heads": 32, "ff": 11008, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    "13b": {"hidden": 5120, "layers": 40, "heads": 40, "ff": 13824, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    # Qwen3-32B's shape without its norms of heads: 32.8 G parameters.
    "32b": {"hidden": 5120, "layers": 64, "heads": 64, "kv_heads": 8, "head_dim": 128, "ff": 25600, "vocab": 151936, "seq": 2048, "micro": 8, "threads": None},
    "70b": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ff": 28672, "vocab": 32000, "seq": 2048, "micro": 8, "threads": None},
    "tiny": {"hidden": 256, "layers": 8, "heads": 4, "ff": 704, "vocab": 256, "seq": 128, "micro": 2, "threads": 2},
}

# Bytes a second of one drive in the table: what a good drive of its time reads and writes.
DRIVE_RATES = (6_200_000_000, 3_200_000_000)

# Loop devices that stand for one drive: one copies 5 GB/s both ways together, a drive moves 9.4.
LOOP_DEVICES_PER_DRIVE = 2

NVME, CPU, NONE = "nvme", "cpu", "none"

# param and optimizer: devices. staging: host memory that tiles pass through, as the design sizes it for these drives.
ROWS = {
    "resident": {"param": NONE, "optimizer": NONE, "says": "all on the GPU, blocks computed again as memory demands (not at all here)"},
    "resident-checkpointed": {"param": NONE, "optimizer": NONE, "checkpointing": "full", "says": "all on the GPU, each block computed again in backward"},
    "host": {"param": CPU, "optimizer": CPU, "says": "all in host memory, blocks kept as GPU memory allows, update on both sides"},
    "host-gpu": {"param": CPU, "optimizer": CPU, "gpu_fraction": "auto", "says": "in GPU memory as far as it fits, the rest in host memory"},
    "host-checkpointed": {"param": CPU, "optimizer": CPU, "checkpointing": "full", "says": "all in host memory, each block computed again"},
    "host-cpu": {"param": CPU, "optimizer": CPU, "checkpointing": "full", "optimizer_device": "cpu", "says": "the same, the update on the processor alone"},
    "host-cpu-kept": {"param": CPU, "optimizer": CPU, "optimizer_device": "cpu", "says": "blocks kept as GPU memory allows, the update on the processor alone"},
    "nvme1": {"param": NVME, "optimizer": NVME, "drives": 1, "commit": 1, "staging": "1400000000", "says": "all state on one drive, nothing resident"},
    "nvme1-params-home": {
        "param": CPU,
        "optimizer": NVME,
        "drives": 1,
        "commit": 0,
        "staging": "1400000000",
        "says": "16-bit parameters in host memory, the rest on one drive",
    },
    "nvme1-params-home-commits": {"param": CPU, "optimizer": NVME, "drives": 1, "commit": 1, "staging": "1400000000", "says": "the same, committed every step"},
    "nvme4": {"param": NVME, "optimizer": NVME, "drives": 4, "commit": 1, "staging": "5000000000", "says": "all state on four drives"},
    "nvme4-params-home": {
        "param": CPU,
        "optimizer": NVME,
        "drives": 4,
        "commit": 0,
        "staging": "5000000000",
        "says": "16-bit parameters in host memory, the rest on four drives",
    },
    "nvme4-half": {
        "param": NVME,
        "optimizer": NVME,
        "drives": 4,
        "commit": None,
        "staging": "5000000000",
        "resident_fraction": 0.5,
        "says": "half of the state resident, four drives, the plan's commit interval",
    },
    "accumulate16": {
        "param": NVME,
        "optimizer": NVME,
        "drives": 1,
        "commit": 1,
        "staging": "1400000000",
        "accumulate": 16,
        "says": "all state on one drive, 16 micro-batches a step",
    },
    "largest": {
        "param": NVME,
        "optimizer": NVME,
        "drives": 1,
        "commit": None,
        "staging": "3000000000",
        "model": "2.5b",
        "resident_fraction": "auto",
        "own_drives": True,
        "says": "2.54 G parameters, committed in 61 GB of a drive that --directory names; what fits stays in host memory",
    },
    "largest-4g": {
        "param": NVME,
        "optimizer": NVME,
        "drives": 1,
        "commit": None,
        "staging": "3000000000",
        "model": "4b",
        "resident_fraction": "auto",
        "own_drives": True,
        "says": "4.05 G parameters, the same, in 97 GB of it",
    },
}

# Peers are measured in the same run, so that a ratio compares two programs on one machine. Each runs with the settings that are known to
# be good for it; where it is not known which are best, several rows have different ones, and a ratio takes the fastest.
# needs: modules of Python. words: of the peer's program. ranks: it also runs in several processes, below torchrun.
PYTORCH, FSDP, DEEPSPEED = (
    {"program": "plain_pytorch.py", "needs": ("torch",)},
    {"program": "fsdp_peer.py", "needs": ("torch", "transformers"), "ranks": True},
    {"program": "deepspeed_peer.py", "needs": ("torch", "transformers", "deepspeed"), "ranks": True},
)
PEERS = {
    "pytorch": {**PYTORCH, "words": [], "says": "plain_pytorch.py: resident, bf16 with an fp32 master, blocks checkpointed"},
    "pytorch-kept": {**PYTORCH, "words": ["--keep"], "says": "plain_pytorch.py --keep: as pytorch, blocks kept"},
    "pytorch-bf16": {
        **PYTORCH,
        "words": ["--master", "none"],
        "says": "plain_pytorch.py --master none: resident, bf16 weights and moments, no fp32 master: less to move, other results",
    },
    "pytorch-compiled": {**PYTORCH, "words": ["--compile"], "says": "plain_pytorch.py --compile: as pytorch, blocks and loss fused by torch.compile"},
    "pytorch-compiled-kept": {**PYTORCH, "words": ["--compile", "--keep"], "says": "plain_pytorch.py --compile --keep: the same, blocks kept"},
    "fsdp-gpu": {**FSDP, "words": ["gpu"], "says": "PyTorch's FSDP2, all on the GPU, blocks checkpointed"},
    "fsdp-cpu": {**FSDP, "words": ["cpu"], "says": "FSDP2 with CPUOffloadPolicy: all in host memory, blocks checkpointed, fused AdamW on the processor"},
    "fsdp-cpu-prefetch": {**FSDP, "words": ["cpu", "--prefetch", "2"], "says": "the same, two blocks gathered ahead"},
    "fsdp-cpu-kept": {**FSDP, "words": ["cpu", "--prefetch", "2", "--keep"], "says": "FSDP2 with CPUOffloadPolicy, two blocks gathered ahead, blocks kept"},
    "deepspeed-gpu": {**DEEPSPEED, "words": ["gpu"], "says": "DeepSpeed ZeRO-3, all on the GPU"},
    "deepspeed-cpu": {**DEEPSPEED, "words": ["cpu"], "says": "DeepSpeed ZeRO-3, optimizer and parameters in host memory, blocks checkpointed"},
    "deepspeed-cpu-large": {**DEEPSPEED, "words": ["cpu", "--buckets", "large"], "says": "the same with the bucket sizes of its documentation"},
    "deepspeed-cpu-kept": {**DEEPSPEED, "words": ["cpu", "--keep"], "says": "DeepSpeed ZeRO-3, optimizer and parameters in host memory, blocks kept"},
    "deepspeed-cpu-opt": {**DEEPSPEED, "words": ["cpu-opt"], "says": "DeepSpeed ZeRO-3, optimizer in host memory, blocks checkpointed"},
    "deepspeed-cpu-zero2": {**DEEPSPEED, "words": ["cpu-opt", "--stage", "2"], "says": "DeepSpeed ZeRO-2, optimizer in host memory, blocks checkpointed"},
    "deepspeed-cpu-zero2-compiled": {
        **DEEPSPEED,
        "words": ["cpu-opt", "--stage", "2", "--compile"],
        "says": "DeepSpeed ZeRO-2, optimizer in host memory, blocks checkpointed and compiled by torch.compile",
    },
    "deepspeed-super": {
        **DEEPSPEED,
        "words": ["cpu", "--super"],
        "says": "DeepSpeed's SuperOffload, optimizer and parameters in host memory; where it fails, its last error is the row",
    },
    "deepspeed-super-opt": {**DEEPSPEED, "words": ["cpu-opt", "--super"], "says": "DeepSpeed's SuperOffload, optimizer in host memory; the same"},
    "deepspeed-nvme1": {**DEEPSPEED, "words": ["nvme"], "drives": 1, "says": "DeepSpeed, optimizer and parameters on one drive"},
    "deepspeed-nvme1-opt": {**DEEPSPEED, "words": ["nvme-opt"], "drives": 1, "says": "DeepSpeed, optimizer on one drive"},
    "deepspeed-nvme4": {**DEEPSPEED, "words": ["nvme"], "drives": 4, "says": "DeepSpeed, optimizer and parameters on four drives (RAID-0)"},
    "deepspeed-nvme4-opt": {**DEEPSPEED, "words": ["nvme-opt"], "drives": 4, "says": "DeepSpeed, optimizer on four drives (RAID-0)"},
}

# The Python package on transformers' Llama: measured as a peer is, and compared with the native rows beside it.
CLIENT = {"program": "pytorch_client.py", "needs": ("torch", "transformers"), "ours": True, "ranks": True}
PEERS |= {
    "client-host": {**CLIENT, "words": ["cpu"], "says": "the Python package, all in host memory, blocks checkpointed, update on both sides"},
    "client-host-compiled": {**CLIENT, "words": ["cpu", "--compile"], "says": "the same, blocks compiled by torch.compile"},
    "client-nvme1": {**CLIENT, "words": ["nvme", "--staging", "1400000000"], "drives": 1, "says": "the Python package, all state on one drive"},
    "client-nvme4": {**CLIENT, "words": ["nvme", "--staging", "5000000000"], "drives": 4, "says": "the Python package, all state on four drives"},
    "client-nvme4-compiled": {
        **CLIENT,
        "words": ["nvme", "--staging", "5000000000", "--compile"],
        "drives": 4,
        "says": "the same, blocks compiled by torch.compile",
    },
}

# Whom a row is compared with: the fastest of them in the same run.
CHECKPOINTED = ("pytorch", "pytorch-compiled", "fsdp-gpu", "deepspeed-gpu")
HOST_CHECKPOINTED = (
    "fsdp-cpu",
    "fsdp-cpu-prefetch",
    "deepspeed-cpu",
    "deepspeed-cpu-large",
    "deepspeed-cpu-opt",
    "deepspeed-cpu-zero2",
    "deepspeed-cpu-zero2-compiled",
    "deepspeed-super",
    "deepspeed-super-opt",
)
PEERS_OF = {
    "resident": (*CHECKPOINTED, "pytorch-kept", "pytorch-compiled-kept"),
    "resident-checkpointed": CHECKPOINTED,
    **dict.fromkeys(("host", "host-cpu-kept"), (*HOST_CHECKPOINTED, "fsdp-cpu-kept", "deepspeed-cpu-kept")),
    **dict.fromkeys(("host-checkpointed", "host-cpu"), HOST_CHECKPOINTED),
    "nvme1": ("deepspeed-nvme1",),
    "nvme1-params-home": ("deepspeed-nvme1-opt",),
    "nvme1-params-home-commits": ("deepspeed-nvme1-opt",),
    "nvme4": ("deepspeed-nvme4",),
    "nvme4-params-home": ("deepspeed-nvme4-opt",),
    **dict.fromkeys(("client-host", "client-host-compiled"), HOST_CHECKPOINTED),
    "client-nvme1": ("deepspeed-nvme1",),
    **dict.fromkeys(("client-nvme4", "client-nvme4-compiled"), ("deepspeed-nvme4",)),
}

# Its losses beside plain PyTorch's, from the same weights and data.
CURVE = "losses"


def split(name):
    """ "nvme4@2" as ("nvme4", 2)."""
    row, _, ranks = name.partition("@")
    return row, int(ranks or 1)


def run_file(row, model, *, data, directory, nvme_paths, steps, seed=1, lr=1e-4, ranks=1):
    """The run as TOML."""
    offload = {"optimizer_step": "deferred"}
    if NVME in (row["param"], row["optimizer"]):
        offload |= {"staging_bytes": (int(row["staging"]) if model["vocab"] > 256 else 8 << 20) // ranks}
        if model["vocab"] <= 256:
            offload["tile_elems"] = 1 << 16
        if "resident_fraction" in row:
            offload["resident_fraction"] = row["resident_fraction"]
        if row["commit"] is not None:
            offload["commit_every"] = row["commit"]
    elif row["param"] == CPU:
        offload["gpu_resident_fraction"] = row.get("gpu_fraction", 0)
    device = lambda where: {"device": where, **({"nvme_path": nvme_paths} if where == NVME else {})}
    train = {"steps": steps, "seq_len": model["seq"], "seed": seed, "log_every": 1, "run_dir": directory}
    if "checkpointing" in row:
        train["activation_checkpointing"] = row["checkpointing"]
    if "optimizer_device" in row:
        offload["optimizer_device"] = row["optimizer_device"]
    if model["threads"]:
        train["threads"] = model["threads"]
    tables = {
        "": {"train_micro_batch_size_per_gpu": model["micro"], "gradient_accumulation_steps": row.get("accumulate", 1), "gradient_clipping": 1.0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": device(row["param"]), "offload_optimizer": device(row["optimizer"])},
        "model": {
            "hidden_size": model["hidden"],
            "intermediate_size": model["ff"],
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model.get("kv_heads", model["heads"]),
            "head_dim": model.get("head_dim", model["hidden"] // model["heads"]),
            "vocab_size": model["vocab"],
        },
        "data": {"files": [data], "tokenizer": "bytes"},
        "train": train,
        "offload": offload,
    }
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def text_to_train(directory):
    """The sources of the programs as a text, or random bytes."""
    data = (directory / "text.txt").resolve()
    data.write_bytes(b"".join(path.read_bytes() for path in sorted(HERE.parent.glob("*/src/**/*.rs"))) or os.urandom(16 << 20))
    return data


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) else f"{value:.12f}"
    # JSON's words for the rest are TOML's.
    return json.dumps(value)
