"""Pickles and ``torch.save`` archives without torch: read without running anything, written to the same bytes always.

Reading: every global becomes a stub that only remembers its name and its arguments; a name outside the allow-list
is refused. Writing: a small emitter, because the bytes of pickle and of torch.save change between versions and with
object identity, and a checkpoint's id must not. A ``torch.save`` archive is a zip of uncompressed entries; a tensor's
data is the entry ``archive/data/0`` (MEGATRON.md, "torch_dist on disk"); mst_core.archive writes them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mst_core.errors import InputError
from mst_core.tensors import DTYPE_BYTES, DTYPE_NAMES, TORCH_NAMES

STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}

# --- reading ---------------------------------------------------------------------------------------------------


class Stub:
    """An object of a class that was not imported: its name, what it was called with, the state it was given."""

    name = ""

    def __new__(cls, *args: Any) -> Stub:
        # Unpickling may leave __init__ out, never __new__.
        stub = object.__new__(cls)
        stub.args = args
        stub.state = None
        return stub

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, key: str) -> Any:
        """A field of a dataclass."""
        return (self.state or {}).get(key)

    def __hash__(self) -> int:
        # A MetadataIndex is a dictionary key before its state arrives, so identity it is.
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def append(self, item: Any) -> None:
        """Containers of stubbed classes may be filled: the contents are not needed."""

    def extend(self, items: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


ALLOWED = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "torch.storage.",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_parameter",
    "megatron.core.",
    "argparse.Namespace",
    "signal.Signals",
    "pathlib.",
    "numpy.",
    "_codecs.encode",
    "_io.BytesIO",
    "collections.OrderedDict",
)


def _stub_class(full_name: str) -> type[Stub]:
    class Named(Stub):
        name = full_name

    return Named


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: str) -> None:
        super().__init__(file)
        self._where = where
        self._stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.Size":
            return tuple
        if module == "torch" and name in DTYPE_NAMES:
            return DTYPE_NAMES[name]
        if full == "collections.OrderedDict":
            return dict
        if full.startswith(ALLOWED) or (module == "torch" and name.endswith("Storage")):
            if full not in self._stubs:
                self._stubs[full] = _stub_class(full)
            return self._stubs[full]
        raise InputError(f"the pickle asks for {full}, which no checkpoint needs: not read", where=self._where)

    def persistent_load(self, pid: Any) -> Any:
        return Stub(*pid)


def loads(data: bytes, where: str) -> Any:
    """Unpickle with stubs. InputError: not a pickle, or a global that is not on the list."""
    try:
        return _Unpickler(io.BytesIO(data), where).load()
    except InputError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise InputError(f"cannot be unpickled: {error}", where=where) from error


def load_archive(data: bytes, where: str) -> Any:
    """The object of a ``torch.save`` archive; tensors in it come as stubs."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
            if name is None:
                raise InputError("an archive holds no data.pkl", where=where)
            return loads(archive.read(name), where)
    except zipfile.BadZipFile as error:
        raise InputError(f"an archive is damaged: {error}", where=where) from error


