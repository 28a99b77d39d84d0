"""From log-likelihoods to figures. Plain arithmetic; the page and the files are made of what this gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_evalkit.questions import Item

DIGITS = 6
"""Decimals of a log-likelihood in rows.jsonl. The figures are computed from what is written there."""


def rows(
    items: Sequence[Item], logps: Sequence[Sequence[float]], tasks: Sequence[str], data: Sequence[Path]
) -> list[dict[str, Any]]:
    """A dict for each item: its place (file as an index of ``data``: no paths in a hashed file), and what each task
    found. ``logps`` holds one number for each sample."""
    order = {str(path): index for index, path in enumerate(data)}
    found = []
    for item, values in zip(items, logps, strict=True):
        scores = [round(value, DIGITS) for value in values]
        lengths = [sample.learnt for sample in item.samples]
        row: dict[str, Any] = {"file": order[item.row.file], "line": item.row.line}
        if "choice" in tasks and item.right is not None:
            row |= choice_row(item.texts, scores, lengths, item.right)
        if "perplexity" in tasks:
            row["nll"] = round(-sum(scores[index] for index in item.passage), DIGITS)
            row["tokens"] = sum(lengths[index] for index in item.passage)
        found.append(row)
    return found


def choice_row(texts: Sequence[str], logps: Sequence[float], lengths: Sequence[int], right: int) -> dict[str, Any]:
    """One question. The right answer must beat every other: a tie is wrong."""
    each = [logp / length for logp, length in zip(logps, lengths, strict=True)]
    margin = _margin(logps, right)
    return {
        "choices": list(texts),
        "logps": list(logps),
        "lengths": list(lengths),
        "right": right,
        "picked": max(range(len(logps)), key=lambda index: logps[index]),
        "margin": round(margin, DIGITS),
        "correct": margin > 0,
        "correct_norm": _margin(each, right) > 0,
    }


def summary(found: Sequence[dict[str, Any]], tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of each task over all rows."""
    figures = {"choice": _choice, "perplexity": _perplexity}
    return {task: figures[task](found) for task in tasks}


def _choice(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    count = len(found)
    accuracy = sum(row["correct"] for row in found) / count
    return {
        "accuracy": accuracy,
        "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "accuracy_norm": sum(row["correct_norm"] for row in found) / count,
        "chance": sum(1 / len(row["choices"]) for row in found) / count,
        "margin": math.fsum(row["margin"] for row in found) / count,
        "rows": count,
    }


def _perplexity(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(row["tokens"] for row in found)
    nll = math.fsum(row["nll"] for row in found) / tokens
    # Beyond e^700 a float overflows, and JSON has no infinity.
    return {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else None, "tokens": tokens, "rows": len(found)}


def _margin(scores: Sequence[float], right: int) -> float:
    return scores[right] - max(score for index, score in enumerate(scores) if index != right)
