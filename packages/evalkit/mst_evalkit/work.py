"""Measure: rows first, then the model, then every score, then the report directory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mst_core import checkpoint, console, manifest
from mst_core.data import rows
from mst_core.data.load import Loaded
from mst_core.data.render import load_tokenizer
from mst_core.manifest import Manifest, Parent
from mst_core.spec import Result
from mst_evalkit import measures, page, questions, scoring
from mst_evalkit.plan import EvalPlan
from mst_evalkit.questions import Question
from mst_evalkit.spec import EvalSpec

FORMAT = 1


def work(spec: EvalSpec, plan: EvalPlan) -> Result:
    """Measure and write the report. Nothing is written before rows, tokenizer and model are known to be usable."""
    started = time.time()
    tokenizer = load_tokenizer(plan.directory, template=False)
    loaded = questions.read(spec.data, spec.tasks, tokenizer, plan.seq_length, spec.bad_rows)
    loaded.report("data")
    model = scoring.load_model(plan.directory, spec.precision, scores="reward" in spec.tasks)
    scoring.check_tokens(model, [question.samples for question in loaded.samples], plan.directory)
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        parent = manifest.identify(plan.directory)
        measured = _measure(model, loaded.samples, spec.batch_size)
        body = _report(spec, plan, parent, loaded, measured)
        staging.write("report.json", json.dumps(body, indent=2, ensure_ascii=False) + "\n")
        staging.write("rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in measured))
        # Pages and pictures are for people: other versions of matplotlib draw other bytes, the measurement is the same.
        pictures = page.pictures(measured)
        for name, content in pictures.items():
            (staging.path / name).write_bytes(content)
            staging.attach(name)
        title = f"{plan.directory.resolve().name} on {', '.join(path.name for path in spec.data)}"
        html = page.html(title, body, list(zip(loaded.samples, measured, strict=True)), pictures)
        (staging.path / "report.html").write_text(html, encoding="utf-8")
        staging.attach("report.html")
        if loaded.rejected:
            (staging.path / "rejected.jsonl").write_text(loaded.rejects(), encoding="utf-8")
            staging.attach("rejected.jsonl")
        made = staging.commit(
            kind="report",
            layout="report",
            tool="mst-eval",
            settings={**spec.effective(), "seq_length": plan.seq_length},
            parents=[
                Parent(role="model", id=parent.id, weights=parent.digests.weights),
                Parent(role="data", id=body["data"]["id"]),
            ],
            parent_dirs=[plan.directory],
            notes={"model": plan.directory.resolve().name, "seconds": round(time.time() - started, 1)},
        )
    for task, figures in body["tasks"].items():
        console.table(task, [(name, shown(value)) for name, value in figures.items()])
    return Result(text=str(spec.out), data={"out": str(spec.out), "id": made.id, **body})


def _measure(model: Any, asked: Sequence[Question], batch_size: int) -> list[dict[str, Any]]:
    """One row of the report for each question, in their order."""
    if asked[0].task == "reward":
        return _ranked(model, asked, batch_size)
    # Candidates are scored together; the parts of a text have no beginning in common.
    groups = [
        group
        for question in asked
        for group in ([question.samples] if question.task == "choice" else [(part,) for part in question.samples])
    ]
    total = sum(map(len, groups)) if scoring.windowed(model) else len(groups)
    with console.progress("scoring", total=total, unit="row") as bar:
        scored = iter(scoring.score(model, groups, batch_size, bar.advance))
    found = []
    for question in asked:
        if question.task == "choice":
            found.append(measures.choice_row(question, next(scored)))
        else:
            found.append(measures.perplexity_row(question, [next(scored)[0] for _ in question.samples]))
    return found


def _ranked(model: Any, asked: Sequence[Question], batch_size: int) -> list[dict[str, Any]]:
    flat = [sample for question in asked for sample in question.samples]
    with console.progress("scoring", total=len(flat), unit="answer") as bar:
        scores = iter(scoring.rewards(model, flat, batch_size, bar.advance))
    return [measures.reward_row(question, [next(scores) for _ in question.samples]) for question in asked]


def _report(
    spec: EvalSpec, plan: EvalPlan, model: Manifest, loaded: Loaded[Question], measured: list[dict[str, Any]]
) -> dict[str, Any]:
    """report.json: no paths, names or times, so that the same measurement is the same file."""
    makers = {"choice": measures.choice, "perplexity": measures.perplexity, "reward": measures.reward}
    return {
        "format": FORMAT,
        "model": {"id": model.id, "weights": model.digests.weights},
        "data": {
            "id": rows.digest(spec.data),
            "rows": loaded.rows,
            "rejected": len(loaded.rejected),
            "duplicates": loaded.duplicates,
        },
        "precision": spec.precision,
        "seq_length": plan.seq_length,
        "tasks": {task: makers[task]([row for row in measured if row["task"] == task]) for task in spec.tasks},
    }


def shown(value: Any) -> str:
    """A figure for a person."""
    if isinstance(value, list):
        return " to ".join(map(shown, value))
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
