"""Mutations of valid files: each is read or refused with an InputError, with no memory beyond a small constant.

The same mutations every time; ``-m slow`` runs twenty times as many. tests/fuzz/fuzz_headers.py goes on for as long as
it is let.
"""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPEC = importlib.util.spec_from_file_location("fuzz_harness", Path(__file__).with_name("harness.py"))
assert SPEC is not None
assert SPEC.loader is not None
harness = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(harness)

LIMIT = 8 << 20
"""Bytes for a file of a few kilobytes."""
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
OPCODES = (
    b"\x80\x81\x85\x86\x87\x88\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96()tla]}eusbcRQqrhj012NKMJGXCB.io"
)

edit = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 255)),
    st.tuples(st.just("opcode"), st.integers(0, 10**6), st.sampled_from(OPCODES)),
    st.tuples(st.just("number"), st.integers(0, 10**6), st.sampled_from(NUMBERS)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.integers(1, 40)),
    st.tuples(st.just("copy"), st.integers(0, 10**6), st.integers(1, 200)),
    st.tuples(st.just("end"), st.integers(0, 10**6), st.just(0)),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from([-1, 2.5, 1e308, *NUMBERS]), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def mutate(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    for kind, place, value in edits:
        at = place % (len(data) + 1)
        if kind in ("flip", "opcode"):
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "number":
            width = max(1, (value.bit_length() + 7) // 8)
            data = data[:at] + value.to_bytes(width, "little") + data[at + width :]
        elif kind == "cut":
            data = data[:at] + data[at + value :]
        elif kind == "copy":
            data = data[:at] + data[at : at + value] + data[at:]
        else:
            data = data[:at]
    return data


def checked(kind: str, data: bytes, directory: Path) -> bool:
    tracemalloc.start()
    try:
        return bool(harness.attempt(kind, data, directory))
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < LIMIT, f"{peak} bytes of memory"


def graft(value: Any, place: int, new: Any) -> Any:
    """``value`` with ``new`` in one of its places."""
    if isinstance(value, dict) and value and place % 3:
        key = sorted(value)[place % len(value)]
        return {**value, key: graft(value[key], place // 3, new)}
    if isinstance(value, list) and value and place % 3:
        index = place % len(value)
        return [*value[:index], graft(value[index], place // 3, new), *value[index + 1 :]]
    return new


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(harness.prepare(tmp_path_factory.mktemp("fuzz")))


@pytest.mark.parametrize("kind", harness.TARGETS)
def test_the_seeds_are_taken(directory: Path, kind: str) -> None:
    assert checked(kind, harness.TARGETS[kind][0], directory)


def bytes_test(examples: int) -> Any:
    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(edits=st.lists(edit, min_size=1, max_size=6))
    def test(directory: Path, kind: str, edits: list[tuple[str, int, int]]) -> None:
        checked(kind, mutate(harness.TARGETS[kind][0], edits), directory)

    return pytest.mark.parametrize("kind", harness.TARGETS)(test)


def structure_test(examples: int) -> Any:
    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(place=st.integers(0, 10**6), new=values)
    def test(directory: Path, kind: str, place: int, new: Any) -> None:
        seed = harness.TARGETS[kind][0]
        if kind == "safetensors":
            length = int.from_bytes(seed[:8], "little")
            text = json.dumps(graft(json.loads(seed[8 : 8 + length]), place, new)).encode()
            checked(kind, len(text).to_bytes(8, "little") + text + seed[8 + length :], directory)
        else:
            checked(kind, json.dumps(graft(json.loads(seed), place, new)).encode(), directory)

    return pytest.mark.parametrize("kind", ["safetensors", "index", "config"])(test)


test_bytes = bytes_test(40)
test_structures = structure_test(60)
test_many_bytes = pytest.mark.slow(bytes_test(2000))
test_many_structures = pytest.mark.slow(structure_test(2000))
