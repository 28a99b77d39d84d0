"""Safetensors headers without torch, and the streaming writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mst_core import checkpoint, tensors
from mst_core.errors import InputError

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

SHARDS = {"a": "model-0.safetensors", "b": "model-1.safetensors"}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / tensors.SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for i, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, tmp_path / f"model-{i}.safetensors")
    index(tmp_path, SHARDS)
    return tmp_path


def index(where: Path, weight_map: object) -> None:
    (where / tensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def raw_file(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_what_safetensors_wrote(kind: str, request: pytest.FixtureRequest) -> None:
    refs = tensors.headers(request.getfixturevalue(kind))
    assert {name: (ref.dtype, ref.shape) for name, ref in refs.items()} == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
    for name, ref in refs.items():
        assert torch.equal(tensors.read(ref), WEIGHTS[name])


@pytest.mark.parametrize("limit", [10_000, 30, 1])
def test_safetensors_reads_what_was_written(tmp_path: Path, limit: int) -> None:
    out = tmp_path / "out"
    extra = {**WEIGHTS, "empty": torch.empty(0, 3), "scalar": torch.tensor(7, dtype=torch.int64), "ü": torch.zeros(1)}
    with checkpoint.stage(out) as staging:
        wanted = [(n, tensors.dtype_name(t.dtype), tuple(t.shape)) for n, t in extra.items()]
        writer = tensors.write_hf(staging, wanted, limit)
        for name, tensor in extra.items():
            writer.put(name, tensor)
        writer.finish()
        staging.commit(kind="model", layout="hf", tool="test", settings={})
    found: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == extra.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in extra.items())
    assert tensors.headers(out).keys() == extra.keys()
    assert (out / tensors.INDEX).exists() == (limit < 10_000)


def test_a_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    def writing(*puts: tuple[str, torch.Tensor]) -> None:
        with checkpoint.stage(tmp_path / "out") as staging:
            writer = tensors.write_hf(staging, [("a", "F32", (2,)), ("b", "F32", (2,))])
            for name, tensor in puts:
                writer.put(name, tensor)
            writer.finish()

    for puts in (
        [("b", torch.zeros(2))],
        [("a", torch.zeros(3))],
        [("a", torch.zeros(2, dtype=torch.float16))],
        [("a", torch.zeros(2))],
    ):
        with pytest.raises(InputError):
            writing(*puts)
        assert not (tmp_path / "out.partial").exists()


def _break_header(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[Path], None]:
    def apply(where: Path) -> None:
        content = (where / tensors.SINGLE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        raw_file(where / tensors.SINGLE, header, content[8 + length :])

    return apply


SINGLE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda d: (d / tensors.SINGLE).write_bytes((d / tensors.SINGLE).read_bytes()[:-3]), "truncated"),
    "cut in the header": (lambda d: (d / tensors.SINGLE).write_bytes(b"\xff\0\0\0\0\0\0\0{}"), "truncated"),
    "empty file": (lambda d: (d / tensors.SINGLE).write_bytes(b""), "truncated"),
    "trailing bytes": (lambda d: (d / tensors.SINGLE).open("ab").write(b"xx"), "after the last"),
    "no JSON": (lambda d: (d / tensors.SINGLE).write_bytes(b"\2\0\0\0\0\0\0\0{x"), "no JSON"),
    "a list": (lambda d: raw_file(d / tensors.SINGLE, [], b""), "no JSON object"),
    "overlap": (_break_header(lambda h: h["b"].update(data_offsets=[16, 24])), "overlap"),
    "wrong size": (_break_header(lambda h: h["a"].update(shape=[2, 4])), "does not take"),
    "unknown dtype": (_break_header(lambda h: h["a"].update(dtype="F4")), "F4"),
    "negative": (_break_header(lambda h: h["a"].update(shape=[-2, -3])), "unreadable"),
    "no entry": (_break_header(lambda h: h.update(a=5)), "unreadable"),  # type: ignore[arg-type]
    "only shards": (lambda d: (d / tensors.SINGLE).rename(d / "model-00001-of-00002.safetensors"), "missing shard"),
    "only pickles": (lambda d: (d / tensors.SINGLE).rename(d / "pytorch_model.bin"), "pickle"),
    "nothing": (lambda d: (d / tensors.SINGLE).unlink(), "neither"),
}


@pytest.mark.parametrize("fault", SINGLE_FAULTS)
def test_a_damaged_file_is_refused(single: Path, fault: str) -> None:
    damage, word = SINGLE_FAULTS[fault]
    damage(single)
    with pytest.raises(InputError, match=word):
        tensors.headers(single)


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda d: (d / "model-1.safetensors").unlink(), "missing"),
    "outside": (lambda d: index(d, {"a": "model-0.safetensors", "b": "../model-1.safetensors"}), "outside"),
    "left out": (lambda d: index(d, {"a": "model-0.safetensors", "c": "model-1.safetensors"}), "leaves out"),
    "not held": (lambda d: index(d, {**SHARDS, "c": "model-1.safetensors"}), "does not hold"),
    "elsewhere": (lambda d: index(d, {"a": "model-1.safetensors", "b": "model-0.safetensors"}), "the index puts in"),
    "twice": (lambda d: save_file(WEIGHTS, d / "model-1.safetensors"), "too"),
    "no map": (lambda d: index(d, {}), "weight_map"),
    "no JSON": (lambda d: (d / tensors.INDEX).write_text("{"), "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_damaged_index_is_refused(sharded: Path, fault: str) -> None:
    damage, word = INDEX_FAULTS[fault]
    damage(sharded)
    with pytest.raises(InputError, match=word):
        tensors.headers(sharded)


def test_all_faults_of_all_shards_come_together(sharded: Path) -> None:
    (sharded / "model-0.safetensors").write_bytes(b"")
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(InputError) as raised:
        tensors.headers(sharded)
    assert "model-0" in str(raised.value)
    assert "model-1" in str(raised.value)
