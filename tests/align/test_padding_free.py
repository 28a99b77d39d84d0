"""mst-align --packing: the answers of a micro-batch in one row make the steps that padded ones make."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_align import pairs, unpaired
from mst_align.methods import choose
from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.work import work
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.batches import collate, in_a_row, spread
from mst_core.engine.plain import PlainEngine
from mst_core.errors import InputError, SettingsError

WORDS = ("quick", "brown", "fox", "jumps", "lazy", "dog", "zebra", "jugs", "box", "prize")


def ragged(count: int) -> list[tuple[str, str, str]]:
    """Questions and two answers of 1 to 30 words."""
    draw = random.Random(3)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.choice((1, 2, 3, 9, 30))))

    return [(text(), text(), f"no, {text()}") for _ in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Nine pairs (False), ten judged answers (True)."""
    folder, found = tmp_path_factory.mktemp("rows"), ragged(10)
    rows: dict[bool, list[dict[str, Any]]] = {
        False: [{"prompt": asked, "chosen": good, "rejected": bad} for asked, good, bad in found[:9]],
        True: [
            {"prompt": asked, "completion": (good, bad)[i % 2], "label": i % 2 == 0}
            for i, (asked, good, bad) in enumerate(found)
        ],
    }
    for judged, written in rows.items():
        (folder / f"{judged}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return {judged: folder / f"{judged}.jsonl" for judged in rows}


def align(model: Path, data: dict[bool, Path], out: Path, **settings: Any) -> list[dict[str, float]]:
    """The metrics of each step: 4, 4 and 1 pair, or 2 answers, in micro-batches of 2: the last step has none for the
    second of two ranks. AdamW's epsilon is so large that an update follows the gradient, and noise stays noise."""
    judged = settings["method"] == "kto"
    fields = {"global_batch": 4, "micro_batch": 2, "lr": 0.05, "adam_eps": 1.0, "precision": "fp32", "clip_grad": 0.0}
    fields |= {"warmup": 0, "schedule": "constant", **settings}
    spec = AlignSpec(model=str(model), data=(data[judged],), out=out, cache=out.parent / "cache", **fields)
    work(spec, plan(spec))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora_rank": 4},
    "recompute": {"recompute": "full"},
    "fsdp": {"engine": "fsdp", "nproc": 2},
    "zero2": {"engine": "deepspeed", "nproc": 2, "zero": 2},
    "megatron": {"engine": "megatron"},
    "tp2": {"engine": "megatron", "tp": 2},
    "tp2-sp": {"engine": "megatron", "tp": 2, "sp": True},
    "pp2": {"engine": "megatron", "pp": 2},
    "dp2": {"engine": "megatron", "nproc": 2, "micro_batch": 1},
}
QUICK = ("plain/dpo", "plain/kto", "plain/orpo", "lora/dpo", "recompute/orpo", "zero2/kto", "plain/rm", "tp2-sp/rm")
METRICS = ("loss", "grad_norm", "rewards/margin", "logps/chosen", "logps/rejected", "kl", "sft")
CASES = [f"{engine}/{method}" for engine in ENGINES for method in ("dpo", "kto", "orpo", "rm")]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_steps_are_those_of_padded_rows(
    tiny_hf: Callable[..., Path], data: dict[bool, Path], tmp_path: Path, name: str
) -> None:
    engine, method = name.split("/")
    settings = ENGINES[engine]
    alone = {key: value for key, value in settings.items() if key == "lora_rank"}
    model = tiny_hf("llama", scores=method == "rm")
    padded = align(model, data, tmp_path / "padded", method=method, **alone)
    packed = align(model, data, tmp_path / "packed", method=method, packing=True, **settings)
    assert len(packed) == len(padded) > 1
    for step, wanted in zip(packed, padded, strict=True):
        limit = 2e-6 if wanted is padded[0] else 1e-5  # log-probabilities are sums of about -200, in 24 bits
        for key in METRICS:
            if key in wanted:
                assert step[key] == pytest.approx(wanted[key], rel=limit, abs=limit), (wanted["step"], key)


