"""What answers look like."""

from __future__ import annotations

import json
from typing import Any

from meshinfer.api.problems import Problem
from meshinfer.api.render import DONE, Form, Usage, failure, models, readiness, trace_header
from meshinfer.api.service import ModelCard, Readiness

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def parsed(data: bytes) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: ")) for line in data.decode().split("\n\n") if line.startswith("data: {")
    ]


def test_a_whole_chat() -> None:
    whole = json.loads(Form("chat", "7", 11, "m").whole("Hi", "stop", Usage(3, 2)))
    assert whole == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 11,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_a_whole_completion() -> None:
    whole = json.loads(Form("text", "7", 11, "m").whole("Hi", "length", Usage(3, 2)))
    assert (whole["id"], whole["object"], whole["usage"]) == ("cmpl-7", "text_completion", USAGE)
    assert whole["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}]


def test_a_streamed_chat() -> None:
    form = Form("chat", "7", 11, "m")
    opening, text, end = parsed(form.opening() + form.text("Hi\n\n") + form.closing("stop", Usage(3, 2)))
    assert opening["object"] == "chat.completion.chunk"
    assert "usage" not in opening
    assert [chunk["choices"][0] for chunk in (opening, text, end)] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "Hi\n\n"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"},
    ]
    assert form.closing("stop", Usage(3, 2)).endswith(DONE)


def test_a_streamed_completion() -> None:
    form = Form("text", "7", 11, "m")
    text, end = parsed(form.opening() + form.text("Hi") + form.closing("length", Usage(3, 2)))
    assert text["object"] == "text_completion"
    assert (text["choices"][0]["text"], end["choices"][0]["text"]) == ("Hi", "")
    assert end["choices"][0]["finish_reason"] == "length"


def test_usage_comes_last_and_only_if_asked_for() -> None:
    form = Form("chat", "7", 11, "m", include_usage=True)
    text, end, usage = parsed(form.text("Hi") + form.closing("stop", Usage(3, 2)))
    assert (text["usage"], end["usage"]) == (None, None)
    assert (usage["choices"], usage["usage"]) == ([], USAGE)


def test_a_failure_is_not_done() -> None:
    data = failure(Problem(500, "lost", "server_error"))
    assert parsed(data)[0]["error"]["message"] == "lost"
    assert DONE not in data


def test_models() -> None:
    assert models([ModelCard("m", 11, 8192)]) == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 11, "owned_by": "meshinfer", "context_length": 8192}],
    }


def test_readiness() -> None:
    assert readiness(Readiness(True, "", 0)) == (200, {"ready": True}, {})
    assert readiness(Readiness(False, "fetching shards 40 %", 3)) == (
        503,
        {"ready": False, "stage": "fetching shards 40 %"},
        {"Retry-After": "3"},
    )


def test_a_trace_fits_into_a_header() -> None:
    assert trace_header(()) == {}
    assert trace_header(("anna:0-9", "bü\r\nX: y, z:9-17")) == {
        "X-Meshinfer-Trace": "anna:0-9, b%C3%BC%0D%0AX:%20y%2C%20z:9-17"
    }
