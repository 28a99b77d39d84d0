"""mst-convert against the converters that Megatron users have: Megatron-Bridge and mcore-bridge.

Each peer runs in an environment of its own (scripts/peers/install) through its own API (scripts/peers/run_*.py), on the
CPU, with a stub of TransformerEngine. Before anything is timed, what it makes is compared with the source and with
what mst-convert makes, bit by bit: a peer that converts something else would be no peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench

SCRIPTS = Path(__file__).parent
PEERS = {"Megatron-Bridge": "megatron-bridge", "mcore-bridge": "mcore-bridge"}
TO, FROM = "HF -> torch_dist", "torch_dist -> HF"
Run = tuple[float, float, int, int]  # seconds, of them on a core, peak of anonymous memory, of all resident memory


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of random bf16 weights; 5 times as much disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to work (the disk that is measured)")
    parser.add_argument("--out", type=Path, default=None, help="write the table there too")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=asked.dir))
    try:
        table = peers(folder, asked.size, asked.rounds)
    finally:
        shutil.rmtree(folder)
    print(table)
    if asked.out:
        asked.out.write_text(table + "\n")


def peers(folder: Path, size: float, rounds: int) -> str:
    """The table."""
    source, dist, out = folder / "hf", folder / "dist", folder / "out"
    bench.random_model(source, bench.LLAMA, size * 1e9)
    tokenizer(source)
    tool = [str(Path(sys.executable).parent / "mst-convert"), "--model"]
    bench.run([*tool, str(source), "--to", "megatron", "--out", str(dist)])
    rows, loads = [], []
    for peer, name in PEERS.items():
        theirs = folder / name
        convert = [str(python(name)), str(SCRIPTS / "peers" / f"run_{name.replace('-', '_')}.py")]
        to = [*convert, "import", str(source)]
        back = [*convert, "export", str(source), str(theirs), str(out)]
        timed([*to, str(theirs)], theirs)
        same(tensors_of_dist(theirs), tensors_of_dist(dist), f"{peer}, {TO}")
        timed(back, out)
        same(tensors_of_hf(out), tensors_of_hf(source), f"{peer}, {FROM}")
        cases = {
            TO: (source, [*to, str(out)], source, [*tool, str(source), "--to", "megatron", "--out", str(out)]),
            FROM: (theirs, back, dist, [*tool, str(dist), "--to", "hf", "--out", str(out)]),
        }
        for way, (their_source, their_words, our_source, our_words) in cases.items():
            words = {"ours": [*our_words, "--verify", "none"], "read_back": our_words, "theirs": their_words}
            found: dict[str, list[Run]] = {who: [] for who in words}
            for number in range(rounds):
                loads.append(os.getloadavg()[0])
                for who in sorted(found, reverse=bool(number % 2)):
                    bench.settle(their_source if who == "theirs" else our_source, False)
                    found[who].append(timed(words[who], out))
            rows.append(row(way, peer, **found))
            print(rows[-1], file=sys.stderr, flush=True)
        shutil.rmtree(theirs)
    return "\n".join([*head(size, rounds, loads), *rows])


def timed(words: list[str], out: Path) -> Run:
    """Run a conversion, from process start to durable output; the cores and paths are the peer's own to choose."""
    shutil.rmtree(out, ignore_errors=True)
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    own = os.environ if Path(words[0]).name == "mst-convert" else env
    os.sync()
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = bench.run(words, dict(own))
    os.sync()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - start, sum(after[:2]) - sum(before[:2]), *memory


def row(way: str, peer: str, ours: list[Run], read_back: list[Run], theirs: list[Run]) -> str:
    """One line: medians, the spread of the ratio over the pairs, and the worst memory of ours against their best."""
    cells = [way, peer]
    for runs in (ours, read_back):
        ratios = [they[0] / we[0] for we, they in zip(runs, theirs, strict=True)]
        cells.append(f"{statistics.median(ratios):.1f} x ({min(ratios):.1f} to {max(ratios):.1f})")
    for kind in (0, 1):
        they, we = (statistics.median(run[kind] for run in runs) for runs in (theirs, ours))
        cells.append(f"{they:.1f} against {we:.1f} s" + (f" ({they / we:.1f} x)" if kind else ""))
    for kind in (2, 3):
        most, least = max(run[kind] for run in ours + read_back), min(run[kind] for run in theirs)
        cells.append(f"{least / 2**20:.0f} against {most / 2**20:.0f} MiB ({least / most:.0f} x)")
    return f"| {' | '.join(cells)} |"


