"""The cache of tokenised rows: what makes a new one, what does not, and that no corpus is whole in memory."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mst_core.data import load, sources, store
from mst_core.data.render import Renderer, Sample, load_tokenizer
from mst_core.errors import InputError, RowError

ROWS = [{"prompt": f"Is number {i} odd?", "completion": "yes" if i % 2 else "no"} for i in range(6)]


@pytest.fixture
def model(tiny_hf: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_hf("llama"), tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


class Kept:
    """Loads through one cache, and says how many directories it holds."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder

    def __call__(self, *names: str | Path, length: int = 200, bad_rows: load.BadRows = "error") -> load.Loaded[Sample]:
        renderer = Renderer(load_tokenizer(self.model), length)
        cache = load.Cache(self.folder, self.model)
        return load.sft(sources.resolve(names), renderer, bad_rows, cache)

    @property
    def held(self) -> int:
        return len(list((self.folder / "rows").iterdir()))


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> Kept:
    return Kept(model, tmp_path / "cache")


def test_what_is_read_is_what_was_written(kept: Kept, data: Path) -> None:
    renderer = Renderer(load_tokenizer(kept.model), 200)
    plain = load.sft([data], renderer)
    found = kept(data)
    assert list(found.samples) == list(plain.samples)
    assert found.samples[-1] == plain.samples[-1]
    assert found.samples[1:3] == plain.samples[1:3]
    assert pickle.loads(pickle.dumps(found.samples))[2] == plain.samples[2]
    assert len(pickle.dumps(found.samples)) < 500
    assert isinstance(found.samples, store.Stored)
    assert list(found.samples.lengths()) == [len(sample.tokens) for sample in plain.samples]
    with pytest.raises(IndexError):
        found.samples[6]


def test_the_same_contents_are_tokenised_once(kept: Kept, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept(data)
    moved = data.rename(data.with_name("b.jsonl"))

    def no(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Renderer, "samples", no)
    again = kept(moved)
    assert list(again.samples) == list(first.samples)
    assert (again.rows, again.duplicates, again.counts[0][1]) == (first.rows, first.duplicates, 6)
    assert kept.held == 1


def test_another_input_is_another_key(kept: Kept, data: Path, model: Path) -> None:
    kept(data)
    kept(data, length=150)
    kept(f"{data}#3")
    kept(data, bad_rows="skip")
    assert kept.held == 4
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("'\n' +", "'\n ' +", 1))
    before = list(kept(data).samples)
    assert kept.held == 5
    data.write_text(data.read_text().replace("odd", "old"))
    assert list(kept(data).samples) != before
    assert kept.held == 6
    kept(data)
    assert kept.held == 6


def test_rows_set_aside_are_told_from_the_cache_too(kept: Kept, data: Path) -> None:
    data.write_text(data.read_text() + '{"prompt": "x"}\n')
    with pytest.raises(RowError, match="1 of 7 rows"):
        kept(data)
    assert kept.held == 0  # nothing half-made stays
    found = [kept(data, bad_rows="skip") for _ in range(2)]
    assert found[0].rejects() == found[1].rejects() != ""
    assert kept.held == 1


def test_a_cut_file_is_made_again(kept: Kept, data: Path) -> None:
    whole = list(kept(data).samples)
    (path,) = (kept.folder / "rows").glob("*/tokens.bin")
    path.write_bytes(path.read_bytes()[:-4])
    assert list(kept(data).samples) == whole


def test_a_cache_that_cannot_be_written(kept: Kept, data: Path, tmp_path: Path) -> None:
    kept.folder = tmp_path / "file"
    kept.folder.write_text("")
    with pytest.raises(InputError, match="the cache cannot be written") as error:
        kept(data)
    assert "--cache" in str(error.value.hint)


def test_pairs_come_from_the_cache_two_by_two(model: Path, data: Path, tmp_path: Path) -> None:
    data.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "chosen": "yes", "rejected": "no"}) + "\n" for i in range(3))
    )
    renderer, cache = Renderer(load_tokenizer(model), 200), load.Cache(tmp_path / "cache", model)
    plain, found = load.pairs([data], renderer), load.pairs([data], renderer, cache=cache)
    assert list(found.samples) == list(plain.samples)
    assert len(found.samples) == 3
    assert found.samples[-1] == plain.samples[2]
    assert found.counts[0][1] == 3
    assert found.order(0, None).count == 3


SCRIPT = """
import resource, sys
from pathlib import Path
from mst_core.data import load, sources
from mst_core.data.documents import Documents
from mst_core.data.render import load_tokenizer

model, cache, limit, names = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
documents = Documents(load_tokenizer(model), 256)
documents.tokenizer("warm")

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) * 1024

# Anonymous memory only: pages of files come and go as the machine likes.
resource.setrlimit(resource.RLIMIT_DATA, (held() + limit, held() + limit))
loaded = load.cpt(sources.resolve(names), documents, cache=load.Cache(cache, model) if cache.name != "none" else None)
loaded.pack(256, 0)
print(len(loaded.samples), sum(len(loaded.samples[i].tokens) for i in range(len(loaded.samples))))
"""


def test_a_corpus_larger_than_the_memory(model: Path, tmp_path: Path) -> None:
    """16 MB of anonymous memory; the tokens alone are more. Without the cache it does not fit, so the limit holds."""
    text = json.dumps({"text": "The quick brown fox jumps over the lazy dog; how vexingly quick. " * 60})
    (tmp_path / "a.jsonl").write_text("".join(f"{text}\n" for _ in range(600)))
    (tmp_path / "b.json").write_text("[" + ",\n".join([text] * 600) + "]")
    size = sum((tmp_path / name).stat().st_size for name in ("a.jsonl", "b.json"))
    words = [sys.executable, "-c", SCRIPT, model]
    names = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    limit = 16 << 20
    done = subprocess.run([*words, tmp_path / "cache", str(limit), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens = int(done.stdout.split()[1])
    assert 4 * tokens + tokens > 0.5 * limit
    assert size > 0.25 * limit
    done = subprocess.run([*words, tmp_path / "none", str(limit), *names], capture_output=True, text=True)
    assert done.returncode != 0
    assert "MemoryError" in done.stderr or "memory" in done.stderr
