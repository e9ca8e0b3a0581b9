"""The package's files form layers, in one direction: each imports from those before it in the table, and says at its beginning what it holds."""

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "python" / "offloadd"

# What each room of the package is about, and its files, lowest first.
LAYERS = {
    "the extension, errors, starts of processes": "_offloadd _errors _console _ending _finder _program _config",
    "a model's parameters, in memory and released": "_storage _packed _units _muon _param_units _order _tile_gradients _released _state_copies _replaced_forwards _experts _watch _native _forwards _fp8",
    "what ranks wait for, exchange and agree on": "_board _connections _nodes _meetings _transfers _ranks",
    "parts of a sequence on several ranks": "_sequence_groups _sequence_attention _sequence_loader _sequence_mean sequence_parallel",
    "units around forward and backward": "_reentry _copies _memory _tile_copies _activations _dependencies _mlp_chunks _loss_chunks _gathering _read_only _residency _held _given _reading _gradients _engine _beside",
    "a run before it starts": "_untrained _lion _supported_optimizers _wrappers _plan _traced _gpu_plan _sketch _state _run_dir _layout",
    "a run": "_progress _reports _buffers _commits _each_node _weights _checkpoint _rewriting _moments _interrupts _directions _steps _prepared_optimizer _model_methods _returning _opening _generation _whole _run _backward_step _optimizer_run",
    "scripts that use DeepSpeed": "_schedules _deepspeed_refused _deepspeed_ranks _accelerator _deepspeed_utils _zero _loss_scaling _initialize _states _deepspeed_sequence _deepspeed",
    "Accelerate, Hugging Face's Trainer, Lightning": "_accelerate hf _trainer_nodes _trainer lightning",
    "what users import and start": "optim __init__ _served _generate _chat __main__ as_deepspeed launch",
}

# These name modules in texts, which are imported when a script imports those of others: torch must not be loaded before.
LATE = {"_finder"}


def files():
    return sorted(PACKAGE.glob("*.py"))


def imported(path):
    """Names of files of the package that a file imports, anywhere in it, with the lines."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            module = ("offloadd." * (node.level > 0) + (node.module or "")).rstrip(".").split(".")
            if module[0] == "offloadd":
                names = [module[1]] if len(module) > 1 else [one.name if exists(one.name) else "__init__" for one in node.names]
        elif isinstance(node, ast.Import):
            parts = [one.name.split(".") for one in node.names]
            names = [part[1] if len(part) > 1 else "__init__" for part in parts if part[0] == "offloadd"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.stem not in LATE:
            module = node.value.split(".")
            names = [module[1]] if module[0] == "offloadd" and len(module) == 2 and exists(module[1]) else []
        for name in names:
            found.setdefault(name, node.lineno)
    return found


def exists(name):
    return any((PACKAGE / f"{name}{end}").exists() for end in (".py", ".pyi"))


def test_files_import_from_lower_layers_only():
    order = " ".join(LAYERS.values()).split()
    assert sorted(order) == sorted({path.stem for path in files()} | {"_offloadd"}), "the table has all files"
    place = {name: number for number, name in enumerate(order)}
    up = [f"{path.name}:{line} imports {name}" for path in files() for name, line in imported(path).items() if place[name] >= place[path.stem]]
    assert not up, up


def test_an_import_in_a_function_and_one_for_types_count(tmp_path):
    file = tmp_path / "_console.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ._run import Run\ndef late():\n    from . import _engine\n    import offloadd.hf\n"
    )
    assert imported(file).keys() == {"_run", "_engine", "hf"}


def test_one_file_owns_who_waits_for_whom():
    looks_at_the_board = {path.stem for path in files() if "_board" in imported(path)}
    exchanges = {path.stem for path in files() if {"all_gather_into_tensor", "reduce_scatter_tensor"} & set(attributes(path))}
    assert looks_at_the_board == {"_meetings"} and exchanges == {"_transfers"}


def attributes(path):
    return [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]


def test_files_say_what_they_hold():
    for path in files():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} begins with what it is for"
