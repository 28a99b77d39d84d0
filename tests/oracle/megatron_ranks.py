"""One rank of test_megatron_engine.py, under torchrun: the engine as a trainer uses it, many cases in one process.

    python -m torch.distributed.run --nproc-per-node 2 megatron_ranks.py PLAN.json

A case is settings, batches, an objective and steps; what it found is written to ``rank-R-of-W.pt``. Importing
megatron costs 6 s of CPU a process, so all cases of one world size share one launch. The reference (PlainEngine) runs
through the same ``play`` in the test's own process.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mst_align.methods import choose
from mst_align.pairs import objective as of_pairs
from mst_align.rewards import objective as of_rewards
from mst_core import checkpoint
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.seam import Batch, Engine, Objective, Term
from mst_core.errors import RunError
from mst_core.runspec import RunSpec
from mst_train.objective import SFT

RATES = (1e-3, 1e-3, 8e-4, 6e-4, 4e-4)


def nan_gradient(logp_BT: Tensor, batch: Batch) -> dict[str, Term]:
    """A loss of 0 whose gradient is not a number: sqrt at 0."""
    return {"zero": Term(((logp_BT * batch.mask_BT).sum() * 0).abs().sqrt(), 1.0)}


OBJECTIVES = {
    "sft": SFT,
    "dpo": of_pairs(choose("dpo", {"beta": 0.1})),
    "ipo": of_pairs(choose("dpo", {"loss": "ipo", "beta": 0.25})),
    "rm": of_rewards(choose("rm", {"center_rewards_coefficient": 0.01})),
    "nan": Objective("nan", nan_gradient),
}
FIRST = {"dpo": math.log(2), "ipo": 4.0}
"""The loss of a first step, the policy being the reference: of IPO 1 / (4 beta^2)."""


def batches(seed: int, rows: int, micro: int, vocab: int, longest: int = 23, prompts: bool = True) -> list[Batch]:
    """``rows`` random sequences in micro-batches, right padded with id 0, each micro-batch to its own length."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        length = int(torch.randint(9, longest + 1, (), generator=generator))
        start = int(torch.randint(1, length - 3, (), generator=generator)) if prompts else 1
        made.append((torch.randint(0, vocab, (length,), generator=generator), start))
    found = []
    for first in range(0, rows, micro):
        part = made[first : first + micro]
        width = max(len(tokens) for tokens, _ in part)
        tokens_BT = torch.zeros(len(part), width, dtype=torch.int64)
        mask_BT = torch.zeros(len(part), width)
        for row, (tokens, start) in enumerate(part):
            tokens_BT[row, : len(tokens)] = tokens
            mask_BT[row, start : len(tokens)] = 1.0
        found.append(Batch(tokens_BT, mask_BT, torch.tensor([len(tokens) for tokens, _ in part])))
    return found


def last_tokens(batch: Batch) -> Batch:
    """The same, learnt at each last token."""
    return replace(batch, mask_BT=torch.zeros_like(batch.mask_BT).scatter(1, batch.lengths_B[:, None] - 1, 1.0))


def packed(batch: Batch) -> Batch:
    """The same samples, two to a row."""
    lengths, rows = batch.lengths_B.tolist(), []
    for first in range(0, len(lengths), 2):
        pair = range(first, min(first + 2, len(lengths)))
        rows.append([torch.cat([part[i, : lengths[i]] for i in pair]) for part in (batch.tokens_BT, batch.mask_BT)])
    width = max(len(tokens) for tokens, _ in rows)
    tokens_BT, mask_BT = (
        torch.stack([torch.nn.functional.pad(row[axis], (0, width - len(row[axis]))) for row in rows])
        for axis in (0, 1)
    )
    segments = tuple(tuple(lengths[first : first + 2]) for first in range(0, len(lengths), 2))
    return Batch(tokens_BT, mask_BT, torch.tensor([sum(parts) for parts in segments]), {}, segments)


def spec_of(case: dict[str, Any]) -> RunSpec:
    """The settings of a case."""
    fields = {"precision": "fp32", "weight_decay": 0.1, "lr": max(RATES), **case["settings"]}
    return RunSpec(model=case["model"], data=(Path("none.jsonl"),), out=Path("none"), global_batch=8, **fields)


def with_reference(engine: Engine, objective: Objective, found: Sequence[Batch]) -> list[Batch]:
    """The batches with ref_logp_B of the model before its first step, as loop.fit computes it."""
    if not objective.reference:
        return list(found)
    return [replace(b, extra={"ref_logp_B": (engine.score(b, reference=True) * b.mask_BT).sum(1)}) for b in found]


