"""mst-align from Python: from ln 2 to a margin, the reference untouched, the output named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.work import work
from mst_core import checkpoint, manifest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    rows = [{"prompt": f"Is number {i} odd?", "chosen": "yes", "rejected": "no"} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def align(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    fields = {"global_batch": 4, "micro_batch": 2, "lr": 1e-3, "precision": "fp32", **settings}
    spec = AlignSpec(model=str(model), data=(data,), out=out, **fields)
    return work(spec, plan(spec)).data


@pytest.mark.parametrize("lora", [None, 4])
def test_it_starts_at_ln_2_and_learns_to_prefer(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, lora: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_hf("llama")
    rate = 1e-3 if lora is None else 1e-2
    done = align(model, data, tmp_path / "out", epochs=6, lora_rank=lora, lr=rate, eval_data=(data,))
    assert done["first_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (done["rows"], done["steps"]) == (9, 18)
    assert done["loss"] < 0.5
    # Measured on the rows themselves, against the reference before training.
    assert done["eval/rewards/accuracy"] == 1.0
    assert done["eval/rewards/margin"] > 0.5
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    start, *rows = rows
    assert set(start) == {"step", *(name for name in rows[-1] if name.startswith("eval/"))}
    assert start["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    said = capsys.readouterr().err
    check_table(said[said.rindex("evaluation rows") :].splitlines()[4:], manifest.read(tmp_path / "out").notes)
    for row in rows:
        assert row["rewards/margin"] == pytest.approx(row["rewards/chosen"] - row["rewards/rejected"], abs=1e-5)
        assert 0 <= row["rewards/accuracy"] <= 1
    made = manifest.read(tmp_path / "out")
    assert checkpoint.verify(tmp_path / "out") == []
    assert (made.kind, made.layout) == (("model", "hf") if lora is None else ("adapter", "peft"))
    assert [parent.role for parent in made.parents] == ["base", "data"]
    assert made.parents[0].id == manifest.identify(model).id
    assert made.parents[0].weights == manifest.identify(model).digests.weights


def check_table(lines: list[str], notes: dict[str, Any]) -> None:
    """What is shown is what the notes have: the start, the end and the difference of each measure."""
    before, after = notes["evaluation_before"], notes["evaluation"]
    shown = {name: tuple(map(float, values)) for name, *values in map(str.split, filter(str.strip, lines))}
    assert shown.keys() == after.keys() - {"dpo"}  # which is the loss
    for name, (first, last, change) in shown.items():
        assert (first, last) == pytest.approx((before[name], after[name]), abs=6e-5), name
        assert change == pytest.approx(last - first, abs=2e-4), name
    # Before the first step every margin is 0, which is no win; the share of likelier chosen answers says more.
    assert shown["rewards/accuracy"][0] == 0.0
    assert shown["logps/accuracy"] == (pytest.approx(8 / 9, abs=1e-4), 1.0, pytest.approx(1 / 9, abs=1e-4))


def test_what_the_rows_are_is_said_and_noted(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*data.read_text().splitlines(), '{"prompt": "Is number 0 odd?", "chosen": "no", "rejected": "yes"}']
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*rows, rows[1].replace("}", ', "margin": 2}')]))
    align(tiny_hf("llama"), path, tmp_path / "out", steps=1)
    said = capsys.readouterr().err
    assert f"1 copies of earlier ones, which are kept: {path}:11 (of {path}:2)" in said
    assert "1 training rows have a margin, which --method dpo does not read" in said
    noted = manifest.read(tmp_path / "out").notes["preferences"]
    assert noted["contradictions"] == {"count": 1, "first": [f"{path}:10 (of {path}:1)"]}
    assert (noted["copies"]["count"], noted["equal_answers"]["count"], noted["margins"]) == (1, 0, 1)


def test_the_same_run_has_the_same_id(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    model = tiny_hf("qwen2")
    found = [align(model, data, tmp_path / name, lora_rank=4, steps=2)["id"] for name in ("one", "two")]
    assert found[0] == found[1]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert align(model, data, tmp_path / "three", lora_rank=4, steps=2, beta=0.2)["id"] != found[0]


def test_micro_batches_of_pairs_change_nothing(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    losses = [
        align(tiny_hf("llama"), data, tmp_path / str(size), steps=3, micro_batch=size)["loss"] for size in (1, 2, 4)
    ]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-6)


def test_two_ranks_that_meet_different_numbers_of_pairs(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """Every pass of fsdp gathers weights, so the rank with fewer references must still take part."""
    model, settings = tiny_hf("llama"), {"epochs": 1, "eval_data": (data,)}
    plain = align(model, data, tmp_path / "plain", **settings)
    sharded = align(model, data, tmp_path / "fsdp", engine="fsdp", nproc=2, **settings)
    for name in ("loss", "eval/loss", "rewards/margin", "grad_norm"):
        assert sharded[name] == pytest.approx(plain[name], abs=1e-5), name
    assert sharded["first_loss"] == plain["first_loss"] == float(torch.tensor(2.0).log())  # to the last bit


@pytest.mark.parametrize(
    ("method", "start"),
    [({"loss": "ipo", "beta": 0.25}, 4.0), ({"loss": "apo-zero", "sft_weight": 0.5}, None), ({"method": "orpo"}, None)],
)
def test_other_losses_over_pipeline_stages(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, method: dict[str, Any], start: float | None
) -> None:
    model, settings = tiny_hf("llama"), {"steps": 3, "eval_data": (data,), **method}
    plain = align(model, data, tmp_path / "plain", **settings)
    staged = align(model, data, tmp_path / "staged", engine="megatron", pp=2, **settings)
    assert start is None or plain["first_loss"] == staged["first_loss"] == start  # 1 / (4 beta^2)
    assert plain["loss"] < plain["first_loss"]
    for name in ("first_loss", "loss", "eval/loss", "rewards/margin", "logps/chosen"):
        assert staged[name] == pytest.approx(plain[name], abs=1e-5), name
    before = [manifest.read(tmp_path / name).notes["evaluation_before"] for name in ("plain", "staged")]
    assert before[0] == pytest.approx(before[1], abs=2e-5)
    assert start is None or before[0]["loss"] == pytest.approx(start, abs=1e-5)
