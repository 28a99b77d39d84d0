"""What scores add up to. Log-probabilities are in nats; every mean is over rows unless it says tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mst_evalkit.questions import Question

DIGITS = 6
"""Digits after the point in the report: more would only be rounding of fp32."""


def choice_row(question: Question, logps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """One choice: each candidate's log-probability (end-of-turn token included), and whether the right one wins.

    ``margin`` is the right one's lead over the best wrong one, ``margin_per_token`` that of their means per token.
    A tie is not right.
    """
    sums = [math.fsum(tokens) for tokens in logps]
    means = [total / len(tokens) for total, tokens in zip(sums, logps, strict=True)]
    return {
        "task": "choice",
        "file": question.number,
        "line": question.line,
        "answer": question.right,
        "logp": [round(value, DIGITS) for value in sums],
        "tokens": [len(tokens) for tokens in logps],
        "margin": round(_lead(sums, question.right), DIGITS),
        "margin_per_token": round(_lead(means, question.right), DIGITS),
        "correct": _lead(sums, question.right) > 0,
        "correct_per_token": _lead(means, question.right) > 0,
    }


def reward_row(question: Question, scores: Sequence[float]) -> dict[str, Any]:
    """One choice of a reward model: each candidate's score. A tie is not right."""
    return {
        "task": "reward",
        "file": question.number,
        "line": question.line,
        "answer": question.right,
        "score": [round(value, DIGITS) for value in scores],
        "margin": round(_lead(scores, question.right), DIGITS),
        "correct": _lead(scores, question.right) > 0,
    }


def reward(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ranking accuracy, the mean margin and score, and what guessing would give."""
    scores = [score for row in rows for score in row["score"]]
    return {
        "rows": len(rows),
        "accuracy": _mean([row["correct"] for row in rows]),
        "accuracy_interval": wilson(sum(row["correct"] for row in rows), len(rows)),
        "margin": _mean([row["margin"] for row in rows]),
        "score": _mean(scores),
        "guessing": _mean([1 / len(row["score"]) for row in rows]),
    }


def choice(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy by sums and by means per token, the mean margin, and what guessing would give."""
    right = sum(row["correct"] for row in rows)
    return {
        "rows": len(rows),
        "accuracy": _mean([row["correct"] for row in rows]),
        "accuracy_interval": wilson(right, len(rows)),
        "accuracy_norm": _mean([row["correct_per_token"] for row in rows]),
        "margin": _mean([row["margin"] for row in rows]),
        "guessing": _mean([1 / len(row["logp"]) for row in rows]),
    }


def perplexity_row(question: Question, logps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """One answer or text: its tokens and their negative log-likelihood."""
    tokens = sum(map(len, logps))
    nll = -math.fsum(value for part in logps for value in part)
    return {
        "task": "perplexity",
        "file": question.number,
        "line": question.line,
        "tokens": tokens,
        "nll": round(nll, DIGITS),
        "nll_per_token": round(nll / tokens, DIGITS),
    }


def perplexity(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over all tokens of all rows, and its exponential."""
    tokens = sum(row["tokens"] for row in rows)
    nll = math.fsum(row["nll"] for row in rows) / tokens
    return {
        "rows": len(rows),
        "tokens": tokens,
        "nll": round(nll, DIGITS),
        # exp of more than about 709 is no float; such a model is broken, and the report should still be written.
        "perplexity": round(math.exp(min(nll, 700.0)), DIGITS),
    }


def wilson(right: int, count: int, z: float = 1.959964) -> list[float]:
    """The 95 % interval of a proportion (Wilson 1927): sound for few rows and near 0 and 1."""
    share = right / count
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return [round(max(0.0, (middle - reach) / scale), DIGITS), round(min(1.0, (middle + reach) / scale), DIGITS)]


def _lead(values: Sequence[float], right: int) -> float:
    return values[right] - max(value for index, value in enumerate(values) if index != right)


def _mean(values: Sequence[float]) -> float:
    return round(math.fsum(values) / len(values), DIGITS)
