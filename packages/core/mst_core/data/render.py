"""Conversations as tokens, and which of them are learnt.

A conversation is rendered once with the tokenizer's own chat template and tokenised once; each assistant's turn is
found in the text by its characters and mapped to tokens by their offsets. The turn is what the template adds to the
generation prompt, so a header that the model never has to write is not learnt, and the end-of-turn token is.

Where a template rewrites earlier turns (Qwen3 drops earlier thinking), the text of the whole conversation does not
begin with the text of its beginning. Then each assistant's turn becomes a sample of its own, rendered as it would be
generated.

The tokens before a turn are always those of its generation prompt: where tokenising prompt and answer in one go would
join their border into one token (an answer that begins with white space), the text is tokenised in two pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mst_core import tensors
from mst_core.data.shapes import SAME, Conversation, Message, Pair
from mst_core.errors import InputError, RowError

Truncate = Literal["error", "right", "prompt-left"]
TODAY = datetime(2024, 7, 26)
"""The date that templates which print one (Llama 3.2) get: rows must render the same tomorrow. Llama 3.1's default."""
_DATE_CODES = "YymdBbAaHIMSpj"
TEMPLATE_HINT = "put the template of the model's family into chat_template.jinja beside tokenizer.json"


@dataclass(frozen=True)
class Sample:
    """Tokens, and a mask of the same length: 1 where the token is learnt."""

    tokens: list[int]
    mask: list[int]
    truncated: bool = False
    parts: tuple[int, ...] = ()
    """Of a packed row (pack.py): the lengths of the samples in it, which sum to its own."""
    desirable: bool | None = None
    """Of an answer that was judged on its own: good or bad."""
    margin: float | None = None
    """Of a chosen answer: by how much it is better than the rejected one, where the row says so."""

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


def tokenizer_dir(model_dir: Path) -> Path:
    """Where a model's tokenizer is: the directory itself, or ``hf/`` of a Megatron directory."""
    return model_dir / "hf" if (model_dir / "hf").is_dir() else model_dir


def has_template(model_dir: Path) -> bool:
    """Whether a chat template lies in one of the places where transformers looks. For plans."""
    directory = tokenizer_dir(model_dir)
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and bool(tensors.read_json(path).get("chat_template"))


def load_tokenizer(model_dir: Path, *, template: bool = True) -> Any:
    """The fast tokenizer of a Hugging Face directory, or of a Megatron directory's ``hf/``.

    Raises InputError if it cannot be loaded, is not a fast one (offsets are needed), or has no chat template
    (unless ``template`` is False).
    """
    from transformers import AutoTokenizer

    directory = tokenizer_dir(model_dir)
    if (directory / "tokenizer.json").is_file():
        tensors.read_json(directory / "tokenizer.json")  # a broken one is a bare Exception in the library
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"its tokenizer does not load: {reason}", where=directory) from error
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} gives no offsets; a tokenizer.json is needed", where=directory)
    if template and not tokenizer.chat_template:
        raise InputError("its tokenizer has no chat template", where=directory, hint=TEMPLATE_HINT)
    return tokenizer


