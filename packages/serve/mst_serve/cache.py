"""Keys and values of every running answer, in one tensor a layer that rows join and leave at any step.

All rows end at one common column ``end``, where the next token of each is written in place; a row that has seen
fewer tokens starts further right, and the attention mask hides what is left of its start. Positions are counted from
the row's own start, so where a row lies changes nothing of what it says.

    columns   0 . . lo . . . . . end .
    row 0     . . . x x x x x x  |        lo = the leftmost start: columns before it are dead
    row 1     . . . . . . x x x  |

Shapes: keys and values of a layer are [rows, kv heads, columns, head dim].
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE = 64
"""Columns that are added at least when the tensors grow."""


class Slab:
    """The rows' common cache; ``cache`` is what the model's forward takes."""

    def __init__(self, layers: int) -> None:
        self.layers = [SlabLayer(self) for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))
        self.starts: list[int] = []
        self.end = 0
        self._columns = 0
        self._capacity = 0

    @property
    def rows(self) -> int:
        """How many rows are in it."""
        return len(self.starts)

    @property
    def lo(self) -> int:
        """The leftmost column that any row uses."""
        return min(self.starts, default=self.end)

    def join(self, prefilled: Cache, copies: int) -> None:
        """Append ``copies`` rows with the keys and values of a prompt ([1, heads, length, dim] a layer)."""
        length = int(prefilled.get_seq_length())
        if not self.rows:
            self.end = length
        shift = max(0, length - self.end)
        if shift or self.rows + copies > self._capacity or self.end > self._columns:
            capacity = max(self.rows + copies, min(2 * self._capacity, self.rows + 2 * copies))
            self._rebuild(capacity, self.end + shift + SPARE, shift, prefilled)
        first, begin = self.rows, self.end - length
        self.starts += [begin] * copies
        for mine, theirs in zip(self.layers, prefilled.layers, strict=True):
            mine.keys[first : self.rows, :, begin : self.end] = theirs.keys
            mine.values[first : self.rows, :, begin : self.end] = theirs.values

    def leave(self, row: int) -> None:
        """Drop ``row``; the last row takes its place."""
        last = self.rows - 1
        if row != last:
            for layer in self.layers:
                layer.keys[row] = layer.keys[last].clone()
                layer.values[row] = layer.values[last].clone()
            self.starts[row] = self.starts[last]
        self.starts.pop()
        if not self.rows:
            self._capacity = self._columns = self.end = 0
            for layer in self.layers:
                layer.keys = layer.values = None

    def reserve(self) -> None:
        """Make sure that column ``end`` exists: reuse the dead columns on the left, or grow."""
        if self.end < self._columns:
            return
        dead = self.lo
        used = self.end - dead
        columns = self._columns if dead >= used // 2 + 1 else used + max(SPARE, used // 2)
        self._rebuild(self._capacity, columns, -dead, None)

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """bool [rows, end - lo + 1]: which columns a row's next token may see. None: all of them."""
        lo = self.lo
        if all(start == lo for start in self.starts):
            return None
        columns = torch.arange(lo, self.end + 1, device=device)
        return columns[None, :] >= torch.tensor(self.starts, device=device)[:, None]

    def _rebuild(self, capacity: int, columns: int, shift: int, like: Cache | None) -> None:
        rows, lo, end = self.rows, self.lo, self.end
        for index, layer in enumerate(self.layers):
            source = layer if layer.keys is not None or like is None else like.layers[index]
            layer.keys = _moved(source.keys, layer.keys, capacity, columns, rows, lo, end, shift)
            layer.values = _moved(source.values, layer.values, capacity, columns, rows, lo, end, shift)
            layer.is_initialized = True
        self.starts = [start + shift for start in self.starts]
        self.end += shift
        self._capacity, self._columns = capacity, columns


def _moved(
    like: torch.Tensor, old: torch.Tensor | None, capacity: int, columns: int, rows: int, lo: int, end: int, shift: int
) -> torch.Tensor:
    """A new tensor with the old rows moved by ``shift`` columns. Zeros elsewhere: a masked NaN is still a NaN."""
    new = like.new_zeros(capacity, like.shape[1], columns, like.shape[3])
    if old is not None and rows:
        new[:rows, :, lo + shift : end + shift] = old[:rows, :, lo:end]
    return new


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer of the slab, in the form that transformers' attention layers write to."""

    is_sliding = False

    def __init__(self, slab: Slab) -> None:
        super().__init__()
        self._slab = slab

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: ``Slab.join`` made the tensors."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token a row ([rows, heads, 1, dim]) and return all columns in use."""
        slab = self._slab
        rows, lo, end = slab.rows, slab.lo, slab.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, lo : end + 1], self.values[:rows, :, lo : end + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that ``update`` will return."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use before the next token."""
        return self._slab.end - self._slab.lo

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
