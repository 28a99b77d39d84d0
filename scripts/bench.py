"""The measurements behind scripts/bench: pairs in one run, alternating, medians and spread; never a bare time.

convert   mst-convert against ``cp -r`` and ``sync`` of the same source, from process start to durable output, with a
          warm and a cold page cache (cold needs root). A ratio above 1 is faster than the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 192,
}  # fmt: skip


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", choices=["convert"])
    parser.add_argument("--size", type=float, default=3.0, help="GB of random bf16 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=None, help="where to work (the disk that is measured)")
    parser.add_argument("--out", type=Path, default=None, help="write the table there too")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=asked.dir))
    try:
        table = convert(folder, asked.size, asked.rounds, asked.workers)
    finally:
        shutil.rmtree(folder)
    print(table)
    if asked.out:
        asked.out.write_text(table + "\n")


def convert(folder: Path, size: float, rounds: int, workers: int) -> str:
    """The table of mst-convert."""
    dense, experts = folder / "dense", folder / "experts"
    random_model(dense, LLAMA, size * 1e9)
    random_model(experts, EXPERTS, size * 1e9)
    tool = [str(Path(sys.executable).parent / "mst-convert")]
    run([*tool, "--model", str(dense), "--to", "megatron", "--out", str(folder / "dist")])
    run([*tool, "--model", str(dense), "--to", "megatron-legacy", "--tp", "4", "--out", str(folder / "legacy")])
    quick = ["--workers", str(workers), "--verify", "none"]
    cases = {
        "HF -> torch_dist": (dense, ["--to", "megatron", *quick]),
        "torch_dist -> HF": (folder / "dist", ["--to", "hf", *quick]),
        "legacy TP4 -> HF": (folder / "legacy", ["--to", "hf", *quick]),
        "HF -> torch_dist, fp32": (dense, ["--to", "megatron", "--dtype", "fp32", *quick]),
        "HF -> torch_dist, 128 experts": (experts, ["--to", "megatron", *quick]),
        "HF -> torch_dist, read back": (dense, ["--to", "megatron", "--workers", str(workers)]),
    }
    rows = []
    for name, (source, flags) in cases.items():
        for cold in (False, True):
            found = [pair(folder, source, [*tool, "--model", str(source), *flags], cold, n) for n in range(rounds)]
            ratios = [copy / ours for copy, ours, _ in found]
            seconds = [ours for _, ours, _ in found]
            rows.append(
                f"| {name} | {'cold' if cold else 'warm'} | {statistics.median(ratios):.2f} "
                f"| {min(ratios):.2f} to {max(ratios):.2f} | {statistics.median(seconds):.1f} s "
                f"| {max(memory for _, _, memory in found) / 2**20:.0f} MiB |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    head = [
        f"mst {version('mst-tools-core')}, Python {platform.python_version()}, Linux {platform.release()},",
        f"{os.cpu_count()} cores ({cpu()}), {rounds} paired rounds, {size:g} GB of random bf16, {workers} workers.",
        "Speed is against `cp -r` and `sync` of the same source in the same round, from process start to durable",
        "output, hashed with blake3, fsynced. Memory is the peak of anonymous pages, interpreter and imports included.",
        "",
        "| conversion | page cache | speed against cp | spread | median | memory |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


def pair(folder: Path, source: Path, command: list[str], cold: bool, number: int) -> tuple[float, float, int]:
    """(seconds of the copy, seconds of the conversion, its peak of anonymous memory), in turns first."""
    copied, out = folder / "copy", folder / "out"
    took: dict[str, float] = {}
    memory = 0

    def copy() -> None:
        subprocess.run(["cp", "-r", str(source), str(copied)], check=True)
        os.sync()

    def ours() -> None:
        nonlocal memory
        memory, _ = run([*command, "--out", str(out)])

    works: dict[str, Callable[[], None]] = {"copy": copy, "ours": ours}
    for name in sorted(works, reverse=bool(number % 2)):
        for left in (copied, out):
            shutil.rmtree(left, ignore_errors=True)
        settle(source, cold)
        start = time.monotonic()
        works[name]()
        took[name] = time.monotonic() - start
    return took["copy"], took["ours"], memory


def settle(source: Path, cold: bool) -> None:
    """Nothing left to write or discard; the source in the page cache, or no page cache at all."""
    os.sync()
    counts = disk_counts()
    while time.sleep(0.3) or counts != (counts := disk_counts()):  # removed files are discarded behind our back
        pass
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return
    for path in sorted(source.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass


def disk_counts() -> list[list[str]]:
    """What each disk has read, written and discarded so far."""
    return [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]


def run(words: list[str], env: dict[str, str] | None = None) -> tuple[int, int]:
    """Run a command to its end; its peaks in bytes of anonymous and of all resident memory."""
    # As installed: with compiled modules, which the first run writes.
    env = {name: value for name, value in (env or os.environ).items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    peaks, over = {"RssAnon": 0, "VmHWM": 0}, threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                return
            for name, _, value in (line.partition(":") for line in lines):
                if name in peaks:
                    peaks[name] = max(peaks[name], int(value.split()[0]) << 10)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, said = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(words)}\n{said}")
    return peaks["RssAnon"], peaks["VmHWM"]


def random_model(directory: Path, config: dict[str, Any], nbytes: float) -> None:
    """A Hugging Face directory of about ``nbytes`` of random weights."""
    from mst_core import tensors
    from mst_core.families import family_for

    def sized(layers: int) -> list[tuple[str, str, tuple[int, ...]]]:
        model = family_for(config).model({**config, "num_hidden_layers": layers})
        return [(spec.name, "BF16", spec.shape) for spec in model.hf_tensors()]

    one, two = (sum(map(tensors.wanted_bytes, sized(layers))) for layers in (1, 2))
    layers = max(1, round((nbytes - one) / (two - one)) + 1)
    directory.mkdir()
    parts, index = tensors.shards(sized(layers), 5_000_000_000), {}
    for number, part in enumerate(parts):
        name = tensors.shard_name(number, len(parts))
        index.update({item[0]: name for item in part})
        with (directory / name).open("wb") as file:
            file.write(tensors.safetensors_header(part))
            left = sum(map(tensors.wanted_bytes, part))
            while left:
                left -= file.write(os.urandom(min(left, 1 << 24)))
    if len(parts) > 1:
        (directory / tensors.INDEX).write_bytes(tensors.index_json(index, 0))
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def world_of_one() -> None:
    """Be the one rank of a world, as a launcher would say it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})


def cpu() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
