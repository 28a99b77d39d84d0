"""scripts/bench peers compares what a peer makes before it times it: that comparison sees a single changed byte."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mst_convert.plan import plan
from mst_convert.spec import ConvertSpec
from mst_convert.work import work

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import bench_peers

    yield bench_peers
    for name in ("bench_peers", "bench"):
        sys.modules.pop(name)


@pytest.mark.parametrize("way", ["dist", "hf"])
def test_a_changed_byte_stops_the_bench(tmp_path: Path, bench: Any, way: str) -> None:
    hf, dist = tmp_path / "hf", tmp_path / "dist"
    bench.bench.random_model(hf, {**bench.bench.LLAMA, **SMALL}, 2e5)
    spec = ConvertSpec(model=str(hf), to="megatron", out=str(dist))
    work(spec, plan(spec))
    read, where, file = {
        "dist": (bench.tensors_of_dist, dist, dist / "release" / "__0_0.distcp"),
        "hf": (bench.tensors_of_hf, hf, hf / "model.safetensors"),
    }[way]
    expected = read(where)
    assert len(expected) >= 9
    bench.same(read(where), expected, "itself")
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(SystemExit, match="not the tensors of the source"):
        bench.same(read(where), expected, "changed")