def tensor_data(read: Callable[[int, int], bytes], length: int, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and (offset, bytes) of the data in a ``torch.save`` archive of one tensor.

    ``read(offset, count)`` gives bytes of the archive, so that the data itself need not be read to find it.
    """
    view = _Window(read, length)
    try:
        with zipfile.ZipFile(io.BufferedReader(view)) as archive:
            names = {info.filename: info for info in archive.infolist()}
            pickled = next((n for n in names if n.endswith("/data.pkl")), None)
            stored = [info for n, info in names.items() if "/data/" in n]
            if pickled is None or len(stored) != 1 or stored[0].compress_type != zipfile.ZIP_STORED:
                raise InputError("a chunk is not one plain tensor", where=where)
            tensor = loads(archive.read(pickled), where)
    except (zipfile.BadZipFile, struct.error) as error:
        raise InputError(f"a chunk is damaged: {error}", where=where) from error
    name_length, extra_length = struct.unpack("<26xHH", read(stored[0].header_offset, 30))
    start = stored[0].header_offset + 30 + name_length + extra_length
    dtype, shape = _layout(tensor, where)
    return dtype, shape, start, stored[0].file_size


def open_archive(path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The object of a ``torch.save`` file, tensors as stubs, and (offset, bytes) of each storage in the file."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            infos = {info.filename: info for info in archive.infolist()}
            pickled = next((name for name in infos if name.endswith("/data.pkl")), None)
            if pickled is None:
                raise InputError("an archive holds no data.pkl", where=path)
            tree = loads(archive.read(pickled), str(path))
            storages = {}
            for name, info in infos.items():
                if "/data/" not in name:
                    continue
                if info.compress_type != zipfile.ZIP_STORED:
                    raise InputError("a storage is compressed", where=path)
                file.seek(info.header_offset)
                name_length, extra_length = struct.unpack("<26xHH", file.read(30))
                start = info.header_offset + 30 + name_length + extra_length
                if start + info.file_size > path.stat().st_size:
                    raise InputError("is truncated", where=path)
                storages[name.rpartition("/")[2]] = (start, info.file_size)
    except zipfile.BadZipFile as error:
        raise InputError(
            f"is damaged, or was saved by torch before 1.6: {error}",
            where=path,
            hint="save it again with a newer torch",
        ) from error
    except (struct.error, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise InputError(f"is damaged: {error}", where=path) from error
    return tree, storages


def stored_tensor(
    value: Any, storages: Mapping[str, tuple[int, int]], where: str
) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, offset in the file, bytes) of a tensor stub of ``open_archive``. InputError if it is not dense."""
    if isinstance(value, Stub) and value.name.startswith("torch._utils._rebuild_parameter"):
        value = value.args[0]
    dtype, shape = _layout(value, where, within=True)
    key, start = str(value.args[0].args[2]), int(value.args[1])
    if key not in storages:
        raise InputError("its storage is not in the file", where=where)
    offset, size = storages[key]
    skip, nbytes = start * DTYPE_BYTES[dtype], prod(shape) * DTYPE_BYTES[dtype]
    if start < 0 or skip + nbytes > size:
        raise InputError("it lies outside its storage", where=where)
    return dtype, shape, offset + skip, nbytes


def _layout(tensor: Any, where: str, *, within: bool = False) -> tuple[str, tuple[int, ...]]:
    if not isinstance(tensor, Stub) or not tensor.name.startswith("torch._utils._rebuild_tensor"):
        raise InputError("a chunk is not a tensor", where=where)
    if len(tensor.args) < 4 or not isinstance(tensor.args[0], Stub) or len(tensor.args[0].args) < 3:
        raise InputError("a tensor is not described as torch does it", where=where)
    storage, offset, shape, stride = tensor.args[:4]
    dense, step = True, 1
    for size, jump in zip(reversed(shape), reversed(stride), strict=True):
        dense, step = dense and (size == 1 or jump == step), step * size
    if (offset and not within) or not dense:
        raise InputError("a tensor is not stored row by row", where=where)
    kind = storage.args[1]
    name = kind if isinstance(kind, str) else str(kind.name).rsplit(".", 1)[-1]
    for dtype, storage_name in STORAGES.items():
        if name in (storage_name, dtype):
            return dtype, tuple(shape)
    raise InputError(f"a chunk has the dtype {name}, which is not known", where=where)


class _Window(io.RawIOBase):
    """A read-only file over ``read(offset, count)``."""

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length, self._at = read, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(self._at, min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# --- writing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Global:
    """A class or function by name."""

    name: str


@dataclass(frozen=True)
class Call:
    """``function(*args)``."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Instance:
    """An object made by ``__new__`` and then given ``state``."""

    cls: str
    state: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """A persistent id (torch: a storage)."""

    pid: tuple[Any, ...]


@dataclass(frozen=True)
class Pairs:
    """A dictionary whose keys are objects."""

    items: Sequence[tuple[Any, Any]]


def dumps(value: Any) -> bytes:
    """Protocol 2, no memo: the same value gives the same bytes in every version of Python and torch."""
    out = bytearray(b"\x80\x02")
    _emit(out, value)
    return bytes(out + b".")


def _emit(out: bytearray, value: Any) -> None:
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        _emit_int(out, value)
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode()
        out += b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, (tuple, list)):
        _emit_items(out, value)
    elif isinstance(value, (Mapping, Pairs)):
        out += b"}("
        for key, item in value.items() if isinstance(value, Mapping) else value.items:
            _emit(out, key)
            _emit(out, item)
        out += b"u"
    else:
        _emit_object(out, value)


def _emit_int(out: bytearray, value: int) -> None:
    if -(2**31) <= value < 2**31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data


def _emit_items(out: bytearray, value: tuple[Any, ...] | list[Any]) -> None:
    out += b"(" if isinstance(value, tuple) else b"]("
    for item in value:
        _emit(out, item)
    out += b"t" if isinstance(value, tuple) else b"e"


def _emit_global(out: bytearray, name: str) -> None:
    module, attribute = name.rsplit(".", 1)
    out += b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _emit_object(out: bytearray, value: Any) -> None:
    if isinstance(value, Global):
        _emit_global(out, value.name)
    elif isinstance(value, Call):
        _emit_global(out, value.function)
        _emit(out, value.args)
        out += b"R"
    elif isinstance(value, Instance):
        _emit_global(out, value.cls)
        out += b")\x81"
        _emit(out, value.state)
        out += b"b"
    elif isinstance(value, Persistent):
        _emit(out, value.pid)
        out += b"Q"
    else:
        raise TypeError(f"no way to pickle a {type(value).__name__}")


def tensor_value(dtype: str, shape: Sequence[int], storage_key: str = "0") -> Call:
    """A dense tensor that fills its storage, to be put into a value for ``dumps``."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= size
    storage = Persistent(("storage", Global(f"torch.{STORAGES[dtype]}"), storage_key, "cpu", count))
    args = (storage, 0, tuple(shape), tuple(reversed(strides)), False, Call("collections.OrderedDict", ()))
    return Call("torch._utils._rebuild_tensor_v2", args)


def pickled_tensor(dtype: str, shape: Sequence[int]) -> bytes:
    """The data.pkl of one dense tensor."""
    return dumps(tensor_value(dtype, shape))


def torch_dtype_global(dtype: str) -> Global:
    """``torch.bfloat16`` for "BF16"."""
    return Global(f"torch.{TORCH_NAMES[dtype]}")
