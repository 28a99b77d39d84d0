"""What a client gets, through the openai client, against transformers' own generate and forward."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from .conftest import Running

PROMPTS = [
    "The quick",
    "Pack my box with five dozen liquor jugs; how vexingly",
    "x",
    "Is this headline satire or news?",
]
CHAT: list[Any] = [{"role": "system", "content": "Satire?"}, {"role": "user", "content": "Area man wins prize"}]


def generate(reference: Any, ids: list[int], tokens: int) -> list[int]:
    """transformers' greedy answer."""
    model, _ = reference
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def text_of(reference: Any, ids: list[int]) -> str:
    decoded: str = reference[1].decode([i for i in ids if i != 2], skip_special_tokens=True)
    return decoded


def test_models(server: Running) -> None:
    [card] = server.client.models.list().data
    assert card.id == server.model == server.client.models.retrieve(server.model).id
    assert server.health()["status"] == "ok"


def test_greedy_chat_is_transformers_generate(server: Running, reference: Any) -> None:
    ids = reference[1].apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = generate(reference, ids, 40)
    got = server.client.chat.completions.create(model=server.model, messages=CHAT, temperature=0, max_tokens=40)
    assert got.choices[0].message.content == text_of(reference, expected)
    assert got.choices[0].finish_reason == ("stop" if expected[-1] == 2 else "length")
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), len(expected))


def test_text_parts_and_developer_are_the_same_prompt(server: Running) -> None:
    def answer(messages: list[Any]) -> Any:
        made = server.client.chat.completions.create(
            model=server.model, messages=messages, temperature=0, max_completion_tokens=8
        )
        return made.choices[0].message.content, made.usage

    parts = [{"type": "text", "text": "Area man "}, {"type": "text", "text": "wins prize"}]
    same = [{"role": "developer", "content": "Satire?"}, {"role": "user", "content": parts}]
    assert answer(CHAT) == answer(same)


def test_batched_is_single_is_transformers(server: Running, reference: Any) -> None:
    """Different lengths, all at once and one by one: the same greedy text."""

    def ask(prompt: str) -> str:
        made = server.client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=40)
        return made.choices[0].text

    expected = [text_of(reference, generate(reference, reference[1](p).input_ids, 40)) for p in PROMPTS]
    assert [ask(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, PROMPTS * 3)) == expected * 3
    together = server.client.completions.create(model=server.model, prompt=PROMPTS, temperature=0, max_tokens=40)
    assert [choice.text for choice in together.choices] == expected


def test_chat_logprobs_are_a_direct_forward(server: Running, reference: Any) -> None:
    model, tokenizer = reference
    table = {tokenizer_bytes(tokenizer, i): i for i in range(len(tokenizer))}
    entries: list[Any] = []
    for seed in range(20):  # an answer without ids of the padded vocabulary, which have no bytes
        made = server.client.chat.completions.create(
            model=server.model, messages=CHAT, seed=seed, max_tokens=12, logprobs=True, top_logprobs=4
        )
        assert made.choices[0].logprobs is not None
        entries = made.choices[0].logprobs.content or []
        if len(entries) >= 8 and all(entry.bytes for entry in entries):
            break
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = [table[bytes(entry.bytes or [])] for entry in entries]
    with torch.no_grad():
        logp = model(torch.tensor([prompt + ids])).logits[0].float().log_softmax(-1)[len(prompt) - 1 :]
    assert len(entries) >= 8
    for at, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        assert entry.logprob == pytest.approx(float(logp[at, token]), abs=1e-5)
        best = logp[at].topk(4).values.tolist()
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(best, abs=1e-5)


def tokenizer_bytes(tokenizer: Any, token: int) -> bytes:
    """Bytes of a byte-level token by transformers' own table, as an independent check."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {char: byte for byte, char in bytes_to_unicode().items()}
    piece = tokenizer.convert_ids_to_tokens(token)
    if token < 3:
        return f"special {token}".encode()
    return bytes(back[char] for char in piece)


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt(server: Running, reference: Any, as_ids: bool) -> None:
    """lm-eval's multiple choice: echo, logprobs, and one token or none."""
    model, tokenizer = reference
    ids = tokenizer(PROMPTS[1]).input_ids
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    made = server.client.completions.create(
        model=server.model, prompt=ids if as_ids else PROMPTS[1], max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    choice = made.choices[0]
    assert choice.text == PROMPTS[1]
    assert choice.finish_reason == "length"
    scores: Any = choice.logprobs
    expected = [float(logp[at, token]) for at, token in enumerate(ids[1:])]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert "".join(scores.tokens) == PROMPTS[1]
    assert [PROMPTS[1][at:].startswith(word) for at, word in zip(scores.text_offset, scores.tokens, strict=True)]
    for at, (top, word) in enumerate(zip(scores.top_logprobs[1:], scores.tokens[1:], strict=True)):
        assert max(top.values()) == pytest.approx(float(logp[at].max()), abs=1e-5)
        assert word in top


def test_long_prompt_is_scored_in_chunks(server: Running, reference: Any) -> None:
    """A prompt longer than one chunk of the prefill."""
    model, _ = reference
    ids = [3 + (at * 7) % 300 for at in range(700)]
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    made = server.client.completions.create(
        model=server.model, prompt=ids, max_tokens=1, echo=True, logprobs=0, temperature=0
    )
    scores: Any = made.choices[0].logprobs
    expected = [float(logp[at, token]) for at, token in enumerate(ids[1:])]
    assert scores.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-5)
    assert scores.token_logprobs[-1] == pytest.approx(float(logp[-1].max()), abs=1e-5)


