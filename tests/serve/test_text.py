"""Pieces of text: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_serve.output import Piece, Row, TokenScore
from mst_serve.prompts import Prompts
from mst_serve.sampling import choose, generators, top
from mst_serve.text import Detokenizer, StopStrings


@pytest.fixture(scope="session")
def prompts(tiny_hf: Callable[..., Path]) -> Prompts:
    return Prompts.load(tiny_hf("llama"))


WORDS = ["héllo wörld", "日本語テキスト", "🙂👩‍👩‍👧 x", "a\u0301e\u0301", "fi ﬀ \x00 tab\t", "�real replacement�"]


@pytest.mark.parametrize("text", WORDS)
def test_characters_never_split(prompts: Prompts, text: str) -> None:
    ids, _ = prompts.text(text)
    reader = Detokenizer(prompts.decode)
    pieces = [reader.add(token) for token in ids]
    whole = "".join(pieces) + reader.flush()
    assert whole == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)
        assert sum(map(bool, pieces)) == len([piece for piece in pieces if piece])
    assert b"".join(map(prompts.raw, ids)).decode() == text


@settings(max_examples=200, deadline=None, database=None)
@given(ids=st.lists(st.integers(0, 310), max_size=30))
def test_any_ids_decode_to_the_same_text(prompts: Prompts, ids: list[int]) -> None:
    reader = Detokenizer(prompts.decode)
    assert "".join([*map(reader.add, ids), reader.flush()]) == prompts.decode(ids)


def test_sentencepiece_spaces_and_bytes(tmp_path: Path) -> None:
    """A decoder that drops the first space and falls back to bytes, as llama-2's."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁fox", "x", "▁"]
    core = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(tmp_path)
    prompts = Prompts.load(tmp_path)
    ids = [258, 259, *(2 + byte for byte in "日".encode()), 260, 259]
    reader = Detokenizer(prompts.decode)
    assert "".join([*map(reader.add, ids), reader.flush()]) == prompts.decode(ids) == "the fox日x fox"
    assert b"".join(map(prompts.raw, ids)).decode() == " the fox日x fox"
    assert prompts.end_ids() == {1}
    assert not prompts.has_template


@settings(max_examples=300, deadline=None, database=None)
@given(
    pieces=st.lists(st.text("ab.", max_size=3), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(pieces: list[str], stops: list[str]) -> None:
    """Equal to the plain definition: cut the whole text at the first stop string that completes."""
    buffer, seen, stopped = StopStrings(stops), "", False
    fed = ""
    for piece in pieces:
        fed += piece
        leaves, stopped = buffer.add(piece)
        seen += leaves
        if stopped:
            break
    if not stopped:
        seen += buffer.flush()
    begins = [fed.find(stop) for stop in stops if stop in fed]
    assert stopped == bool(begins)
    assert seen == (fed[: min(begins)] if begins else fed)


def test_row_holds_tokens_with_their_text() -> None:
    """Tokens leave with the text they begin; those cut away by a stop string do not leave."""
    letters = "abcdefgh"
    sent: list[Piece] = []
    row = Row(0, lambda ids: "".join(letters[i] for i in ids), ["cde", "h"], 20, frozenset({9}), sent.append)
    for token in range(4):
        assert not row.add(TokenScore(token))
    assert ["".join(piece.text for piece in sent), [t.id for piece in sent for t in piece.tokens]] == ["ab", [0, 1]]
    assert row.add(TokenScore(4))
    assert sent[-1].finish == "stop"
    assert "".join(piece.text for piece in sent) == "ab"
    assert [t.id for piece in sent for t in piece.tokens] == [0, 1]
    assert sum(piece.generated for piece in sent) == 5
    sent.clear()
    row = Row(0, lambda ids: "".join(letters[i] for i in ids), ["cde"], 20, frozenset({9}), sent.append)
    assert [row.add(TokenScore(token)) for token in (2, 3, 9)] == [False, False, True]
    assert [(piece.text, [t.id for t in piece.tokens], piece.finish) for piece in sent] == [("cd", [2, 3], "stop")]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    draws = [(at + 0.5) / 4000 for at in range(4000)]
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.5, 0.8), (1.0, 0.3)):
        rows = logits.expand(4000, -1)
        chosen = torch.tensor(choose(rows, [temperature] * 4000, [top_p] * 4000, draws))
        probs = torch.softmax(logits[0].double() / temperature, -1)
        kept = torch.tensor([float(probs[:at].sum()) < top_p for at in range(5)])
        expected = probs * kept / (probs * kept).sum()
        assert torch.bincount(chosen, minlength=5) / 4000 == pytest.approx(expected, abs=2e-3)
    mixed: Any = choose(logits.expand(3, -1), [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.9999, 0.9999, 0.9999])
    assert mixed == [0, 3, 0]
    assert top(logits[0], 2) == [(0, 2.0), (1, 1.0)]


def test_generators_are_derived() -> None:
    first = [one.random() for one in generators(7, 0, 3)]
    assert len(set(first)) == 3
    assert [one.random() for one in generators(7, 0, 3)] == first
    assert [one.random() for one in generators(7, 1, 3)] != first
    assert generators(None, 0, 1)[0].random() != generators(None, 0, 1)[0].random()
