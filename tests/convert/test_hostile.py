"""Hostile input: a bad file ends in one InputError, at once, with no memory beyond its size, and nothing written."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import archive, checkpoint, hf_weights, legacy, pickling, tensors, torch_dist, torch_pickle
from mst_core.errors import InputError
from mst_core.families import family_for
from mst_core.pickling import Call, Global, Instance, Pairs, Persistent

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10, "max_position_embeddings": 64,
}  # fmt: skip
MODEL = family_for(CONFIG).model(CONFIG)
WANTED: list[tensors.Wanted] = [(spec.name, "BF16", spec.shape) for spec in MODEL.hf_tensors()]
NAMES = [name for name, _, _ in WANTED]
FIRST = NAMES[0]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BINS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


# --- valid models, made without torch -----------------------------------------------------------------------------


def content(item: tensors.Wanted) -> bytes:
    """Bytes that differ from tensor to tensor."""
    return bytes(NAMES.index(item[0]) + i % 7 for i in range(tensors.wanted_bytes(item)))


def write_safetensors(path: Path, wanted: list[tensors.Wanted]) -> None:
    path.write_bytes(tensors.safetensors_header(wanted) + b"".join(map(content, wanted)))


def torch_file(tree: Any, storages: dict[str, bytes], pickled: bytes | None = None) -> bytes:
    """A torch.save archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickling.dumps(tree) if pickled is None else pickled)
        for key, data in storages.items():
            zipped.writestr(f"archive/data/{key}", data)
        zipped.writestr("archive/version", b"3\n")
    return out.getvalue()


def bin_tree(wanted: list[tensors.Wanted]) -> tuple[dict[str, Any], dict[str, bytes]]:
    tree = {name: pickling.tensor_value(dtype, shape, str(i)) for i, (name, dtype, shape) in enumerate(wanted)}
    return tree, {str(i): content(item) for i, item in enumerate(wanted)}


def write_index(path: Path, shards: tuple[str, str]) -> None:
    path.write_text(json.dumps({"weight_map": {name: shards[i % 2] for i, name in enumerate(NAMES)}}))


def make(directory: Path, kind: str) -> Path:
    """A whole tiny model: safetensors, sharded, bin, bins (sharded), megatron or legacy."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if kind == "sharded":
        for i, shard in enumerate(SHARDS):
            write_safetensors(directory / shard, WANTED[i::2])
        write_index(directory / tensors.INDEX, SHARDS)
    elif kind == "bin":
        (directory / hf_weights.BIN).write_bytes(torch_file(*bin_tree(WANTED)))
    elif kind == "bins":
        for i, shard in enumerate(BINS):
            (directory / shard).write_bytes(torch_file(*bin_tree(WANTED[i::2])))
        write_index(directory / hf_weights.BIN_INDEX, BINS)
    else:
        write_safetensors(directory / tensors.SINGLE, WANTED)
        if kind != "safetensors":
            convert(directory, directory.with_name("made"), "megatron-legacy" if kind == "legacy" else "megatron")
            shutil.rmtree(directory)
            directory.with_name("made").rename(directory)
    return directory


def convert(model: Path, out: Path, to: str) -> Path:
    spec = ConvertSpec.model_validate({"model": str(model), "out": out, "to": to})
    working.work(spec, planning.plan(spec))
    return out


KINDS = ("safetensors", "sharded", "bin", "bins", "megatron", "legacy")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(tmp_path_factory.mktemp(kind) / "model", kind) for kind in KINDS}


Model = Callable[[str], Path]


@pytest.fixture
def model(originals: dict[str, Path], tmp_path: Path) -> Model:
    """``model("bin")``: a whole model that a test may damage."""
    return lambda kind: Path(shutil.copytree(originals[kind], tmp_path / "model", symlinks=True))


def attempt(directory: Path) -> None:
    """Convert; whatever happens, there is all of the output or nothing, and no memory beyond the input's size."""
    out = directory.parent / "out"
    to = "hf" if torch_dist.is_megatron(directory) else "megatron"
    size = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    tracemalloc.start()
    try:
        convert(directory, out, to)
    except InputError:
        assert not out.exists()
        assert not out.with_name("out.partial").exists()
        raise
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 * size + (8 << 20), f"{peak} bytes for an input of {size}"
    assert checkpoint.verify(out) == []
    shutil.rmtree(out)


def refused(directory: Path, match: str) -> None:
    with pytest.raises(InputError, match=match) as raised:
        attempt(directory)
    assert len(str(raised.value)) < 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_are_whole(model: Model, kind: str) -> None:
    attempt(model(kind))


# --- links and what is no file ------------------------------------------------------------------------------------

