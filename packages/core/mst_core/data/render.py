"""Conversations as tokens, and which of them are learnt.

A conversation is rendered once with the tokenizer's own chat template and tokenised once; each assistant's turn is
found in the text by its characters and mapped to tokens by their offsets. The turn is what the template adds to the
generation prompt, so a header that the model never has to write is not learnt, and the end-of-turn token is.

Where a template rewrites earlier turns (Qwen3 drops earlier thinking), the text of the whole conversation does not
begin with the text of its beginning. Then each assistant's turn becomes a sample of its own, rendered as it would be
generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mst_core.data.shapes import Message, Pair
from mst_core.errors import InputError, RowError

Truncate = Literal["error", "right"]


@dataclass(frozen=True)
class Sample:
    """Tokens, and a mask of the same length: 1 where the token is learnt."""

    tokens: list[int]
    mask: list[int]

    @property
    def learnt(self) -> int:
        """How many tokens are learnt."""
        return sum(self.mask)


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn: the text up to and including it, and where in it the turn starts and ends."""

    text: str
    start: int
    end: int


def load_tokenizer(model_dir: Path) -> Any:
    """The fast tokenizer of a Hugging Face directory, or of a Megatron directory's ``hf/``.

    Raises InputError if it cannot be loaded, is not a fast one (offsets are needed), or has no chat template.
    """
    from transformers import AutoTokenizer

    directory = model_dir / "hf" if (model_dir / "hf").is_dir() else model_dir
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"its tokenizer does not load: {reason}", where=directory) from error
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} gives no offsets; a tokenizer.json is needed", where=directory)
    if not tokenizer.chat_template:
        raise InputError(
            "its tokenizer has no chat template",
            where=directory,
            hint="put the template of the model's family into chat_template.jinja beside tokenizer.json",
        )
    return tokenizer


class Renderer:
    """Renders with one tokenizer. ``seq_length`` is the longest sample; a longer one is refused, or cut if asked."""

    def __init__(self, tokenizer: Any, seq_length: int, truncate: Truncate = "error") -> None:
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.truncate = truncate

    def prompt(self, messages: Sequence[Message], where: str = "prompt") -> list[int]:
        """The tokens a model continues when it answers ``messages``."""
        return list(self.tokenizer(self._render(messages, where, prompt=True), add_special_tokens=False)["input_ids"])

    def samples(self, messages: Sequence[Message], where: str) -> list[Sample]:
        """One sample with every assistant's turn learnt, or one for each turn where the template rewrites history."""
        turns = [
            self._turn(messages[: index + 1], where) for index, m in enumerate(messages) if m["role"] == "assistant"
        ]
        whole = turns[-1].text
        if all(whole.startswith(turn.text[: turn.end]) for turn in turns):
            return [self._sample(whole, turns, where)]
        return [self._sample(turn.text, [turn], where) for turn in turns]

    def answer(self, prompt: Sequence[Message], answer: Sequence[Message], where: str) -> Sample:
        """One sample in which only the last turn, the answer to ``prompt``, is learnt."""
        turn = self._turn([*prompt, *answer], where)
        return self._sample(turn.text, [turn], where)

    def pair(self, pair: Pair, where: str) -> tuple[Sample, Sample]:
        """(chosen, rejected), each with only its answer learnt."""
        chosen = self.answer(pair.prompt, pair.chosen, where)
        rejected = self.answer(pair.prompt, pair.rejected, where)
        if chosen == rejected:
            raise RowError("chosen and rejected are the same tokens", where=where)
        return chosen, rejected

    def _render(self, messages: Sequence[Message], where: str, *, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError(f"the chat template refuses it: {error}", where=where) from None
        return str(text)

    def _turn(self, messages: Sequence[Message], where: str) -> _Turn:
        before = self._render(messages[:-1], where, prompt=True)
        text = self._render(messages, where, prompt=False)
        if not text.startswith(before):
            raise RowError(
                "the chat template does not render the answer after its own generation prompt, "
                "so what the model would have to write cannot be told",
                where=where,
            )
        # White space after the end-of-turn token ("\n" in ChatML) belongs to the next turn.
        return _Turn(text, len(before), len(text.rstrip()))

    def _sample(self, text: str, turns: Sequence[_Turn], where: str) -> Sample:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        mask = [0] * len(tokens)
        for turn in turns:
            last = -1
            for index, (start, end) in enumerate(offsets):
                if start >= turn.start and end <= turn.end and end > start:
                    mask[index], last = 1, index
                elif start < turn.start < end or start < turn.end < end:
                    raise RowError("a token stands across the border of prompt and answer", where=where)
            if last < 0:
                raise RowError("its answer has no tokens", where=where)
            if not self._ends_a_turn(tokens[last]):
                raise InputError(
                    "the chat template ends the assistant's turn without a special token, so a model trained with it "
                    "would never stop",
                    where=where,
                    hint="let the template write eos_token after the assistant's content",
                )
        if len(tokens) > self.seq_length:
            if self.truncate == "error":
                raise RowError(
                    f"has {len(tokens)} tokens, --seq-length is {self.seq_length}",
                    where=where,
                    hint="a larger --seq-length, --truncate right, or --bad-rows skip",
                )
            tokens, mask = tokens[: self.seq_length], mask[: self.seq_length]
            if not any(mask):
                raise RowError(f"has nothing left to learn in its first {self.seq_length} tokens", where=where)
        if len(tokens) < 2 or not any(mask[1:]):
            raise RowError("has no token to predict from a prompt", where=where)
        return Sample(tokens, mask)

    def _ends_a_turn(self, token: int) -> bool:
        added = self.tokenizer.added_tokens_decoder.get(token)
        return token == self.tokenizer.eos_token_id or (added is not None and bool(added.special))
