"""Cleaning: each rule removes what it names and keeps the rest; what goes is counted and kept with its reason."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mst_core.data import clean
from mst_core.data.clean import Cleaner, Near, Rules
from mst_core.data.records import Row
from mst_core.errors import MissingPackage, RowError, SettingsError
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work

VOCABULARY = [
    f"{a}{b}" for a in ("fox", "dog", "box", "jug", "wiz", "zeb") for b in ("es", "ing", "ard", "ra", "ly", "um")
]


def prose(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(f"{draw.choice(VOCABULARY)}{draw.randrange(90)}" for _ in range(words)) + "."


def apply(rules: Rules, *texts: str) -> tuple[list[str], list[dict[str, Any]], dict[str, int]]:
    removed: list[dict[str, Any]] = []
    cleaner = Cleaner(rules, removed.append)
    rows = [cleaner.clean(Row("a.jsonl", number, {"text": text})) for number, text in enumerate(texts, 1)]
    return [row.data["text"] for row in rows if row], removed, dict(cleaner.counts)


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"characters": (5, 20)}, "four words of text", "one"),
    ({"characters": (1, 5)}, "one", "four words"),
    ({"words": (3, 10)}, "one two three", "one two"),
    ({"words": (3, 10)}, "中文字", "中文"),
    ({"mean_word_length": (3, 10)}, "some usual words", "a b c d"),
    ({"mean_word_length": (3, 10)}, "some usual words", "x" * 40),
    ({"symbols_per_word": 0.5}, "one two # three", "# one # two ..."),
    ({"bullet_lines": 0.5}, "- a\nb\nc", "- a\n* b\nc"),
    ({"ellipsis_lines": 0.4}, "a...\nb\nc", "a...\nb…\nc"),
    ({"repeated_lines": 0.3}, "a\nb\nc\na", "a\na\nb\nb"),
    ({"repeated_line_characters": 0.3}, "a\na\na long other line", "a line\na line\nb"),
    ({"repeated_paragraphs": 0.3}, "a\n\nb\n\nc", "a\n\na\n\nb"),
    ({"repeated_paragraph_characters": 0.4}, "a\n\na\n\nlonger", "longer\n\nlonger\n\nb"),
    ({"top_ngram": {2: 0.5}}, "aa bb cc aa bb dd ee ff gg", "aa bb aa bb cc"),
    ({"repeated_ngrams": {3: 0.5}}, "aa bb cc dd aa bb ee ff", "aa bb cc dd aa bb cc"),
]


@pytest.mark.parametrize(("rules", "good", "bad"), CASES)
def test_a_filter_keeps_and_removes(rules: dict[str, Any], good: str, bad: str) -> None:
    kept, removed, counts = apply(Rules(**rules), good, bad)
    assert kept == [good]
    (rule,) = rules
    assert [(entry["rule"], entry["line"], entry["row"]) for entry in removed] == [(rule, 2, {"text": bad})]
    assert re.search(r"is (above|below) \d", removed[0]["reason"])
    assert counts == {rule: 1}


def test_the_share_of_characters_in_ngrams_by_hand() -> None:
    words = ["aa", "bb", "cc", "aa", "bb", "dd"]
    assert clean._top_ngram(words, 2) == 8  # "aa bb" twice, 4 letters each
    assert clean._repeated_ngrams(words, 2) == 8
    assert clean._repeated_ngrams(["a", "a", "a"], 2) == 3  # overlapping: each word once
    assert clean._top_ngram(["a", "b", "c"], 2) == 0


def test_unicode_is_repaired_and_counted() -> None:
    broken = "L'Ã©tÃ© Ã  la cafÃ©tÃ©ria"
    meant = "“quotes”, 中文，全角。ﬁ"
    kept, removed, counts = apply(Rules(unicode=True), broken, meant)
    assert kept == ["L'été à la cafétéria", meant]
    assert (removed, counts) == ([], {"unicode": 1})


def test_exact_duplicates_are_of_words() -> None:
    kept, removed, _ = apply(Rules(exact_duplicates=True), "One two.", "one  TWO", "one three")
    assert kept == ["One two.", "one three"]
    assert removed[0]["reason"] == "the same words as a.jsonl:1"


def test_near_duplicates_by_the_real_similarity() -> None:
    """Against the exact Jaccard similarity of the sets of 5-grams: far above goes, far below stays."""
    base = prose(400).split()
    texts = [" ".join(base)]
    for changed, seed in ((2, 1), (4, 2), (120, 3), (200, 4)):
        draw, words = random.Random(seed), list(base)
        for place in draw.sample(range(400), changed):
            words[place] = f"other{place}"
        texts.append(" ".join(words))
    texts.append(prose(400, seed=9))

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.lower().rstrip(".").split()
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    exact = [len(grams(text) & grams(texts[0])) / len(grams(text) | grams(texts[0])) for text in texts]
    assert exact[1] > 0.9
    assert exact[2] > 0.88
    assert max(exact[3:]) < 0.3
    kept, removed, counts = apply(Rules(near_duplicates=Near()), *texts)
    assert kept == [texts[0], *texts[3:]]
    assert counts == {"near_duplicates": 2}
    found = re.fullmatch(r"(0\.\d\d) like a\.jsonl:1", removed[0]["reason"])
    assert found is not None
    assert float(found[1]) == pytest.approx(exact[1], abs=0.08)
    assert apply(Rules(near_duplicates=Near()), "short", "short", "other")[0] == ["short", "other"]


def test_the_web_template_keeps_prose_and_removes_the_rest() -> None:
    rules = clean.template("web")
    menu = "\n".join(["Home", "About", "Contact"] * 30)
    texts = [prose(120), prose(10), menu, prose(120) + "!", prose(150, seed=2)]
    kept, removed, counts = apply(rules, *texts)
    assert kept == [texts[0], texts[4]]
    assert [entry["rule"] for entry in removed] == ["words", "repeated_lines", "exact_duplicates"]
    assert sum(counts.values()) == 3


def test_a_row_without_a_text_is_a_bad_row() -> None:
    with pytest.raises(RowError, match="empty text"):
        apply(Rules(), " ")


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("words: [2, 5]\nnear_duplicates: {ngram: 3}\n")
    assert clean.template(str(path)) == Rules(words=(2, 5), near_duplicates=Near(ngram=3))
    for content, says in (
        ("wrods: [1, 2]", "wrods: extra inputs"),
        ("words: 3", "words: "),
        ("near_duplicates: {similarity: 2}", "near_duplicates.similarity: "),
        ("{", "is not YAML"),
    ):
        path.write_text(content)
        with pytest.raises(SettingsError, match=says):
            clean.template(str(path))
    with pytest.raises(SettingsError, match=r"--clean: wbe is no template \(web\)"):
        clean.template("wbe")


@pytest.mark.parametrize(
    ("package", "rules"), [("ftfy", {"unicode": True}), ("datasketch", {"near_duplicates": Near()})]
)
def test_what_to_install(package: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage) as error:
        apply(Rules(**rules), "a")
    assert error.value.hint == "pip install 'mst-tools-core[data]'"


def test_a_cleaned_run(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """What was removed lies in the output, counts in its notes, the rules in its settings; twice the same id."""
    data = tmp_path / "rows.jsonl"
    texts = [prose(100, seed=i) for i in range(4)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[1], "too short"]))
    found = []
    for name in ("one", "two"):
        spec = TrainSpec(
            model=str(tiny_hf("llama")), data=(data,), out=tmp_path / name, stage="cpt", clean="web", steps=1,
            cache=tmp_path / "cache", precision="fp32",
        )  # fmt: skip
        found.append(work(spec, plan(spec)).data)
        removed = [json.loads(line) for line in (tmp_path / name / "removed.jsonl").read_text().splitlines()]
        assert [(entry["line"], entry["rule"]) for entry in removed] == [(5, "exact_duplicates"), (6, "words")]
    assert found[0]["id"] == found[1]["id"]
    made = json.loads((tmp_path / "one/mst.json").read_text())
    assert made["notes"]["cleaned"] == {"exact_duplicates": 1, "words": 1}
    assert made["made_by"]["settings"]["clean"]["words"] == [50, 100000]
    assert "cache" not in made["made_by"]["settings"]
    spec = spec.model_copy(update={"out": tmp_path / "three", "overwrite": True})
    data.write_text('{"text": "too short"}\n')
    with pytest.raises(Exception, match="--clean removed every row"):
        work(spec, plan(spec))
    with pytest.raises(SettingsError, match="--clean is for documents"):
        TrainSpec.parse(["--model", "m", "--data", "d", "--out", "o", "--clean", "web"])
