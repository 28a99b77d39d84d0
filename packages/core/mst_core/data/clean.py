"""Cleaning of documents by a template of rules: what each removes is counted and kept.

Texts are repaired first (ftfy), then filtered in the order of Rules, then compared with those that were kept: by a hash
of their words, and by MinHash over n-grams of words (datasketch). Of duplicates the first stays. The filters are those
of Gopher (Rae et al. 2021, arXiv 2112.11446, table A1); a word is a run of letters and digits, or one character of a
script without spaces (Chinese, Japanese, Thai).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mst_core.data.documents import text_of
from mst_core.data.records import Row
from mst_core.errors import MissingPackage, SettingsError

TEMPLATES = Path(__file__).parent / "templates"
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]|[^\W_]+(?:['’][^\W_]+)*")
_INSTALL = "pip install 'mst-tools-core[data]'"
Share = float


class Near(BaseModel):
    """Near duplicates: texts whose sets of n-grams have at least this Jaccard similarity, as MinHash estimates it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    similarity: float = Field(0.8, gt=0, le=1)
    ngram: int = Field(5, ge=1)
    permutations: int = Field(128, ge=16)


class Rules(BaseModel):
    """A template. A rule that is not given does not apply; shares are of 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unicode: bool = False
    """Repair of mojibake, of control characters and of composed letters (ftfy, NFC). Changes texts, removes none."""
    characters: tuple[int, int] | None = None
    """Least and most characters."""
    words: tuple[int, int] | None = None
    mean_word_length: tuple[float, float] | None = None
    symbols_per_word: Share | None = None
    """# and ellipses to words, at most."""
    bullet_lines: Share | None = None
    ellipsis_lines: Share | None = None
    """Lines that begin with a bullet, or end with an ellipsis, at most."""
    repeated_lines: Share | None = None
    repeated_line_characters: Share | None = None
    repeated_paragraphs: Share | None = None
    repeated_paragraph_characters: Share | None = None
    """Lines (paragraphs) that stood before in the text, and their characters, at most."""
    top_ngram: dict[int, Share] = {}
    """Characters within the most frequent n-gram, by n, at most."""
    repeated_ngrams: dict[int, Share] = {}
    """Characters within n-grams that stand twice or more, by n, at most."""
    exact_duplicates: bool = False
    near_duplicates: Near | None = None


def template(name: str) -> Rules:
    """The rules of a template that comes with mst (``web``), or of a YAML file. Raises SettingsError."""
    known = sorted(path.stem for path in TEMPLATES.glob("*.yaml"))
    path = TEMPLATES / f"{name}.yaml" if name in known else Path(name)
    try:
        return Rules.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        what = f"--clean: {name} is no template ({', '.join(known)}) and no file: {error.strerror}"
        raise SettingsError(what) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--clean: {name} is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].lower()}" for problem in error.errors()]
        hint = f"rules are {', '.join(Rules.model_fields)}"
        raise SettingsError("\n".join([f"--clean: {name}:", *faults]), hint=hint) from None


class Cleaner:
    """Applies rules to rows one after another. ``removed`` is called with each row that goes."""

    def __init__(self, rules: Rules, removed: Callable[[dict[str, Any]], None]) -> None:
        self.rules = rules
        self.counts: Counter[str] = Counter()
        """Rows by the rule that removed them; ``unicode``: rows that were repaired."""
        self._removed = removed
        self._exact: dict[bytes, str] = {}
        self._repair = _ftfy() if rules.unicode else None
        self._near = _NearDuplicates(rules.near_duplicates) if rules.near_duplicates else None

    def clean(self, row: Row) -> Row | None:
        """The row, repaired; None if it goes. Raises RowError for a row without a text."""
        text = text_of(row)
        if self._repair is not None and (repaired := self._repair(text)) != text:
            self.counts["unicode"] += 1
            text = repaired
        words = [word.lower() for word in _WORD.findall(text)]
        fault = filtered(text, words, self.rules) or self._duplicate(row, words)
        if fault is None:
            return replace(row, data={**row.data, "text": text})
        rule, why = fault
        self.counts[rule] += 1
        self._removed({"file": row.file, "line": row.line, "rule": rule, "reason": why, "row": row.data})
        return None

    def _duplicate(self, row: Row, words: list[str]) -> tuple[str, str] | None:
        if self.rules.exact_duplicates:
            same = self._exact.setdefault(blake3(" ".join(words).encode()).digest(16), row.where)
            if same != row.where:
                return "exact_duplicates", f"the same words as {same}"
        if self._near is not None and (found := self._near.add(row.where, words)):
            return "near_duplicates", f"{found[1]:.2f} like {found[0]}"
        return None