def head(size: float, rounds: int, loads: list[float]) -> list[str]:
    """What was measured, on what, with which versions; and the table's first two lines."""
    sys.path.insert(0, str(SCRIPTS / "peers"))
    import te_stub

    named = sum(map(len, te_stub.NAMED.values()))
    machine = f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores ({bench.cpu()})"
    return [
        f"mst {version('mst-tools-core')}, {machine}, no GPU, load {min(loads):.1f} to {max(loads):.1f} before the",
        f"rounds. {rounds} paired rounds, {size:g} GB of random bf16 llama, warm page cache, from process start to",
        "durable output (`sync`). mst-convert hashes what it writes; the peers verify nothing, so `--verify none` is",
        "compared with them first; its default, which reads the output back from the disk, in the next column.",
        "Each peer in an environment of its own, through its own API; what it makes was compared with the source, and",
        "with what mst-convert makes, bit by bit, before the rounds.",
        *(f"{peer}: {versions(name)}." for peer, name in PEERS.items()),
        f"TransformerEngine is a stub in both: {', '.join(te_stub.BUILT)} hold uninitialised parameters and",
        f"have no forward, {named} further names are there to be imported (scripts/peers/te_stub.py). Memory is the",
        "peak of the main process, the peer's lowest of all rounds against our highest.",
        "",
        "| conversion | peer | faster | reading back | median | on the cores | anonymous memory | resident memory |",
        "|---|---|---|---|---|---|---|---|",
    ]


def versions(name: str) -> str:
    """The versions in a peer's environment that matter."""
    ask = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    words = [str(python(name)), "-c", ask, name, "megatron-core", "torch", "transformers"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def python(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return SCRIPTS.parent / ".cache" / "peers" / name / "bin" / "python"


def tokenizer(directory: Path) -> None:
    """A tokenizer of a few words, which the peers ask for."""
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "b"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def tensors_of_dist(directory: Path) -> dict[str, bytes]:
    """The hash of each tensor of a torch_dist checkpoint, read by torch's own loader."""
    import torch
    from torch.distributed import checkpoint

    (part,) = (path.parent for path in directory.glob("*/.metadata"))
    reader = checkpoint.FileSystemReader(part)
    found = {}
    for key, said in reader.read_metadata().state_dict_metadata.items():
        if isinstance(said, checkpoint.metadata.TensorStorageMetadata):
            state = {key: torch.empty(said.size, dtype=said.properties.dtype)}
            checkpoint.load(state, storage_reader=reader, no_dist=True)
            found[key] = digest(state[key])
    return found


def tensors_of_hf(directory: Path) -> dict[str, bytes]:
    """The hash of each tensor of a Hugging Face directory, read by safetensors."""
    from safetensors import safe_open

    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # it cannot be iterated itself
            found.update({name: digest(file.get_tensor(name)) for name in names})
    return found


def digest(tensor: Any) -> bytes:
    """Of its shape and its bytes (random bytes make NaNs, which equal nothing)."""
    import blake3
    import torch

    flat = tensor.contiguous().view(torch.int16).numpy()
    return blake3.blake3(repr(tuple(tensor.shape)).encode() + flat.tobytes()).digest()


def same(theirs: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    """Stop where a peer's tensors are not the expected ones."""
    different = sorted(key for key in theirs.keys() | expected if theirs.get(key) != expected.get(key))
    if different or not expected:
        sys.exit(f"{what}: not the tensors of the source: {', '.join(different[:5])}")


if __name__ == "__main__":
    main()
