"""The reference: another model, or the policy before training; kept in --cache, checked when it is used again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from mst_align.plan import plan
from mst_align.spec import AlignSpec
from mst_align.work import work
from mst_core import checkpoint, lineage, manifest
from mst_core.engine.kept import Kept
from mst_core.errors import InputError, MstError

SETTINGS: dict[str, Any] = {"global_batch": 3, "micro_batch": 1, "lr": 1e-3, "precision": "fp32", "warmup": 0.0}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of rows by method, and others to evaluate on by "METHOD eval"."""
    folder, made = tmp_path_factory.mktemp("rows"), {}
    for name, numbers in (("", range(9)), (" eval", range(20, 24))):
        pairs = [{"prompt": f"Is number {i} odd?", "chosen": "yes" * (1 + i % 2), "rejected": "no"} for i in numbers]
        judged = [{"prompt": pair["prompt"], "completion": f"{i}", "label": i % 2 == 0} for i, pair in enumerate(pairs)]
        for method, found in (("dpo", pairs), ("kto", judged)):
            made[method + name] = folder / f"{method}{name.strip()}.jsonl"
            made[method + name].write_text("".join(json.dumps(row) + "\n" for row in found))
    return made


def align(
    model: Path, rows: dict[str, Path], out: Path, method: str = "dpo", cache: Path | None = None, **settings: Any
) -> dict[str, Any]:
    """A run with evaluation; by default each has a cache of its own."""
    fields = {**SETTINGS, "steps": 4, "eval_data": (rows[f"{method} eval"],), **settings}
    cache = cache or out.parent / f"cache of {out.name}"
    spec = AlignSpec(model=str(model), data=(rows[method],), out=out, method=method, cache=cache, **fields)
    return work(spec, plan(spec)).data


def kept_in(cache: Path) -> list[Path]:
    return sorted((cache / "references").rglob("*.logp"))


def same(one: Path, other: Path) -> bool:
    names = [path.name for path in one.glob("*.safetensors")]
    return bool(names) and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("lora", [None, 4])
def test_a_second_run_reads_and_is_the_same(
    tiny_hf: Callable[..., Path],
    rows: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    lora: int | None,
) -> None:
    """Training and evaluation rows, of KTO also the mismatched ones. With an adapter the reference is the base: it
    finds what a run of all weights left."""
    model, cache = tiny_hf("llama"), tmp_path / "cache"
    align(model, rows, tmp_path / "one", method, cache, lora_rank=lora)
    files = kept_in(cache)
    assert len(files) == (2 if method == "dpo" else 4)
    assert "are in" not in capsys.readouterr().err
    align(model, rows, tmp_path / "two", method, cache, lora_rank=lora)
    said = capsys.readouterr().err
    assert "reference: 9 of 9 are in" in said
    assert "reference of the evaluation rows: 4 of 4 are in" in said
    assert bool(re.search(r"reference divergence: (\d+) of \1 are in", said)) is (method == "kto")
    assert same(tmp_path / "one", tmp_path / "two")
    align(model, rows, tmp_path / "three", method, cache, lora_rank=None if lora else 4)
    assert "reference: 9 of 9 are in" in capsys.readouterr().err
    assert kept_in(cache) == files


