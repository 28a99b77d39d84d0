"""mst-train --stage cpt: documents, every token that another precedes learnt once."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_core.data import load
from mst_core.data.documents import Documents
from mst_core.data.records import Row
from mst_core.data.render import load_tokenizer
from mst_core.data.sources import Source
from mst_core.errors import InputError, RowError
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 8, "Pack my box.", "five dozen jugs " * 20, "yes or no?"]


@pytest.fixture(scope="module")
def model(tiny_hf: Callable[..., Path]) -> Path:
    """A base model: it has no chat template."""
    return tiny_hf("llama", num_hidden_layers=2, template=None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for index, text in enumerate(TEXTS[:2]):
        (folder / f"{index}.txt").write_text(text)
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS[2:]))
    return folder


def train(model: Path, data: Any, out: Path, **settings: Any) -> dict[str, Any]:
    fields = {"global_batch": 4, "lr": 3e-3, "precision": "fp32", "stage": "cpt", **settings}
    spec = TrainSpec(model=str(model), data=(data,), out=out, **fields)
    return work(spec, plan(spec)).data


def documents(model: Path, length: int) -> Documents:
    return Documents(load_tokenizer(model, template=False), length)


@pytest.mark.parametrize("length", [2, 16, 64, 1000])
def test_every_token_but_the_first_is_learnt_once_however_long_the_pieces(model: Path, length: int) -> None:
    maker = documents(model, length)
    for text in TEXTS:
        whole = [*maker.tokenizer(text)["input_ids"], maker.tokenizer.eos_token_id]
        pieces = maker.samples(Row("a.jsonl", 1, {"text": text}))
        learnt = [t for piece in pieces for t, m in zip(piece.tokens, piece.mask, strict=True) if m]
        assert learnt == whole[1:]
        assert max(len(piece.tokens) for piece in pieces) <= length
        for before, after in pairwise(pieces):
            assert after.tokens[0] == before.tokens[-1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"text": " \n"}, "has an empty text"),
        ({"text": 3}, "text is a number"),
        ({"txet": "a"}, "has none of the fields"),
        ({"text": "a", "messages": []}, "unknown 'messages'"),
        ({"messages": []}, "is a conversation, not a text"),
        ({"text": "a<|im_end|>b"}, "spells the special token <|im_end|>"),
    ],
)
def test_rows_that_are_no_documents(model: Path, data: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as error:
        documents(model, 16).samples(Row("a.jsonl", 3, data))
    assert reason in str(error.value)
    assert error.value.where == "a.jsonl:3"


def test_a_tokenizer_must_end_a_document(model: Path) -> None:
    tokenizer = load_tokenizer(model, template=False)
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no EOS token"):
        Documents(tokenizer, 16)


def test_a_run_learns_documents(model: Path, data: Path, tmp_path: Path) -> None:
    """The first loss is the mean over all learnt tokens by transformers' own loss."""
    from transformers import AutoModelForCausalLM

    done = train(model, data, tmp_path / "out", seq_length=64, global_batch=64, steps=6, warmup=0)
    samples = load.cpt([Source("", tuple(sorted(data.iterdir())))], documents(model, 64)).samples
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = count = 0.0
    for sample in samples:
        tokens_BT = torch.tensor([sample.tokens])
        with torch.no_grad():
            mean = reference(tokens_BT, labels=tokens_BT).loss
        total += float(mean) * (len(sample.tokens) - 1)
        count += len(sample.tokens) - 1
    assert done["first_loss"] == pytest.approx(total / count, abs=1e-5)
    assert done["loss"] < 0.8 * done["first_loss"]
    assert done["rows"] == len(samples)


def test_sft_says_what_a_text_is_for(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    with pytest.raises(RowError, match="not a conversation; --stage cpt learns texts"):
        train(tiny_hf("llama"), data, tmp_path / "out", stage="sft")


def test_num_samples_and_shares_from_the_command(
    mst: Callable[..., Any], model: Path, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.csv"
    other.write_text("text\n" + "dog\n" * 3)
    words = ("mst-train", "--model", model, "--stage", "cpt", "--data", f"{data}#2:0.25", "--data", f"{other}:0.75",
             "--num-samples", 8, "--global-batch", 4, "--precision", "fp32", "--json")  # fmt: skip
    planned = json.loads(mst(*words, "--out", tmp_path / "out", "--dry-run").stdout)
    assert (planned["lines"], planned["steps"].split()[0]) == (8, "2")
    done = json.loads(mst(*words, "--out", tmp_path / "out").stdout)
    assert done["steps"] == 2
    settings = json.loads((tmp_path / "out/mst.json").read_text())["made_by"]["settings"]
    assert settings["data"] == [{"first": 2, "share": 0.25}, {"first": None, "share": 0.75}]
    assert settings["num_samples"] == 8
