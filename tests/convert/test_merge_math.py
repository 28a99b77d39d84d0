"""The arithmetic of a merge: fp32 delta, one rounding, blocks that change nothing."""

from __future__ import annotations

import pytest
import torch

from mst_convert.merge import merging
from mst_convert.merge.merging import Magnitude, Term


def factors(out: int, inner: int, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inner, generator=generator), torch.randn(out, rank, generator=generator)


def base(out: int, inner: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, inner, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_rounding(dtype: torch.dtype) -> None:
    """Each element is the base dtype's nearest to the exact sum, up to the fp32 arithmetic before the rounding."""
    weight = base(48, 40, dtype)
    a, b = factors(48, 40, 4)
    merged = merging.merge(weight, [Term(b, a, 0.37)]).tensor
    exact = weight.double() + b.double() @ a.double() * 0.37
    nearest = exact.to(dtype)
    half_ulp = (torch.nextafter(nearest.abs(), torch.full_like(nearest, float("inf"))) - nearest.abs()).double() / 2
    error = (merged.double() - exact).abs()
    assert merged.dtype == dtype
    assert bool((error <= half_ulp * 1.001 + 4e-6).all())
    assert (merged == nearest).double().mean() > (0.5 if dtype == torch.float32 else 0.999)


def test_rounding_the_delta_first_is_worse() -> None:
    """What peft #1035 reports: the delta in bf16 and then the sum in bf16. Ours must be closer on average."""
    weight = base(64, 64, torch.bfloat16)
    a, b = factors(64, 64, 8)
    exact = weight.double() + b.double() @ a.double() * 0.4
    twice = weight + (b.bfloat16() @ a.bfloat16()) * 0.4
    ours = merging.merge(weight, [Term(b, a, 0.4)]).tensor
    assert (ours.double() - exact).abs().mean() < 0.8 * (twice.double() - exact).abs().mean()


@pytest.mark.parametrize("block", [1, 40, 41, 7 * 40, 1 << 21])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = base(48, 40, torch.float32)
    a, b = factors(48, 40, 4)
    whole = weight + torch.matmul(b, a) * 2.0
    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", block)
    assert torch.allclose(merging.merge(weight, [Term(b, a, 2.0)]).tensor, whole, rtol=0, atol=1e-5)


def test_counts_what_changed_and_leaves_its_arguments_alone() -> None:
    weight = base(6, 5, torch.bfloat16)
    kept = weight.clone()
    a, b = factors(6, 5, 2)
    b[1:] = 0
    outcome = merging.merge(weight, [Term(b, a, 10.0)])
    assert outcome.changed == 5
    assert outcome.not_finite == 0
    assert torch.equal(weight, kept)
    assert torch.equal(outcome.tensor[1:], weight[1:])
    assert merging.merge(weight, [Term(torch.zeros_like(b), a, 10.0)]).changed == 0


def test_a_delta_below_the_dtype_changes_nothing() -> None:
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    a, b = torch.ones(1, 4), torch.full((4, 1), 1e-4)
    assert merging.merge(weight, [Term(b, a, 1.0)]).changed == 0
    assert merging.merge(weight.float(), [Term(b, a, 1.0)]).changed == 16


def test_overflow_is_counted() -> None:
    weight = torch.full((3, 3), 60000.0, dtype=torch.float16)
    outcome = merging.merge(weight, [Term(torch.tensor([[0.0], [1.0], [1e5]]), torch.ones(1, 3), 1.0)])
    assert outcome.not_finite == 3


def test_several_deltas_are_summed_before_the_rounding() -> None:
    weight = base(48, 40, torch.bfloat16)
    terms = [Term(b, a, scale) for (a, b), scale in ((factors(48, 40, 4, 2), 0.3), (factors(48, 40, 2, 3), -0.7))]
    truth = weight.float() + sum(term.left @ term.right * term.scale for term in terms)
    assert torch.equal(merging.merge(weight, terms).tensor, truth.bfloat16())


@pytest.mark.parametrize("block", [1, 7 * 40, 1 << 21])
@pytest.mark.parametrize("by_column", [False, True])
def test_dora_has_the_norm_of_its_magnitude(block: int, by_column: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = base(48, 40, torch.float32)
    a, b = factors(48, 40, 4)
    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", block)
    wanted = torch.rand(40 if by_column else 48) + 0.5
    merged = merging.merge(weight, [Term(b, a, 0.5)], Magnitude(wanted, by_column)).tensor
    axis = 0 if by_column else 1
    summed = weight + b @ a * 0.5
    assert torch.allclose(torch.linalg.norm(merged, dim=axis), wanted, atol=1e-5)
    assert torch.allclose(torch.cosine_similarity(merged, summed, dim=axis), torch.ones(()), atol=1e-5)


def test_replacing_rows_and_the_whole() -> None:
    weight = base(6, 5, torch.bfloat16)
    new = torch.full((2, 5), 7.0)
    outcome = merging.replace(weight, new, (4, 1))
    assert (outcome.changed, outcome.tensor.dtype) == (10, torch.bfloat16)
    assert bool((outcome.tensor[[1, 4]] == 7).all())
    assert torch.equal(outcome.tensor[[0, 2, 3, 5]], weight[[0, 2, 3, 5]])
    assert merging.replace(weight, weight.float()).changed == 0
