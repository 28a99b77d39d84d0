"""The recipes of docs/train.md: each command is planned on a model of the configuration that it names, and what the
page says of flags that do not fit is what a plan says. The models are headers in front of holes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from mst_core import checkpoint, families, tensors
from mst_core.errors import MstError
from mst_train.plan import plan
from mst_train.spec import TrainSpec

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
FAILURES = re.findall(r"^\| `(--model [^`]+)` \| `([^`]+)` \|$", PAGE, flags=re.MULTILINE)
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "max_position_embeddings": 40960,
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "qwen-14b": {
        **QWEN2, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "qwen-72b": {
        **QWEN2, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64,
    },
}  # fmt: skip
BILLIONS = {"llama-8b": 8.0, "qwen-14b": 14.8, "qwen-72b": 72.7, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the recipes name."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
        (folder / name / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        wanted = [(spec.name, "BF16", spec.shape) for spec in families.family_for(config).model(config).hf_tensors()]
        with (folder / name / "model.safetensors").open("wb") as file:
            file.write(tensors.safetensors_header(wanted))
            file.truncate(file.tell() + sum(map(tensors.wanted_bytes, wanted)))
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that directory, on a disk that has room for the outputs."""
    monkeypatch.chdir(place)
    usage = shutil.disk_usage(place)._replace(free=1 << 60)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)


def settings(words: list[str]) -> TrainSpec:
    return TrainSpec.parse(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recipe_is_planned(command: str) -> None:
    name, *words = shlex.split(command)
    spec = settings(words)
    planned = plan(spec)
    assert name == "mst-train"
    assert planned.parameters / 1e9 == pytest.approx(BILLIONS[spec.model], abs=0.06)
    assert planned.ranks in (1, 8 * spec.nodes)


def test_there_are_recipes_of_every_size() -> None:
    assert {word for command in COMMANDS for word in command.split() if word in MODELS} == MODELS.keys()
    assert len(FAILURES) > 8


@pytest.mark.parametrize(("flags", "says"), FAILURES)
def test_what_does_not_fit_is_said_as_the_page_says(flags: str, says: str) -> None:
    with pytest.raises(MstError) as caught:
        plan(settings([*flags.split(), "--data", "rows.jsonl", "--out", "out"]))
    assert says in str(caught.value)
