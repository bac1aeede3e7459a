"""From JSON to a job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.api.problems import RequestError
from meshinfer.api.schema import Call, chat_call, completion_call
from meshinfer.engine.sampling import Sampling

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> Call:
    return chat_call(json.dumps({"messages": HI} | fields).encode(), seed=7)


def completion(**fields: Any) -> Call:
    return completion_call(json.dumps(fields).encode(), seed=7)


def test_a_chat_with_nothing_but_messages() -> None:
    call = chat()
    assert call.job.messages == ({"role": "user", "content": "Hi"},)
    assert call.job.sampling == Sampling(temperature=1.0, seed=7)
    assert (call.job.model, call.job.prompt, call.job.max_tokens, call.job.stop) == (None, None, None, ())
    assert (call.stream, call.include_usage) == (False, False)


def test_a_chat_with_everything() -> None:
    call = chat(
        model="m",
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=11,
        max_tokens=5,
        max_completion_tokens=6,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        user="somebody",
        metadata={"unknown": 1},
    )
    assert call.job.sampling == Sampling(temperature=0, top_p=0.5, top_k=3, seed=11)
    assert (call.job.model, call.job.max_tokens, call.job.stop) == ("m", 6, ("a", "b"))
    assert (call.stream, call.include_usage) == (True, True)


def test_what_asks_for_nothing_is_no_error() -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "seed", "max_tokens", "stop", "stream", "stream_options", "tools"))
    assert chat(**nothing) == chat()
    assert chat(n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, logprobs=False) == chat()
    assert chat(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, modalities=["text"]) == chat()
    assert completion(prompt="a", best_of=1, echo=False, suffix="") == completion(prompt="a")


def test_messages_of_every_kind() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts, "name": "anna"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]
    assert chat(messages=messages).job.messages == (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 1}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "wizard", "content": "Hi"}]}, "messages[1].role"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0]"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 2}, "n"),
        ({"n": "1"}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": "x" * 501}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1 << 31]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 2}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([0], (0,)), ("", "")],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    job = completion(prompt=prompt).job
    assert (job.prompt, job.messages) == (expected, None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "not valid JSON"),
        (b'{"x":' + b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"messages"', "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        chat_call(body, 0)
    assert caught.value.param is None


def test_an_unsupported_field_has_a_code() -> None:
    with pytest.raises(RequestError, match="n: only 1 is supported") as caught:
        chat(n=3)
    assert caught.value.code == "unsupported_parameter"


_FIELDS = """
model messages temperature top_p top_k seed max_tokens max_completion_tokens stop stream stream_options n tools prompt
role content type text include_usage response_format logit_bias logprobs
"""
KEYS = st.sampled_from(_FIELDS.split()) | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)  # fmt: skip
MESSAGES = st.lists(st.fixed_dictionaries({"role": VALUES, "content": VALUES}), max_size=2)
BODIES = (
    st.dictionaries(KEYS, VALUES, max_size=5)
    | st.builds(lambda one, two: {"messages": one, "prompt": "x"} | two, MESSAGES, st.dictionaries(KEYS, VALUES))
).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30)


@given(BODIES)
def test_any_body_is_a_job_or_a_request_error(body: bytes) -> None:
    for read in (chat_call, completion_call):
        try:
            call = read(body, 7)
        except RequestError as error:
            assert str(error).startswith(error.param or "the body is not ")
        else:
            assert (call.job.messages is None) != (call.job.prompt is None)