class Renderer:
    """Renders with one tokenizer. ``seq_length`` is the longest sample; a longer one is refused, or cut if asked."""

    def __init__(self, tokenizer: Any, seq_length: int, truncate: Truncate = "error") -> None:
        if not tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template", hint=TEMPLATE_HINT)
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.truncate: Truncate = truncate

    def prompt(self, messages: Sequence[Message], where: str = "prompt") -> list[int]:
        """The tokens a model continues when it answers ``messages``."""
        return self._encode(self._render(messages, where, prompt=True))[0]

    def samples(self, conversation: Conversation, where: str) -> list[Sample]:
        """One sample with every assistant's turn learnt, or one for each turn where the template rewrites history.

        Raises RowError for a row that cannot be rendered, is too long or has nothing to learn; InputError for a
        template that no row can be learnt with.
        """
        messages = conversation.messages
        tools = list(conversation.tools)
        self._check_text(messages, tools, where)
        learnt = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and index >= conversation.learn_from and index not in conversation.silent
        ]
        if not learnt:
            raise RowError("has loss: false on every answer, so there is nothing to learn", where=where)
        turns = [self._turn(messages[: index + 1], tools, where) for index in learnt]
        whole = turns[-1].text
        self._check_tools(messages[: learnt[-1] + 1], tools, whole, where)
        if all(whole.startswith(turn.text[: turn.end]) for turn in turns):
            return [self._sample(whole, turns, where)]
        return [self._sample(turn.text, [turn], where) for turn in turns]

    def answer(self, prompt: Sequence[Message], answer: Sequence[Message], where: str) -> Sample:
        """One sample in which only the last turn, the answer to ``prompt``, is learnt."""
        (sample,) = self.samples(Conversation([*prompt, *answer], learn_from=len(prompt)), where)
        return sample

    def pair(self, pair: Pair, where: str) -> tuple[Sample, Sample]:
        """(chosen, rejected), each with only its answer learnt, after the same prompt."""
        chosen, rejected = (self.answer(pair.prompt, answer, where) for answer in (pair.chosen, pair.rejected))
        if self.truncate == "prompt-left":
            longest = max(len(chosen.tokens), len(rejected.tokens))
            chosen, rejected = (self._cut_prompt(sample, longest, where) for sample in (chosen, rejected))
        if chosen.tokens == rejected.tokens:
            cut = f" in their first {self.seq_length} tokens" if chosen.truncated else ""
            raise RowError(f"{SAME}{cut}", where=where)
        return replace(chosen, margin=pair.margin), rejected

    def judged(self, conversation: Conversation, desirable: bool, where: str) -> Sample:
        """The last answer of a conversation, which was judged, as the only turn that is learnt."""
        *prompt, answer = conversation.messages
        sample = self.answer(prompt, [answer], where)
        if self.truncate == "prompt-left":
            sample = self._cut_prompt(sample, len(sample.tokens), where)
        return replace(sample, desirable=desirable)

    def _cut_prompt(self, sample: Sample, longest: int, where: str) -> Sample:
        """Without as many of the prompt's first tokens (BOS stays) as the longest row has beyond ``seq_length``."""
        excess = longest - self.seq_length
        if excess <= 0:
            return sample
        stays = int(sample.tokens[0] == self.tokenizer.bos_token_id)
        prompt = sample.mask.index(1)
        if stays + excess >= prompt:
            what = (
                f"has an answer of {longest - prompt} tokens, which leaves no prompt in --seq-length {self.seq_length}"
            )
            raise RowError(what, where=where, hint="a larger --seq-length, or --bad-rows skip")
        tokens, mask = (held[:stays] + held[stays + excess :] for held in (sample.tokens, sample.mask))
        return Sample(tokens, mask, truncated=True)

    def fit(self, tokens: list[int], mask: list[int], where: str) -> Sample:
        """A sample within ``seq_length``. Raises RowError if it is too long, or nothing to learn is left.

        Prompts are cut where both answers of a pair are known: here such a sample stays whole."""
        truncated = len(tokens) > self.seq_length and self.truncate != "prompt-left"
        if truncated and self.truncate == "error":
            raise RowError(
                f"has {len(tokens)} tokens, --seq-length is {self.seq_length}",
                where=where,
                hint="a larger --seq-length, --truncate right, or --bad-rows skip",
            )
        if truncated:
            tokens, mask = tokens[: self.seq_length], mask[: self.seq_length]
        if not any(mask[1:]):
            what = f"nothing left to learn in its first {self.seq_length} tokens" if truncated else "nothing to learn"
            raise RowError(f"has {what}", where=where)
        return Sample(tokens, mask, truncated)

    def _render(self, messages: Sequence[Message], where: str, *, prompt: bool, tools: Any = ()) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                chat_template=self._template,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RowError(f"the chat template refuses it: {error}", where=where) from None
        return str(text)

    @cached_property
    def _template(self) -> str:
        """The chat template, with the clock stopped: a macro stands before the function that templates call."""
        template = str(self.tokenizer.get_chat_template())
        if "strftime_now" not in template:
            return template
        filters = "".join(f"|replace('%{code}','{TODAY.strftime('%' + code)}')" for code in _DATE_CODES)
        return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"

    def _turn(self, messages: Sequence[Message], tools: list[Any], where: str) -> _Turn:
        before = self._render(messages[:-1], where, prompt=True, tools=tools)
        text = self._render(messages, where, prompt=False, tools=tools)
        if not text.startswith(before):
            raise RowError(
                "the chat template does not render the answer after its own generation prompt, "
                "so what the model would have to write cannot be told",
                where=where,
            )
        # White space after the end-of-turn token ("\n" in ChatML) belongs to the next turn.
        return _Turn(text, len(before), len(text.rstrip()))

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(tokens, their offsets). Templates write the BOS token themselves, so none is added."""
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(made["input_ids"]), list(made["offset_mapping"])

    def _tokenise(self, text: str, turns: Sequence[_Turn], where: str) -> tuple[list[int], list[tuple[int, int]]]:
        tokens, offsets = self._encode(text)
        cuts = []
        for turn in turns:
            before = sum(1 for _, end in offsets if end <= turn.start)
            if tokens[:before] != self._encode(text[: turn.start])[0]:
                cuts.append(turn.start)
        if not cuts:
            return tokens, offsets
        whole, tokens, offsets, begin = tokens, [], [], 0
        for cut in (*cuts, len(text)):
            part, places = self._encode(text[begin:cut])
            tokens += part
            offsets += [(start + begin, end + begin) for start, end in places]
            begin = cut
        if self._decode(tokens) != self._decode(whole):
            raise RowError("a token stands across the border of prompt and answer", where=where)
        return tokens, offsets

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _sample(self, text: str, turns: Sequence[_Turn], where: str) -> Sample:
        tokens, offsets = self._tokenise(text, turns, where)
        mask = [0] * len(tokens)
        for turn in turns:
            learnt = [i for i, (start, _) in enumerate(offsets) if turn.start <= start < turn.end]
            if not learnt:
                raise RowError("its answer has no tokens", where=where)
            if not self._ends_a_turn(tokens[learnt[-1]]):
                raise InputError(
                    "the chat template ends the assistant's turn without a special token, so a model trained with it "
                    "would never stop",
                    where=where,
                    hint="let the template write eos_token after the assistant's content",
                )
            for index in learnt:
                mask[index] = 1
        return self.fit(tokens, mask, where)

    def _ends_a_turn(self, token: int) -> bool:
        return token in self._special.values()

    @cached_property
    def _special(self) -> dict[str, int]:
        """Special tokens by their text, the end-of-sequence token among them."""
        added = self.tokenizer.added_tokens_decoder
        found = {token.content: number for number, token in added.items() if token.special}
        return {**found, str(self.tokenizer.eos_token): self.tokenizer.eos_token_id}

    @cached_property
    def _structure(self) -> list[str]:
        """Special tokens that the template writes around messages, and BOS and EOS."""
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self._render(probe, "a probe of the chat template", prompt=False)
        always = {self.tokenizer.bos_token, self.tokenizer.eos_token}
        return [token for token in self._special if token in always or token in text]

    def _check_tools(self, messages: Sequence[Message], tools: list[Any], text: str, where: str) -> None:
        """Templates that know no tools leave them out in silence: a model would learn to call what it never saw."""
        if tools and text == self._render(messages, where, prompt=False):
            raise RowError("has tools, which the chat template does not write", where=where)
        for index, message in enumerate(messages):
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            told = [message["content"].strip()] if message["role"] == "tool" else []
            if any(part not in text for part in names + told):
                what = "calls a tool" if names else "is a tool's answer"
                raise RowError(f"message {index + 1} {what}, which the chat template does not write", where=where)

    def _check_text(self, messages: Sequence[Message], tools: list[Any], where: str) -> None:
        """Text that spells a structural token would be read as one: a turn that ends in the middle, or a forged one."""
        texts = [m["content"] + json.dumps(m.get("tool_calls", ""), ensure_ascii=False) for m in messages]
        texts.append(json.dumps(tools, ensure_ascii=False))
        for index, text in enumerate(texts):
            for token in self._structure:
                if token in text:
                    place = f"message {index + 1} spells" if index < len(messages) else "tools spell"
                    what = f"{place} the special token {token}, which would end or begin a turn there"
                    raise RowError(what, where=where)