def batch_of(count: int, empty: int) -> Any:
    """Pairs of ragged lengths, the last ``empty`` with nothing to learn, as fills up a rank."""
    draw = random.Random(1)
    units = []
    for _ in range(count):
        pair = []
        for length in (draw.choice((3, 5, 40)), draw.choice((3, 8, 60))):
            tokens = [draw.randint(3, 120) for _ in range(length)]
            pair.append(Sample(tokens, [0, 0] + [1] * (length - 2)))
        units.append(tuple(pair))
    units[count - empty :] = [loop._unlearnt(unit) for unit in units[count - empty :]]
    return loop._collate(units, None)


def test_a_row_by_hand() -> None:
    batch = collate([Sample([5, 6], [0, 1]), Sample([7, 8, 9, 4], [0, 1, 1, 1]), Sample([3], [0])])
    row, places_N = in_a_row(batch)
    assert row.tokens_BT.tolist() == [[7, 8, 9, 4, 5, 6, 3]]
    assert row.mask_BT.tolist() == [[0, 1, 1, 1, 0, 1, 0]]
    assert row.packed == ((4, 2, 1),)
    assert row.lengths_B.tolist() == [7]
    assert spread(row.tokens_BT, places_N, batch.tokens_BT.shape).tolist() == [[5, 6, 0, 0], [7, 8, 9, 4], [3, 0, 0, 0]]


@pytest.mark.parametrize("method", ["dpo", "simpo", "orpo", "cpo", "kto"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradients_are_those_of_padded_rows(tiny_hf: Callable[..., Path], method: Any, family: str) -> None:
    """Every parameter's, of two micro-batches, with windows as well (mistral)."""
    model = tiny_hf(family, **({"sliding_window": 6} if family == "mistral" else {}))
    objective = (unpaired if method == "kto" else pairs).objective(choose(method, {}))
    batches, found = [batch_of(3, 1), batch_of(1, 0)], []
    for packing in (False, True):
        spec = AlignSpec(model=str(model), data=("d",), out=Path("o"), precision="fp32", clip_grad=0, packing=packing)
        engine = PlainEngine(spec, model)
        scores = [engine.score(batch) for batch in batches]
        for batch, logp_BT in zip(batches, scores, strict=True):
            batch.extra.setdefault("ref_logp_B", objective.answers(logp_BT, batch) + torch.arange(len(logp_BT)))
            batch.extra["desirable_B"] = torch.tensor([1.0, 0.0] * (len(logp_BT) // 2))
            batch.extra["kl_B"] = torch.full((len(logp_BT),), 0.5)
        values = engine.step(batches, objective, 0.0)
        found.append((scores, values, {name: p.grad for name, p in engine.trained}))
    (scores, values, gradients), (row_scores, row_values, row_gradients) = found
    for one, other in zip(scores, row_scores, strict=True):
        torch.testing.assert_close(other, one, atol=2e-6, rtol=1e-6)
    assert row_values == pytest.approx(values, rel=2e-6, abs=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(row_gradients[name], gradient, atol=2e-6 * largest, rtol=1e-6, msg=name)


def test_less_is_computed(tiny_hf: Callable[..., Path]) -> None:
    """The model sees the real tokens, once each."""
    spec = AlignSpec(model="m", data=("d",), out=Path("o"), precision="fp32", packing=True)
    engine, batch, seen = PlainEngine(spec, tiny_hf("llama")), batch_of(4, 1), []
    engine.score(batch)  # the trial of isolation
    engine.model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(given[0].numel()))
    engine.score(batch)
    assert seen == [int(batch.lengths_B.sum())]
    assert seen[0] < batch.tokens_BT.numel()


def test_refused_by_name(tiny_hf: Callable[..., Path], data: dict[bool, Path], tmp_path: Path) -> None:
    """Gemma 2 caps its attention's logits, which torch's SDPA has not; context parallel ranks share a row."""
    with pytest.raises(InputError, match="Gemma2ForCausalLM has an attention of its own: --packing cannot"):
        align(tiny_hf("gemma2"), data, tmp_path / "out", method="dpo", packing=True)
    with pytest.raises(SettingsError, match="--packing is not there yet for context parallel ranks"):
        align(tiny_hf("llama"), data, tmp_path / "out", method="dpo", packing=True, engine="megatron", cp=2)
