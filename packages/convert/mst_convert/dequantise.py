"""Quantised Hugging Face weights: which tensors they are (from headers), and their elements as bf16, rows by rows.

mxfp4   gpt-oss experts. NAME_blocks [experts, out, groups, 16] uint8 and NAME_scales [experts, out, groups] uint8 are
        NAME. A byte holds two FP4 (E2M1) numbers, the low half first; a scale is the exponent of 2, plus 127, of 32 of
        them. As transformers 5.24, integrations/mxfp4.py ``convert_moe_packed_tensors``, before it swaps [out, in] to
        the [in, out] of the plain tensor (MAPPINGS.md 2.13). Every product is exact in bf16.
fp8     DeepSeek-V3, Qwen3-FP8: NAME [out, in] float8_e4m3fn and NAME_scale_inv [out / 128, in / 128], both rounded up:
        each block of 128 x 128 (``weight_block_size``) times its scale, in fp32, rounded once. As ``weight_dequant`` of
        DeepSeek-V3 inference/kernel.py and ``Fp8Dequantize`` of transformers 5.24, integrations/finegrained_fp8.py.

No torch and no numpy before elements are read: a plan needs the names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from mst_core.blocks import Array, Coded, Place
from mst_core.errors import InputError, MstError
from mst_core.tensors import DTYPE_BYTES, WEIGHT_DTYPES, TensorRef, torch_dtype

Reader = Callable[[Path, int, memoryview], None]
"""Fills memory from an offset of a file."""

BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1, by their four bits (OCP Microscaling Formats 1.0, 5.3.3)."""
GROUP, GROUP_BYTES = 32, 16
BAND = 1 << 17
"""Elements (of whole rows) that are computed at a time: 512 KB in fp32."""


