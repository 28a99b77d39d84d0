"""Large models: a plan from headers alone, and memory that does not grow with the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mst_core import tensors
from mst_core.families import family_for

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK_671B: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
}  # fmt: skip
MIDDLE: dict[str, Any] = {**LLAMA_70B, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "vocab_size": 8192, "tie_word_embeddings": False}  # fmt: skip
"""560 MB in bf16."""


def headers_only(directory: Path, config: dict[str, Any], shard: int = 5_000_000_000) -> Path:
    """A Hugging Face directory whose weights are zeros that take no space on the disk (sparse files)."""
    directory.mkdir()
    model = family_for(config).model(config)
    wanted = [(spec.name, "BF16", spec.shape) for spec in model.hf_tensors()]
    parts = tensors.shards(wanted, shard)
    index: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = tensors.shard_name(number, len(parts))
        index |= {item[0]: name for item in part}
        header = tensors.safetensors_header(part)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(tensors.wanted_bytes, part)))
    if len(parts) > 1:
        (directory / tensors.INDEX).write_bytes(tensors.index_json(index, 0))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_70B, 70_553_706_496), (DEEPSEEK_671B, 671_026_419_200)],
    ids=["70B", "671B"],
)
def test_a_plan_of_a_large_model(tmp_path: Path, slowness: float, config: dict[str, Any], parameters: int) -> None:
    """CPU under 10 s, resident memory under 500 MB."""
    model = headers_only(tmp_path / "hf", config)
    script = (
        "import resource, sys; from mst_convert.cli import main\n"
        f"sys.argv = ['mst-convert', '--model', {str(model)!r}, '--to', 'megatron', '--out', 'x', '--dry-run']\n"
        "sys.argv.append('--json')\n"
        "try:\n    main()\nfinally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    peak = next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "    print(used.ru_utime + used.ru_stime, peak, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (told["parameters"], told["lossless"]) == (parameters, True)
    seconds, kilobytes = map(float, done.stderr.split()[-2:])
    assert seconds < 10 * slowness
    assert kilobytes < 500_000


@pytest.mark.parametrize("to", ["megatron", "megatron-legacy", "hf"])
def test_memory_does_not_grow_with_the_weights(tmp_path: Path, to: str) -> None:
    """560 MB under a limit of 64 MiB of data beyond what the imports and the plan take."""
    model = headers_only(tmp_path / "model", MIDDLE)
    sizes = "'tp': 2, 'workers': 2" if to == "megatron-legacy" else "'workers': 2"
    if to == "hf":
        first = (
            "from mst_convert.spec import ConvertSpec; from mst_convert.plan import plan\n"
            "from mst_convert.work import work\n"
            f"spec = ConvertSpec(model={str(model)!r}, to='megatron-legacy', tp=2, out={str(tmp_path / 'legacy')!r})\n"
            "work(spec, plan(spec))"
        )
        subprocess.run([sys.executable, "-c", first], check=True, capture_output=True)
        model = tmp_path / "legacy"
    script = (
        "import resource\n"
        "from mst_convert.spec import ConvertSpec; from mst_convert.plan import plan; from mst_convert import work\n"
        f"spec = ConvertSpec(model={str(model)!r}, to={to!r}, out={str(tmp_path / 'out')!r}, **{{{sizes}}})\n"
        "planned = plan(spec)\n"
        "if spec.to != 'megatron':\n    import numpy\n"
        "data = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmData')) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20), data + (64 << 20)))\n"
        "work.work(spec, planned)\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*")) > 500_000_000