def test_what_changes_the_numbers_is_not_taken_for_the_same(
    tiny_hf: Callable[..., Path], rows: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LD-DPO counts some tokens less, another model is another one, and so are 16 bits."""
    cache = tmp_path / "cache"
    align(tiny_hf("llama"), rows, tmp_path / "one", "dpo", cache)
    for number, (seed, more) in enumerate([(0, {"ld_alpha": 0.5}), (1, {}), (0, {"precision": "bf16"})]):
        capsys.readouterr()
        model = tiny_hf("llama", seed=seed) if seed else tiny_hf("llama")
        found = align(model, rows, tmp_path / f"{number}", "dpo", cache, **more)
        said = capsys.readouterr().err
        if "ld_alpha" in more:  # answers of one length are the same as before
            assert "reference: 5 of 9 are in" in said or "reference: 4 of 9 are in" in said
        else:
            assert "are in" not in said
        assert found["first_loss"] == pytest.approx(0.693147, abs=1e-6)


def test_a_broken_or_foreign_file_is_named_and_computed_anew(
    tiny_hf: Callable[..., Path], rows: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, cache = tiny_hf("llama"), tmp_path / "cache"
    align(model, rows, tmp_path / "one", "dpo", cache)
    one, other = kept_in(cache)
    content = one.read_bytes()
    one.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    head, _, body = other.read_bytes().partition(b"\n")
    other.write_bytes(head.replace(b'"engine":"plain"', b'"engine":"fsdp"') + b"\n" + body)
    capsys.readouterr()
    align(model, rows, tmp_path / "two", "dpo", cache)
    said = capsys.readouterr().err
    assert f"{one}: passed over, its rows are computed anew: it is broken" in said
    assert f"{other}: passed over, its rows are computed anew: it is of another reference" in said
    assert same(tmp_path / "one", tmp_path / "two")
    assert one.read_bytes() == content
    align(model, rows, tmp_path / "three", "dpo", cache)
    assert "passed over" not in capsys.readouterr().err


def test_a_file_that_says_something_else_than_the_reference_is_an_error(
    tiny_hf: Callable[..., Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    """Whole and in order, but its numbers are not this model's: a few rows are scored again and compared."""
    model, cache = tiny_hf("llama"), tmp_path / "cache"
    align(model, rows, tmp_path / "one", "dpo", cache)
    for path in kept_in(cache):
        line, _, body = path.read_bytes().partition(b"\n")
        told = json.loads(line)
        names = body[: 16 * told["count"]]
        logp = torch.frombuffer(bytearray(body[len(names) :]), dtype=torch.float32) + 0.01
        body = names + logp.numpy().tobytes()
        path.write_bytes(manifest.canonical({**told, "blake3": blake3(body).hexdigest()}) + b"\n" + body)
    with pytest.raises(InputError, match="for a row that this reference gives") as error:
        align(model, rows, tmp_path / "two", "dpo", cache)
    assert error.value.where in map(str, kept_in(cache))
    assert not (tmp_path / "two").exists()


def test_runs_that_write_at_once_read_whole_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four writers of the same and of other names, while others read."""
    logp_NR = torch.arange(200, dtype=torch.float32).view(100, 2)
    names = [blake3(bytes([number])).digest(16) for number in range(100)]

    def write(number: int) -> None:
        for start in (0, number):
            Kept(tmp_path, {"weights": "w"}).write(names[start:], logp_NR[start:])

    def read(_: int) -> None:
        into_NR = torch.full((100, 2), -1.0)
        found = Kept(tmp_path, {"weights": "w"}).read({name: place for place, name in enumerate(names)}, into_NR)
        assert all(torch.equal(into_NR[place], logp_NR[place]) for place in found)

    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit((write, read)[turn % 2], turn // 2 % 8) for turn in range(160)]:
            made.result()
    assert len(kept_in(tmp_path)) == 8
    assert len(list((tmp_path / "references").rglob("*"))) == 9
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "references").write_text("")
    Kept(tmp_path, {}).write([bytes(16)], torch.zeros((1, 1)))
    assert "reference log-probabilities are not kept: Not a directory" in capsys.readouterr().err


def test_each_row_is_scored_on_one_rank_and_kept_once(
    tiny_hf: Callable[..., Path], rows: dict[str, Path], tmp_path: Path
) -> None:
    """Three epochs, in which the rows change ranks: 9 names all the same."""
    align(tiny_hf("llama"), rows, tmp_path / "out", engine="fsdp", nproc=2, global_batch=4, steps=7)
    heads = [json.loads(path.read_bytes().split(b"\n")[0]) for path in kept_in(tmp_path / "cache of out")]
    assert sorted((head["count"], head["width"]) for head in heads) == [(4, 2), (9, 2)]


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp", "nproc": 2, "global_batch": 6},
    "zero": {"engine": "deepspeed", "nproc": 2, "zero": 3, "global_batch": 6},
    "tp": {"engine": "megatron", "tp": 2, "global_batch": 6},
}


@pytest.fixture(scope="module")
def other(tiny_hf: Callable[..., Path]) -> Path:
    """Another family with the same tokenizer."""
    return tiny_hf("qwen2")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_of_its_own_on_engines_of_ranks(
    tiny_hf: Callable[..., Path],
    other: Path,
    rows: dict[str, Path],
    tmp_path: Path,
    mst: Callable[..., subprocess.CompletedProcess[str]],
    name: str,
) -> None:
    """Scored, then gone, in one start of the ranks; of the megatron engine in its own layout."""
    model, reference = tiny_hf("llama"), other
    if name == "tp":
        reference = tmp_path / "reference"
        mst("mst-convert", "--model", other, "--to", "megatron", "--out", reference)
    for method in ("dpo", "kto"):
        wanted = align(model, rows, tmp_path / f"plain {method}", method, reference=str(other), global_batch=6)
        found = align(model, rows, tmp_path / method, method, reference=str(reference), **LAYOUTS[name])
        for key in ("first_loss", "loss", "grad_norm", "eval/loss", "rewards/chosen"):
            assert found[key] == pytest.approx(wanted[key], abs=1e-5), (method, key)
        itself = {"dpo": 0.693147, "kto": 0.5}[method]
        assert abs(found["first_loss"] - itself) > 1e-3


def test_the_reference_is_a_parent(
    tiny_hf: Callable[..., Path], other: Path, rows: dict[str, Path], tmp_path: Path
) -> None:
    model, out = tiny_hf("llama"), tmp_path / "out"
    align(model, rows, out, reference=str(other), lora_rank=2, lora_targets=("q_proj",))
    made = manifest.read(out)
    assert [parent.role for parent in made.parents] == ["base", "data", "reference"]
    known = manifest.identify(other)
    parent = made.parent("reference")
    assert parent is not None
    assert (parent.id, parent.weights) == (known.id, known.digests.weights)
    assert known.id in lineage.ancestors(out)
    assert checkpoint.verify(out) == []
    assert made.made_by is not None
    assert "reference" not in made.made_by.settings  # a path is no setting


def test_a_run_that_goes_on_needs_no_scoring(
    tiny_hf: Callable[..., Path],
    other: Path,
    rows: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And not another reference."""
    model, out, cache = tiny_hf("llama"), tmp_path / "out", tmp_path / "cache"
    settings: dict[str, Any] = {"keep_state": True, "schedule": "constant", "global_batch": 9, "micro_batch": 3}
    align(model, rows, tmp_path / "whole", "dpo", cache, **settings, steps=3, reference=str(other))
    align(model, rows, out, "dpo", cache, **settings, steps=2, reference=str(other))
    capsys.readouterr()
    align(model, rows, out, "dpo", cache, **settings, steps=3, reference=str(other), resume=True)
    said = capsys.readouterr().err
    assert "goes on after step 2 of 3" in said
    assert "reference: 9 of 9 are in" in said
    assert same(tmp_path / "whole", out)
    for reference, now in ((tiny_hf("mistral"), "blake3:"), (None, "null")):
        with pytest.raises(MstError, match=f"reference 2 was blake3:[0-9a-f]*…, is {now}"):
            align(
                model, rows, out, "dpo", cache, **settings, steps=4, resume=True,
                reference=reference and str(reference),
            )  # fmt: skip


@pytest.mark.parametrize("method", ["simpo", "orpo", "cpo"])
def test_methods_without_a_reference_refuse_one(rows: dict[str, Path], method: str) -> None:
    with pytest.raises(ValueError, match=f"--reference means nothing to --method {method}"):
        AlignSpec(model="m", data=(rows["dpo"],), out=Path("o"), method=method, reference="r")


def test_references_that_cannot_be_used(
    tiny_hf: Callable[..., Path],
    rows: dict[str, Path],
    tmp_path: Path,
    mst: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """All of it in the plan."""
    model = tiny_hf("llama")

    def planned(reference: Path, **more: Any) -> None:
        plan(AlignSpec(model=str(model), data=(rows["dpo"],), out=tmp_path / "out", reference=str(reference), **more))

    short = tiny_hf("llama", max_position_embeddings=64)
    with pytest.raises(InputError, match="has 64 positions, fewer than the 256 of a row"):
        planned(short)
    planned(short, seq_length=64)
    swapped = shutil.copytree(model, tmp_path / "swapped")
    content = json.loads((model / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    where = f"of 2 numbers that differ, {min(vocab['a'], vocab['b'])} is 'b' and 'a' there"
    with pytest.raises(InputError, match=where) as error:
        planned(swapped)
    assert error.value.where == str(swapped)
    (swapped / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"cannot be compared .* has no tokenizer.json"):
        planned(swapped)
    (swapped / "tokenizer.json").write_text(json.dumps(json.loads((model / "tokenizer.json").read_text()), indent=1))
    planned(swapped)
    mst("mst-convert", "--model", model, "--to", "megatron", "--out", tmp_path / "megatron")
    with pytest.raises(InputError, match="which the plain engine does not eat"):
        planned(tmp_path / "megatron")
    planned(tmp_path / "megatron", engine="megatron")
    with pytest.raises(ValueError, match="no probability for new tokens"):
        planned(model, add_tokens=("<x>",))
