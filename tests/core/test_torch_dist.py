"""torch_dist: ours read by torch, torch's read by us, damage refused, bytes the same every time."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from mst_core import archive, checkpoint, families, megatron_names, pickling, tensors, torch_dist, torch_pickle
from mst_core.errors import InputError
from mst_core.torch_dist import Chunk, TorchDistWriter, Written

LAYERS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def layer(i: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(i)).mul(100).to(dtype)


def write(out: Path, dtype: torch.dtype = torch.float32) -> Path:
    with checkpoint.stage(out) as staging:
        writer = TorchDistWriter(staging)
        name = tensors.dtype_name(dtype)
        writer.put(Written("embedding.word_embeddings.weight", name, (4, 5), (0, 0), (4, 5)), layer(9, dtype))
        for i in range(LAYERS):
            key = "decoder.layers.mlp.linear_fc2.weight"
            writer.put(Written(key, name, (LAYERS, 4, 5), (i, 0, 0), (1, 4, 5)), layer(i, dtype))
        args = pickling.Instance("argparse.Namespace", {"num_layers": LAYERS, "eps": 1e-5, "x": None, "big": 2**40})
        extra = [
            (f"decoder.layers.{module}._extra_state/shard_{i}_{LAYERS}", None)
            for module in ("mlp.linear_fc2", "self_attention.core_attention")
            for i in range(LAYERS)
        ]
        writer.finish([*extra, ("common_state/shard_0_1", {"iteration": 0, "args": args, "on": True})])
        torch_dist.write_megatron_sidecar(staging, {"config.json": b"{}"})
        staging.commit(kind="model", layout="megatron", tool="test", settings={})
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_ours(tmp_path: Path, dtype: torch.dtype) -> None:
    release = write(tmp_path / "m", dtype) / "release"
    state = {
        "embedding.word_embeddings.weight": torch.zeros(4, 5, dtype=dtype),
        "decoder.layers.mlp.linear_fc2.weight": torch.zeros(LAYERS, 4, 5, dtype=dtype),
    }
    dcp.load(state, storage_reader=FileSystemReader(release), no_dist=True)
    assert torch.equal(state["embedding.word_embeddings.weight"], layer(9, dtype))
    assert torch.equal(
        state["decoder.layers.mlp.linear_fc2.weight"], torch.stack([layer(i, dtype) for i in range(LAYERS)])
    )
    metadata = FileSystemReader(release).read_metadata()
    for place, info in metadata.storage_data.items():
        data = (release / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        value = torch.load(io.BytesIO(data), weights_only="common" not in place.fqn)
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            assert zipped.testzip() is None
        if place.fqn.startswith("common_state"):
            args = argparse.Namespace(num_layers=LAYERS, eps=1e-5, x=None, big=2**40)
            assert value == [{"iteration": 0, "args": args, "on": True}]
        elif "_extra_state" in place.fqn:
            assert value == [None]


def test_extra_states_of_both_specs_are_there() -> None:
    """MEGATRON.md: a missing one fails the default strict load, a surplus one is ignored."""
    config = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    model = families.family_for({"model_type": "qwen3"}).model({**config, "vocab_size": 4})
    naming = megatron_names.naming(model, "te", "stacked")
    objects = dict(torch_dist.objects([(t, *naming.key(t)) for t in families.tasks(model)], {"iteration": 0}))
    for module in ("linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm"):
        for i in range(LAYERS):
            assert f"decoder.layers.self_attention.{module}._extra_state/shard_{i}_{LAYERS}" in objects
    assert f"decoder.layers.mlp.linear_fc1._extra_state/shard_0_{LAYERS}" in objects
    assert "decoder.final_layernorm._extra_state/shard_0_1" in objects
    assert objects["common_state/shard_0_1"] == {"iteration": 0}


def test_we_read_ours(tmp_path: Path) -> None:
    stored = torch_dist.metadata(write(tmp_path / "m", torch.bfloat16))
    stacked, index = torch_dist.find(stored, "decoder.layers.mlp.linear_fc2.weight", 1)
    assert stacked.shape == (LAYERS, 4, 5)
    assert torch.equal(torch_dist.read(stacked, index), layer(1, torch.bfloat16))
    assert torch_dist.common_state(tmp_path / "m")["args"].state["num_layers"] == LAYERS


def test_we_read_torchs_own(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "decoder.layers.7.b": torch.randn(5).bfloat16(), "n": 5}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    stored = torch_dist.metadata(tmp_path)
    assert torch.equal(torch_dist.read(stored["a"]), state["a"])
    found, index = torch_dist.find(stored, "decoder.layers.b", 7)
    assert index is None
    assert torch.equal(torch_dist.read(found), state["decoder.layers.7.b"])


def test_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path / "a")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    script += f"from pathlib import Path; import test_torch_dist; test_torch_dist.write(Path({str(tmp_path / 'b')!r}))"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONHASHSEED": "7"}, cwd=tmp_path)
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path


def test_reading_the_metadata_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "m")
    script = (
        "import sys; from pathlib import Path; from mst_core import torch_dist\n"
        f"assert len(torch_dist.metadata(Path({str(tmp_path / 'm')!r}))) == 2\n"
        f"assert torch_dist.common_state(Path({str(tmp_path / 'm')!r}))['on'] is True\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_pickle_runs_nothing() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/pwned",)

    for value in (Evil(), [Evil()], {"a": Evil()}):
        with pytest.raises(InputError, match="not read"):
            torch_pickle.loads(pickle.dumps(value), "x")
    assert torch_pickle.loads(pickle.dumps(signal.SIGTERM), "x").name == "signal.Signals"
    with pytest.raises(InputError, match="cannot be unpickled"):
        torch_pickle.loads(b"nonsense", "x")


def test_big_archives_use_zip64(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 GiB are not written here: the threshold is lowered, and zipfile must still agree about sizes and crc."""
    monkeypatch.setattr(archive, "LIMIT", 100)
    out = io.BytesIO()
    tensor = torch.arange(1000, dtype=torch.float32)
    entries = archive.tensor_entries(pickling.pickled_tensor("F32", (1000,)), [archive.whole("a", "F32", (1000,))])
    length = archive.write(out, entries, memoryview(tensor.numpy()).cast("B"))
    assert length == archive.length(entries)
    assert length == len(out.getvalue())
    with zipfile.ZipFile(io.BytesIO(out.getvalue())) as zipped:
        assert zipped.testzip() is None
        assert zipped.getinfo("archive/data/0").file_size == 4000
    assert torch.equal(torch.load(io.BytesIO(out.getvalue())), tensor)
    data = out.getvalue()
    _, shape, start, nbytes = torch_pickle.tensor_data(lambda o, n: data[o : o + n], len(data), "x")
    assert (shape, nbytes, start % 64) == ((1000,), 4000, 0)
    assert struct.unpack_from("<f", data, start + 4) == (1.0,)


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _chunks(metadata: Any, change: Callable[[list[Any]], object]) -> None:
    change(metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks)


