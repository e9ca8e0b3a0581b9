"""The rotary embeddings that the trainer is compared with are those of the installed transformers."""

import importlib.util
import json
import pathlib

import pytest

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "hf"


def test_the_trainers_table_of_rotary_embeddings_is_what_transformers_computes():
    spec = importlib.util.spec_from_file_location("rope", FIXTURES / "rope.py")
    rope = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rope)
    stored = json.loads((FIXTURES / "rope.json").read_text())["models"]
    computed = rope.computed()
    assert stored.keys() == computed.keys()
    for name, model in computed.items():
        assert stored[name]["config"] == model["config"], name
        for key in ("inv_freq", "cos", "sin"):
            # Other processors have other last bits of powers.
            assert stored[name][key] == pytest.approx(model[key], rel=4e-7), (name, key)