def filtered(text: str, words: list[str], rules: Rules) -> tuple[str, str] | None:
    """The first filter that a text does not pass, and why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    letters = sum(map(len, words))
    measured: list[tuple[str, Any, float]] = [
        ("characters", rules.characters, len(text)),
        ("words", rules.words, len(words)),
        ("mean_word_length", rules.mean_word_length, letters / max(1, len(words))),
        ("symbols_per_word", rules.symbols_per_word, len(re.findall(r"#|…|\.\.\.", text)) / max(1, len(words))),
        ("bullet_lines", rules.bullet_lines, _share(line[0] in "•‣▪*-" for line in lines)),
        ("ellipsis_lines", rules.ellipsis_lines, _share(line.endswith(("…", "...")) for line in lines)),
        ("repeated_lines", rules.repeated_lines, _repeated(lines)[0]),
        ("repeated_line_characters", rules.repeated_line_characters, _repeated(lines)[1]),
        ("repeated_paragraphs", rules.repeated_paragraphs, _repeated(paragraphs)[0]),
        ("repeated_paragraph_characters", rules.repeated_paragraph_characters, _repeated(paragraphs)[1]),
    ]
    for rule, limit, value in measured:
        least, most = limit if isinstance(limit, tuple) else (float("-inf"), limit)
        if limit is not None and not least <= value <= most:
            return rule, f"{value:.4g} is {'below' if value < least else 'above'} {least if value < least else most:g}"
    for rule, limits, measure in (
        ("top_ngram", rules.top_ngram, _top_ngram),
        ("repeated_ngrams", rules.repeated_ngrams, _repeated_ngrams),
    ):
        for size, most in sorted(limits.items()):
            if (value := measure(words, size) / max(1, letters)) > most:
                return rule, f"{value:.4g} of the text in {size}-grams is above {most:g}"
    return None


def _share(found: Iterable[bool]) -> float:
    values = list(found)
    return sum(values) / len(values) if values else 0.0


def _repeated(parts: list[str]) -> tuple[float, float]:
    """Of lines or paragraphs that stood before: their share, and the share of their characters."""
    again = [part for part, count in Counter(parts).items() for _ in range(count - 1)]
    return len(again) / max(1, len(parts)), sum(map(len, again)) / max(1, sum(map(len, parts)))


def _ngrams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(size)), strict=False))


def _top_ngram(words: list[str], size: int) -> int:
    """Characters within the most frequent n-gram, if it stands twice or more."""
    counts = Counter(_ngrams(words, size))
    return max((sum(map(len, gram)) * count for gram, count in counts.items() if count > 1), default=0)


def _repeated_ngrams(words: list[str], size: int) -> int:
    """Characters of the words that are within an n-gram which stands twice or more, each counted once."""
    grams = _ngrams(words, size)
    counts = Counter(grams)
    covered = {place for start, gram in enumerate(grams) if counts[gram] > 1 for place in range(start, start + size)}
    return sum(len(words[place]) for place in covered)


class _NearDuplicates:
    def __init__(self, rule: Near) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise MissingPackage("near duplicates need datasketch", hint=_INSTALL) from error
        self.rule = rule
        self._hash = MinHash
        self._index = MinHashLSH(threshold=rule.similarity, num_perm=rule.permutations)
        self._kept: dict[str, Any] = {}

    def add(self, where: str, words: list[str]) -> tuple[str, float] | None:
        """The most similar text kept before and its similarity; None if there is none, and this one is kept."""
        grams = _ngrams(words, self.rule.ngram) or [tuple(words)]
        hashed = self._hash(num_perm=self.rule.permutations, seed=1)
        hashed.update_batch([" ".join(gram).encode() for gram in set(grams)])
        found = [(other, float(hashed.jaccard(self._kept[other]))) for other in self._index.query(hashed)]
        best = max(found, key=lambda item: item[1], default=None)
        if best is not None and best[1] >= self.rule.similarity:
            return best
        self._index.insert(where, hashed)
        self._kept[where] = hashed
        return None


def _ftfy() -> Callable[[str], str]:
    try:
        from ftfy import TextFixerConfig, fix_text
    except ImportError as error:
        raise MissingPackage("the repair of Unicode needs ftfy", hint=_INSTALL) from error
    # Not damage: typographic quotes, the full-width punctuation of Chinese, ligatures.
    config = TextFixerConfig(uncurl_quotes=False, fix_character_width=False, fix_latin_ligatures=False)
    return lambda text: str(fix_text(text, config))
