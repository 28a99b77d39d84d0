"""report.html: one page that needs nothing beside it. Every text of a row or a name is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mst_evalkit.questions import Question

SHOWN = 500
"""Rows on the page, the worst first; rows.jsonl has all."""
LONGEST = 2000
"""Characters of a question on the page."""
GOOD, BAD, PLAIN = "#2a7f62", "#c1443c", "#3b6ea5"
LEGEND = {
    "rows": "rows measured",
    "accuracy": "share of rows whose right answer is the likeliest (log-probability of the whole answer) or best",
    "accuracy_interval": "95 % interval of the accuracy (Wilson): how far another sample of rows may lie",
    "accuracy_norm": "the same by the mean log-probability per token, which does not favour short answers",
    "margin": "mean lead of the right answer over the best wrong one (log-probabilities in nats, or scores)",
    "score": "mean score of all answers",
    "guessing": "accuracy of a guess",
    "tokens": "tokens scored: the assistant's (end-of-turn token included), or all but the first of a text",
    "nll": "mean negative log-likelihood of a token, in nats",
    "perplexity": "exp of the mean negative log-likelihood",
}
STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: inherit; max-width: 34rem; }
img { max-width: 100%; background: #fff; border-radius: 4px; } code, .id { font: .85em ui-monospace, monospace; }
.id, .legend { opacity: .75; overflow-wrap: anywhere; } .good { color: #2a7f62; } .bad { color: #c1443c; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def pictures(measured: Sequence[dict[str, Any]]) -> dict[str, bytes]:
    """The plots as PNG by file name: margins of choices, negative log-likelihoods of answers and texts."""
    found = {}
    choices = [row for row in measured if row["task"] != "perplexity"]
    if choices:
        parts = {
            "right": (GOOD, [row["margin"] for row in choices if row["correct"]]),
            "wrong": (BAD, [row["margin"] for row in choices if not row["correct"]]),
        }
        found["margins.png"] = _histogram(parts, "lead of the right answer over the best wrong one")
    texts = [row["nll_per_token"] for row in measured if row["task"] == "perplexity"]
    if texts:
        found["nll.png"] = _histogram({"rows": (PLAIN, texts)}, "negative log-likelihood per token (nats)")
    return found


def _histogram(parts: Mapping[str, tuple[str, Sequence[float]]], label: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = [value for _, part in parts.values() for value in part]
    low, high = min(values), max(values)
    signed = len(parts) > 1
    # Wrong rows lie left of 0 and right ones right of it: with an edge of the bins at 0 no bar holds both.
    width = max(high - min(low, 0.0) if signed else high - low, 1e-3) / 40
    first = -(-max(0.0, -low) // width) * width * -1 if signed else low
    count = max(1, int((high - first) / width) + 1)
    edges = [first + width * index for index in range(count + 1)]
    for name, (colour, part) in parts.items():
        axes.hist(part, bins=edges, color=colour, label=f"{name} ({len(part)})")
    if signed:
        axes.axvline(0, color="black", linewidth=0.8)
        axes.legend(frameon=False)
    axes.set_xlabel(label)
    axes.set_ylabel("rows")
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def html(
    title: str,
    body: Mapping[str, Any],
    rows: Sequence[tuple[Question, dict[str, Any]]],
    images: Mapping[str, bytes],
) -> str:
    """The page. ``body`` is report.json; ``rows`` are questions beside their measured rows."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}"><style>{STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="id">model {escape(body["model"]["id"])}'
        f"<br>data {escape(body['data']['id'])}: {_counts(body['data'])}"
        f"<br>{escape(body['precision'])}, rows up to {body['seq_length']:,} tokens</p>",
    ]
    for task, figures in body["tasks"].items():
        picture = images["nll.png" if task == "perplexity" else "margins.png"]
        mine = [pair for pair in rows if pair[0].task == task]
        parts += [f"<h2>{escape(task)}</h2>", _figures(figures), _image(picture, f"histogram of {task}")]
        parts.append(_texts(mine) if task == "perplexity" else _choices(mine))
    return "\n".join([*parts, "</body></html>", ""])


def _counts(data: Mapping[str, Any]) -> str:
    words = [f"{data['rows']:,} rows"]
    words += [f"{data[name]:,} {name}" for name in ("rejected", "duplicates") if data[name]]
    return ", ".join(words)


def _image(content: bytes, label: str) -> str:
    return f'<p><img alt="{escape(label)}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></p>'


def _figures(figures: Mapping[str, Any]) -> str:
    lines = [
        f'<tr><td>{escape(name)}</td><td class="n">{_number(value)}</td><td class="legend">{LEGEND[name]}</td></tr>'
        for name, value in figures.items()
    ]
    return "\n".join(["<table>", *lines, "</table>"])


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_number, value))
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def _choices(rows: Sequence[tuple[Question, dict[str, Any]]]) -> str:
    lines = []
    for question, row in sorted(rows, key=lambda pair: pair[1]["margin"])[:SHOWN]:
        answers = []
        values = row["score" if question.task == "reward" else "logp"]
        for index, (text, value) in enumerate(zip(question.answers, values, strict=True)):
            mark = "good" if index == question.right else "bad"
            answers.append(f'<pre class="{mark}">{_text(text)} <code>{value:.3f}</code></pre>')
        verdict = "yes" if row["correct"] else "no"
        lines.append(
            f'<tr><td class="n">{_place(question)}</td><td><pre>{_text(question.asked)}</pre></td>'
            f'<td>{"".join(answers)}</td><td>{verdict}</td><td class="n">{row["margin"]:.3f}</td></tr>'
        )
    head = (
        '<tr><th class="n">row</th><th>question</th><th>answers, the right one green</th>'
        '<th>right?</th><th class="n">margin</th></tr>'
    )
    return _table(head, lines, len(rows), "the smallest margins first")


def _texts(rows: Sequence[tuple[Question, dict[str, Any]]]) -> str:
    lines = [
        f'<tr><td class="n">{_place(question)}</td><td><pre>{_text(question.asked)}</pre></td>'
        f'<td class="n">{row["tokens"]:,}</td><td class="n">{row["nll_per_token"]:.3f}</td></tr>'
        for question, row in sorted(rows, key=lambda pair: -pair[1]["nll_per_token"])[:SHOWN]
    ]
    head = '<tr><th class="n">row</th><th>text</th><th class="n">tokens</th><th class="n">nats a token</th></tr>'
    return _table(head, lines, len(rows), "the least likely first")


def _table(head: str, lines: Sequence[str], total: int, order: str) -> str:
    note = f"{order}; " + ("all rows" if total <= SHOWN else f"{SHOWN} of {total:,} rows, the rest in rows.jsonl")
    return "\n".join([f'<p class="legend">{note}</p><table><thead>{head}</thead><tbody>', *lines, "</tbody></table>"])


def _place(question: Question) -> str:
    return f"{escape(question.file)}:{question.line}"


def _text(text: str) -> str:
    return escape(text if len(text) <= LONGEST else text[:LONGEST] + " …")
