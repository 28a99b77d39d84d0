"""What clients may send: pydantic models of the OpenAI requests, and the errors that answer everything else.

Strict on purpose: a field that would be ignored is refused, so that nobody gets an answer to another question.
A field that this backend cannot honour is accepted at the value that asks for nothing (``NEUTRAL``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

MAX_STOPS = 4
MAX_N = 128

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "prompt_cache_key": (None,),
    "prompt_cache_retention": (None,),
    "moderation": (None,),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "parallel_tool_calls": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "best_of": (None, 1), "suffix": (None, "")}
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "name": (None,),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
    "prefix": (None, False),
}


class ApiError(Exception):
    """An answer that is not 200, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param, code=code)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _drop_neutral(data: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    """Refuse the fields that need another backend; drop them where they ask for nothing."""
    if not isinstance(data, dict):
        return data
    for name in data.keys() & neutral.keys():
        if not any(
            (data[name] == value and type(data[name]) is not bool) or data[name] is value for value in neutral[name]
        ):
            raise PydanticCustomError(
                "unsupported", "{name} is not supported by the transformers backend", {"name": name}
            )
    return {name: value for name, value in data.items() if name not in neutral}


def _content(value: Any) -> str:
    """Text, or text parts joined; parts of other types are refused by name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported",
                "part {at} has the type {kind}: only text parts are supported by the transformers backend",
                {"at": at, "kind": kind[:40]},
            )
        if kind is None or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("content", 'part {at} must be {{"type": "text", "text": "..."}}', {"at": at})
        texts.append(part["text"])
    return "".join(texts)


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise PydanticCustomError(
            "unsupported", "messages of the role {role} are not supported by the transformers backend", {"role": value}
        )
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "at most {most} stop strings", {"most": MAX_STOPS})
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One or several prompts, each a text or token ids."""
    many = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
    prompts: list[str | tuple[int, ...]] = []
    for prompt in many:
        if isinstance(prompt, str):
            prompts.append(prompt)
        elif isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
            prompts.append(tuple(prompt))
        else:
            raise PydanticCustomError("prompt", "must be a text, a list of texts, token ids, or a list of these lists")
    return tuple(prompts)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


class Message(_Strict):
    """One turn of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _drop_neutral(data, MESSAGE_NEUTRAL)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = None


class _Request(_Strict):
    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    user: str | None = None
    safety_identifier: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is allowed only with stream: true")
        return self


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """Tokens an answer may have; None: what the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _drop_neutral(data, CHAT_NEUTRAL)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is allowed only with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens contradict each other")
        return self


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=5)

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        return _drop_neutral(data, COMPLETION_NEUTRAL)


def parse[R: _Request](kind: type[R], body: bytes) -> R:
    """The request in a body. Raises ApiError (400) with every mistake."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    codes = {"unsupported": "unsupported_parameter", "extra_forbidden": "unknown_parameter"}
    codes["missing"] = "missing_required_parameter"
    problems = error.errors(include_url=False, include_input=False)
    sentences, params = [], []
    for problem in problems:
        named = (problem.get("ctx") or {}).get("name") if problem["type"] == "unsupported" else None
        place = ".".join([*map(_word, problem["loc"]), *([named] if named else [])])
        text = {"extra_forbidden": "no such field", "missing": "required"}.get(problem["type"], problem["msg"])
        sentences.append(f"{place}: {text}" if place else text)
        params.append(place or None)
    more = f" (and {len(sentences) - 5} more)" if len(sentences) > 5 else ""
    return invalid("; ".join(sentences[:5]) + more, params[0], codes.get(problems[0]["type"], "invalid_value"))


def _word(part: int | str) -> str:
    """A step of a place, bounded: keys come from the client."""
    return str(part)[:60]