def test_seed_and_n(server: Running) -> None:
    def texts(**more: Any) -> list[str]:
        made = server.client.completions.create(
            model=server.model, prompt=PROMPTS[0], max_tokens=12, **{"n": 3, "seed": 11, **more}
        )
        assert [choice.index for choice in made.choices] == [0, 1, 2][: len(made.choices)]
        return [choice.text for choice in made.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    assert texts(n=1) == first[:1]
    assert texts(seed=12) != first
    assert texts(seed=None) != texts(seed=None)
    greedy = server.client.completions.create(model=server.model, prompt=PROMPTS[0], max_tokens=12, temperature=0)
    assert texts(top_p=0) == [greedy.choices[0].text] * 3


def test_seed_holds_among_neighbours(server: Running) -> None:
    def ask(seed: int) -> str:
        made = server.client.completions.create(
            model=server.model, prompt=PROMPTS[seed % 4], max_tokens=30, seed=seed, temperature=0.9, top_p=0.8
        )
        return made.choices[0].text

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


STREAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "n": 3, "logprobs": True, "top_logprobs": 2},
    {"seed": 5, "n": 2, "stop": ["e", "qu"]},
]


@pytest.mark.parametrize("options", STREAMS)
def test_chat_stream_is_the_whole(server: Running, options: dict[str, Any]) -> None:
    create: Callable[..., Any] = server.client.chat.completions.create
    asked = {"model": server.model, "messages": CHAT, "max_tokens": 40, **options}
    whole = create(**asked)
    n = options.get("n", 1)
    text, finish = [""] * n, [None] * n
    scores: list[list[Any]] = [[] for _ in range(n)]
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        assert chunk.usage is None
        assert finish[choice.index] is None
        if not text[choice.index] and choice.delta.role:
            assert choice.delta.role == "assistant"
        text[choice.index] += choice.delta.content or ""
        scores[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        finish[choice.index] = choice.finish_reason
    assert text == [choice.message.content for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    expected = [(choice.logprobs and choice.logprobs.content) or [] for choice in whole.choices]
    assert [[s.token for s in one] for one in scores] == [[s.token for s in one] for one in expected]
    for one, other in zip(scores, expected, strict=True):
        assert [s.logprob for s in one] == pytest.approx([s.logprob for s in other], abs=1e-5)


def test_completion_stream_is_the_whole(server: Running) -> None:
    asked: dict[str, Any] = {
        "model": server.model, "prompt": PROMPTS, "max_tokens": 20, "seed": 9, "n": 2, "echo": True, "logprobs": 1,
    }  # fmt: skip
    whole = server.client.completions.create(**asked)
    text, tokens = [""] * 8, [[] for _ in range(8)]  # type: ignore[var-annotated]
    offsets = [[] for _ in range(8)]  # type: ignore[var-annotated]
    for chunk in server.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.tokens or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert text == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs and choice.logprobs.text_offset for choice in whole.choices]


def test_stop_strings_cut_and_never_leak(server: Running) -> None:
    create: Callable[..., Any] = server.client.completions.create
    for seed in range(6):
        asked = {"model": server.model, "prompt": "The", "max_tokens": 60, "seed": seed}
        free = create(**asked).choices[0]
        middle = free.text[len(free.text) // 2 :][:3]
        if "�" in middle or not middle:
            continue
        for stop in (middle, [middle, "never in it"]):
            cut = create(**asked, stop=stop, logprobs=0).choices[0]
            assert cut.text == free.text[: free.text.index(middle)]
            assert cut.finish_reason == "stop"
            assert all(offset < len(cut.text) for offset in cut.logprobs.text_offset)
            seen = ""
            for chunk in create(**asked, stop=stop, stream=True):
                seen += chunk.choices[0].text
                assert cut.text.startswith(seen)
            assert seen == cut.text


def test_max_tokens_default_is_openais_or_the_context(server: Running) -> None:
    made = server.client.completions.create(model=server.model, prompt="The", temperature=0)
    assert made.usage is not None
    assert made.usage.completion_tokens <= 16
    assert made.choices[0].finish_reason == "length" if made.usage.completion_tokens == 16 else "stop"
