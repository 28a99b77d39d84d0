"""The figures behind scripts/gpu. Each run is a process of its own; what fails or has no time left is told, not hidden.

Runs train random llamas on random rows of one length in bf16 with loop.fit, as mst-train does; a step's time is from
its beginning to the next one's. MFU: mst_core/flops.py. At the end mst-train itself trains a tiny model with
each engine, launcher and saves included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import bench

SECONDS = 450
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "megatron-core", "transformer-engine",
            "flash-attn", "deepspeed", "triton", "numpy", "pydantic", "pydantic-settings", "blake3")  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 320},
}  # fmt: skip
ENGINES = {"plain": {}, "plain, compiled": {"compile": True}, "megatron": {"engine": "megatron"}}
ROWS = {"135M": (2048, 16), "1B": (2048, 8), "tiny": (32, 2)}
"""Tokens of a row, rows of a step."""


def main() -> int:
    """Check, measure, write. Exit code 5 if a run failed, 4 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="tiny models, on any device")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu")))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # one run, in a process of its own
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(**json.loads(asked.one))))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + SECONDS
    figures: dict[str, Any] = {"machine": installed(), "runs": [], "commands": []}
    if not asked.dry and not figures["machine"]["device"]:
        print("gpu: torch sees no CUDA device here (--dry runs on a CPU)", file=sys.stderr)
        return 4
    with tempfile.TemporaryDirectory(prefix="gpu-") as work, (asked.out / "log.txt").open("w") as log:
        folder = Path(work)
        for size in ["tiny"] if asked.dry else ["135M", "1B"]:
            random_llama(folder / size, size)
            for engine in ENGINES:
                done = run(folder, size, engine, end, asked.out, log)
                figures["runs"].append(agrees(done, figures["runs"]))
                write(asked.out, figures)
        figures["commands"] = commands(folder, end, log)
        write(asked.out, figures)
    print((asked.out / "figures.md").read_text(), end="")
    return 5 if any("failed" in one for one in (*figures["runs"], *figures["commands"])) else 0


def installed() -> dict[str, Any]:
    """What there is: the device, versions, compilers, and what a matrix product reaches."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "device": "", "packages": {}}
    for name in PACKAGES:
        try:
            found["packages"][name] = version(name)
        except PackageNotFoundError:
            found["packages"][name] = "not installed"
    found["tools"] = {name: shutil.which(name) or "none" for name in ("g++", "nvcc", "ninja")}
    size, device = 256, "cpu"
    if torch.cuda.is_available():
        size, device = 8192, "cuda"
        found |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        found |= {"cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
        found["memory_GiB"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(8):
        synchronise()
        begun = time.perf_counter()
        left @ right
        synchronise()
        rates.append(2 * size**3 / (time.perf_counter() - begun))
    found["product_FLOP_s"] = statistics.median(rates[3:])
    return found


def synchronise() -> None:
    """Wait for the device, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_llama(out: Path, size: str) -> None:
    """A llama of random bf16 weights, with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**LLAMA, **SIZES[size]})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(out)


def run(folder: Path, size: str, engine: str, end: float, out: Path, log: Any) -> dict[str, Any]:
    """A run in a process of its own."""
    told = {"model": size, "engine": engine}
    if engine == "megatron" and importlib.util.find_spec("megatron") is None:
        return {**told, "left out": "megatron-core is not installed"}
    left = end - time.monotonic()
    if left < 30:
        return {**told, "left out": "no time left"}
    given = {"model_dir": str(folder / size), "size": size, "engine": engine, "profiles": str(out / "profiles.txt")}
    words = [sys.executable, __file__, "--one", json.dumps(given)]
    begun = time.monotonic()
    log.write(f"== {size}, {engine}\n")
    log.flush()
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {**told, "failed": f"not done after {left:.0f} s"}
    if done.returncode:
        return {**told, "failed": f"code {done.returncode}, see log.txt"}
    return {**told, **json.loads(done.stdout.splitlines()[-1]), "seconds": time.monotonic() - begun}


def agrees(done: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    """``done``, failed if its first loss is not that of the first engine on the same model."""
    first = next((one["losses"][0] for one in before if one["model"] == done["model"] and "losses" in one), None)
    if first is None or "losses" not in done or abs(done["losses"][0] - first) < 0.02:
        return done
    return {"model": done["model"], "engine": done["engine"], "failed": f"first loss {done['losses'][0]}, not {first}"}


def measure(model_dir: str, size: str, engine: str, profiles: str) -> dict[str, Any]:
    """tokens/s and MFU of one engine on one model."""
    import torch

    from mst_core import checkpoint, families, flops, tensors
    from mst_core.data.render import Sample
    from mst_core.engine import launch, loop
    from mst_core.engine.batches import Singles
    from mst_train.objective import CPT
    from mst_train.spec import TrainSpec

    length, rows = ROWS[size]
    steps, warm = (6, 2) if size == "tiny" else (20, 8)
    options = ENGINES[engine]
    out = Path(model_dir).with_name("out")
    spec = TrainSpec(
        model=model_dir, data=("none",), out=out, stage="cpt", precision="bf16", micro_batch=rows, global_batch=rows,
        seq_length=length, steps=steps, lr=1e-5, schedule="constant", warmup=0.0, **options,
    )  # fmt: skip
    bench.world_of_one()
    trainer = launch.make_engine(str(options.get("engine", "plain")), spec, Path(model_dir))
    draw, vocab = torch.Generator().manual_seed(1), SIZES[size]["vocab_size"]
    numbers = torch.randint(0, vocab, (rows * steps, length), generator=draw).tolist()
    samples = [Sample(row, [1] * length) for row in numbers]
    begins, inside, losses = [], [], []
    step = trainer.step

    def timed(*given: Any) -> dict[str, float]:
        synchronise()
        begins.append(time.perf_counter())
        if len(begins) == steps:
            with torch.profiler.profile() as profile:
                values = step(*given)
            table(profile, f"{size}, {engine}", Path(profiles))
        else:
            values = step(*given)
        synchronise()
        inside.append(time.perf_counter() - begins[-1])
        losses.append(values["loss"])
        return values

    trainer.step = timed
    with checkpoint.stage(out) as staging:
        loop.fit(trainer, CPT, Singles(samples), spec, staging)
    took = [after - before for before, after in zip(begins[warm:], begins[warm + 1 :], strict=False)]
    config = tensors.config(Path(model_dir))
    cost = flops.cost(families.family_for(config, model_dir).model(config, model_dir), config, spec)
    work, median = cost.step([length] * rows) if cost else 0.0, statistics.median(took)
    found = {"tokens_s": rows * length / median, "step_s": median, "step_s_all": took, "FLOP_s": work / median}
    found |= {"loop_s": statistics.median(t - i for t, i in zip(took, inside[warm:], strict=False))}
    found |= {"rows": rows, "length": length, "losses": losses, "start_s": inside[0]}
    if torch.cuda.is_available():
        found["memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    trainer.close()
    return found


def table(profile: Any, title: str, path: Path) -> None:
    """Which operations a step's time goes to."""
    import torch

    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    with path.open("a") as file:
        file.write(f"== {title}\n{profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)}\n")


