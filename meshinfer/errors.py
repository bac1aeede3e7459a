"""The one tree of errors: every failure a user can meet is one of these, with one clear line.

Third-party errors (OpenVINO, the operating system, HTTP) are converted where they are met, once.
Whether a caller may try again depends on the type, never on the text.
"""

from __future__ import annotations

import re


class MeshinferError(Exception):
    """Anything that went wrong in a way a person can act on; `str()` is one line."""

    exit_code = 1


class InputError(MeshinferError):
    """What the user gave cannot work as it is; nothing was written."""

    exit_code = 2


class SourceError(InputError):
    """A model source that is unknown, unreachable, unsupported or not a language model."""


class MissingExtraError(SourceError):
    """The source needs an optional part of meshinfer that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} needs the '{extra}' extra: pip install '.[{extra}]' in the checkout of meshinfer")


class CutError(SourceError):
    """The model's graph cannot be cut into layers; says where it stopped."""


class ModelNotFoundError(InputError):
    """No model of that name is in the store."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        have = ", ".join(sorted(known)) or "none yet"
        super().__init__(f"no model '{name}' here (have: {have}); add one with: meshinfer model add SOURCE")


class CorruptFileError(InputError):
    """A file whose bytes are not the ones its name promises."""

    def __init__(self, what: str, expected: str, actual: str, kind: str = "sha256", remedy: str = "") -> None:
        self.expected, self.actual = expected, actual
        todo = f"; {remedy}" if remedy else ""
        super().__init__(f"{what} is damaged: {kind} should be {expected}, is {actual}{todo}")


class NoSpaceError(InputError):
    """The disk has not enough free space for what is about to be written."""

    def __init__(self, folder: str, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"not enough space in {folder}: {needed_bytes / 1e6:.0f} MB needed, {free_bytes / 1e6:.0f} MB free"
        )


class RangeError(InputError):
    """A range of shards that the model does not have."""


class ContextLengthError(InputError):
    """A prompt longer than the model's context."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        super().__init__(f"the prompt has {prompt_tokens} tokens, the context of this model holds {context_tokens}")


class StepError(MeshinferError):
    """A step that contradicts what the stage holds; a fault of the scheduler, not of the user."""


class PagedUnsupportedError(MeshinferError):
    """A stage that OpenVINO's pass cannot turn into paged attention; the stateful back end can run it."""


class KvBudgetError(InputError):
    """The KV memory budget cannot hold what was asked for."""


class DeviceError(InputError):
    """A device that is missing or cannot run the model."""


class NotReadyError(MeshinferError):
    """The mesh cannot answer yet; the same request may be sent again after `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: int = 2) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(why)


class BusyError(NotReadyError):
    """More requests are waiting than this node keeps."""


class RequestLostError(MeshinferError):
    """A request that the mesh could not finish, although it was tried again."""


class UnknownModelError(InputError):
    """A request names a model that the mesh does not serve."""


class VerificationError(MeshinferError):
    """A shard set that does not reproduce its model."""


class SelfCheckError(MeshinferError):
    """A compiled stage that computes something else than its shards: a fault of this node's device or driver."""

    def __init__(self, what: str, difference: float, tolerance: float) -> None:
        self.difference, self.tolerance = difference, tolerance
        super().__init__(f"{what} computes something else: off by {difference:.3g}, {tolerance:g} is allowed")


def telling_line(error: BaseException) -> str:
    """The line of a library's message that says something: the last that is not a place in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not re.match(r"(Exception from|Check '.*' failed at) ", line)]
    return telling[-1] if telling else (lines[0] if lines else type(error).__name__)