PLACES = {
    "safetensors": tensors.SINGLE,
    "sharded": SHARDS[1],
    "bin": hf_weights.BIN,
    "bins": BINS[0],
    "megatron": "release/__0_0.distcp",
    "legacy": "release/mp_rank_00/model_optim_rng.pt",
}
CONTENTS = {"sharded": tensors.INDEX, "bins": hf_weights.BIN_INDEX, "megatron": "release/.metadata"}
FILES = [*PLACES.items(), *CONTENTS.items(), ("safetensors", "config.json")]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_link_out_of_the_directory(model: Model, tmp_path: Path, kind: str, name: str) -> None:
    directory = model(kind)
    secret = tmp_path / "secret"
    (directory / name).rename(secret)
    (directory / name).symlink_to(secret)
    refused(directory, "link out of its directory, to .*secret")
    (directory / name).unlink()
    (directory / name).symlink_to(os.path.relpath(secret, (directory / name).parent))
    refused(directory, "link out")


def test_a_directory_that_is_a_link_out(model: Model, tmp_path: Path) -> None:
    directory = model("megatron")
    (directory / "release").rename(tmp_path / "elsewhere")
    (directory / "release").symlink_to(tmp_path / "elsewhere")
    refused(directory, "link out")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.model", "generation_config.json"])
def test_a_carried_file_that_is_a_link_out(model: Model, tmp_path: Path, name: str) -> None:
    """Else a model could carry a private key of this machine into the output."""
    directory = model("safetensors")
    (tmp_path / "secret").write_text("{}")
    (directory / name).symlink_to(tmp_path / "secret")
    refused(directory, "link out")


@pytest.mark.parametrize(("kind", "name"), PLACES.items())
def test_a_link_inside_the_directory(model: Model, kind: str, name: str) -> None:
    directory = model(kind)
    (directory / "kept").mkdir()
    (directory / name).rename(directory / "kept" / "file")
    (directory / name).symlink_to(directory / "kept" / "file")
    attempt(directory)


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bins"])
def test_the_hubs_cache(originals: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """snapshots/REVISION/name -> ../../blobs/HASH is how the Hub's cache looks; another repository's blobs are not."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(originals[kind].iterdir())):
        shutil.copy(path, cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    attempt(snapshot)
    other = tmp_path / "models--org--other"
    other.mkdir()
    (cache / "blobs").rename(other / "blobs")
    (cache / "blobs").mkdir()
    for path in snapshot.iterdir():
        blob = path.readlink().name
        path.unlink()
        path.symlink_to(f"../../../models--org--other/blobs/{blob}")
    refused(snapshot, "link out")


@pytest.mark.parametrize(("kind", "name"), FILES)
@pytest.mark.parametrize("what", ["fifo", "directory", "loop", "device", "nowhere"])
def test_no_regular_file(model: Model, kind: str, name: str, what: str) -> None:
    path = model(kind) / name
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to({"loop": path.name, "device": "/dev/zero", "nowhere": "/nowhere"}[what])
    refused(path.parent if kind not in ("megatron", "legacy") else _top(path), ".")


def _top(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "model")


# --- safetensors ------------------------------------------------------------------------------------------------

Damage = Callable[[Path], object]


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        header, data = header_of(directory / tensors.SINGLE)
        change(header)
        put_header(directory, json.dumps(header).encode(), data)

    return damage


def put_header(directory: Path, text: bytes, data: bytes = b"") -> None:
    (directory / tensors.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_text(old: str, new: str) -> Damage:
    """Replace a part of the header's text, once."""

    def damage(directory: Path) -> None:
        header, data = header_of(directory / tensors.SINGLE)
        text = json.dumps(header)
        assert old in text
        put_header(directory, text.replace(old, new, 1).encode(), data)

    return damage


def entry(**changes: Any) -> Damage:
    return with_header(lambda header: header[FIRST].update(changes))


def claim(length: int) -> Damage:
    def damage(directory: Path) -> None:
        data = (directory / tensors.SINGLE).read_bytes()
        (directory / tensors.SINGLE).write_bytes(length.to_bytes(8, "little") + data[8:])

    return damage


def sparse(name: str, size: int, start: bytes = b"") -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).write_bytes(start)
        os.truncate(directory / name, size)

    return damage


def text_file(name: str, text: str | bytes) -> Damage:
    return lambda directory: (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())


