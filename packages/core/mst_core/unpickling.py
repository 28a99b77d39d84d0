"""Pickles read without running anything: a small machine for the opcodes that checkpoints are made of.

Python's unpickler is not used. With an allow-list of classes it runs nothing either, but a hostile file can still make
it allocate gigabytes (a memo number, a length) or kill the process (a tuple of tuples of tuples as a dictionary's key).
Here every opcode is on a list, each makes at most one object out of the bytes it has, and a class or function becomes
a stub that remembers its name, its arguments and its state. So time and memory are bounded by the length of the pickle.
Pickles of protocol 2 to 5 are read: torch writes nothing older.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mst_core.errors import InputError
from mst_core.tensors import DTYPE_NAMES
from mst_core.untrusted import MAX_DIMS

ALLOWED = frozenset(
    {
        "_codecs.encode",
        "_io.BytesIO",
        "argparse.Namespace",
        "collections.OrderedDict",
        "signal.Signals",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.serialization._get_layout",
    }
)
ALLOWED_BELOW = (
    "megatron.core.",
    "numpy.",
    "pathlib.",
    "torch.distributed._shard.",
    "torch.distributed.checkpoint.",
    "torch.storage.",
)
"""Names that a pickle may speak of. None of them is imported."""
MAX_NAME, MAX_INTEGER, MAX_KEY, MAX_INTEGER_KEY, MAX_MORE = 512, 255, 16, 1 << 60, 16
"""Of a class's name, bytes of an integer, a tuple that is a key, an integer that is one (larger ones share hashes),
attributes that an object gets after the first ones."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, by its name."""

    name: str


class Stub:
    """An object of a class that was not imported: its name, what it was called with, the state it was given."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None

    state: Any

    def __getitem__(self, key: str) -> Any:
        """A field of a dataclass, or None."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def loads(data: bytes, where: str) -> Any:
    """The object of a pickle, with stubs. InputError: not a pickle, or a global that is not on the list."""
    return traced(data, where)[0]


def traced(data: bytes, where: str) -> tuple[Any, dict[int, Any]]:
    """``loads``, and the pickle's memo: what stands under which number when it ends."""
    machine = _Machine(data, where)
    try:
        return machine.run(), machine.memo
    except (ValueError, struct.error) as error:
        raise InputError(f"cannot be unpickled: {error}, at byte {machine.at}", where=where) from error


class _Machine:
    """A stack, marks in it, and a memo. A ValueError says what is wrong with the pickle."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        if self.data[:1] != b"\x80":
            raise ValueError("no pickle of protocol 2 or later")
        data, steps, end = self.data, STEPS, len(self.data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == STOP:
                return self.pop()
            step = steps.get(code)
            if step is None:
                raise ValueError(f"opcode 0x{code:02x}, which no checkpoint needs")
            step(self)
        raise ValueError("it ends too early")

    # --- bytes -----------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ValueError(f"{count} bytes are asked for and not there")
        return self.data[start : self.at]

    def number(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def integer(self, width: int) -> None:
        count = self.number(width)
        if count > MAX_INTEGER:
            raise ValueError(f"an integer of {count} bytes")
        self.push(self.number(count, signed=True))

    def text(self, width: int) -> None:
        self.push(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME)
        if end < 0:
            raise ValueError("a name without an end")
        return (self.take(end - self.at) + self.take(1))[:-1].decode()

    # --- stack ------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("the stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("no mark was set")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def put(self, number: int) -> None:
        self.memo[number] = self.top()

    def get(self, number: int) -> None:
        if number not in self.memo:
            raise ValueError(f"memo {number} was not set")
        self.push(self.memo[number])

    # --- containers ---------------------------------------------------------------------------------------------

    def append(self, items: list[Any]) -> None:
        into = self.top()
        if isinstance(into, list):
            into.extend(items)
        elif not isinstance(into, Stub):  # what a container of a stubbed class holds is not needed
            raise ValueError("something is appended to what is no list")

    def fill(self, items: list[Any]) -> None:
        into = self.top()
        if len(items) % 2 or not isinstance(into, (dict, Stub)):
            raise ValueError("items are set of what is no dictionary")
        if isinstance(into, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                into[_key(key)] = value

    def add(self, items: list[Any]) -> None:
        into = self.top()
        if not isinstance(into, set):
            raise ValueError("something is added to what is no set")
        into.update(map(_key, items))

    # --- classes ------------------------------------------------------------------------------------------------

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > MAX_NAME:
            raise ValueError("a class without a name")
        full = f"{module}.{name}"
        if module == "torch" and name in DTYPE_NAMES:
            self.push(DTYPE_NAMES[name])
        elif full in ALLOWED or full.startswith(ALLOWED_BELOW) or (module == "torch" and name.endswith("Storage")):
            self.push(Named(full))
        else:
            raise InputError(f"the pickle asks for {full}, which no checkpoint needs: not read", where=self.where)

    def call(self) -> None:
        function, args = self.last(2)
        if not isinstance(function, Named) or not isinstance(args, tuple):
            raise ValueError("something is called that is no function")
        if function.name == "torch.Size":
            if len(args) != 1 or not isinstance(args[0], (tuple, list)) or len(args[0]) > MAX_DIMS:
                raise ValueError("a torch.Size that is none")
            self.push(tuple(args[0]))
        elif function.name == "collections.OrderedDict":
            if args:
                raise ValueError("an OrderedDict that is made of something")
            self.push({})
        else:
            self.push(Stub(function.name, args))

    def call_with_names(self) -> None:
        self.pop()  # keyword arguments are not needed
        self.call()

    def build(self) -> None:
        state = self.pop()
        into = self.top()
        if not isinstance(into, Stub):
            return  # attributes of dictionaries (_metadata of a state_dict) are not needed
        if isinstance(into.state, dict) and isinstance(state, dict):
            if len(state) > MAX_MORE:
                raise ValueError("an object gets its attributes twice")
            into.state.update(state)  # what torch_pickle.amended_archive adds
        else:
            into.state = state

    def persistent(self) -> None:
        pid = self.pop()
        if not isinstance(pid, tuple):
            raise ValueError("a storage without a description")
        self.push(Stub("", pid))


def _key(value: Any) -> Any:
    """A value that may be a key or in a set: hashing it takes no time to speak of."""
    parts = value if isinstance(value, tuple) and len(value) <= MAX_KEY else (value,)
    for part in parts:
        large = isinstance(part, int) and abs(part) >= MAX_INTEGER_KEY
        if large or not (part is None or isinstance(part, (str, bytes, int, Stub, Named))):
            raise ValueError(f"a {type(part).__name__} as a key")
    return value


STOP = ord(".")
STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # the protocol
    0x95: lambda m: m.take(8),  # the length of a frame
    # constants and numbers
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    0x8A: lambda m: m.integer(1),
    0x8B: lambda m: m.integer(4),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    # text and bytes
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    # containers
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.push(m.last(1)),
    0x86: lambda m: m.push(m.last(2)),
    0x87: lambda m: m.push(m.last(3)),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.fill(list(m.last(2))),
    ord("u"): lambda m: m.fill(m.since_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: lambda m: m.add(m.since_mark()),
    0x91: lambda m: m.push(frozenset(map(_key, m.since_mark()))),
    # stack and memo
    ord("("): lambda m: m.mark(),
    ord("0"): lambda m: m.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.push(m.top()),
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
    # classes
    ord("c"): lambda m: m.find(m.line(), m.line()),
    0x93: lambda m: m.find(*m.last(2)),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.call(),
    0x92: lambda m: m.call_with_names(),
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.persistent(),
}
