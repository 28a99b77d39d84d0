"""Scores equal what transformers gives for each answer alone, whatever stands beside it in a batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mst_core.data.render import Sample
from mst_core.errors import InputError
from mst_evalkit import measures, questions, scoring
from mst_evalkit.questions import Question


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Any:
    return scoring.load_model(tiny_hf("llama"), "fp32")


def direct(model: Any, sample: Sample) -> list[float]:
    """The log-probabilities of a sample's learnt tokens, by one plain forward pass."""
    with torch.no_grad():
        logp_TV = model(torch.tensor([sample.tokens])).logits[0].double().log_softmax(-1)
    return [float(logp_TV[i - 1, token]) for i, token in enumerate(sample.tokens) if sample.mask[i] and i]


def groups(seed: int, count: int = 12) -> list[list[Sample]]:
    """Random prompts with 1 to 4 candidates of 1 to 6 tokens, some with a common beginning, some with a tail."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [draw.randrange(330) for _ in range(draw.randint(1, 40))]
        begin = [draw.randrange(330) for _ in range(draw.randint(0, 2))]
        group = []
        for number in range(draw.randint(1, 4)):
            answer = [*begin, 100 + number, *(draw.randrange(330) for _ in range(draw.randint(0, 5)))]
            tail = [7] * draw.randint(0, 1)
            group.append(Sample(prompt + answer + tail, [0] * len(prompt) + [1] * len(answer) + [0] * len(tail)))
        made.append(group)
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_scores_are_those_of_each_answer_alone(tiny_hf: Callable[..., Path], family: str) -> None:
    model = scoring.load_model(tiny_hf(family), "fp32")
    asked = groups(1)
    for group, scored in zip(asked, scoring.score(model, asked, 5), strict=True):
        assert len(scored) == len(group)
        for sample, logps in zip(group, scored, strict=True):
            assert logps == pytest.approx(direct(model, sample), abs=1e-5)


def test_a_sliding_window_is_kept(tiny_hf: Callable[..., Path]) -> None:
    """Branches behind one prompt would look too far back: such models score every candidate by itself."""
    model = scoring.load_model(tiny_hf("mistral", sliding_window=6), "fp32")
    assert scoring.windowed(model)
    asked = groups(2, 6)
    for group, scored in zip(asked, scoring.score(model, asked, 3), strict=True):
        for sample, logps in zip(group, scored, strict=True):
            assert logps == pytest.approx(direct(model, sample), abs=1e-5)


def test_scores_do_not_depend_on_the_batch(model: Any) -> None:
    asked = groups(3, 20)
    alone = scoring.score(model, asked, 1)
    for size in (2, 7, 64):
        for one, other in zip(alone, scoring.score(model, asked, size), strict=True):
            assert [math.fsum(x) for x in one] == pytest.approx([math.fsum(x) for x in other], abs=1e-5)


def test_batches_shrink_where_logits_would_not_fit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = groups(4, 9)
    whole = scoring.score(model, asked, 9)
    sizes: list[int] = []
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 330 * 4 * 12)
    limited = scoring.score(model, asked, 9, sizes.append)
    assert len(sizes) > 1
    assert sum(sizes) == 9
    for one, other in zip(whole, limited, strict=True):
        assert [math.fsum(x) for x in one] == pytest.approx([math.fsum(x) for x in other], abs=1e-5)


def test_the_prompt_is_computed_once() -> None:
    group = [Sample([1, 2, 3, 9, 4], [0, 0, 0, 1, 1]), Sample([1, 2, 3, 8, 5, 6], [0, 0, 0, 1, 1, 0])]
    row = scoring.arrange(group)
    assert row.tokens == [1, 2, 3, 9, 8]
    assert row.positions == [0, 1, 2, 3, 3]
    assert row.branches == [0, 0, 0, 1, 2]
    assert row.targets == [[(2, 9), (3, 4)], [(2, 8), (4, 5)]]


def test_perplexity_is_exp_of_the_models_own_loss(model: Any, tiny_hf: Callable[..., Path]) -> None:
    tokens = [random.Random(0).randrange(330) for _ in range(60)]
    (sample,) = questions.windows(tokens, 256)
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(tiny_hf("llama"), dtype=torch.float32)(
            torch.tensor([tokens]), labels=torch.tensor([tokens])
        ).loss
    row = measures.perplexity_row(Question("perplexity", "f", 1, (sample,), ""), scoring.score(model, [[sample]], 4)[0])
    assert row["tokens"] == 59
    assert measures.perplexity([row])["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)


@pytest.mark.parametrize("count", [2, 9, 10, 11, 25, 40])
def test_windows_score_each_token_once(count: int) -> None:
    tokens = list(range(count))
    parts = questions.windows(tokens, 10)
    scored = [token for part in parts for token, mask in zip(part.tokens, part.mask, strict=True) if mask]
    assert scored == tokens[1:]
    for part in parts:
        assert len(part.tokens) <= 10
        assert part.tokens == tokens[part.tokens[0] : part.tokens[0] + len(part.tokens)]
    for part in parts[1:]:
        assert part.mask.index(1) >= 5


def test_weights_that_do_not_fit_are_refused(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """transformers itself fills a missing tensor with random numbers and warns."""
    from safetensors.torch import load_file, save_file

    source = tiny_hf("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(source / "model.safetensors")
    for change, what in (
        ({name: None}, f"does not hold {name}"),
        ({name: torch.zeros(3, 64)}, f"holds in another shape {name}"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}, "the model has no place for, model.layers.9"),
    ):
        changed = {key: value for key, value in {**weights, **change}.items() if value is not None}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match=what):
            scoring.load_model(tmp_path, "fp32")


def test_a_tokenizer_larger_than_the_model(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gives the id 330, the model has embeddings for 330"):
        scoring.check_tokens(model, [[Sample([1, 330], [0, 1])]], tmp_path)


def test_choice_figures_by_hand() -> None:
    sample = Sample([1, 2], [0, 1])
    asked = Question("choice", "f", 3, (sample, sample, sample), "q", ("a", "b", "c"), 1)
    row = measures.choice_row(asked, [[-1.0, -1.0], [-2.5], [-9.0, -1.0, -2.0]])
    assert row["logp"] == [-2.0, -2.5, -12.0]
    assert (row["margin"], row["margin_per_token"]) == (-0.5, -1.5)
    assert not row["correct"]
    won = measures.choice_row(asked, [[-2.0, -2.0], [-3.0], [-9.0, -9.0, -9.0]])
    assert (won["correct"], won["correct_per_token"]) == (True, False)
    tie = measures.choice_row(asked, [[-2.0], [-2.0], [-3.0]])
    assert not tie["correct"]
    figures = measures.choice([row, won, tie])
    assert figures["accuracy"] == pytest.approx(1 / 3, abs=1e-6)
    assert figures["margin"] == pytest.approx((-0.5 + 1 + 0) / 3, abs=1e-6)
    assert figures["guessing"] == pytest.approx(1 / 3, abs=1e-6)


def test_wilson() -> None:
    # Wilson's interval of 8 out of 10, from tables.
    assert measures.wilson(8, 10) == pytest.approx([0.4902, 0.9433], abs=1e-4)
    assert measures.wilson(0, 10)[0] == 0
    assert measures.wilson(10, 10)[1] == 1