def _move(metadata: Any, name: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = name


def _tracker(text: str) -> Callable[[Path], object]:
    return lambda d: (d / "latest_checkpointed_iteration.txt").write_text(text)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tracker": (lambda d: (d / "latest_checkpointed_iteration.txt").unlink(), "latest_checkpointed"),
    "tracker of nothing": (_tracker("12"), "iter_0000012"),
    "tracker of nonsense": (_tracker("../x"), "neither release"),
    "legacy": (lambda d: ((d / "release/.metadata").unlink(), (d / "release/mp_rank_00").mkdir()), "legacy"),
    "other backend": (lambda d: (d / "release/metadata.json").write_text('{"sharded_backend": "zarr"}'), "zarr"),
    "no pickle": (lambda d: (d / "release/.metadata").write_bytes(b"x"), "unpickled"),
    "other pickle": (lambda d: (d / "release/.metadata").write_bytes(pickle.dumps([1])), "not the metadata"),
    "no data": (lambda d: (d / "release/__0_0.distcp").unlink(), "missing"),
    "cut data": (lambda d: os.truncate(d / "release/__0_0.distcp", 3000), "truncated"),
    "lost chunk": (lambda d: _edit(d / "release/.metadata", lambda m: _chunks(m, lambda c: c.pop())), "hold 40 of 60"),
    "chunk twice": (
        lambda d: _edit(d / "release/.metadata", lambda m: _chunks(m, lambda c: c.append(c[0]))),
        "overlap",
    ),
    "path outside": (lambda d: _edit(d / "release/.metadata", lambda m: _move(m, "../x")), "outside"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_refused(tmp_path: Path, fault: str) -> None:
    damage, word = FAULTS[fault]
    damage(write(tmp_path / "m"))
    with pytest.raises(InputError, match=word):
        torch_dist.metadata(tmp_path / "m")


def test_a_chunk_that_is_not_what_the_metadata_says(tmp_path: Path) -> None:
    stored = torch_dist.metadata(write(tmp_path / "m"))["embedding.word_embeddings.weight"]
    good = stored.chunks[0]
    wrong = Chunk(good.offsets, (5, 4), good.file, good.file_offset, good.length)
    with pytest.raises(InputError, match="says F32"):
        torch_dist.read_chunk(wrong, "F32")
    data = bytearray(good.file.read_bytes())
    data[good.file_offset + good.length - 30 : good.file_offset + good.length] = bytes(30)
    good.file.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        torch_dist.read_chunk(good, "F32")


def test_the_writer_wants_each_layer_once(tmp_path: Path) -> None:
    def writing(*layers: tuple[int, torch.Tensor]) -> None:
        with checkpoint.stage(tmp_path / "out") as staging:
            writer = TorchDistWriter(staging)
            for i, tensor in layers:
                shape, name = tuple(tensor.shape), tensors.dtype_name(tensor.dtype)
                writer.put(Written("decoder.layers.x", name, (2, *shape), (i, 0), (1, *shape)), tensor)
            writer.finish([])

    zeros = torch.zeros(3)
    for layers in (
        [(0, zeros)],
        [(0, zeros), (0, zeros)],
        [(0, zeros), (1, zeros.half())],
        [(0, zeros), (1, zeros[:2])],
    ):
        with pytest.raises(InputError):
            writing(*layers)
        assert not (tmp_path / "out.partial").exists()


def test_an_archive_is_amended_and_else_the_same() -> None:
    args = argparse.Namespace(kept=signal.SIGTERM, rows=64)
    whole = [{"args": args, "state": {"on": True, "step": torch.tensor(2.0)}, "same": {1: "x"}}]
    made = io.BytesIO()
    torch.save(whole, made)
    data = made.getvalue()

    def changes(value: Any) -> list[tuple[Any, dict[str, Any]]]:
        return [(value[0]["state"], {"on": False, "new": [1, None]}), (value[0]["args"], {"rows": 96, "more": "y"})]

    amended = torch_pickle.amended_archive(data, changes, "x")
    found = torch.load(io.BytesIO(amended), weights_only=False)
    assert vars(found[0].pop("args")) == {"kept": signal.SIGTERM, "rows": 96, "more": "y"}
    assert found == [{"state": {"on": False, "step": torch.tensor(2.0), "new": [1, None]}, "same": {1: "x"}}]
    again = torch_pickle.load_archive(amended, "x")[0]
    assert again["args"].state["rows"] == 96
    assert again["state"]["on"] is False
    assert torch_pickle.amended_archive(data, lambda value: [(value, {})], "x") is data


def test_a_pickle_without_numbers_is_not_amended() -> None:
    """As protocol 4, whose frames say how long they are."""
    made = io.BytesIO()
    torch.save([{"on": True}], made, pickle_protocol=4)
    with pytest.raises(InputError, match="cannot be amended"):
        torch_pickle.amended_archive(made.getvalue(), lambda value: [(value[0], {"on": False})], "x")


def test_attributes_are_not_given_twice_without_end() -> None:
    """Each time would take as long as the pickle is large."""
    head = b"\x80\x02cargparse\nNamespace\n)\x81}q\x01("
    items = b"".join(b"X\x02\x00\x00\x00" + f"{i:02}".encode() + b"N" for i in range(20))
    with pytest.raises(InputError, match="twice"):
        torch_pickle.loads(head + items + b"ub" + b"h\x01b" * 3 + b".", "x")
