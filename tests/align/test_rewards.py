"""Reward models: the loss by hand, and a run whose model transformers scores with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.conftest import CHATML

from mst_align.methods import choose
from mst_align.plan import plan
from mst_align.rewards import LastTokens, objective
from mst_align.scalar_base import prepared
from mst_align.spec import AlignSpec
from mst_align.work import work
from mst_core import checkpoint, manifest, tensors
from mst_core.data.render import Sample, load_tokenizer
from mst_core.engine.batches import collate
from mst_core.engine.seam import Batch, weights
from mst_core.errors import InputError

PAIRS = [
    {
        "prompt": f"Is number {i} odd?",
        "chosen": "yes, " * (i % 3) + "it is" + "!" * i,
        "rejected": "no" + " never" * (i % 4) + "." * i,
    }
    for i in range(9)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return path


def spec_of(model: Path, data: Path, out: Path, **settings: Any) -> AlignSpec:
    fields = {"global_batch": 4, "micro_batch": 2, "lr": 1e-3, "precision": "fp32", "method": "rm", **settings}
    return AlignSpec(model=str(model), data=(data,), out=out, cache=out.parent / "cache", **fields)


def reward(model: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    spec = spec_of(model, data, out, **settings)
    return work(spec, plan(spec)).data


def by_hand(scores: list[float], margins: list[float] | None = None, **given: Any) -> dict[str, float]:
    """Means of the terms of pairs whose last tokens have these scores."""
    value_BT = torch.tensor([[9.0, score, -7.0] for score in scores])
    mask_BT = torch.tensor([[0.0, 1.0, 0.0]] * len(scores))
    extra = {"margin_B": torch.tensor(margins)} if margins else {}
    lengths_B = torch.full((len(scores),), 2)
    batch = Batch(torch.zeros(len(scores), 3, dtype=torch.int64), mask_BT, lengths_B, extra)
    found = objective(choose("rm", given)).loss(value_BT, batch)
    assert {name: term.weight for name, term in found.items()} == weights(objective(choose("rm", given)), [batch])
    return {name: float(term.sum) / term.weight for name, term in found.items()}


def test_bradley_terry_by_hand() -> None:
    found = by_hand([1.0, -0.5])
    assert found["rm"] == pytest.approx(-math.log(1 / (1 + math.exp(-1.5))), abs=1e-7)
    assert (found["rewards/chosen"], found["rewards/rejected"]) == (1.0, -0.5)
    assert (found["rewards/margin"], found["rewards/accuracy"]) == (1.5, 1.0)
    assert by_hand([2.0, 2.0])["rm"] == pytest.approx(math.log(2), abs=1e-7)
    assert by_hand([2.0, 2.0])["rewards/accuracy"] == 0.0  # a tie is not won


def test_a_margin_asks_for_more() -> None:
    asked = by_hand([1.0, -0.5], [1.5, 0.0])
    assert asked["rm"] == pytest.approx(math.log(2), abs=1e-7)
    assert asked["rewards/margin"] == 1.5


def test_centering_holds_the_sum_at_zero() -> None:
    assert "center" not in by_hand([1.0, 3.0])
    assert by_hand([1.0, 3.0], center_rewards_coefficient=0.01)["center"] == pytest.approx(16.0)


def test_a_pair_that_fills_up_a_rank_weighs_nothing() -> None:
    value_BT, mask_BT = torch.tensor([[5.0], [1.0], [2.0], [1.0]]), torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    batch = Batch(torch.zeros(4, 1, dtype=torch.int64), mask_BT, torch.ones(4, dtype=torch.int64))
    term = objective(choose("rm", {})).loss(value_BT, batch)["rm"]
    assert term.weight == 1.0
    assert float(term.sum) == pytest.approx(-math.log(1 / (1 + math.exp(-1.0))), abs=1e-7)


def test_the_score_is_read_at_the_last_token() -> None:
    unit = (Sample([5, 6, 7], [0, 1, 1]), Sample([5, 8], [0, 1]))
    ((chosen, rejected),) = LastTokens([unit], 0)
    assert (chosen.mask, rejected.mask) == ([0, 0, 1], [0, 1])


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_scores_as_the_run_did(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, tied: bool
) -> None:
    """From a head of noise to a ranking. What transformers' own class reads of the output, padded left and right, is
    the score at the last token of each conversation."""
    from transformers import AutoModelForSequenceClassification

    base = tiny_hf("qwen2" if tied else "llama")
    out = tmp_path / "out"
    done = reward(base, data, out, epochs=12, eval_data=(data,))
    assert abs(done["first_loss"] - math.log(2)) < 1.0
    assert done["loss"] < 0.1
    assert done["eval/rewards/accuracy"] == 1.0
    made = manifest.read(out)
    assert (made.kind, made.layout, made.model and made.model.tied) == ("reward", "hf", False)
    assert checkpoint.verify(out) == []
    held = load_file(out / "model.safetensors")
    assert held["score.weight"].shape == (1, 64)
    assert "lm_head.weight" not in held

    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    assert model.config.num_labels == 1
    tokenizer = load_tokenizer(out)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}], tokenize=False
        )
        for row in PAIRS
        for side in ("chosen", "rejected")
    ]
    scores = {}
    for side in ("right", "left"):
        tokenizer.padding_side = side
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            scores[side] = model(**given).logits.squeeze(-1)
    given = [tokenizer(text, return_tensors="pt", add_special_tokens=False) for text in texts]
    alone = torch.stack([model(**one).logits.detach().view(()) for one in given])
    assert (scores["right"] - alone).abs().max() < 1e-5
    assert (scores["left"] - alone).abs().max() < 1e-5
    assert float(alone[::2].mean()) == pytest.approx(done["eval/rewards/chosen"], abs=1e-5)
    assert float(alone[1::2].mean()) == pytest.approx(done["eval/rewards/rejected"], abs=1e-5)


def test_padding_changes_no_score(tiny_hf: Callable[..., Path]) -> None:
    from mst_core.engine.plain import PlainEngine

    model = tiny_hf("llama", scores=True)
    engine = PlainEngine(spec_of(model, Path("d"), Path("o/o")), model)
    samples = [Sample(list(range(3, 3 + n)), [*[0] * (n - 1), 1]) for n in (4, 9)]
    short, wide = collate(samples), collate(samples, pad_id=2, multiple=32)
    for batch in (short, wide):
        value_BT = engine.score(batch) * batch.mask_BT
        assert value_BT.sum(1).tolist() == pytest.approx(
            [float((engine.score(one := collate([s])) * one.mask_BT).sum()) for s in samples], abs=1e-5
        )


def test_a_reward_model_goes_on_and_goes_to_megatron(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    from mst_convert import plan as planning
    from mst_convert import work as working
    from mst_convert.spec import ConvertSpec

    base = tiny_hf("llama", scores=True)
    assert manifest.identify(base).kind == "reward"
    done = reward(base, data, tmp_path / "out", steps=1)
    assert abs(done["first_loss"] - math.log(2)) > 1e-3  # its head is not made anew
    for to, source in (("megatron", tmp_path / "out"), ("hf", tmp_path / "megatron")):
        spec = ConvertSpec(model=str(source), to=to, out=tmp_path / to)
        working.work(spec, planning.plan(spec))
        assert manifest.read(tmp_path / to).kind == "reward"
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "hf"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_padding_token_ends_no_conversation(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """<|im_end|> pads here, as in SmolLM2: transformers would read the score before the last one."""
    import shutil

    base = shutil.copytree(tiny_hf("llama"), tmp_path / "base")
    told = tensors.read_json(base / "tokenizer_config.json")
    (base / "tokenizer_config.json").write_text(json.dumps({**told, "pad_token": "<|im_end|>"}))
    spec = spec_of(base, data, tmp_path / "out")
    made = Path(prepared(spec, plan(spec)).model)
    tokenizer = load_tokenizer(made)
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tensors.config(made)["pad_token_id"] == tokenizer.pad_token_id == 0
    head = load_file(made / "model.safetensors")["score.weight"]
    assert float(head.std()) == pytest.approx(1 / math.sqrt(65), rel=0.3)


def test_refusals(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--beta means nothing to --method rm"):
        spec_of(tiny_hf("llama"), data, tmp_path / "out", beta=0.1)
    with pytest.raises(ValidationError, match="cuts the token whose score"):
        spec_of(tiny_hf("llama"), data, tmp_path / "out", truncate="right")
    scorer = tiny_hf("llama", scores=True)
    with pytest.raises(InputError, match="is a reward model, which gives tokens no probability"):
        plan(spec_of(scorer, data, tmp_path / "out", method="dpo"))


def test_a_model_whose_end_of_a_turn_pads_is_read_where_transformers_reads_it(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """Many reward models were trained so: the score stands before the last token, here and in mst-eval."""
    from transformers import AutoModelForSequenceClassification

    from mst_evalkit.plan import plan as eval_plan
    from mst_evalkit.spec import EvalSpec
    from mst_evalkit.work import work as measure

    template = CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")
    base = tiny_hf("llama", scores=True, template=template, pad_token_id=2)
    done = reward(base, data, tmp_path / "out", steps=1, eval_data=(data,))
    spec = EvalSpec(model=str(tmp_path / "out"), tasks=("reward",), data=(data,), out=tmp_path / "report")
    measure(spec, eval_plan(spec))
    found = [json.loads(line)["score"] for line in (tmp_path / "report/rows.jsonl").read_text().splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = load_tokenizer(base)
    for row, scores in zip(PAIRS, found, strict=True):
        for side, score in zip(("chosen", "rejected"), scores, strict=True):
            told = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            text = tokenizer.apply_chat_template(told, tokenize=False)
            assert text.endswith("<|im_end|>")
            given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                assert score == pytest.approx(float(model(**given).logits), abs=1e-5)
    assert done["eval/rewards/chosen"] == pytest.approx(sum(chosen for chosen, _ in found) / len(found), abs=1e-5)
