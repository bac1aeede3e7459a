"""Requests of OpenAI's API: from JSON to a checked job.

Unknown fields are ignored. Fields that are known and would change the answer in a way that is not supported are
refused: nobody should take an answer for something it is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from meshinfer.api.problems import RequestError
from meshinfer.api.service import Job
from meshinfer.engine.sampling import Sampling

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 500
_MAX_SEED, _MAX_TOKEN_ID = (1 << 64) - 1, (1 << 31) - 1

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles of messages, and what templates call them."""

_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that are not supported, and the values that ask for nothing."""

_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Call:
    """A job, and how its answer is to be sent."""

    job: Job
    stream: bool
    include_usage: bool


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What both kinds of request have; null is as good as absent."""

    model: str | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _Whole | None = None
    seed: _Whole | None = None
    max_tokens: _Positive | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Chat(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: _Positive | None = None
    top_logprobs: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None


class _Completion(_Body, kw_only=True):
    prompt: str | list[Any]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


_B = TypeVar("_B", bound=_Body)


def chat_call(body: bytes, seed: int) -> Call:
    """A request to `/v1/chat/completions`; `seed` is for one that brings none. Raises RequestError."""
    chat = _decode(body, _Chat)
    if not chat.messages:
        raise RequestError("messages: there is none", "messages")
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(chat.messages))
    return _call(chat, messages, None, chat.max_completion_tokens or chat.max_tokens, seed)


def completion_call(body: bytes, seed: int) -> Call:
    """A request to `/v1/completions`; `seed` is for one that brings none. Raises RequestError."""
    completion = _decode(body, _Completion)
    return _call(completion, None, _prompt(completion.prompt), completion.max_tokens, seed)


def _call(
    body: _Body,
    messages: tuple[Mapping[str, Any], ...] | None,
    prompt: str | tuple[int, ...] | None,
    max_tokens: int | None,
    seed: int,
) -> Call:
    _refuse_unsupported(body)
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise RequestError("stream_options: only for an answer with stream: true", "stream_options")
    job = Job(body.model, messages, prompt, _sampling(body, seed), max_tokens, _stops(body.stop))
    return Call(job, stream, options is not None and bool(options.include_usage))


def _decode(body: bytes, kind: type[_B]) -> _B:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _explained(text: str) -> RequestError:
    """msgspec names the field in the text alone: "Expected `int`, got `str` - at `$.messages[0].role`"."""
    where = re.search(r" - at `\$\.?([^`]*)`$", text)
    what, field = (text[: where.start()], where[1]) if where else (text, "")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        what, field = "this field is missing", f"{field}.{missing[1]}".lstrip(".")
    if not field:
        return RequestError(f"the body is not a JSON object: {what}")
    return RequestError(f"{field}: {what}", field)


def _refuse_unsupported(body: _Body) -> None:
    for name, harmless in _NO_EFFECT.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            why = "only 1 is supported" if 1 in harmless else "not supported yet"
            raise RequestError(f"{name}: {why}", name, "unsupported_parameter")


def _sampling(body: _Body, seed: int) -> Sampling:
    if body.seed is not None and body.seed > _MAX_SEED:
        raise RequestError(f"seed: at most {_MAX_SEED}", "seed")
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed if body.seed is None else body.seed,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise RequestError(f"stop: each string has 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def _message(message: _Message, where: str) -> Mapping[str, Any]:
    role = _ROLES.get(message.role)
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise RequestError(f"{where}: tools are not supported yet", where, "unsupported_parameter")
    if role is None:
        raise RequestError(f"{where}.role: one of {', '.join(_ROLES)}, not '{message.role}'", f"{where}.role")
    return {"role": role, "content": _content(message.content, role, f"{where}.content")}


def _content(content: str | list[_Part] | None, role: str, where: str) -> str:
    """The text of a message, its parts as lines; an assistant may have said nothing."""
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise RequestError(f"{where}: a message of this role has a text, not null", where)
    if not content:
        raise RequestError(f"{where}: there is no part in it", where)
    return "\n".join(_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text(part: _Part, where: str) -> str:
    if part.type != "text":
        raise RequestError(f"{where}: parts of type '{part.type}' are not supported, only text", where)
    if part.text is None:
        raise RequestError(f"{where}.text: a part of type text has one", f"{where}.text")
    return part.text


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """A text or token ids, alone or as the only one of a list."""
    match prompt:
        case str():
            return prompt
        case [str() as text]:
            return text
        case [[*ids]] | [*ids] if ids and all(_is_token(number) for number in ids):
            return tuple(ids)
    raise RequestError("prompt: one text, or one list of token ids; several prompts are not supported", "prompt")


def _is_token(number: Any) -> bool:
    return type(number) is int and 0 <= number <= _MAX_TOKEN_ID