# --- which tensors -----------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """What the tensors are once dequantised.

    refs    every tensor by name; of a coded one the dtype and shape of its elements, the place of its codes
    coded   how to compute those, by name
    """

    refs: dict[str, TensorRef]
    coded: dict[str, Coded] = field(default_factory=dict)
    method: str | None = None
    faults: list[MstError] = field(default_factory=list)

    def add(self, name: str, ref: TensorRef, shape: tuple[int, ...], scales: TensorRef, block: tuple[int, int]) -> None:
        """The tensor ``name`` of ``shape`` has its codes in ``ref``."""
        self.refs[name] = TensorRef(name, "BF16", shape, ref.file, ref.offset, prod(shape) * DTYPE_BYTES["BF16"])
        place = Place(scales.file, scales.offset)
        self.coded[name] = Coded("fp8" if ref.dtype == "F8_E4M3" else "mxfp4", place, scales.dtype, block)

    def sentences(self) -> list[str]:
        """What the plan says of it."""
        scales = "their scales are used up"
        return [f"{len(self.coded)} tensors from {self.method} to bf16; {scales}"] if self.coded else []


def plain(refs: Mapping[str, TensorRef], config: Mapping[str, Any], where: Path) -> Plain:
    """The tensors of a directory whose config.json may say that they are quantised. InputError: not in a known way."""
    quantization = config.get("quantization_config")
    if not quantization:
        return Plain(dict(refs))
    settings = quantization if isinstance(quantization, Mapping) else {}
    method = settings.get("quant_method", "unknown")
    if method == "mxfp4":
        found = _mxfp4(refs)
    elif method == "fp8" and (block := _block_of(settings)) is not None:
        found = _fp8(refs, block)
    else:
        raise InputError(
            f"the weights are quantised ({method}), and only plain ones, MXFP4, and FP8 in blocks can be converted",
            where=where,
            hint="give the unquantised model",
        )
    found.method = str(method)
    if not found.coded and not found.faults:
        raise InputError(
            f"says that the weights are quantised ({method}), and none are",
            where=where,
            hint="if they are plain, remove quantization_config from config.json",
        )
    return found


def _block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    block = settings.get("weight_block_size")
    good = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return (block[0], block[1]) if block and good and settings.get("fmt", "e4m3") == "e4m3" else None


def _mxfp4(refs: Mapping[str, TensorRef]) -> Plain:
    found = Plain({})
    for name, ref in refs.items():
        stem = name.removesuffix(BLOCKS)
        if name.endswith(SCALES):
            if name.removesuffix(SCALES) + BLOCKS not in refs:
                found.faults.append(InputError(f"missing, but there is {name}", where=name[: -len(SCALES)] + BLOCKS))
        elif stem == name:
            found.refs[name] = ref
        elif ref.dtype != "U8" or len(ref.shape) != 4 or ref.shape[3] != GROUP_BYTES:
            expected = f"expected U8 [experts, out, groups, {GROUP_BYTES}]"
            found.faults.append(InputError(f"{ref.dtype} {list(ref.shape)}, {expected}", where=name))
        else:
            if stem in refs:
                found.faults.append(InputError("is there quantised and plain", where=stem))
            scales = refs.get(stem + SCALES)
            found.faults += _scales_faults(stem + SCALES, scales, ("U8",), ref.shape[:3])
            experts, out, groups, _ = ref.shape
            found.add(stem, ref, (experts, groups * GROUP, out), scales or ref, (1, GROUP))
    return found


def _fp8(refs: Mapping[str, TensorRef], block: tuple[int, int]) -> Plain:
    found = Plain({})
    for name, ref in refs.items():
        if name.endswith(SCALE_INV):
            scaled = refs.get(name.removesuffix(SCALE_INV))
            if scaled is None or scaled.dtype != "F8_E4M3":
                found.faults.append(InputError("scales no tensor of dtype F8_E4M3", where=name))
        elif ref.dtype == "F8_E4M3":
            scales = refs.get(name + SCALE_INV)
            if len(ref.shape) == 2:
                shape = (-(-ref.shape[0] // block[0]), -(-ref.shape[1] // block[1]))
                found.faults += _scales_faults(name + SCALE_INV, scales, WEIGHT_DTYPES, shape)
            else:
                found.faults.append(InputError(f"F8_E4M3 {list(ref.shape)}: only matrices are dequantised", where=name))
            found.add(name, ref, ref.shape, scales or ref, block)
        else:
            if ref.dtype == "F8_E5M2":
                found.faults.append(InputError("has the dtype F8_E5M2, expected F8_E4M3", where=name))
            found.refs[name] = ref
    return found


def _scales_faults(
    name: str, scales: TensorRef | None, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> list[MstError]:
    if scales is None:
        return [InputError(f"missing, expected {list(shape)}", where=name)]
    if scales.dtype not in dtypes:
        return [InputError(f"has the dtype {scales.dtype}, expected {' or '.join(dtypes)}", where=name)]
    if scales.shape != shape:
        return [InputError(f"{list(scales.shape)}, expected {list(shape)}", where=name)]
    return []


# --- their elements ----------------------------------------------------------------------------------------------


def decode(array: Array, coded: Coded, codes: Place, start: int, into: memoryview, read: Reader) -> None:
    """Fill ``into`` with the bytes from ``start`` on of the array's bf16 elements, computed by bands of whole rows."""
    width = array.nbytes // array.rows if array.rows else 0
    make = DECODERS[coded.code]
    done = 0
    while done < len(into):
        row, skip = divmod(start + done, width)
        rows = min(max(1, BAND // array.columns), -(-(skip + len(into) - done) // width))
        part = make(array, coded, codes, row, rows, read)[skip : skip + len(into) - done]
        into[done : done + len(part)] = part
        done += len(part)


def mxfp4_rows(array: Array, coded: Coded, codes: Place, row: int, rows: int, read: Reader) -> memoryview:
    """``rows`` rows of an mxfp4 array, bf16."""
    import numpy as np

    groups = array.columns // GROUP
    pairs = np.frombuffer(_bytes(read, codes, row * groups * GROUP_BYTES, rows * groups * GROUP_BYTES), np.uint8)
    scales = np.frombuffer(_bytes(read, coded.scales, row * groups, rows * groups), np.uint8)
    index = (scales.astype(np.uint16) << 8)[:, None] | pairs.reshape(-1, GROUP_BYTES)
    return memoryview(mxfp4_pairs().take(index).reshape(-1).view(np.uint8))


@lru_cache(maxsize=1)
def mxfp4_pairs() -> Any:
    """Two bf16 numbers of each scale and byte, at ``256 * scale + byte``, as one little-endian uint32 [65536].

    The scale 255 (in the format not a number) is 2 to the 128, as torch's ldexp has it: what is too large is infinite.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        values = np.ldexp(np.array(FP4, np.float32), np.arange(-127, 129, dtype=np.int32)[:, None])
    bits = values.view(np.uint32) >> 16  # exact: two bits of mantissa, none below bf16's smallest
    low, high = bits[:, np.arange(256) & 15], bits[:, np.arange(256) >> 4]
    return (low | high << 16).reshape(-1).astype("<u4")


def fp8_rows(array: Array, coded: Coded, codes: Place, row: int, rows: int, read: Reader) -> memoryview:
    """``rows`` rows of an fp8 array, bf16."""
    import torch

    down, across = coded.block
    codes_of = _bytes(read, codes, row * array.columns, rows * array.columns)
    weights = torch.frombuffer(codes_of, dtype=torch.float8_e4m3fn).to(torch.float32).reshape(rows, array.columns)
    first, last = row // down, (row + rows - 1) // down
    wide = -(-array.columns // across)
    item = DTYPE_BYTES[coded.scales_dtype]
    raw = _bytes(read, coded.scales, first * wide * item, (last + 1 - first) * wide * item)
    scales = torch.frombuffer(raw, dtype=torch_dtype(coded.scales_dtype)).to(torch.float32).reshape(-1, wide)
    scales = scales.repeat_interleave(across, 1)[:, : array.columns]
    for block in range(first, last + 1):
        weights[max(0, block * down - row) : (block + 1) * down - row] *= scales[block - first]
    return memoryview(weights.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy())


def _bytes(read: Reader, place: Place, start: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    read(place.file, place.offset + place.skip + start, memoryview(data))
    return data


Rows = Callable[[Array, Coded, Place, int, int, Reader], memoryview]
DECODERS: dict[str, Rows] = {"mxfp4": mxfp4_rows, "fp8": fp8_rows}
