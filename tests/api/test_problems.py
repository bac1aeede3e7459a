"""Which error has which status."""

from __future__ import annotations

import json

import pytest

from meshinfer.api.problems import Problem, RequestError, problem_of
from meshinfer.errors import (
    BusyError,
    ContextLengthError,
    CorruptFileError,
    DeviceError,
    InputError,
    KvBudgetError,
    MeshinferError,
    ModelNotFoundError,
    NoSpaceError,
    NotReadyError,
    RequestLostError,
    SourceError,
    UnknownModelError,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("n: no", "n", "c"), 400, "c"),
        (InputError("no"), 400, None),
        (KvBudgetError("no"), 400, None),
        (ContextLengthError(9, 8), 400, "context_length_exceeded"),
        (UnknownModelError("no"), 404, "model_not_found"),
        (ModelNotFoundError("m", []), 404, "model_not_found"),
        (BusyError("no", 5), 429, "rate_limit_exceeded"),
        (NotReadyError("no", 5), 503, "not_ready"),
        (RequestLostError("no"), 500, "request_lost"),
        (SourceError("no"), 500, None),
        (CorruptFileError("f", "a", "b"), 500, None),
        (NoSpaceError("f", 1, 0), 500, None),
        (DeviceError("no"), 500, None),
        (MeshinferError("no"), 500, None),
    ],
)
def test_status_by_type(error: MeshinferError, status: int, code: str | None) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code, problem.message) == (status, code, str(error))
    assert problem.headers.get("Retry-After") == ("5" if isinstance(error, NotReadyError) else None)
    assert (problem.type == "server_error") == (status >= 500)


def test_the_object_is_openais() -> None:
    assert json.loads(problem_of(RequestError("n: no", "n", "c")).body) == {
        "error": {"message": "n: no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }


def test_half_characters_do_no_harm() -> None:
    assert json.loads(Problem(404, "nothing at \udcff").body)["error"]["message"] == "nothing at ?"
