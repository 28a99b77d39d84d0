"""The training state as rectangles: whatever cut it was saved in, any other cut is read from it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mst_core.engine import state_files
from mst_core.engine.state_files import Part
from mst_core.errors import InputError

WHOLE = torch.arange(7 * 12, dtype=torch.float32).view(7, 12)


def flat(start: int, stop: int, source: Tensor = WHOLE, name: str = "a.weight[1]") -> list[Part]:
    """The rectangles of a range of elements."""
    rows, columns = source.shape
    held = {"weight": source.reshape(-1)[start:stop], "exp_avg": -source.reshape(-1)[start:stop]}
    return list(state_files.cut(name, (rows, columns), (0, 0), columns, start, held, 3.0))


def empty(rows: slice, columns: slice, dtype: torch.dtype = torch.float32, kind: str = "weight") -> Part:
    """A rectangle to fill."""
    into = torch.full(WHOLE[rows, columns].shape, -1.0, dtype=dtype)
    return Part("a.weight[1]", (7, 12), rows.start, columns.start, {kind: into})


def saved(folder: Path, *bounds: int) -> Path:
    """Ranks that have the elements between two bounds each."""
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        state_files.save(folder, rank, len(bounds) - 1, flat(start, stop), {"steps": 5})
    return folder


@pytest.mark.parametrize(("start", "stop"), [(0, 84), (5, 7), (5, 40), (12, 36), (30, 84), (11, 13), (83, 84), (4, 24)])
def test_a_range_is_at_most_three_rectangles_that_tile_it(start: int, stop: int) -> None:
    parts = flat(start, stop)
    assert len(parts) <= 3
    seen = torch.zeros(7, 12)
    for part in parts:
        rows, columns = part.held["weight"].shape
        seen[part.row : part.row + rows, part.column : part.column + columns] += 1
        wanted = WHOLE[part.row : part.row + rows, part.column : part.column + columns]
        assert torch.equal(part.held["weight"], wanted)
        assert torch.equal(part.held["exp_avg"], -wanted)
    assert torch.equal(seen.view(-1), (torch.arange(84) >= start).float() * (torch.arange(84) < stop))


@pytest.mark.parametrize("bounds", [(0, 84), (0, 41, 84), (0, 5, 6, 50, 84)])
def test_any_rectangle_is_read_from_any_cut(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    saved(tmp_path, *bounds)
    for top in range(0, 7, 3):
        for left in range(0, 12, 5):
            rows, columns = slice(top, min(top + 4, 7)), slice(left, min(left + 7, 12))
            part, moment = empty(rows, columns), empty(rows, columns, kind="exp_avg")
            found = state_files.load(tmp_path, 1, 2, [part, moment])
            assert torch.equal(part.held["weight"], WHOLE[rows, columns])
            assert torch.equal(moment.held["exp_avg"], -WHOLE[rows, columns])
            assert found.facts == {"steps": 5}
            assert found.updates == {"a.weight[1]": 3.0}


def test_it_is_cast_to_what_is_filled(tmp_path: Path) -> None:
    part = empty(slice(0, 7), slice(0, 12), torch.bfloat16)
    state_files.load(saved(tmp_path, 0, 84), 0, 1, [part])
    assert torch.equal(part.held["weight"], WHOLE.bfloat16())


def test_under_the_same_layout_a_rank_opens_its_own_file_only(tmp_path: Path) -> None:
    saved(tmp_path, 0, 36, 84)
    (tmp_path / "rank-00000.safetensors").write_bytes(b"")
    part = empty(slice(3, 7), slice(0, 12))
    state_files.load(tmp_path, 1, 2, [part])
    assert torch.equal(part.held["weight"], WHOLE[3:])


@pytest.mark.parametrize(("ranks", "same"), [(2, True), (3, False)])
def test_the_random_state_is_taken_up_by_as_many_ranks(tmp_path: Path, ranks: int, same: bool) -> None:
    torch.manual_seed(7)
    saved(tmp_path, 0, 36, 84)
    wanted = torch.rand(3)
    torch.manual_seed(8)
    state_files.load(tmp_path, 1, ranks, [empty(slice(3, 7), slice(0, 12))])
    assert torch.equal(torch.rand(3), wanted) == same


def test_a_rank_whose_file_is_gone_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 0, 36, 84)
    (tmp_path / "rank-00000.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks weight of a.weight\[1\]$"):
        state_files.load(tmp_path, 1, 2, [empty(slice(2, 7), slice(0, 12))])
    (tmp_path / "rank-00001.safetensors").unlink()
    with pytest.raises(InputError, match="holds no training state"):
        state_files.load(tmp_path, 1, 2, [])


def test_a_matrix_of_another_shape_is_an_error_by_name(tmp_path: Path) -> None:
    part = Part("a.weight[1]", (8, 12), 0, 0, {"weight": torch.zeros(2, 12)})
    with pytest.raises(InputError, match=r"a.weight\[1\] was 7 x 12, is 8 x 12"):
        state_files.load(saved(tmp_path, 0, 84), 0, 1, [part])


def test_rows_beyond_a_padded_matrix_stay_as_they_are(tmp_path: Path) -> None:
    into = torch.full((4, 12), -1.0)
    part = Part("a.weight[1]", (8, 12), 4, 0, {"weight": into})
    state_files.load(saved(tmp_path, 0, 84), 0, 1, [part], padded=["a.weight[1]"])
    assert torch.equal(into[:3], WHOLE[4:])
    assert bool((into[3] == -1).all())
    with pytest.raises(InputError, match="was 7 x 12, is 8 x 13"):
        wide = Part("a.weight[1]", (8, 13), 0, 0, {"weight": torch.zeros(1, 13)})
        state_files.load(tmp_path, 0, 1, [wide], padded=["a.weight[1]"])


def test_the_moments_of_an_optimizer_that_has_not_stepped_are_those_it_begins_with() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    stepped, other = torch.optim.AdamW([parameter]), torch.optim.AdamW([parameter])
    moments = state_files.moments(other, parameter)
    assert float(torch.stack(list(moments.values())).abs().max()) == 0
    assert state_files.updates(other, parameter) == 0
    parameter.grad = torch.full((3,), 0.5)
    stepped.step()
    after = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(1.0)
    other.step()
    assert torch.equal(parameter, after)
    state_files.count(other, parameter, 9)
    assert state_files.updates(other, parameter) == 9


def test_what_is_written_is_plain(tmp_path: Path) -> None:
    """Nothing to unpickle: safetensors and JSON."""
    saved(tmp_path, 0, 84)
    told = json.loads((tmp_path / "rank-00000.json").read_text())
    assert told == {"ranks": 1, "facts": {"steps": 5}, "matrices": {"a.weight[1]": [7, 12, 3.0]}}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
