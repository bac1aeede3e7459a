"""What a client is told when something goes wrong: OpenAI's error object, and the status that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from meshinfer.errors import (
    BusyError,
    ContextLengthError,
    CorruptFileError,
    DeviceError,
    InputError,
    MeshinferError,
    ModelNotFoundError,
    NoSpaceError,
    NotReadyError,
    RequestLostError,
    SourceError,
    UnknownModelError,
)

INVALID, SERVER = "invalid_request_error", "server_error"


class RequestError(InputError):
    """A request that cannot be understood or is not supported; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param, self.code = param, code
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error as the client sees it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def object(self) -> Mapping[str, Any]:
        """OpenAI's error object; half characters of what the client sent are replaced, as JSON has none."""
        message = self.message.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.object)

    @property
    def headers(self) -> Mapping[str, str]:
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def problem_of(error: MeshinferError) -> Problem:
    """The problem that an error is to the client, by its type."""
    message = str(error)
    match error:
        case RequestError():
            return Problem(400, message, param=error.param, code=error.code)
        case UnknownModelError() | ModelNotFoundError():
            return Problem(404, message, param="model", code="model_not_found")
        case ContextLengthError():
            return Problem(400, message, code="context_length_exceeded")
        case BusyError():
            return Problem(429, message, "rate_limit_error", None, "rate_limit_exceeded", error.retry_after_s)
        case NotReadyError():
            return Problem(503, message, SERVER, None, "not_ready", error.retry_after_s)
        case RequestLostError():
            return Problem(500, message, SERVER, code="request_lost")
        case SourceError() | CorruptFileError() | NoSpaceError() | DeviceError():
            return Problem(500, message, SERVER)  # what this node has is at fault, not what the client sent
        case InputError():
            return Problem(400, message)
        case _:
            return Problem(500, message, SERVER)