HEADERS: dict[str, tuple[Damage, str]] = {
    "10 GB claimed": (claim(10**10), "truncated or no safetensors"),
    "2**64 - 1 claimed": (claim(2**64 - 1), "truncated or no safetensors"),
    "10 GB of zeros": (sparse(tensors.SINGLE, 10**10), "no JSON"),
    "10 GB of header": (sparse(tensors.SINGLE, 11 * 10**9, (10**10).to_bytes(8, "little") + b"{"), "truncated or no"),
    "a name twice": (with_text(f'"{FIRST}"', f'"{NAMES[1]}": {{}}, "{FIRST}"'), "there twice"),
    "a key twice": (with_text('"dtype": ', '"dtype": "I8", "dtype": '), "there twice"),
    "deep": (lambda d: put_header(d, b'{"a":' * 100_000), "no JSON"),
    "deep list": (lambda d: put_header(d, b'{"a":' + b"[" * 100_000), "no JSON"),
    "no text": (lambda d: put_header(d, b'{"\xff\xfe": 1}'), "no JSON"),
    "a long number": (lambda d: put_header(d, b'{"a":' + b"9" * 100_000 + b"}"), "no JSON"),
    "dtype unknown": (entry(dtype="F4_E2M1"), "F4_E2M1, which is not known"),
    "dtype no text": (entry(dtype=["BF16"]), "unreadable"),
    "dtype of no weight": (entry(dtype="I16"), "no plain weight"),
    "shape overflows": (entry(shape=[2**62, 2**62]), "does not take"),
    "shape overflows to nothing": (entry(shape=[2**63, 2]), "unreadable"),
    "many axes": (entry(shape=[2**62] * 100_000), "unreadable"),
    "no shape": (entry(shape=None), "unreadable"),
    "true": (entry(shape=[True, 80]), "unreadable"),
    "floats": (entry(shape=[10.0, 8.0]), "unreadable"),
    "negative offsets": (entry(data_offsets=[-160, 0]), "unreadable"),
    "backwards": (entry(data_offsets=[160, 0]), "does not take"),
    "far": (entry(data_offsets=[2**62, 2**62 + 160]), "gap or overlap"),
    "one offset": (entry(data_offsets=[160]), "unreadable"),
    "overlap": (with_header(lambda h: h[NAMES[1]].update(data_offsets=h[FIRST]["data_offsets"])), "overlap|not take"),
    "a gap": (with_header(lambda h: h.pop(FIRST)), "gap or overlap"),
    "only metadata": (lambda d: put_header(d, b'{"__metadata__": {}}'), "missing"),
    "empty name": (with_text(f'"{FIRST}"', '""'), "not known"),
    "escapes": (with_text(f'"{FIRST}"', '"\\u001b[31m\\ud800"'), "not known"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors(model: Model, case: str) -> None:
    damage, match = HEADERS[case]
    directory = model("safetensors")
    damage(directory)
    refused(directory, match)


# --- indexes ------------------------------------------------------------------------------------------------------


def mapped(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(index: Path) -> None:
        value = json.loads(index.read_text())
        change(value["weight_map"])
        index.write_text(json.dumps(value))

    return damage


def to(name: Any) -> Callable[[Path], None]:
    return mapped(lambda found: found.update({FIRST: name}))


def twice_in_index(index: Path) -> None:
    index.write_text(index.read_text().replace('{"weight_map": {', f'{{"weight_map": {{"{FIRST}": "x", ', 1))


INDEXES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absolute": (to("/etc/passwd"), "outside the directory: /etc/passwd"),
    "above": (to("../model/x"), "outside the directory"),
    "dots": (to(".."), "outside the directory"),
    "nothing": (to(""), "outside the directory"),
    "a folder": (to("a/../x"), "outside the directory"),
    "NUL": (to("a\0b"), "cannot be opened|missing"),
    "long": (to("a" * 10_000), "cannot be opened"),
    "half a character": (to("\ud800"), "cannot be opened"),
    "no name": (to(5), "no weight_map"),
    "a list": (to([["x"]]), "no weight_map"),
    "a name twice": (twice_in_index, "there twice"),
    "many names that are not there": (
        lambda index: mapped(lambda found: found.update({f"n{i}": found[FIRST] for i in range(10**5)}))(index),
        "99999 more",
    ),
    "left out": (mapped(lambda found: found.pop(FIRST)), "leaves out"),
    "not where it says": (lambda i: mapped(lambda f: f.update({FIRST: f[NAMES[1]]}))(i), "index puts in|does not hold"),
    "a list instead": (lambda index: index.write_text('{"weight_map": [1]}'), "no weight_map"),
    "deep": (lambda index: index.write_text('{"weight_map":' * 50_000), "JSON"),
    "zeros": (lambda index: os.truncate(index, 10**10), "bytes, at most"),
    "binary": (lambda index: index.write_bytes(bytes(range(256))), "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["sharded", "bins"])
@pytest.mark.parametrize("case", INDEXES)
def test_indexes(model: Model, kind: str, case: str) -> None:
    damage, match = INDEXES[case]
    directory = model(kind)
    damage(directory / CONTENTS[kind])
    refused(directory, match)


@pytest.mark.parametrize("kind", ["sharded", "bins"])
def test_a_million_names_in_a_missing_file(model: Model, kind: str) -> None:
    directory = model(kind)
    (directory / CONTENTS[kind]).write_text(json.dumps({"weight_map": {f"n{i}": "gone" for i in range(10**6)}}))
    with pytest.raises(InputError, match="gone: is missing") as raised:
        convert(directory, directory.parent / "out", "megatron")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("kind", ["sharded", "bins"])
def test_a_tensor_in_two_shards(model: Model, kind: str) -> None:
    directory = model(kind)
    if kind == "sharded":
        write_safetensors(directory / SHARDS[1], WANTED)
    else:
        (directory / BINS[1]).write_bytes(torch_file(*bin_tree(WANTED)))
    refused(directory, "too")


# --- config.json ----------------------------------------------------------------------------------------------------

QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


def config(**changes: Any) -> str:
    return json.dumps({**CONFIG, **changes})


CONFIGS: dict[str, tuple[str, str]] = {
    **{name: (config(quantization_config=value), f"quantised .{name}") for name, value in QUANTISED.items()},
    "quantised somehow": (config(quantization_config=[1]), "quantised .unknown"),
    "NaN": (config(hidden_size=float("nan")), "hidden_size"),
    "infinite": (config(num_hidden_layers=float("inf")), "num_hidden_layers"),
    "a float": (config(vocab_size=10.5), "vocab_size"),
    "true": (config(num_hidden_layers=True), "num_hidden_layers"),
    "text": (config(num_hidden_layers="2"), "num_hidden_layers"),
    "negative": (config(num_hidden_layers=-1), "num_hidden_layers"),
    "nothing": (config(hidden_size=0), "hidden_size"),
    "huge": (config(hidden_size=2**62, intermediate_size=2**62), "expected"),
    "a list": ("[]", "no JSON object"),
    "deep": ('{"a":' * 100_000, "JSON"),
    "a key twice": ('{"hidden_size": 8, ' + config()[1:], "there twice"),
    "binary": ("\0\1\2", "JSON"),
    "no architecture": (config(architectures=[[]]), "architecture"),
    "architectures of another kind": (config(architectures=5), "architecture"),
    "architectures as an object": (config(architectures={"a": 1}), "architecture"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(model: Model, case: str) -> None:
    text, match = CONFIGS[case]
    directory = model("safetensors")
    (directory / "config.json").write_text(text)
    refused(directory, match)


SIZES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**12},
    "layers of unequal kinds": {
        "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 10**12, "n_routed_experts": 4,
        "moe_intermediate_size": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2,
        "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    },
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**12, "moe_intermediate_size": 4},
    "stacked experts": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 10**12},
    "MTP layers": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "moe_intermediate_size": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 10**12,
    },
}  # fmt: skip


def bounded(directory: Path, seconds: int = 10) -> subprocess.CompletedProcess[str]:
    """``mst-convert --dry-run`` with 100 MB of memory to allocate."""
    to = "hf" if torch_dist.is_megatron(directory) else "megatron"
    script = (
        "import resource, sys; from mst_convert import plan, spec; from mst_convert.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096 + (100 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        f"sys.argv = ['mst-convert', '--model', {str(directory)!r}, '--to', {to!r}, '--dry-run', '--out', '/tmp/no']\n"
        "main()"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize("kind", ["safetensors", "megatron"])
@pytest.mark.parametrize("case", SIZES)
def test_sizes_are_bounded_by_what_the_files_hold(model: Model, kind: str, case: str) -> None:
    directory = model(kind)
    where = directory / ("hf/config.json" if kind == "megatron" else "config.json")
    where.write_text(config(**SIZES[case]))
    done = bounded(directory)
    assert done.returncode == 3, done.stderr[-500:]


# --- pickles --------------------------------------------------------------------------------------------------------


class Asks:
    """Pickled as a call of ``function``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def asking(module: str, name: str, protocol: int = 4) -> bytes:
    """A pickle that calls ``module.name("x")``."""
    if protocol < 4:
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X\x01\0\0\0x\x85R."
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93\x8c\x01x\x85R."


PICKLES: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps(Asks(os.system, "touch /tmp/pwned")), "system, which no checkpoint needs"),
    "eval": (pickle.dumps(Asks(eval, "1")), "builtins.eval"),
    "getattr": (pickle.dumps(Asks(getattr, "", "__class__")), "builtins.getattr"),
    "eval, protocol 2": (asking("builtins", "eval", 2), "builtins.eval"),
    "eval, old name": (asking("__builtin__", "eval", 2), "eval"),
    "a chain": (asking("torch.Size", "__class__.__base__"), "which no checkpoint needs"),
    "below torch": (asking("torch", "os.systemStorage.x"), "which no checkpoint needs"),
    "nearly allowed": (asking("torch._utils", "_rebuild_tensor_v2.__globals__"), "which no checkpoint needs"),
    "importlib": (asking("importlib", "import_module"), "which no checkpoint needs"),
    "code of a stub": (b"\x80\x04" + b"\x8c\x05numpy\x8c\x01x\x93" + b"\x8c\x01a\x85R)R.", "called"),
    "protocol 0": (pickle.dumps([1], 0), "protocol 2"),
    "INST": (b"\x80\x02(ios\nsystem\n.", "opcode 0x69"),
    "OBJ": (b"\x80\x02(o.", "opcode 0x6f"),
    "EXT1": (b"\x80\x02\x82\x01.", "opcode 0x82"),
    "BYTEARRAY8": (b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".", "opcode 0x96"),
    "LONG4": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "integer of"),
    "LONG4, negative": (b"\x80\x02\x8b\xff\xff\xff\xff.", "integer of"),
    "BINUNICODE8": (b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.", "are asked for"),
    "BINBYTES": (b"\x80\x04B\xff\xff\xff\x7fx.", "are asked for"),
    "BINBYTES8": (b"\x80\x04\x8e" + (2**63).to_bytes(8, "little") + b"x.", "are asked for"),
    "FRAME": (b"\x80\x04\x95" + (2**63).to_bytes(8, "little") + b"N.", "not the metadata|no dictionary"),
    "BINGET": (b"\x80\x02h\x07.", "memo 7"),
    "LONG_BINGET": (b"\x80\x02j\xff\xff\xff\xff.", "memo 4294967295"),
    "LONG_BINPUT": (b"\x80\x02Nr\xff\xff\xff\xff.", "not the metadata|no dictionary"),
    "an empty stack": (b"\x80\x02.", "stack is empty"),
    "no mark": (b"\x80\x02e.", "no mark"),
    "across a mark": (b"\x80\x02N(0.", "stack is empty"),
    "too early an end": (b"\x80\x02N", "ends too early"),
    "a surrogate": (b"\x80\x02X\x03\0\0\0\xed\xa0\xff.", "unpickled"),
    "deep tuples": (b"\x80\x02)" + b"\x85" * 100_000 + b".", "not the metadata|no dictionary"),
    "deep tuples as a key": (b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.", "as a key"),
    "tuples that double": (b"\x80\x02})" + b"2\x86" * 100_000 + b"Ns.", "as a key"),
    "deep lists": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "not the metadata|no dictionary"),
    "a list in itself": (b"\x80\x02]q\0h\0a.", "not the metadata|no dictionary"),
    "a dictionary in itself": (b"\x80\x02}q\0X\x01\0\0\0xh\0s.", "not the metadata|holds no model|not a tensor"),
    "a list as a key": (b"\x80\x02}]Ns.", "a list as a key"),
    "keys of one hash": (
        b"\x80\x02}("
        + b"".join(b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"N" for k in range(9))
        + b"u.",
        "as a key",
    ),
    "zeros": (bytes(100_000), "protocol 2"),
    "nothing": (b"", "protocol 2"),
}


@pytest.mark.parametrize("kind", ["megatron", "legacy", "bin"])
@pytest.mark.parametrize("case", PICKLES)
def test_pickles(model: Model, kind: str, case: str) -> None:
    data, match = PICKLES[case]
    directory = model(kind)
    if kind == "megatron":
        (directory / "release/.metadata").write_bytes(data)
    else:
        (directory / PLACES[kind]).write_bytes(torch_file(None, {}, data))
    refused(directory, f"{match}|no dictionary|not a dictionary|not a tensor|names a tensor")
    assert not Path("/tmp/pwned").exists()


def test_common_state_is_read_by_the_same_list(model: Model) -> None:
    directory = model("megatron")
    stored = torch_dist.contents(directory).objects["common_state/shard_0_1"]
    data = bytearray(stored.file.read_bytes())
    evil = torch_file(None, {}, pickle.dumps(Asks(os.system, "touch /tmp/pwned"), 2))
    data[stored.file_offset :] = evil
    stored.file.write_bytes(data)

    def point(root: Any) -> None:
        for index, info in root["storage_data"].items:
            if index.state["fqn"] == "common_state/shard_0_1":
                info.state["length"] = len(evil)

    edit_metadata(directory, point)
    with pytest.raises(InputError, match="system, which no checkpoint needs"):
        torch_dist.common_state(directory)


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    """A state_dict is an OrderedDict with an attribute; tied tensors share a storage; parameters are wrapped."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False))
    module[1].weight = torch.nn.Parameter(module[0].weight.detach().t().contiguous())
    tied = {**module.state_dict(), "again": module[0].weight, "scalar": torch.tensor(3), "none": torch.zeros(0, 3)}
    for number, state in enumerate((module.state_dict(), tied)):
        torch.save(state, tmp_path / f"{number}.bin")
        refs = hf_weights.bin_headers(tmp_path / f"{number}.bin")
        assert refs.keys() == state.keys()
        assert all(torch.equal(tensors.read(ref), state[name]) for name, ref in refs.items())


# --- archives -------------------------------------------------------------------------------------------------------


Written = tuple[str, bytes, int]
PLAIN, LZMA, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED


def rezip(change: Callable[[str, bytes], list[Written]]) -> Callable[[bytes], bytes]:
    """The archive with each entry changed to others: name, content, method."""

    def damage(data: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            for name in old.namelist():
                for written in change(name, old.read(name)):
                    new.writestr(*written)
        return out.getvalue()

    return damage


def central(entry_number: int, offset: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite bytes of an entry of the archive's directory."""

    def damage(data: bytes) -> bytes:
        at = int.from_bytes(data[-6:-2], "little")
        for _ in range(entry_number):
            at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
        return data[: at + offset] + value + data[at + offset + len(value) :]

    return damage


def end_record(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[: len(data) - 22 + offset] + value + data[len(data) - 22 + offset + len(value) :]


def bomb(name: str, data: bytes) -> list[Written]:
    return [(name, bytes(10**7) if "/data/" in name else data, DEFLATED)]


def bomb_of_a_pickle(name: str, data: bytes) -> list[Written]:
    return [(name, bytes(10**7), LZMA) if name.endswith("pkl") else (name, data, PLAIN)]


def big_endian(name: str, data: bytes) -> list[Written]:
    kept = [] if name.endswith("byteorder") else [(name, data, PLAIN)]
    return kept + [("archive/byteorder", b"big", PLAIN)] * name.endswith("pkl")


ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a bomb": (rezip(bomb), "compressed"),
    "a bomb of a pickle": (rezip(bomb_of_a_pickle), "compressed"),
    "two pickles": (rezip(lambda n, d: [(n, d, PLAIN), (n.replace("archive", "b"), d, PLAIN)]), "data.pkl"),
    "no pickle": (rezip(lambda n, d: [] if n.endswith("pkl") else [(n, d, PLAIN)]), "no data.pkl"),
    "other byte order": (rezip(big_endian), "little-endian"),
    "no storages": (rezip(lambda n, d: [] if "/data/" in n else [(n, d, PLAIN)]), "not in the file|one plain tensor"),
    "short storages": (rezip(lambda n, d: [(n, d[:-1] if "/data/" in n else d, PLAIN)]), "outside its|says"),
    "another local header": (central(1, 42, b"\0\0\0\0"), "not where its directory says"),
    "a local header beyond": (central(1, 42, b"\xff\xff\xff\x7f"), "not where its directory says"),
    "zip64 without its field": (central(1, 42, b"\xff\xff\xff\xff"), "not where its directory says"),
    "a size beyond": (central(1, 20, b"\xff\xff\xff\x7f" * 2), "not where its directory says"),
    "a larger size": (central(0, 20, (10**6).to_bytes(4, "little") * 2), "not where|overlap"),
    "two sizes": (central(1, 24, b"\xff\xff\xff\x7f"), "compressed or encrypted"),
    "encrypted": (central(0, 8, b"\1"), "encrypted"),
    "no directory": (lambda data: data[:-22] + bytes(22), "no directory at its end"),
    "directory of 4 GB": (end_record(12, b"\xff\xff\xff\xff"), "damaged"),
    "directory beyond": (end_record(16, b"\xff\xff\xff\xff"), "damaged"),
    "zip64 that is none": (
        lambda data: data[:-22] + b"PK\x06\x07" + struct.pack("<IQI", 0, 2**63, 1) + data[-22:], "zip64"
    ),
    "aliased entries": (lambda data: alias(data), "overlap|not where"),
    "a changed pickle": (lambda data: data.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", 1), "checksum"),
    "nothing": (lambda data: b"", "no directory|no bytes"),
    "cut": (lambda data: data[: len(data) // 2], "no directory"),
}  # fmt: skip


def alias(data: bytes) -> bytes:
    """The directory's entry of the first storage once more, under another name."""
    at = int.from_bytes(data[-6:-2], "little")
    at += 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    length = 46 + sum(struct.unpack_from("<HHH", data, at + 28))
    record = data[at : at + length].replace(b"data/0", b"data/x")
    size = int.from_bytes(data[-10:-6], "little") + length
    return data[:-22] + record + end_record(12, size.to_bytes(4, "little"))(data[-22:])


@pytest.mark.parametrize("kind", ["bin", "legacy", "megatron"])
@pytest.mark.parametrize("case", ARCHIVES)
def test_archives(model: Model, kind: str, case: str) -> None:
    """Of torch_dist: the archive of one chunk, which is opened only when it is copied."""
    damage, match = ARCHIVES[case]
    directory = model(kind)
    if kind != "megatron":
        path = directory / PLACES[kind]
        path.write_bytes(damage(path.read_bytes()))
    else:
        replace_chunk(directory, damage)
    refused(directory, match)


def replace_chunk(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    """Put a damaged archive of the embedding in a file of its own."""
    chunk = torch_dist.metadata(directory)["embedding.word_embeddings.weight"].chunks[0]
    with chunk.file.open("rb") as file:
        file.seek(chunk.file_offset)
        data = damage(file.read(chunk.length))
    (chunk.file.parent / "__1_0.distcp").write_bytes(data)

    def point(root: Any) -> None:
        for index, info in root["storage_data"].items:
            if index.state["fqn"] == "embedding.word_embeddings.weight":
                info.state.update(relative_path="__1_0.distcp", offset=0, length=len(data))

    edit_metadata(directory, point)


# --- tensors in pickles ---------------------------------------------------------------------------------------------


BF16 = Global("torch.BFloat16Storage")


def described(
    shape: Any = (10, 8),
    stride: Any = (8, 1),
    offset: Any = 0,
    key: Any = "0",
    kind: Any = BF16,
) -> Call:
    storage = Persistent(("storage", kind, key, "cpu", 80))
    return Call("torch._utils._rebuild_tensor_v2", (storage, offset, shape, stride, False, {}))


TENSORS: dict[str, Any] = {
    "outside its storage": described(offset=1),
    "far outside": described(offset=2**62),
    "negative offset": described(offset=-1),
    "offset true": described(offset=True),
    "offset of text": described(offset="0"),
    "another storage": described(key="99"),
    "no storage": described(key=None),
    "negative shape": described(shape=(-10, -8)),
    "huge shape": described(shape=(2**62, 2**62), stride=(2**62, 1)),
    "shape of tuples": described(shape=((10,), (8,))),
    "shape that multiplies": described(shape=(2**30, (1,))),
    "shape of text": described(shape="ab", stride="ab"),
    "shape without strides": described(stride=()),
    "strides of zero": described(stride=(0, 0)),
    "many axes": described(shape=(1,) * 1000, stride=(1,) * 1000),
    "unknown dtype": described(kind=Global("torch.QInt8Storage")),
    "dtype of a tuple": described(kind=(1,)),
    "no arguments": Call("torch._utils._rebuild_tensor_v2", ()),
    "no storage's arguments": Call("torch._utils._rebuild_tensor_v2", (Persistent(()), 0, (1,), (1,))),
    "a parameter of nothing": Call("torch._utils._rebuild_parameter", ()),
    "a number": 5,
    "nothing": None,
    "a class": Global("torch._utils._rebuild_tensor_v2"),
    "text": "weights",
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("kind", ["bin", "legacy"])
def test_tensors_in_pickles(model: Model, kind: str, case: str) -> None:
    directory = model(kind)
    path = directory / PLACES[kind]
    if kind == "bin":
        tree, storages = bin_tree(WANTED)
        path.write_bytes(torch_file({**tree, FIRST: TENSORS[case]}, storages))
    else:
        path.write_bytes(torch_file({"model": {"embedding.word_embeddings.weight": TENSORS[case]}}, {"0": bytes(160)}))
    refused(directory, ".")


# --- .metadata ------------------------------------------------------------------------------------------------------

META = "torch.distributed.checkpoint.metadata"


def edit_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    """Change what ``.metadata`` says: a tree of Instances, its dictionaries as Pairs or dict."""
    path = directory / "release/.metadata"
    root = rewritable(torch_pickle.loads(path.read_bytes(), str(path)))
    change(root.state)
    path.write_bytes(pickling.dumps(root))
    torch_dist._contents.cache_clear()


def rewritable(value: Any) -> Any:
    """What was read, as a value for ``dumps``."""
    if isinstance(value, torch_pickle.Stub):
        if value.args:
            return Call(value.name, tuple(map(rewritable, value.args)))
        return Instance(value.name, rewritable(value.state))
    if isinstance(value, torch_pickle.Named):
        return Global(value.name)
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: rewritable(item) for key, item in value.items()}
        return Pairs([(rewritable(key), rewritable(item)) for key, item in value.items()])
    if isinstance(value, tuple):
        return tuple(map(rewritable, value))
    return list(map(rewritable, value)) if isinstance(value, list) else value


KEY = "decoder.layers.mlp.linear_fc2.weight"


def chunk_with(**changes: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        chunk = root["state_dict_metadata"][KEY].state["chunks"][0].state
        for name, value in changes.items():
            chunk.update({name: value})

    return change


def tensor_with(**changes: Any) -> Callable[[Any], None]:
    return lambda root: root["state_dict_metadata"][KEY].state.update(changes)


def places_with(**changes: Any) -> Callable[[Any], None]:
    def change(root: Any) -> None:
        for index, info in root["storage_data"].items:
            if index.state["fqn"] == KEY:
                info.state.update(changes)

    return change


def aliased(root: Any) -> None:
    """Every chunk of a tensor at the place of another."""
    infos = [info for index, info in root["storage_data"].items if index.state["fqn"] == KEY]
    infos[1].state.update(infos[0].state)


def many_chunks(root: Any) -> None:
    """Many chunks that form no grid: comparing all pairs takes time with the square of their number."""
    chunks = [Instance("torch.Chunk", None)] * 0
    template = root["state_dict_metadata"][KEY].state["chunks"][0]
    places = list(root["storage_data"].items)
    info = next(info for index, info in places if index.state["fqn"] == KEY)
    index_name = places[0][0].cls
    count = 1000
    for i in range(count):
        chunks.append(Instance(template.cls, {"offsets": (0, i, 0), "sizes": (2, 2, 12)}))
        places.append((Instance(index_name, {"fqn": KEY, "offset": (0, i, 0), "index": None}), info))
    root["state_dict_metadata"][KEY].state.update(size=(2, 2 * count, 12), chunks=chunks)
    root["storage_data"] = Pairs(places)


METADATA: dict[str, tuple[Callable[[Any], object], str]] = {
    "negative sizes": (chunk_with(sizes=(-1, -8, -12)), "not the metadata"),
    "sizes of floats": (chunk_with(sizes=(1.0, 8.0, 12.0)), "not the metadata"),
    "sizes that are true": (chunk_with(sizes=(True, 8, 12)), "not the metadata"),
    "no sizes": (chunk_with(sizes=None), "not the metadata"),
    "sizes of nothing": (chunk_with(sizes=(0, 8, 12)), "outside"),
    "huge sizes": (chunk_with(sizes=(2**62, 2**62, 2**62)), "outside"),
    "fewer sizes": (chunk_with(sizes=(1, 8)), "not the metadata"),
    "negative offsets": (chunk_with(offsets=(-1, 0, 0)), "not the metadata"),
    "other offsets": (chunk_with(offsets=(0, 1, 0)), "stored nowhere"),
    "no chunks": (tensor_with(chunks=[]), "hold 0 of"),
    "chunks that are none": (tensor_with(chunks=[5]), "not the metadata"),
    "chunks of text": (tensor_with(chunks="ab"), "not the metadata"),
    "no chunks at all": (tensor_with(chunks=None), "not the metadata"),
    "no size": (tensor_with(size=None), "not the metadata"),
    "a size that multiplies": (tensor_with(size=(2**30, (1,), (1,))), "not the metadata"),
    "no properties": (tensor_with(properties=None), "not the metadata"),
    "an unknown dtype": (tensor_with(properties=Instance("torch.storage.x", ("I4",))), "dtype"),
    "absolute": (places_with(relative_path="/etc/passwd"), "outside the directory: /etc/passwd"),
    "above": (places_with(relative_path="../../x"), "outside the directory"),
    "dots": (places_with(relative_path=".."), "outside the directory"),
    "no path": (places_with(relative_path=None), "not the metadata"),
    "NUL": (places_with(relative_path="a\0b"), "cannot be opened|missing"),
    "negative place": (places_with(offset=-5), "not the metadata"),
    "place of text": (places_with(offset="0"), "not the metadata"),
    "place true": (places_with(length=True), "not the metadata"),
    "far": (places_with(offset=2**62), "truncated"),
    "long": (places_with(length=2**62), "truncated"),
    "aliased": (aliased, "bytes in common"),
    "a key that is no text": (
        lambda root: root.update(state_dict_metadata=Pairs([(5, Instance(f"{META}.X", None))])), "not the metadata"
    ),
    "entries of another kind": (lambda root: root.update(state_dict_metadata={KEY: 5}), "not the metadata"),
    "places of another kind": (lambda root: root.update(storage_data=[1]), "not the metadata"),
    "no places": (lambda root: root.pop("storage_data"), "not the metadata"),
    "many chunks without a grid": (many_chunks, "form no grid"),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_metadata(model: Model, case: str) -> None:
    change, match = METADATA[case]
    directory = model("megatron")
    edit_metadata(directory, change)
    refused(directory, match)


LARGE: dict[str, tuple[str, Damage, str]] = {
    "sparse .metadata": ("megatron", sparse("release/.metadata", 10**12), "at most"),
    "sparse .metadata of 100 MB": ("megatron", sparse("release/.metadata", 10**8, b"\x80\x04"), "opcode 0x00"),
    "sparse .bin": ("bin", sparse(hf_weights.BIN, 10**12), "no directory"),
    "sparse mp_rank": ("legacy", sparse(PLACES["legacy"], 10**12), "no directory"),
    "sparse config": ("safetensors", sparse("config.json", 10**12), "at most"),
    "sparse metadata.json": ("megatron", sparse("release/metadata.json", 10**12), "at most"),
    "tracker of 10 MB": ("megatron", text_file(torch_dist.TRACKER, b"1" * 10**7), "at most"),
    "sparse tracker": ("megatron", sparse(torch_dist.TRACKER, 10**12), "at most"),
    "binary tracker": ("megatron", text_file(torch_dist.TRACKER, bytes(range(128, 160))), "neither release"),
    "tracker of digits that are none": ("megatron", text_file(torch_dist.TRACKER, "²"), "neither release"),
    "tracker of the directory": ("megatron", text_file(torch_dist.TRACKER, ".."), "neither release"),
    "manifest of nothing": ("megatron", text_file("mst.json", "[]"), "not a manifest"),
    "deep manifest": ("megatron", text_file("mst.json", '{"a":' * 10**5), "not a manifest"),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_and_binary_files(model: Model, case: str) -> None:
    kind, damage, match = LARGE[case]
    directory = model(kind)
    damage(directory)
    with pytest.raises(InputError, match=match):
        convert(directory, directory.parent / "out", "hf" if kind in ("megatron", "legacy") else "megatron")
    assert sorted(path.name for path in directory.parent.iterdir()) == ["model"]


def test_a_rank_that_is_far_away(model: Model) -> None:
    directory = model("legacy")
    (directory / "release/mp_rank_00").rename(directory / "release/mp_rank_99999999999")
    refused(directory, "is missing")
    assert legacy.is_legacy(directory)


def test_the_archives_of_mst_are_read(tmp_path: Path) -> None:
    """Both writers of archives: mst's, with descriptors behind arrays, and zipfile's."""
    entries = archive.tensor_entries(pickling.dumps({"a": pickling.tensor_value("BF16", (2,))}), [])
    with (tmp_path / "x").open("wb") as file:
        archive.write(file, [*entries, ("data/0", b"abcd")])
    tree, storages = torch_pickle.open_archive(tmp_path / "x")
    dtype, shape, offset, nbytes = torch_pickle.stored_tensor(tree["a"], storages, "x")
    assert (dtype, shape, (tmp_path / "x").read_bytes()[offset : offset + nbytes]) == ("BF16", (2,), b"abcd")
