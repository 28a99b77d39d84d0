"""Pickles written without torch, and to the same bytes always.

A small emitter, because the bytes of pickle and of torch.save change between versions and with object identity, and a
checkpoint's id must not. mst_core.unpickling reads pickles, mst_core.archive puts them into archives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mst_core.tensors import TORCH_NAMES

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
    emit(out, value)
    return bytes(out + b".")


def emit(out: bytearray, value: Any) -> None:
    emit = EMITTERS.get(type(value))
    if emit is None:
        emit = next((emit for kind, emit in EMITTERS.items() if isinstance(value, kind)), None)
    if emit is None:
        raise TypeError(f"no way to pickle a {type(value).__name__}")
    emit(out, value)


def _emit_none(out: bytearray, _: None) -> None:
    out += b"N"


def _emit_bool(out: bytearray, value: bool) -> None:
    out += b"\x88" if value else b"\x89"


def _emit_int(out: bytearray, value: int) -> None:
    if -(2**31) <= value < 2**31:
        out += b"J" + value.to_bytes(4, "little", signed=True)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data


def _emit_float(out: bytearray, value: float) -> None:
    out += b"G" + struct.pack(">d", value)


@lru_cache(maxsize=1024)
def _text(value: str) -> bytes:
    text = value.encode()
    return b"X" + struct.pack("<I", len(text)) + text


def _emit_text(out: bytearray, value: str) -> None:
    out += _text(value)


def _emit_tuple(out: bytearray, value: tuple[Any, ...]) -> None:
    out += b"("
    for item in value:
        emit(out, item)
    out += b"t"


def _emit_list(out: bytearray, value: list[Any]) -> None:
    out += b"]("
    for item in value:
        emit(out, item)
    out += b"e"


def _emit_items(out: bytearray, value: Mapping[Any, Any] | Pairs) -> None:
    out += b"}("
    for key, item in value.items if isinstance(value, Pairs) else value.items():
        emit(out, key)
        emit(out, item)
    out += b"u"


@lru_cache(maxsize=1024)
def _global(name: str) -> bytes:
    module, attribute = name.rsplit(".", 1)
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _emit_global(out: bytearray, value: Global) -> None:
    out += _global(value.name)


def _emit_call(out: bytearray, value: Call) -> None:
    out += _global(value.function)
    emit(out, value.args)
    out += b"R"


def _emit_instance(out: bytearray, value: Instance) -> None:
    out += _global(value.cls) + b")\x81"
    emit(out, value.state)
    out += b"b"


def _emit_persistent(out: bytearray, value: Persistent) -> None:
    emit(out, value.pid)
    out += b"Q"


EMITTERS: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): _emit_none, bool: _emit_bool, int: _emit_int, float: _emit_float, str: _emit_text, tuple: _emit_tuple,
    list: _emit_list, Global: _emit_global, Call: _emit_call, Instance: _emit_instance, Persistent: _emit_persistent,
    Pairs: _emit_items, Mapping: _emit_items,
}  # fmt: skip
"""How each type is written; bool before int, for one is the other."""


def tensor_value(dtype: str, shape: Sequence[int], storage_key: str = "0") -> Call:
    """A dense tensor that fills its storage, to be put into a value for ``dumps``."""
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= size
    storage = Persistent(("storage", Global(f"torch.{STORAGES[dtype]}"), storage_key, "cpu", count))
    args = (storage, 0, tuple(shape), tuple(reversed(strides)), False, Call("collections.OrderedDict", ()))
    return Call("torch._utils._rebuild_tensor_v2", args)


@lru_cache(maxsize=1024)
def pickled_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The data.pkl of one dense tensor."""
    return dumps(tensor_value(dtype, shape))


def torch_dtype_global(dtype: str) -> Global:
    """``torch.bfloat16`` for "BF16"."""
    return Global(f"torch.{TORCH_NAMES[dtype]}")
