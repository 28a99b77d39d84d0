"""Adapters of q, k, v as one of linear_qkv (gate, up of linear_fc1), exactly: equal A's are shared, others stacked.

With A_1 ... A_n the different A's of a layer's parts, A = [A_1; ...; A_n] and the B of a part has its numbers in the
columns of its own A and zeros elsewhere: B @ A is then the delta of each part in its rows. The bridges have one rank
and one alpha for all layers: A is filled up with rows, B with columns of zeros, and alpha follows, so that the scale
stays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mst_convert.adapters.lora import Lora, Pair
from mst_convert.adapters.names import Site
from mst_core.errors import InputError, MstError, many
from mst_core.tensors import torch_dtype


@dataclass(frozen=True)
class Shared:
    """Which of a site's parts have the same A. ``groups``: a number for each part, None for one without adapter."""

    site: Site
    pairs: tuple[Pair | None, ...]
    groups: tuple[int | None, ...]

    @property
    def ranks(self) -> list[int]:
        """The rank of each different A."""
        ranks: dict[int, int] = {}
        for pair, group in zip(self.pairs, self.groups, strict=True):
            if pair is not None and group is not None:
                ranks.setdefault(group, pair.rank)
        return list(ranks.values())


def share(found: Iterable[Site], lora: Lora) -> list[Shared]:
    """Compare the A's of each site. Reads every A once."""
    made = []
    for site in found:
        pairs = tuple(lora.pairs.get(module) for module in site.hf)
        seen: list[Tensor] = []
        groups: list[int | None] = []
        for pair in pairs:
            if pair is None:
                groups.append(None)
                continue
            a = pair.a.read() if len(pairs) > 1 else torch.empty(0)
            same = (number for number, other in enumerate(seen) if _equal(a, other))
            groups.append(next(same, len(seen)))
            if groups[-1] == len(seen):
                seen.append(a)
        made.append(Shared(site, pairs, tuple(groups)))
    return made


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())


def common_scale(pairs: Mapping[str, Pair]) -> float:
    """The scale that most pairs have. InputError for a pair whose own is not that times a power of two.

    A power of two goes into B without rounding; any other factor would not be exact.
    """
    scale = Counter(pair.scale for pair in pairs.values()).most_common(1)[0][0]
    if not scale:
        raise InputError("has lora_alpha 0: the adapter changes nothing")
    faults: list[MstError] = [
        InputError(f"has the scale {pair.scale:g}, most have {scale:g}", where=module)
        for module, pair in sorted(pairs.items())
        if math.frexp(pair.scale / scale)[0] != 0.5
    ]
    if faults:
        raise many(
            faults,
            what="the adapter has several scales (rank_pattern, alpha_pattern), a bridge one for all, and these differ"
            " by no power of two:",
            hint="--to peft keeps them; or merge it: mst-merge",
        )
    return scale


def fused(shared: Shared, rank: int, scale: float, dtype: str) -> tuple[Tensor, list[Tensor]]:
    """A [rank, in] of a site, and B [rows, rank] of each part."""
    a = torch.zeros(rank, shared.site.columns, dtype=torch_dtype(dtype))
    starts: dict[int, int] = {}
    position, bs = 0, []
    for pair, group, rows in zip(shared.pairs, shared.groups, shared.site.rows, strict=True):
        b = a.new_zeros(rows, rank)
        if pair is not None and group is not None:
            if group not in starts:
                a[position : position + pair.rank] = pair.a.read()
                starts[group] = position
                position += pair.rank
            b[:, starts[group] : starts[group] + pair.rank] = _scaled(pair, scale, dtype)
        bs.append(b)
    return a, bs


def separate(shared: Shared, rank: int, scale: float, dtype: str) -> Iterator[tuple[Tensor, Tensor]]:
    """A [rank, in] and B [rows, rank] of each part; zeros where it has no adapter."""
    for pair, rows in zip(shared.pairs, shared.site.rows, strict=True):
        a = torch.zeros(rank, shared.site.columns, dtype=torch_dtype(dtype))
        b = a.new_zeros(rows, rank)
        if pair is not None:
            a[: pair.rank] = pair.a.read()
            b[:, : pair.rank] = _scaled(pair, scale, dtype)
        yield a, b


def _scaled(pair: Pair, scale: float, dtype: str) -> Tensor:
    """B times what its scale has more than the common one. InputError where a number is too large or small for it."""
    b: Tensor = pair.b.read().to(torch_dtype(dtype))
    if pair.scale == scale:
        return b
    factor = pair.scale / scale
    scaled = b * factor
    if not torch.equal(scaled / factor, b):
        raise InputError(f"times {factor:g} leaves the range of {dtype}", where=pair.b.name)
    return scaled


def alpha_of(scale: float, rank: int, rslora: bool) -> float:
    """The alpha that gives ``scale`` at ``rank``; a whole number as int, as PEFT writes it."""
    alpha = scale * (math.sqrt(rank) if rslora else rank)
    near = round(alpha)
    return near if near and math.isclose(near, alpha, rel_tol=1e-12) else alpha


def highest(shared: Sequence[Shared], form: str) -> int:
    """The rank that holds every site's. CanonicalLoRA has one A for an expert's gate and up too."""
    fused = [form == "fused" or not one.site.canonical for one in shared]
    return max(
        sum(one.ranks) if all_in else max(one.ranks, default=0) for one, all_in in zip(shared, fused, strict=True)
    )
