"""What scripts do with Accelerate's DeepSpeed plugin and with Hugging Face's Trainer: each habit of the tables has the values of the same script without
offloadd, or is refused by name."""

import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")

from test_hf import server  # noqa: E402
from test_runs import HERE, lines_of  # noqa: E402


@pytest.mark.parametrize("library", ["accelerate", "trainer"])
def test_habits_of_scripts(library):
    imports = ["transformers.trainer", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"]
    said = [json.loads(line) for line in lines_of(server("deepspeed").start(HERE / "scripts" / f"{library}_habits.py", imports=imports))]
    assert len(said) > 30 and not [line for line in said if line[2]]