def commands(folder: Path, end: float, log: Any) -> list[dict[str, Any]]:
    """mst-train as a user types it, on a tiny model: each engine's launcher, saves and resumes."""
    model, texts = folder / "tiny", folder / "texts.jsonl"
    if not model.exists():
        random_llama(model, "tiny")
    texts.write_text("".join(json.dumps({"text": f"Row {number} of a text. " * 4}) + "\n" for number in range(16)))
    found = []
    for engine in ("plain", "megatron"):
        told = {"command": f"mst-train --engine {engine}"}
        if engine == "megatron" and importlib.util.find_spec("megatron") is None:
            found.append({**told, "left out": "megatron-core is not installed"})
            continue
        out = folder / f"trained-{engine}"
        words = [sys.executable, "-m", "mst_train.cli", "--model", model, "--engine", engine, "--stage", "cpt",
                 "--data", texts, "--out", out, "--steps", 4, "--save-every", 2, "--async-save", "--precision", "bf16",
                 "--cache", folder / "cache"]  # fmt: skip
        log.write(f"== mst-train --engine {engine}\n")
        log.flush()
        begun, left = time.monotonic(), max(1.0, end - time.monotonic())
        try:
            code = subprocess.run(list(map(str, words)), stdout=log, stderr=log, timeout=left).returncode
        except subprocess.TimeoutExpired:
            code = 124
        whole = (out / "mst.json").is_file()
        failed = {} if whole and not code else {"failed": f"code {code}, see log.txt"}
        found.append({**told, **failed, "seconds": time.monotonic() - begun})
    return found


def write(out: Path, figures: dict[str, Any]) -> None:
    """figures.json and figures.md, as far as they are."""
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "figures.md").write_text(page(figures))


def page(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    from mst_core import flops

    machine = figures["machine"]
    name, reached = machine["device"] or "CPU", machine["product_FLOP_s"]
    known = flops.peak(name, "bf16")
    peak = known * 1e12 if known else None
    lines = [f"# {name}", "", ", ".join(f"{key} {value}" for key, value in machine["packages"].items()), ""]
    told = f"{peak / 1e12:.0f} TFLOP/s by its datasheet, " if peak else ""
    lines += [f"Dense bf16: {told}{reached / 1e12:.3g} TFLOP/s in a matrix product of ours.", ""]
    lines += ["| model | engine | rows x tokens | tokens/s | step | loop itself | TFLOP/s | MFU | of the product "
              "| memory | first, last loss |", "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for run in figures["runs"]:
        head = f"| {run['model']} | {run['engine']} |"
        if "tokens_s" not in run:
            lines.append(f"{head} {run.get('failed') or run.get('left out')} |" + " |" * 8)
            continue
        share = f"{run['FLOP_s'] / peak:.1%}" if peak else "peak unknown"
        memory = f"{run['memory_GiB']:.1f} GiB" if "memory_GiB" in run else "host"
        lines.append(
            f"{head} {run['rows']} x {run['length']} | {run['tokens_s']:.0f} | {1e3 * run['step_s']:.1f} ms "
            f"| {1e3 * run['loop_s']:.1f} ms | {run['FLOP_s'] / 1e12:.3g} | {share} | {run['FLOP_s'] / reached:.1%} "
            f"| {memory} | {run['losses'][0]:.4f}, {run['losses'][-1]:.4f} |"
        )
    lines.append("")
    for one in figures["commands"]:
        told = one.get("failed") or one.get("left out") or f"done in {one['seconds']:.0f} s"
        lines.append(f"- `{one['command']}`: {told}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
