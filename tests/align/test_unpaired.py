"""KTO and APO-zero on single answers: numbers by hand, the divergence of a step, rows with labels, whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_align.methods import choose
from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.unpaired import objective
from mst_align.work import work
from mst_core.data.render import Sample
from mst_core.engine.divergence import Mismatched, mismatched
from mst_core.engine.seam import Batch, Term
from mst_core.errors import MstError

MASKS = [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
LOGP = [[0.0, -2.0, -1.0], [0.0, -4.0, -4.0]]  # r = 2 and -4 against references of -5 and -4


def terms(method: Any, desirable: list[float], kl: float = 0.0, **given: Any) -> dict[str, Term]:
    batch = Batch(
        torch.zeros((2, 3), dtype=torch.int64), torch.tensor(MASKS), torch.full((2,), 3),
        {
            "ref_logp_B": torch.tensor([-5.0, -4.0]),
            "desirable_B": torch.tensor(desirable),
            "kl_B": torch.full((2,), kl),
        },
    )  # fmt: skip
    return dict(objective(choose(method, given)).loss(torch.tensor(LOGP), batch))


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand() -> None:
    """z = 1: 1.5 (1 - s(0.1 (2 - 1))) of the good answer, 2 (1 - s(0.1 (1 + 4))) of the bad one."""
    found = terms("kto", [1.0, 0.0], 1.0, desirable_weight=1.5, undesirable_weight=2.0)
    assert float(found["kto"].sum) == pytest.approx(1.5 * (1 - s(0.1)) + 2 * (1 - s(0.5)), abs=1e-6)
    assert found["kto"].weight == 2.0
    assert (float(found["rewards/chosen"].sum), float(found["rewards/rejected"].sum)) == pytest.approx((0.2, -0.4))
    assert float(found["kl"].sum) / found["kl"].weight == 1.0


def test_apo_zero_by_hand() -> None:
    found = terms("apo-zero-unpaired", [1.0, 0.0], 1.0)  # z is not read
    assert float(found["apo-zero-unpaired"].sum) == pytest.approx(1 - s(0.2) + s(-0.4), abs=1e-6)


def test_a_batch_of_good_answers_only_is_finite() -> None:
    found = terms("kto", [1.0, 1.0])
    assert math.isfinite(float(found["kto"].sum))
    assert found["rewards/rejected"].weight == 0.0


def test_what_weighs_nothing_is_not_reported(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """Without bad answers there is no mean of their rewards: 0 would be a lie."""
    good = [line for line in data.read_text().splitlines() if json.loads(line)["label"]]
    rows = tmp_path / "good.jsonl"
    rows.write_text("\n".join(good))
    for name, more in (("plain", {}), ("megatron", {"engine": "megatron"})):
        done = align(tiny_hf("llama"), rows, tmp_path / name, steps=1, **more)
        assert "rewards/chosen" in done
        assert "rewards/rejected" not in done


def test_a_prompt_with_the_answer_of_another_row() -> None:
    one, two = Sample([1, 2, 3, 4], [0, 0, 1, 1]), Sample([5, 6, 7], [0, 1, 1])
    assert mismatched(one, two, 8) == Sample([1, 2, 6, 7], [0, 0, 1, 1])
    assert mismatched(two, one, 2) == Sample([5, 3], [0, 1])
    assert mismatched(one, two, None) == mismatched(one, two, 8)


def test_a_row_that_stands_twice_in_a_step_meets_another() -> None:
    units = [(Sample([1, number], [0, 1]),) for number in (5, 6)]
    met = Mismatched(units, [[0, 0, 1], [1, 1]], None)
    assert [unit[0].tokens[1] for unit in (met[number] for number in range(len(met)))] == [6, 6, 5, 6, 6]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "judged.jsonl"
    rows = [
        {"prompt": f"Is number {i} odd?", "completion": ("yes", "no")[i % 2], "label": i % 2 == 0} for i in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def align(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    fields = {"global_batch": 3, "micro_batch": 3, "lr": 1e-3, "precision": "fp32", "method": "kto", **settings}
    spec = AlignSpec(model=str(model), data=(data,), out=out, cache=out.parent / "cache", **fields)
    return work(spec, plan(spec)).data


@pytest.mark.parametrize("method", ["kto", "apo-zero-unpaired"])
def test_it_starts_at_a_half_and_learns(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, method: str) -> None:
    done = align(tiny_hf("llama"), data, tmp_path / "out", method=method, epochs=8, eval_data=(data,), beta=0.5)
    assert done["first_loss"] == pytest.approx(0.5, abs=1e-6)  # the policy is the reference, z is 0
    assert done["eval/loss"] < 0.35
    assert done["eval/rewards/chosen"] > 0 > done["eval/rewards/rejected"]


def test_micro_batches_and_ranks_change_nothing(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """The divergence is that of the whole step, however it is cut."""
    model = tiny_hf("llama")
    settings: dict[str, Any] = {"steps": 5, "global_batch": 6, "schedule": "constant", "desirable_weight": 20.0}
    whole = align(model, data, tmp_path / "whole", **settings, micro_batch=6)
    assert whole["kl"] > 0
    layouts: dict[str, dict[str, Any]] = {
        "small": {"micro_batch": 1},
        "fsdp": {"engine": "fsdp", "nproc": 2},
        "tp": {"engine": "megatron", "tp": 2},
        "cp": {"engine": "megatron", "cp": 2},
        "dp": {"engine": "megatron", "nproc": 2, "micro_batch": 1},
        "zero": {"engine": "deepspeed", "nproc": 2, "zero": 3},
    }
    for name, more in layouts.items():
        found = align(model, data, tmp_path / name, **settings, **more)
        for key in ("loss", "kl", "grad_norm"):
            assert found[key] == pytest.approx(whole[key], abs=1e-5), (name, key)


@pytest.mark.parametrize("label", ["true", 1, None])
def test_a_label_is_true_or_false(tiny_hf: Callable[..., Path], tmp_path: Path, label: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n")
    with pytest.raises(MstError, match="label must be true or false, not"):
        align(tiny_hf("llama"), path, tmp_path / "out")


def test_a_step_of_one_row_is_refused(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--global-batch of 2 or more"):
        align(tiny_hf("llama"), data, tmp_path / "out", global_batch=1, micro_batch=1)
    with pytest.raises(MstError, match="step 3 has one row"):
        align(tiny_hf("llama"), data, tmp_path / "out", global_batch=4, micro_batch=4)


def test_weights_that_do_not_balance_are_named(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    align(tiny_hf("llama"), data, tmp_path / "out", steps=1, desirable_weight=4.0)
    said = " ".join(capsys.readouterr().err.split())
    assert "5 good answers, 4 bad ones" in said
    assert "a --desirable-weight of 0.8 to 1.07" in said
