"""A model for `python -m offloadd generate` and `chat`: its weights in host memory or on drives, its tokenizer beside it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from ._config import processes, settings_of
from ._errors import Error
from ._plan import job_of
from ._run import Run, prepare
from ._run_dir import STORE
from ._weights import Weights, init

# What a run directory of the native trainer has.
_NATIVE = "settings.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that both commands have."""
    parser.add_argument("model", metavar="MODEL", help="directory, or name, of a Hugging Face model; also one of PEFT's adapters")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="longest answer in tokens (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens with this probability together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers of sampling (%(default)s)")
    parser.add_argument(
        "--nvme",
        type=Path,
        action="append",
        metavar="DIR",
        help="directory on a drive that is to have the weights; several are allowed. Without it they are in host memory",
    )
    parser.add_argument("--device", help="where the model computes, such as cuda:0 (the first GPU, or the CPU)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (that of the model's config.json)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


def positive(text: str) -> int:
    """A number of an option that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


class ServedModel:
    """A prepared model and its tokenizer. `close` ends it; weights on drives stay for the next start."""

    def __init__(self, given: argparse.Namespace) -> None:
        if processes() > 1:
            raise Error("this command runs in one process: start it without torchrun")
        check_is_model(given.model)
        transformers = _transformers()
        adapter = Path(given.model) / "adapter_config.json"
        source = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else given.model
        try:
            named = given.model if (Path(given.model) / "tokenizer_config.json").exists() else source
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(named, trust_remote_code=given.trust_remote_code, padding_side="left")
            model, weights = _load(transformers, given, adapter.exists())
        except (OSError, ValueError) as error:
            raise Error(f"{given.model}: {error}") from None
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = model.eval()
        device = given.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        config: dict[str, Any] = {"offloadd": {"compute_device": device}}
        self._temporary: Optional[tempfile.TemporaryDirectory] = None
        if given.nvme:
            config["zero_optimization"] = {"offload_param": {"device": "nvme", "nvme_path": list(map(str, given.nvme))}}
            run_dir = given.nvme[0] / f"offloadd-weights-{job_of(Path(given.model).absolute())}"
        else:
            config["zero_optimization"] = {"offload_param": {"device": "cpu"}}
            self._temporary = tempfile.TemporaryDirectory(prefix="offloadd-")
            run_dir = Path(self._temporary.name) / "run"
        self.run: Run = prepare(self.model, None, settings_of(config), run_dir=run_dir, weights=weights)
        self.run.generation.tells = False

    @property
    def device(self) -> torch.device:
        """Where tokens go."""
        return next(self.model.parameters()).device

    def generate(self, inputs: Any, given: argparse.Namespace, **more: Any) -> torch.Tensor:
        """Tokens after each row of `inputs`, padded."""
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if given.temperature > 0:
            sampling = {"do_sample": True, "temperature": given.temperature, "top_p": given.top_p, "top_k": 0}
        inputs = {key: value.to(self.device) for key, value in inputs.items()}
        with torch.inference_mode():
            made = self.model.generate(**inputs, **sampling, max_new_tokens=given.max_new_tokens, pad_token_id=self.tokenizer.pad_token_id, **more)
        return made[:, inputs["input_ids"].shape[1] :]

    def close(self) -> None:
        self.run.close(keep=False)
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def check_is_model(name: str) -> None:
    """Refuses directories that are no model's, and says how to get one from a run."""
    path = Path(name)
    if not path.is_dir() or (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return
    below = [one for one in (path, path / "offloadd") if (one / STORE).exists()]
    checkpoints = sorted(path.glob("checkpoint-*"), key=lambda one: int(re.sub(r"\D", "", one.name) or 0))
    if whole := [one for one in checkpoints if (one / "config.json").exists() or (one / "adapter_config.json").exists()]:
        raise Error(f"{path} has checkpoints of a Trainer's: name one of them, such as {whole[-1]}")
    if below:
        raise Error(
            f"{below[0]} is the directory of a run of the Python package, which has tiles and no model: start its script again, and write the model there with "
            'trainer.save_model("out") or model.save_pretrained("out"); then name out'
        )
    if (path / _NATIVE).exists():
        raise Error(
            f"{path} is the run directory of `trainer`, which has tiles and no model: write it with `trainer export {shlex.quote(str(path))} --out {shlex.quote(f'{path}-model')}`, and name {path}-model"
        )
    raise Error(f"{path} is no model: it has no config.json; name a directory that save_pretrained or `trainer export` has written")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise Error("transformers is not installed: pip install transformers") from None
    return transformers


def _load(transformers: Any, given: argparse.Namespace, adapter: bool) -> tuple[nn.Module, Optional[Path]]:
    """The model, and where its weights are read a block at a time; None where it has them."""
    how = {"trust_remote_code": given.trust_remote_code}
    if adapter:
        try:
            import peft
        except ImportError:
            raise Error(f"{given.model} has one of PEFT's adapters, and peft is not installed: pip install peft") from None
        return peft.AutoPeftModelForCausalLM.from_pretrained(given.model, dtype=given.dtype or "auto", **how), None
    config = transformers.AutoConfig.from_pretrained(given.model, **how)
    path = Path(given.model)
    if list(path.glob("*.safetensors")) and getattr(config, "quantization_config", None) is None:
        with init():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=given.dtype or config.dtype or "float32", **how)
        if _takes(model, Weights(path)):
            if (path / "generation_config.json").exists():
                model.generation_config = transformers.GenerationConfig.from_pretrained(path)
            return model, path
    return transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype or "auto", **how), None


def _takes(model: nn.Module, weights: Weights) -> bool:
    """Whether the files have all of a model's state, as the model has it; its buffers are filled then. Otherwise transformers converts what is there."""
    if any(getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")):
        return False
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found = [weights.shape_of(of_one) == tuple(param.shape) for param in model.parameters() for of_one in (names[id(param)],)]
    params = {name for of_one in names.values() for name in of_one}
    buffers = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in params}
    if not all(found) or any(weights.shape_of([name]) != tuple(value.shape) for name, value in buffers.items()):
        return False
    for name, value in buffers.items():
        value.copy_(weights.value_of(value, [name]))
    return True