def play(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Score, train, score again; what a trainer sees, the same on every rank."""
    objective, micro = OBJECTIVES[case["objective"]], case["settings"].get("micro_batch", 1) * case.get("rows", 1)
    probe = batches(99, 3, 3, case["vocab"], prompts=False)[0]
    found: dict[str, Any] = {"before": engine.score(probe) * probe.mask_BT, "steps": []}
    rates = RATES[: case["steps"]]
    given = [with_reference(engine, objective, batches(seed, 8, micro, case["vocab"])) for seed in range(len(rates))]
    if case["objective"] == "rm":
        given = [[last_tokens(batch) for batch in whole] for whole in given]
    if case.get("packed"):
        given = [[packed(batch) for batch in whole] for whole in given]
        found["packed"] = engine.score(given[0][0])
    for whole, rate in zip(given, rates, strict=True):
        found["steps"].append(engine.step(whole[engine.dp_rank :: engine.dp_size], objective, rate))
    found["after"] = engine.score(probe) * probe.mask_BT
    found["reference"] = engine.score(probe, reference=True) * probe.mask_BT
    return found


def fit(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """The trainer itself on five pairs: the last micro-batches, and the reference's passes, do not divide by two."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for length in (11, 9, 14, 12, 8, 15, 10, 13, 9, 12):
        tokens = torch.randint(0, case["vocab"], (length,), generator=generator).tolist()
        samples.append(Sample(tokens, [0] * 4 + [1] * (length - 4)))
    units = list(zip(samples[::2], samples[1::2], strict=True))
    done = loop.fit(engine, OBJECTIVES["dpo"], units, spec_of(case), None, units[:3])
    return {"first": done.first["loss"], "last": done.last["loss"], "evaluation": done.evaluation["loss"]}


def forwards(engine: Any, case: dict[str, Any]) -> int:
    """How often the first layer's core attention runs in one step."""
    seen: list[int] = []
    layer = engine.raw[0].decoder.layers[0].self_attention.core_attention
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    whole = batches(0, 8, 2, case["vocab"])
    engine.step(whole[engine.dp_rank :: engine.dp_size], OBJECTIVES["sft"], 0.0)
    handle.remove()
    return len(seen)


def same_cut(engine: Any, case: dict[str, Any]) -> bool:
    """Whether a row is cut as Megatron itself cuts it for context parallelism."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = torch.arange(48).view(2, 24)
    group = parallel_state.get_context_parallel_group()
    theirs = get_batch_on_this_cp_rank({"tokens": tokens, "cu_seqlens": None}, False, group)["tokens"]
    return torch.equal(theirs, engine.cut.mine(tokens))


def overflow(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Steps whose gradients overflow at first."""
    probe = batches(99, 3, 3, case["vocab"], prompts=False)[0]
    steps, same, scores = [], [], [engine.score(probe)]
    for _ in range(12):
        mine = batches(0, 8, 2, case["vocab"])[engine.dp_rank :: engine.dp_size]
        steps.append(engine.step(mine, OBJECTIVES["sft"], 1e-3))
        scores.append(engine.score(probe))
        same.append(torch.equal(scores[-1], scores[-2]))
    return {"steps": steps, "same": same}


def resume(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Three steps after a save, and again after going back to it."""
    where = Path(case["state"])
    where.mkdir(exist_ok=True)

    def steps(seeds: Sequence[int]) -> list[dict[str, float]]:
        return [
            engine.step(batches(seed, 8, 2, case["vocab"])[engine.dp_rank :: engine.dp_size], OBJECTIVES["sft"], 1e-3)
            for seed in seeds
        ]

    steps(range(4))
    engine.save_state(where)
    first = steps(range(4, 7))
    steps(range(20, 25))
    engine.load_state(where)
    return {"first": first, "again": steps(range(4, 7)), "done": engine.steps}


def refuse(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Two steps that must be refused, the weights being those of before."""
    probe = batches(99, 3, 3, case["vocab"], prompts=False)[0]
    before = engine.score(probe)
    poison = [
        replace(b, extra={"ref_logp_B": b.mask_BT.sum(1) * float("nan")}) for b in batches(0, 8, 2, case["vocab"])
    ]
    said = []
    for objective, given in (("dpo", poison), ("nan", batches(0, 8, 2, case["vocab"]))):
        try:
            engine.step(given[engine.dp_rank :: engine.dp_size], OBJECTIVES[objective], 1e-3)
            said.append("no error")
        except RunError as error:
            said.append(str(error))
    found = {"said": said, "same": torch.equal(before, engine.score(probe))}
    # A refused step leaves nothing behind: the next one is a first step.
    found["next"] = engine.step(
        batches(0, 8, 2, case["vocab"])[engine.dp_rank :: engine.dp_size], OBJECTIVES["sft"], 1e-3
    )
    return found


def save(engine: Engine, out: Path) -> None:
    """What run.execute does at the end, without parents."""
    if engine.rank:
        engine.save(None)
        return
    with checkpoint.stage(out) as staging:
        engine.save(staging)
        staging.commit(kind="model", layout="megatron", encoding={}, model=None, parents=[], parent_dirs=[], tool="t",
                       settings={}, notes={})  # fmt: skip


def logits(engine: Any, case: dict[str, Any]) -> Tensor:
    """Of the whole model on this rank (TP 1, PP 1)."""
    tokens = batches(99, 3, 3, case["vocab"], prompts=False)[0].tokens_BT
    with torch.no_grad():
        found = engine.raw[0](tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return found[..., : case["vocab"]].float()


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    from mst_core.engine.megatron.engine import MegatronEngine

    world, findings = dist.get_world_size(), {}
    for name, case in plan["cases"].items():
        if case["world"] != world:
            continue
        engine = MegatronEngine(
            spec_of({**case, "settings": {**case["settings"], "nproc": world}}), Path(case["model"])
        )
        found = {"refuse": refuse, "fit": fit, "overflow": overflow, "resume": resume}.get(case.get("does"), play)(
            engine, case
        )
        if "recompute" in name:
            found["forwards"] = forwards(engine, case)
        if case["settings"].get("cp"):
            found["same_cut"] = same_cut(engine, case)
        if case.get("logits"):
            found["logits"] = logits(engine, case)
        if case.get("save"):
            save(engine, Path(case["save"]))
        findings[name] = found

        from mst_core.engine.megatron import groups

        dist.barrier()
        del engine
        groups.leave()
    torch.save(findings, Path(plan["out"], f"rank-{os.environ['RANK']}-of-{world}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
